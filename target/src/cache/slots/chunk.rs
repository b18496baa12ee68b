//! [`Chunks`]: the chunks of a shard's memory, and which of their slots are free. Pure.
//!
//! A chunk is an aligned run of at most [`CHUNK_MOST`] slots. Its kind says which requests get its
//! free slots: those for single slots, or those for runs. A chunk without a used slot is *whole*:
//! it belongs to neither, and the arena has its memory.
//!
//! Invariants: a whole chunk has no free slot here; a chunk of another kind has a used slot. Chunks
//! with free slots are in the list of their kind and number of free slots, and chunks for runs also
//! in the list of their longest run. A chunk that is emptied is in no list.

use rblk_protocol::width::wide;

use crate::memory::bits::Bits;

/// Most slots of a chunk: one word has a bit for each.
pub(super) const CHUNK_MOST: usize = 64;
/// Lists of one kind: powers of two from 1 to [`CHUNK_MOST`].
pub(super) const CLASSES: usize = 7;
/// Chunks of a list that a search examines, where not every run is long enough.
const SHORT_LOOKS: usize = 8;
const LAST_CLASS: u32 = CHUNK_MOST.ilog2();

/// The requests that get the free slots of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChunkKind {
    /// Those for one slot.
    Singles,
    /// Those for several slots.
    Runs,
    /// All slots of the chunk are free, and the arena has its memory.
    Whole,
    /// None: the blocks of the chunk are being moved to other chunks.
    Emptied,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    // A bit for each free slot.
    free: u64,
    kind: ChunkKind,
}

/// The chunks of a shard.
#[derive(Debug)]
pub(super) struct Chunks {
    chunks: Box<[Chunk]>,
    slots: usize,
    // Chunks with free slots, by the logarithm of their number.
    singles: [Bits; CLASSES],
    runs: [Bits; CLASSES],
    // Chunks for runs, by the logarithm of the longest free run.
    longest: [Bits; CLASSES],
    // Free slots of all chunks.
    free: usize,
    // Free slots of chunks for runs.
    holes: usize,
}

impl Chunks {
    /// `count` whole chunks of `slots` slots each.
    pub(super) fn new(count: usize, slots: usize) -> Self {
        debug_assert!(slots.is_power_of_two() && slots <= CHUNK_MOST, "{slots} slots");
        let lists = || std::array::from_fn(|_| Bits::new(count));
        Self {
            chunks: vec![Chunk { free: 0, kind: ChunkKind::Whole }; count].into_boxed_slice(),
            slots,
            singles: lists(),
            runs: lists(),
            longest: lists(),
            free: 0,
            holes: 0,
        }
    }

    /// Slots of a chunk.
    #[inline]
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Free slots of all chunks that are not whole.
    #[inline]
    pub(super) fn free(&self) -> usize {
        self.free
    }

    /// Free slots of chunks for runs.
    #[inline]
    pub(super) fn holes(&self) -> usize {
        self.holes
    }

    /// Free slots of a chunk that is not whole.
    pub(super) fn free_of(&self, chunk: usize) -> usize {
        wide(self.chunks[chunk].free.count_ones())
    }

    /// The kind of a chunk.
    #[inline(always)]
    pub(super) fn kind(&self, chunk: usize) -> ChunkKind {
        self.chunks[chunk].kind
    }

    // The word of a chunk with all slots free.
    fn full(&self) -> u64 {
        u64::MAX >> (CHUNK_MOST - self.slots)
    }

    // Sets the free slots of a chunk, and puts it in its lists.
    fn set_free(&mut self, chunk: usize, free: u64) {
        let Chunk { free: was, kind } = self.chunks[chunk];
        self.chunks[chunk].free = free;
        let count = |word: u64| word.count_ones();
        self.free = self.free + wide(count(free)) - wide(count(was));
        let classes = (count(was).checked_ilog2(), count(free).checked_ilog2());
        match kind {
            ChunkKind::Singles => list(&mut self.singles, chunk, classes),
            ChunkKind::Runs => {
                self.holes = self.holes + wide(count(free)) - wide(count(was));
                list(&mut self.runs, chunk, classes);
                list(&mut self.longest, chunk, (longest(was), longest(free)));
            }
            ChunkKind::Whole | ChunkKind::Emptied => {}
        }
    }

