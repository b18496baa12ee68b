//! The data thread's end: turns over the QPs, readiness, and the completion queue.
//!
//! # Whom a turn asks
//!
//! Asking a socket costs a call whether it has something or not. A QP alone is asked directly. Of a
//! few, those that had something lately are asked directly, and epoll is asked for the others now
//! and then, after each event, and when nobody had anything lately. Of many, epoll tells. When
//! nobody had anything for long, a turn asks only now and then at all: its thread then has other
//! pollers to serve.
//!
//! # What wakes
//!
//! epoll has every socket, and the eventfd that is written when something completes without a
//! socket's doing. A QP alone that is not blocked is given out itself by
//! [`event_fds`](crate::Poller::event_fds), and then epoll does without it: its data then wakes the
//! sleeper and nobody on the way. epoll takes it back when it is blocked, or when another QP comes;
//! since `event_fds` always names epoll, who watches what it said earlier misses nothing.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::completions::CompletionQueue;
use super::domain::{KeyCopy, ProtectionDomain};
use super::queue_pair::{Connection, Interest, QueuePair, State};
use super::receive::STAGING;
use super::transmit::LINES;
use crate::device::{AcceptParams, DeviceCaps, PollerCounters};
use crate::error::{FabricError, PostError, Result};
use crate::work::{Completion, QpIndex, RecvWr, SendWr};

