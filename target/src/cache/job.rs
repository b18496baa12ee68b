//! [`Jobs`]: the requests that a shard works on, in a table that reuses its entries.
//!
//! A job owns the memory it allocated, its lock on a range, and its operations at the store. A job
//! ends when its request is answered, and has given all of this back by then ([`Jobs::end`] asserts
//! it). Entries have a generation, so that a late completion or a stale name does not find a newer
//! job.

use nix::errno::Errno;
use rblk_protocol::width::{narrow, wide};
use rblk_runtime::Micros;

use super::policy::Slot;
use super::range_lock::LockId;
use super::shard_messages::{JobId, PartToken};
use super::span::{CachedSpan, blocks_of};
use crate::store::{OpKind, OpToken};
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;
use crate::volume::timing::Spent;

/// The purpose of a job, and its progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum JobKind {
    /// Not in use.
    Free,
    /// A read that missed. Without an asker it is a prefetch.
    Read,
    /// Memory for a write. It waits for memory, then for the data.
    Reserve,
    /// A write that waits for its lock, or for the store.
    Write {
        /// Answer only when the data is durable.
        fua: bool,
    },
    /// A write that reads its edges from the store, so that it can be dirty as whole blocks.
    Merge,
    /// Dirty blocks on their way to the store.
    WriteBack {
        /// Order of the oldest write in its blocks.
        oldest: u64,
    },
    /// Waits until older dirty blocks are in the store.
    Flush {
        /// Order of the newest write that it covers.
        order: u64,
    },
    /// Makes the store durable.
    Sync,
    /// A discard or zeroing: the store's operation.
    Change(OpKind),
    /// A range locked for a change by another shard.
    LockRange,
}

impl JobKind {
    /// The kind's name in the log.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Free => "Free",
            Self::Read => "Read",
            Self::Reserve => "Reserve",
            Self::Write { .. } => "Write",
            Self::Merge => "Merge",
            Self::WriteBack { .. } => "WriteBack",
            Self::Flush { .. } => "Flush",
            Self::Sync => "Sync",
            Self::Change(_) => "Change",
            Self::LockRange => "LockRange",
        }
    }
}

/// A block of a job's span, and its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct JobBlock {
    pub slot: Slot,
    /// True for a private slot of the job; in a write-back, for a slot that remains to be written.
    pub own: bool,
}

impl JobBlock {
    /// A private slot of the job.
    pub(super) fn own(slot: Slot) -> Self {
        Self { slot, own: true }
    }
}

/// A job's lock on its range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum JobLock {
    /// The job asked for no lock.
    None,
    /// The job waits for earlier locks.
    Waits(LockId),
    /// The lock is held.
    Held(LockId),
}

/// A request that a shard works on.
#[derive(Debug)]
pub(super) struct Job {
    pub kind: JobKind,
    /// The command part to answer. `None` for a job that the shard started itself.
    pub from: Option<PartToken>,
    pub span: CachedSpan,
    /// Indexed by block of the span.
    pub blocks: Vec<JobBlock>,
    /// Spare slots for the edges of the span.
    pub edges: Vec<Slot>,
    pub lock: JobLock,
    /// Slots taken from the volume's share.
    pub share: usize,
    /// Slots that the session was promised for this job.
    pub promised: usize,
    /// A read that has slots of its own for all its blocks, also for those in the index.
    pub whole: bool,
    waits: WaitClock,
    ops: JobOps,
    generation: u32,
}

// The store operations of a job.
#[derive(Clone, Copy, Debug, Default)]
struct JobOps {
    under_way: u32,
    // An operation was submitted.
    at_store: bool,
    // The first error.
    error: Option<Errno>,
}

// The job's waits, except for the store.
#[derive(Clone, Copy, Debug, Default)]
struct WaitClock {
    since: Option<Micros>,
    waited_us: u32,
}

impl Job {
    fn new() -> Self {
        Self {
            kind: JobKind::Free,
            from: None,
            span: CachedSpan::none(VolumeIndex(0)),
            blocks: Vec::new(),
            edges: Vec::new(),
            lock: JobLock::None,
            share: 0,
            promised: 0,
            whole: false,
            waits: WaitClock::default(),
            ops: JobOps::default(),
            generation: 0,
        }
    }

    /// Whether the job holds its lock.
    #[inline]
    pub(super) fn has_lock(&self) -> bool {
        matches!(self.lock, JobLock::Held(_))
    }

