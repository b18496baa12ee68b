//! [`Bucket`]: a rate with a burst, as a generic cell rate algorithm (GCRA): one number that all
//! poll groups change by one compare-and-swap for each command. Pure, in integers.
//!
//! The number is the time at which all work taken so far is paid for. Each take advances it by the
//! cost of the work. The work may be done as soon as that time is at most one burst ahead.
//!
//! Guarantee, if work is done at the times that [`Bucket::take`] returns: in any time `t`, at most
//! `rate * t + burst` is done, where no single piece of work exceeds the burst. Costs are rounded
//! up. A source that always has work gets the rate: a piece of work that is late by less than the
//! burst does not delay the pieces behind it.

use std::sync::atomic::{AtomicU64, Ordering};

use rblk_runtime::Micros;

/// Ticks in a microsecond: fine enough for the cost of one byte at 1 TiB/s within 2 %.
const TICKS_PER_US: u64 = 1 << 14;
const TICKS_PER_SECOND: u64 = TICKS_PER_US * 1_000_000;

/// A time, or a length of time, of 2^-14 microseconds. 35 years fit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Ticks(pub(crate) u64);

impl Ticks {
    /// The time of a turn.
    #[inline]
    pub(crate) fn of(now: Micros) -> Self {
        Self(now.since(Micros::new(0)).saturating_mul(TICKS_PER_US))
    }

    /// Whole microseconds from `now` to this time, rounded up; 0 if it is past.
    pub(crate) fn us_after(self, now: Self) -> u64 {
        self.0.saturating_sub(now.0).div_ceil(TICKS_PER_US)
    }
}

/// A rate with a burst. See the module.
#[derive(Debug)]
pub(crate) struct Bucket {
    rate: u64,
    // How far `paid` may be ahead of the time at which work is done.
    burst: u64,
    paid: AtomicU64,
}

impl Bucket {
    /// A full bucket for `rate` work per second and `burst` work at once; each at least 1.
    pub(crate) fn new(rate: u64, burst: u64) -> Self {
        let rate = rate.max(1);
        let ticks = u128::from(burst) * u128::from(TICKS_PER_SECOND) / u128::from(rate);
        // A year or more is as good as no limit.
        let burst = u64::try_from(ticks).unwrap_or(u64::MAX).min(1 << 60);
        Self { rate, burst, paid: AtomicU64::new(0) }
    }

    #[inline]
    fn cost(&self, work: u32) -> u64 {
        // The product of 2^32 and 2^34 needs more than 64 bits.
        let ticks = u128::from(work) * u128::from(TICKS_PER_SECOND);
        match u64::try_from(ticks) {
            Ok(ticks) => ticks.div_ceil(self.rate),
            Err(_) => u64::try_from(ticks.div_ceil(u128::from(self.rate))).unwrap_or(u64::MAX),
        }
    }

