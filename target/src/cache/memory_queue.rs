//! [`MemoryQueue`]: the order in which jobs get memory: a fair share for each volume, then first
//! come, first served.
//!
//! A job first takes all the memory it will ever need, and waits for it without holding memory or
//! locks. When several volumes are served, the running jobs of one volume hold at most half of the
//! memory that is never dirty and that no volume keeps (`minimums.rs`). So a hanging store leaves
//! the other half to the other volumes.

use std::collections::VecDeque;

use super::job::Job;
use super::slots::Slots;
use crate::cache::shard_volumes::{ShardVolumes, SlotShare};

/// The first job in the queue retries after at most this time.
const RETRY_MS: u32 = 10;

/// The jobs that wait for memory.
#[derive(Debug)]
pub(super) struct MemoryQueue {
    // Jobs that have their share and wait for free slots, oldest first.
    line: VecDeque<u32>,
    // Jobs that wait for a share of their volumes.
    without_share: usize,
    // Jobs without a share, plus one while a trim is due. Each turn reads only this number.
    waiting: usize,
    // A trim is due.
    trim: bool,
    // Slots that the jobs of one volume may hold.
    share: usize,
    tried_ms: u32,
}

impl MemoryQueue {
    pub(super) fn new() -> Self {
        Self {
            line: VecDeque::with_capacity(256),
            without_share: 0,
            waiting: 0,
            trim: false,
            share: usize::MAX,
            tried_ms: 0,
        }
    }

    /// Recomputes the shares: `shared` slots are never dirty, and no volume keeps them. A volume
    /// with a hanging store may occupy all dirty slots on top of its share.
    pub(super) fn set_volumes(&mut self, volumes: &ShardVolumes, shared: usize) {
        self.share = if volumes.served() < 2 { usize::MAX } else { shared / 2 };
    }

    /// Whether a job waits for free slots.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        !self.line.is_empty()
    }

    /// Waiting jobs, plus one while a trim is due.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.waiting + self.line.len()
    }

    /// Whether volumes have slots above their maximums.
    pub(super) fn is_trim_due(&self) -> bool {
        self.trim
    }

    /// Sets whether a trim is due.
    pub(super) fn set_trim(&mut self, due: bool) {
        self.trim = due;
        self.count_waiting();
    }

    fn count_waiting(&mut self) {
        self.waiting = self.without_share + usize::from(self.trim);
    }

    /// Jobs that wait for a share.
    pub(super) fn without_share(&self) -> usize {
        self.without_share
    }

    /// Whether a volume's share has a free slot and no job waits for slots.
    #[inline(always)]
    pub(super) fn has_one(&self, share: &SlotShare) -> bool {
        self.line.is_empty() && share.waiting.is_empty() && share.has(1, self.share)
    }

    /// Takes a job's part of its volume's share. False: the share is used up.
    #[inline]
    pub(super) fn take_share(&self, volumes: &mut ShardVolumes, job: &mut Job) -> bool {
        // A volume without a store has no share: its requests cannot hang.
        let Some(state) = volumes.get_mut(job.span.volume) else { return true };
        let need = job.share_needed();
        let taken = state.share.take(need, self.share);
        if taken {
            job.share = need;
        }
        taken
    }

    /// Takes a job's part of its volume's share. Otherwise puts the job in the volume's queue and
    /// returns false.
    #[inline]
    pub(super) fn enter_share(
        &mut self,
        volumes: &mut ShardVolumes,
        index: u32,
        job: &mut Job,
    ) -> bool {
        let Some(state) = volumes.get_mut(job.span.volume) else { return true };
        let need = job.share_needed();
        if state.share.waiting.is_empty() && state.share.take(need, self.share) {
            job.share = need;
            return true;
        }
        state.share.waiting.push_back(index);
        self.without_share += 1;
        self.count_waiting();
        false
    }

    /// A job that waited for its share got it.
    pub(super) fn has_share(&mut self) {
        self.without_share -= 1;
        self.count_waiting();
    }

    /// Puts a job at the end of the queue for free slots.
    pub(super) fn wait(&mut self, job: u32) {
        self.line.push_back(job);
    }

    /// Whether the first job in the queue should try: a slot was freed, the search for one was cut
    /// short, or the last try was long ago. The clock covers a slot that became free without
    /// notice.
    pub(super) fn should_try(&mut self, slots: &mut Slots, now_ms: u32) -> bool {
        if self.line.is_empty() {
            return false;
        }
        let late = now_ms.wrapping_sub(self.tried_ms) >= RETRY_MS;
        let freed = slots.take_freed();
        if !freed && !late && !slots.is_cut() {
            return false;
        }
        self.tried_ms = now_ms;
        true
    }

    /// The first job in the queue.
    pub(super) fn first(&self) -> Option<u32> {
        self.line.front().copied()
    }

    /// The first job in the queue has its memory.
    pub(super) fn first_served(&mut self) {
        self.line.pop_front();
    }
}
