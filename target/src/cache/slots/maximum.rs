//! The maximum number of slots of the index for a volume.
//!
//! The clean slots of a volume with a maximum are in a list. A block that would exceed the maximum
//! takes the place of one of them: the first that was not hit since it came or since the last look
//! at it. Slots that were hit or are lent go to the end of the list. If the first [`LOOKS`] slots
//! all were, the next one leaves in any case. A lent slot that leaves is freed when it comes back.
//!
//! Dirty slots count and cannot leave. A volume at its maximum with only dirty slots takes no more:
//! reads are not kept, and writes go to the store. Slots that are not in the index do not count.
//!
//! Invariant: a volume has no more slots than its maximum, unless the maximum was lowered. Then
//! [`Slots::trim`] evicts a few slots at a time, and dirty slots leave when they are written. If
//! the volume got its first maximum while it had clean slots, `trim` first puts these in the list.
//!
//! A slot in the list is [`SlotState::Bounded`] and not `Clean`, so the paths of other volumes do
//! not ask for a maximum. When a maximum is removed, the slots in the list stay there.

use rblk_protocol::width::{narrow, wide};

use super::super::policy::Slot;
use super::meta::{BOUNDED, Meta, VolumeSlots};
use super::{NONE, SlotState, Slots};
use crate::volume::ids::VolumeIndex;

/// Most slots that get another round before a slot of their volume leaves.
const LOOKS: usize = 8;
/// Slots that one call of [`Slots::trim`] examines, to put them in lists.
const SWEPT: usize = 4096;
/// Slots that one call of [`Slots::trim`] evicts.
const DROPPED: usize = 256;

/// The progress of [`Slots::trim`].
#[derive(Debug, Default)]
pub(super) struct Trim {
    // Some volume has slots to list or to evict.
    due: bool,
    // The slot to examine next.
    next: usize,
}

impl VolumeSlots {
    #[inline]
    fn is_bounded(&self) -> bool {
        self.watch & BOUNDED != 0
    }

    // Whether clean slots of the volume are missing in its list.
    fn is_unlisted(&self) -> bool {
        self.is_bounded() && self.listed < self.counts.clean()
    }

    // Whether the volume is above its maximum and has a slot that can leave.
    fn is_above(&self) -> bool {
        self.counts.cached > self.max && self.listed > 0
    }
}

impl Slots {
    /// Limits a volume to this many slots in the index. If it has more, [`Self::trim`] becomes due.
    pub(crate) fn set_max(&mut self, volume: VolumeIndex, most: Option<u32>) {
        let Some(list) = self.lists.get_mut(usize::from(volume.0)) else { return };
        list.max = most.unwrap_or(u32::MAX);
        list.watch = list.failed() | if most.is_some() { BOUNDED } else { 0 };
        self.trim.due |= list.is_unlisted() || list.is_above();
    }

    /// Whether a volume has slots to list or to evict.
    #[must_use]
    pub(crate) fn is_trim_due(&self) -> bool {
        self.trim.due
    }

    /// Evicts slots of volumes above their maximums. The work of one call is bounded.
    pub(crate) fn trim(&mut self) {
        if self.lists.iter().any(VolumeSlots::is_unlisted) {
            self.list_some();
        }
        let mut left = DROPPED;
        for volume in (0u16..).take(self.lists.len()).map(VolumeIndex) {
            while left > 0 && self.lists[usize::from(volume.0)].is_above() {
                left -= 1;
                self.drop_clean(volume);
            }
        }
        self.trim.due = self.lists.iter().any(|list| list.is_unlisted() || list.is_above());
    }

    // Puts clean slots in the lists of their volumes.
    fn list_some(&mut self) {
        for _ in 0..SWEPT.min(self.metas.len()) {
            let slot = Slot(narrow(self.trim.next));
            self.trim.next = (self.trim.next + 1) % self.metas.len();
            let of = usize::from(self.metas[slot.index()].volume);
            if self.state(slot) == SlotState::Clean && self.lists[of].is_bounded() {
                self.push_clean(slot);
            }
        }
    }

    /// Whether a clean block of a volume may enter the index. Evicts another block of the volume if
    /// needed.
    #[inline(always)]
    pub(crate) fn has_place(&mut self, volume: VolumeIndex, block: u64) -> bool {
        let full = |list: &VolumeSlots| list.counts.cached >= list.max;
        !self.lists.get(usize::from(volume.0)).is_some_and(full) || self.make_place(volume, block)
    }

