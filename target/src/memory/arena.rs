//! [`Arena`]: cuts one [`Region`] into extents with a buddy allocator.
//!
//! Pure bookkeeping over offsets: this code never touches the bytes. The arena keeps one bit per
//! possible free block and level (about 2 bits per 4 KiB of memory), each level with summary words
//! above it, so both calls cost a few word operations per level and never allocate. An allocation
//! takes the lowest free block of the best fitting level, which keeps the low end dense and lets
//! the high end coalesce.
//!
//! Invariants: an extent's offset is a multiple of its length; extents handed out never overlap;
//! below the top level, no free block has a free buddy.

use std::ops::Range;
use std::sync::Arc;

use rblk_fabric::Region;

use super::bits::Bits;

/// Smallest extent, in bytes. Also the strongest memory alignment a backing store may ask for.
pub(crate) const MIN_EXTENT_BYTES: u32 = 4 << 10;

/// Largest extent that an arena can be configured to hand out, in bytes.
pub(crate) const MAX_EXTENT_BYTES: u32 = 4 << 20;

/// The reason why an arena cannot be made. All numbers are bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ArenaError {
    /// The largest extent is not usable.
    #[error(
        "largest extent of {0} bytes: must be a power of two between {MIN_EXTENT_BYTES} and {MAX_EXTENT_BYTES}"
    )]
    LargestExtent(u32),
    /// The range is empty, outside the region or cut at the wrong place.
    #[error(
        "arena range {start}..{end} of a region of {region} bytes: must be inside it, not empty, and start and \
         end at multiples of the largest extent, {largest} bytes"
    )]
    Range {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// Length of the region.
        region: usize,
        /// Largest extent.
        largest: u32,
    },
}

/// A run of bytes of the arena's region that belongs to the holder until [`Arena::release`].
///
/// An extent cannot be copied, and its drop does nothing: a dropped extent stays allocated.
#[must_use = "an extent that is dropped stays allocated: give it back with Arena::release"]
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    offset: usize,
    len: u32,
}

impl Extent {
    /// First byte, counted from the start of the region.
    #[must_use]
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Length in bytes: a power of two, at least the requested length.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn len(&self) -> u32 {
        self.len
    }
}

/// A buddy allocator over a range of a region.
#[derive(Debug)]
pub struct Arena {
    region: Arc<Region>,
    range: Range<usize>,
    // levels[k] holds the free blocks of MIN << k bytes, by index from the start of the range.
    levels: Vec<Bits>,
    // Bit k is set when levels[k] has a free block.
    available: u32,
    free_bytes: usize,
    extents: usize,
    // Extents handed out, by level: detects an extent of another arena, which the type cannot
    // exclude.
    #[cfg(debug_assertions)]
    taken: Vec<Bits>,
}

impl Arena {
    /// An arena over the whole region, which must be a multiple of `largest` bytes long.
    ///
    /// # Errors
    /// [`ArenaError`] says which number does not fit.
    #[cfg(test)]
    pub(crate) fn new(region: Arc<Region>, largest: u32) -> Result<Self, ArenaError> {
        let range = 0..region.len();
        Self::over(region, range, largest)
    }

    /// An arena over a byte range of the region, so that several threads can own a part each.
    /// `largest` is the longest extent in bytes.
    ///
    /// # Errors
    /// [`ArenaError`] says which number does not fit.
    pub fn over(
        region: Arc<Region>,
        range: Range<usize>,
        largest: u32,
    ) -> Result<Self, ArenaError> {
        if !largest.is_power_of_two() || !(MIN_EXTENT_BYTES..=MAX_EXTENT_BYTES).contains(&largest) {
            return Err(ArenaError::LargestExtent(largest));
        }
        let step = largest as usize;
        if range.is_empty()
            || range.end > region.len()
            || !range.start.is_multiple_of(step)
            || !range.end.is_multiple_of(step)
        {
            let Range { start, end } = range;
            return Err(ArenaError::Range { start, end, region: region.len(), largest });
        }
        let bytes = range.len();
        let top = level_of(largest);
        let mut levels: Vec<Bits> = (0..=top)
            .map(|level| Bits::new(bytes / (MIN_EXTENT_BYTES as usize) / (1 << level)))
            .collect();
        for block in 0..bytes / step {
            levels[top].set(block);
        }
        Ok(Self {
            region,
            range,
            #[cfg(debug_assertions)]
            taken: levels.iter().map(|level| Bits::new(level.len())).collect(),
            levels,
            available: 1 << top,
            free_bytes: bytes,
            extents: 0,
        })
    }

