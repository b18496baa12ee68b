//! The data thread's end: turns over the QPs, readiness, and the completion queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::completions::CompletionQueue;
use super::domain::{KeyCopy, ProtectionDomain};
use super::queue_pair::{Connection, QueuePair, State};
use super::receive::STAGING;
use crate::device::{AcceptParams, DeviceCaps, PollerCounters};
use crate::error::{FabricError, PostError, Result};
use crate::work::{Completion, QpIndex, RecvWr, SendWr};

/// Up to this many QPs are asked directly, which is one call each and finds the data at once; beyond it
/// epoll tells which to ask.
const ASKED_DIRECTLY: usize = 2;
/// Receive calls per QP and turn, so that one busy peer cannot hold up the others.
const CALLS_PER_TURN: usize = 16;
/// Empty polls before an acknowledgement goes out in a frame of its own. The first empty poll ends the
/// turn in which the request came; what the caller posts then takes the acknowledgement along.
const PATIENCE: u8 = 2;
/// Names the eventfd among the QPs in epoll's data.
const KICK: u64 = u64::MAX;

/// Control's end of a [`Poller`].
#[derive(Clone, Debug)]
pub struct PollerHandle {
    pd: ProtectionDomain,
    id: u64,
}

impl PollerHandle {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    pub(super) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.pd.same_as(pd)
    }
}

/// A completion queue in software, and the engine of the QPs on it.
#[derive(Debug)]
pub struct Poller {
    pd: ProtectionDomain,
    id: u64,
    keys: Arc<KeyCopy>,
    epoll: Epoll,
    // Readable through epoll when something completed without a socket's doing.
    kick: Arc<EventFd>,
    qps: Vec<Option<Box<QueuePair>>>,
    live: Vec<u16>,
    events: Vec<EpollEvent>,
    staging: Box<[u8]>,
    cq: CompletionQueue,
    cq_entries: u64,
    cq_promised: u64,
    counters: PollerCounters,
    armed: bool,
    // The last turn drained every link, so the poll that only looks whether it is over need not ask again.
    drained: bool,
    skip: bool,
    // Calls to epoll, and to the links of QPs that are gone.
    calls: u64,
}

fn call(call: &'static str) -> impl Fn(nix::Error) -> FabricError {
    move |errno| FabricError::Call { call, source: errno.into() }
}

