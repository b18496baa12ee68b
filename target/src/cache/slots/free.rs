//! [`FreeSlots`]: the free slots of a shard.
//!
//! Whole chunks are in the arena, which joins them with their neighbours. The free slots of other
//! chunks are in [`Chunks`]: those of chunks for single slots, and those of chunks for runs. The
//! few slots that became free last in chunks for single slots are *loose*: a request for a single
//! slot gets these first.

use rblk_fabric::Region;
use rblk_protocol::width::{narrow, wide, wide64};

use super::super::SLOT_BYTES;
use super::super::policy::Slot;
use super::chunk::{CHUNK_MOST, ChunkKind, Chunks};
use crate::memory::arena::Arena;

/// Most free slots that are kept out of their chunks.
const LOOSE: usize = 64;

/// The free slots of a shard.
#[derive(Debug)]
pub(super) struct FreeSlots {
    arena: Arena,
    chunks: Chunks,
    // Slots of a chunk, as a shift.
    shift: u32,
    // At most `LOOSE`.
    loose: Vec<Slot>,
    // Offset of the first slot in the region.
    start: usize,
}

impl FreeSlots {
    /// All slots of an arena.
    pub(super) fn new(arena: Arena) -> Self {
        let start = arena.range().start;
        let slots = CHUNK_MOST.min(wide(arena.extent_max()) / SLOT_BYTES);
        let chunks = Chunks::new(arena.capacity_bytes() / SLOT_BYTES / slots, slots);
        Self { arena, chunks, shift: slots.ilog2(), loose: Vec::with_capacity(LOOSE), start }
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

    // The chunk of a slot.
    #[inline(always)]
    fn chunk_of(&self, slot: Slot) -> usize {
        slot.index() >> self.shift
    }

    // The slot at a place in a chunk.
    fn slot_of(&self, chunk: usize, at: usize) -> Slot {
        Slot(narrow((chunk << self.shift) + at))
    }

    /// The slots of a chunk.
    pub(super) fn slots_of(&self, chunk: usize) -> impl Iterator<Item = Slot> + use<> {
        let first = chunk << self.shift;
        (first..first + self.chunks.slots()).map(|at| Slot(narrow(at)))
    }

    /// The chunks.
    pub(super) fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// The chunks, to change.
    pub(super) fn chunks_mut(&mut self) -> &mut Chunks {
        &mut self.chunks
    }

    /// Whether a slot is in a chunk for single slots.
    #[inline(always)]
    pub(super) fn is_single(&self, slot: Slot) -> bool {
        self.chunks.kind(self.chunk_of(slot)) == ChunkKind::Singles
    }

    /// A loose slot.
    #[inline(always)]
    pub(super) fn take_loose(&mut self) -> Option<Slot> {
        self.loose.pop()
    }

    /// A slot of a chunk for single slots; if none is free, of a whole chunk.
    pub(super) fn take_one(&mut self) -> Option<Slot> {
        if let Some((chunk, at)) = self.chunks.take_single() {
            return Some(self.slot_of(chunk, at));
        }
        let chunk = self.take_chunk()?;
        self.chunks.begin(chunk, ChunkKind::Singles, 1);
        Some(self.slot_of(chunk, 0))
    }

    // A whole chunk of the arena.
    fn take_chunk(&mut self) -> Option<usize> {
        let bytes = self.chunk_bytes();
        let extent = self.arena.allocate(wide(bytes))?;
        let offset = self.arena.parts_of_extent(extent, bytes);
        Some(self.chunk_of(self.slot_at(offset)))
    }

    fn chunk_bytes(&self) -> u32 {
        narrow(self.chunks.slots() * SLOT_BYTES)
    }

    /// Makes the chunk for runs with the most free slots one for single slots. False: none has a
    /// free slot.
    pub(super) fn convert(&mut self) -> bool {
        let chunk = self.chunks.emptiest();
        if let Some(chunk) = chunk {
            self.chunks.set_kind(chunk, ChunkKind::Singles);
        }
        chunk.is_some()
    }

    /// Frees a slot; it may become loose.
    #[inline(always)]
    pub(super) fn give_back(&mut self, slot: Slot) {
        if self.is_single(slot) && self.loose.len() < LOOSE {
            self.loose.push(slot);
        } else {
            self.give_to_chunk(slot);
        }
    }

    /// Frees a slot into its chunk.
    #[inline(never)]
    pub(super) fn give_to_chunk(&mut self, slot: Slot) {
        let chunk = self.chunk_of(slot);
        let at = slot.index() & (self.chunks.slots() - 1);
        if self.chunks.give_back(chunk, at) {
            let offset = self.offset(self.slot_of(chunk, 0));
            self.arena.release_part(offset, self.chunk_bytes());
        }
    }

    /// Gives the loose slots to their chunks.
    pub(super) fn gather(&mut self) {
        while let Some(slot) = self.loose.pop() {
            self.give_to_chunk(slot);
        }
    }

    /// Free slots.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.loose.len() + self.chunks.free() + self.arena.free_bytes() / SLOT_BYTES
    }

