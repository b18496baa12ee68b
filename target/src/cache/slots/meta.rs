//! What a shard keeps of each slot: its [`State`], its block, and its pins.

use super::NONE;
use crate::volume::ids::VolumeIndex;

/// Where a slot is in its life. See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// In the arena's free memory, or loose.
    Free,
    /// A job's own.
    Private,
    /// A connection's: what is sent to us lands there.
    Landing,
    /// Same as the store.
    Clean,
    /// The same, and in the list of those of a volume with a maximum.
    Bounded,
    /// Newer than the store.
    Dirty,
    /// Newer than the store, and with a write-back.
    Writing,
    /// Out of the index. RDMA or the store still reads it.
    Detached,
}

impl State {
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

/// What is kept of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meta {
    /// Number of the block in its volume.
    pub(super) block: u64,
    /// Order of the oldest acknowledged write that is in this slot and not in the store.
    pub(super) since: u64,
    /// When that was, in the shard's milliseconds.
    pub(super) since_ms: u32,
    /// The next slot of the same bucket of the index.
    pub(super) chain: u32,
    /// Neighbours in the list of dirty slots, or of clean ones of a volume with a maximum.
    pub(super) prev: u32,
    pub(super) next: u32,
    /// RDMA reads it: times lent.
    pub(super) sends: u32,
    /// The store reads it.
    pub(super) stores: u16,
    pub(super) volume: u16,
    pub(super) state: State,
    /// Its last write-back failed.
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
        state: State::Free,
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

/// What holds a slot, for debugging.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotHolders {
    /// Where it is in its life.
    pub state: State,
    /// Volume and block, for slots that hold one.
    pub block: (VolumeIndex, u64),
    /// Times lent for sending.
    pub sends: u32,
    /// Write-backs that read it.
    pub stores: u16,
}

/// What a slot becomes in the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Install {
    /// The store has the same.
    Clean,
    /// The store does not have it.
    Dirty {
        /// Order of the write.
        order: u64,
        /// When.
        now_ms: u32,
    },
    /// The store has what is new, but perhaps not the rest of the block: dirty if the old slot was.
    Merged,
}

/// How many slots a volume has in a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SlotCounts {
    /// In the index.
    pub cached: u32,
    /// Of these, slots whose bytes the store does not have.
    pub dirty: u32,
    /// Of these, slots whose last write-back failed.
    pub failed: u32,
    /// That left to make room, since the start.
    pub evictions: u64,
}

/// In [`VolumeSlots::watch`]: the volume has a maximum.
pub(super) const BOUNDED: u32 = 1 << 31;

/// The slots of a volume: its lists of them, and how many there are.
#[derive(Clone, Copy, Debug)]
pub(super) struct VolumeSlots {
    /// Dirty slots: the one that is dirty for longest, and the last.
    pub(super) head: u32,
    pub(super) tail: u32,
    /// Without those that failed.
    pub(super) counts: SlotCounts,
    /// Slots whose last write-back failed, and [`BOUNDED`]. Most writes need to know only that this
    /// is 0.
    pub(super) watch: u32,
    /// Clean slots that stay when others need memory.
    pub(super) min: u32,
    /// Most slots of the index.
    pub(super) max: u32,
    /// Clean slots that came while there was a maximum: the next one to leave, and the last.
    pub(super) clean_head: u32,
    pub(super) clean_tail: u32,
    /// How many these are.
    pub(super) listed: u32,
}

impl VolumeSlots {
    /// Slots whose last write-back failed.
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
