//! Writes: how new bytes reach the store and take the place of old ones in the index.
//!
//! A write lands in slots of its own. Write-through, FUA, and write-back beyond the limit of dirty
//! blocks: the slots go to the store, then into the index, then the write is acknowledged.
//! Write-back: the slots go into the index as dirty and the write is acknowledged; `write_backs.rs`
//! writes them to the store later. A write of a part of a block takes the rest from the cached
//! block; with write-back it reads the rest first if the block is not cached.
//!
//! A write of one block is a [`BlockWrite`] and no job, if its data has landed and its range is
//! free.

use nix::errno::Errno;
use rblk_protocol::width::{narrow, wide64};

use super::SLOT_BYTES;
use super::block_write::BlockWrite;
use super::core::ShardCore;
use super::job::JobKind;
use super::policy::Slot;
use super::shard_messages::PartToken;
use super::slots::{Install, Slots};
use super::span::{BLOCK, CachedSpan};
use super::write_backs::WriteBacks;
use crate::cache::memory_queue::MemoryQueue;
use crate::store::{Op, OpDone, OpKind, Segment, Store};
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;
use crate::volume::timing::Spent;

/// A write of one block whose data has landed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OneBlock {
    /// The volume of the block.
    pub volume: VolumeIndex,
    /// First byte.
    pub offset: u64,
    /// Bytes: a whole block if the volume is cached.
    pub len: u32,
    /// Answer only when the data is durable.
    pub fua: bool,
}

/// The state of a write of one block after its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OneWrite {
    /// The block is dirty in the index, and the write succeeded.
    Done,
    /// The write is on its way to the store, and its answer comes later.
    AtStore,
    /// Nothing changed. The write must be reserved: it is not of one block, or has to wait.
    Declined,
}

/// The landed data of a write.
pub(crate) trait Landed {
    /// Returns the slot with the data: the private `slot` after a copy into it, or the slot in
    /// which the data landed, in exchange for `slot` ([`Slots::exchange`]). Called once.
    fn land(&mut self, slots: &mut Slots, slot: Slot) -> Slot;

    /// The command part to answer. Only asked for a write that goes to the store.
    fn from(&self) -> PartToken;
}

/// Starts the write of a reservation whose data has landed. True: the write succeeded.
pub(super) fn start<S: Store>(
    core: &mut ShardCore<S>,
    write_backs: &mut WriteBacks,
    job: u32,
    fua: bool,
) -> bool {
    let entry = core.jobs.get(job);
    if !matches!(entry.kind, JobKind::Reserve) {
        debug_assert!(false, "a write of {:?}", entry.kind);
        tracing::error!(job = entry.kind.word(), "bug: a write without a reservation");
        return false;
    }
    entry.kind = JobKind::Write { fua };
    let (span, count) = (entry.span, entry.blocks.len());
    if span.cache == CacheMode::None {
        let kind = OpKind::Write { offset: span.offset, len: span.data_len(), fua };
        core.transfer(job, kind, 0..count, 0);
    } else if span.cache == CacheMode::WriteBack
        && !fua
        && span.edges().as_slice().is_empty()
        && write_backs.has_room(&core.slots, span.volume, count)
    {
        install_dirty(core, write_backs, job);
        core.end(job);
        return true;
    } else if core.lock(job) {
        locked(core, write_backs, job);
    }
    false
}

