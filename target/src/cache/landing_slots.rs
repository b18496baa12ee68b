//! Slots that a shard sets apart for connections: the data of small writes lands in them.
//!
//! A slot set apart is [`SlotState::Landing`]: it holds no block, and no job has it. A write of one
//! block takes the slot in which its data landed, and leaves the slot allocated for the write
//! ([`Slots::exchange`]). The slots of a connection come back when its QP is destroyed.
//!
//! Memory set apart is lost to the cache, and does not come back when memory is short. So at most
//! one of [`PART`] slots is set apart. Slots for the volumes' minimums (`minimums.rs`) stay, and so
//! do enough slots for requests. Connections beyond this limit have their data copied. After a
//! reload that raises a minimum, the volume may keep less than its minimum until connections end.
//!
//! [`SlotState::Landing`]: super::slots::SlotState::Landing
//! [`Slots::exchange`]: super::slots::Slots::exchange

use super::shard::Shard;
use crate::store::Store;

/// At most one of this many slots is set apart.
const PART: usize = 8;
/// This many requests of the largest size always find memory that is neither dirty nor set apart.
const REQUESTS: usize = 2;

impl<S: Store> Shard<S> {
    /// Sets slots apart. Returns their offsets in the arena. `None`: too few slots are free, or
    /// jobs wait for memory.
    pub(crate) fn take_landing(&mut self, count: usize) -> Option<Box<[usize]>> {
        let set_apart = self.core.slots.set_apart() + count;
        if set_apart > self.landing_max() || self.memory.is_short() {
            return None;
        }
        let slots = self.core.slots.set_apart_more(count)?;
        self.share_anew();
        Some(slots)
    }

    /// Takes back slots that were set apart.
    pub(crate) fn give_landing(&mut self, offsets: &[usize]) {
        if offsets.is_empty() {
            return;
        }
        offsets.iter().for_each(|offset| self.core.slots.take_back(*offset));
        self.share_anew();
        self.run_granted();
    }

    /// Most slots that may be set apart.
    fn landing_max(&self) -> usize {
        let (all, clean) = (self.core.slots.capacity(), self.clean());
        let minimums = self.minimums();
        // The remaining slots still hold the minimums.
        let spare = clean.saturating_sub(minimums.saturating_mul(super::minimums::PART));
        let for_requests = REQUESTS * self.request_slots;
        (all / PART).min(spare).min(clean.saturating_sub(minimums.saturating_add(for_requests)))
    }
}