impl Poller {
    pub(super) fn new(
        pd: ProtectionDomain,
        keys: Arc<KeyCopy>,
        cq_entries: u32,
    ) -> Result<(Self, PollerHandle)> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(call("epoll_create1"))?;
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let kick = EventFd::from_value_and_flags(0, flags).map_err(call("eventfd"))?;
        epoll
            .add(kick.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, KICK))
            .map_err(call("epoll_ctl"))?;
        let handle = PollerHandle { pd: pd.clone(), id };
        let poller = Self {
            pd,
            id,
            keys,
            epoll,
            kick: Arc::new(kick),
            qps: Vec::new(),
            live: Vec::new(),
            events: Vec::new(),
            staging: vec![0; STAGING].into_boxed_slice(),
            cq: CompletionQueue::new(cq_entries as usize),
            cq_entries: cq_entries.into(),
            cq_promised: 0,
            counters: PollerCounters::default(),
            armed: false,
            drained: false,
            skip: false,
            calls: 0,
        };
        Ok((poller, handle))
    }

    /// Calls into links and epoll so far; over TCP each is one system call.
    #[must_use]
    pub fn link_calls(&self) -> u64 {
        self.qps.iter().flatten().map(|pair| pair.calls).sum::<u64>() + self.calls
    }

    fn known(&mut self, qp: QpIndex) -> std::result::Result<&mut QueuePair, PostError> {
        match self.qps.get_mut(usize::from(qp.0)) {
            Some(Some(pair)) => Ok(pair),
            _ => Err(PostError { posted: 0, source: io::Error::from_raw_os_error(libc::EINVAL) }),
        }
    }

    /// One turn of the engine: receives until drained or `room` completions are there, and sends what came
    /// of it.
    fn turn(&mut self, room: usize) -> Result<()> {
        let Self { keys, qps, live, events, staging, cq, epoll, calls, .. } = self;
        let mut pairs = live.iter().filter_map(|i| qps.get(usize::from(*i))?.as_deref());
        let ask_epoll = pairs.clone().any(|p| p.link.fd().is_some())
            && (live.len() > ASKED_DIRECTLY || pairs.any(|p| p.outbound.blocked));
        let keys = keys.read();
        let mut drained = true;
        let mut visit = |index: u16, readable: bool, writable: bool| {
            let Some(Some(pair)) = qps.get_mut(usize::from(index)) else { return };
            if writable {
                pair.outbound.blocked = false;
            }
            let mut more = readable;
            for _ in 0..CALLS_PER_TURN {
                if !more || cq.len() >= room {
                    break;
                }
                more = pair.receive(&keys, cq, staging);
            }
            drained &= !more;
            if pair.wants_to_send() {
                pair.pump(&keys, cq);
            }
            watch(epoll, pair);
        };
        if ask_epoll {
            *calls += 1;
            let ready = match epoll.wait(events, EpollTimeout::ZERO) {
                Ok(ready) => ready,
                Err(nix::Error::EINTR) => 0,
                Err(errno) => return Err(call("epoll_wait")(errno)),
            };
            for event in &events[..ready] {
                if let Ok(index) = u16::try_from(event.data()) {
                    let flags = event.events();
                    visit(
                        index,
                        flags != EpollFlags::EPOLLOUT,
                        flags.contains(EpollFlags::EPOLLOUT),
                    );
                }
            }
        } else {
            // Direct asking happens only while no socket is full; a memory link costs nothing to ask.
            for index in &*live {
                visit(*index, true, true);
            }
        }
        self.drained = drained;
        Ok(())
    }

    /// Lets acknowledgements age, and sends those that are old enough, or all.
    fn acknowledge(&mut self, all: bool) {
        let Self { keys, qps, live, cq, epoll, .. } = self;
        for index in &*live {
            let Some(Some(pair)) = qps.get_mut(usize::from(*index)) else { continue };
            let Some(age) = &mut pair.outbound.ack_due else { continue };
            *age = age.saturating_add(1);
            if *age >= PATIENCE || all {
                pair.outbound.ack_now = true;
                pair.pump(&keys.read(), cq);
                watch(epoll, pair);
            }
        }
    }

    /// What every change from outside of a turn ends with.
    fn after(&mut self, qp: QpIndex) {
        self.skip = false;
        if let Some(Some(pair)) = self.qps.get_mut(usize::from(qp.0)) {
            watch(&self.epoll, pair);
        }
        if self.armed && !self.cq.is_empty() {
            // EAGAIN means that it is readable already.
            let _ = self.kick.write(1);
        }
    }
}

/// Brings epoll's view of a QP up to date. It fails only for want of kernel memory, and then the next
/// change tries again.
fn watch(epoll: &Epoll, pair: &mut QueuePair) {
    let wanted = (pair.state != State::Dead).then_some(pair.outbound.blocked);
    if wanted == pair.interest {
        return;
    }
    let Some(fd) = pair.link.fd() else { return };
    // SAFETY: the descriptor belongs to the link, which outlives this borrow.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut flags = EpollFlags::EPOLLIN;
    if wanted == Some(true) {
        flags |= EpollFlags::EPOLLOUT;
    }
    let mut event = EpollEvent::new(flags, pair.index.0.into());
    let done = match (pair.interest, wanted) {
        (None, _) => epoll.add(fd, event),
        (Some(_), Some(_)) => epoll.modify(fd, &mut event),
        (Some(_), None) => epoll.delete(fd),
    };
    if done.is_ok() {
        pair.interest = wanted;
    }
}

impl crate::device::Poller for Poller {
    fn caps(&self) -> &DeviceCaps {
        self.pd.device().caps()
    }

    fn attach(&mut self, connection: crate::device::Connection) -> Result<QpIndex> {
        #[cfg(not(feature = "verbs"))]
        let crate::device::Connection::Soft(Connection(mut pair)) = connection;
        #[cfg(feature = "verbs")]
        let crate::device::Connection::Soft(Connection(mut pair)) = connection else {
            return Err(FabricError::Mixed("a verbs connection and a soft poller"));
        };
        pair.check_made_for(self.id)?;
        let wrs = u64::from(pair.limits.send_wrs) + u64::from(pair.limits.recv_wrs);
        self.pd.device().within("CQ entries", self.cq_entries, self.cq_promised + wrs)?;
        let at = match self.qps.iter().position(Option::is_none) {
            Some(at) => at,
            None => {
                self.pd.device().within(
                    "QPs of a poller",
                    u16::MAX.into(),
                    self.qps.len() as u64 + 1,
                )?;
                self.qps.push(None);
                self.qps.len() - 1
            }
        };
        let index = u16::try_from(at).unwrap_or(u16::MAX);
        pair.index = QpIndex(index);
        pair.link.wake_by(&self.kick);
        watch(&self.epoll, &mut pair);
        if pair.interest.is_none() && pair.link.fd().is_some() && pair.state != State::Dead {
            return Err(FabricError::last_os("epoll_ctl"));
        }
        self.cq_promised += wrs;
        self.qps[at] = Some(pair);
        self.live.push(index);
        self.events.resize(self.live.len() + 1, EpollEvent::empty());
        self.skip = false;
        Ok(QpIndex(index))
    }