/// Up to this many QPs are asked directly, which is one call each and finds the data at once;
/// beyond it epoll tells which to ask.
const ASKED_DIRECTLY: usize = 2;
/// Up to this many QPs are looked at one by one for who had something lately.
const FEW: usize = 8;
/// Asked so often without having anything, a QP is left to epoll.
const QUIET: u8 = 16;
/// Turns without asking epoll, while there is a QP that is left to it.
const EPOLL_TURNS: u8 = 8;
/// After so many turns in which no socket had anything, only some turns ask: longer than a thread
/// looks for an answer.
const IDLE_TURNS: u16 = 1024;
/// One in so many.
const IDLE_ASKS: u16 = 8;
/// Receive calls per QP and turn, so that one busy peer cannot hold up the others.
const CALLS_PER_TURN: usize = 16;
/// Empty polls before an acknowledgement goes out in a frame of its own. The first empty poll ends
/// the turn in which the request came; what the caller posts then takes the acknowledgement along.
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
    // Written to since it was last read; links without a descriptor write to it when they like.
    kicked: bool,
    kicked_by_links: bool,
    // The only QP's socket was given out by `event_fds`.
    direct: Cell<bool>,
    qps: Vec<Option<Box<QueuePair>>>,
    live: Vec<u16>,
    // QPs whose peer may wait for an acknowledgement.
    owing: Vec<u16>,
    events: Vec<EpollEvent>,
    // Turns since epoll was asked.
    epoll_age: u8,
    // Turns since a socket had something, or an event was taken.
    idle: u16,
    staging: Box<[u8]>,
    lines: Box<[u8]>,
    cq: CompletionQueue,
    cq_entries: u64,
    cq_promised: u64,
    counters: PollerCounters,
    armed: bool,
    // The last turn drained every link, so the poll that only looks whether it is over need not ask
    // again.
    drained: bool,
    skip: bool,
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
        let mut cq = CompletionQueue::new(cq_entries as usize);
        if pd.device().caps().touches_until_destroyed {
            cq.flush_late(pd.device().salt());
        }
        let poller = Self {
            pd,
            id,
            keys,
            epoll,
            kick: Arc::new(kick),
            kicked: false,
            kicked_by_links: false,
            direct: Cell::new(false),
            qps: Vec::new(),
            live: Vec::new(),
            owing: Vec::new(),
            events: Vec::new(),
            epoll_age: 0,
            idle: 0,
            staging: vec![0; STAGING].into_boxed_slice(),
            lines: vec![0; LINES].into_boxed_slice(),
            cq,
            cq_entries: cq_entries.into(),
            cq_promised: 0,
            counters: PollerCounters::default(),
            armed: false,
            drained: false,
            skip: false,
        };
        Ok((poller, handle))
    }

    /// Calls into links and epoll so far; over TCP each is one system call.
    #[must_use]
    pub fn link_calls(&self) -> u64 {
        self.counters.link_calls
    }

    fn known(&mut self, qp: QpIndex) -> std::result::Result<&mut QueuePair, PostError> {
        match self.qps.get_mut(usize::from(qp.0)) {
            Some(Some(pair)) => Ok(pair),
            _ => Err(PostError { posted: 0, source: io::Error::from_raw_os_error(libc::EINVAL) }),
        }
    }

    /// Whom the next turn asks.
    fn whom(&self) -> Whom {
        if self.live.len() > FEW {
            return if self.has_sockets() { Whom::Epoll } else { Whom::All };
        }
        let (mut sockets, mut busy) = (0, 0);
        for pair in self.live.iter().filter_map(|i| self.qps.get(usize::from(*i))?.as_deref()) {
            if pair.link.fd().is_none() || pair.state == State::Dead {
                continue;
            }
            if pair.outbound.blocked {
                // Direct asking happens only while no socket is full.
                return Whom::Epoll;
            }
            sockets += 1;
            busy += usize::from(pair.quiet < QUIET);
        }
        if sockets <= 1 {
            // A memory link costs nothing to ask.
            Whom::All
        } else if busy == 0
            || busy > ASKED_DIRECTLY
            || busy < sockets && self.epoll_age >= EPOLL_TURNS
        {
            Whom::Epoll
        } else {
            Whom::Busy
        }
    }

    /// Whether this turn asks nobody.
    fn rests(&mut self) -> bool {
        if self.idle < IDLE_TURNS || !self.has_sockets() {
            return false;
        }
        self.idle = IDLE_TURNS + (self.idle + 1) % IDLE_ASKS;
        self.idle != IDLE_TURNS
    }

    fn has_sockets(&self) -> bool {
        let first = self.live.first().and_then(|i| self.qps.get(usize::from(*i))?.as_deref());
        first.is_some_and(|pair| pair.link.fd().is_some())
    }

    /// One turn of the engine: receives until drained or `room` completions are there, and sends
    /// what came of it.
    fn turn(&mut self, room: usize) -> Result<()> {
        let whom = self.whom();
        let Self { keys, qps, live, owing, events, staging, lines, cq, epoll, counters, .. } = self;
        let direct = self.direct.get();
        let keys = keys.read();
        let mut drained = true;
        let mut found = false;
        let mut calls = 0;
        let mut visit = |index: u16, readable: bool, writable: bool| {
            let Some(Some(pair)) = qps.get_mut(usize::from(index)) else { return };
            if whom == Whom::Busy && pair.quiet >= QUIET {
                return;
            }
            if writable {
                pair.outbound.blocked = false;
            }
            let mut more = readable;
            for _ in 0..CALLS_PER_TURN {
                if !more || cq.len() >= room {
                    break;
                }
                more = pair.receive(&keys, cq, staging);
                found |= pair.quiet == 0;
            }
            drained &= !more;
            if pair.wants_to_send() {
                pair.pump(&keys, cq, lines);
            }
            calls += settle(epoll, pair, direct, owing);
        };
        if whom == Whom::Epoll {
            self.epoll_age = 0;
            counters.link_calls += 1;
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
            self.epoll_age = self.epoll_age.saturating_add(1);
            for index in &*live {
                visit(*index, true, true);
            }
        }
        counters.link_calls += calls;
        self.drained = drained;
        if found {
            self.idle = 0;
        } else if self.idle < IDLE_TURNS {
            self.idle += 1;
        }
        Ok(())
    }

    /// Lets acknowledgements age, and sends those that are old enough, or all.
    fn acknowledge(&mut self, all: bool) {
        let Self { keys, qps, owing, cq, epoll, lines, counters, .. } = self;
        let direct = self.direct.get();
        let mut at = 0;
        while let Some(index) = owing.get(at).copied() {
            let Some(Some(pair)) = qps.get_mut(usize::from(index)) else {
                owing.swap_remove(at);
                continue;
            };
            if let Some(age) = &mut pair.outbound.ack_due {
                *age = age.saturating_add(1);
                if *age >= PATIENCE || all {
                    pair.outbound.ack_now = true;
                    pair.pump(&keys.read(), cq, lines);
                    counters.link_calls += settle(epoll, pair, direct, &mut Vec::new());
                }
            }
            if pair.outbound.ack_due.is_some() {
                at += 1;
            } else {
                pair.is_owing = false;
                owing.swap_remove(at);
            }
        }
    }

    /// What every change from outside of a turn ends with.
    fn after(&mut self, qp: QpIndex) {
        self.skip = false;
        self.idle = 0;
        if let Some(Some(pair)) = self.qps.get_mut(usize::from(qp.0)) {
            self.counters.link_calls +=
                settle(&self.epoll, pair, self.direct.get(), &mut self.owing);
        }
        if self.armed && !self.cq.is_empty() {
            self.kick();
        }
    }

    fn kick(&mut self) {
        self.kicked = true;
        // EAGAIN means that it is readable already.
        let _ = self.kick.write(1);
    }

    /// epoll has the sockets of all.
    fn gather(&self) {
        if self.direct.replace(false) {
            for pair in self.qps.iter().flatten() {
                watch(&self.epoll, pair, false);
            }
        }
    }

    /// The QP whose socket may be watched itself, and the socket.
    fn alone(&self) -> Option<(&QueuePair, RawFd)> {
        let [index] = self.live[..] else { return None };
        let pair = self.qps.get(usize::from(index))?.as_deref()?;
        let free = pair.state != State::Dead && !pair.outbound.blocked;
        pair.link.fd().filter(|_| free).map(|fd| (pair, fd))
    }
}

