//! At most how many slots of the index a volume has.
//!
//! The clean slots of a volume with a maximum stand in a list. A block that would be one too many
//! takes the place of one of them: of the first that was not hit since it came, or since it was
//! last looked at. Slots that were hit, or are lent, go to the end of the list. If all of the first
//! [`LOOKS`] were, the next one leaves all the same. Lent, it is free when it comes back.
//!
//! Dirty slots count and cannot leave. A volume with nothing else takes no more: what is read is
//! not kept, and what is written goes to the store. Slots that are not in the index do not count.
//!
//! Invariant: a volume has no more slots than its maximum, unless the maximum was lowered. Then
//! [`Slots::trim`] takes out a few at a time, and those that are dirty leave when they are written.
//! Of a volume that has a maximum only since it has clean slots, it first puts these in the list.
//!
//! A slot in the list is [`State::Bounded`] and not `Clean`, so the paths of other volumes do not
//! ask for a maximum. Slots that are in the list when there is no maximum any more stay there.

use rblk_protocol::width::{narrow, wide};

use super::super::policy::Slot;
use super::meta::{BOUNDED, Meta, VolumeSlots};
use super::{NONE, Slots, State};
use crate::volume::ids::VolumeIndex;

/// Slots that get another round, at most, before one of their volume leaves.
const LOOKS: usize = 8;
/// Slots that one call of [`Slots::trim`] looks at, to put them in lists.
const SWEPT: usize = 4096;
/// Slots that one call of it takes out.
const DROPPED: usize = 256;

/// How far [`Slots::trim`] is.
#[derive(Debug, Default)]
pub(super) struct Trim {
    // It has something to do.
    due: bool,
    // The slot that is looked at next.
    next: usize,
}

impl VolumeSlots {
    #[inline]
    fn is_bounded(&self) -> bool {
        self.watch & BOUNDED != 0
    }

    // Whether clean slots of the volume are not in its list, and have to be.
    fn is_unlisted(&self) -> bool {
        self.is_bounded() && self.listed < self.counts.clean()
    }

    // Whether a slot has to leave that can.
    fn is_above(&self) -> bool {
        self.counts.cached > self.max && self.listed > 0
    }
}

impl Slots {
    /// A volume has at most so many slots in the index from now on. It may have more: then
    /// [`Self::trim`] is due.
    pub(crate) fn set_max(&mut self, volume: VolumeIndex, most: Option<u32>) {
        let Some(list) = self.lists.get_mut(usize::from(volume.0)) else { return };
        list.max = most.unwrap_or(u32::MAX);
        list.watch = list.failed() | if most.is_some() { BOUNDED } else { 0 };
        self.trim.due |= list.is_unlisted() || list.is_above();
    }

    /// Whether [`Self::trim`] has something to do.
    #[must_use]
    pub(crate) fn is_trim_due(&self) -> bool {
        self.trim.due
    }

    /// Has volumes come closer to their maximums. The work of one call is bounded.
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
            if self.state(slot) == State::Clean && self.lists[of].is_bounded() {
                self.push_clean(slot);
            }
        }
    }

    /// Whether a block of a volume may be in the index, clean: another one leaves if it has to.
    #[inline(always)]
    pub(crate) fn has_place(&mut self, volume: VolumeIndex, block: u64) -> bool {
        let full = |list: &VolumeSlots| list.counts.cached >= list.max;
        !self.lists.get(usize::from(volume.0)).is_some_and(full) || self.make_place(volume, block)
    }

    #[cold]
    fn make_place(&mut self, volume: VolumeIndex, block: u64) -> bool {
        // A slot of the same block gives its place.
        self.find(volume, block).is_some()
            || self.drop_clean(volume) && {
                let list = &self.lists[usize::from(volume.0)];
                list.counts.cached < list.max
            }
    }

    /// Whether so many more blocks of a volume may be dirty, as far as the volume is concerned.
    #[inline(always)]
    pub(crate) fn may_be_dirty(&self, volume: VolumeIndex, more: usize) -> bool {
        self.lists.get(usize::from(volume.0)).is_none_or(|list| {
            list.watch == 0
                || list.failed() == 0 && wide(list.counts.dirty) + more <= wide(list.max)
        })
    }

    /// Whether so much of what a volume may have is dirty that it should be written.
    #[inline]
    pub(crate) fn is_crowded(&self, volume: VolumeIndex) -> bool {
        self.lists
            .get(usize::from(volume.0))
            .is_some_and(|list| list.is_bounded() && list.counts.dirty > list.max / 2)
    }

    /// Whether so many blocks are so much of what a volume may have that they would leave before
    /// somebody asks for them.
    pub(crate) fn is_too_much(&self, volume: VolumeIndex, blocks: usize) -> bool {
        let most = self.lists.get(usize::from(volume.0)).map_or(u32::MAX, |list| list.max);
        blocks > wide(most / 2)
    }

    // A slot in the index is clean now. It may be the one that leaves.
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
            // It was dirty when the maximum was lowered.
            self.drop_clean(volume);
        }
    }

    // Puts a clean slot last in the list of its volume.
    fn push_clean(&mut self, slot: Slot) {
        debug_assert_eq!(self.state(slot), State::Clean, "{:?}", self.holders(slot));
        let list = &mut self.lists[usize::from(self.metas[slot.index()].volume)];
        list.listed += 1;
        let before = std::mem::replace(&mut list.clean_tail, slot.0);
        match self.metas.get_mut(before as usize) {
            Some(before) => before.next = slot.0,
            None => list.clean_head = slot.0,
        }
        let meta = &mut self.metas[slot.index()];
        (meta.prev, meta.next, meta.state) = (before, NONE, State::Bounded);
    }

    // Takes a clean slot out of the list of its volume.
    #[inline(never)]
    pub(super) fn leave_clean(&mut self, slot: Slot) {
        let Meta { prev, next, volume, .. } = self.metas[slot.index()];
        let list = &mut self.lists[usize::from(volume)];
        list.listed -= 1;
        self.metas[slot.index()].state = State::Clean;
        match self.metas.get_mut(prev as usize) {
            Some(prev) => prev.next = next,
            None => list.clean_head = next,
        }
        match self.metas.get_mut(next as usize) {
            Some(next) => next.prev = prev,
            None => list.clean_tail = prev,
        }
    }

    // Takes a clean slot of a volume with a maximum out of the index, if there is one.
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

    /// At most how many slots a volume has.
    #[cfg(test)]
    pub(crate) fn max(&self, volume: VolumeIndex) -> Option<u32> {
        let list = self.lists.get(usize::from(volume.0))?;
        list.is_bounded().then_some(list.max)
    }
}