    /// The earlier locks were released: the job holds its lock.
    pub(super) fn lock_granted(&mut self) {
        debug_assert!(matches!(self.lock, JobLock::Waits(_)), "{:?}", self.lock);
        if let JobLock::Waits(lock) = self.lock {
            self.lock = JobLock::Held(lock);
        }
    }

    /// Takes the job's lock, to release it.
    pub(super) fn take_lock(&mut self) -> Option<LockId> {
        match std::mem::replace(&mut self.lock, JobLock::None) {
            JobLock::None => None,
            JobLock::Waits(lock) | JobLock::Held(lock) => Some(lock),
        }
    }

    /// Starts to count a wait for memory or for the range. Has no effect during a wait.
    #[cold]
    pub(super) fn waits(&mut self, now: Micros) {
        self.waits.since.get_or_insert(now);
    }

    /// Ends the wait, if the job waits.
    #[inline]
    pub(super) fn waited(&mut self, now: Micros) {
        if let Some(since) = self.waits.since.take() {
            let all = u64::from(self.waits.waited_us) + now.since(since);
            self.waits.waited_us = u32::try_from(all).unwrap_or(u32::MAX);
        }
    }

    /// Notes that an operation of the job goes to the store.
    #[inline]
    pub(super) fn goes_to_store(&mut self, now: Micros) {
        self.ops.at_store = true;
        self.waited(now);
    }

    /// The times that the answer reports.
    #[inline]
    pub(super) fn spent(&self) -> Spent {
        Spent { at_store: self.ops.at_store, waited_us: self.waits.waited_us }
    }

    /// Counts an operation on its way to the store. A loop that submits operations also calls this
    /// first, so that the job cannot end inside the loop.
    #[inline]
    pub(super) fn op_begins(&mut self) {
        self.ops.under_way += 1;
    }

    /// An operation ended, or the loop of [`Self::op_begins`]. Returns whether none is left.
    #[inline]
    pub(super) fn op_ended(&mut self, error: Option<Errno>) -> bool {
        debug_assert!(self.ops.under_way > 0, "an operation ended that had not begun");
        self.ops.under_way = self.ops.under_way.saturating_sub(1);
        self.ops.error = self.ops.error.or(error);
        self.ops.under_way == 0
    }

    /// The first error of the job's operations.
    pub(super) fn error(&self) -> Option<Errno> {
        self.ops.error
    }

    /// The first error of the job's operations, as the answer carries it.
    pub(super) fn result(&self) -> Result<(), Errno> {
        self.ops.error.map_or(Ok(()), Err)
    }

    /// Spare slots that the job needs: a write-back volume keeps a partly written block as a whole
    /// block.
    pub(super) fn edges_needed(&self) -> usize {
        match self.span.cache {
            CacheMode::WriteBack => self.span.edges().as_slice().len(),
            _ => 0,
        }
    }

    /// Slots that the asker's peer keeps, counted from when the job has memory.
    #[inline]
    pub(super) fn kept_slots(&self) -> usize {
        match (self.kind, self.span.cache) {
            (JobKind::Read | JobKind::Reserve, CacheMode::None) => blocks_of(self.span.len),
            (JobKind::Read | JobKind::Reserve, _) => self.span.count(),
            _ => 0,
        }
    }

    /// Slots that the job takes from its volume's share.
    #[inline]
    pub(super) fn share_needed(&self) -> usize {
        let edges = if self.span.cache == CacheMode::WriteBack { 2 } else { 0 };
        match self.kind {
            JobKind::Read | JobKind::Reserve => self.span.count() + edges,
            _ => edges,
        }
    }
}

// The token of a store operation: generation and index of the job, and the sectors that the
// operation must move. The top bit is 0; tokens of `BlockWrites` have a 1 there.
const INDEX_BITS: u32 = 24;
const GENERATION_BITS: u32 = 24;
const SECTOR_BITS: u32 = 15;
const SECTOR: u32 = 512;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;

/// The table of jobs.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    table: Vec<Job>,
    free: Vec<u32>,
}

