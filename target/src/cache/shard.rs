//! [`Shard`]: one poll group's part of the cache, and its store: reads, fills, writes, changes.
//!
//! A shard belongs to one data thread. [`Shard::request`] takes a request, [`Shard::turn`] lets
//! what waits go on, [`Shard::take_reply`] gives the answers. A request may be answered before it
//! returns.
//!
//! A read whose blocks are all in the index is answered at once and costs no job. Everything else
//! is a job (`job.rs`): memory first (first come, first served), then the lock on its range, then
//! the store. Volumes without a cache take memory and go to the store, and that is all.
//!
//! Write-through, FUA, and write-back beyond the limit of dirty blocks: the data lands in slots of
//! its own, goes to the store, then into the index, then the write is acknowledged. Write-back:
//! into the index as dirty, acknowledged, to the store later (`write_back.rs`). A write of a part
//! of a block takes the rest from the cached block; write-back reads that first if it has to.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::job::{Jobs, Kind};
use super::message::{Changed, JobId, PartToken, Segments, ShardReply, ShardRequest};
use super::policy::Slot;
use super::range_lock::{Acquired, LockId, RangeLocks};
use super::slots::Slots;
use super::{SLOT_BYTES, STRIPE_BYTES};
use crate::arena::Arena;
use crate::store::{Op, OpDone, OpKind, Segment, Store, VolumeIndex};
use crate::volume::CacheMode;
use crate::volume_stats::{LastError, VolumeStats};

pub(super) const BLOCK: u64 = SLOT_BYTES as u64;
pub(super) const NO_SLOT: Slot = Slot(u32::MAX);

/// How a shard behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardOptions {
    /// Most bytes of this shard that may be acknowledged and in memory only.
    pub dirty_max_bytes: usize,
    /// A dirty block is on its way to the store at the latest after this.
    pub write_back_delay: Duration,
    /// Most bytes of one write-back.
    pub write_back_max_bytes: u32,
    /// Makes the hash of blocks unpredictable to peers.
    pub seed: u64,
}

/// What a shard has done since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheCounters {
    /// Blocks that reads found.
    pub hits: u64,
    /// Blocks that reads did not find.
    pub misses: u64,
    /// Blocks read ahead.
    pub prefetched: u64,
    /// Bytes read from stores for cached volumes.
    pub fill_bytes: u64,
    /// Write-backs: operations of the store, each with one or more neighbours.
    pub write_backs: u64,
    /// Bytes they wrote.
    pub write_back_bytes: u64,
    /// Writes that found no room for dirty blocks and went to the store.
    pub dirty_limited: u64,
    /// Bytes copied, for writes of parts of blocks only.
    pub copied_bytes: u64,
    /// Operations that a store failed.
    pub store_errors: u64,
    /// Requests that had to wait for memory.
    pub memory_waits: u64,
    /// Jobs that had to wait for another on the same range.
    pub range_waits: u64,
}

#[derive(Debug)]
pub(super) struct VolumeState {
    pub cache: CacheMode,
    size: u64,
    read_only: bool,
    // After a failed write-back, when to try again by ourselves.
    pub retry_at_ms: Option<u32>,
    // Slots of jobs that have not ended, and who waits for some of them to end.
    pub held: usize,
    pub waiting: VecDeque<u32>,
    // Operations at the store, and those that wait to go there.
    pub ops: usize,
    pub waiting_ops: VecDeque<(Op, Vec<Segment>)>,
    // Write-backs on their way.
    pub write_backs: usize,
    pub backoff_ms: u32,
    // When errors were last logged, and how many were not.
    pub logged: Option<Instant>,
    pub unlogged: u64,
    pub hits: u64,
    pub misses: u64,
    pub store_errors: u64,
    pub last_error: LastError,
    // Where they are published.
    pub stats: Arc<VolumeStats>,
}

