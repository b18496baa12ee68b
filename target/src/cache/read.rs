//! Reads that missed: memory, lock, fill, answer. And prefetches, which are reads that nobody waits
//! for.

use super::job::{Entry, Job, Kind};
use super::message::{PartToken, Segments, ShardReply};
use super::shard::{BLOCK, NO_SLOT, Shard, state_of};
use super::slots::Install;
use crate::store::{OpKind, Segment, Store, VolumeIndex};
use crate::volume::CacheMode;

impl<S: Store> Shard<S> {
    /// What [`ShardRequest::Read`](super::ShardRequest::Read) would be answered, if the index has
    /// every block: lent and counted as a hit. `None` changes nothing.
    pub fn lend_hit(&mut self, volume: VolumeIndex, offset: u64, len: u32) -> Option<Segments> {
        let state = state_of(&mut self.volumes, volume)?;
        if state.cache == CacheMode::None {
            return None;
        }
        let last = (offset + u64::from(len)).checked_sub(1).filter(|_| len > 0)?;
        let (first, last) = (offset / BLOCK, last / BLOCK);
        let skip = (offset % BLOCK) as usize;
        // Most requests are of one block.
        if first == last {
            let slot = self.slots.find(volume, first)?;
            self.counters.hits += 1;
            state.hits += 1;
            self.slots.touch(slot);
            self.slots.lend(slot);
            let offset = self.slots.offset(slot) + skip;
            return Some(Segments::one(Segment { offset, len }));
        }
        let slots = &self.slots;
        self.found.clear();
        self.found.extend((first..=last).map_while(|block| slots.find(volume, block)));
        let count = last - first + 1;
        if (self.found.len() as u64) < count {
            return None;
        }
        self.count_lookups(volume, count, 0);
        let mut list = self.pool.pop().unwrap_or_default();
        for slot in &self.found {
            self.slots.touch(*slot);
            self.slots.lend(*slot);
        }
        self.slots.segments(self.found.iter().copied(), skip, len, &mut list);
        Some(self.lend_list(list))
    }

    pub(super) fn read(
        &mut self,
        from: Option<PartToken>,
        volume: VolumeIndex,
        offset: u64,
        len: u32,
    ) {
        let cached = self.mode(volume) != CacheMode::None;
        let Some(last) = (offset + u64::from(len)).checked_sub(1).filter(|_| len > 0) else {
            return;
        };
        let blocks = offset / BLOCK..last / BLOCK + 1;
        if let Some(to) = from {
            if let Some(memory) = self.lend_hit(volume, offset, len) {
                self.replies.push_back(ShardReply::Read { to, result: Ok(memory) });
                return;
            }
        } else if cached && blocks.clone().all(|block| self.slots.find(volume, block).is_some()) {
            return;
        }
        // Nobody waits for a prefetch, and it waits for nobody.
        if from.is_none() {
            let bytes = blocks.start * BLOCK..blocks.end * BLOCK;
            if !cached || self.is_short() || self.locks.overlaps(volume.0, bytes) {
                return;
            }
        }
        let job = self.start(Kind::Read, from, volume, offset, len.into());
        if cached {
            let present = blocks.clone().filter(|b| self.slots.find(volume, *b).is_some()).count();
            let missing = blocks.end - blocks.start - present as u64;
            if from.is_some() {
                self.count_lookups(volume, present as u64, missing);
            } else {
                self.counters.prefetched += missing;
            }
        }
        if from.is_some() {
            self.or_wait(job);
        } else if !self.take_share(job) || !self.with_memory(job) {
            self.end(job);
        }
    }

