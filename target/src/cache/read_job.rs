//! Reads: hits, fills, and prefetches, which are reads without an asker.
//!
//! A read whose blocks are all in the index is answered at once and is no job. A read that misses
//! allocates slots for the missing blocks, locks the range, fills the slots from the store and puts
//! them in the index.
//!
//! A large read may find its blocks in many places of the memory: they came one by one. Each run of
//! memory is an SGE, so the read would take several WRITEs. If all blocks are in the index, the
//! read is a job that copies them to one run ([`join`]), once: they stay there. If some are missing
//! and they are at least as many as the others, the read is *whole*: it gets a run for all its
//! blocks and reads all of them by one operation of the store. The slots of the run then take the
//! place of the old ones.

use rblk_protocol::width::{wide, wide64};

use super::core::ShardCore;
use super::job::{JobBlock, JobKind};
use super::policy::Slot;
use super::shard_messages::{PartToken, Segments, ShardReply};
use super::slots::Install;
use super::span::{BLOCK, CachedSpan, blocks_of};
use crate::store::{OpKind, Segment, Store};
use crate::volume::CacheMode;
use crate::volume::ids::{SessionIndex, VolumeIndex};
use crate::volume::timing::Spent;

/// Blocks of a large read, at least.
const LARGE: usize = 8;
/// Runs of memory in which a large read may find its blocks: one WRITE gathers these and a trailer.
const PIECES: usize = 3;
/// A longer read may find its blocks in more runs: one for so many blocks.
const PIECE_BLOCKS: usize = 16;

/// Stands for a slot until one is allocated.
const NO_SLOT: Slot = Slot(u32::MAX);

/// Memory that was lent at once. Comes back as [`Segments`].
#[derive(Debug)]
#[must_use = "what is lent goes back as `Segments`"]
pub(crate) enum Hit {
    /// All bytes are in one slot.
    One(Segment),
    /// The bytes are in several slots.
    More(Segments),
}

impl Hit {
    /// The memory, lent to the session.
    #[inline(always)]
    pub(crate) fn into_segments(self, session: SessionIndex) -> Segments {
        match self {
            Self::One(run) => Segments::one(session, run),
            Self::More(memory) => memory,
        }
    }
}

/// Lends the slots of a range to a session and counts a hit, if the index has every block and the
/// session may keep as many slots. `None` changes nothing.
#[inline(always)]
pub(super) fn lend_hit<S: Store>(
    core: &mut ShardCore<S>,
    session: SessionIndex,
    volume: VolumeIndex,
    offset: u64,
    len: u32,
) -> Option<Hit> {
    let state = core.volumes.get_mut(volume)?;
    if state.cache() == CacheMode::None || len == 0 {
        return None;
    }
    let (first, last) = (offset / BLOCK, (offset + u64::from(len) - 1) / BLOCK);
    // Most requests cover one block.
    if first == last {
        let slot = core.slots.find(volume, first)?;
        if !core.sessions.take(session, 1, core.slots.pinned()) {
            return None;
        }
        core.counters.hits += 1;
        state.report.count_lookups(1, 0);
        core.slots.touch(slot);
        core.slots.lend(slot);
        let offset = core.slots.offset(slot) + wide(offset % BLOCK);
        return Some(Hit::One(Segment { offset, len }));
    }
    lend_blocks(core, session, volume, offset, len).map(Hit::More)
}

#[inline(never)]
fn lend_blocks<S: Store>(
    core: &mut ShardCore<S>,
    session: SessionIndex,
    volume: VolumeIndex,
    offset: u64,
    len: u32,
) -> Option<Segments> {
    let blocks = offset / BLOCK..=(offset + u64::from(len) - 1) / BLOCK;
    let count = blocks.end() - blocks.start() + 1;
    let (slots, found) = (&mut core.slots, &mut core.lists.slots);
    found.clear();
    found.extend(blocks.map_while(|block| slots.find(volume, block)));
    let is_hit = wide64(found.len()) == count && !is_scattered(found.len(), pieces(found));
    if !is_hit || !core.sessions.take(session, found.len(), slots.pinned()) {
        return None;
    }
    for slot in &*found {
        slots.touch(*slot);
        slots.lend(*slot);
    }
    core.count_lookups(volume, count, 0);
    let mut list = core.lists.take();
    let found = core.lists.slots.iter().copied();
    core.slots.segments(found, wide(offset % BLOCK), len, &mut list);
    Some(core.lists.lend(session, list))
}

