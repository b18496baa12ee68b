//! [`Pulse`]: how often an initiator asks whether its target lives, and how long it waits for the
//! answer. [`DiskUse`]: whether a disk is in use. Pure.
//!
//! The KEEP_ALIVEs of the admin connection are for disks without I/O, because requests that wait
//! prove their path themselves. So the target of a disk that was not used for [`IDLE_AFTER`] is
//! asked rarely: a host with a hundred such disks must not notice them. A loss is then seen later,
//! but still before a request waits for it.

use std::time::{Duration, Instant};

/// A disk without I/O for so long is not in use.
pub(crate) const IDLE_AFTER: Duration = Duration::from_secs(10);

/// How often a session proves that its target lives, and how long the target may take to answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pulse {
    /// Between an answer and the next question.
    pub period: Duration,
    /// The same for a disk that is not in use: see [`DiskUse`].
    pub idle_period: Duration,
    /// Between a question and its answer.
    pub timeout: Duration,
}

impl Pulse {
    /// A pulse that sees a loss within `detect`, where an eighth is left for a thread that wakes
    /// late. On a disk that is not in use, it sees the loss within three times `detect`; a target
    /// waits for four times that.
    #[must_use]
    pub fn of(detect: Duration) -> Self {
        Self { period: detect / 4, idle_period: detect * 2, timeout: detect * 5 / 8 }
    }
}

/// The I/O of a disk, as seen at each KEEP_ALIVE.
#[derive(Debug)]
pub(crate) struct DiskUse {
    // I/Os until then.
    seen: u64,
    // The last time there were more.
    since: Instant,
}

impl DiskUse {
    /// A disk that is in use now.
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
        // One I/O, and it is asked often again for a while.
        assert_eq!(disk.period(pulse, 1, at(10_000)), pulse.period);
        assert_eq!(disk.period(pulse, 1, at(10_009)), pulse.period);
        assert_eq!(disk.period(pulse, 1, at(10_010)), pulse.idle_period);
        // A clock that was stopped is no I/O.
        assert_eq!(disk.period(pulse, 1, begun), pulse.period);
    }
}
