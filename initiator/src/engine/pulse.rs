//! [`Pulse`]: the interval of an initiator's KEEP_ALIVEs, and the time for their answers.
//! [`DiskUse`]: whether a disk is in use. Pure.
//!
//! The KEEP_ALIVEs of the admin connection are for disks without I/O, because waiting requests test
//! their path themselves. So the target of a disk without I/O for [`IDLE_AFTER`] is asked rarely: a
//! host with a hundred idle disks must not notice the cost. A loss is then noticed later, but still
//! before a request waits for it.

use std::time::{Duration, Instant};

/// A disk without I/O for so long is not in use.
pub(crate) const IDLE_AFTER: Duration = Duration::from_secs(10);

/// The interval of the proofs that a session's target lives, and the time for each answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pulse {
    /// From an answer to the next question.
    pub period: Duration,
    /// The period for a disk that is not in use: see [`DiskUse`].
    pub idle_period: Duration,
    /// From a question to its answer.
    pub timeout: Duration,
}

impl Pulse {
    /// A pulse that notices a loss within `detect`, with an eighth left for a thread that wakes
    /// late. On an idle disk, it notices the loss within three times `detect`; a target waits for
    /// four times that.
    #[must_use]
    pub fn of(detect: Duration) -> Self {
        Self { period: detect / 4, idle_period: detect * 2, timeout: detect * 5 / 8 }
    }
}

/// The I/O of a disk at each KEEP_ALIVE.
#[derive(Debug)]
pub(crate) struct DiskUse {
    // I/Os at the last KEEP_ALIVE.
    seen: u64,
    // The last time with new I/Os.
    since: Instant,
}

impl DiskUse {
    /// A disk in use.
    #[must_use]
    pub(crate) fn new(now: Instant) -> Self {
        Self { seen: 0, since: now }
    }

    /// The time between two KEEP_ALIVEs, after `ios` I/Os since the beginning.
    pub(crate) fn period(&mut self, pulse: Pulse, ios: u64, now: Instant) -> Duration {
        if ios != self.seen {
            (self.seen, self.since) = (ios, now);
        }
        let idle = now.saturating_duration_since(self.since) >= IDLE_AFTER;
        if idle { pulse.idle_period } else { pulse.period }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_of_an_idle_disk_is_asked_rarely() {
        let pulse = Pulse::of(Duration::from_secs(4));
        assert!(pulse.idle_period > pulse.period);
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut disk = DiskUse::new(begun);
        assert_eq!(disk.period(pulse, 0, at(9)), pulse.period);
        assert_eq!(disk.period(pulse, 0, at(10)), pulse.idle_period);
        assert_eq!(disk.period(pulse, 0, at(9999)), pulse.idle_period);
        // After one I/O, the target is asked often again for a while.
        assert_eq!(disk.period(pulse, 1, at(10_000)), pulse.period);
        assert_eq!(disk.period(pulse, 1, at(10_009)), pulse.period);
        assert_eq!(disk.period(pulse, 1, at(10_010)), pulse.idle_period);
        // A clock that stood still is no I/O.
        assert_eq!(disk.period(pulse, 1, begun), pulse.period);
    }
}