    /// Changes the kind of a chunk.
    pub(super) fn set_kind(&mut self, chunk: usize, kind: ChunkKind) {
        let free = self.chunks[chunk].free;
        self.set_free(chunk, 0);
        self.chunks[chunk].kind = kind;
        self.set_free(chunk, free);
    }

    /// Makes a whole chunk one of another kind, with its first `used` slots taken.
    pub(super) fn begin(&mut self, chunk: usize, kind: ChunkKind, used: usize) {
        debug_assert_eq!(self.kind(chunk), ChunkKind::Whole, "chunk {chunk}");
        debug_assert!((1..=self.slots).contains(&used), "{used} slots");
        self.chunks[chunk].kind = kind;
        self.set_free(chunk, self.full() & !run(0, used));
    }

    /// Frees a slot of a chunk. True: the chunk is whole now.
    pub(super) fn give_back(&mut self, chunk: usize, at: usize) -> bool {
        let free = self.chunks[chunk].free;
        debug_assert!(free & run(at, 1) == 0, "slot {at} of chunk {chunk} was free");
        let free = free | run(at, 1);
        if free != self.full() {
            self.set_free(chunk, free);
            return false;
        }
        self.set_free(chunk, 0);
        self.chunks[chunk].kind = ChunkKind::Whole;
        true
    }

    /// Takes a free slot of a chunk for single slots, of one with few free slots. Returns the chunk
    /// and the slot's place in it.
    pub(super) fn take_single(&mut self) -> Option<(usize, usize)> {
        let chunk = self.singles.iter().find_map(Bits::first)?;
        let free = self.chunks[chunk].free;
        self.set_free(chunk, free & (free - 1));
        Some((chunk, wide(free.trailing_zeros())))
    }

    // A chunk with a free run of `count` slots, and the place of the run: the shortest that fits,
    // as far as the lists know.
    fn find_run(&self, count: usize) -> Option<(usize, usize)> {
        let class = wide(count.max(1).ilog2());
        // Only in the first list may a run be too short.
        let mut from = 0;
        for _ in 0..SHORT_LOOKS {
            let Some(chunk) = self.longest[class].next(from) else { break };
            if let Some(at) = find_run(self.chunks[chunk].free, count) {
                return Some((chunk, at));
            }
            from = chunk + 1;
        }
        self.longest[class + 1..].iter().find_map(|list| {
            let chunk = list.first()?;
            Some((chunk, find_run(self.chunks[chunk].free, count)?))
        })
    }

    /// Whether a chunk for runs has a free run of `count` slots, as far as the lists know.
    pub(super) fn has_run(&self, count: usize) -> bool {
        self.find_run(count).is_some()
    }

    /// Takes a free run of `count` slots. Returns the chunk and the place of the run.
    pub(super) fn take_run(&mut self, count: usize) -> Option<(usize, usize)> {
        let (chunk, at) = self.find_run(count)?;
        self.set_free(chunk, self.chunks[chunk].free & !run(at, count));
        Some((chunk, at))
    }

    /// Takes a long run of free slots, at most `most`: of the chunks for runs, or else of those for
    /// single slots. Returns the chunk, the place of the run and its length.
    pub(super) fn take_piece(&mut self, most: usize) -> Option<(usize, usize, usize)> {
        let of = |lists: &[Bits]| lists.iter().rev().find_map(Bits::first);
        let chunk = of(&self.longest).or_else(|| of(&self.singles))?;
        let free = self.chunks[chunk].free;
        let count = (1usize << longest(free)?).min(most);
        let at = find_run(free, count)?;
        self.set_free(chunk, free & !run(at, count));
        Some((chunk, at, count))
    }