    /// The region of the extents.
    #[must_use]
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The part of the region that this arena hands out.
    #[must_use]
    #[inline]
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Length of the longest extent, in bytes.
    #[must_use]
    pub(crate) fn extent_max(&self) -> u32 {
        MIN_EXTENT_BYTES << (self.levels.len() - 1)
    }

    /// Total size in bytes.
    #[must_use]
    pub(crate) fn capacity_bytes(&self) -> usize {
        self.range.len()
    }

    /// Bytes not handed out; the rounding of extents counts as handed out.
    #[must_use]
    pub(crate) fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    /// Extents handed out and not yet given back.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn extents(&self) -> usize {
        self.extents
    }

    /// The longest extent that can be allocated now, in bytes; 0 when no block is free.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn largest_free(&self) -> u32 {
        self.available.checked_ilog2().map_or(0, |level| MIN_EXTENT_BYTES << level)
    }

    /// An extent of at least `bytes` bytes, rounded up to a power of two of at least
    /// [`MIN_EXTENT_BYTES`]. `None` when no free block is long enough, which includes zero bytes
    /// and more than the largest extent.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<Extent> {
        let bytes =
            u32::try_from(bytes).ok().filter(|bytes| (1..=MAX_EXTENT_BYTES).contains(bytes))?;
        let len = bytes.next_power_of_two().max(MIN_EXTENT_BYTES);
        let wanted = level_of(len);
        // A level beyond the top one has no bit in `available`.
        let fitting = self.available >> wanted;
        if fitting == 0 {
            return None;
        }
        let mut level = wanted + fitting.trailing_zeros() as usize;
        let mut block = self.take_first(level)?;
        while level > wanted {
            level -= 1;
            block *= 2;
            self.put(level, block + 1);
        }
        self.free_bytes -= len as usize;
        self.extents += 1;
        #[cfg(debug_assertions)]
        self.taken[level].set(block);
        Some(Extent { offset: self.range.start + block * len as usize, len })
    }

    /// Takes an extent back and joins it with its free neighbours.
    ///
    /// # Panics
    /// In debug builds, when this arena has not handed the extent out.
    #[expect(clippy::needless_pass_by_value, reason = "giving back is the end of the token")]
    pub(crate) fn release(&mut self, extent: Extent) {
        let len = extent.len as usize;
        let mut level = level_of(extent.len);
        debug_assert!(
            level < self.levels.len()
                && self.range.contains(&extent.offset)
                && (extent.offset - self.range.start).is_multiple_of(len),
            "not an extent of this arena: {extent:?}"
        );
        let mut block = (extent.offset - self.range.start) / len;
        #[cfg(debug_assertions)]
        {
            assert!(self.taken[level].get(block), "not handed out: {extent:?}");
            self.taken[level].clear(block);
        }
        let top = self.levels.len() - 1;
        while level < top && self.levels[level].get(block ^ 1) {
            self.levels[level].clear(block ^ 1);
            if self.levels[level].is_empty() {
                self.available &= !(1 << level);
            }
            block /= 2;
            level += 1;
        }
        self.put(level, block);
        self.free_bytes += len;
        self.extents -= 1;
    }

    /// Turns an extent into parts of `len` bytes, a power of two. [`Self::release_part`] takes them
    /// back one by one, in any order. Returns the offset of the first.
    #[expect(clippy::needless_pass_by_value, reason = "the extent ends here")]
    pub(crate) fn parts_of_extent(&mut self, extent: Extent, len: u32) -> usize {
        #[cfg(debug_assertions)]
        {
            let (level, part) = (level_of(extent.len), level_of(len));
            let block = (extent.offset - self.range.start) / extent.len as usize;
            assert!(self.taken[level].get(block), "not handed out: {extent:?}");
            self.taken[level].clear(block);
            for one in block << (level - part)..(block + 1) << (level - part) {
                self.taken[part].set(one);
            }
        }
        self.extents += (extent.len / len) as usize - 1;
        extent.offset
    }

    /// Takes one part of [`Self::parts_of_extent`] back.
    ///
    /// # Panics
    /// In debug builds, when the offset is not that of a part of this length.
    pub(crate) fn release_part(&mut self, offset: usize, len: u32) {
        self.release(Extent { offset, len });
    }

    fn put(&mut self, level: usize, block: usize) {
        self.levels[level].set(block);
        self.available |= 1 << level;
    }

    fn take_first(&mut self, level: usize) -> Option<usize> {
        let bits = &mut self.levels[level];
        let block = bits.first()?;
        bits.clear(block);
        if bits.is_empty() {
            self.available &= !(1 << level);
        }
        Some(block)
    }
}

