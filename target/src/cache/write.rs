//! Writes, discards and zeroing: how new bytes take the place of old ones in the index.

use std::time::Instant;

use rblk_fabric::Region;

use super::SLOT_BYTES;
use super::job::{Entry, Job, Kind, Written};
use super::message::{Changed, JobId, PartToken, Segments};
use super::policy::Slot;
use super::range_lock::Acquired;
use super::shard::{BLOCK, Shard, state_of};
use super::slots::{Install, State};
use crate::store::{Op, OpKind, Segment, Store, VolumeIndex};
use crate::volume::CacheMode;

/// The bytes of one block that a job's range covers, counted from the start of the block.
#[derive(Clone, Copy)]
struct Covered {
    from: usize,
    to: usize,
    // Bytes of the volume in the block: fewer than a slot's in the last one.
    all: usize,
}

impl Covered {
    fn is_whole(self) -> bool {
        self.from == 0 && self.to >= self.all
    }
}

// Spare slots are handed out to the blocks at the edges in their order.
#[derive(Default)]
struct Edges {
    blocks: [u64; 2],
    count: usize,
}

impl<S: Store> Shard<S> {
    #[allow(clippy::cast_possible_truncation)] // all within a block
    fn covered(&mut self, job: u32, block: u64) -> Covered {
        let Job { volume, offset, len, .. } = *self.jobs.get(job);
        let start = block * BLOCK;
        Covered {
            from: (offset.max(start) - start) as usize,
            to: ((offset + len).min(start + BLOCK) - start) as usize,
            all: (self.size(volume) - start).min(BLOCK) as usize,
        }
    }

    // The blocks at the edges of a job's range that it covers in part.
    #[inline]
    fn edges(&mut self, job: u32) -> Edges {
        if self.jobs.get(job).is_aligned() { Edges::default() } else { self.find_edges(job) }
    }

    fn find_edges(&mut self, job: u32) -> Edges {
        let (first, last) = self.jobs.get(job).block_range();
        let mut edges = Edges::default();
        for block in [first, last] {
            let seen = block == last && edges.count > 0 && first == last;
            if !seen && !self.covered(job, block).is_whole() {
                edges.blocks[edges.count] = block;
                edges.count += 1;
            }
        }
        edges
    }

    /// Spare slots that a job needs: in a write-back volume, blocks that are changed in part are
    /// kept whole.
    pub(super) fn edges_needed(&mut self, job: u32) -> usize {
        if self.jobs.get(job).cache == CacheMode::WriteBack { self.edges(job).count } else { 0 }
    }

    /// What [`ShardRequest::Write`](super::ShardRequest::Write) asks for. True: it is done already,
    /// and well. Else the answer comes later.
    pub fn write(&mut self, job: JobId, memory: Segments, fua: bool, now: Instant) -> bool {
        self.tick(now);
        self.recycle(memory);
        let Some(job) = self.jobs.find(job) else { return false };
        let entry = self.jobs.get(job);
        if entry.kind != Kind::Reserve {
            return false;
        }
        entry.kind = Kind::Write;
        entry.fua = fua;
        let (volume, offset, len) = (entry.volume, entry.offset, entry.len);
        let (cache, count) = (entry.cache, entry.blocks.len());
        match cache {
            CacheMode::None => {
                let len = u32::try_from(len).unwrap_or(0);
                self.transfer(job, OpKind::Write { offset, len, fua }, 0..count, 0);
            }
            CacheMode::WriteBack
                if !fua && self.edges(job).count == 0 && self.has_dirty_room(volume, count) =>
            {
                self.install_dirty(job);
                self.end(job);
                return true;
            }
            _ if self.take_lock(job) => self.write_locked(job),
            _ => {}
        }
        false
    }