/// Answers a read from the index. Otherwise starts a job and returns it; the job must wait for
/// memory.
pub(super) fn start<S: Store>(
    core: &mut ShardCore<S>,
    from: PartToken,
    volume: VolumeIndex,
    offset: u64,
    len: u32,
) -> Option<u32> {
    if let Some(hit) = lend_hit(core, from.session, volume, offset, len) {
        let memory = hit.into_segments(from.session);
        let spent = Spent::default();
        core.answers.reply(ShardReply::Read { to: from, result: Ok(memory), spent });
        return None;
    }
    Some(start_missed(core, from, volume, offset, len))
}

/// Starts a job for a read that the index cannot answer. The job must wait for memory.
#[inline(always)]
pub(super) fn start_missed<S: Store>(
    core: &mut ShardCore<S>,
    from: PartToken,
    volume: VolumeIndex,
    offset: u64,
    len: u32,
) -> u32 {
    let job = core.start(JobKind::Read, Some(from), volume, offset, len.into());
    let span = core.jobs.peek(job).span;
    if span.cache != CacheMode::None {
        let missing = missing(core, &span);
        core.count_lookups(volume, wide64(span.count()) - missing, missing);
    }
    job
}

/// Starts a prefetch, if the index lacks a part of the range and no job works on it.
pub(super) fn start_prefetch<S: Store>(
    core: &mut ShardCore<S>,
    volume: VolumeIndex,
    offset: u64,
    len: u32,
) -> Option<u32> {
    let span = core.volumes.span(volume, offset, len.into());
    // The asker may not know yet that the volume shrank, is no longer cached, or was removed.
    let is_inside = offset.checked_add(len.into()).is_some_and(|end| end <= span.volume_bytes);
    if span.cache == CacheMode::None || len == 0 || !is_inside {
        return None;
    }
    // At the volume's maximum, other blocks of it would leave for these.
    if core.slots.is_too_much(volume, span.count()) {
        return None;
    }
    let missing = missing(core, &span);
    let bytes = span.first() * BLOCK..(span.last() + 1) * BLOCK;
    if missing == 0 || core.locks.overlaps(volume, bytes) {
        return None;
    }
    core.counters.prefetched += missing;
    Some(core.jobs.start(JobKind::Read, None, span))
}

// Blocks of a span that are not in the index.
fn missing<S: Store>(core: &ShardCore<S>, span: &CachedSpan) -> u64 {
    let missing = |block: &u64| core.slots.find(span.volume, *block).is_none();
    wide64((span.first()..=span.last()).filter(missing).count())
}

/// Allocates the memory of a read and continues it. False: too few slots are free, and nothing
/// changed.
pub(super) fn with_memory<S: Store>(core: &mut ShardCore<S>, job: u32) -> bool {
    let entry = core.jobs.peek(job);
    let (span, asked) = (entry.span, entry.from.is_some());
    if span.cache == CacheMode::None {
        let blocks = blocks_of(span.len);
        if !core.allocate(job, blocks, 0) {
            return false;
        }
        let kind = OpKind::Read { offset: span.offset, len: span.data_len() };
        core.transfer(job, kind, 0..blocks, 0);
        return true;
    }
    let survey = survey(core, job);
    let kept = span.count() - survey.missing;
    let is_scattered = is_scattered(span.count(), survey.pieces);
    // In more than two pieces, the missing blocks may take several operations of the store.
    let whole = span.count() >= LARGE && (1..=survey.missing).contains(&kept) && survey.pieces > 2;
    if asked && !whole {
        // Lends the slots now, so that they stay until the missing blocks are read.
        lend_found(core, job);
    }
    if survey.missing == 0 {
        if is_scattered && asked {
            join(core, job);
        }
        finish(core, job);
        return true;
    }
    let fresh = &mut core.lists.slots;
    fresh.clear();
    if !core.slots.allocate(if whole { span.count() } else { survey.missing }, fresh) {
        for block in core.jobs.get(job).blocks.drain(..) {
            if asked && !whole && !block.own {
                core.slots.unlend(block.slot);
            }
        }
        // Lending and taking back freed no slot.
        core.slots.take_freed();
        return false;
    }
    let entry = core.jobs.get(job);
    entry.whole = whole;
    let missing = entry.blocks.iter_mut().filter(|block| block.own || whole);
    missing.zip(&*fresh).for_each(|(block, slot)| *block = JobBlock::own(*slot));
    let (first, last) = if whole { (span.first(), span.last()) } else { survey.hull };
    if core.lock_blocks(job, first, last) {
        fill(core, job);
    }
    true
}

