//! [`CachedSpan`]: a byte range of a volume, and the cache blocks that it touches. Pure.
//!
//! A block is [`SLOT_BYTES`] long. The last block of a volume may be shorter. A request may begin
//! and end inside a block; such a block is an *edge* of the span.

use std::ops::Range;

use rblk_protocol::width::{narrow, wide, wide64};

use super::{SLOT_BYTES, STRIPE_BYTES};
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;

/// Bytes of a block.
pub(super) const BLOCK: u64 = SLOT_BYTES as u64;

/// A byte range of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CachedSpan {
    /// The volume.
    pub volume: VolumeIndex,
    /// How the volume is cached.
    pub cache: CacheMode,
    /// Bytes of the volume.
    pub volume_bytes: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The bytes of one block that a span covers, counted from the start of the block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Covered {
    pub from: usize,
    pub to: usize,
    /// Bytes of the volume in the block: fewer than [`SLOT_BYTES`] in the last block.
    pub block_bytes: usize,
}

impl Covered {
    /// Whether the span covers the whole block.
    pub(super) fn is_whole(self) -> bool {
        self.from == 0 && self.to >= self.block_bytes
    }
}

/// The blocks that a span covers in part: none, the first, the last, or both.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Edges {
    blocks: [u64; 2],
    count: usize,
}

impl Edges {
    /// The numbers of these blocks in the volume.
    pub(super) fn as_slice(&self) -> &[u64] {
        &self.blocks[..self.count]
    }

    /// The index of a block in this list.
    pub(super) fn position(&self, block: u64) -> Option<usize> {
        self.as_slice().iter().position(|edge| *edge == block)
    }
}

impl CachedSpan {
    /// An empty span, for jobs without a range.
    pub(super) fn none(volume: VolumeIndex) -> Self {
        Self { volume, cache: CacheMode::None, volume_bytes: 0, offset: 0, len: 0 }
    }

    /// Number of the first block.
    #[inline]
    pub(super) fn first(&self) -> u64 {
        self.offset / BLOCK
    }

    /// Number of the last block.
    #[inline]
    pub(super) fn last(&self) -> u64 {
        (self.offset + self.len.max(1) - 1) / BLOCK
    }

    /// Number of blocks that the span touches.
    #[inline]
    pub(super) fn count(&self) -> usize {
        wide(self.last() - self.first() + 1)
    }

    /// Bytes of the first block in front of the span.
    #[inline]
    pub(super) fn skip(&self) -> usize {
        wide(self.offset % BLOCK)
    }

    /// Length of the span, which must belong to a data command.
    #[inline]
    pub(super) fn data_len(&self) -> u32 {
        narrow(self.len)
    }

    /// Whether the span begins and ends at block borders.
    #[inline]
    pub(super) fn is_aligned(&self) -> bool {
        (self.offset | self.len).is_multiple_of(BLOCK)
    }

    /// The part of a touched block that the span covers.
    pub(super) fn covered(&self, block: u64) -> Covered {
        let start = block * BLOCK;
        Covered {
            from: wide(self.offset.max(start) - start),
            to: wide((self.offset + self.len).min(start + BLOCK) - start),
            block_bytes: wide((self.volume_bytes - start).min(BLOCK)),
        }
    }

    /// The partly covered blocks.
    #[inline]
    pub(super) fn edges(&self) -> Edges {
        if self.is_aligned() { Edges::default() } else { self.find_edges() }
    }

    fn find_edges(&self) -> Edges {
        let mut edges = Edges::default();
        let (first, last) = (self.first(), self.last());
        for block in [Some(first), (first != last).then_some(last)].into_iter().flatten() {
            if !self.covered(block).is_whole() {
                edges.blocks[edges.count] = block;
                edges.count += 1;
            }
        }
        edges
    }

    /// The bytes of some of the span's blocks, numbered from its first: offset in the volume, and
    /// length.
    pub(super) fn bytes_of(&self, blocks: &Range<usize>) -> (u64, u32) {
        let offset = (self.first() + wide64(blocks.start)) * BLOCK;
        let len = (wide64(blocks.len()) * BLOCK).min(self.volume_bytes - offset);
        (offset, narrow(len))
    }
}

/// Whether two blocks lie in one stripe.
pub(super) fn in_one_stripe(first: u64, second: u64) -> bool {
    first * BLOCK / STRIPE_BYTES == second * BLOCK / STRIPE_BYTES
}

/// Number of blocks for `len` bytes that need not keep their place in the volume's blocks.
#[inline]
pub(super) fn blocks_of(len: u64) -> usize {
    wide(len.div_ceil(BLOCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(offset: u64, len: u64) -> CachedSpan {
        let volume_bytes = 10 * BLOCK + 512;
        CachedSpan { volume_bytes, offset, len, ..CachedSpan::none(VolumeIndex(0)) }
    }

    #[test]
    fn edges_are_the_blocks_that_are_covered_in_part() {
        for (offset, len, edges) in [
            (0, 4096, &[][..]),
            (0, 8192, &[]),
            (0, 512, &[0]),
            (512, 512, &[0]),
            (512, 4096, &[0, 1]),
            (0, 4608, &[1]),
            (3584, 512 + 4096, &[0]),
            (512, 2 * 4096, &[0, 2]),
            // The last block of the volume has 512 bytes.
            (9 * 4096, 4096 + 512, &[]),
            (10 * 4096, 512, &[]),
            (9 * 4096 + 512, 4096, &[9]),
        ] {
            assert_eq!(span(offset, len).edges().as_slice(), edges, "{offset}+{len}");
        }
    }

    #[test]
    fn blocks_and_their_bytes() {
        let some = span(4096 + 512, 2 * 4096);
        assert_eq!((some.first(), some.last(), some.count(), some.skip()), (1, 3, 3, 512));
        assert_eq!(some.bytes_of(&(1..3)), (2 * 4096, 2 * 4096));
        let last = span(9 * 4096, 4096 + 512);
        assert_eq!(last.bytes_of(&(0..2)), (9 * 4096, 4096 + 512));
        assert_eq!(last.covered(10), Covered { from: 0, to: 512, block_bytes: 512 });
        assert!(in_one_stripe(0, 255) && !in_one_stripe(255, 256));
    }
}