/// Starts a write of one block.
#[inline(always)]
pub(super) fn start_one<S: Store>(
    core: &mut ShardCore<S>,
    memory: &MemoryQueue,
    write_backs: &mut WriteBacks,
    write: OneBlock,
    mut data: impl Landed,
) -> OneWrite {
    let OneBlock { volume, offset, len, fua } = write;
    let Some(state) = core.volumes.get_mut(volume) else { return OneWrite::Declined };
    let cache = state.cache();
    let is_one = match cache {
        CacheMode::None => u64::from(len) <= BLOCK,
        _ => u64::from(len) == BLOCK && offset.is_multiple_of(BLOCK),
    };
    // A job that waits for memory goes first.
    if !is_one || !memory.has_one(&state.share) {
        return OneWrite::Declined;
    }
    let is_dirty = cache == CacheMode::WriteBack && !fua;
    let lock = match cache {
        _ if is_dirty => {
            if !write_backs.has_room(&core.slots, volume, 1) {
                return OneWrite::Declined;
            }
            None
        }
        CacheMode::None => None,
        _ => match core.locks.try_acquire(volume, offset..offset + BLOCK) {
            None => return OneWrite::Declined,
            lock => lock,
        },
    };
    let Some(slot) = core.slots.allocate_one() else {
        if let Some(lock) = lock {
            core.locks.release(lock);
        }
        return OneWrite::Declined;
    };
    let slot = data.land(&mut core.slots, slot);
    let block = offset / BLOCK;
    if is_dirty {
        let how = write_backs.next_dirty(&core.clock);
        core.slots.install(slot, volume, block, how);
        return OneWrite::Done;
    }
    let run = Segment { offset: core.slots.offset(slot), len };
    state.share.take_one();
    let from = data.from();
    let token = core.block_writes.begin(BlockWrite { from, block, slot, len, lock, volume });
    let op = Op { token, volume, kind: OpKind::Write { offset, len, fua } };
    core.store.submit(&mut state.ops, &mut core.lists, op, &[run]);
    OneWrite::AtStore
}

/// The store ended a write of one block. False: no such write is running.
#[inline(always)]
pub(super) fn finish_one<S: Store>(
    core: &mut ShardCore<S>,
    write_backs: &mut WriteBacks,
    done: OpDone,
) -> bool {
    let Some(write) = core.block_writes.end(done.token) else { return false };
    if done.result != Ok(write.len) {
        let write = *write;
        fail_one(core, write, done.result);
        return true;
    }
    let BlockWrite { block, slot, lock, volume, .. } = *write;
    core.answers.written(write.from);
    if let Some(state) = core.volumes.get_mut(volume) {
        state.ops.ended();
        state.share.give_back(1);
    }
    let Some(lock) = lock else {
        core.slots.give_back(slot);
        return true;
    };
    write_backs.recall(core, volume, block, block);
    core.slots.install_clean(slot, volume, block);
    core.locks.release(lock);
    true
}

// The store failed a write of one block.
#[cold]
fn fail_one<S: Store>(core: &mut ShardCore<S>, write: BlockWrite, result: Result<u32, Errno>) {
    let BlockWrite { from, block, slot, lock, volume, .. } = write;
    // The store promises all bytes or an error; a short result would pass for data.
    let errno = result.err().unwrap_or(Errno::EIO);
    core.op_ended(volume, JobKind::Write { fua: false }, Some(errno));
    if let Some(state) = core.volumes.get_mut(volume) {
        state.share.give_back(1);
    }
    core.slots.give_back(slot);
    if let Some(lock) = lock {
        let span = core.volumes.span(volume, block * BLOCK, BLOCK);
        forget_clean(core, &span);
        core.locks.release(lock);
    }
    core.answers.done(from, Err(errno), Spent::at_store());
}

/// The job has its lock: the blocks go to the store, or into the index after their edges are read.
pub(super) fn locked<S: Store>(core: &mut ShardCore<S>, write_backs: &mut WriteBacks, job: u32) {
    let entry = core.jobs.peek(job);
    let JobKind::Write { fua } = entry.kind else {
        return debug_assert!(false, "a write has become {:?}", entry.kind);
    };
    let (span, count) = (entry.span, entry.blocks.len());
    if span.cache == CacheMode::WriteBack && !fua {
        if write_backs.has_room(&core.slots, span.volume, count) {
            return read_edges(core, write_backs, job);
        }
        core.counters.dirty_limited += 1;
    }
    let kind = OpKind::Write { offset: span.offset, len: span.data_len(), fua };
    core.transfer(job, kind, 0..count, span.skip());
}