    /// The chunk for runs with about the most free slots.
    pub(super) fn emptiest(&self) -> Option<usize> {
        self.runs.iter().rev().find_map(Bits::first)
    }

    /// A chunk of this kind and class of free slots, numbered at least `from`.
    pub(super) fn next(&self, kind: ChunkKind, class: usize, from: usize) -> Option<usize> {
        match kind {
            ChunkKind::Singles => self.singles[class].next(from),
            ChunkKind::Runs => self.runs[class].next(from),
            ChunkKind::Whole | ChunkKind::Emptied => None,
        }
    }
}

// Moves a chunk from one list to another.
fn list(lists: &mut [Bits; CLASSES], chunk: usize, (was, is): (Option<u32>, Option<u32>)) {
    if was == is {
        return;
    }
    if let Some(class) = was {
        lists[wide(class)].clear(chunk);
    }
    if let Some(class) = is {
        lists[wide(class)].set(chunk);
    }
}

/// A run of ones.
pub(super) fn run(at: usize, count: usize) -> u64 {
    u64::MAX >> (CHUNK_MOST - count) << at
}

// The logarithm of the longest run of ones, rounded down. `None`: there is none.
fn longest(word: u64) -> Option<u32> {
    // Bit n is set if 2^class ones begin there.
    let (mut ones, mut class) = (word, 0);
    if word == 0 {
        return None;
    }
    loop {
        ones &= ones >> (1 << class);
        if ones == 0 || class + 1 == LAST_CLASS {
            return Some(if ones == 0 { class } else { LAST_CLASS });
        }
        class += 1;
    }
}

// The place of the first run of `count` ones.
fn find_run(word: u64, count: usize) -> Option<usize> {
    let (mut ones, mut have) = (word, 1);
    while have < count && ones != 0 {
        let more = have.min(count - have);
        ones &= ones >> more;
        have += more;
    }
    (ones != 0).then(|| wide(ones.trailing_zeros()))
}

#[cfg(test)]
mod tests {
    use super::*;

    // The lengths of the runs of ones.
    fn lengths(word: u64) -> Vec<usize> {
        let text = format!("{word:064b}");
        text.split('0').map(str::len).filter(|len| *len > 0).collect()
    }

    #[test]
    fn runs_of_ones() {
        let mut word = 1u64;
        let some = (0..2000).map(|at| {
            word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ at;
            // Few zeros and few ones make long and short runs.
            [word, word | word << 3 | word >> 9, word & word << 5, !(word & word << 1 & word << 7)]
        });
        for word in some.flatten().chain([0, 1, u64::MAX, u64::MAX >> 1, 1 << 63]) {
            let most = lengths(word).into_iter().max();
            assert_eq!(longest(word), most.map(usize::ilog2), "{word:b}");
            for count in 1..=CHUNK_MOST {
                let found = find_run(word, count);
                assert_eq!(found.is_some(), most >= Some(count), "{count} of {word:b}");
                let fits = found.is_none_or(|at| word & run(at, count) == run(at, count));
                assert!(fits, "{count} of {word:b}");
            }
        }
    }

    #[test]
    fn a_chunk_is_whole_when_its_last_slot_comes_back() {
        let mut chunks = Chunks::new(3, 8);
        chunks.begin(1, ChunkKind::Runs, 5);
        assert_eq!((chunks.free(), chunks.holes(), chunks.emptiest()), (3, 3, Some(1)));
        assert_eq!(chunks.take_run(4), None);
        assert_eq!(chunks.take_run(2), Some((1, 5)));
        assert_eq!(chunks.take_single(), None);
        chunks.set_kind(1, ChunkKind::Singles);
        assert_eq!((chunks.holes(), chunks.take_single()), (0, Some((1, 7))));
        let back: Vec<_> = (0..8).map(|at| chunks.give_back(1, at)).collect();
        assert_eq!(back, [false, false, false, false, false, false, false, true]);
        assert_eq!((chunks.free(), chunks.kind(1)), (0, ChunkKind::Whole));
    }
}
