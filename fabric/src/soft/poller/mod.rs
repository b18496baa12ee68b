//! [`Poller`]: the data thread's end: turns over the QPs, and the completion queue.
//!
//! `schedule` says which links a turn asks, `wake` holds the events that wake the thread.

mod owner_shares;
mod qp_set;
mod schedule;
mod visit;
mod wake;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::epoll::{EpollEvent, EpollFlags};
use rblk_protocol::width::{narrow, wide, wide64};

use super::domain::{PollerHandle, ProtectionDomain};
use super::keys::KeyCopy;
use super::queue_pair::Connection;
use super::queue_pair::completions::SoftCq;
use super::wire::gathered::SEND_BYTES;
use crate::caps::DeviceCaps;
use crate::connect::AcceptParams;
use crate::data_path::DataPath;
use crate::error::{FabricError, PostError, Result};
use crate::work::poller_counters::PollerCounters;
use crate::work::{Completion, Owner, QpIndex, Recvs, SendWr};
use owner_shares::Shares;
use qp_set::{AttachedPair, QpSet};
use schedule::{LinkAsk, QUIET, Schedule};
use visit::{Visits, end_visit, pump};
use wake::Wake;

/// Size of the staging buffer: one call receives all that a socket holds for a deep queue of small
/// messages. Pages that were never filled take no memory.
const STAGING: usize = 128 << 10;
/// Empty polls before an acknowledgement goes out in a frame of its own. The first empty poll ends
/// the turn in which the request came; the next frame that the caller posts carries the
/// acknowledgement.
const ACK_POLLS: u8 = 2;

/// Memory that the turns of a poller use again and again.
#[derive(Debug)]
struct TurnBuffers {
    // Bytes received that have no place of their own.
    staging: Box<[u8]>,
    // Headers and short payloads to be sent.
    send_bytes: Box<[u8]>,
    // The buffer of epoll_wait: one entry more than there are QPs.
    events: Vec<EpollEvent>,
}

/// A completion queue in software, and the engine of the QPs on it.
#[derive(Debug)]
pub struct Poller {
    handle: PollerHandle,
    keys: Arc<KeyCopy>,
    wake: Wake,
    schedule: Schedule,
    shares: Shares,
    qps: QpSet,
    // QPs that may owe their peer an acknowledgement.
    owing: Vec<QpIndex>,
    buffers: TurnBuffers,
    cq: SoftCq,
    counters: PollerCounters,
}