impl Jobs {
    /// A new job.
    #[inline(always)]
    pub(super) fn start(
        &mut self,
        kind: JobKind,
        from: Option<PartToken>,
        span: CachedSpan,
    ) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| self.grow());
        let job = &mut self.table[wide(index)];
        debug_assert!(job.blocks.is_empty() && job.edges.is_empty() && job.lock == JobLock::None);
        (job.kind, job.from, job.span) = (kind, from, span);
        (job.ops, job.waits, job.whole) = (JobOps::default(), WaitClock::default(), false);
        index
    }

    #[cold]
    fn grow(&mut self) -> u32 {
        self.table.push(Job::new());
        // The commands that connections may have outstanding bound the table.
        narrow(self.table.len() - 1)
    }

    /// An existing job.
    #[inline]
    pub(super) fn get(&mut self, index: u32) -> &mut Job {
        &mut self.table[wide(index)]
    }

    /// An existing job, to read.
    #[inline]
    pub(super) fn peek(&self, index: u32) -> &Job {
        &self.table[wide(index)]
    }

    /// Ends a job. The caller has given back its slots and its lock.
    #[inline]
    pub(super) fn end(&mut self, index: u32) {
        let job = &mut self.table[wide(index)];
        debug_assert!(job.kind != JobKind::Free, "a job ended twice");
        debug_assert!(job.edges.is_empty() && job.lock == JobLock::None && job.share == 0);
        debug_assert!(job.promised == 0, "a job ends with a promise");
        job.kind = JobKind::Free;
        job.blocks.clear();
        job.generation = job.generation.wrapping_add(1) & GENERATION_MASK;
        self.free.push(index);
    }

    /// Whether an operation of a job may still change data of a volume at the store.
    pub(super) fn change(&self, volume: VolumeIndex) -> bool {
        let changes = |kind| {
            use JobKind::{Change, Merge, Write, WriteBack};
            matches!(kind, Write { .. } | Merge | WriteBack { .. } | Change(_))
        };
        let mut of_volume = self.table.iter().filter(|job| job.span.volume == volume);
        of_volume.any(|job| job.ops.under_way > 0 && changes(job.kind))
    }

    /// Jobs that have not ended.
    pub(super) fn len(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Whether a job of a volume has not ended.
    pub(super) fn has_any_of(&self, volume: VolumeIndex) -> bool {
        self.table.iter().any(|job| job.kind != JobKind::Free && job.span.volume == volume)
    }

    /// The job's name for poll groups.
    #[inline]
    pub(super) fn id(&self, index: u32) -> JobId {
        JobId { index, generation: self.peek(index).generation }
    }

    /// The job with this name, unless it ended.
    #[inline]
    pub(super) fn find(&self, id: JobId) -> Option<u32> {
        let job = self.table.get(wide(id.index))?;
        (!matches!(job.kind, JobKind::Free) && job.generation == id.generation).then_some(id.index)
    }

    /// A token for a store operation that must move `len` bytes: a multiple of the sector size.
    #[inline]
    pub(super) fn token(&self, index: u32, len: u32) -> OpToken {
        debug_assert!(len / SECTOR < 1 << SECTOR_BITS, "{len} bytes in one operation");
        let generation = self.peek(index).generation;
        OpToken(
            u64::from(len / SECTOR) << (INDEX_BITS + GENERATION_BITS)
                | u64::from(generation) << INDEX_BITS
                | u64::from(index),
        )
    }

    /// The job of a token, and the bytes that its operation must move.
    #[inline]
    pub(super) fn of_token(&self, token: OpToken) -> Option<(u32, u32)> {
        let index = narrow(token.0 & INDEX_MASK);
        let generation = narrow((token.0 >> INDEX_BITS) & u64::from(GENERATION_MASK));
        let sectors: u32 = narrow(token.0 >> (INDEX_BITS + GENERATION_BITS));
        self.find(JobId { index, generation }).map(|index| (index, sectors * SECTOR))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::ids::VolumeIndex;

    #[test]
    fn tokens_and_names_die_with_their_job() {
        let mut jobs = Jobs::default();
        let span = CachedSpan { len: 4096, ..CachedSpan::none(VolumeIndex(0)) };
        let first = jobs.start(JobKind::Read, None, span);
        let (token, id) = (jobs.token(first, 4 << 20), jobs.id(first));
        assert_eq!(jobs.of_token(token), Some((first, 4 << 20)));
        jobs.end(first);
        assert_eq!((jobs.of_token(token), jobs.find(id)), (None, None));
        let second = jobs.start(JobKind::Sync, None, span);
        assert_eq!((second, jobs.find(id), jobs.len()), (first, None, 1));
        assert_eq!(jobs.of_token(jobs.token(second, 0)), Some((second, 0)));
    }

    #[test]
    fn the_last_operation_is_reported_and_the_first_failure_kept() {
        let mut job = Job::new();
        (0..3).for_each(|_| job.op_begins());
        assert!(!job.op_ended(None));
        assert!(!job.op_ended(Some(Errno::ENOSPC)));
        assert!(job.op_ended(Some(Errno::EIO)));
        assert_eq!((job.error(), job.result()), (Some(Errno::ENOSPC), Err(Errno::ENOSPC)));
    }
}
