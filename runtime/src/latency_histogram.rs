//! [`Latency`]: a histogram of times that one data thread writes and any thread reads, and
//! [`LatencyCounts`]: its counts at one moment, or the sum of several.
//!
//! Times are whole microseconds, rounded down. The bins are log-linear
//! ([`log_linear`](crate::log_linear)): four for each power of two, from 1 µs to 67 s; the last bin
//! is open. A quantile is the middle of its bin, so it is at most 12.5 % and 1 µs away
//! from the time itself. The mean is exact.
//!
//! Recording takes a few instructions. It takes no lock and allocates nothing.

use serde::{Deserialize, Serialize};

use crate::Counter;
use crate::log_linear::{bin_of, range_of};

/// Four bins for each power of two.
const BITS: u32 = 2;
/// 2^26 µs are 67 s: the first time of the last bin.
const BINS: usize = bin_of::<BITS>(1 << 26) + 1;

/// The bin of a time in microseconds.
#[inline(always)]
fn bin(us: u64) -> usize {
    bin_of::<BITS>(us).min(BINS - 1)
}

/// A time with its bin, for many operations that take equally long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BinnedUs(u64);

impl BinnedUs {
    /// From microseconds, at most 71 minutes.
    #[inline]
    #[must_use]
    pub fn new(us: u64) -> Self {
        // Most turns are short, and these times have a bin each.
        if us < 2 << BITS {
            return Self(us << 32 | us);
        }
        let us = us.min(u32::MAX.into());
        // The bin is above the 32 bits of the time.
        Self((bin(us) as u64) << 32 | us)
    }

    /// The time in microseconds.
    #[inline(always)]
    #[must_use]
    pub const fn us(self) -> u64 {
        self.0 & 0xffff_ffff
    }

    #[inline(always)]
    const fn bin(self) -> usize {
        (self.0 >> 32) as usize
    }
}

/// A histogram with one writer.
#[derive(Debug)]
pub struct Latency {
    sum_us: Counter,
    bins: [Counter; BINS],
}

impl Default for Latency {
    fn default() -> Self {
        Self { sum_us: Counter::default(), bins: [const { Counter::zero() }; BINS] }
    }
}

impl Latency {
    /// Takes a time in. Only the owning thread may call it.
    #[inline]
    pub fn record(&self, us: u64) {
        self.bins[bin(us)].add(1);
        self.sum_us.add(us);
    }

    /// Takes a time in. Only the owning thread may call it.
    #[inline(always)]
    pub fn record_binned(&self, time: BinnedUs) {
        self.bins[time.bin()].add(1);
        self.sum_us.add(time.us());
    }

    /// Takes a time of less than a microsecond in. Only the owning thread may call it.
    #[inline(always)]
    pub fn record_zero(&self) {
        self.bins[0].add(1);
    }

    /// The counts now. The numbers are read one after the other, so they are not of exactly one
    /// moment.
    #[must_use]
    pub fn snapshot(&self) -> LatencyCounts {
        let used = self.bins.iter().rposition(|bin| bin.get() > 0).map_or(0, |last| last + 1);
        LatencyCounts {
            sum_us: self.sum_us.get(),
            bins: self.bins[..used].iter().map(Counter::get).collect(),
        }
    }
}

/// The times of a [`Latency`] at one moment; also a sum or a difference of several.
///
/// In JSON: `count`, `sum_us`, and `buckets` that are not empty, each as `[upper_us, count]`: the
/// count is that of this bucket alone, and its times are shorter than `upper_us`. The last bucket
/// is open: its `upper_us` is `null`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Sparse", into = "Sparse")]
pub struct LatencyCounts {
    sum_us: u64,
    // By bin, up to the last that is not empty.
    bins: Vec<u64>,
}

/// How it is written.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Sparse {
    count: u64,
    sum_us: u64,
    buckets: Vec<(Option<u64>, u64)>,
}

impl From<Sparse> for LatencyCounts {
    fn from(sparse: Sparse) -> Self {
        let mut counts = Self { sum_us: sparse.sum_us, bins: Vec::new() };
        for (upper_us, count) in sparse.buckets {
            counts.add_to(upper_us.map_or(BINS - 1, |upper| bin(upper.saturating_sub(1))), count);
        }
        counts
    }
}

impl From<LatencyCounts> for Sparse {
    fn from(counts: LatencyCounts) -> Self {
        Self { count: counts.count(), sum_us: counts.sum_us, buckets: counts.buckets().collect() }
    }
}

impl LatencyCounts {
    fn add_to(&mut self, bin: usize, count: u64) {
        if count == 0 {
            return;
        }
        if self.bins.len() <= bin {
            self.bins.resize(bin + 1, 0);
        }
        self.bins[bin] = self.bins[bin].wrapping_add(count);
    }

    /// Takes a time in.
    pub fn record(&mut self, us: u64) {
        self.add_to(bin(us), 1);
        self.sum_us = self.sum_us.wrapping_add(us);
    }

    /// Takes in `count` times of less than a microsecond.
    pub fn record_zeros(&mut self, count: u64) {
        self.add_to(0, count);
    }

    /// Takes all times of another in.
    pub fn add(&mut self, other: &Self) {
        self.sum_us = self.sum_us.wrapping_add(other.sum_us);
        other.bins.iter().enumerate().for_each(|(bin, count)| self.add_to(bin, *count));
    }

