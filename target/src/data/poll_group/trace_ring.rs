//! [`TraceRing`]: commands of one volume that took long, on their way from one poll group to
//! whoever traces them.
//!
//! While nobody traces there is no ring, and a command costs nothing more: the one comparison of
//! [`super::slow`] is made in any case. The ring is bounded. What finds it full is counted and left
//! out.

use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use rblk_fabric::Counter;
use rblk_protocol::Opcode;

use crate::data::request::Span;
use crate::volume::ids::{SessionIndex, VolumeIndex};
use crate::volume::traffic::Stages;

/// Commands that wait to be taken.
const ROOM: usize = 4096;

/// A command that took long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TracedIo {
    /// When it was answered.
    pub(crate) at: Instant,
    /// The poll group that served it.
    pub(crate) group: usize,
    /// Whose it was.
    pub(crate) session: SessionIndex,
    /// The I/O queue of that session.
    pub(crate) queue: u16,
    /// What it was.
    pub(crate) opcode: Opcode,
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// It was answered with an error.
    pub(crate) failed: bool,
    /// What it waited for.
    pub(crate) stages: Stages,
}

impl TracedIo {
    /// The bytes that the command named.
    pub(super) fn of(self, span: Span) -> Self {
        Self { offset: span.offset, len: span.len, ..self }
    }
}

/// See the module. One poll group fills it.
#[derive(Debug)]
pub struct TraceRing {
    volume: VolumeIndex,
    threshold_us: u64,
    ios: ArrayQueue<TracedIo>,
    left_out: Counter,
}

impl TraceRing {
    /// For the commands of a volume that take at least so long.
    pub(crate) fn new(volume: VolumeIndex, threshold: Duration) -> Self {
        let threshold_us = u64::try_from(threshold.as_micros()).unwrap_or(u64::MAX);
        let (ios, left_out) = (ArrayQueue::new(ROOM), Counter::zero());
        Self { volume, threshold_us, ios, left_out }
    }

    /// Commands that take at least so long are looked at.
    pub(super) fn threshold_us(&self) -> u64 {
        self.threshold_us
    }

    /// Whether a command belongs here.
    pub(super) fn wants(&self, volume: VolumeIndex, total_us: u64) -> bool {
        volume == self.volume && total_us >= self.threshold_us
    }

    /// Takes a command in, or counts it.
    #[cold]
    pub(super) fn push(&self, io: TracedIo) {
        if self.ios.push(io).is_err() {
            self.left_out.add(1);
        }
    }

    /// The command that waits longest.
    pub(crate) fn take(&self) -> Option<TracedIo> {
        self.ios.pop()
    }

    /// How many were left out so far.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_the_ring_full_is_counted() {
        let ring = TraceRing::new(VolumeIndex(3), Duration::from_millis(10));
        assert!(ring.wants(VolumeIndex(3), 10_000) && !ring.wants(VolumeIndex(3), 9999));
        assert!(!ring.wants(VolumeIndex(4), 10_000));
        let io = |offset| TracedIo {
            at: Instant::now(),
            group: 0,
            session: SessionIndex { index: 0, life: 1 },
            queue: 0,
            opcode: Opcode::Read,
            offset,
            len: 4096,
            failed: false,
            stages: Stages::default(),
        };
        (0..ROOM as u64 + 5).for_each(|at| ring.push(io(at)));
        assert_eq!((ring.left_out(), ring.take().map(|io| io.offset)), (5, Some(0)));
        ring.push(io(7));
        assert_eq!(ring.left_out(), 5);
        assert_eq!(std::iter::from_fn(|| ring.take()).count(), ROOM);
    }
}