/// One poll group's part of the cache. See the module.
pub struct Shard<S> {
    pub(super) store: S,
    pub(super) slots: Slots,
    pub(super) locks: RangeLocks,
    pub(super) jobs: Jobs,
    pub(super) volumes: Vec<Option<VolumeState>>,
    pub(super) options: ShardOptions,
    pub(super) replies: VecDeque<ShardReply>,
    // Writes that went well, for this shard's own poll group.
    pub(super) written: Vec<PartToken>,
    pub(super) waiting_memory: VecDeque<u32>,
    // Jobs and operations that wait because their volume has its share.
    pub(super) capped: usize,
    pub(super) waiting_ops: usize,
    // Volumes served, and the slots that unfinished jobs of one may have.
    pub(super) served: usize,
    pub(super) share: usize,
    // Whose waiting operations go first in the next turn.
    pub(super) next_volume: usize,
    pub(super) write_backs: Vec<u32>,
    pub(super) flushes: Vec<u32>,
    pub(super) done: Vec<OpDone>,
    // Jobs that got their locks and are to go on; somebody is letting them.
    granted: Vec<u32>,
    granting: bool,
    // Blocks of writes that will be dirty when their edges were read.
    pub(super) merging: usize,
    pub(super) found: Vec<Slot>,
    pub(super) segments: Vec<Segment>,
    pub(super) pool: Vec<Vec<Segment>>,
    // Rises with every write that made blocks dirty.
    pub(super) order: u64,
    pub(super) began: Instant,
    pub(super) now_ms: u32,
    // When that is to be counted on.
    next_ms: Instant,
    pub(super) tried_ms: u32,
    pub(super) now: Instant,
    pub(super) stopping: Option<Stopping>,
    pub(super) counters: CacheCounters,
    // The volume whose counters are published next.
    pub(super) publish_next: usize,
}

/// How far the end of a shard is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stopping {
    pub jobs: usize,
    pub syncing: bool,
    pub clean: bool,
}

impl<S> std::fmt::Debug for Shard<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard")
            .field("slots", &self.slots.capacity())
            .field("cached", &self.slots.cached())
            .field("dirty", &self.slots.dirty())
            .field("lent", &self.slots.lent())
            .field("jobs", &self.jobs.len())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

#[inline]
pub(super) fn state_of(
    volumes: &mut [Option<VolumeState>],
    volume: VolumeIndex,
) -> Option<&mut VolumeState> {
    volumes.get_mut(usize::from(volume.0)).and_then(Option::as_mut)
}

impl<S: Store> Shard<S> {
    /// A shard over a part of the arena, without volumes.
    ///
    /// At most half of its memory may be dirty, whatever the options say, and always so much less
    /// than all that the largest request still finds memory: a store that takes nothing must not
    /// keep others from theirs.
    #[must_use]
    pub fn new(store: S, arena: Arena, options: ShardOptions, now: Instant) -> Self {
        let request = arena.extent_max() as usize + 3 * SLOT_BYTES;
        let slots = Slots::new(arena, options.seed);
        let bytes = slots.capacity() * SLOT_BYTES;
        let dirty_max_bytes =
            options.dirty_max_bytes.min(bytes / 2).min(bytes.saturating_sub(request));
        let options = ShardOptions { dirty_max_bytes, ..options };
        Self {
            store,
            slots,
            locks: RangeLocks::new(1024),
            jobs: Jobs::default(),
            volumes: Vec::new(),
            options,
            written: Vec::with_capacity(256),
            replies: VecDeque::with_capacity(256),
            waiting_memory: VecDeque::with_capacity(256),
            capped: 0,
            waiting_ops: 0,
            served: 0,
            share: usize::MAX,
            next_volume: 0,
            write_backs: Vec::with_capacity(64),
            flushes: Vec::with_capacity(64),
            done: Vec::with_capacity(1024),
            granted: Vec::with_capacity(64),
            granting: false,
            merging: 0,
            found: Vec::with_capacity(1025),
            segments: Vec::with_capacity(1025),
            pool: Vec::new(),
            order: 0,
            began: now,
            now_ms: 0,
            next_ms: now,
            tried_ms: 0,
            now,
            stopping: None,
            counters: CacheCounters::default(),
            publish_next: 0,
        }
    }

    /// Serves a volume of `size_bytes`. What happens to it is told in `stats`, which nobody else
    /// writes.
    pub fn add_volume(
        &mut self,
        volume: VolumeIndex,
        cache: CacheMode,
        size_bytes: u64,
        read_only: bool,
        stats: Arc<VolumeStats>,
    ) {
        let at = usize::from(volume.0);
        if self.volumes.len() <= at {
            self.volumes.resize_with(at + 1, || None);
        }
        self.volumes[at] = Some(VolumeState {
            cache,
            size: size_bytes,
            read_only,
            retry_at_ms: None,
            held: 0,
            waiting: VecDeque::new(),
            ops: 0,
            waiting_ops: VecDeque::new(),
            write_backs: 0,
            backoff_ms: 0,
            logged: None,
            unlogged: 0,
            hits: 0,
            misses: 0,
            store_errors: 0,
            last_error: LastError::default(),
            stats,
        });
        self.slots.add_volume(volume);
        self.served = self.volumes.iter().flatten().count();
        let volumes = || self.volumes.iter().flatten();
        // One whose store hangs may have every dirty block, besides its share.
        let dirty = if volumes().any(|volume| volume.cache == CacheMode::WriteBack) {
            self.options.dirty_max_bytes / SLOT_BYTES
        } else {
            0
        };
        self.share = if self.served < 2 { usize::MAX } else { (self.slots.capacity() - dirty) / 2 };
    }

