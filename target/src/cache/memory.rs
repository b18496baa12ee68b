//! Who gets memory: a fair share for each volume, then first come, first served.
//!
//! A job takes all the memory it will ever need before anything else, and waits for it without
//! holding memory or locks. When several volumes are served, the jobs of one that have not ended
//! have half at most of what is never dirty: one whose store hangs leaves as much to the rest.

use super::job::{Entry, Job, Kind};
use super::message::{Segments, ShardReply};
use super::policy::Slot;
use super::shard::{BLOCK, Shard, VolumeState, state_of};
use crate::store::{Segment, Store, VolumeIndex};
use crate::volume::CacheMode;

/// Who waits for memory tries again at the latest after this.
const RETRY_MS: u32 = 10;

impl VolumeState {
    // Takes what a job needs of the volume's share. False: there is not so much left.
    #[inline]
    fn take(&mut self, job: &mut Job, share: usize) -> bool {
        let (first, last) = job.block_range();
        let edges = if job.cache == CacheMode::WriteBack { 2 } else { 0 };
        let need = match job.kind {
            // A data command: its length fits.
            Kind::Read | Kind::Reserve => {
                usize::try_from(last - first + 1).unwrap_or(usize::MAX) + edges
            }
            _ => edges,
        };
        if !self.has_room(need, share) {
            return false;
        }
        self.held += need;
        job.held = need;
        true
    }

    // Whether so much more is within the volume's share. One that has nothing may always begin.
    #[inline]
    pub(super) fn has_room(&self, need: usize, share: usize) -> bool {
        self.held == 0 || self.held + need <= share
    }
}

impl<S: Store> Shard<S> {
    /// Takes a job's part of its volume's share. False: the volume has its share.
    pub(super) fn take_share(&mut self, job: u32) -> bool {
        let job = self.jobs.get(job);
        state_of(&mut self.volumes, job.volume).is_none_or(|state| state.take(job, self.share))
    }

    /// Takes a job's part of its volume's share, or waits in line for it and returns false.
    #[inline]
    pub(super) fn enter_share(&mut self, job: u32) -> bool {
        let entry = self.jobs.get(job);
        let Some(state) = state_of(&mut self.volumes, entry.volume) else { return true };
        if state.waiting.is_empty() && state.take(entry, self.share) {
            return true;
        }
        self.wait_for_share(job);
        false
    }

    fn wait_for_share(&mut self, job: u32) {
        let volume = self.jobs.get(job).volume;
        let Some(state) = state_of(&mut self.volumes, volume) else { return };
        state.waiting.push_back(job);
        self.counters.memory_waits += 1;
        self.capped += 1;
    }

    /// Waits in line for memory, or goes on if there is some and nobody waits.
    pub(super) fn or_wait(&mut self, job: u32) {
        if self.enter_share(job) {
            self.stand_in_line(job);
        }
    }

    fn stand_in_line(&mut self, job: u32) {
        if !self.waiting_memory.is_empty() || !self.with_memory(job) {
            self.wait_for_memory(job);
        }
    }

    pub(super) fn wait_for_memory(&mut self, job: u32) {
        self.counters.memory_waits += 1;
        self.waiting_memory.push_back(job);
    }

    /// Lets those go on who waited for memory, or for their volume's share of it.
    pub(super) fn retry_memory(&mut self) {
        for at in (0u16..).take(if self.capped > 0 { self.volumes.len() } else { 0 }) {
            let volume = VolumeIndex(at);
            while let Some(&job) = self.volume(volume).and_then(|state| state.waiting.front())
                && self.take_share(job)
            {
                self.capped -= 1;
                if let Some(state) = self.volume(volume) {
                    state.waiting.pop_front();
                }
                self.stand_in_line(job);
            }
        }
        if self.waiting_memory.is_empty() {
            return;
        }
        // The clock is a net under a slot that became free unnoticed.
        let late = self.now_ms.wrapping_sub(self.tried_ms) >= RETRY_MS;
        if !self.slots.take_freed() && !late {
            return;
        }
        self.tried_ms = self.now_ms;
        while let Some(&job) = self.waiting_memory.front() {
            if !self.with_memory(job) {
                return;
            }
            self.waiting_memory.pop_front();
        }
    }

    // Tries to get a job's memory and goes on with it; or changes nothing and returns false.
    pub(super) fn with_memory(&mut self, job: u32) -> bool {
        match self.jobs.get(job).kind {
            Kind::Read => return self.read_with_memory(job),
            Kind::Reserve => {
                let Some(memory) = self.reserved(job) else { return false };
                if let Some(to) = self.jobs.get(job).from {
                    let job = self.jobs.id(job);
                    self.replies.push_back(ShardReply::Reserved { to, job, memory });
                }
            }
            Kind::Change | Kind::Hold => {
                let edges = self.edges_needed(job);
                if !self.allocate(job, 0, edges) {
                    return false;
                }
                self.lock(job);
            }
            _ => {}
        }
        true
    }

    /// The memory of a reservation, if there is that much.
    #[inline(always)]
    pub(super) fn reserved(&mut self, job: u32) -> Option<Segments> {
        let entry = self.jobs.get(job);
        let (first, last) = entry.block_range();
        let (blocks, skip) = match entry.cache {
            CacheMode::None => (entry.len.div_ceil(BLOCK), 0),
            _ => (last - first + 1, (entry.offset % BLOCK) as usize),
        };
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
        let edges = self.edges_needed(job);
        self.allocate(job, blocks, edges).then(|| self.segments_of(job, skip))
    }

    #[inline(always)]
    pub(super) fn allocate(&mut self, job: u32, blocks: usize, edges: usize) -> bool {
        if (blocks, edges) != (1, 0) {
            return self.allocate_more(job, blocks, edges);
        }
        let Some(slot) = self.slots.allocate_one() else { return false };
        self.jobs.get(job).blocks.push(Entry { slot, own: true });
        true
    }

    fn allocate_more(&mut self, job: u32, blocks: usize, edges: usize) -> bool {
        self.found.clear();
        if !self.slots.allocate(blocks + edges, &mut self.found) {
            return false;
        }
        let entry = self.jobs.get(job);
        let own = |slot: &Slot| Entry { slot: *slot, own: true };
        entry.blocks.extend(self.found[..blocks].iter().map(own));
        entry.edges.extend_from_slice(&self.found[blocks..]);
        true
    }

    #[inline(always)]
    pub(super) fn segments_of(&mut self, job: u32, skip: usize) -> Segments {
        let entry = self.jobs.get(job);
        // A data command: its length fits.
        let len = u32::try_from(entry.len).unwrap_or(u32::MAX);
        if let [only] = entry.blocks[..] {
            return Segments::one(Segment { offset: self.slots.offset(only.slot) + skip, len });
        }
        self.list_of(job, skip, len)
    }

    fn list_of(&mut self, job: u32, skip: usize, len: u32) -> Segments {
        let mut list = self.pool.pop().unwrap_or_default();
        let slots = self.jobs.get(job).blocks.iter().map(|e| e.slot);
        self.slots.segments(slots, skip, len, &mut list);
        self.lend_list(list)
    }

    /// Runs of a list from the pool.
    pub(super) fn lend_list(&mut self, list: Vec<Segment>) -> Segments {
        let (memory, rest) = Segments::of_list(list);
        if let Some(list) = rest {
            self.recycle_list(list);
        }
        memory
    }
}