    /// A reservation and its write in one, for the data of one block that is here already: `land`
    /// puts it where it is told. True: it is done, and well. False: the answer comes later, from
    /// [`Self::take_written`] or, as to [`ShardRequest::Write`](super::ShardRequest::Write), from
    /// [`Self::take_reply`]. `None`: nothing happened, it must be reserved and may have to wait.
    #[allow(clippy::too_many_arguments)] // those of both requests
    #[inline(always)]
    pub fn write_one(
        &mut self,
        from: PartToken,
        volume: VolumeIndex,
        offset: u64,
        len: u32,
        fua: bool,
        now: Instant,
        land: impl FnOnce(&Region, usize),
    ) -> Option<bool> {
        let most = self.ops_per_volume();
        let state = state_of(&mut self.volumes, volume)?;
        let cache = state.cache;
        let fits = match cache {
            CacheMode::None => u64::from(len) <= BLOCK,
            _ => u64::from(len) == BLOCK && offset.is_multiple_of(BLOCK),
        };
        // Nobody is overtaken.
        let may = state.waiting.is_empty() && state.has_room(1, self.share);
        if !fits || !may || !self.waiting_memory.is_empty() {
            return None;
        }
        if cache == CacheMode::WriteBack && !fua {
            return self.write_one_dirty(volume, offset / BLOCK, now, land);
        }
        let slot = self.slots.allocate_one()?;
        let memory = [Segment { offset: self.slots.offset(slot), len }];
        land(self.slots.region(), memory[0].offset);
        state.held += 1;
        let (job, entry) =
            self.jobs.start(Kind::Write, Some(from), volume, cache, offset, len.into());
        (entry.held, entry.fua, entry.at_home) = (1, fua, true);
        entry.blocks.push(Entry { slot, own: true });
        if cache != CacheMode::None {
            let lock = self.locks.acquire(volume.0, offset..offset + BLOCK, job);
            entry.lock = Some(lock.id());
            entry.holds = matches!(lock, Acquired::Now(_));
            if !entry.holds {
                // Goes on in `write_locked`.
                self.counters.range_waits += 1;
                return Some(false);
            }
        }
        entry.ops = 1;
        let kind = OpKind::Write { offset, len, fua };
        let op = Op { token: entry.token(job, len), volume, kind };
        if state.waiting_ops.is_empty()
            && state.ops < most
            && self.store.submit(op, &memory).is_ok()
        {
            state.ops += 1;
        } else {
            self.wait_for_store(op, &memory);
        }
        Some(false)
    }

    #[inline(always)]
    fn write_one_dirty(
        &mut self,
        volume: VolumeIndex,
        block: u64,
        now: Instant,
        land: impl FnOnce(&Region, usize),
    ) -> Option<bool> {
        if !self.has_dirty_room(volume, 1) {
            return None;
        }
        let slot = self.slots.allocate_one()?;
        land(self.slots.region(), self.slots.offset(slot));
        self.tick(now);
        self.order += 1;
        let how = Install::Dirty { order: self.order, now_ms: self.now_ms };
        self.slots.install(slot, volume, block, how);
        Some(true)
    }

    // A volume whose store fails gets none: its users learn of it with their writes, and it does
    // not take the room of the others.
    fn has_dirty_room(&self, volume: VolumeIndex, more: usize) -> bool {
        let held = self.slots.dirty() + self.slots.outdated() + self.merging;
        (held + more) * SLOT_BYTES <= self.options.dirty_max_bytes
            && self.stopping.is_none()
            && self.slots.failed(volume) == 0
    }

    /// The lock is ours: to the store, or, if the edges only have to be read first, to the index.
    #[inline(always)]
    pub(super) fn write_locked(&mut self, job: u32) {
        let entry = self.jobs.get(job);
        let (volume, offset, len, fua) = (entry.volume, entry.offset, entry.len, entry.fua);
        let (cache, count) = (entry.cache, entry.blocks.len());
        if cache == CacheMode::WriteBack && !fua {
            if self.has_dirty_room(volume, count) {
                return self.read_edges(job);
            }
            self.counters.dirty_limited += 1;
        }
        let len = u32::try_from(len).unwrap_or(0);
        let skip = (offset % BLOCK) as usize;
        self.transfer(job, OpKind::Write { offset, len, fua }, 0..count, skip);
    }

    // Reads the blocks at the edges of a write that is to be dirty, where they are not cached.
    fn read_edges(&mut self, job: u32) {
        let edges = self.edges(job);
        let entry = self.jobs.get(job);
        entry.kind = Kind::Merge;
        entry.ops += 1;
        let volume = entry.volume;
        self.merging += entry.blocks.len();
        for (at, block) in edges.blocks[..edges.count].iter().enumerate() {
            let Some(slot) = self.jobs.get(job).edges.get(at).copied() else { continue };
            if let Some(cached) = self.slots.find(volume, *block) {
                // It may leave before the other edge is read.
                self.copy(cached, slot, 0, SLOT_BYTES);
                continue;
            }
            let len = u32::try_from(self.covered(job, *block).all).unwrap_or(0);
            let offset = self.slots.offset(slot);
            self.counters.fill_bytes += u64::from(len);
            let kind = OpKind::Read { offset: block * BLOCK, len };
            self.submit_with(job, kind, len, &[Segment { offset, len }]);
        }
        let entry = self.jobs.get(job);
        entry.ops -= 1;
        if entry.ops == 0 {
            self.advance(job);
        }
    }

    /// Puts a write's blocks in the index as dirty.
    pub(super) fn install_dirty(&mut self, job: u32) {
        self.order += 1;
        let how = Install::Dirty { order: self.order, now_ms: self.now_ms };
        let edges = self.edges(job);
        let (first, last) = self.jobs.get(job).block_range();
        for (at, block) in (0..).zip(first..last + 1) {
            let entry = self.jobs.get(job);
            let (volume, slot) = (entry.volume, entry.blocks[at].slot);
            let edge = edges.blocks[..edges.count].iter().position(|edge| *edge == block);
            if let Some(edge) = edge {
                // The cached block is newer than what was read, if there is one.
                let read = self.jobs.get(job).edges.get(edge).copied();
                if let Some(rest) = self.slots.find(volume, block).or(read) {
                    self.copy_around(job, block, rest, slot);
                }
            }
            self.slots.install(slot, volume, block, how);
            self.jobs.get(job).blocks[at].own = false;
        }
    }

