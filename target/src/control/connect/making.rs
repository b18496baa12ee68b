//! [`Making`]: granted connections, while their QP and memory are being made.
//!
//! A card takes milliseconds to make a QP and to register memory. So threads make them, and control
//! answers other hosts meanwhile.
//!
//! Invariant: an end of connections also ends those that are being made. Their poll group does not
//! know them yet, so it would otherwise serve them later as if nothing had happened.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rblk_fabric::{AcceptParams, Connection, Incoming};
use rblk_protocol::{Epoch, HelloRequest};
use tokio::sync::mpsc;

use super::admission::{self, Granted};
use crate::control::connect::cq_shares::CqPlace;
use crate::control::core::Admitted;
use crate::data::connection::ConnectionParams;
use crate::volume::ids::{AdmissionId, SessionIndex};

/// Threads at most. The kernel and the firmware of a card make few QPs at once.
const THREADS_MAX: usize = 8;

/// The facts about a connection that is being made.
#[derive(Clone, Debug)]
pub(in crate::control) struct PendingConnection {
    /// The grant.
    pub(in crate::control) admitted: Admitted,
    /// The request.
    pub(in crate::control) asked: HelloRequest,
    /// Its CQ.
    pub(in crate::control) cq: CqPlace,
    /// The peer's address.
    pub(in crate::control) peer: String,
    /// The name of its device.
    pub(in crate::control) device: String,
    /// No end of it was ordered. Its thread looks at this before it begins.
    pub(in crate::control) is_wanted: Arc<AtomicBool>,
}

/// A connection as its poll group needs it, or the reason for its failure.
type Prepared = Result<(Connection, Box<ConnectionParams>, AcceptParams), String>;

/// The end of the making of a connection.
#[derive(Debug)]
pub(in crate::control) struct Made {
    /// Its name.
    pub(in crate::control) id: AdmissionId,
    /// The connection, or the failure.
    pub(in crate::control) result: Prepared,
}

#[derive(Debug)]
struct MakeJob {
    incoming: Incoming,
    asked: HelloRequest,
    granted: Granted,
    progress_max: Duration,
    is_wanted: Arc<AtomicBool>,
}

impl MakeJob {
    /// A panic is a bug, and is printed. It must not leave the connection under way for ever.
    fn run(self) -> Made {
        let Self { incoming, asked, granted, progress_max, is_wanted } = self;
        let id = granted.admitted.id;
        if !is_wanted.load(Ordering::Relaxed) {
            return Made { id, result: Err("it ended before it was made".to_owned()) };
        }
        // A panic drops all that was moved in, so no caller sees it half made.
        let make = AssertUnwindSafe(|| admission::prepare(incoming, &asked, granted, progress_max));
        let result = catch_unwind(make).unwrap_or_else(|_| Err("its making panicked".to_owned()));
        let boxed = |(connection, params, accept)| (connection, Box::new(params), accept);
        Made { id, result: result.map(boxed) }
    }
}

/// The connections, and the threads that make them. The threads end with it.
#[derive(Debug)]
pub(in crate::control) struct Making {
    under_way: Vec<PendingConnection>,
    jobs: Sender<MakeJob>,
    queue: Arc<Mutex<Receiver<MakeJob>>>,
    threads: usize,
    made: mpsc::UnboundedSender<Made>,
}

impl Making {
    /// No connections, and the receiver of the ends.
    pub(in crate::control) fn new() -> (Self, mpsc::UnboundedReceiver<Made>) {
        let (made, ends) = mpsc::unbounded_channel();
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        (Self { under_way: Vec::new(), jobs, queue, threads: 0, made }, ends)
    }

    /// Begins to make a granted connection.
    pub(in crate::control) fn begin(
        &mut self,
        incoming: Incoming,
        asked: &HelloRequest,
        granted: Granted,
        progress_max: Duration,
    ) {
        let is_wanted = Arc::new(AtomicBool::new(true));
        self.under_way.push(PendingConnection {
            admitted: granted.admitted.clone(),
            asked: *asked,
            cq: CqPlace { device: granted.place, group: granted.group },
            peer: incoming.peer(),
            device: incoming.device().caps().name.clone(),
            is_wanted: Arc::clone(&is_wanted),
        });
        let job = MakeJob { incoming, asked: *asked, granted, progress_max, is_wanted };
        if self.under_way.len() > self.threads && self.threads < THREADS_MAX {
            self.start_thread();
        }
        if self.threads == 0 {
            let _ = self.made.send(job.run());
            return;
        }
        // The receiver is in `self`, so this cannot fail.
        let _ = self.jobs.send(job);
    }

    fn start_thread(&mut self) {
        let (queue, made) = (Arc::clone(&self.queue), self.made.clone());
        let work = move || {
            loop {
                // One thread waits in the queue, and the others for that one.
                let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(job) = job else { return };
                // An error means that the target has ended: the connection is destroyed here.
                let _ = made.send(job.run());
            }
        };
        match thread::Builder::new().name("rblk-connect".into()).spawn(work) {
            Ok(_) => self.threads += 1,
            Err(error) => tracing::warn!(%error, "no thread more to make connections"),
        }
    }

    /// The making of a connection has ended.
    pub(in crate::control) fn end(&mut self, id: AdmissionId) -> Option<PendingConnection> {
        let at = self.under_way.iter().position(|way| way.admitted.id == id)?;
        Some(self.under_way.swap_remove(at))
    }

    /// Ends the connections of some epochs of a session.
    pub(in crate::control) fn end_connections(
        &mut self,
        session: SessionIndex,
        ends: impl Fn(Epoch) -> bool,
    ) {
        self.end_where(|way| way.admitted.session == session && ends(way.admitted.epoch));
    }

    /// Ends a connection. Returns whether it was being made.
    pub(in crate::control) fn end_one(&mut self, id: AdmissionId) -> bool {
        let is_it = |way: &PendingConnection| way.admitted.id == id;
        self.end_where(is_it);
        self.under_way.iter().any(is_it)
    }

    /// Ends all connections by a CQ.
    pub(in crate::control) fn end_by(&mut self, cq: CqPlace) {
        self.end_where(|way| way.cq == cq);
    }

    /// Ends all connections.
    pub(in crate::control) fn end_all(&mut self) {
        self.end_where(|_| true);
    }

    fn end_where(&self, ends: impl Fn(&PendingConnection) -> bool) {
        let ended = self.under_way.iter().filter(|way| ends(way));
        ended.for_each(|way| way.is_wanted.store(false, Ordering::Relaxed));
    }
}
