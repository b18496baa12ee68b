//! LBAs, counts and block sizes: the only place that multiplies blocks into bytes.

use crate::limits;
use crate::width::narrow;

/// Size of one block, 512 to 4096 bytes, a power of two.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockSize {
    shift: u8,
}

impl BlockSize {
    /// From a number of bytes.
    #[must_use]
    pub fn new(bytes: u32) -> Option<Self> {
        if !bytes.is_power_of_two()
            || !(limits::BLOCK_MIN_BYTES..=limits::BLOCK_MAX_BYTES).contains(&bytes)
        {
            return None;
        }
        Some(Self { shift: narrow(bytes.trailing_zeros()) })
    }

    /// From log2 of the bytes, as it is on the wire.
    #[must_use]
    pub fn from_shift(shift: u8) -> Option<Self> {
        1u32.checked_shl(u32::from(shift)).and_then(Self::new)
    }

    /// In bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        1 << self.shift
    }

    /// log2 of the bytes.
    #[must_use]
    pub fn shift(self) -> u8 {
        self.shift
    }

    /// Blocks in `bytes`. `None` if `bytes` is not a multiple of the block size.
    #[must_use]
    pub fn blocks_in(self, bytes: u64) -> Option<BlockCount> {
        bytes.is_multiple_of(u64::from(self.bytes())).then(|| BlockCount(bytes >> self.shift))
    }
}

/// Address of a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Lba(pub u64);

/// A number of blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockCount(pub u64);

impl BlockCount {
    /// In bytes. `None` above [`limits::VOLUME_MAX_BYTES`].
    #[must_use]
    #[inline]
    pub fn bytes(self, size: BlockSize) -> Option<u64> {
        let bytes = self.0.checked_mul(u64::from(size.bytes()))?;
        (bytes <= limits::VOLUME_MAX_BYTES).then_some(bytes)
    }
}

/// A checked range of a volume: not empty, inside the volume, and its bytes fit `i64`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockRange {
    offset_bytes: u64,
    len_bytes: u64,
}

impl BlockRange {
    /// Checks `lba..lba+count` against a volume of `volume` blocks.
    #[must_use]
    #[inline]
    pub fn new(lba: Lba, count: BlockCount, volume: BlockCount, size: BlockSize) -> Option<Self> {
        let end = lba.0.checked_add(count.0)?;
        if count.0 == 0 || end > volume.0 {
            return None;
        }
        // The end fits, so the smaller numbers fit too. As [`BlockCount::bytes`] says, for fewer
        // instructions.
        if end > limits::VOLUME_MAX_BYTES >> size.shift {
            return None;
        }
        Some(Self { offset_bytes: lba.0 << size.shift, len_bytes: count.0 << size.shift })
    }

    /// First byte, from the start of the volume.
    #[must_use]
    #[inline]
    pub fn offset_bytes(self) -> u64 {
        self.offset_bytes
    }

    /// Length in bytes, never 0.
    #[must_use]
    #[inline]
    pub fn len_bytes(self) -> u64 {
        self.len_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes() {
        assert_eq!(BlockSize::new(512).unwrap().shift(), 9);
        assert_eq!(BlockSize::from_shift(12).unwrap().bytes(), 4096);
        for bad in [0, 1, 256, 513, 8192] {
            assert_eq!(BlockSize::new(bad), None);
        }
        for bad in [0, 8, 13, 31, 32, 255] {
            assert_eq!(BlockSize::from_shift(bad), None);
        }
    }

    proptest! {
        #[test]
        fn range_matches_wide_arithmetic(lba: u64, count: u64, volume: u64, shift in 9u8..=12) {
            let size = BlockSize::from_shift(shift).unwrap();
            let end = u128::from(lba) + u128::from(count);
            let inside = count != 0
                && end <= u128::from(volume)
                && end << shift <= u128::from(limits::VOLUME_MAX_BYTES);
            let range = BlockRange::new(Lba(lba), BlockCount(count), BlockCount(volume), size);
            prop_assert_eq!(range.is_some(), inside);
            if let Some(range) = range {
                prop_assert_eq!(u128::from(range.offset_bytes()), u128::from(lba) << shift);
                prop_assert_eq!(u128::from(range.len_bytes()), u128::from(count) << shift);
            }
        }
    }
}
