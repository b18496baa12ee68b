//! [`ShardCore`]: the state that every job of a shard uses: slots, locks, the store, answers.
//!
//! Each field keeps its own invariants. The methods here are the steps that reads, writes and
//! write-backs share: begin and end a job, allocate its memory, lock its range, move its data. The
//! next step of a job is decided elsewhere.

use std::ops::Range;

use nix::errno::Errno;
use rblk_protocol::width::narrow;

use super::CacheCounters;
use super::answers::Answers;
use super::block_write::BlockWrites;
use super::job::{Job, JobBlock, JobKind, JobLock, Jobs};
use super::lists::Lists;
use super::locks::Locks;
use super::policy::Slot;
use super::range_lock::Acquired;
use super::shard_messages::{PartToken, Segments};
use super::slots::Slots;
use super::span::{BLOCK, CachedSpan, blocks_of};
use super::store_queue::StoreQueue;
use crate::cache::session_memory::Sessions;
use crate::cache::shard_clock::Clock;
use crate::cache::shard_volumes::{ShardVolumes, StoreFailure};
use crate::store::{MAX_SEGMENTS, Op, OpKind, Segment, Store};
use crate::volume::CacheMode;
use crate::volume::ids::{SessionIndex, VolumeIndex};

/// The state that every job uses.
#[derive(Debug)]
pub(super) struct ShardCore<S> {
    pub slots: Slots,
    pub locks: Locks,
    pub jobs: Jobs,
    pub block_writes: BlockWrites,
    pub volumes: ShardVolumes,
    pub store: StoreQueue<S>,
    pub answers: Answers,
    pub lists: Lists,
    pub sessions: Sessions,
    pub clock: Clock,
    pub counters: CacheCounters,
    /// The first failure of each burst, for control.
    pub failures: Vec<StoreFailure>,
}

impl<S: Store> ShardCore<S> {
    /// A new job on a byte range of a volume.
    #[inline]
    pub(super) fn start(
        &mut self,
        kind: JobKind,
        from: Option<PartToken>,
        volume: VolumeIndex,
        offset: u64,
        len: u64,
    ) -> u32 {
        let span = self.volumes.span(volume, offset, len);
        self.jobs.start(kind, from, span)
    }

    /// Ends a job: frees its private slots and releases its lock. Jobs that waited for the lock may
    /// get theirs.
    pub(super) fn end(&mut self, job: u32) {
        let entry = self.jobs.get(job);
        Self::end_promise_of(&mut self.sessions, entry);
        let share = std::mem::take(&mut entry.share);
        // Without a store there is no share.
        if let Some(state) = self.volumes.get_mut(entry.span.volume) {
            state.share.give_back(share);
        }
        // A write-back's own slots are in the index and remain to be written.
        if !matches!(entry.kind, JobKind::WriteBack { .. }) {
            for block in entry.blocks.iter().filter(|block| block.own) {
                self.slots.give_back(block.slot);
            }
        }
        while let Some(edge) = entry.edges.pop() {
            self.slots.give_back(edge);
        }
        let lock = entry.take_lock();
        self.jobs.end(job);
        if let Some(lock) = lock {
            self.locks.release(lock);
        }
    }

    /// Answers a job and ends it.
    pub(super) fn finish(&mut self, job: u32) {
        let entry = self.jobs.peek(job);
        let (from, volume) = (entry.from, entry.span.volume);
        self.answers.ended(from, volume, entry.result(), entry.spent());
        self.end(job);
    }

    /// Promises a job the slots that its asker's peer will keep. False: the job waits in its
    /// session's queue.
    #[inline(always)]
    pub(super) fn promise(&mut self, job: u32) -> bool {
        let entry = self.jobs.get(job);
        let (Some(from), need) = (entry.from, entry.kept_slots()) else { return true };
        if need == 0 {
            return true;
        }
        let promised = self.sessions.promise(from.session, job, need, self.slots.pinned());
        if promised {
            entry.promised = need;
        } else {
            entry.waits(self.clock.now());
        }
        promised
    }

