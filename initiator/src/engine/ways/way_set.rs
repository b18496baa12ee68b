//! [`WaySet`]: some of the ways of a mount.

use rblk_protocol::limits::WAYS_MAX;

use super::WayIndex;

const _: () = assert!(WAYS_MAX <= 8, "a bit for each way");

/// A set of ways: one bit each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct WaySet(u8);

impl WaySet {
    /// No way.
    pub const NONE: Self = Self(0);

    /// Whether there is none.
    #[must_use]
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many there are.
    #[must_use]
    #[inline]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether a way is one of them.
    #[must_use]
    #[inline]
    pub fn has(self, way: WayIndex) -> bool {
        self.0 & 1 << way.0 != 0
    }

    /// Adds a way.
    pub fn insert(&mut self, way: WayIndex) {
        self.0 |= 1 << way.0;
    }

    /// Removes a way.
    pub fn remove(&mut self, way: WayIndex) {
        self.0 &= !(1 << way.0);
    }

    /// The ways in order.
    pub fn iter(self) -> impl Iterator<Item = WayIndex> {
        (0..8).map(WayIndex).filter(move |way| self.has(*way))
    }

    /// The one with that number in the order, counted from 0 and around.
    #[must_use]
    #[inline]
    pub fn nth(self, number: usize) -> Option<WayIndex> {
        if self.is_empty() {
            return None;
        }
        let mut left = self.0;
        for _ in 0..number % self.len() {
            // Clears the lowest bit.
            left &= left - 1;
        }
        WayIndex::new(left.trailing_zeros() as usize)
    }
}

impl FromIterator<WayIndex> for WaySet {
    fn from_iter<T: IntoIterator<Item = WayIndex>>(ways: T) -> Self {
        let mut set = Self::NONE;
        ways.into_iter().for_each(|way| set.insert(way));
        set
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_set_of_numbers(steps in proptest::collection::vec((0usize..8, any::<bool>()), 0..20)) {
            let (mut set, mut model) = (WaySet::NONE, BTreeSet::new());
            for (place, adds) in steps {
                let way = WayIndex::new(place).unwrap();
                if adds {
                    set.insert(way);
                    model.insert(way);
                } else {
                    set.remove(way);
                    model.remove(&way);
                }
                prop_assert!(set.iter().eq(model.iter().copied()));
                prop_assert_eq!((set.len(), set.is_empty()), (model.len(), model.is_empty()));
                for number in 0..20 {
                    let expected = model.iter().nth(number % model.len().max(1)).copied();
                    prop_assert_eq!(set.nth(number), expected);
                }
                prop_assert_eq!(model.iter().copied().collect::<WaySet>(), set);
            }
        }
    }
}
