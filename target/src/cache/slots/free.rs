//! [`FreeSlots`]: the free slots of a shard.
//!
//! Most are in the arena, which joins them with their neighbours. The few slots that became free
//! last are *loose*: a request for a single slot gets these first. Before a request for a run of
//! slots, [`FreeSlots::gather`] gives the loose slots to the arena.

use rblk_fabric::Region;
use rblk_protocol::width::{wide, wide64};

use super::super::SLOT_BYTES;
use super::super::policy::Slot;
use crate::memory::arena::Arena;

/// Most free slots that are kept out of the arena.
const LOOSE: usize = 64;

/// The free slots of a shard.
#[derive(Debug)]
pub(super) struct FreeSlots {
    arena: Arena,
    // At most `LOOSE`.
    loose: Vec<Slot>,
    // Offset of the first slot in the region.
    start: usize,
}

impl FreeSlots {
    /// All slots of an arena.
    pub(super) fn new(arena: Arena) -> Self {
        let start = arena.range().start;
        Self { arena, loose: Vec::with_capacity(LOOSE), start }
    }

    /// The memory.
    #[inline]
    pub(super) fn region(&self) -> &Region {
        self.arena.region()
    }

    /// First byte of the first slot in the region.
    #[inline]
    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// First byte of a slot in the region.
    #[inline]
    pub(super) fn offset(&self, slot: Slot) -> usize {
        self.start + slot.index() * SLOT_BYTES
    }

    /// The slot of a byte in the region.
    #[inline]
    pub(super) fn slot_at(&self, offset: usize) -> Slot {
        debug_assert!(self.arena.range().contains(&offset), "no slot at {offset}");
        // The number of slots fits in 32 bits.
        Slot((wide64((offset - self.start) / SLOT_BYTES) & 0xffff_ffff) as u32)
    }

    /// A loose slot.
    #[inline(always)]
    pub(super) fn take_loose(&mut self) -> Option<Slot> {
        self.loose.pop()
    }

    /// A slot of the arena.
    pub(super) fn take_one(&mut self) -> Option<Slot> {
        let extent = self.arena.allocate(SLOT_BYTES)?;
        let offset = self.arena.pages_of_extent(extent);
        Some(self.slot_at(offset))
    }

    /// Frees a slot; it may become loose.
    #[inline(always)]
    pub(super) fn give_back(&mut self, slot: Slot) {
        if self.loose.len() < LOOSE {
            self.loose.push(slot);
        } else {
            self.give_to_arena(slot);
        }
    }

    /// Frees a slot into the arena.
    #[inline(never)]
    pub(super) fn give_to_arena(&mut self, slot: Slot) {
        self.arena.release_page(self.offset(slot));
    }

    /// Gives the loose slots to the arena.
    pub(super) fn gather(&mut self) {
        while let Some(slot) = self.loose.pop() {
            self.give_to_arena(slot);
        }
    }

    /// Free slots of the arena.
    pub(super) fn len(&self) -> usize {
        self.arena.free_bytes() / SLOT_BYTES
    }

    /// Whether `count` slots are free in one run, or the longest possible run if that is shorter.
    pub(super) fn has_run(&self, count: usize) -> bool {
        let run = (count * SLOT_BYTES).next_power_of_two().min(wide(self.arena.extent_max()));
        wide(self.arena.largest_free()) >= run
    }

    /// Hands out `count` slots of the arena in runs as long as possible. The caller ensures that
    /// the arena has as many.
    pub(super) fn take(&mut self, count: usize, mut each: impl FnMut(Slot)) {
        debug_assert!(count <= self.len(), "{count} slots of {}", self.len());
        let mut left = count;
        let most = wide(self.arena.extent_max()) / SLOT_BYTES;
        let mut step = left.next_power_of_two().min(most);
        while left > 0 {
            if let Some(extent) = self.arena.allocate(step * SLOT_BYTES) {
                let first = self.arena.pages_of_extent(extent);
                let used = step.min(left);
                for page in 0..step {
                    let offset = first + page * SLOT_BYTES;
                    if page < used {
                        each(self.slot_at(offset));
                    } else {
                        self.arena.release_page(offset);
                    }
                }
                left -= used;
                step = step.min(left.next_power_of_two());
            } else {
                // One page is always free: at least `count` pages are.
                step = (step / 2).max(1);
            }
        }
    }
}