    /// Ends a job's promise: its peer no longer keeps the memory, because the data of a reservation
    /// came or the job ends.
    #[inline]
    pub(super) fn end_promise(&mut self, job: u32) {
        Self::end_promise_of(&mut self.sessions, self.jobs.get(job));
    }

    #[inline(always)]
    fn end_promise_of(sessions: &mut Sessions, entry: &mut Job) {
        if entry.promised > 0
            && let Some(from) = entry.from
        {
            sessions.end_promise(from.session, std::mem::take(&mut entry.promised));
        }
    }

    /// Allocates a job's blocks and edges. False: too few slots are free, and nothing changed.
    #[inline(always)]
    pub(super) fn allocate(&mut self, job: u32, blocks: usize, edges: usize) -> bool {
        if (blocks, edges) != (1, 0) {
            return self.allocate_more(job, blocks, edges);
        }
        let Some(slot) = self.slots.allocate_one() else { return false };
        self.jobs.get(job).blocks.push(JobBlock::own(slot));
        true
    }

    fn allocate_more(&mut self, job: u32, blocks: usize, edges: usize) -> bool {
        let slots = &mut self.lists.slots;
        slots.clear();
        if !self.slots.allocate(blocks + edges, slots) {
            return false;
        }
        let entry = self.jobs.get(job);
        entry.blocks.extend(slots[..blocks].iter().copied().map(JobBlock::own));
        entry.edges.extend_from_slice(&slots[blocks..]);
        true
    }

    /// Allocates the memory of a write. `None`: too few slots are free.
    #[inline(always)]
    pub(super) fn reserve(&mut self, job: u32) -> Option<Segments> {
        let entry = self.jobs.peek(job);
        let (span, edges, session) = (entry.span, entry.edges_needed(), entry.from?.session);
        let (blocks, skip) = match span.cache {
            CacheMode::None => (blocks_of(span.len), 0),
            _ => (span.count(), span.skip()),
        };
        self.allocate(job, blocks, edges).then(|| self.memory_of(job, session, skip))
    }

    /// The runs of a job's blocks, to be lent to a session. The data begins `skip` bytes into the
    /// first run.
    #[inline(always)]
    pub(super) fn memory_of(&mut self, job: u32, session: SessionIndex, skip: usize) -> Segments {
        let entry = self.jobs.peek(job);
        let len = entry.span.data_len();
        if let [only] = entry.blocks[..] {
            let offset = self.slots.offset(only.slot) + skip;
            return Segments::one(session, Segment { offset, len });
        }
        self.list_of(job, session, skip, len)
    }

    fn list_of(&mut self, job: u32, session: SessionIndex, skip: usize, len: u32) -> Segments {
        let mut list = self.lists.take();
        let slots = self.jobs.peek(job).blocks.iter().map(|block| block.slot);
        self.slots.segments(slots, skip, len, &mut list);
        self.lists.lend(session, list)
    }

    /// Asks for the lock on a job's range. False: the job continues after earlier locks are
    /// released.
    pub(super) fn lock(&mut self, job: u32) -> bool {
        let span = self.jobs.peek(job).span;
        self.lock_blocks(job, span.first(), span.last())
    }

    /// Asks for the lock on some of a job's blocks. False: the job continues after earlier locks
    /// are released.
    pub(super) fn lock_blocks(&mut self, job: u32, first: u64, last: u64) -> bool {
        let entry = self.jobs.get(job);
        let range = first * BLOCK..(last + 1) * BLOCK;
        match self.locks.acquire(entry.span.volume, range, job) {
            Acquired::Now(lock) => {
                entry.lock = JobLock::Held(lock);
                true
            }
            Acquired::Queued(lock) => {
                entry.lock = JobLock::Waits(lock);
                entry.waits(self.clock.now());
                self.counters.range_waits += 1;
                false
            }
        }
    }

