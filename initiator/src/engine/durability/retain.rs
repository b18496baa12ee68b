//! [`RetainRing`]: copies of one queue's acknowledged writes that no FLUSH covered yet.
//! [`ReplayLog`]: the copies of all queues, merged. Pure: no I/O, no clock.
//!
//! ```text
//! reserve (sent) -> Pending -> commit (acknowledged: numbered, data copied) -> release (durable)
//!                      '-----> cancel (failed: nothing was promised)
//! ```
//!
//! Memory is allocated once. An entry has its place from the moment its command is sent, so an
//! acknowledged write always has one. Entries leave in the order of their reservation: an
//! unanswered entry keeps the entries after it.
//!
//! A write that was durable when it was acknowledged has an entry without data: older data of its
//! range must not overwrite it.

use std::collections::BTreeMap;

use rblk_protocol::width::{wide, wide64};
use rblk_protocol::{BlockCount, BlockSize, Lba, Mutation, QueueDepth};

use crate::engine::io::{Io, IoOp};

/// Bytes of data for each entry.
const DATA_BYTES_PER_ENTRY: usize = 2048;
const _: () =
    assert!(size_of::<RetainedEntry>() <= 48, "what docs/internals/memory.md says it costs");

/// The state of a range after a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeContent {
    /// The data of a write.
    Data,
    /// The data of a write that was durable when it was acknowledged.
    Durable,
    /// Discarded.
    Discarded,
    /// Zeroed.
    Zeroed {
        /// The range may be given back.
        may_unmap: bool,
    },
}

/// The name of an entry in a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EntryId(u64);

/// The ring has no room for an entry at the moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NoRoom;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum EntryState {
    Pending,
    // The number of the acknowledgement.
    Acknowledged(u64),
    Cancelled,
}

#[derive(Clone, Copy, Debug)]
struct RetainedEntry {
    what: RangeContent,
    lba: Lba,
    count: BlockCount,
    // Position of the data; positions only grow, and wrap around the ring.
    at: u64,
    len: u32,
    state: EntryState,
}

/// The retained writes of one queue.
pub struct RetainRing {
    data: Box<[u8]>,
    entries: Box<[RetainedEntry]>,
    // Entries `first..next` exist, at their number modulo the length.
    first: u64,
    next: u64,
    // Data `first_at..next_at` exists.
    first_at: u64,
    next_at: u64,
    // One more than the number of the newest acknowledgement in the ring.
    newest: u64,
}

impl std::fmt::Debug for RetainRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RetainRing")
            .field("entries", &(self.next - self.first))
            .field("data_bytes", &(self.next_at - self.first_at))
            .finish_non_exhaustive()
    }
}

impl RetainRing {
    /// A ring for `data_bytes` of data of a queue of that depth. It has enough entries for writes
    /// of about a page or more. With smaller writes it is full sooner.
    #[must_use]
    pub fn for_queue(data_bytes: usize, depth: QueueDepth) -> Self {
        Self::new(data_bytes, data_bytes / DATA_BYTES_PER_ENTRY + 2 * usize::from(depth.get()))
    }

    /// A ring for `data_bytes` of data and `entries` writes, both at least 1. All memory is touched
    /// now, not later when the host may be short of it.
    #[must_use]
    pub fn new(data_bytes: usize, entries: usize) -> Self {
        let none = RetainedEntry {
            what: RangeContent::Durable,
            lba: Lba(0),
            count: BlockCount(0),
            at: 0,
            len: 0,
            state: EntryState::Cancelled,
        };
        Self {
            // Not zeros, which would be mapped only later.
            data: vec![0xa5; data_bytes.max(1)].into_boxed_slice(),
            entries: vec![none; entries.max(1)].into_boxed_slice(),
            first: 0,
            next: 0,
            first_at: 0,
            next_at: 0,
            newest: 0,
        }
    }

    /// Longest write that fits, in bytes.
    #[must_use]
    pub(crate) fn capacity_bytes(&self) -> usize {
        self.data.len()
    }

    /// Whether more than half of the ring is in use.
    #[must_use]
    pub(crate) fn is_crowded(&self) -> bool {
        (self.next_at - self.first_at) * 2 > wide64(self.data.len())
            || (self.next - self.first) * 2 > wide64(self.entries.len())
    }