    /// Takes work, and returns the time at which it may be done: `now`, or later.
    #[inline]
    pub(crate) fn take(&self, work: u32, now: Ticks) -> Ticks {
        let cost = self.cost(work);
        let after = |paid: u64| paid.max(now.0).saturating_add(cost);
        let paid =
            self.paid.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |paid| Some(after(paid)));
        let (Ok(paid) | Err(paid)) = paid;
        Ticks(after(paid).saturating_sub(self.burst).max(now.0))
    }

    /// Returns work that was taken and will not be done, so that others need not wait for it.
    #[cold]
    pub(crate) fn give_back(&self, work: u32) {
        let cost = self.cost(work);
        let less = |paid: u64| Some(paid.saturating_sub(cost));
        // The closure always returns `Some`.
        let _ = self.paid.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn us(us: u64) -> Ticks {
        Ticks(us * TICKS_PER_US)
    }

    proptest! {
        #[test]
        fn no_window_has_more_than_its_rate_and_the_burst(
            rate in 10_u64..2_000_000,
            burst in 1_u64..5_000,
            // The pause before each piece of work, in microseconds, and its size as a share.
            steps in proptest::collection::vec((0_u64..20_000, 1_u32..100), 1..200),
        ) {
            let bucket = Bucket::new(rate, burst);
            let mut now = us(1_000_000);
            let mut done = Vec::new();
            for (pause, share) in steps {
                now.0 += us(pause).0;
                let work = u32::try_from(burst * u64::from(share) / 100).unwrap().max(1);
                // The work is done as soon as it may be, and the next piece comes after it.
                now = now.max(bucket.take(work, now));
                done.push((now, work));
            }
            for from in 0..done.len() {
                let mut sum = 0_u128;
                for (at, work) in &done[from..] {
                    sum += u128::from(*work) * u128::from(TICKS_PER_SECOND);
                    let time = u128::from(at.0 - done[from].0.0);
                    let most = time * u128::from(rate)
                        + u128::from(burst) * u128::from(TICKS_PER_SECOND);
                    prop_assert!(sum <= most, "{sum} of {most}");
                }
            }
        }

        #[test]
        fn a_busy_source_gets_its_rate_though_it_is_late(
            rate in 10_u64..2_000_000,
            burst in 1_u64..1000,
            late in proptest::collection::vec(0_u64..100, 500),
        ) {
            let bucket = Bucket::new(rate, burst);
            let (begin, mut now) = (us(1_000_000), us(1_000_000));
            // Late by a part of the burst, like a thread that slept too long.
            let burst_ticks = burst * TICKS_PER_SECOND / rate;
            let one = TICKS_PER_SECOND.div_ceil(rate);
            for share in &late {
                let due = bucket.take(1, now);
                if due > now {
                    now = Ticks(due.0 + burst_ticks.saturating_sub(one) * share / 100);
                }
            }
            let done = u64::try_from(late.len()).unwrap();
            let fair = u128::from(done) * u128::from(TICKS_PER_SECOND) / u128::from(rate);
            let took = u128::from(now.0 - begin.0);
            // Beyond the last lateness: at most 5 % more than at the rate.
            prop_assert!(took <= fair * 105 / 100 + u128::from(burst_ticks) + 1, "{took} {fair}");
        }
    }

    #[test]
    fn after_a_pause_a_burst_comes_at_once_and_then_the_rate() {
        let bucket = Bucket::new(1000, 3);
        let at = |now| bucket.take(1, us(now)).us_after(us(now));
        assert_eq!([at(5_000_000), at(5_000_000), at(5_000_000)], [0, 0, 0]);
        assert_eq!([at(5_000_000), at(5_000_000)], [1000, 2000]);
        // The booked work is paid, and at most the burst comes back.
        assert_eq!([at(9_000_000), at(9_000_000), at(9_000_000), at(9_000_000)], [0, 0, 0, 1000]);
    }

    #[test]
    fn returned_work_does_not_delay_others() {
        let bucket = Bucket::new(1000, 1);
        let now = us(5_000_000);
        assert_eq!(bucket.take(1, now), now);
        for _ in 0..1000 {
            assert_eq!(bucket.take(1, now).us_after(now), 1000);
            bucket.give_back(1);
        }
        assert_eq!(bucket.take(1, now).us_after(now), 1000);
        // At most the taken work comes back.
        bucket.give_back(u32::MAX);
        assert_eq!(
            [bucket.take(1, now), bucket.take(1, now)].map(|at| at.us_after(now)),
            [0, 1000]
        );
    }

    #[test]
    fn numbers_at_the_edge_do_not_wrap() {
        let slow = Bucket::new(0, u64::MAX);
        assert_eq!(slow.take(1, us(7)), us(7));
        assert_eq!(slow.take(u32::MAX, us(7)), Ticks(u64::MAX - (1 << 60)));
        let none = Bucket::new(1, 0);
        assert_eq!(none.take(1, us(7)), us(1_000_007));
        let full = Bucket::new(1, 0);
        full.paid.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(full.take(1, us(7)), Ticks(u64::MAX));
        let fast = Bucket::new(u64::MAX, 1);
        assert_eq!(fast.take(u32::MAX, us(7)), Ticks(us(7).0 + 4));
    }

    #[test]
    fn work_above_the_burst_goes_at_the_rate() {
        let bucket = Bucket::new(1000, 1);
        let mut now = us(1_000_000);
        for _ in 0..10 {
            now = now.max(bucket.take(50, now));
        }
        // The first piece waits until it is paid for, less the burst.
        assert_eq!(now.us_after(us(1_000_000)), 10 * 50_000 - 1000);
    }
}
