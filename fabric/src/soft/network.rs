//! The in-memory network: byte streams between QPs of one process, with faults. A seed decides
//! them.
//!
//! One seed and one order of calls always give one behaviour: how much each call moves, and when.
//! Time is a number of ticks that only [`Network::advance`] changes. One thread (a simulation) or
//! two threads may use the two ends.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::EventFd;
use rblk_protocol::width::{wide, wide64};

use super::device::Device;
use super::domain::{PollerHandle, ProtectionDomain};
use super::queue_pair::Connection;
use super::wire::late::LateBytes;
use super::wire::tcp_link::{Moved, PeerStream};
use crate::connect::QpLimits;
use crate::error::{FabricError, Result};

/// Ticks after the end of a QP until RDMA that was under way lands, at most. It lands once more
/// when the QP is dropped.
const LATE_TICKS: u64 = 64;

/// How the streams of a network behave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conditions {
    /// Calls move a random part of the available bytes, and sometimes nothing.
    pub fragment: bool,
    /// Ticks from sending to arrival, at least.
    pub delay_min: u64,
    /// Ticks from sending to arrival, at most. Order is kept.
    pub delay_max: u64,
    /// Bytes that may be under way in one direction, as in the buffers of a socket.
    pub buffer: usize,
}

impl Default for Conditions {
    fn default() -> Self {
        Self { fragment: false, delay_min: 0, delay_max: 0, buffer: 256 << 10 }
    }
}

/// One end of a [`FaultyWire`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The first of the pair.
    A,
    /// The second.
    B,
}

impl End {
    fn number(self) -> usize {
        match self {
            Self::A => 0,
            Self::B => 1,
        }
    }

    fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// One direction of a wire.
#[derive(Debug, Default)]
struct ByteStream {
    bytes: VecDeque<u8>,
    // (how many of `bytes`, arrival), in order.
    arrivals: VecDeque<(usize, u64)>,
    arrived: usize,
    last_arrival: u64,
    sent: u64,
    finished: bool,
    stalled: bool,
    cut_after: Option<usize>,
    // The sender found no room, and is to be woken when there is some.
    full: bool,
}

#[derive(Debug, Default)]
struct WireState {
    // Indexed by the end that sends.
    streams: [ByteStream; 2],
    cut: bool,
    // Sent bytes are lost, and neither end learns of the other's fate.
    silent: bool,
    wakers: [Option<Arc<EventFd>>; 2],
}

impl WireState {
    fn wake(&self, end: End) {
        if let Some(event) = &self.wakers[end.number()] {
            // EAGAIN means that it is readable already.
            let _ = event.write(1);
        }
    }

    fn cut(&mut self) {
        self.cut = true;
        self.wake(End::A);
        self.wake(End::B);
    }

    fn deliver_due(&mut self, from: End, now: u64) {
        let stream = &mut self.streams[from.number()];
        while let Some((count, at)) = stream.arrivals.front().copied()
            && at <= now
        {
            stream.arrivals.pop_front();
            stream.arrived += count;
        }
    }
}

#[derive(Debug)]
struct NetworkState {
    random: u64,
    now: u64,
    conditions: Conditions,
    wires: Vec<WireState>,
    late: Vec<Late>,
    landed: u64,
}

/// The RDMA of an ended QP that is still to land.
#[derive(Debug)]
struct Late {
    wire: usize,
    end: End,
    // `None` when they have landed. They land once more when the QP is dropped.
    due: Option<u64>,
    landings: Vec<LateBytes>,
}

impl NetworkState {
    /// splitmix64: every seed is equally good.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    /// How much of `most` a call moves. 0 for nothing this time. Large transfers move in parts that
    /// are not too small, so that tests end in time.
    fn part(&mut self, most: usize) -> usize {
        if !self.conditions.fragment || most == 0 {
            return most;
        }
        let cap = match self.below(8) {
            0 => return 0,
            1 | 2 => 40,
            3 | 4 => 5000,
            _ => 100_000,
        };
        let cap = most.min(cap);
        1 + wide(self.below(wide64(cap)))
    }
}

/// A network of in-memory links. Clones are the same network.
#[derive(Clone, Debug)]
pub struct Network {
    device: Device,
    state: Arc<Mutex<NetworkState>>,
}

impl Network {
    /// A network with all behaviour decided by the seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::with_region_max(seed, u64::MAX)
    }