    /// The store.
    pub fn store_mut(&mut self) -> &mut S {
        &mut self.store
    }

    /// The slots, to look at.
    #[must_use]
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// What it has done.
    #[must_use]
    pub fn counters(&self) -> CacheCounters {
        self.counters
    }

    /// Most bytes that may be acknowledged and in memory only.
    #[must_use]
    pub fn dirty_max_bytes(&self) -> usize {
        self.options.dirty_max_bytes
    }

    /// Whether somebody waits for memory: whoever holds lent slots should see to it that they come
    /// back.
    #[must_use]
    pub fn is_short(&self) -> bool {
        !self.waiting_memory.is_empty()
    }

    /// Whether [`Self::take_reply`] has an answer.
    #[must_use]
    #[inline]
    pub fn has_reply(&self) -> bool {
        !self.replies.is_empty()
    }

    /// The writes of [`Self::write_one`] that the store has done well, oldest first: none but after
    /// a busy [`Self::turn`]. `list` must be empty; its memory is used for the next ones.
    #[inline]
    pub fn take_written(&mut self, list: &mut Vec<PartToken>) {
        debug_assert!(list.is_empty());
        std::mem::swap(&mut self.written, list);
    }

    /// The next answer.
    #[inline]
    pub fn take_reply(&mut self) -> Option<ShardReply> {
        self.replies.pop_front()
    }

    pub(super) fn volume(&mut self, volume: VolumeIndex) -> Option<&mut VolumeState> {
        state_of(&mut self.volumes, volume)
    }

    pub(super) fn mode(&self, volume: VolumeIndex) -> CacheMode {
        self.volumes
            .get(usize::from(volume.0))
            .and_then(Option::as_ref)
            .map_or(CacheMode::None, |v| v.cache)
    }

    pub(super) fn size(&self, volume: VolumeIndex) -> u64 {
        self.volumes.get(usize::from(volume.0)).and_then(Option::as_ref).map_or(0, |v| v.size)
    }

    #[inline]
    pub(super) fn done(&mut self, from: Option<PartToken>, result: Result<(), Errno>) {
        if let Some(to) = from {
            self.replies.push_back(ShardReply::Done { to, result });
        }
    }

    /// A new job, which knows its volume's mode.
    #[inline]
    pub(super) fn start(
        &mut self,
        kind: Kind,
        from: Option<PartToken>,
        volume: VolumeIndex,
        offset: u64,
        len: u64,
    ) -> u32 {
        let cache = self.mode(volume);
        self.jobs.start(kind, from, volume, cache, offset, len).0
    }

    #[inline]
    pub(super) fn tick(&mut self, now: Instant) {
        self.now = now;
        // Seldom, as turns go.
        if now >= self.next_ms {
            self.count_ms(now);
        }
    }

