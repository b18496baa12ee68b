//! [`SlowIos`]: commands that took longer than an administrator wants to see, on their way to
//! control.
//!
//! Only the slowest since the last that was told is kept, so noting one costs no memory. A command
//! that is answered in the turn that found it is not looked at; any other costs one comparison. A
//! command that is not answered yet is not told.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rblk_protocol::Opcode;

use crate::identity::SessionIndex;
use crate::store::VolumeIndex;
use crate::traffic::Stages;

/// Time between two that are told.
const PACE: Duration = Duration::from_secs(1);

/// A command that took long. Times are in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlowIo {
    /// The volume.
    pub volume: VolumeIndex,
    /// Whose it was.
    pub session: SessionIndex,
    /// What it was.
    pub opcode: Opcode,
    /// From its arrival to its answer.
    pub total: u64,
    /// What it waited for.
    pub stages: Stages,
    /// How many others took long since the last that was told.
    pub others: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct SlowIos {
    threshold_us: u64,
    slowest: Cell<Option<SlowIo>>,
    told: Option<Instant>,
}

impl Default for SlowIos {
    /// None is slow.
    fn default() -> Self {
        Self { threshold_us: u64::MAX, slowest: Cell::new(None), told: None }
    }
}

impl SlowIos {
    /// Those that take at least so long.
    pub(super) fn above(threshold: Duration) -> Self {
        let threshold_us = u64::try_from(threshold.as_micros()).unwrap_or(u64::MAX);
        Self { threshold_us, ..Self::default() }
    }

    /// Whether a time is one to tell.
    #[inline(always)]
    pub(super) fn is_slow(&self, total_us: u64) -> bool {
        total_us >= self.threshold_us
    }

    /// Keeps it if it is the slowest.
    #[cold]
    pub(super) fn note(&self, slow: SlowIo) {
        let kept = match self.slowest.get() {
            None => slow,
            Some(kept) if kept.total >= slow.total => SlowIo { others: kept.others + 1, ..kept },
            Some(kept) => SlowIo { others: kept.others + 1, ..slow },
        };
        self.slowest.set(Some(kept));
    }

    /// The slowest since the last that was told, if it may be told now.
    #[inline]
    pub(super) fn take(&mut self, now: Instant) -> Option<SlowIo> {
        if self.slowest.get_mut().is_none() {
            return None;
        }
        if self.told.is_some_and(|at| now.saturating_duration_since(at) < PACE) {
            return None;
        }
        self.told = Some(now);
        self.slowest.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slow(total: u64) -> SlowIo {
        let session = SessionIndex { index: 0, life: 1 };
        let (opcode, stages) = (Opcode::Read, Stages::default());
        SlowIo { volume: VolumeIndex(0), session, opcode, total, stages, others: 0 }
    }

    #[test]
    fn the_slowest_is_told_once_a_second_with_the_number_of_the_others() {
        let (mut all, now) = (SlowIos::above(Duration::from_millis(5)), Instant::now());
        assert!(!all.is_slow(4999) && all.is_slow(5000));
        assert_eq!(all.take(now), None);
        for total in [6000, 9000, 7000] {
            all.note(slow(total));
        }
        assert_eq!(all.take(now), Some(SlowIo { others: 2, ..slow(9000) }));
        all.note(slow(8000));
        assert_eq!(all.take(now + PACE / 2), None, "too soon");
        assert_eq!(all.take(now + PACE), Some(slow(8000)));
        assert_eq!(all.take(now + 2 * PACE), None);
        assert!(!SlowIos::default().is_slow(u64::MAX - 1), "off");
    }
}