impl Poller {
    /// A completion queue of `cq_entries` in `pd`, and the handle for control.
    ///
    /// # Errors
    /// [`FabricError::Limit`], or no epoll instance could be made.
    pub(crate) fn create(pd: &ProtectionDomain, cq_entries: u32) -> Result<(Self, PollerHandle)> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let caps = pd.device().caps();
        pd.device().within("CQ entries", caps.max_cq_entries.into(), cq_entries.into())?;
        let mut cq = SoftCq::new(wide(cq_entries));
        if caps.touches_until_destroyed {
            cq.flush_late(pd.device().salt());
        }
        let handle = PollerHandle::new(pd.clone(), IDS.fetch_add(1, Ordering::Relaxed));
        let poller = Self {
            handle: handle.clone(),
            keys: pd.key_copy(),
            wake: Wake::new()?,
            schedule: Schedule::default(),
            shares: Shares::default(),
            qps: QpSet::default(),
            owing: Vec::new(),
            buffers: TurnBuffers {
                staging: vec![0; STAGING].into_boxed_slice(),
                send_bytes: vec![0; SEND_BYTES].into_boxed_slice(),
                events: Vec::new(),
            },
            cq,
            counters: PollerCounters::default(),
        };
        Ok((poller, handle))
    }

    /// One turn of the engine: receives until the links are drained or `room` completions are
    /// there, and sends the responses.
    fn turn(&mut self, room: usize) -> Result<()> {
        let Self { keys, wake, schedule, shares, qps, owing, buffers, cq, counters, .. } = self;
        let ask = schedule.begin(qps);
        shares.begin_turn();
        let (keys, events) = (keys.read(), &mut buffers.events);
        let (staging, send_bytes) = (&mut buffers.staging[..], &mut buffers.send_bytes[..]);
        let (found, drained, calls) = (false, true, 0);
        let mut visits = Visits {
            keys: &keys,
            wake,
            shares,
            cq,
            owing,
            staging,
            send_bytes,
            room,
            found,
            drained,
            calls,
        };
        if ask == LinkAsk::Epoll {
            counters.link_calls += 1;
            let ready = wake.ready(events)?;
            for event in &events[..ready] {
                // The eventfd has no index.
                let Ok(index) = u16::try_from(event.data()) else { continue };
                let attached = qps.get_mut(QpIndex(index));
                debug_assert!(attached.is_some(), "epoll watches QP {index}, which is detached");
                if let Some(attached) = attached {
                    let flags = event.events();
                    let writable = flags.contains(EpollFlags::EPOLLOUT);
                    visits.visit(attached, flags != EpollFlags::EPOLLOUT, writable);
                }
            }
        } else {
            qps.for_each(|attached| {
                if ask != LinkAsk::Busy || attached.pair.link().quiet() < QUIET {
                    visits.visit(attached, true, true);
                }
            });
        }
        let queue = visits.shares.take_queue(!visits.cq.is_empty());
        if !queue.is_empty() {
            visits.serve(queue, qps);
        }
        let Visits { found, drained, calls, .. } = visits;
        // The queue goes on in the next turn.
        let drained = drained && !shares.has_queue();
        counters.link_calls += calls;
        schedule.end(found, drained);
        Ok(())
    }

    /// Sends the acknowledgements that have waited for `polls` empty polls.
    fn acknowledge(&mut self, polls: u8) {
        let Self { keys, wake, schedule, shares, qps, owing, buffers, cq, counters, .. } = self;
        let mut at = 0;
        while let Some(index) = owing.get(at).copied() {
            let Some(attached) = qps.get_mut(index) else {
                debug_assert!(false, "{index:?} is detached and owes an acknowledgement");
                owing.swap_remove(at);
                continue;
            };
            if attached.pair.acks().age(polls) {
                let keys = keys_of(attached, keys);
                if pump(shares, attached, &keys.read(), cq, &mut buffers.send_bytes) {
                    schedule.go_on();
                }
                counters.link_calls += attached.pair.take_calls() + wake.update(attached);
            }
            if attached.pair.acks().is_due() {
                at += 1;
            } else {
                attached.owing = false;
                owing.swap_remove(at);
            }
        }
    }

    /// The last step of every change from outside of a turn.
    fn after(&mut self, qp: QpIndex) {
        self.schedule.stir();
        if let Some(attached) = self.qps.get_mut(qp) {
            self.counters.link_calls += end_visit(&self.wake, attached, &mut self.owing);
        }
        self.wake_for_more();
    }

    /// A thread that is about to sleep is woken, if the poller has something for it.
    #[inline]
    fn wake_for_more(&mut self) {
        if self.wake.is_armed() && (!self.cq.is_empty() || self.shares.has_queue()) {
            self.wake.kick();
        }
    }
}

/// The keys that a QP knows: those of its domain, which mostly is the domain of its poller.
fn keys_of(attached: &AttachedPair, poller: &Arc<KeyCopy>) -> Arc<KeyCopy> {
    Arc::clone(attached.pair.own_keys().unwrap_or(poller))
}

impl Poller {
    /// As [`attach`](crate::Poller::attach).
    pub(crate) fn attach_pair(&mut self, connection: Connection) -> Result<QpIndex> {
        let mut pair = connection.into_pair(self.handle.id())?;
        let device = self.handle.pd().device();
        let asked = self.cq.promised() + pair.cq_entries();
        device.within("CQ entries", self.cq.entries(), asked)?;
        let at = self.qps.free_index();
        device.within("QPs of a poller", u16::MAX.into(), wide64(at) + 1)?;
        let index = QpIndex(narrow(at));
        let late = device.caps().touches_until_destroyed.then(|| Arc::clone(&self.keys));
        pair.attach(index, self.wake.kick_event(), late);
        let attached = AttachedPair::new(pair, self.shares.join(Owner::default()));
        if let Err(error) = self.wake.add(&attached) {
            self.shares.leave(attached.account);
            return Err(error);
        }
        self.wake.gather(&self.qps);
        self.cq.promise(asked);
        self.qps.insert(attached);
        self.owing.reserve(self.qps.len());
        self.shares.reserve(self.qps.len());
        self.buffers.events.resize(self.qps.len() + 1, EpollEvent::empty());
        self.schedule.ask_next();
        Ok(index)
    }