    /// Moves the data of some of a job's blocks between memory and store, in as many operations as
    /// needed. The data begins `skip` bytes into the first of these blocks.
    #[inline(always)]
    pub(super) fn transfer(&mut self, job: u32, kind: OpKind, blocks: Range<usize>, skip: usize) {
        if let [only] = self.jobs.peek(job).blocks[blocks.clone()] {
            let len = narrow(kind.range().1);
            let offset = self.slots.offset(only.slot) + skip;
            return self.submit(job, kind, len, &[Segment { offset, len }]);
        }
        self.transfer_list(job, kind, blocks, skip);
    }

    fn transfer_list(&mut self, job: u32, kind: OpKind, blocks: Range<usize>, skip: usize) {
        let (mut offset, len) = kind.range();
        let mut runs = std::mem::take(&mut self.lists.runs);
        let slots = self.jobs.peek(job).blocks[blocks].iter().map(|block| block.slot);
        self.slots.segments(slots, skip, narrow(len), &mut runs);
        for part in runs.chunks(MAX_SEGMENTS) {
            let len = part.iter().map(|run| run.len).sum();
            let kind = match kind {
                OpKind::Write { fua, .. } => OpKind::Write { offset, len, fua },
                _ => OpKind::Read { offset, len },
            };
            offset += u64::from(len);
            self.submit(job, kind, len, part);
        }
        runs.clear();
        self.lists.runs = runs;
    }

    /// Submits one operation of a job, which must move `len` bytes.
    #[inline]
    pub(super) fn submit(&mut self, job: u32, kind: OpKind, len: u32, memory: &[Segment]) {
        let token = self.jobs.token(job, len);
        let entry = self.jobs.get(job);
        entry.op_begins();
        entry.goes_to_store(self.clock.now());
        let op = Op { token, volume: entry.span.volume, kind };
        match self.volumes.get_mut(op.volume) {
            Some(state) => self.store.submit(&mut state.ops, &mut self.lists, op, memory),
            None => self.refuse(op),
        }
    }

    // Volumes without a store only ask for memory.
    #[cold]
    fn refuse(&mut self, op: Op) {
        debug_assert!(false, "an operation of a volume without a store: {op:?}");
        tracing::error!(volume = op.volume.0, "bug: an operation of a volume without a store");
        self.store.fail(op, Errno::ENXIO);
    }

    /// A store operation of a volume ended, perhaps with an error.
    pub(super) fn op_ended(&mut self, volume: VolumeIndex, kind: JobKind, error: Option<Errno>) {
        // A refused operation has no volume.
        if let Some(state) = self.volumes.get_mut(volume) {
            state.ops.ended();
            if let Some(errno) = error
                && let Some(failure) = state.report.note_error(volume, kind, errno, &self.clock)
            {
                self.failures.push(failure);
            }
        }
        self.counters.store_errors += u64::from(error.is_some());
    }

    /// Counts the blocks of a read as hits and misses.
    pub(super) fn count_lookups(&mut self, volume: VolumeIndex, hits: u64, misses: u64) {
        self.counters.hits += hits;
        self.counters.misses += misses;
        if let Some(state) = self.volumes.get_mut(volume) {
            state.report.count_lookups(hits, misses);
        }
    }

    /// Copies the bytes `start..end` of a slot to another slot. A shard copies data nowhere else.
    pub(super) fn copy(&mut self, from: Slot, to: Slot, start: usize, end: usize) {
        if start >= end {
            return;
        }
        let (source, target) = (self.slots.offset(from) + start, self.slots.offset(to) + start);
        let region = self.slots.region();
        region.copy_to(source, region, target, end - start);
        self.counters.copied_bytes += (end - start) as u64;
    }

    /// Copies the bytes of a block outside the span.
    pub(super) fn copy_around(&mut self, span: &CachedSpan, block: u64, from: Slot, to: Slot) {
        let covered = span.covered(block);
        self.copy(from, to, 0, covered.from);
        self.copy(from, to, covered.to, super::SLOT_BYTES);
    }
}
