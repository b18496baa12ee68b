//! [`Histogram`]: distributions of times, in bins as fio has them.
//!
//! 64 bins for each power of two, so a bin is never wider than 1.6 % of its times, and the whole
//! range up to an hour takes 20 KiB. Recording takes a few instructions and never allocates.

use crate::result::Latency;

/// Bins for each power of two, as a power of two.
const LINES_BITS: u32 = 6;
const LINES: usize = 1 << LINES_BITS;
/// Powers of two above the first 64 nanoseconds; later times fall into the last bin.
const GROUPS: usize = 36;
const BINS: usize = LINES * (GROUPS + 1);

/// A distribution of times in nanoseconds.
#[derive(Clone, Debug)]
pub struct Histogram {
    bins: Box<[u64]>,
    count: u64,
    sum: u128,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl Histogram {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self { bins: vec![0; BINS].into_boxed_slice(), count: 0, sum: 0, max: 0 }
    }

    /// From bins and how many times are in each, as fio tells it.
    #[must_use]
    pub fn of_bins(bins: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut all = Self::new();
        for (ns, count) in bins {
            all.record_many(ns, count);
        }
        all
    }

    /// Takes one time in.
    pub fn record(&mut self, ns: u64) {
        self.record_many(ns, 1);
    }

    /// Takes `count` equal times in.
    pub fn record_many(&mut self, ns: u64, count: u64) {
        if count == 0 {
            return;
        }
        self.bins[bin_of(ns)] += count;
        self.count += count;
        self.sum += u128::from(ns) * u128::from(count);
        self.max = self.max.max(ns);
    }

    /// Takes all times of another one in.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.bins.iter_mut().zip(&*other.bins) {
            *mine += theirs;
        }
        self.count += other.count;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// How many times were taken in.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean; 0 of none.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "53 bits are more than the clock has")]
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The time that `millionths` of a million did not exceed: the middle of its bin, at most the
    /// longest. 0 of none.
    #[must_use]
    pub fn at(&self, millionths: u32) -> u64 {
        let wanted = (u128::from(self.count) * u128::from(millionths)).div_ceil(1_000_000).max(1);
        let mut seen = 0;
        for (bin, count) in self.bins.iter().enumerate() {
            seen += u128::from(*count);
            if seen >= wanted {
                return middle_of(bin).min(self.max);
            }
        }
        self.max
    }

    /// Bins that are not empty, each as the middle of its times and how many they are, ascending.
    #[must_use]
    pub fn bins(&self) -> Vec<(u64, u64)> {
        let full = self.bins.iter().enumerate().filter(|(_, count)| **count > 0);
        full.map(|(bin, count)| (middle_of(bin).min(self.max), *count)).collect()
    }

    /// All that a report wants of it.
    #[must_use]
    pub fn latency(&self) -> Latency {
        Latency {
            mean_ns: self.mean(),
            p50: self.at(500_000),
            p90: self.at(900_000),
            p95: self.at(950_000),
            p99: self.at(990_000),
            p999: self.at(999_000),
            p9999: self.at(999_900),
            max: self.max,
            bins: self.bins(),
        }
    }
}

fn bin_of(ns: u64) -> usize {
    let top = ns.checked_ilog2().unwrap_or(0);
    // Below 128 every nanosecond has its own.
    let shift = top.saturating_sub(LINES_BITS);
    let line = usize::try_from(ns >> shift).unwrap_or(usize::MAX);
    (((shift as usize) << LINES_BITS) + line).min(BINS - 1)
}

/// The middle of a bin's times.
fn middle_of(bin: usize) -> u64 {
    if bin < 2 * LINES {
        return bin as u64;
    }
    let shift = bin / LINES - 1;
    let first = ((bin % LINES + LINES) as u64) << shift;
    first + (1 << (shift - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bin_is_near_its_times() {
        let mut last = 0;
        for power in 0..40 {
            for step in 0..200_u64 {
                let ns = (1_u64 << power) + step * (1_u64 << power) / 200;
                let bin = bin_of(ns);
                assert!(bin >= last, "{ns}: bins ascend");
                last = bin;
                let middle = middle_of(bin);
                assert!(middle.abs_diff(ns) * 100 <= ns, "{ns} is told as {middle}");
                assert_eq!(bin_of(middle), bin, "{ns}: the middle is inside");
            }
        }
        assert_eq!(bin_of(0), 0);
        assert_eq!(bin_of(u64::MAX), BINS - 1);
    }

    #[test]
    fn percentiles_are_those_of_the_times() {
        let mut histogram = Histogram::new();
        assert_eq!((histogram.at(500_000), histogram.latency().max), (0, 0));
        for us in 1..=10_000 {
            histogram.record(us * 1000);
        }
        let latency = histogram.latency();
        for (told, true_ns) in [
            (latency.p50, 5_000_000_u64),
            (latency.p90, 9_000_000),
            (latency.p99, 9_900_000),
            (latency.p9999, 9_999_000),
        ] {
            assert!(told.abs_diff(true_ns) * 100 <= true_ns, "{told} for {true_ns}");
        }
        assert_eq!(latency.max, 10_000_000);
        assert!((latency.mean_ns - 5_000_500.0).abs() < 1.0);
        assert_eq!(latency.bins.iter().map(|(_, count)| count).sum::<u64>(), 10_000);
        assert!(latency.bins.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert_eq!(histogram.at(0), histogram.at(1));
        assert_eq!(histogram.at(1_000_000), 10_000_000);
    }

    #[test]
    fn bins_make_the_same_histogram_again() {
        let mut histogram = Histogram::new();
        for n in 0..5000_u64 {
            histogram.record(n * n * 7 + 13);
        }
        let again = Histogram::of_bins(histogram.bins());
        assert_eq!(again.bins(), histogram.bins());
        assert_eq!(again.at(990_000), histogram.at(990_000));
        let mut both = histogram.clone();
        both.merge(&again);
        assert_eq!(both.count(), 10_000);
        assert_eq!(both.at(500_000), histogram.at(500_000));
    }
}