    /// As [`detach`](crate::Poller::detach).
    pub(crate) fn detach_pair(&mut self, qp: QpIndex) -> Option<Connection> {
        let mut attached = self.qps.remove(qp)?;
        self.cq.promise(self.cq.promised() - attached.pair.cq_entries());
        self.counters.link_calls += attached.pair.take_calls();
        self.wake.remove(&attached);
        self.owing.retain(|index| *index != qp);
        self.shares.leave(attached.account);
        self.shares.forget(qp);
        self.wake.gather(&self.qps);
        // Outstanding WRs never complete, also when the QP is attached again.
        if attached.pair.ends_at_detach() {
            attached.pair.fail(&mut self.cq);
        }
        self.cq.purge(qp);
        Some(Connection::detached(attached.pair, self.handle.id()))
    }
}

impl DataPath for Poller {
    fn caps(&self) -> &DeviceCaps {
        self.handle.pd().device().caps()
    }

    fn accept(&mut self, qp: QpIndex, params: &AcceptParams) -> Result<()> {
        let Some(attached) = self.qps.get_mut(qp) else {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(FabricError::Call { call: "accept", source });
        };
        let accepted = attached.pair.accept(params, &mut self.cq);
        self.after(qp);
        accepted
    }

    fn set_owner(&mut self, qp: QpIndex, owner: Owner) {
        if let Some(attached) = self.qps.get_mut(qp) {
            self.shares.leave(attached.account);
            attached.account = self.shares.join(owner);
        }
    }

    fn has_more(&self) -> bool {
        self.shares.has_queue()
    }

    fn post_recvs(&mut self, qp: QpIndex, recvs: Recvs<'_>) -> std::result::Result<(), PostError> {
        if recvs.rows.is_empty() {
            return Ok(());
        }
        let Some(attached) = self.qps.get_mut(qp) else { return Err(PostError::invalid(0)) };
        let taken = attached.pair.post_recvs(recvs, &mut self.counters);
        if attached.pair.state().is_error() {
            attached.pair.flush(&mut self.cq);
            self.after(qp);
        }
        taken
    }

    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> std::result::Result<(), PostError> {
        if wrs.is_empty() {
            return Ok(());
        }
        let Some(attached) = self.qps.get_mut(qp) else { return Err(PostError::invalid(0)) };
        let taken = attached.pair.post_sends(wrs, &mut self.counters);
        if attached.pair.state().is_error() {
            attached.pair.flush(&mut self.cq);
        } else if !attached.pair.is_blocked() {
            let keys = keys_of(attached, &self.keys);
            let (shares, send_bytes) = (&mut self.shares, &mut self.buffers.send_bytes);
            if pump(shares, attached, &keys.read(), &mut self.cq, send_bytes) {
                self.schedule.go_on();
            }
        }
        self.after(qp);
        taken
    }

    fn poll(&mut self, out: &mut [Completion]) -> Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        self.cq.age();
        if self.cq.is_empty() && self.schedule.is_due(&self.qps) {
            self.turn(out.len())?;
        }
        let mut count = 0;
        for place in out.iter_mut() {
            let Some((completion, returns)) = self.cq.pop() else { break };
            *place = completion;
            count += 1;
            let attached = self.qps.get_mut(completion.qp);
            debug_assert!(attached.is_some(), "{:?} is detached and completes", completion.qp);
            if let Some(attached) = attached {
                attached.pair.reaped(returns);
            }
        }
        self.counters.completions += wide64(count);
        if count == 0 {
            self.acknowledge(ACK_POLLS);
            self.wake_for_more();
        } else {
            self.wake.disarm();
            self.schedule.skip_next(self.cq.is_empty());
        }
        Ok(count)
    }

    fn arm(&mut self) -> Result<()> {
        self.acknowledge(0);
        self.counters.arms += u64::from(self.wake.arm());
        // Sockets are level-triggered in epoll: later data keeps the event readable, so the poll
        // that follows need not ask the sockets. It returns waiting completions anyway.
        self.schedule.skip_next(true);
        self.wake_for_more();
        Ok(())
    }

    fn send_owed_acks(&mut self) {
        self.acknowledge(0);
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.wake.fds(&self.qps)
    }

    fn clear_event(&mut self) {
        self.counters.events += u64::from(self.wake.disarm());
        self.schedule.event();
        self.wake.clear_kick();
    }

    fn fail(&mut self, qp: QpIndex) {
        if let Some(attached) = self.qps.get_mut(qp) {
            attached.pair.fail(&mut self.cq);
        }
        self.after(qp);
    }

    fn counters(&self) -> PollerCounters {
        PollerCounters { bad_records: self.cq.bad_records(), ..self.counters }
    }
}
