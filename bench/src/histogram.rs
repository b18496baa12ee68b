//! [`Histogram`]: distributions of times, in bins as fio has them.
//!
//! 64 bins for each power of two, so a bin is never wider than 1.6 % of its times, and the whole
//! range up to an hour takes 20 KiB. Recording takes a few instructions and never allocates.

/// Bins for each power of two, as a power of two.
const LINES_BITS: u32 = 6;
const LINES: usize = 1 << LINES_BITS;
/// Powers of two above the first 64 nanoseconds; later times fall into the last bin.
const GROUPS: usize = 36;
const BINS: usize = LINES * (GROUPS + 1);

/// A distribution of times in nanoseconds.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    bins: Box<[u64]>,
    count: u64,
    max: u64,
}

impl Histogram {
    pub(crate) fn new() -> Self {
        Self { bins: vec![0; BINS].into_boxed_slice(), count: 0, max: 0 }
    }

    pub(crate) fn record(&mut self, ns: u64) {
        self.bins[bin_of(ns)] += 1;
        self.count += 1;
        self.max = self.max.max(ns);
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The time that `millionths` of a million did not exceed: the middle of its bin, at most the
    /// longest. 0 of none.
    pub(crate) fn at(&self, millionths: u32) -> u64 {
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
}

fn bin_of(ns: u64) -> usize {
    let top = ns.checked_ilog2().unwrap_or(0);
    let shift = top.saturating_sub(LINES_BITS);
    let line = usize::try_from(ns >> shift).unwrap_or(usize::MAX);
    (((shift as usize) << LINES_BITS) + line).min(BINS - 1)
}

fn middle_of(bin: usize) -> u64 {
    if bin < 2 * LINES {
        return bin as u64;
    }
    let shift = bin / LINES - 1;
    let first = ((bin % LINES + LINES) as u64) << shift;
    first + (1 << (shift - 1))
}

#[cfg(test)]
mod tests;
