//! [`Bits`]: a set of small numbers that finds its smallest in a few steps.

/// A fixed set of numbers below a bound: words of bits, and above them words that mark the nonzero
/// words below, up to a single one. For 64 GiB of 4 KiB blocks, a search reads four words.
#[derive(Debug)]
pub(crate) struct Bits {
    len: usize,
    tiers: Vec<Box<[u64]>>,
}

impl Bits {
    /// An empty set of numbers below `len`.
    pub(crate) fn new(len: usize) -> Self {
        let mut tiers = Vec::new();
        let mut words = len;
        loop {
            words = words.div_ceil(64).max(1);
            tiers.push(vec![0; words].into_boxed_slice());
            if words == 1 {
                return Self { len, tiers };
            }
        }
    }

    /// The bound.
    #[cfg(debug_assertions)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether the set is empty.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.tiers.last().is_none_or(|word| word[0] == 0)
    }

    /// Whether a number is in the set.
    pub(crate) fn get(&self, index: usize) -> bool {
        index < self.len && (self.tiers[0][index / 64] >> (index % 64)) & 1 == 1
    }

    /// Adds a number.
    pub(crate) fn set(&mut self, mut index: usize) {
        for tier in &mut self.tiers {
            let word = &mut tier[index / 64];
            let was = *word;
            *word |= 1 << (index % 64);
            if was != 0 {
                return;
            }
            index /= 64;
        }
    }

    /// Removes a number.
    pub(crate) fn clear(&mut self, mut index: usize) {
        for tier in &mut self.tiers {
            let word = &mut tier[index / 64];
            *word &= !(1 << (index % 64));
            if *word != 0 {
                return;
            }
            index /= 64;
        }
    }

    /// The smallest number.
    pub(crate) fn first(&self) -> Option<usize> {
        if self.is_empty() {
            return None;
        }
        Some(
            self.tiers
                .iter()
                .rev()
                .fold(0, |word, tier| word * 64 + tier[word].trailing_zeros() as usize),
        )
    }

    /// The smallest number that is at least `from`.
    pub(crate) fn next(&self, from: usize) -> Option<usize> {
        let mut at = from;
        for (height, tier) in self.tiers.iter().enumerate() {
            let word = tier.get(at / 64)? & (u64::MAX << (at % 64));
            if word != 0 {
                let found = at / 64 * 64 + word.trailing_zeros() as usize;
                let below = self.tiers[..height].iter().rev();
                return Some(
                    below
                        .fold(found, |word, tier| word * 64 + tier[word].trailing_zeros() as usize),
                );
            }
            at = at / 64 + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bits_agree_with_a_set(len in 1..9000usize, steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..300)) {
            let mut bits = Bits::new(len);
            let mut set = BTreeSet::new();
            for (put, index, from) in steps {
                let index = index.index(len);
                if put {
                    bits.set(index);
                    set.insert(index);
                } else {
                    bits.clear(index);
                    set.remove(&index);
                }
                prop_assert_eq!(bits.first(), set.first().copied());
                prop_assert_eq!(bits.get(index), put);
                let from = from.index(len + 1);
                prop_assert_eq!(bits.next(from), set.range(from..).next().copied());
            }
        }
    }
}