    /// Whether `count` slots are free in one run, or in one run for each whole chunk of them.
    pub(super) fn has_run(&self, count: usize) -> bool {
        let each = self.chunks.slots();
        let (rest, whole) = (count % each, self.arena.free_bytes() / SLOT_BYTES / each);
        let has_rest = rest == 0 || whole > count / each || self.chunks.has_run(rest);
        has_rest && whole >= count / each
    }

    /// Hands out `count` slots in runs as long as possible. The caller ensures that as many are
    /// free.
    pub(super) fn take(&mut self, count: usize, mut each: impl FnMut(Slot)) {
        debug_assert!(count <= self.len(), "{count} slots of {}", self.len());
        let mut left = count - self.take_chunks(count, &mut each);
        while left > 0 {
            let most = left.min(self.chunks.slots());
            let (chunk, at, taken) = if let Some((chunk, at)) = self.chunks.take_run(most) {
                (chunk, at, most)
            } else if let Some(chunk) = self.take_chunk() {
                self.chunks.begin(chunk, ChunkKind::Runs, most);
                (chunk, 0, most)
            } else if let Some(piece) = self.chunks.take_piece(most) {
                piece
            } else if let Some(slot) = self.take_loose() {
                (self.chunk_of(slot), slot.index() & (self.chunks.slots() - 1), 1)
            } else {
                return debug_assert!(false, "{left} of {count} slots are missing");
            };
            (at..at + taken).for_each(|at| each(self.slot_of(chunk, at)));
            left -= taken;
        }
    }

    // Hands out whole chunks, neighbours where possible, for a request of at least one. Returns the
    // number of slots.
    fn take_chunks(&mut self, count: usize, each: &mut impl FnMut(Slot)) -> usize {
        let (slots, bytes) = (self.chunks.slots(), self.chunk_bytes());
        let most = wide(self.arena.extent_max()) / SLOT_BYTES;
        let mut left = count;
        let mut step = left.next_power_of_two().min(most);
        while left >= slots && step >= slots {
            let Some(extent) = self.arena.allocate(step * SLOT_BYTES) else {
                step /= 2;
                continue;
            };
            let offset = self.arena.parts_of_extent(extent, bytes);
            let first = self.chunk_of(self.slot_at(offset));
            for chunk in first..first + step / slots {
                let used = left.min(slots);
                if used == 0 {
                    let offset = self.offset(self.slot_of(chunk, 0));
                    self.arena.release_part(offset, bytes);
                    continue;
                }
                self.chunks.begin(chunk, ChunkKind::Runs, used);
                (0..used).for_each(|at| each(self.slot_of(chunk, at)));
                left -= used;
            }
            step = step.min(left.next_power_of_two());
        }
        count - left
    }

    /// Slots of a chunk were emptied: the chunk serves runs, unless all its slots are free.
    pub(super) fn end_emptying(&mut self, chunk: usize) {
        if self.chunks.kind(chunk) == ChunkKind::Emptied {
            self.chunks.set_kind(chunk, ChunkKind::Runs);
        }
    }

    /// A free slot for a block of a chunk that is emptied: of a chunk for single slots, or else of
    /// one for runs, which then is one for single slots.
    pub(super) fn take_elsewhere(&mut self) -> Option<Slot> {
        loop {
            if let Some((chunk, at)) = self.chunks.take_single() {
                return Some(self.slot_of(chunk, at));
            }
            if !self.convert() {
                return None;
            }
        }
    }
}