    /// As [`Self::new`], with a limit of `bytes` for an MR.
    #[must_use]
    pub fn with_region_max(seed: u64, bytes: u64) -> Self {
        Self::make(seed, bytes, false)
    }

    /// As [`Self::with_region_max`], with a device that touches memory until a QP is destroyed, as
    /// a card does. RDMA that was under way when a QP ended lands at some time before its
    /// [`Connection`] is dropped, and once more when it is dropped. Flushes come some polls after
    /// the end.
    #[must_use]
    pub fn with_late_rdma(seed: u64, bytes: u64) -> Self {
        Self::make(seed, bytes, true)
    }

    /// As [`Self::with_late_rdma`], with a device that has the rules of iWARP: no immediates, and
    /// the sink of a READ needs the right of remote write.
    #[must_use]
    pub fn with_iwarp_rules(seed: u64) -> Self {
        Self::of(seed, Device::iwarp(seed, true))
    }

    fn make(seed: u64, bytes: u64, late: bool) -> Self {
        Self::of(seed, Device::memory(seed, bytes, late))
    }

    fn of(seed: u64, device: Device) -> Self {
        let state = NetworkState {
            random: seed,
            now: 0,
            conditions: Conditions::default(),
            wires: Vec::new(),
            late: Vec::new(),
            landed: 0,
        };
        Self { device, state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, NetworkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device of the network. PDs and pollers are made on it.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device.clone()
    }

    /// Sets the behaviour of streams.
    pub fn set_conditions(&self, conditions: Conditions) {
        self.state().conditions = conditions;
    }

    /// Ticks so far.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.state().now
    }

    /// Lets time pass.
    pub fn advance(&self, ticks: u64) {
        let mut state = self.state();
        state.now += ticks;
        let now = state.now;
        for wire in &mut state.wires {
            for end in [End::A, End::B] {
                let before = wire.streams[end.number()].arrived;
                wire.deliver_due(end, now);
                if wire.streams[end.number()].arrived > before {
                    wire.wake(end.other());
                }
            }
        }
        let mut landed = 0;
        for late in state.late.iter_mut().filter(|late| late.due.is_some_and(|at| at <= now)) {
            late.due = None;
            late.landings.iter().for_each(LateBytes::land);
            landed += wide64(late.landings.len());
        }
        state.landed += landed;
    }

    /// READs and WRITEs that landed after the end of their QP.
    #[must_use]
    pub fn landed(&self) -> u64 {
        self.state().landed
    }

    /// The tick at which the next bytes that are under way arrive.
    #[must_use]
    pub fn next_arrival(&self) -> Option<u64> {
        let state = self.state();
        let wires = state.wires.iter().filter(|w| !w.cut && !w.silent);
        wires.flat_map(|w| &w.streams).filter_map(|s| s.arrivals.front().map(|a| a.1)).min()
    }

    /// Two QPs connected to each other, for the pollers of these handles, in the domains of their
    /// pollers. READ depths are negotiated as over a real connection.
    ///
    /// # Errors
    /// [`FabricError::Limit`]; [`FabricError::Mixed`] for pollers of another device.
    pub fn pair(
        &self,
        a: (&PollerHandle, QpLimits),
        b: (&PollerHandle, QpLimits),
    ) -> Result<(Connection, Connection, FaultyWire)> {
        self.pair_in(a, b, b.0.pd())
    }

    /// As [`Self::pair`], with the second QP in a domain of the caller's choice.
    ///
    /// # Errors
    /// As [`Self::pair`], and [`FabricError::Mixed`] for a domain of another device.
    pub fn pair_in(
        &self,
        a: (&PollerHandle, QpLimits),
        b: (&PollerHandle, QpLimits),
        pd: &ProtectionDomain,
    ) -> Result<(Connection, Connection, FaultyWire)> {
        for handle in [a.0, b.0] {
            if !handle.pd().device().same_as(&self.device) {
                return Err(FabricError::Mixed("poller and in-memory network"));
            }
        }
        let wire = {
            let mut state = self.state();
            state.wires.push(WireState::default());
            state.wires.len() - 1
        };
        let end = |end, pd, own: (&PollerHandle, QpLimits), peer: QpLimits| {
            let link = MemoryLink { network: self.clone(), wire, end };
            let serves = own.1.reads_in.min(peer.reads_out);
            Connection::established(Box::new(link), pd, own.0, &own.1, serves)
        };
        let wire = FaultyWire { network: self.clone(), wire };
        Ok((end(End::A, a.0.pd(), a, b.1)?, end(End::B, pd, b, a.1)?, wire))
    }
}

