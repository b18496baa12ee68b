//! How many clean slots of a volume stay when others need memory.
//!
//! A clean slot may leave only if its volume has more clean slots than its minimum. Dirty slots
//! count besides: they cannot leave anyway. A slot that is refused for the minimum goes aside, as
//! one that is dirty or pinned does.
//!
//! Invariant: of a volume, at most as many clean slots as its minimum are aside for that reason. A
//! slot goes aside for it only while the volume has no more than the minimum, and a clean slot
//! never becomes dirty in its place. So a volume above its minimum has a clean slot in a queue, or
//! a pinned one that comes back to its queue with its last pin: nothing has to be searched for. A
//! minimum that is lowered would break this, so [`Slots::set_min`] brings the slots back then.

use super::{SlotCounts, Slots};
use crate::store::VolumeIndex;

impl SlotCounts {
    /// Slots that are the same as the store.
    #[inline]
    pub(super) fn clean(&self) -> u32 {
        self.cached - self.dirty
    }
}

impl Slots {
    /// Of a volume so many clean slots stay, if it has that many. The cost is the number of all
    /// slots if they are fewer than before.
    pub(crate) fn set_min(&mut self, volume: VolumeIndex, slots: u32) {
        let Some(list) = self.lists.get_mut(usize::from(volume.0)) else { return };
        let before = std::mem::replace(&mut list.min, slots);
        if slots < before {
            // Those that may leave now are next to be looked at, the others go aside again.
            self.for_each_in(volume, 0, u64::MAX, |slots, slot| slots.policy.readmit(slot));
            self.freed = true;
        }
    }

    /// How many clean slots of a volume stay.
    #[cfg(test)]
    pub(crate) fn min(&self, volume: VolumeIndex) -> u32 {
        self.lists.get(usize::from(volume.0)).map_or(0, |list| list.min)
    }
}
