//! [`Yields`]: when a data thread that looks for work yields its CPU.
//!
//! A yield is a system call. It pays only where another thread waits for the CPU: the peer or the
//! program on the same host, or a thread of a software device. A yield that comes back late tells
//! of such a thread; then each look yields, until none came back late for a while. Otherwise a look
//! seldom yields.
//!
//! Pure: no clock, no allocation.

use std::time::{Duration, Instant};

/// Time between two yields while no other thread wants the CPU.
const SELDOM: Duration = Duration::from_micros(20);
/// Each look yields for this time after a yield that let another thread run.
const SHARED: Duration = Duration::from_millis(2);
/// A yield longer than this multiple of the shortest one let another thread run.
const LATE_TIMES: u32 = 4;

/// The yields of a thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Yields {
    shortest: Duration,
    next: Option<Instant>,
    shared_until: Option<Instant>,
}

impl Yields {
    /// No yield so far: the first look yields.
    pub(crate) const NONE: Self = Self { shortest: Duration::MAX, next: None, shared_until: None };

    /// Whether a look at this time yields.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// A look at this time yielded, and the thread had the CPU back after `took`.
    pub(crate) fn yielded(&mut self, now: Instant, took: Duration) {
        self.shortest = self.shortest.min(took);
        let back = now + took;
        if took > self.shortest.saturating_mul(LATE_TIMES) {
            self.shared_until = Some(back + SHARED);
        }
        let shared = self.shared_until.is_some_and(|until| back < until);
        self.next = (!shared).then(|| back + SELDOM);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_nanos(400);
    const LATE: Duration = Duration::from_micros(5);

    /// Looks every microsecond for so long. Returns the yields, each of which takes `took`.
    fn looks(yields: &mut Yields, now: &mut Instant, time: Duration, took: Duration) -> u32 {
        let (end, mut count) = (*now + time, 0);
        while *now < end {
            if yields.is_due(*now) {
                yields.yielded(*now, took);
                *now += took;
                count += 1;
            }
            *now += Duration::from_micros(1);
        }
        count
    }

    #[test]
    fn a_thread_alone_seldom_yields() {
        let (mut yields, mut now) = (Yields::NONE, Instant::now());
        let count = looks(&mut yields, &mut now, Duration::from_millis(1), SHORT);
        assert!((40..=50).contains(&count), "{count}");
    }

    #[test]
    fn a_thread_that_shares_its_cpu_yields_in_each_look_until_it_is_alone() {
        let (mut yields, mut now) = (Yields::NONE, Instant::now());
        looks(&mut yields, &mut now, SELDOM, SHORT);
        let time = Duration::from_millis(6);
        let count = looks(&mut yields, &mut now, time, LATE);
        assert!(count >= 990, "{count}: every 6 us");
        // The other thread is gone.
        let count = looks(&mut yields, &mut now, SHARED, SHORT);
        assert!(count > 1000, "{count}: it may come back");
        let count = looks(&mut yields, &mut now, SHARED, SHORT);
        assert!(count <= 110, "{count}");
    }
}