/// The connection between the two ends of a pair, to inject faults.
#[derive(Clone, Debug)]
pub struct FaultyWire {
    network: Network,
    wire: usize,
}

impl FaultyWire {
    fn with<T>(&self, act: impl FnOnce(&mut WireState) -> T) -> T {
        act(&mut self.network.state().wires[self.wire])
    }

    /// Cuts both directions: bytes in flight are lost, and both ends see a reset.
    pub fn cut(&self) {
        self.with(WireState::cut);
    }

    /// Loses all bytes in flight and all later ones, in both directions, as when the machine of one
    /// end has lost its power. Neither end sees it.
    pub fn silence(&self) {
        self.with(|w| w.silent = true);
    }

    /// Cuts the wire after `from` has sent `bytes` more bytes. Those still arrive.
    pub fn cut_after(&self, from: End, bytes: usize) {
        self.with(|w| w.streams[from.number()].cut_after = Some(bytes));
    }

    /// Stops or resumes the stream from `from`. While stopped, bytes are taken and do not arrive.
    pub fn stall(&self, from: End, stalled: bool) {
        self.with(|w| {
            w.streams[from.number()].stalled = stalled;
            w.wake(from.other());
        });
    }

    /// Makes bytes arrive as if `from` had sent them.
    pub fn inject(&self, from: End, bytes: &[u8]) {
        self.with(|w| {
            let stream = &mut w.streams[from.number()];
            stream.bytes.extend(bytes);
            stream.arrivals.push_back((bytes.len(), stream.last_arrival));
            w.wake(from.other());
        });
    }

    /// Bytes that `from` has sent so far.
    #[must_use]
    pub fn sent(&self, from: End) -> u64 {
        self.with(|w| w.streams[from.number()].sent)
    }

    /// Bytes that `from` has sent and the other end has not received.
    #[must_use]
    pub fn under_way(&self, from: End) -> usize {
        self.with(|w| w.streams[from.number()].bytes.len())
    }
}

#[derive(Debug)]
struct MemoryLink {
    network: Network,
    wire: usize,
    end: End,
}

fn would_block<T>() -> io::Result<T> {
    Err(io::ErrorKind::WouldBlock.into())
}

fn total(pieces: &[libc::iovec]) -> usize {
    pieces.iter().map(|p| p.iov_len).sum()
}

impl PeerStream for MemoryLink {
    fn peer(&self) -> String {
        "a peer in memory".to_owned()
    }

    unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Moved> {
        let mut state = self.network.state();
        let Conditions { delay_min, delay_max, buffer, .. } = state.conditions;
        let wire = &state.wires[self.wire];
        if wire.silent && !wire.cut {
            return Ok(Moved { bytes: total(pieces), more: true });
        }
        let stream = &wire.streams[self.end.number()];
        if wire.cut || stream.finished {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let room = buffer.saturating_sub(stream.bytes.len());
        let wanted = total(pieces);
        let mut count = state.part(room.min(wanted));
        if count == 0 && wanted > 0 {
            // Nothing this time, though there may be room: wake the sender to try again.
            let wire = &mut state.wires[self.wire];
            if room > 0 {
                wire.wake(self.end);
            } else {
                wire.streams[self.end.number()].full = true;
            }
            return would_block();
        }
        let delay = delay_min + state.below(delay_max.saturating_sub(delay_min) + 1);
        let now = state.now;
        let wire = &mut state.wires[self.wire];
        let stream = &mut wire.streams[self.end.number()];
        if let Some(left) = &mut stream.cut_after {
            count = count.min(*left);
            *left -= count;
        }
        stream.sent += wide64(count);
        let mut left = count;
        for piece in pieces {
            let len = piece.iov_len.min(left);
            // SAFETY: the piece is readable for its length by the caller's promise; no reference to
            // it exists that could write, and the slice ends here.
            let bytes = unsafe { std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), len) };
            stream.bytes.extend(bytes);
            left -= len;
            if left == 0 {
                break;
            }
        }
        stream.last_arrival = stream.last_arrival.max(now + delay);
        let arrival = stream.last_arrival;
        match stream.arrivals.back_mut() {
            Some(last) if last.1 == arrival => last.0 += count,
            _ => stream.arrivals.push_back((count, arrival)),
        }
        if stream.cut_after == Some(0) {
            stream.finished = true;
            wire.streams[self.end.other().number()].finished = true;
            wire.wake(self.end);
        }
        if arrival <= now {
            wire.wake(self.end.other());
        }
        if count == 0 {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(Moved { bytes: count, more: true })
    }

