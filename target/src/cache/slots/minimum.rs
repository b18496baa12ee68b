//! The number of clean slots that a volume keeps when others need memory.
//!
//! A clean slot may leave only if its volume has more clean slots than its minimum. Dirty slots
//! come on top: they cannot leave anyway. A slot refused for the minimum goes aside, like a dirty
//! or pinned one.
//!
//! Invariant: of each volume, at most as many clean slots as its minimum are aside for the minimum.
//! A slot goes aside for it, or stays there, only while the volume has no more than the minimum,
//! and a clean slot never becomes dirty in its place. So a volume above its minimum has a clean
//! slot in a queue, or a pinned one that returns to its queue with its last pin: no search is
//! needed. A lower minimum would break this, so [`Slots::set_min`] then makes the policy ask about
//! all slots aside again.

use super::super::policy::Slot;
use super::{SlotCounts, Slots};
use crate::volume::ids::VolumeIndex;

impl SlotCounts {
    /// Slots with the same data as the store.
    #[inline]
    pub(super) fn clean(&self) -> u32 {
        self.cached - self.dirty
    }
}

impl Slots {
    /// Sets the number of clean slots that a volume keeps.
    pub(crate) fn set_min(&mut self, volume: VolumeIndex, slots: u32) {
        let Some(list) = self.lists.get_mut(usize::from(volume.0)) else { return };
        let before = std::mem::replace(&mut list.min, slots);
        if slots < before {
            // Each search for a victim finds some of the slots that may leave now.
            self.policy.ask_again();
            self.freed = true;
        }
    }

    /// A slot lost its last pin or became clean. It returns to its queue if it may leave. A slot
    /// that its volume keeps stays aside, however often it is lent. Otherwise each hit of this
    /// volume would make the next search look at all its slots again.
    #[inline(always)]
    pub(super) fn readmit(&mut self, slot: Slot) {
        let (metas, lists) = (&self.metas, &self.lists);
        self.policy.readmit_if(slot, || lists[usize::from(metas[slot.index()].volume)].has_spare());
    }

    /// Slots that a search for a victim refused.
    #[cfg(test)]
    pub(crate) fn aside(&self) -> u32 {
        self.policy.aside_len()
    }

    /// The minimum of a volume.
    #[cfg(test)]
    pub(crate) fn min(&self, volume: VolumeIndex) -> u32 {
        self.lists.get(usize::from(volume.0)).map_or(0, |list| list.min)
    }
}