    /// Ends a job whose last operation the store did well, if it is a write of one block, as most
    /// are. False: it is another, or not its last.
    #[inline(always)]
    pub(super) fn finish_one(&mut self, job: u32) -> bool {
        let Some(written) = self.jobs.take_written(job) else { return false };
        let Written { slot, from, volume, block, held, lock, at_home } = written;
        if let Some(state) = state_of(&mut self.volumes, volume) {
            state.ops = state.ops.saturating_sub(1);
            state.held = state.held.saturating_sub(held);
        }
        if lock.is_some() {
            self.recall(volume, block, block);
            self.slots.install_clean(slot, volume, block);
        } else {
            self.slots.give_back(slot);
        }
        match from {
            Some(to) if at_home => self.written.push(to),
            _ => self.done(from, Ok(())),
        }
        if let Some(lock) = lock {
            self.unlock(lock);
        }
        true
    }

    /// The store has done a write, or not.
    pub(super) fn finish_write(&mut self, job: u32) {
        let entry = self.jobs.get(job);
        let (from, error) = (entry.from, entry.error);
        if error.is_some() {
            self.forget_clean(job);
        } else if entry.holds {
            self.install_written(job);
        }
        self.done(from, error.map_or(Ok(()), Err));
        self.end(job);
    }

    // Puts a write's blocks, which the store has, in the index.
    #[inline]
    fn install_written(&mut self, job: u32) {
        let entry = self.jobs.get(job);
        let (first, last) = entry.block_range();
        let (volume, aligned) = (entry.volume, entry.is_aligned());
        self.recall(volume, first, last);
        for (at, block) in (0..).zip(first..last + 1) {
            let entry = &mut self.jobs.get(job).blocks[at];
            let slot = entry.slot;
            entry.own = false;
            let mut how = Install::Clean;
            if !aligned && !self.covered(job, block).is_whole() {
                // The rest of the block may be known here, and may be dirty.
                let Some(rest) = self.slots.find(volume, block) else {
                    self.slots.give_back(slot);
                    continue;
                };
                self.copy_around(job, block, rest, slot);
                how = Install::Merged;
            }
            self.slots.install(slot, volume, block, how);
        }
    }

    // Copies what a job does not cover of a block.
    fn copy_around(&mut self, job: u32, block: u64, from: Slot, to: Slot) {
        let covered = self.covered(job, block);
        self.copy(from, to, 0, covered.from);
        self.copy(from, to, covered.to, SLOT_BYTES);
    }

    // The only place of a shard that copies.
    fn copy(&mut self, from: Slot, to: Slot, start: usize, end: usize) {
        if start >= end {
            return;
        }
        let (source, target) = (self.slots.offset(from) + start, self.slots.offset(to) + start);
        let region = self.slots.region();
        region.copy_to(source, region, target, end - start);
        self.counters.copied_bytes += (end - start) as u64;
    }

    /// A write failed: what the store has there is unknown, so nothing may pass for it. Dirty
    /// blocks stay, they will be written.
    pub(super) fn forget_clean(&mut self, job: u32) {
        let (first, last) = self.jobs.get(job).block_range();
        let volume = self.jobs.get(job).volume;
        self.slots.for_each_in(volume, first, last, |slots, slot| {
            if slots.state(slot) == State::Clean {
                slots.forget(slot);
            }
        });
    }

    /// The store's bytes of a job's range were changed, or may have been.
    pub(super) fn changed(&mut self, job: u32, outcome: Changed) {
        let (first, last) = self.jobs.get(job).block_range();
        let volume = self.jobs.get(job).volume;
        match outcome {
            Changed::No => return,
            Changed::Unknown => return self.forget_clean(job),
            Changed::Yes => {}
        }
        self.recall(volume, first, last);
        let edges = self.edges(job);
        let mut kept = [None; 2];
        for (at, block) in edges.blocks[..edges.count].iter().enumerate() {
            let dirty = |shard: &Self, slot: &Slot| shard.slots.state(*slot) == State::Dirty;
            let old = self.slots.find(volume, *block).filter(|slot| dirty(self, slot));
            if let Some(old) = old
                && let Some(slot) = self.jobs.get(job).edges.pop()
            {
                // What is around the range is nowhere else: a new block with the range zeroed.
                let covered = self.covered(job, *block);
                self.copy(old, slot, 0, SLOT_BYTES);
                let from = self.slots.offset(slot) + covered.from;
                self.slots.region().zero(from, covered.to - covered.from);
                self.slots.install(slot, volume, *block, Install::Merged);
                kept[at] = Some(slot);
            }
        }
        self.slots.for_each_in(volume, first, last, |slots, slot| {
            if !kept.contains(&Some(slot)) {
                slots.forget(slot);
            }
        });
    }
}