    unsafe fn receive(&mut self, pieces: &[libc::iovec]) -> io::Result<Moved> {
        let from = self.end.other();
        let mut state = self.network.state();
        let now = state.now;
        let wire = &mut state.wires[self.wire];
        if wire.cut {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        wire.deliver_due(from, now);
        let stream = &wire.streams[from.number()];
        if stream.stalled || wire.silent {
            return would_block();
        }
        let available = stream.arrived;
        if available == 0 {
            let ended = stream.finished && stream.bytes.is_empty();
            return if ended { Ok(Moved { bytes: 0, more: false }) } else { would_block() };
        }
        let count = state.part(available.min(total(pieces)));
        let wire = &mut state.wires[self.wire];
        if count < available {
            wire.wake(self.end);
        }
        if count == 0 {
            return would_block();
        }
        let stream = &mut wire.streams[from.number()];
        let mut left = count;
        for piece in pieces {
            let len = piece.iov_len.min(left);
            let mut to: *mut u8 = piece.iov_base.cast();
            let mut rest = len;
            while rest > 0 {
                let (front, _) = stream.bytes.as_slices();
                let run = front.len().min(rest);
                // SAFETY: `to..to + run` is inside the piece, writable by the caller's promise;
                // `front` is heap memory of the stream, apart from any region and staging buffer.
                unsafe { std::ptr::copy_nonoverlapping(front.as_ptr(), to, run) };
                // SAFETY: run <= rest, so the pointer stays inside the piece or one past it.
                to = unsafe { to.add(run) };
                stream.bytes.drain(..run);
                rest -= run;
            }
            left -= len;
            if left == 0 {
                break;
            }
        }
        stream.arrived -= count;
        let more = stream.arrived > 0;
        if std::mem::take(&mut stream.full) {
            wire.wake(from);
        }
        Ok(Moved { bytes: count, more })
    }

    fn finish(&mut self) {
        let mut state = self.network.state();
        let wire = &mut state.wires[self.wire];
        wire.streams[self.end.number()].finished = true;
        wire.wake(self.end.other());
    }

    fn close(&mut self) {
        let mut state = self.network.state();
        let wire = &mut state.wires[self.wire];
        for stream in &mut wire.streams {
            stream.finished = true;
        }
        wire.wake(self.end.other());
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }

    fn wake_by(&mut self, event: &Arc<EventFd>) {
        self.network.state().wires[self.wire].wakers[self.end.number()] = Some(Arc::clone(event));
    }

    fn unread(&mut self) -> Vec<u8> {
        let state = self.network.state();
        let stream = &state.wires[self.wire].streams[self.end.other().number()];
        stream.bytes.iter().copied().collect()
    }

    fn land_late(&mut self, landings: Vec<LateBytes>) {
        if landings.is_empty() {
            return;
        }
        let mut state = self.network.state();
        let due = Some(state.now + state.below(LATE_TICKS));
        state.late.push(Late { wire: self.wire, end: self.end, due, landings });
    }
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        let mut state = self.network.state();
        let own = |late: &mut Late| late.wire == self.wire && late.end == self.end;
        let mut landed = 0;
        for late in state.late.extract_if(.., own) {
            late.landings.iter().for_each(LateBytes::land);
            landed += wide64(late.landings.len());
        }
        state.landed += landed;
    }
}
