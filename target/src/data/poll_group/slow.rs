//! [`SlowIos`]: commands that took longer than an administrator's threshold, on their way to
//! control.
//!
//! Only the slowest command since the last report is kept, so a slow command costs no memory. A
//! command that is answered in the turn that found it is not checked, unless it was kept before
//! that, for a limit or a snapshot; any other costs one comparison. A command is not reported
//! before its answer.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_protocol::Opcode;

use crate::data::poll_group::trace_ring::TraceRing;
use crate::volume::ids::{SessionIndex, VolumeIndex};
use rblk_operate::target::traffic::Stages;

/// Time between two reports.
const PACE: Duration = Duration::from_secs(1);

/// A command that took long. Times are in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlowIo {
    /// The volume.
    pub volume: VolumeIndex,
    /// The session of the command.
    pub session: SessionIndex,
    /// The opcode of the command.
    pub opcode: Opcode,
    /// From arrival to answer.
    pub total: u64,
    /// The stages of the wait.
    pub stages: Stages,
    /// Number of other slow commands since the last report.
    pub others: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct SlowIos {
    // The smaller one of the next two thresholds. Faster commands are not checked.
    threshold_us: u64,
    // Threshold of the reports to control.
    told_us: u64,
    // The ring of a running trace.
    ring: Option<Arc<TraceRing>>,
    slowest: Cell<Option<SlowIo>>,
    told: Option<Instant>,
}

impl Default for SlowIos {
    /// No command is slow.
    fn default() -> Self {
        let (threshold_us, told_us) = (u64::MAX, u64::MAX);
        Self { threshold_us, told_us, ring: None, slowest: Cell::new(None), told: None }
    }
}

impl SlowIos {
    /// Reports commands that take at least `threshold`.
    pub(super) fn above(threshold: Duration) -> Self {
        let threshold_us = u64::try_from(threshold.as_micros()).unwrap_or(u64::MAX);
        Self { threshold_us, told_us: threshold_us, ..Self::default() }
    }

    /// Also fills this ring, or no ring (`None`).
    pub(super) fn trace(&mut self, ring: Option<Arc<TraceRing>>) {
        let traced_us = ring.as_ref().map_or(u64::MAX, |ring| ring.threshold_us());
        self.threshold_us = self.told_us.min(traced_us);
        self.ring = ring;
    }

    /// The ring for a command that took this long, if it is traced.
    #[cold]
    pub(super) fn ring_for(&self, volume: VolumeIndex, total_us: u64) -> Option<&TraceRing> {
        self.ring.as_deref().filter(|ring| ring.wants(volume, total_us))
    }

    /// Whether a command that took this long is slow.
    #[inline(always)]
    pub(super) fn is_slow(&self, total_us: u64) -> bool {
        total_us >= self.threshold_us
    }

    /// Keeps the command for control if it is slow enough for a report and the slowest so far.
    #[cold]
    pub(super) fn note(&self, slow: SlowIo) {
        if slow.total < self.told_us {
            return;
        }
        let kept = match self.slowest.get() {
            None => slow,
            Some(kept) if kept.total >= slow.total => SlowIo { others: kept.others + 1, ..kept },
            Some(kept) => SlowIo { others: kept.others + 1, ..slow },
        };
        self.slowest.set(Some(kept));
    }

    /// The slowest command since the last report, if a report is due.
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
    fn the_slowest_is_reported_once_a_second_with_the_number_of_the_others() {
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

    #[test]
    fn a_trace_lowers_the_bound_of_its_volume_and_ends_with_its_ring() {
        for told in [None, Some(Duration::from_millis(5))] {
            let mut all = told.map_or_else(SlowIos::default, SlowIos::above);
            let ring = TraceRing::new(VolumeIndex(0), Duration::from_millis(2));
            all.trace(Some(Arc::new(ring)));
            assert!(!all.is_slow(1999) && all.is_slow(2000));
            assert!(all.ring_for(VolumeIndex(0), 2000).is_some());
            assert!(all.ring_for(VolumeIndex(1), 9000).is_none(), "of another volume");
            all.note(slow(4999));
            assert_eq!(all.take(Instant::now()), None, "control is told of what it was before");
            all.trace(None);
            assert!(all.ring_for(VolumeIndex(0), 9000).is_none());
            assert!(!all.is_slow(4999) && all.is_slow(5000) == told.is_some());
        }
    }
}
