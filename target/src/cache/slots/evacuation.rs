//! Moves of blocks from slot to slot, so that large requests find memory in one run.
//!
//! A slot never changes while it is in the index. So a block is moved by a copy in a slot of its
//! own, which then takes the place of the old slot in the index, in the policy and in the list of
//! its volume. A block that RDMA or the store reads is not moved to make room: its memory would not
//! become free.

use super::super::SLOT_BYTES;
use super::super::policy::Slot;
use super::chunk::{CLASSES, ChunkKind, run};
use super::meta::Meta;
use super::{NONE, SlotState, Slots};

/// Chunks that one search examines.
const LOOKS: usize = 16;
/// A part of a chunk: as many slots more than a request takes are free before blocks are moved.
const SPARE: usize = 4;
/// A shorter run is not worth the moves.
const SHORTEST: usize = 8;

// A run of slots of a chunk, of which none must stay.
#[derive(Clone, Copy, Debug)]
struct Window {
    chunk: usize,
    // Slots of the run.
    length: usize,
    // A bit for each slot of the run that holds a block.
    used: u64,
}

impl Slots {
    /// Evicts and moves blocks until `count` slots are free in one run, or in one run for each
    /// whole chunk. Accepts shorter runs, and gives up, where slots cannot leave or be moved. The
    /// work of a call is bounded: it moves at most about as many blocks as the request has.
    pub(super) fn make_run(&mut self, count: usize, steps: &mut u32) {
        if self.free.has_run(count) {
            return;
        }
        self.free.gather();
        let each = self.free.chunks().slots();
        let (most, mut made) = (count.min(each), 0);
        while made < count && !self.free.has_run(count) {
            // The moved blocks need as many free slots elsewhere.
            if self.free.len() < count + each / SPARE && self.make_room(steps) {
                continue;
            }
            let Some(window) = self.find_window(most) else { return };
            self.empty(window);
            made += window.length;
        }
    }

    // Moves the blocks of a run of slots to other chunks.
    fn empty(&mut self, window: Window) {
        let Window { chunk, used, .. } = window;
        self.free.chunks_mut().set_kind(chunk, ChunkKind::Emptied);
        for (at, from) in self.free.slots_of(chunk).enumerate() {
            if used >> at & 1 == 0 {
                continue;
            }
            let Some(to) = self.free.take_elsewhere() else { break };
            self.metas[to.index()].state = SlotState::Private;
            self.copy_block(from, to);
            self.move_block(from, to);
        }
        self.free.end_emptying(chunk);
    }

    // A run of slots of which none must stay, in a chunk with as many free slots as possible; or a
    // shorter one, if the search finds none of this length.
    fn find_window(&mut self, length: usize) -> Option<Window> {
        // The moved blocks must not take slots that are loose.
        self.free.gather();
        let (mut looks, start) = (LOOKS, self.looked_at);
        let mut best: Option<Window> = None;
        for class in (0..CLASSES).rev() {
            for kind in [ChunkKind::Singles, ChunkKind::Runs] {
                // From the last place to the end, and from the first to the last place.
                for (from, end) in [(start, usize::MAX), (0, start)] {
                    let mut from = from;
                    while let Some(chunk) = self.free.chunks().next(kind, class, from)
                        && chunk < end
                    {
                        if looks == 0 {
                            return best;
                        }
                        (looks, from) = (looks - 1, chunk + 1);
                        self.looked_at = chunk + 1;
                        let least = best.map_or(SHORTEST, |window| 2 * window.length);
                        best = self.window_of(chunk, least, length).or(best);
                        if best.is_some_and(|window| window.length == length) {
                            return best;
                        }
                    }
                }
            }
        }
        best
    }

