//! Log-linear bins: each power of two is cut into `1 << BITS` bins of equal width. Pure numbers.
//!
//! Numbers below `2 << BITS` have a bin each. The width of any other bin is at most `1 / (1 <<
//! BITS)` of its first number, so the middle of a bin is at most half of that away from any number
//! in it.

/// The bin of a number.
#[allow(clippy::cast_possible_truncation, reason = "a line is below `2 << BITS`")]
#[inline(always)]
#[must_use]
pub const fn bin_of<const BITS: u32>(number: u64) -> usize {
    // Numbers below `1 << BITS` have a bin each, as those of the next power of two have.
    let shift = (number | 1 << BITS).ilog2() - BITS;
    // At most 64 << BITS and a little.
    ((shift as usize) << BITS) + (number >> shift) as usize
}

/// The first number of a bin, and how many numbers it has.
#[must_use]
pub const fn range_of<const BITS: u32>(bin: usize) -> (u64, u64) {
    let lines = 1_usize << BITS;
    if bin < 2 * lines {
        return (bin as u64, 1);
    }
    let shift = bin / lines - 1;
    (((bin % lines + lines) as u64) << shift, 1 << shift)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check<const BITS: u32>(number: u64) {
        let bin = bin_of::<BITS>(number);
        let (first, width) = range_of::<BITS>(bin);
        assert!(number >= first && number - first < width, "{number} in {first}+{width}");
        assert!(width == 1 || width << BITS <= first, "{first}+{width} is too wide");
        let (next, _) = range_of::<BITS>(bin + 1);
        assert_eq!(first + width, next, "no number is between two bins");
    }

    proptest! {
        #[test]
        fn a_number_is_in_its_bin(number in 0..=u64::MAX >> 1, bits in 0..63_u32) {
            check::<2>(number >> bits);
            check::<6>(number >> bits);
        }
    }

    #[test]
    fn bins_ascend_without_a_gap() {
        let mut last = 0;
        for number in 0..100_000 {
            let bin = bin_of::<2>(number);
            assert!(bin == last || bin == last + 1, "{number}");
            last = bin;
        }
    }
}
