//! [`BlockWrites`]: writes of one block that are at the store.
//!
//! Most writes cover one block, come with their data, and find their range free. They need no
//! [`Job`](super::job::Job): after submission, only the store's completion is missing. An entry
//! here is one cache line.

use rblk_protocol::width::{narrow, wide};

use super::policy::Slot;
use super::range_lock::LockId;
use super::shard_messages::PartToken;
use crate::store::OpToken;
use crate::volume::ids::VolumeIndex;

/// A write of one block, or of a part of one in a volume without a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockWrite {
    /// The command part to answer.
    pub from: PartToken,
    /// The block, numbered in the volume.
    pub block: u64,
    /// A private slot with the data.
    pub slot: Slot,
    /// Bytes that the store must write.
    pub len: u32,
    /// The lock on the block, if the volume is cached.
    pub lock: Option<LockId>,
    /// The volume of the block.
    pub volume: VolumeIndex,
}

impl BlockWrite {
    // The content of a free entry.
    const NONE: Self = Self {
        from: PartToken::of_control(0, 0),
        block: 0,
        slot: Slot(0),
        len: 0,
        lock: None,
        volume: VolumeIndex(0),
    };
}

#[derive(Debug)]
struct BlockEntry {
    write: BlockWrite,
    // Changes when a write ends, which makes its old token invalid.
    generation: u32,
    // In a free entry, the next free one.
    next: u32,
}

const NONE: u32 = u32::MAX;
const TOKEN: u64 = 1 << 63;
const GENERATION_SHIFT: u32 = 32;
const GENERATION_MASK: u32 = u32::MAX >> 1;

/// The writes of one block that are at the store.
#[derive(Debug)]
pub(super) struct BlockWrites {
    table: Vec<BlockEntry>,
    free: u32,
    len: usize,
}

impl BlockWrites {
    /// Memory for `capacity` writes. More writes allocate.
    pub(super) fn new(capacity: usize) -> Self {
        Self { table: Vec::with_capacity(capacity), free: NONE, len: 0 }
    }

    /// Whether [`Self::begin`] made this token. Tokens of jobs differ.
    #[inline]
    pub(super) fn has_token(token: OpToken) -> bool {
        token.0 & TOKEN != 0
    }

    /// Keeps a write until its operation ends. Returns the token for that operation.
    #[inline(always)]
    pub(super) fn begin(&mut self, write: BlockWrite) -> OpToken {
        if self.free == NONE {
            self.grow();
        }
        let index = self.free;
        let entry = &mut self.table[wide(index)];
        self.free = entry.next;
        self.len += 1;
        entry.write = write;
        token(index, entry.generation)
    }

    // Adds a free entry. The commands that connections may have outstanding bound the table.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        self.free = narrow(self.table.len());
        self.table.push(BlockEntry { write: BlockWrite::NONE, generation: 0, next: NONE });
    }

    /// Frees the entry of a write whose operation ended, and returns it. `None`: no entry has this
    /// token.
    #[inline(always)]
    pub(super) fn end(&mut self, token: OpToken) -> Option<&BlockWrite> {
        let index: u32 = narrow(token.0 & u64::from(u32::MAX));
        let generation: u32 = narrow((token.0 & !TOKEN) >> GENERATION_SHIFT);
        let entry = self.table.get_mut(wide(index)).filter(|e| e.generation == generation)?;
        entry.generation = (generation + 1) & GENERATION_MASK;
        entry.next = self.free;
        self.free = index;
        self.len -= 1;
        Some(&entry.write)
    }

    /// Whether a write of a volume has not ended.
    #[cold]
    pub(super) fn has_any_of(&self, volume: VolumeIndex) -> bool {
        let mut is_free = vec![false; self.table.len()];
        let mut next = self.free;
        while next != NONE {
            is_free[wide(next)] = true;
            next = self.table[wide(next)].next;
        }
        let mut entries = self.table.iter().zip(is_free);
        entries.any(|(entry, is_free)| !is_free && entry.write.volume == volume)
    }

    /// Writes that have not ended.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

#[inline(always)]
fn token(index: u32, generation: u32) -> OpToken {
    OpToken(TOKEN | u64::from(generation) << GENERATION_SHIFT | u64::from(index))
}

#[cfg(test)]
mod tests {
    use rblk_protocol::Tag;

    use super::*;
    use crate::volume::ids::{ConnectionId, SessionIndex};

    fn write(block: u64) -> BlockWrite {
        let connection = ConnectionId { index: 0, generation: 1 };
        let from = PartToken {
            group: 0,
            session: SessionIndex { index: 0, life: 1 },
            connection,
            tag: Tag(3),
            part: 0,
        };
        BlockWrite { from, block, slot: Slot(7), len: 4096, lock: None, volume: VolumeIndex(2) }
    }

    #[test]
    fn each_write_ends_once_and_by_its_own_token() {
        let mut writes = BlockWrites::new(1);
        let (first, second) = (writes.begin(write(1)), writes.begin(write(2)));
        assert!(BlockWrites::has_token(first) && first != second);
        assert!(writes.has_any_of(VolumeIndex(2)) && !writes.has_any_of(VolumeIndex(0)));
        assert_eq!(writes.end(first), Some(&write(1)));
        assert_eq!(writes.end(first), None);
        let third = writes.begin(write(3));
        assert_ne!(third, first, "the entry is used again under another name");
        assert_eq!(writes.end(first), None);
        assert_eq!(writes.len(), 2);
        assert_eq!(writes.end(third), Some(&write(3)));
        assert_eq!(writes.end(second), Some(&write(2)));
        assert_eq!(writes.len(), 0);
        assert!(!writes.has_any_of(VolumeIndex(2)));
    }
}
