//! [`HostSeconds`]: whole seconds of the clock that all processes of a host have in common. Pure.
//!
//! Each mount is a process with a heart-beat of its own. Heart-beats on whole seconds fall
//! together: the host wakes once for many mounts, and their target serves many heart-beats in one
//! turn. Mounts of different hosts do not fall together, because the monotonic clock counts from
//! the boot of the host.

use std::time::{Duration, Instant};

/// Where the whole seconds of the monotonic clock are.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostSeconds {
    // One of them.
    whole: Instant,
}

impl HostSeconds {
    /// The seconds of a host with a monotonic clock that shows `clock` at `now`.
    pub(super) fn new(clock: Duration, now: Instant) -> Self {
        let since = Duration::from_nanos(clock.subsec_nanos().into());
        Self { whole: now.checked_sub(since).unwrap_or(now) }
    }

    /// The last whole second that is not after `at`; `at` itself before the first one.
    pub(super) fn not_after(self, at: Instant) -> Instant {
        let since = at.saturating_duration_since(self.whole);
        at.checked_sub(Duration::from_nanos(since.subsec_nanos().into())).unwrap_or(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_processes_of_a_host_find_the_same_seconds() {
        let begun = Instant::now();
        let ms = Duration::from_millis;
        // Two processes ask at different times; the clock of the host shows 7.25 s at `begun`.
        let first = HostSeconds::new(ms(7250), begun);
        let second = HostSeconds::new(ms(9875), begun + ms(2625));
        for seconds in [first, second] {
            assert_eq!(seconds.not_after(begun + ms(10_000)), begun + ms(9750));
            assert_eq!(seconds.not_after(begun + ms(9750)), begun + ms(9750));
            assert_eq!(seconds.not_after(begun + ms(10_749)), begun + ms(9750));
        }
    }
}