    /// Whether the ring has an acknowledged write that is not durable. All writes numbered below
    /// `durable` are.
    #[must_use]
    pub(crate) fn has_unflushed(&self, durable: u64) -> bool {
        self.newest > durable
    }

    fn index(&self, number: u64) -> usize {
        wide(number % wide64(self.entries.len()))
    }

    fn entry_mut(&mut self, id: EntryId) -> Option<&mut RetainedEntry> {
        let index = self.index(id.0);
        (self.first..self.next).contains(&id.0).then(|| &mut self.entries[index])
    }

    /// Takes a place for a write that is about to be sent.
    ///
    /// # Errors
    /// [`NoRoom`]; never when the ring is empty and the data is within [`Self::capacity_bytes`].
    pub(crate) fn reserve(&mut self, what: RangeContent, io: &Io) -> Result<EntryId, NoRoom> {
        let len = if what == RangeContent::Data { io.data_bytes } else { 0 };
        let free = wide64(self.data.len()) - (self.next_at - self.first_at);
        if self.next - self.first == wide64(self.entries.len()) || u64::from(len) > free {
            return Err(NoRoom);
        }
        let id = EntryId(self.next);
        let index = self.index(id.0);
        self.entries[index] = RetainedEntry {
            what,
            lba: io.lba,
            count: io.count,
            at: self.next_at,
            len,
            state: EntryState::Pending,
        };
        self.next += 1;
        self.next_at += u64::from(len);
        Ok(id)
    }

    /// The two pieces of the ring with the `len` bytes at position `at`.
    fn pieces(&self, at: u64, len: u32) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let start = wide(at % wide64(self.data.len()));
        let len = wide(len);
        let head = len.min(self.data.len() - start);
        (start..start + head, 0..len - head)
    }

    /// Records that the write was acknowledged with that number. `copy` fills a piece of the ring
    /// with the data at that offset of the write; it is called at most twice.
    pub(crate) fn commit(
        &mut self,
        id: EntryId,
        number: u64,
        mut copy: impl FnMut(usize, &mut [u8]),
    ) {
        let Some(entry) = self.entry_mut(id) else { return };
        entry.state = EntryState::Acknowledged(number);
        let (at, len) = (entry.at, entry.len);
        let (head, tail) = self.pieces(at, len);
        let skip = head.len();
        for (offset, piece) in [(0, head), (skip, tail)] {
            if !piece.is_empty() {
                copy(offset, &mut self.data[piece]);
            }
        }
        self.newest = self.newest.max(number + 1);
    }

    /// Removes the entry of a failed write: nothing was promised.
    pub(crate) fn cancel(&mut self, id: EntryId) {
        if let Some(entry) = self.entry_mut(id) {
            entry.state = EntryState::Cancelled;
        }
    }

    /// Frees the oldest entries that are cancelled or numbered below `durable`.
    pub(crate) fn release(&mut self, durable: u64) {
        while self.first < self.next {
            let entry = self.entries[self.index(self.first)];
            match entry.state {
                EntryState::Cancelled => {}
                EntryState::Acknowledged(number) if number < durable => {}
                _ => return,
            }
            self.first += 1;
            self.first_at = entry.at + u64::from(entry.len);
        }
    }

    /// Copies of the acknowledged writes numbered `durable` or above.
    #[must_use]
    pub(crate) fn unflushed(&self, durable: u64) -> Vec<Retained> {
        (self.first..self.next)
            .filter_map(|number| {
                let entry = &self.entries[self.index(number)];
                let EntryState::Acknowledged(number) = entry.state else { return None };
                if number < durable {
                    return None;
                }
                let (head, tail) = self.pieces(entry.at, entry.len);
                let data = [&self.data[head], &self.data[tail]].concat();
                let (what, lba, count) = (entry.what, entry.lba, entry.count);
                Some(Retained { number, what, lba, count, data })
            })
            .collect()
    }
}

/// The state of a command's range after its acknowledgement.
#[must_use]
pub(crate) fn what_of(io: &Io, durable: bool) -> RangeContent {
    match io.op {
        IoOp::Discard => RangeContent::Discarded,
        IoOp::WriteZeroes => RangeContent::Zeroed { may_unmap: io.may_unmap },
        _ if durable => RangeContent::Durable,
        _ => RangeContent::Data,
    }
}

