//! How many clean slots of a volume stay when others need memory.
//!
//! A clean slot may leave only if its volume has more clean slots than its minimum. Dirty slots
//! count besides: they cannot leave anyway. A slot that is refused for the minimum goes aside, as
//! one that is dirty or pinned does.
//!
//! Invariant: of a volume, at most as many clean slots as its minimum are aside for that reason. A
//! slot goes aside for it, or stays there, only while the volume has no more than the minimum, and
//! a clean slot never becomes dirty in its place. So a volume above its minimum has a clean slot in
//! a queue, or a pinned one that comes back to its queue with its last pin: nothing has to be
//! searched for. A minimum that is lowered would break this, so [`Slots::set_min`] has all those
//! aside asked about again then.

use super::super::policy::Slot;
use super::{SlotCounts, Slots};
use crate::volume::ids::VolumeIndex;

impl SlotCounts {
    /// Slots that are the same as the store.
    #[inline]
    pub(super) fn clean(&self) -> u32 {
        self.cached - self.dirty
    }
}

impl Slots {
    /// Of a volume so many clean slots stay, if it has that many.
    pub(crate) fn set_min(&mut self, volume: VolumeIndex, slots: u32) {
        let Some(list) = self.lists.get_mut(usize::from(volume.0)) else { return };
        let before = std::mem::replace(&mut list.min, slots);
        if slots < before {
            // Each search for a victim finds some of those that may leave now.
            self.policy.ask_again();
            self.freed = true;
        }
    }

    /// A slot lost its last pin or is clean now. It goes back to its queue if it may leave: one
    /// that its volume keeps stays aside, however often it is lent. Otherwise the hits of such a
    /// volume would have the next search look at all its slots again.
    #[inline(always)]
    pub(super) fn readmit(&mut self, slot: Slot) {
        let (metas, lists) = (&self.metas, &self.lists);
        self.policy.readmit_if(slot, || lists[usize::from(metas[slot.index()].volume)].has_spare());
    }

    /// Slots that were refused when a search for a victim looked at them.
    #[cfg(test)]
    pub(crate) fn aside(&self) -> u32 {
        self.policy.aside_len()
    }

    /// How many clean slots of a volume stay.
    #[cfg(test)]
    pub(crate) fn min(&self, volume: VolumeIndex) -> u32 {
        self.lists.get(usize::from(volume.0)).map_or(0, |list| list.min)
    }
}