    #[cold]
    fn count_ms(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.began);
        // Wraps after 49 days; differences are taken modulo that.
        self.now_ms = (since.as_millis() & 0xffff_ffff) as u32;
        let into_ms = Duration::from_nanos(u64::from(since.subsec_nanos() % 1_000_000));
        self.next_ms = now + Duration::from_millis(1) - into_ms;
    }

    /// Takes a request.
    pub fn request(&mut self, request: ShardRequest, now: Instant) {
        self.tick(now);
        match request {
            ShardRequest::Read { from, volume, offset, len } => {
                self.read(Some(from), volume, offset, len);
            }
            ShardRequest::Prefetch { volume, offset, len } => self.read(None, volume, offset, len),
            ShardRequest::Reserve { from, volume, offset, len } => {
                if let Some((job, memory)) = self.reserve(from, volume, offset, len) {
                    self.replies.push_back(ShardReply::Reserved { to: from, job, memory });
                }
            }
            ShardRequest::Write { from, job, memory, fua } => {
                if self.write(job, memory, fua, now) {
                    self.done(Some(from), Ok(()));
                }
            }
            ShardRequest::Cancel { job, memory } => {
                self.recycle(memory);
                if let Some(job) = self.jobs.find(job) {
                    self.end(job);
                }
            }
            ShardRequest::Release { memory } => self.release(memory),
            ShardRequest::Flush { from, volume } => self.flush(Some(from), volume),
            ShardRequest::Sync { from, volume } => self.sync(Some(from), volume),
            ShardRequest::Change { from, volume, kind, held } => {
                let (offset, len) = kind.range();
                let job = self.start(Kind::Change, Some(from), volume, offset, len);
                self.jobs.get(job).change = kind;
                if held || self.mode(volume) == CacheMode::None {
                    self.submit(job, kind, 0);
                } else {
                    self.or_wait(job);
                }
            }
            ShardRequest::Hold { from, volume, offset, len } => {
                let job = self.start(Kind::Hold, Some(from), volume, offset, len);
                self.or_wait(job);
            }
            ShardRequest::Unhold { from, job, outcome } => {
                if let Some(job) = self.jobs.find(job) {
                    self.changed(job, outcome);
                    self.end(job);
                }
                self.done(Some(from), Ok(()));
            }
        }
    }

    /// What [`ShardRequest::Reserve`] is answered, if there is memory at once and nobody waits for
    /// it. `None`: the answer comes later.
    pub fn reserve(
        &mut self,
        from: PartToken,
        volume: VolumeIndex,
        offset: u64,
        len: u32,
    ) -> Option<(JobId, Segments)> {
        let job = self.start(Kind::Reserve, Some(from), volume, offset, len.into());
        if !self.enter_share(job) {
            return None;
        }
        let memory = if self.waiting_memory.is_empty() { self.reserved(job) } else { None };
        if memory.is_none() {
            self.wait_for_memory(job);
        }
        Some((self.jobs.id(job), memory?))
    }

    /// Does what [`ShardRequest::Release`] asks for.
    pub fn release(&mut self, memory: Segments) {
        for run in memory.as_slice() {
            for slot in self.slots.slots_of(*run) {
                self.slots.unlend(slot);
            }
        }
        self.recycle(memory);
    }

    /// Reaps the store and lets what waits go on. Returns whether anything happened.
    #[inline]
    pub fn turn(&mut self, now: Instant) -> bool {
        self.tick(now);
        self.store.reap(&mut self.done);
        let busy = !self.done.is_empty();
        if busy {
            self.take_done();
        }
        if self.waiting_ops > 0 {
            self.retry_store();
        }
        if self.capped > 0 || self.is_short() {
            self.retry_memory();
        }
        if self.slots.dirty() > 0 {
            self.pump();
        }
        busy
    }

    #[inline(never)]
    fn take_done(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        for op in done.drain(..) {
            self.on_store_done(op);
        }
        self.done = done;
    }

    /// When [`Self::turn`] has something to do that nobody will wake it for.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.write_back_deadline().map(Duration::from_millis)
    }

    /// Jobs and store operations that have not ended.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.jobs.len() == 0 && self.store.in_flight() == 0
    }

    pub(super) fn recycle(&mut self, memory: Segments) {
        if let Some(list) = memory.into_list() {
            self.recycle_list(list);
        }
    }

    pub(super) fn recycle_list(&mut self, mut list: Vec<Segment>) {
        // What was taken out leaves a list behind that never had memory.
        if list.capacity() > 0 {
            list.clear();
            self.pool.push(list);
        }
    }

    // Takes the lock on a job's range, and goes on if it is free.
    pub(super) fn lock(&mut self, job: u32) {
        if self.take_lock(job) {
            self.on_lock(job);
        }
    }

    // Takes the lock on a job's range. False: it goes on when those before it have ended.
    #[inline]
    pub(super) fn take_lock(&mut self, job: u32) -> bool {
        let (first, last) = self.jobs.get(job).block_range();
        self.take_lock_of(job, first, last)
    }

    // Takes the lock on some of a job's blocks. False: it goes on when those before it have ended.
    pub(super) fn take_lock_of(&mut self, job: u32, first: u64, last: u64) -> bool {
        let entry = self.jobs.get(job);
        let lock = self.locks.acquire(entry.volume.0, first * BLOCK..(last + 1) * BLOCK, job);
        entry.lock = Some(lock.id());
        entry.holds = matches!(lock, Acquired::Now(_));
        if !entry.holds {
            self.counters.range_waits += 1;
        }
        entry.holds
    }

    fn on_lock(&mut self, job: u32) {
        let entry = self.jobs.get(job);
        entry.holds = true;
        match entry.kind {
            Kind::Read => self.fill(job),
            Kind::Write => self.write_locked(job),
            Kind::WriteBack => self.write_back_locked(job),
            Kind::Change => {
                let kind = entry.change;
                self.submit(job, kind, 0);
            }
            Kind::Hold => {
                if let Some(to) = entry.from {
                    let job = self.jobs.id(job);
                    self.replies.push_back(ShardReply::Held { to, job });
                }
            }
            _ => {}
        }
    }

    // Ends a job: its private slots and its lock are free, and who waited for the lock goes on.
    pub(super) fn end(&mut self, job: u32) {
        let entry = self.jobs.get(job);
        if let Some(state) = state_of(&mut self.volumes, entry.volume) {
            state.held = state.held.saturating_sub(entry.held);
        }
        entry.held = 0;
        // Those of a write-back are not its own but still to be written.
        if entry.kind != Kind::WriteBack {
            for block in entry.blocks.iter().filter(|block| block.own) {
                self.slots.give_back(block.slot);
            }
        }
        while let Some(edge) = entry.edges.pop() {
            self.slots.give_back(edge);
        }
        let lock = entry.lock.take();
        self.jobs.end(job);
        if let Some(lock) = lock {
            self.unlock(lock);
        }
    }

    // Releases a lock, and who waited for it goes on.
    #[inline(always)]
    pub(super) fn unlock(&mut self, lock: LockId) {
        self.locks.release(lock, &mut self.granted);
        if !self.granted.is_empty() {
            self.start_granted();
        }
    }

    // Each goes on once: one that ends at once may grant others, which come behind, and leaves them
    // to the loop that runs already.
    fn start_granted(&mut self) {
        if std::mem::replace(&mut self.granting, true) {
            return;
        }
        let mut at = 0;
        while let Some(&job) = self.granted.get(at) {
            at += 1;
            self.on_lock(job);
        }
        self.granted.clear();
        self.granting = false;
    }

    // The store has done what a job asked for.
    pub(super) fn advance(&mut self, job: u32) {
        let entry = self.jobs.get(job);
        let (kind, error, from) = (entry.kind, entry.error, entry.from);
        let result = error.map_or(Ok(()), Err);
        match kind {
            Kind::Read => self.finish_read(job),
            Kind::Write => self.finish_write(job),
            Kind::Merge => {
                self.merging -= self.jobs.get(job).blocks.len();
                if error.is_none() {
                    self.install_dirty(job);
                }
                self.done(from, result);
                self.end(job);
            }
            Kind::Change => {
                if self.jobs.get(job).holds {
                    let outcome = if error.is_some() { Changed::Unknown } else { Changed::Yes };
                    self.changed(job, outcome);
                }
                self.done(from, result);
                self.end(job);
            }
            Kind::WriteBack => self.finish_write_back(job),
            Kind::Sync => {
                self.done(from, result);
                self.end(job);
                if from.is_none() {
                    self.stop_job_ended(error);
                }
            }
            Kind::Free | Kind::Reserve | Kind::Flush | Kind::Hold => {}
        }
    }

    pub(super) fn sync(&mut self, from: Option<PartToken>, volume: VolumeIndex) {
        let job = self.start(Kind::Sync, from, volume, 0, 0);
        self.submit(job, OpKind::Flush, 0);
    }

    /// Volumes that have something to make durable.
    pub(super) fn writable_volumes(&self) -> Vec<VolumeIndex> {
        (0u16..)
            .zip(&self.volumes)
            .filter(|(_, v)| v.as_ref().is_some_and(|v| !v.read_only))
            .map(|(index, _)| VolumeIndex(index))
            .collect()
    }

    pub(super) fn same_stripe(first: u64, second: u64) -> bool {
        first * BLOCK / STRIPE_BYTES == second * BLOCK / STRIPE_BYTES
    }

    pub(super) fn write_out(&mut self, job: u32, blocks: std::ops::Range<usize>) {
        let entry = self.jobs.get(job);
        let offset = entry.offset + blocks.start as u64 * BLOCK;
        let volume = entry.volume;
        let len = (blocks.len() as u64 * BLOCK).min(self.size(volume) - offset);
        self.counters.write_backs += 1;
        self.counters.write_back_bytes += len;
        let kind = OpKind::Write { offset, len: u32::try_from(len).unwrap_or(0), fua: false };
        self.transfer(job, kind, blocks, 0);
    }
}
