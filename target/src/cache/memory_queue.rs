//! [`MemoryQueue`]: which job gets memory: a fair share for each volume, then first come, first
//! served.
//!
//! A job takes all the memory it will ever need before anything else, and waits for it without
//! holding memory or locks. When several volumes are served, the jobs of one volume that have not
//! ended hold at most half of the memory that is never dirty and that no volume keeps
//! (`minimums.rs`): a volume whose store hangs leaves as much to the others.

use std::collections::VecDeque;

use super::job::Job;
use super::slots::Slots;
use crate::cache::shard_volumes::{ShardVolumes, SlotShare};

/// The first job in line tries again at the latest after this.
const RETRY_MS: u32 = 10;

/// The jobs that wait for memory.
#[derive(Debug)]
pub(super) struct MemoryQueue {
    // Jobs that have their share and wait for free slots, oldest first.
    line: VecDeque<u32>,
    // Jobs that wait for a share of their volumes.
    without_share: usize,
    // The same, and one more while volumes give back what they have above their maximums: each turn
    // asks for this number alone.
    waiting: usize,
    // They give back.
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

    /// Counts the shares anew: `shared` slots are never dirty, and kept for no volume. A volume
    /// whose store hangs may have every dirty slot, besides its share.
    pub(super) fn set_volumes(&mut self, volumes: &ShardVolumes, shared: usize) {
        self.share = if volumes.served() < 2 { usize::MAX } else { shared / 2 };
    }

    /// Whether a job waits for free slots.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        !self.line.is_empty()
    }

    /// Jobs that wait, and what volumes have to give back.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.waiting + self.line.len()
    }

    /// Whether volumes have something to give back.
    pub(super) fn is_trim_due(&self) -> bool {
        self.trim
    }

    /// Says whether volumes have something to give back.
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

    /// Whether one slot of a volume's share can be taken and no job waits for slots.
    #[inline(always)]
    pub(super) fn has_one(&self, share: &SlotShare) -> bool {
        self.line.is_empty() && share.waiting.is_empty() && share.has(1, self.share)
    }

    /// Takes a job's part of its volume's share. False: the volume has its share.
    #[inline]
    pub(super) fn take_share(&self, volumes: &mut ShardVolumes, job: &mut Job) -> bool {
        // Volumes without a store have no share: nothing of theirs hangs.
        let Some(state) = volumes.get_mut(job.span.volume) else { return true };
        let need = job.share_needed();
        let taken = state.share.take(need, self.share);
        if taken {
            job.share = need;
        }
        taken
    }

    /// Takes a job's part of its volume's share, or puts the job in the volume's line and returns
    /// false.
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

    /// A job that waited for its share has it.
    pub(super) fn has_share(&mut self) {
        self.without_share -= 1;
        self.count_waiting();
    }

    /// Puts a job last in line for free slots.
    pub(super) fn wait(&mut self, job: u32) {
        self.line.push_back(job);
    }

    /// Whether the first in line should try: a slot was freed, the search for one goes on, or the
    /// last try was long ago. The clock covers a slot that became free without notice.
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

    /// The first in line.
    pub(super) fn first(&self) -> Option<u32> {
        self.line.front().copied()
    }

    /// The first in line has its memory.
    pub(super) fn first_served(&mut self) {
        self.line.pop_front();
    }
}