    // The run of slots of a chunk with the fewest blocks, if none of its slots must stay: of `most`
    // slots, or of the half, until `least`.
    fn window_of(&self, chunk: usize, least: usize, most: usize) -> Option<Window> {
        let (mut used, mut stays) = (0u64, 0u64);
        for (at, slot) in self.free.slots_of(chunk).enumerate() {
            let is_free = self.state(slot) == SlotState::Free;
            let may_leave = self.can_move(slot) && self.metas[slot.index()].is_unpinned();
            used |= u64::from(!is_free) << at;
            stays |= u64::from(!is_free && !may_leave) << at;
        }
        let chunks = self.free.chunks();
        let elsewhere = chunks.free() - chunks.free_of(chunk);
        let mut length = most;
        loop {
            let windows = (0..=chunks.slots() - length).map(|at| run(at, length));
            let fewest = windows.filter(|window| stays & window == 0).map(|window| used & window);
            if let Some(used) = fewest.min_by_key(|used| used.count_ones())
                && used.count_ones() as usize <= elsewhere
            {
                return Some(Window { chunk, length, used });
            }
            length /= 2;
            if length < least {
                return None;
            }
        }
    }

    /// Copies the bytes of a slot to a private slot.
    pub(crate) fn copy_block(&mut self, from: Slot, to: Slot) {
        debug_assert_eq!(self.state(to), SlotState::Private, "{:?}", self.holders(to));
        let (source, target) = (self.offset(from), self.offset(to));
        let region = self.free.region();
        region.copy_to(source, region, target, SLOT_BYTES);
        self.moved += 1;
    }

    /// Whether another slot with the same bytes can take the place of a slot of the index. A slot
    /// with a write-back is named by its job.
    #[inline]
    pub(crate) fn can_move(&self, slot: Slot) -> bool {
        matches!(self.state(slot), SlotState::Clean | SlotState::Bounded | SlotState::Dirty)
    }

    /// Puts a private slot with the same bytes in the place of a slot of the index. The old slot is
    /// free when its last pin is gone.
    pub(crate) fn move_block(&mut self, from: Slot, to: Slot) {
        debug_assert!(self.can_move(from), "{:?}", self.holders(from));
        debug_assert_eq!(self.state(to), SlotState::Private, "{:?}", self.holders(to));
        let old = self.metas[from.index()];
        self.replace_in_chain(from, to);
        self.metas[to.index()] = Meta { sends: 0, stores: 0, ..old };
        if matches!(old.state, SlotState::Dirty | SlotState::Bounded) {
            self.replace_in_list(&old, to);
        }
        self.policy.move_to(from, to);
        self.detach(from);
        if old.state.is_clean() {
            // The old slot may have been aside for its pins.
            self.readmit(to);
        }
    }

    fn replace_in_chain(&mut self, from: Slot, to: Slot) {
        let Meta { volume, block, .. } = self.metas[from.index()];
        let bucket = self.bucket(self.hash(volume, block));
        if self.buckets[bucket] == from.0 {
            self.buckets[bucket] = to.0;
            return;
        }
        let mut at = self.buckets[bucket];
        while let Some(meta) = self.metas.get_mut(at as usize) {
            if meta.chain == from.0 {
                meta.chain = to.0;
                return;
            }
            at = meta.chain;
        }
        debug_assert!(false, "not in the index: {:?}", self.holders(from));
    }

    // In the list of dirty slots, or of clean slots under a maximum.
    fn replace_in_list(&mut self, old: &Meta, to: Slot) {
        let list = &mut self.lists[usize::from(old.volume)];
        let (head, tail) = match old.state {
            SlotState::Dirty => (&mut list.head, &mut list.tail),
            _ => (&mut list.clean_head, &mut list.clean_tail),
        };
        match old.prev {
            NONE => *head = to.0,
            prev => self.metas[prev as usize].next = to.0,
        }
        match old.next {
            NONE => *tail = to.0,
            next => self.metas[next as usize].prev = to.0,
        }
    }

    /// Blocks that were copied to another slot, so that requests find runs, since the start.
    #[must_use]
    pub(crate) fn moved(&self) -> u64 {
        self.moved
    }

    /// Free slots.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }
}