    fn accept(&mut self, qp: QpIndex, params: &AcceptParams) -> Result<()> {
        let Some(Some(pair)) = self.qps.get_mut(usize::from(qp.0)) else {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(FabricError::Call { call: "accept", source });
        };
        let accepted = pair.accept(params, &mut self.cq);
        self.after(qp);
        accepted
    }

    fn post_recv(&mut self, qp: QpIndex, wrs: &[RecvWr]) -> std::result::Result<(), PostError> {
        if wrs.is_empty() {
            return Ok(());
        }
        let mut counters = self.counters;
        let pair = self.known(qp)?;
        let taken = pair.take_recvs(wrs, &mut counters);
        self.counters = counters;
        if let Some(Some(pair)) = self.qps.get_mut(usize::from(qp.0))
            && pair.is_broken()
        {
            pair.flush_posted(&mut self.cq);
            self.after(qp);
        }
        taken
    }

    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> std::result::Result<(), PostError> {
        if wrs.is_empty() {
            return Ok(());
        }
        let Some(Some(pair)) = self.qps.get_mut(usize::from(qp.0)) else {
            return Err(PostError {
                posted: 0,
                source: io::Error::from_raw_os_error(libc::EINVAL),
            });
        };
        let taken = pair.take_sends(wrs, &mut self.counters);
        if pair.is_broken() {
            pair.flush_posted(&mut self.cq);
        } else if !pair.outbound.blocked {
            pair.pump(&self.keys.read(), &mut self.cq);
        }
        self.after(qp);
        taken
    }

    fn poll(&mut self, out: &mut [Completion]) -> Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        if self.cq.is_empty() && !std::mem::take(&mut self.skip) {
            self.turn(out.len())?;
        }
        let mut count = 0;
        for place in out.iter_mut() {
            let Some((completion, returns)) = self.cq.pop() else { break };
            *place = completion;
            count += 1;
            if let Some(Some(pair)) = self.qps.get_mut(usize::from(completion.qp.0)) {
                pair.reaped(returns);
            }
        }
        self.counters.completions += count as u64;
        if count == 0 {
            self.acknowledge(false);
        } else {
            self.armed = false;
            self.skip = self.drained && self.cq.is_empty();
        }
        Ok(count)
    }

    fn arm(&mut self) -> Result<()> {
        self.acknowledge(true);
        self.armed = true;
        // Sockets are level-triggered in epoll: what comes from now on keeps the event readable, so the
        // poll that follows need not ask them. Completions that wait are returned by it all the same.
        self.skip = self.drained;
        if !self.cq.is_empty() {
            let _ = self.kick.write(1);
        }
        Ok(())
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    fn clear_event(&mut self) {
        self.armed = false;
        self.skip = false;
        // EAGAIN means that there was none.
        let _ = self.kick.read();
    }

    fn fail(&mut self, qp: QpIndex) {
        if let Some(Some(pair)) = self.qps.get_mut(usize::from(qp.0)) {
            pair.fail(&mut self.cq);
        }
        self.after(qp);
    }

    fn detach(&mut self, qp: QpIndex) -> Option<crate::device::Connection> {
        let mut pair = self.qps.get_mut(usize::from(qp.0))?.take()?;
        self.live.retain(|i| *i != qp.0);
        self.cq_promised -= u64::from(pair.limits.send_wrs) + u64::from(pair.limits.recv_wrs);
        self.calls += std::mem::take(&mut pair.calls);
        if let (Some(_), Some(fd)) = (pair.interest.take(), pair.link.fd()) {
            // SAFETY: the descriptor belongs to the link, which is still here.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            // It can only fail when it is not there.
            let _ = self.epoll.delete(fd);
        }
        // What it left unfinished completes never, also when it is attached again.
        // One that was refusing goes on to say so until it is dropped, and so does one never accepted.
        if !matches!(pair.state, State::Prepared { .. } | State::Draining) {
            pair.fail(&mut self.cq);
        }
        self.cq.purge(qp);
        Some(crate::device::Connection::Soft(Connection(pair)))
    }

    fn counters(&self) -> PollerCounters {
        self.counters
    }
}
