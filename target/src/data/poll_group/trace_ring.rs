//! [`TraceRing`]: commands of one volume that took long, on their way from one poll group to a
//! trace.
//!
//! Without a trace there is no ring, and a command costs no more than the one comparison of
//! [`super::slow`]. The ring is bounded. Commands that find it full are counted and left out.

use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use rblk_protocol::Opcode;
use rblk_runtime::Counter;

use crate::data::request::Span;
use crate::volume::ids::{SessionIndex, VolumeIndex};
use rblk_operate::target::traffic::Stages;

/// Most commands in the ring.
const ROOM: usize = 4096;

/// A command that took long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TracedIo {
    /// Time of the answer.
    pub(crate) at: Instant,
    /// The poll group that served it.
    pub(crate) group: usize,
    /// The session of the command.
    pub(crate) session: SessionIndex,
    /// The session's I/O queue.
    pub(crate) queue: u16,
    /// The opcode.
    pub(crate) opcode: Opcode,
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// The answer was an error.
    pub(crate) failed: bool,
    /// The stages of the wait.
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
    /// A ring for the commands of a volume that take at least `threshold`.
    pub(crate) fn new(volume: VolumeIndex, threshold: Duration) -> Self {
        let threshold_us = u64::try_from(threshold.as_micros()).unwrap_or(u64::MAX);
        let (ios, left_out) = (ArrayQueue::new(ROOM), Counter::zero());
        Self { volume, threshold_us, ios, left_out }
    }

    /// Commands that take at least this long are checked.
    pub(super) fn threshold_us(&self) -> u64 {
        self.threshold_us
    }

    /// Whether a command belongs here.
    pub(super) fn wants(&self, volume: VolumeIndex, total_us: u64) -> bool {
        volume == self.volume && total_us >= self.threshold_us
    }

    /// Adds a command, or counts it as left out.
    #[cold]
    pub(super) fn push(&self, io: TracedIo) {
        if self.ios.push(io).is_err() {
            self.left_out.add(1);
        }
    }

    /// The oldest command in the ring.
    pub(crate) fn take(&self) -> Option<TracedIo> {
        self.ios.pop()
    }

    /// Number of commands left out so far.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_find_the_ring_full_are_counted() {
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