// The blocks that a read finds in the index.
struct Survey {
    missing: usize,
    // The first and the last missing block.
    hull: (u64, u64),
    // Runs of memory, if the missing blocks lie in one run of their own.
    pieces: usize,
}

// Looks up the blocks of a read. Those that are missing get `NO_SLOT`, and will be the job's own.
fn survey<S: Store>(core: &mut ShardCore<S>, job: u32) -> Survey {
    let mut found = Survey { missing: 0, hull: (u64::MAX, 0), pieces: 0 };
    let entry = core.jobs.get(job);
    let mut before = None;
    for block in entry.span.first()..=entry.span.last() {
        let slot = core.slots.find(entry.span.volume, block);
        if slot.is_none() {
            found.missing += 1;
            found.hull = (found.hull.0.min(block), block);
        }
        let slot = slot.unwrap_or(NO_SLOT);
        // Two missing blocks in a row are neighbours, too.
        let joins = before.is_some_and(|before| before == slot || is_next(before, slot));
        found.pieces += usize::from(!joins);
        before = Some(slot);
        entry.blocks.push(JobBlock { slot, own: slot == NO_SLOT });
    }
    found
}

fn is_next(before: Slot, slot: Slot) -> bool {
    slot.0.checked_sub(1) == Some(before.0)
}

// Runs of memory in which slots lie.
fn pieces(slots: &[Slot]) -> usize {
    1 + slots.windows(2).filter(|pair| !is_next(pair[0], pair[1])).count()
}

// Whether so many blocks should not lie in so many pieces.
fn is_scattered(blocks: usize, pieces: usize) -> bool {
    blocks >= LARGE && pieces > PIECES.max(blocks / PIECE_BLOCKS)
}

// Lends the blocks that a read found in the index.
fn lend_found<S: Store>(core: &mut ShardCore<S>, job: u32) {
    for block in core.jobs.peek(job).blocks.iter().filter(|block| !block.own) {
        core.slots.lend(block.slot);
    }
}

// Copies the lent blocks of a read to one run, which takes the place of their slots in the index.
// Has no effect if there is no run.
fn join<S: Store>(core: &mut ShardCore<S>, job: u32) {
    let blocks = &mut core.jobs.get(job).blocks;
    let fresh = &mut core.lists.slots;
    fresh.clear();
    if !core.slots.allocate(blocks.len(), fresh) {
        return;
    }
    let is_better = !is_scattered(fresh.len(), pieces(fresh));
    for (block, slot) in blocks.iter_mut().zip(&*fresh) {
        // A write-back names its slots.
        if !is_better || !core.slots.can_move(block.slot) {
            core.slots.give_back(*slot);
            continue;
        }
        core.slots.copy_block(block.slot, *slot);
        core.slots.move_block(block.slot, *slot);
        core.slots.unlend(block.slot);
        core.slots.lend(*slot);
        block.slot = *slot;
    }
}

// Replaces a job's own slot by the slot of this block that has entered the index since, if any.
fn take_present<S: Store>(core: &mut ShardCore<S>, job: u32, at: usize) -> bool {
    let entry = core.jobs.get(job);
    let (own, asked) = (entry.blocks[at].slot, entry.from.is_some());
    let block = entry.span.first() + wide64(at);
    let Some(slot) = core.slots.find(entry.span.volume, block) else { return false };
    entry.blocks[at] = JobBlock { slot, own: false };
    core.slots.give_back(own);
    if asked {
        core.slots.lend(slot);
    }
    true
}