    #[cold]
    fn make_place(&mut self, volume: VolumeIndex, block: u64) -> bool {
        // An old slot of this block gives up its place.
        self.find(volume, block).is_some()
            || self.drop_clean(volume) && {
                let list = &self.lists[usize::from(volume.0)];
                list.counts.cached < list.max
            }
    }

    /// Whether the volume's own limits allow this many more dirty blocks.
    #[inline(always)]
    pub(crate) fn may_be_dirty(&self, volume: VolumeIndex, more: usize) -> bool {
        self.lists.get(usize::from(volume.0)).is_none_or(|list| {
            list.watch == 0
                || list.failed() == 0 && wide(list.counts.dirty) + more <= wide(list.max)
        })
    }

    /// Whether so much of a volume's maximum is dirty that write-backs should start.
    #[inline]
    pub(crate) fn is_crowded(&self, volume: VolumeIndex) -> bool {
        self.lists
            .get(usize::from(volume.0))
            .is_some_and(|list| list.is_bounded() && list.counts.dirty > list.max / 2)
    }

    /// Whether this many blocks are so large a part of a volume's maximum that they would leave
    /// before they are read.
    pub(crate) fn is_too_much(&self, volume: VolumeIndex, blocks: usize) -> bool {
        let most = self.lists.get(usize::from(volume.0)).map_or(u32::MAX, |list| list.max);
        blocks > wide(most / 2)
    }

    // A slot in the index became clean and can leave.
    #[inline]
    pub(super) fn enter_clean(&mut self, slot: Slot) {
        let volume = self.metas[slot.index()].volume;
        if self.lists[usize::from(volume)].is_bounded() {
            self.list_clean(slot);
        }
    }

    #[inline(never)]
    fn list_clean(&mut self, slot: Slot) {
        self.push_clean(slot);
        let volume = VolumeIndex(self.metas[slot.index()].volume);
        if self.lists[usize::from(volume.0)].is_above() {
            // The slot was dirty when the maximum was lowered.
            self.drop_clean(volume);
        }
    }

    // Puts a clean slot at the end of its volume's list.
    fn push_clean(&mut self, slot: Slot) {
        debug_assert_eq!(self.state(slot), SlotState::Clean, "{:?}", self.holders(slot));
        let list = &mut self.lists[usize::from(self.metas[slot.index()].volume)];
        list.listed += 1;
        let before = std::mem::replace(&mut list.clean_tail, slot.0);
        match self.metas.get_mut(before as usize) {
            Some(before) => before.next = slot.0,
            None => list.clean_head = slot.0,
        }
        let meta = &mut self.metas[slot.index()];
        (meta.prev, meta.next, meta.state) = (before, NONE, SlotState::Bounded);
    }

    // Takes a clean slot out of the list of its volume.
    #[inline(never)]
    pub(super) fn leave_clean(&mut self, slot: Slot) {
        let Meta { prev, next, volume, .. } = self.metas[slot.index()];
        let list = &mut self.lists[usize::from(volume)];
        list.listed -= 1;
        self.metas[slot.index()].state = SlotState::Clean;
        match self.metas.get_mut(prev as usize) {
            Some(prev) => prev.next = next,
            None => list.clean_head = next,
        }
        match self.metas.get_mut(next as usize) {
            Some(next) => next.prev = prev,
            None => list.clean_tail = prev,
        }
    }

    // Evicts a clean slot of a volume with a maximum, if it has one.
    #[cold]
    pub(super) fn drop_clean(&mut self, volume: VolumeIndex) -> bool {
        let head = |slots: &Self| Slot(slots.lists[usize::from(volume.0)].clean_head);
        if head(self).0 == NONE {
            return false;
        }
        for _ in 0..LOOKS {
            let slot = head(self);
            if self.metas[slot.index()].is_unpinned() && !self.policy.cool(slot) {
                break;
            }
            self.leave_clean(slot);
            self.push_clean(slot);
        }
        let victim = head(self);
        let counts = self.counts_of(victim);
        counts.evictions += 1;
        self.totals.evictions += 1;
        self.forget(victim);
        true
    }

    /// The maximum of a volume.
    #[cfg(test)]
    pub(crate) fn max(&self, volume: VolumeIndex) -> Option<u32> {
        let list = self.lists.get(usize::from(volume.0))?;
        list.is_bounded().then_some(list.max)
    }
}