/// Whom a turn asks for data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Whom {
    /// Every QP.
    All,
    /// Those that had something lately.
    Busy,
    /// Those that epoll names.
    Epoll,
}

/// Books what a QP did: epoll's view of it, whether its peer waits for an acknowledgement, and the
/// calls it made.
fn settle(epoll: &Epoll, pair: &mut QueuePair, direct: bool, owing: &mut Vec<u16>) -> u64 {
    if pair.outbound.ack_due.is_some() && !pair.is_owing {
        pair.is_owing = true;
        owing.push(pair.index.0);
    }
    std::mem::take(&mut pair.calls) + watch(epoll, pair, direct)
}

/// Brings epoll's view of a QP up to date; the calls it took. It fails only for want of kernel
/// memory, and then the next change tries again.
fn watch(epoll: &Epoll, pair: &QueuePair, direct: bool) -> u64 {
    let wanted = match (pair.state, pair.outbound.blocked) {
        (State::Dead, _) => Interest::None,
        (_, true) => Interest::Both,
        (_, false) if direct => Interest::None,
        _ => Interest::Readable,
    };
    let present = pair.interest.get();
    if wanted == present {
        return 0;
    }
    let Some(fd) = pair.link.fd() else { return 0 };
    // SAFETY: the descriptor belongs to the link, which outlives this borrow.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut flags = EpollFlags::EPOLLIN;
    if wanted == Interest::Both {
        flags |= EpollFlags::EPOLLOUT;
    }
    let mut event = EpollEvent::new(flags, pair.index.0.into());
    let done = match (present, wanted) {
        (Interest::None, _) => epoll.add(fd, event),
        (_, Interest::None) => epoll.delete(fd),
        _ => epoll.modify(fd, &mut event),
    };
    if done.is_ok() {
        pair.interest.set(wanted);
    }
    1
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
        pair.quiet = 0;
        pair.is_owing = false;
        pair.link.wake_by(&self.kick);
        if self.caps().touches_until_destroyed {
            pair.late_keys = Some(Arc::clone(&self.keys));
        }
        watch(&self.epoll, &pair, false);
        if pair.link.fd().is_some() {
            if pair.interest.get() == Interest::None && pair.state != State::Dead {
                return Err(FabricError::last_os("epoll_ctl"));
            }
        } else {
            self.kicked_by_links = true;
        }
        self.gather();
        self.cq_promised += wrs;
        self.qps[at] = Some(pair);
        self.live.push(index);
        self.owing.reserve(self.live.len());
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
            pair.pump(&self.keys.read(), &mut self.cq, &mut self.lines);
        }
        self.after(qp);
        taken
    }

    fn poll(&mut self, out: &mut [Completion]) -> Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        self.cq.age();
        if self.cq.is_empty() && !std::mem::take(&mut self.skip) && !self.rests() {
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
        self.counters.arms += u64::from(!std::mem::replace(&mut self.armed, true));
        // Sockets are level-triggered in epoll: what comes from now on keeps the event readable, so
        // the poll that follows need not ask them. Completions that wait are returned by it all the
        // same.
        self.skip = self.drained;
        if !self.cq.is_empty() {
            self.kick();
        }
        Ok(())
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        let Some((pair, fd)) = self.alone() else {
            self.gather();
            return [Some(self.epoll.0.as_fd()), None];
        };
        self.direct.set(true);
        watch(&self.epoll, pair, true);
        // SAFETY: the descriptor belongs to the link, which is not touched while `self` is
        // borrowed.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        [Some(self.epoll.0.as_fd()), Some(socket)]
    }

    fn clear_event(&mut self) {
        self.counters.events += u64::from(std::mem::take(&mut self.armed));
        self.skip = false;
        // It may have been of a QP that is left to epoll.
        self.epoll_age = EPOLL_TURNS;
        self.idle = 0;
        if std::mem::take(&mut self.kicked) || self.kicked_by_links {
            // EAGAIN means that there was none.
            let _ = self.kick.read();
        }
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
        self.counters.link_calls += std::mem::take(&mut pair.calls);
        if let (true, Some(fd)) =
            (pair.interest.replace(Interest::None) != Interest::None, pair.link.fd())
        {
            // SAFETY: the descriptor belongs to the link, which is still here.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            // It can only fail when it is not there.
            let _ = self.epoll.delete(fd);
        }
        self.owing.retain(|i| *i != qp.0);
        self.gather();
        // What it left unfinished completes never, also when it is attached again. One that was
        // refusing goes on to say so until it is dropped, and so does one never accepted.
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