// Level of a power of two of at least MIN_EXTENT_BYTES.
fn level_of(len: u32) -> usize {
    (len.ilog2() - MIN_EXTENT_BYTES.ilog2()) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use rblk_fabric::PageKind;

    use super::*;

    fn arena(bytes: usize, largest: u32) -> Arena {
        Arena::new(Region::allocate(bytes, PageKind::Normal).unwrap(), largest).unwrap()
    }

    #[test]
    fn refuses_sizes_that_do_not_fit() {
        let region = Region::allocate(6 << 20, PageKind::Normal).unwrap();
        let new = |largest| Arena::new(Arc::clone(&region), largest).map(|_| ());
        assert_eq!(new(2 << 20), Ok(()));
        assert_eq!(new(6 << 20), Err(ArenaError::LargestExtent(6 << 20)));
        assert_eq!(new(2048), Err(ArenaError::LargestExtent(2048)));
        assert_eq!(new(8 << 20), Err(ArenaError::LargestExtent(8 << 20)));
        assert!(matches!(new(4 << 20), Err(ArenaError::Range { .. })));
        for range in [0..8 << 20, 4096..2 << 20, 2 << 20..2 << 20] {
            assert!(Arena::over(Arc::clone(&region), range, 2 << 20).is_err());
        }
    }

    #[test]
    fn splits_lowest_first_and_joins_again() {
        let mut arena = arena(2 << 20, 1 << 20);
        let small = arena.allocate(1).unwrap();
        let large = arena.allocate(1 << 20).unwrap();
        assert_eq!(arena.extent_max(), 1 << 20);
        assert_eq!((small.offset(), small.len()), (0, 4096));
        assert_eq!((large.offset(), large.len()), (1 << 20, 1 << 20));
        assert_eq!(arena.largest_free(), 512 << 10);
        assert_eq!(arena.free_bytes(), (1 << 20) - 4096);
        assert!(arena.allocate(1 << 20).is_none());
        assert!(arena.allocate(0).is_none());
        assert!(arena.allocate(usize::MAX).is_none());
        assert!(arena.allocate(2 << 20).is_none());
        arena.release(small);
        arena.release(large);
        assert_eq!(
            (arena.free_bytes(), arena.extents(), arena.largest_free()),
            (2 << 20, 0, 1 << 20)
        );
    }

    #[test]
    fn parts_of_a_region_keep_to_their_range() {
        let region = Region::allocate(8 << 20, PageKind::Normal).unwrap();
        let mut arena = Arena::over(region, 4 << 20..8 << 20, 1 << 20).unwrap();
        let offsets: Vec<usize> =
            std::iter::from_fn(|| arena.allocate(1 << 20).map(|extent| extent.offset())).collect();
        assert_eq!(offsets, [4 << 20, 5 << 20, 6 << 20, 7 << 20]);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "not handed out")]
    fn finds_a_second_release() {
        let mut arena = arena(1 << 20, 1 << 20);
        let extent = arena.allocate(4096).unwrap();
        let again = Extent { offset: extent.offset, len: extent.len };
        arena.release(extent);
        arena.release(again);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "not an extent of this arena")]
    fn finds_an_extent_of_another_arena() {
        let mut one = arena(1 << 20, 1 << 20);
        let mut other = arena(2 << 20, 1 << 20);
        let _low = other.allocate(1 << 20).unwrap();
        one.release(other.allocate(1 << 20).unwrap());
    }

    // The model: extents handed out, by offset. A length can be allocated if there is an aligned
    // hole of that length. No allocator of aligned extents can do better without moving: the buddy
    // allocator must be exactly as good.
    fn hole_exists(taken: &BTreeMap<usize, u32>, capacity: usize, len: u32) -> bool {
        (0..capacity).step_by(len as usize).any(|start| {
            let end = start + len as usize;
            taken.range(..end).next_back().is_none_or(|(&at, &bytes)| at + bytes as usize <= start)
        })
    }

    #[derive(Clone, Debug)]
    enum ArenaStep {
        Allocate(usize),
        Release(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = ArenaStep> {
        prop_oneof![
            3 => (0..=18u32, 0..4096usize).prop_map(|(shift, more)| ArenaStep::Allocate((1 << shift) + more)),
            2 => any::<prop::sample::Index>().prop_map(ArenaStep::Release),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_the_model(
            blocks in 1..7usize,
            top in 12..19u32,
            steps in prop::collection::vec(step(), 1..400),
        ) {
            let largest = 1u32 << top;
            let capacity = blocks * largest as usize;
            let mut arena = arena(capacity, largest);
            let mut taken = BTreeMap::new();
            let mut held = Vec::new();
            for step in steps {
                match step {
                    ArenaStep::Allocate(bytes) => {
                        let len = u32::try_from(bytes.next_power_of_two()).unwrap().max(MIN_EXTENT_BYTES);
                        let possible = len <= largest && hole_exists(&taken, capacity, len);
                        let extent = arena.allocate(bytes);
                        prop_assert_eq!(extent.is_some(), possible);
                        if let Some(extent) = extent {
                            prop_assert_eq!(extent.len(), len);
                            prop_assert_eq!(extent.offset() % len as usize, 0);
                            prop_assert!(extent.offset() + len as usize <= capacity);
                            let before = taken.range(..extent.offset() + len as usize).next_back();
                            prop_assert!(before.is_none_or(|(&at, &b)| at + b as usize <= extent.offset()));
                            taken.insert(extent.offset(), len);
                            held.push(extent);
                        }
                    }
                    ArenaStep::Release(index) => {
                        if !held.is_empty() {
                            let extent = held.swap_remove(index.index(held.len()));
                            taken.remove(&extent.offset());
                            arena.release(extent);
                        }
                    }
                }
                let used: usize = taken.values().map(|&len| len as usize).sum();
                prop_assert_eq!(arena.free_bytes(), capacity - used);
                prop_assert_eq!(arena.extents(), held.len());
                let longest = (12..=top).rev().map(|s| 1 << s).find(|&l| hole_exists(&taken, capacity, l));
                prop_assert_eq!(arena.largest_free(), longest.unwrap_or(0));
            }
            for extent in held {
                arena.release(extent);
            }
            prop_assert_eq!(arena.free_bytes(), capacity);
            let whole: Vec<_> = std::iter::from_fn(|| arena.allocate(largest as usize)).collect();
            prop_assert_eq!(whole.len(), blocks);
        }
    }
}