    pub(super) fn read_with_memory(&mut self, job: u32) -> bool {
        let Job { volume, len, from, .. } = *self.jobs.get(job);
        if self.mode(volume) == CacheMode::None {
            let blocks = usize::try_from(len.div_ceil(BLOCK)).unwrap_or(usize::MAX);
            if !self.allocate(job, blocks, 0) {
                return false;
            }
            let kind = OpKind::Read {
                offset: self.jobs.get(job).offset,
                len: u32::try_from(len).unwrap_or(0),
            };
            self.transfer(job, kind, 0..blocks, 0);
            return true;
        }
        let (first, last) = self.jobs.get(job).block_range();
        let mut missing = 0;
        let mut hull = (u64::MAX, 0);
        for block in first..=last {
            let slot = self.slots.find(volume, block);
            match slot {
                // Lent now, so that it is still there when the others have come.
                Some(slot) if from.is_some() => self.slots.lend(slot),
                Some(_) => {}
                None => {
                    missing += 1;
                    hull = (hull.0.min(block), block);
                }
            }
            let entry = Entry { slot: slot.unwrap_or(NO_SLOT), own: slot.is_none() };
            self.jobs.get(job).blocks.push(entry);
        }
        self.found.clear();
        if !self.slots.allocate(missing, &mut self.found) {
            let mut blocks = std::mem::take(&mut self.jobs.get(job).blocks);
            for block in blocks.drain(..) {
                if !block.own && from.is_some() {
                    self.slots.unlend(block.slot);
                }
            }
            // Lending and taking back freed nothing.
            self.slots.take_freed();
            self.jobs.get(job).blocks = blocks;
            return false;
        }
        if missing == 0 {
            self.finish_read(job);
            return true;
        }
        let mut fresh = self.found.iter();
        let entry = self.jobs.get(job);
        for block in entry.blocks.iter_mut().filter(|b| b.own) {
            block.slot = fresh.next().copied().unwrap_or(NO_SLOT);
        }
        if self.take_lock_of(job, hull.0, hull.1) {
            self.fill(job);
        }
        true
    }

    // Replaces a job's own slot by the one that meanwhile is in the index, if there is one.
    fn take_present(&mut self, job: u32, at: usize, block: u64) -> bool {
        let entry = self.jobs.get(job);
        let (volume, own, asked) = (entry.volume, entry.blocks[at].slot, entry.from.is_some());
        let Some(slot) = self.slots.find(volume, block) else { return false };
        entry.blocks[at] = Entry { slot, own: false };
        self.slots.give_back(own);
        if asked {
            self.slots.lend(slot);
        }
        true
    }

    // The lock is ours: read what is still missing.
    pub(super) fn fill(&mut self, job: u32) {
        let (first, _) = self.jobs.get(job).block_range();
        let (volume, count) = (self.jobs.get(job).volume, self.jobs.get(job).blocks.len());
        let size = self.size(volume);
        // Held together by one more operation than there are, so that none ends the job in between.
        self.jobs.get(job).ops += 1;
        let mut run = 0..0;
        for at in 0..=count {
            let block = first + at as u64;
            let mine = at < count
                && self.jobs.get(job).blocks[at].own
                && !self.take_present(job, at, block);
            if mine {
                run = if run.is_empty() { at..at + 1 } else { run.start..at + 1 };
            } else if !run.is_empty() {
                let offset = (first + run.start as u64) * BLOCK;
                let len = (run.len() as u64 * BLOCK).min(size - offset);
                self.counters.fill_bytes += len;
                let kind = OpKind::Read { offset, len: u32::try_from(len).unwrap_or(0) };
                self.transfer(job, kind, run, 0);
                run = 0..0;
            }
        }
        let entry = self.jobs.get(job);
        entry.ops -= 1;
        if entry.ops == 0 {
            self.finish_read(job);
        }
    }

    pub(super) fn finish_read(&mut self, job: u32) {
        let entry = self.jobs.get(job);
        let (from, error, volume) = (entry.from, entry.error, entry.volume);
        let (offset, count) = (entry.offset, entry.blocks.len());
        let cached = self.mode(volume) != CacheMode::None;
        let (first, _) = self.jobs.get(job).block_range();
        if let Some(errno) = error {
            for at in 0..count {
                let block = self.jobs.get(job).blocks[at];
                if !block.own && from.is_some() {
                    self.slots.unlend(block.slot);
                }
            }
            if let Some(to) = from {
                self.replies.push_back(ShardReply::Read { to, result: Err(errno) });
            }
            return self.end(job);
        }
        for at in 0..count {
            let Entry { slot, own } = self.jobs.get(job).blocks[at];
            if !own {
                if from.is_some() {
                    self.slots.touch(slot);
                }
                continue;
            }
            if !cached {
                self.slots.lend_private(slot);
            } else if self.take_present(job, at, first + at as u64) {
                continue;
            } else {
                self.slots.install(slot, volume, first + at as u64, Install::Clean);
                if from.is_some() {
                    self.slots.lend(slot);
                }
            }
            self.jobs.get(job).blocks[at].own = false;
        }
        if let Some(to) = from {
            let skip = if cached { (offset % BLOCK) as usize } else { 0 };
            let memory = self.segments_of(job, skip);
            self.replies.push_back(ShardReply::Read { to, result: Ok(memory) });
        }
        self.end(job);
    }
}
