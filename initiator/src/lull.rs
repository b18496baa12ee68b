//! [`Lull`]: whether a disk is in use, as far as its heart-beat has to know. Pure.
//!
//! The beat of the admin connection is for disks without I/O; requests that wait prove their path
//! themselves. So a disk that nobody used for [`AFTER`] is asked rarely: a host with a hundred of
//! them shall not notice it. A loss is then seen later, but still before anybody waits for it.

use std::time::{Duration, Instant};

use crate::admin::Pulse;

/// A disk without I/O for so long is not in use.
pub const AFTER: Duration = Duration::from_secs(10);

/// The I/O of a disk, as seen at each beat.
#[derive(Debug)]
pub struct Lull {
    // I/Os until then.
    seen: u64,
    // The last time there were more.
    since: Instant,
}

impl Lull {
    /// A disk that is used now.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { seen: 0, since: now }
    }

    /// The time between two beats, after so many I/Os since the beginning.
    pub fn period(&mut self, pulse: Pulse, ios: u64, now: Instant) -> Duration {
        if ios != self.seen {
            (self.seen, self.since) = (ios, now);
        }
        let idle = now.saturating_duration_since(self.since) >= AFTER;
        if idle { pulse.idle_period } else { pulse.period }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_uses_is_asked_rarely() {
        let pulse = Pulse::of(Duration::from_secs(4));
        assert!(pulse.idle_period > pulse.period);
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut lull = Lull::new(begun);
        assert_eq!(lull.period(pulse, 0, at(9)), pulse.period);
        assert_eq!(lull.period(pulse, 0, at(10)), pulse.idle_period);
        assert_eq!(lull.period(pulse, 0, at(9999)), pulse.idle_period);
        // One I/O, and it is asked often again for a while.
        assert_eq!(lull.period(pulse, 1, at(10_000)), pulse.period);
        assert_eq!(lull.period(pulse, 1, at(10_009)), pulse.period);
        assert_eq!(lull.period(pulse, 1, at(10_010)), pulse.idle_period);
        // A clock that was stopped is no I/O.
        assert_eq!(lull.period(pulse, 1, begun), pulse.period);
    }
}