/// An acknowledged write that no FLUSH covered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Retained {
    /// The number of its acknowledgement over all queues.
    pub number: u64,
    /// The state of the range.
    pub what: RangeContent,
    /// First block.
    pub lba: Lba,
    /// Blocks.
    pub count: BlockCount,
    /// The data, for [`RangeContent::Data`].
    pub data: Vec<u8>,
}

/// A part of a [`ReplayLog`]; no two overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The state to restore. Never [`RangeContent::Durable`].
    pub what: RangeContent,
    /// First block.
    pub lba: Lba,
    /// Blocks, at least 1.
    pub count: BlockCount,
    // The entry, and the offset of the piece in its data.
    entry: usize,
    offset: usize,
}

/// The retained writes of all queues, merged: the newest state of each block, once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplayLog {
    entries: Vec<Retained>,
    pieces: Vec<Piece>,
    block_size: BlockSize,
}

impl ReplayLog {
    /// Merges the logs of all queues, in any order.
    #[must_use]
    pub fn merge(mut entries: Vec<Retained>, block_size: BlockSize) -> Self {
        entries.sort_by_key(|entry| entry.number);
        if Mutation::ReplayOldest.is_on() {
            entries.reverse();
        }
        // From first block to end and entry.
        let mut newest: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
        for (at, entry) in entries.iter().enumerate() {
            let (start, end) = (entry.lba.0, entry.lba.0.saturating_add(entry.count.0));
            if start == end {
                continue;
            }
            // A range that begins before the new one and reaches into it, maybe beyond it.
            if let Some((&from, &(to, of))) = newest.range(..start).next_back()
                && to > start
            {
                newest.insert(from, (start, of));
                if to > end {
                    newest.insert(end, (to, of));
                }
            }
            // Ranges that begin in the new one.
            while let Some((&from, &(to, of))) = newest.range(start..end).next() {
                newest.remove(&from);
                if to > end {
                    newest.insert(end, (to, of));
                }
            }
            newest.insert(start, (end, at));
        }
        let shift = block_size.shift();
        let pieces = newest
            .into_iter()
            .filter(|(_, (_, at))| entries[*at].what != RangeContent::Durable)
            .map(|(start, (end, at))| {
                let skipped = wide(start - entries[at].lba.0);
                Piece {
                    what: entries[at].what,
                    lba: Lba(start),
                    count: BlockCount(end - start),
                    entry: at,
                    offset: if entries[at].what == RangeContent::Data {
                        skipped << shift
                    } else {
                        0
                    },
                }
            })
            .collect();
        Self { entries, pieces, block_size }
    }

    /// Cuts off the pieces behind the first `blocks` of the volume, which has shrunk. Returns the
    /// number of blocks cut off.
    pub fn cut(&mut self, blocks: BlockCount) -> u64 {
        let mut gone = 0;
        self.pieces.retain_mut(|piece| {
            let inside = blocks.0.saturating_sub(piece.lba.0).min(piece.count.0);
            gone += piece.count.0 - inside;
            piece.count = BlockCount(inside);
            inside > 0
        });
        gone
    }

    /// Acknowledged writes in the log, whether or not they left a piece.
    #[must_use]
    pub fn writes(&self) -> u64 {
        wide64(self.entries.iter().filter(|entry| entry.what != RangeContent::Durable).count())
    }

    /// The pieces, by address.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The pieces from that block on.
    pub(crate) fn pieces_from(&self, lba: Lba) -> &[Piece] {
        let before = self.pieces.partition_point(|piece| piece.lba.0 + piece.count.0 <= lba.0);
        &self.pieces[before..]
    }