// Reads the edges of a write-back write that are not cached.
fn read_edges<S: Store>(core: &mut ShardCore<S>, write_backs: &mut WriteBacks, job: u32) {
    let entry = core.jobs.get(job);
    entry.kind = JobKind::Merge;
    entry.op_begins();
    write_backs.merge_begins(entry.blocks.len());
    let span = entry.span;
    for (at, block) in span.edges().as_slice().iter().copied().enumerate() {
        // Each edge has a slot, allocated with the blocks.
        let slot = core.jobs.peek(job).edges[at];
        if let Some(cached) = core.slots.find(span.volume, block) {
            // The cached block may leave before the other edge is read.
            core.copy(cached, slot, 0, SLOT_BYTES);
            continue;
        }
        let len = narrow(span.covered(block).block_bytes);
        let offset = core.slots.offset(slot);
        core.counters.fill_bytes += u64::from(len);
        let kind = OpKind::Read { offset: block * BLOCK, len };
        core.submit(job, kind, len, &[Segment { offset, len }]);
    }
    if core.jobs.get(job).op_ended(None) {
        finish_merge(core, write_backs, job);
    }
}

/// The edges of a write are read: makes its blocks dirty and acknowledges it.
pub(super) fn finish_merge<S: Store>(
    core: &mut ShardCore<S>,
    write_backs: &mut WriteBacks,
    job: u32,
) {
    let entry = core.jobs.peek(job);
    write_backs.merge_ended(entry.blocks.len());
    if entry.error().is_none() {
        install_dirty(core, write_backs, job);
    }
    core.finish(job);
}

// Puts a write's blocks in the index as dirty.
fn install_dirty<S: Store>(core: &mut ShardCore<S>, write_backs: &mut WriteBacks, job: u32) {
    let how = write_backs.next_dirty(&core.clock);
    let span = core.jobs.peek(job).span;
    let edges = span.edges();
    for (at, block) in (span.first()..=span.last()).enumerate() {
        let entry = core.jobs.get(job);
        entry.blocks[at].own = false;
        let slot = entry.blocks[at].slot;
        if let Some(edge) = edges.position(block) {
            // A cached block is newer than the data read from the store.
            let read = entry.edges.get(edge).copied();
            if let Some(rest) = core.slots.find(span.volume, block).or(read) {
                core.copy_around(&span, block, rest, slot);
            }
        }
        core.slots.install(slot, span.volume, block, how);
    }
}

/// The store ended a write, with or without an error.
pub(super) fn finish<S: Store>(core: &mut ShardCore<S>, write_backs: &mut WriteBacks, job: u32) {
    let entry = core.jobs.peek(job);
    if entry.error().is_some() {
        let span = entry.span;
        forget_clean(core, &span);
    } else if entry.has_lock() {
        install_written(core, write_backs, job);
    }
    core.finish(job);
}

// Puts the blocks of a stored write in the index.
fn install_written<S: Store>(core: &mut ShardCore<S>, write_backs: &mut WriteBacks, job: u32) {
    let span = core.jobs.peek(job).span;
    write_backs.recall(core, span.volume, span.first(), span.last());
    for at in 0..span.count() {
        let block = span.first() + wide64(at);
        let entry = &mut core.jobs.get(job).blocks[at];
        let slot = entry.slot;
        entry.own = false;
        let mut how = Install::Clean;
        if !span.is_aligned() && !span.covered(block).is_whole() {
            // The rest of the block may be cached, and may be dirty.
            let Some(rest) = core.slots.find(span.volume, block) else {
                core.slots.give_back(slot);
                continue;
            };
            core.copy_around(&span, block, rest, slot);
            how = Install::Merged;
        } else if !core.slots.has_place(span.volume, block) {
            core.slots.give_back(slot);
            continue;
        }
        core.slots.install(slot, span.volume, block, how);
    }
}

/// Drops the clean blocks of a range after its bytes in the store became unknown. Dirty blocks
/// stay: they will be written.
pub(super) fn forget_clean<S: Store>(core: &mut ShardCore<S>, span: &CachedSpan) {
    core.slots.for_each_in(span.volume, span.first(), span.last(), |slots, slot| {
        if slots.state(slot).is_clean() {
            slots.forget(slot);
        }
    });
}
