//! Who gets memory: a fair share for each volume, then first come, first served.
//!
//! A job takes all the memory it will ever need before anything else, and waits for it without holding memory or
//! locks. When several volumes are served, the jobs of one that have not ended have half at most of what is never
//! dirty: one whose store hangs leaves as much to the rest.

use super::job::{Entry, Job, Kind};
use super::message::{Segments, ShardReply};
use super::shard::{BLOCK, Shard};
use crate::store::{Store, VolumeIndex};
use crate::volume::CacheMode;

/// Who waits for memory tries again at the latest after this.
const RETRY_MS: u32 = 10;

impl<S: Store> Shard<S> {
    /// Takes a job's part of its volume's share. False: the volume has its share.
    pub(super) fn take_share(&mut self, job: u32) -> bool {
        let entry = self.jobs.get(job);
        let (first, last) = entry.block_range();
        let (kind, volume) = (entry.kind, entry.volume);
        let edges = if self.mode(volume) == CacheMode::WriteBack { 2 } else { 0 };
        let need = match kind {
            // A data command: its length fits.
            Kind::Read | Kind::Reserve => {
                usize::try_from(last - first + 1).unwrap_or(usize::MAX) + edges
            }
            _ => edges,
        };
        let share = self.share;
        let Some(state) = self.volume(volume) else { return true };
        // One that has nothing may always begin.
        if state.held > 0 && state.held + need > share {
            return false;
        }
        state.held += need;
        self.jobs.get(job).held = need;
        true
    }

    /// Waits in line for memory, or goes on if there is some and nobody waits.
    pub(super) fn or_wait(&mut self, job: u32) {
        let volume = self.jobs.get(job).volume;
        let queues = self.volume(volume).is_some_and(|state| !state.waiting.is_empty());
        if queues || !self.take_share(job) {
            self.counters.memory_waits += 1;
            self.capped += 1;
            if let Some(state) = self.volume(volume) {
                state.waiting.push_back(job);
            }
            return;
        }
        self.stand_in_line(job);
    }

    fn stand_in_line(&mut self, job: u32) {
        if !self.waiting_memory.is_empty() || !self.with_memory(job) {
            self.counters.memory_waits += 1;
            self.waiting_memory.push_back(job);
        }
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
        let Job { kind, volume, offset, len, .. } = *self.jobs.get(job);
        match kind {
            Kind::Read => return self.read_with_memory(job),
            Kind::Reserve => {
                let cached = self.mode(volume) != CacheMode::None;
                let (first, last) = self.jobs.get(job).block_range();
                let blocks = if cached {
                    usize::try_from(last - first + 1).unwrap_or(usize::MAX)
                } else {
                    usize::try_from(len.div_ceil(BLOCK)).unwrap_or(usize::MAX)
                };
                let edges = self.edges_needed(job);
                if !self.allocate(job, blocks, edges) {
                    return false;
                }
                let skip = if cached { (offset % BLOCK) as usize } else { 0 };
                let memory = self.segments_of(job, skip);
                let reply = match self.jobs.get(job).from {
                    Some(to) => ShardReply::Reserved { to, job: self.jobs.id(job), memory },
                    None => return true,
                };
                self.replies.push_back(reply);
            }
            Kind::Change(_) | Kind::Hold => {
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

    pub(super) fn allocate(&mut self, job: u32, blocks: usize, edges: usize) -> bool {
        self.found.clear();
        if !self.slots.allocate(blocks + edges, &mut self.found) {
            return false;
        }
        let job = self.jobs.get(job);
        job.blocks.extend(self.found[..blocks].iter().map(|slot| Entry { slot: *slot, own: true }));
        job.edges.extend_from_slice(&self.found[blocks..]);
        true
    }

    pub(super) fn segments_of(&mut self, job: u32, skip: usize) -> Segments {
        let mut list = self.pool.pop().unwrap_or_default();
        let job = self.jobs.get(job);
        // A data command: its length fits.
        let len = u32::try_from(job.len).unwrap_or(u32::MAX);
        self.slots.segments(job.blocks.iter().map(|e| e.slot), skip, len, &mut list);
        Segments(list)
    }
}