    /// The size of a block.
    #[must_use]
    pub(crate) fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// The data of a piece; empty unless the piece is [`RangeContent::Data`].
    #[must_use]
    pub(crate) fn data(&self, piece: &Piece) -> &[u8] {
        if piece.what != RangeContent::Data {
            return &[];
        }
        let data = self.entries.get(piece.entry).map_or(&[][..], |entry| &entry.data);
        let len = wide(piece.count.0).saturating_mul(wide(self.block_size.bytes()));
        data.get(piece.offset..piece.offset.saturating_add(len)).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn size() -> BlockSize {
        BlockSize::new(512).unwrap()
    }

    fn write(block: u64, blocks: u64) -> Io {
        Io::new(IoOp::Write, block * 512, blocks * 512, size()).unwrap()
    }

    fn commit(ring: &mut RetainRing, id: EntryId, number: u64, byte: u8) {
        ring.commit(id, number, |_, piece| piece.fill(byte));
    }

    #[test]
    fn entries_leave_in_order_and_only_when_durable() {
        let mut ring = RetainRing::new(1024, 8);
        let a = ring.reserve(RangeContent::Data, &write(0, 1)).unwrap();
        assert!(!ring.is_crowded());
        let b = ring.reserve(RangeContent::Data, &write(1, 1)).unwrap();
        assert!(ring.is_crowded());
        assert_eq!(ring.reserve(RangeContent::Data, &write(2, 1)), Err(NoRoom));
        commit(&mut ring, b, 0, 2);
        ring.release(1);
        assert_eq!(
            ring.reserve(RangeContent::Data, &write(2, 1)),
            Err(NoRoom),
            "the older one is unanswered"
        );
        assert!(ring.has_unflushed(0) && !ring.has_unflushed(1));
        commit(&mut ring, a, 1, 1);
        ring.release(1);
        assert_eq!(ring.unflushed(1).len(), 1, "flushed is what was acknowledged before");
        assert_eq!(ring.unflushed(1)[0].data, [1; 512]);
        ring.release(2);
        let c = ring.reserve(RangeContent::Data, &write(3, 2)).unwrap();
        ring.cancel(c);
        ring.release(0);
        ring.reserve(RangeContent::Data, &write(3, 2)).unwrap();
        // A stale name has no effect.
        ring.cancel(a);
        assert_eq!(ring.reserve(RangeContent::Data, &write(3, 1)), Err(NoRoom));
    }

    #[test]
    fn entries_without_data_have_a_bound_too() {
        let mut ring = RetainRing::new(512, 2);
        let discard = Io::new(IoOp::Discard, 0, 1 << 30, size()).unwrap();
        for _ in 0..2 {
            ring.reserve(what_of(&discard, false), &discard).unwrap();
        }
        assert_eq!(ring.reserve(RangeContent::Discarded, &discard), Err(NoRoom));
        assert!(RetainRing::new(512, 2).reserve(RangeContent::Data, &write(0, 2)).is_err());
    }

    fn retained(number: u64, what: RangeContent, block: u64, blocks: u64) -> Retained {
        let data = if what == RangeContent::Data {
            (0..blocks).flat_map(|b| [(number * 16 + b).to_le_bytes(); 64].concat()).collect()
        } else {
            Vec::new()
        };
        Retained { number, what, lba: Lba(block), count: BlockCount(blocks), data }
    }

    #[test]
    fn the_newest_wins() {
        let log = ReplayLog::merge(
            vec![
                retained(3, RangeContent::Durable, 4, 1),
                retained(1, RangeContent::Data, 0, 8),
                retained(2, RangeContent::Zeroed { may_unmap: true }, 2, 1),
                retained(9, RangeContent::Data, 100, 0),
            ],
            size(),
        );
        let seen: Vec<_> =
            log.pieces().iter().map(|p| (p.what, p.lba.0, p.count.0, log.data(p).len())).collect();
        assert_eq!(
            seen,
            [
                (RangeContent::Data, 0, 2, 1024),
                (RangeContent::Zeroed { may_unmap: true }, 2, 1, 0),
                (RangeContent::Data, 3, 1, 512),
                (RangeContent::Data, 5, 3, 1536),
            ]
        );
        assert_eq!(log.data(&log.pieces()[2])[..8], (16 + 3u64).to_le_bytes());
        assert_eq!(log.writes(), 3);
    }

    fn what() -> impl Strategy<Value = RangeContent> {
        prop_oneof![
            4 => Just(RangeContent::Data),
            1 => Just(RangeContent::Durable),
            1 => Just(RangeContent::Discarded),
            1 => Just(RangeContent::Zeroed { may_unmap: false }),
        ]
    }

    proptest! {
        /// Block by block, the log has the content that replaying everything in order would have
        /// left on a volume of that many blocks.
        #[test]
        fn merging_is_replaying_in_order(
            writes in prop::collection::vec((what(), 0u64..40, 1u64..12), 0..40),
            turn in 0usize..40,
            end in 0usize..64,
        ) {
            let mut entries: Vec<_> = (0..)
                .zip(&writes)
                .map(|(number, (what, block, blocks))| retained(number, *what, *block, *blocks))
                .collect();
            let mut model = [None; 64];
            for entry in &entries {
                for block in 0..entry.count.0 {
                    let at = usize::try_from(entry.lba.0 + block).unwrap();
                    model[at] = (entry.what != RangeContent::Durable).then_some((entry.what, entry.number, block));
                }
            }
            if !entries.is_empty() {
                let turn = turn % entries.len();
                entries.rotate_left(turn);
            }
            let mut log = ReplayLog::merge(entries, size());
            let behind_end = model[end..].iter().flatten().count() as u64;
            model[end..].fill(None);
            prop_assert_eq!(log.cut(BlockCount(end as u64)), behind_end);
            prop_assert_eq!(log.cut(BlockCount(end as u64)), 0);
            let from = Lba(turn as u64);
            let reach = |piece: &&Piece| piece.lba.0 + piece.count.0 > from.0;
            prop_assert!(log.pieces_from(from).iter().eq(log.pieces().iter().filter(reach)));
            let mut seen = [None; 64];
            for piece in log.pieces() {
                prop_assert!(piece.count.0 > 0);
                for block in 0..piece.count.0 {
                    let at = usize::try_from(piece.lba.0 + block).unwrap();
                    prop_assert!(seen[at].is_none(), "two pieces have block {}", at);
                    let data = log.data(piece);
                    let from = usize::try_from(block).unwrap() * 512;
                    let tag = data.get(from..from + 8).map(|b| u64::from_le_bytes(b.try_into().unwrap()));
                    seen[at] = Some((piece.what, tag));
                }
            }
            for (at, expected) in model.iter().enumerate() {
                let expected = expected.map(|(what, number, block)| {
                    (what, (what == RangeContent::Data).then_some(number * 16 + block))
                });
                prop_assert_eq!(seen[at], expected, "block {}", at);
            }
        }

        /// Compares the ring with a list: room, order and bytes, over many turns of the ring.
        #[test]
        fn a_ring_is_a_bounded_list(
            steps in prop::collection::vec((0u8..4, 0usize..8, 1u64..6), 1..200),
            data_blocks in 1usize..12,
            entries in 1usize..8,
        ) {
            #[derive(Clone)]
            struct Model { id: EntryId, blocks: u64, number: Option<u64>, gone: bool, byte: u8 }
            let mut ring = RetainRing::new(data_blocks * 512, entries);
            let mut model: Vec<Model> = Vec::new();
            let (mut next, mut durable, mut byte) = (0u64, 0u64, 0u8);
            for (step, pick, blocks) in steps {
                match step {
                    0 => {
                        let used: u64 = model.iter().map(|m| m.blocks).sum();
                        let fits = model.len() < entries && used + blocks <= data_blocks as u64;
                        let got = ring.reserve(RangeContent::Data, &write(0, blocks));
                        prop_assert_eq!(got.is_ok(), fits);
                        if let Ok(id) = got {
                            model.push(Model { id, blocks, number: None, gone: false, byte: 0 });
                        }
                    }
                    1 | 2 => {
                        let mut open: Vec<_> =
                            model.iter_mut().filter(|m| m.number.is_none() && !m.gone).collect();
                        if open.is_empty() { continue }
                        let at = pick % open.len();
                        let entry = &mut open[at];
                        if step == 1 {
                            byte = byte.wrapping_add(1);
                            entry.number = Some(next);
                            entry.byte = byte;
                            commit(&mut ring, entry.id, next, byte);
                            next += 1;
                        } else {
                            entry.gone = true;
                            ring.cancel(entry.id);
                        }
                    }
                    _ => {
                        durable = durable.max(next.saturating_sub(pick as u64));
                        ring.release(durable);
                        while model.first().is_some_and(|m| m.gone || m.number.is_some_and(|n| n < durable)) {
                            model.remove(0);
                        }
                    }
                }
                let expected: Vec<_> = model
                    .iter()
                    .filter_map(|m| m.number.filter(|n| *n >= durable).map(|n| (n, m.byte, m.blocks * 512)))
                    .collect();
                let seen: Vec<_> = ring
                    .unflushed(durable)
                    .iter()
                    .map(|r| {
                        assert!(r.data.iter().all(|b| *b == r.data[0]));
                        (r.number, r.data[0], r.data.len() as u64)
                    })
                    .collect();
                prop_assert_eq!(seen, expected);
                prop_assert_eq!(ring.has_unflushed(durable), next > durable && ring.newest > durable);
            }
        }
    }
}