/// The job has its lock: reads the blocks that are still missing.
pub(super) fn fill<S: Store>(core: &mut ShardCore<S>, job: u32) {
    let entry = core.jobs.get(job);
    let (span, count) = (entry.span, entry.blocks.len());
    entry.op_begins();
    // Others may have read the blocks while the job waited.
    let whole = core.jobs.peek(job).whole && 2 * missing(core, &span) >= wide64(count);
    core.jobs.get(job).whole = whole;
    let mut run = 0..0;
    for at in 0..=count {
        let is_mine = at < count
            && core.jobs.peek(job).blocks[at].own
            && (whole || !take_present(core, job, at));
        if is_mine {
            run = if run.is_empty() { at..at + 1 } else { run.start..at + 1 };
        } else if !run.is_empty() {
            let (offset, len) = span.bytes_of(&run);
            core.counters.fill_bytes += u64::from(len);
            core.transfer(job, OpKind::Read { offset, len }, run, 0);
            run = 0..0;
        }
    }
    if core.jobs.get(job).op_ended(None) {
        finish(core, job);
    }
}

/// Answers a read after its store operations, if there were any.
pub(super) fn finish<S: Store>(core: &mut ShardCore<S>, job: u32) {
    let entry = core.jobs.peek(job);
    let (from, span, spent) = (entry.from, entry.span, entry.spent());
    let result = match entry.error() {
        Some(errno) => {
            let lent = entry.blocks.iter().filter(|block| from.is_some() && !block.own);
            lent.for_each(|block| core.slots.unlend(block.slot));
            Err(errno)
        }
        None => {
            install(core, job);
            let skip = if span.cache == CacheMode::None { 0 } else { span.skip() };
            // A prefetch lends nothing.
            let lent = from.map(|from| {
                core.sessions.lent(std::mem::take(&mut core.jobs.get(job).promised));
                core.memory_of(job, from.session, skip)
            });
            Ok(lent.unwrap_or_default())
        }
    };
    if let Some(to) = from {
        core.answers.reply(ShardReply::Read { to, result, spent });
    }
    core.end(job);
}

// Puts the blocks of a read in the index, and lends them unless the read is a prefetch.
fn install<S: Store>(core: &mut ShardCore<S>, job: u32) {
    let entry = core.jobs.peek(job);
    let (span, asked, count) = (entry.span, entry.from.is_some(), entry.blocks.len());
    for at in 0..count {
        let JobBlock { slot, own } = core.jobs.peek(job).blocks[at];
        if !own {
            if asked {
                core.slots.touch(slot);
            }
            continue;
        }
        if span.cache == CacheMode::None {
            core.slots.lend_private(slot);
        } else if core.jobs.peek(job).whole
            && let Some(old) = core.slots.find(span.volume, span.first() + wide64(at))
        {
            replace(core, (old, slot), asked);
        } else if take_present(core, job, at) {
            continue;
        } else if let block = span.first() + wide64(at)
            && !core.slots.has_place(span.volume, block)
        {
            // The volume is at its maximum, and none of its slots can leave.
            if !asked {
                continue;
            }
            core.slots.lend_private(slot);
        } else {
            let block = span.first() + wide64(at);
            core.slots.install(slot, span.volume, block, Install::Clean);
            if asked {
                core.slots.lend(slot);
            }
        }
        core.jobs.get(job).blocks[at].own = false;
    }
}

// Puts a slot that a whole read has filled in the place of the block's slot in the index. The old
// bytes are as new as those of the store, or newer.
fn replace<S: Store>(core: &mut ShardCore<S>, (old, slot): (Slot, Slot), asked: bool) {
    if !core.slots.state(old).is_clean() {
        core.slots.copy_block(old, slot);
    }
    if core.slots.can_move(old) {
        core.slots.move_block(old, slot);
        if asked {
            core.slots.touch(slot);
            core.slots.lend(slot);
        }
    } else if asked {
        // A write-back names its slots: the old slot stays.
        core.slots.touch(old);
        core.slots.lend_private(slot);
    } else {
        core.slots.give_back(slot);
    }
}