    /// The times since an earlier moment.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |bin| earlier.bins.get(bin).copied().unwrap_or(0);
        let sum_us = self.sum_us.saturating_sub(earlier.sum_us);
        let mut since = Self { sum_us, bins: Vec::new() };
        for (bin, count) in self.bins.iter().enumerate() {
            since.add_to(bin, count.saturating_sub(before(bin)));
        }
        since
    }

    /// How many times there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.bins.iter().fold(0, |sum, count| sum.wrapping_add(*count))
    }

    /// Their sum in microseconds.
    #[must_use]
    pub fn sum_us(&self) -> u64 {
        self.sum_us
    }

    /// The mean in microseconds; none of none.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "53 bits of microseconds are 285 years")]
    pub fn mean_us(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum_us as f64 / count as f64)
    }

    /// The time in microseconds that `millionths` of a million did not exceed: the middle of its
    /// bin. `None` without times. For a time in the open bin: the first time of that bin.
    #[must_use]
    pub fn quantile_us(&self, millionths: u32) -> Option<u64> {
        let count = self.count();
        let wanted = (u128::from(count) * u128::from(millionths)).div_ceil(1_000_000).max(1);
        let mut seen = 0;
        let at = self.bins.iter().position(|count| {
            seen += u128::from(*count);
            seen >= wanted
        })?;
        let (first, width) = range_of::<BITS>(at);
        Some(if at == BINS - 1 { first } else { first + width / 2 })
    }

    /// The 99th percentile: see [`Self::quantile_us`].
    #[must_use]
    pub fn p99_us(&self) -> Option<u64> {
        self.quantile_us(990_000)
    }

    /// The median: see [`Self::quantile_us`].
    #[must_use]
    pub fn p50_us(&self) -> Option<u64> {
        self.quantile_us(500_000)
    }

    /// The buckets that are not empty, ascending: each with the microseconds that its times do not
    /// reach (none: it is open), and how many times it has.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let full = self.bins.iter().enumerate().filter(|(_, count)| **count > 0);
        full.map(|(bin, count)| (upper_us(bin), *count))
    }

    /// The upper ends of all buckets that a histogram may have, ascending, without the open one.
    pub fn uppers_us() -> impl Iterator<Item = u64> {
        (0..BINS - 1).filter_map(upper_us)
    }
}

fn upper_us(bin: usize) -> Option<u64> {
    let (first, width) = range_of::<BITS>(bin);
    (bin < BINS - 1).then_some(first + width)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(times: &[u64]) -> LatencyCounts {
        let live = Latency::default();
        for us in times {
            let binned = BinnedUs::new(*us);
            if binned.us() == *us { live.record_binned(binned) } else { live.record(*us) }
        }
        live.snapshot()
    }

    fn time() -> impl Strategy<Value = u64> {
        // Every power of two is as likely as any other.
        (0..1_u64 << 26, 0..26_u32).prop_map(|(us, shift)| us >> shift)
    }

    proptest! {
        #[test]
        fn quantiles_are_those_of_the_sorted_times(
            mut times in proptest::collection::vec(time(), 1..300),
            millionths in 0..=1_000_000_u32,
        ) {
            let counts = of(&times);
            times.sort_unstable();
            let rank = (times.len() as u64 * u64::from(millionths)).div_ceil(1_000_000).max(1);
            let exact = times[usize::try_from(rank).unwrap() - 1];
            let told = counts.quantile_us(millionths).unwrap();
            prop_assert!(told.abs_diff(exact) * 8 <= exact, "{} for {}", told, exact);
            prop_assert_eq!(counts.count(), times.len() as u64);
            prop_assert_eq!(counts.sum_us(), times.iter().sum::<u64>());
        }

        #[test]
        fn a_sum_is_that_of_all_times_and_json_tells_it(
            first in proptest::collection::vec(time(), 0..100),
            second in proptest::collection::vec(0..=u64::MAX >> 8, 0..100),
        ) {
            let (one, other) = (of(&first), of(&second));
            let mut sum = one.clone();
            sum.add(&other);
            let all: Vec<u64> = first.iter().chain(&second).copied().collect();
            prop_assert_eq!(&sum, &of(&all));
            prop_assert_eq!(&sum.since(&one), &other);
            let text = serde_json::to_string(&sum).unwrap();
            prop_assert_eq!(serde_json::from_str::<LatencyCounts>(&text).unwrap(), sum);
            let mut kept = LatencyCounts::default();
            all.iter().for_each(|us| kept.record(*us));
            prop_assert_eq!(kept, of(&all));
        }
    }

    #[test]
    fn json_has_the_buckets_that_are_not_empty() {
        let counts = of(&[0, 0, 7, 8, 9, 1 << 26, u64::MAX >> 8]);
        let json = serde_json::to_value(&counts).unwrap();
        assert_eq!(json["count"], 7);
        assert_eq!(json["buckets"].to_string(), "[[1,2],[8,1],[10,2],[null,2]]");
        let empty: LatencyCounts = serde_json::from_str("{}").unwrap();
        assert_eq!((empty.count(), empty.mean_us(), empty.p99_us()), (0, None, None));
        assert_eq!(LatencyCounts::uppers_us().count(), BINS - 1);
        assert_eq!(LatencyCounts::uppers_us().last(), Some(1 << 26));
    }

    #[test]
    fn numbers_of_others_are_no_panic() {
        let text = r#"{"count": 1, "sum_us": 18446744073709551615,
            "buckets": [[0, 1], [18446744073709551615, 18446744073709551615], [null, 2]]}"#;
        let mut counts: LatencyCounts = serde_json::from_str(text).unwrap();
        counts.add(&counts.clone());
        counts.record(5);
        let _ = (counts.p99_us(), counts.mean_us(), counts.since(&counts.clone()));
    }
}
