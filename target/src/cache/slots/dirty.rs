//! Dirty slots: the list of each volume, oldest first, and the steps of a write-back.

use super::super::policy::Slot;
use super::meta::Meta;
use super::{NONE, SlotState, Slots};
use crate::volume::ids::VolumeIndex;

impl Slots {
    // A write-back no longer reads a slot.
    pub(super) fn leave_store(&mut self, slot: Slot) {
        let meta = &mut self.metas[slot.index()];
        meta.stores -= 1;
        self.totals.outdated -= usize::from(meta.state == SlotState::Detached && meta.stores == 0);
    }

    // The last of a volume's dirty slots that is at least as old as `order`.
    pub(super) fn last_as_old(&self, volume: u16, order: u64) -> u32 {
        let (mut after, mut next) = (NONE, self.lists[usize::from(volume)].head);
        while next != NONE && self.metas[next as usize].since <= order {
            (after, next) = (next, self.metas[next as usize].next);
        }
        after
    }

    // Puts a slot in its volume's dirty list, behind `after`.
    pub(super) fn enter_list(&mut self, slot: Slot, after: u32, order: u64, now_ms: u32) {
        let list = usize::from(self.metas[slot.index()].volume);
        debug_assert!(after == NONE || self.metas[after as usize].since <= order);
        let before = if after == NONE {
            std::mem::replace(&mut self.lists[list].head, slot.0)
        } else {
            std::mem::replace(&mut self.metas[after as usize].next, slot.0)
        };
        if before == NONE {
            self.lists[list].tail = slot.0;
        } else {
            self.metas[before as usize].prev = slot.0;
        }
        let meta = &mut self.metas[slot.index()];
        (meta.prev, meta.next) = (after, before);
        (meta.since, meta.since_ms) = (order, now_ms);
        meta.state = SlotState::Dirty;
        self.lists[list].counts.dirty += 1;
        self.lists[list].watch += u32::from(meta.failed);
        self.totals.dirty += 1;
    }

    // Takes a slot out of the dirty count and out of its list. The caller gives it a new state.
    pub(super) fn leave_list(&mut self, slot: Slot) {
        let Meta { prev, next, state, volume, failed, .. } = self.metas[slot.index()];
        if !state.is_dirty() {
            if state == SlotState::Bounded {
                self.leave_clean(slot);
            }
            return;
        }
        self.totals.dirty -= 1;
        let list = &mut self.lists[usize::from(volume)];
        list.counts.dirty -= 1;
        list.watch -= u32::from(failed);
        self.metas[slot.index()].failed = false;
        if state == SlotState::Writing {
            return;
        }
        if prev == NONE {
            list.head = next;
        } else {
            self.metas[prev as usize].next = next;
        }
        if next == NONE {
            list.tail = prev;
        } else {
            self.metas[next as usize].prev = prev;
        }
    }

    /// The slot of a volume that has been dirty for longest, without slots that a write-back reads.
    #[must_use]
    pub(crate) fn oldest_dirty(&self, volume: VolumeIndex) -> Option<Slot> {
        let head = self.lists.get(usize::from(volume.0))?.head;
        (head != NONE).then_some(Slot(head))
    }

    /// A write-back takes a dirty slot.
    pub(crate) fn begin_writing(&mut self, slot: Slot) {
        debug_assert_eq!(self.state(slot), SlotState::Dirty, "{:?}", self.holders(slot));
        let failed = self.metas[slot.index()].failed;
        self.leave_list(slot);
        self.totals.dirty += 1;
        let meta = &mut self.metas[slot.index()];
        meta.state = SlotState::Writing;
        meta.stores += 1;
        meta.failed = failed;
        let volume = usize::from(meta.volume);
        self.lists[volume].counts.dirty += 1;
        self.lists[volume].watch += u32::from(failed);
    }

    /// The store has the slot's bytes.
    pub(crate) fn written(&mut self, slot: Slot) {
        self.leave_store(slot);
        if self.state(slot) == SlotState::Writing {
            self.leave_list(slot);
            self.metas[slot.index()].state = SlotState::Clean;
            self.readmit(slot);
            self.freed = true;
            self.enter_clean(slot);
        }
        self.free_if_unpinned(slot);
    }

    /// The store does not have the slot's bytes: the write-back `failed`, or the slot was recalled
    /// from it. The slot is dirty again. If newer data took its place, the newer slot takes over
    /// this slot's age.
    pub(crate) fn not_written(&mut self, slot: Slot, failed: bool) {
        self.leave_store(slot);
        let meta = &self.metas[slot.index()];
        let since = (meta.since, meta.since_ms);
        let (volume, block) = (VolumeIndex(meta.volume), meta.block);
        let current = match meta.state {
            SlotState::Writing => Some(slot),
            _ => self.find(volume, block).filter(|s| self.state(*s) == SlotState::Dirty),
        };
        if let Some(current) = current {
            // Order and time of the older write.
            let (order, now_ms) = since.min(self.since(current));
            let keeps = failed || self.metas[current.index()].failed;
            self.leave_list(current);
            self.metas[current.index()].failed = keeps;
            let after = self.last_as_old(volume.0, order);
            self.enter_list(current, after, order, now_ms);
        }
        self.free_if_unpinned(slot);
    }
}
