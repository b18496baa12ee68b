//! The metadata of each slot: its [`SlotState`], its block, and its pins.

use super::NONE;
use crate::volume::ids::VolumeIndex;

/// The state of a slot in its life cycle. See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotState {
    /// In the arena's free memory, or loose.
    Free,
    /// A job owns the slot.
    Private,
    /// A connection owns the slot: data from its peer lands there.
    Landing,
    /// Same as the store.
    Clean,
    /// As in the store, and in the list of a volume with a maximum.
    Bounded,
    /// Newer than the store.
    Dirty,
    /// Newer than the store, and with a write-back.
    Writing,
    /// Out of the index. RDMA or the store still reads it.
    Detached,
}

impl SlotState {
    /// Whether the slot is in the index, and the same as the store.
    #[inline]
    pub(crate) fn is_clean(self) -> bool {
        matches!(self, Self::Clean | Self::Bounded)
    }

    /// Whether the slot is in the index, and newer than the store.
    #[inline]
    pub(crate) fn is_dirty(self) -> bool {
        matches!(self, Self::Dirty | Self::Writing)
    }

    /// Whether the slot is in the index.
    pub(crate) fn is_in_index(self) -> bool {
        self.is_clean() || self.is_dirty()
    }
}

/// The metadata of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meta {
    /// Number of the block in its volume.
    pub(super) block: u64,
    /// Order of the oldest acknowledged write in this slot that is not in the store.
    pub(super) since: u64,
    /// The time of that write, in the shard's milliseconds.
    pub(super) since_ms: u32,
    /// The next slot of the same bucket of the index.
    pub(super) chain: u32,
    /// Neighbours in the list of dirty slots, or of clean slots of a volume with a maximum.
    pub(super) prev: u32,
    pub(super) next: u32,
    /// Number of lends: RDMA reads the slot.
    pub(super) sends: u32,
    /// Number of write-backs that read the slot.
    pub(super) stores: u16,
    pub(super) volume: u16,
    pub(super) state: SlotState,
    /// The last write-back failed.
    pub(super) failed: bool,
}

impl Meta {
    pub(super) const FREE: Self = Self {
        block: 0,
        since: 0,
        since_ms: 0,
        chain: NONE,
        prev: NONE,
        next: NONE,
        sends: 0,
        stores: 0,
        volume: 0,
        state: SlotState::Free,
        failed: false,
    };

    /// Whether neither RDMA nor the store reads the slot.
    #[inline]
    pub(super) fn is_unpinned(&self) -> bool {
        self.sends == 0 && self.stores == 0
    }

    #[inline]
    pub(super) fn holds(&self, volume: u16, block: u64) -> bool {
        self.block == block && self.volume == volume
    }
}

/// The state, block and pins of a slot, for debugging.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotHolders {
    /// The state of the slot.
    pub state: SlotState,
    /// Volume and block, if the slot holds one.
    pub block: (VolumeIndex, u64),
    /// Number of lends.
    pub sends: u32,
    /// Write-backs that read the slot.
    pub stores: u16,
}

/// The state of a slot when it enters the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Install {
    /// The store has the same data.
    Clean,
    /// The store does not have the data.
    Dirty {
        /// Order of the write.
        order: u64,
        /// Time of the write.
        now_ms: u32,
    },
    /// The store has the new bytes, but perhaps not the rest of the block: dirty if the old slot
    /// was.
    Merged,
}

/// The slot counts of a volume in a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SlotCounts {
    /// Slots in the index.
    pub cached: u32,
    /// Dirty slots, part of `cached`.
    pub dirty: u32,
    /// Dirty slots with a failed last write-back.
    pub failed: u32,
    /// Slots evicted to make room, since the start.
    pub evictions: u64,
}

/// In [`VolumeSlots::watch`]: the volume has a maximum.
pub(super) const BOUNDED: u32 = 1 << 31;

/// The slots of a volume: its lists and counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct VolumeSlots {
    /// The dirty list: the slot that has been dirty for longest, and the last.
    pub(super) head: u32,
    pub(super) tail: u32,
    /// Counts without `failed`, which [`Self::watch`] has.
    pub(super) counts: SlotCounts,
    /// Number of slots with a failed last write-back, and [`BOUNDED`]. Most writes only test it for
    /// 0.
    pub(super) watch: u32,
    /// Clean slots that the volume keeps when others need memory.
    pub(super) min: u32,
    /// Most slots in the index.
    pub(super) max: u32,
    /// The list of clean slots under a maximum: the next one to leave, and the last.
    pub(super) clean_head: u32,
    pub(super) clean_tail: u32,
    /// Length of this list.
    pub(super) listed: u32,
}

impl VolumeSlots {
    /// Slots with a failed last write-back.
    #[inline]
    pub(super) fn failed(&self) -> u32 {
        self.watch & !BOUNDED
    }

    /// Whether a clean slot of the volume may leave.
    #[inline]
    pub(super) fn has_spare(&self) -> bool {
        self.counts.clean() > self.min
    }
}

impl Default for VolumeSlots {
    fn default() -> Self {
        Self {
            head: NONE,
            tail: NONE,
            counts: SlotCounts::default(),
            watch: 0,
            min: 0,
            max: u32::MAX,
            clean_head: NONE,
            clean_tail: NONE,
            listed: 0,
        }
    }
}
