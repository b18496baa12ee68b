//! [`Moment`]: the time of a turn of a data thread, as an [`Instant`] and as [`Micros`];
//! [`MomentClock`]: reads both at once.
//!
//! The difference of two `Instant`s takes about a hundred instructions: too many for each I/O. The
//! difference of two `Micros` is one subtraction.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

/// How far back a [`Moment`] may lie of the first that was asked for.
const PAST: Duration = Duration::from_secs(3600);

/// Whole microseconds since a moment that is the same for the whole process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Micros(u64);

impl Micros {
    /// A time of `us` microseconds.
    #[must_use]
    pub const fn new(us: u64) -> Self {
        Self(us)
    }

    /// Microseconds since an earlier time; 0, if it is not earlier.
    #[inline(always)]
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The time `us` microseconds later.
    #[inline(always)]
    #[must_use]
    pub const fn later(self, us: u64) -> Self {
        Self(self.0.saturating_add(us))
    }
}

/// The time of a turn.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    instant: Instant,
    us: Micros,
}

impl Moment {
    /// For deadlines.
    #[inline(always)]
    #[must_use]
    pub const fn instant(&self) -> Instant {
        self.instant
    }

    /// For the times of I/Os.
    #[inline(always)]
    #[must_use]
    pub const fn us(&self) -> Micros {
        self.us
    }
}

/// Costs a difference of `Instant`s: where each turn needs one, use a [`MomentClock`].
impl From<Instant> for Moment {
    fn from(instant: Instant) -> Self {
        static START: OnceLock<Instant> = OnceLock::new();
        let start = START.get_or_init(|| instant.checked_sub(PAST).unwrap_or(instant));
        let since = instant.saturating_duration_since(*start).as_micros();
        Self { instant, us: Micros(u64::try_from(since).unwrap_or(u64::MAX)) }
    }
}

/// The clock of a thread: the same time as that of [`Instant::now`].
#[derive(Debug)]
pub struct MomentClock {
    start: Moment,
    start_ns: Option<u64>,
}

impl Default for MomentClock {
    fn default() -> Self {
        Self { start: Moment::from(Instant::now()), start_ns: monotonic_ns() }
    }
}

impl MomentClock {
    /// The time now.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Moment {
        match (monotonic_ns(), self.start_ns) {
            (Some(now), Some(start)) => {
                let ns = now.saturating_sub(start);
                let Moment { instant, us } = self.start;
                Moment { instant: instant + Duration::from_nanos(ns), us: Micros(us.0 + ns / 1000) }
            }
            _ => Moment::from(Instant::now()),
        }
    }
}

/// The kernel's clock that [`Instant`] is read from.
#[inline]
fn monotonic_ns() -> Option<u64> {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).ok()?;
    let seconds = u64::try_from(time.tv_sec()).ok()?;
    Some(seconds.wrapping_mul(1_000_000_000).wrapping_add(u64::try_from(time.tv_nsec()).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_tells_the_same_time_twice() {
        let clock = MomentClock::default();
        assert!(clock.start_ns.is_some(), "the kernel has the clock");
        let mut last = clock.now();
        for _ in 0..1000 {
            let now = clock.now();
            assert!(now.us() >= last.us() && now.instant() >= last.instant());
            // Of the same nanoseconds; each is rounded down once.
            let told = Moment::from(now.instant()).us();
            assert!(told.since(now.us()) <= 1 && now.us().since(told) <= 1, "{now:?} {told:?}");
            last = now;
        }
        // The clock started at `Instant::now`, so it lags by no more than that call took.
        assert!(Instant::now() >= last.instant());
    }

    #[test]
    fn differences_are_microseconds() {
        let first = Instant::now();
        let later = Moment::from(first + Duration::from_micros(1234));
        assert_eq!(later.us().since(Moment::from(first).us()), 1234);
        assert_eq!(Moment::from(first).us().since(later.us()), 0);
        assert_eq!(Micros::new(7).since(Micros::new(5)), 2);
        assert_eq!(Micros::new(5).later(2), Micros::new(7));
    }
}
