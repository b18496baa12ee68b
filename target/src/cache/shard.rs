//! [`Shard`]: one poll group's part of the cache, and its store.
//!
//! A shard belongs to one data thread. [`Shard::tick`] sets the time of a turn, [`Shard::request`]
//! takes a request, [`Shard::turn`] continues waiting work, [`Shard::take_reply`] returns the
//! answers. A request may be answered before its call returns.
//!
//! A read whose blocks are all in the index is answered at once and costs no job. A write of one
//! block mostly has no job either: [`Shard::write_one`], `block_write.rs`. Any other read, write,
//! discard or zeroing is a job (`job.rs`). A job takes memory first (first come, first served),
//! then the lock on its range, then the store. A job of a volume without a cache needs only memory
//! and the store.
//!
//! This file decides the next step of a job: after its memory is allocated, after its lock is
//! granted, after its store operations ended. The steps are in `read_job.rs`, `write_job.rs`,
//! `discard_zero.rs` and `write_backs.rs`. They only call down and return; [`Shard::run_granted`]
//! later continues the jobs that they granted locks.

use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use rblk_protocol::width::wide64;
use rblk_runtime::{Micros, Moment};

use super::answers::Answers;
use super::block_write::BlockWrites;
use super::core::ShardCore;
use super::job::{JobKind, Jobs};
use super::lists::Lists;
use super::locks::Locks;
use super::shard_messages::{JobId, PartToken, Segments, ShardReply, ShardRequest};
use super::slots::Slots;
use super::stop::{ShardStopping, StopStep, Unsaved};
use super::store_queue::StoreQueue;
use super::write_backs::WriteBacks;
use super::{CacheCounters, SLOT_BYTES, ShardOptions, SlotsOf, discard_zero};
use crate::cache::memory_queue::MemoryQueue;
use crate::cache::read_job::Hit;
use crate::cache::session_memory::Sessions;
use crate::cache::shard_clock::Clock;
use crate::cache::shard_volumes::{ShardVolumes, StoreFailure};
use crate::cache::write_job::{Landed, OneBlock, OneWrite};
use crate::cache::{read_job, write_job};
use crate::memory::arena::Arena;
use crate::store::{OpDone, OpKind, Store};
use crate::volume::CacheMode;
use crate::volume::ids::{HostIndex, SessionIndex, VolumeIndex};
use crate::volume::timing::Spent;
use rblk_operate::target::volume_counts::VolumeStats;

/// One poll group's part of the cache. See the module.
pub struct Shard<S> {
    pub(super) core: ShardCore<S>,
    pub(super) memory: MemoryQueue,
    pub(super) write_backs: WriteBacks,
    dirty_max_bytes: usize,
    /// Slots of the largest request.
    pub(super) request_slots: usize,
    stopping: Option<ShardStopping>,
}

impl<S> std::fmt::Debug for Shard<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard")
            .field("slots", &self.core.slots.capacity())
            .field("cached", &self.core.slots.cached())
            .field("dirty", &self.core.slots.dirty())
            .field("lent", &self.core.slots.lent())
            .field("jobs", &self.core.jobs.len())
            .field("block_writes", &self.core.block_writes.len())
            .field("counters", &self.core.counters)
            .finish_non_exhaustive()
    }
}

impl<S: Store> Shard<S> {
    /// A shard over a part of the arena, without volumes.
    ///
    /// At most half of its memory may be dirty, even with a higher limit in the options, and the
    /// largest request must always find memory: a store that takes no writes must not keep others
    /// from their memory.
    #[must_use]
    pub fn new(store: S, arena: Arena, options: ShardOptions, now: impl Into<Moment>) -> Self {
        let request = arena.extent_max() as usize + 3 * SLOT_BYTES;
        let slots = Slots::new(arena, options.seed);
        let bytes = slots.capacity() * SLOT_BYTES;
        let dirty_max_bytes =
            options.dirty_max_bytes.min(bytes / 2).min(bytes.saturating_sub(request));
        // A shard without a volume also lends: copies of volumes in memory.
        let mut sessions = Sessions::default();
        sessions.set_slots(slots.capacity());
        let core = ShardCore {
            slots,
            locks: Locks::new(),
            jobs: Jobs::default(),
            block_writes: BlockWrites::new(1024),
            volumes: ShardVolumes::default(),
            store: StoreQueue::new(store),
            answers: Answers::new(256),
            lists: Lists::new(),
            sessions,
            clock: Clock::new(now.into().us()),
            counters: CacheCounters::default(),
            failures: Vec::new(),
        };
        Self {
            core,
            memory: MemoryQueue::new(),
            write_backs: WriteBacks::new(&options, dirty_max_bytes),
            dirty_max_bytes,
            request_slots: request.div_ceil(SLOT_BYTES),
            stopping: None,
        }
    }

    /// Serves a volume of `size_bytes`. The shard publishes the volume's counters in `stats`; it is
    /// the only writer.
    pub(crate) fn add_volume(
        &mut self,
        volume: VolumeIndex,
        cache: CacheMode,
        size_bytes: u64,
        read_only: bool,
        stats: Arc<VolumeStats>,
    ) {
        let core = &mut self.core;
        core.volumes.add(volume, cache, size_bytes, read_only, stats);
        core.slots.add_volume(volume);
        self.share_anew();
    }

    /// Slots that are never dirty.
    pub(super) fn clean(&self) -> usize {
        let dirty = if self.core.volumes.write_back() { self.write_backs.dirty_max() } else { 0 };
        self.core.slots.capacity() - dirty
    }

    /// Recomputes each volume's share after volumes or cache modes changed.
    pub(super) fn share_anew(&mut self) {
        let core = &mut self.core;
        core.store.set_volumes(core.volumes.served());
        let clean = self.clean().saturating_sub(self.core.slots.set_apart());
        // Jobs and peers cannot count on slots kept for volumes.
        let shared = clean - self.keep_minimums(clean);
        self.keep_maximums();
        self.memory.set_volumes(&self.core.volumes, shared);
        self.core.sessions.set_slots(shared);
    }

    /// The store.
    pub(crate) fn store_mut(&mut self) -> &mut S {
        self.core.store.store_mut()
    }

    /// The slots, to read.
    #[must_use]
    pub fn slots(&self) -> &Slots {
        &self.core.slots
    }

    /// The shard's counters.
    #[must_use]
    pub(crate) fn counters(&self) -> CacheCounters {
        self.core.counters
    }

    /// A store that began to fail, for control. Each failure is returned once.
    #[inline]
    pub(crate) fn take_failure(&mut self) -> Option<StoreFailure> {
        self.core.failures.pop()
    }

    /// Limit of bytes that may be acknowledged and in memory only.
    #[must_use]
    pub(crate) fn dirty_max_bytes(&self) -> usize {
        self.dirty_max_bytes
    }

    /// Publishes the counters of every volume.
    pub(crate) fn publish_volumes(&self) {
        self.core.volumes.publish(&self.core.slots);
    }

    /// Publishes the counters of a few volumes, and of the next ones at the next call: the cost
    /// does not grow with the number of volumes.
    pub(crate) fn publish_some_volumes(&mut self) {
        self.core.volumes.publish_some(&self.core.slots);
    }

    /// Whether a job waits for lent slots. The poll group should then make the sessions of
    /// [`Self::seeks_from`] return their slots.
    #[must_use]
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.memory.is_short() || self.core.sessions.waiting() > 0
    }

    /// Whether the slots lent to a session should come back.
    #[must_use]
    pub(crate) fn seeks_from(&self, session: SessionIndex) -> bool {
        self.memory.is_short() || self.core.sessions.waits(session)
    }

    /// The sessions that should return lent slots: all of them, or the sessions of hosts that are
    /// at their limit.
    #[must_use]
    pub(crate) fn seeks(&self) -> SlotsOf {
        if self.memory.is_short() {
            SlotsOf::All
        } else {
            SlotsOf::Hosts(self.core.sessions.in_line().collect())
        }
    }

    /// Whether another shard wants the lent slots of a session back.
    #[must_use]
    pub(crate) fn gives_back(&self, session: SessionIndex, of: &SlotsOf) -> bool {
        of.has(self.core.sessions.host_of(session))
    }

    /// Assigns a session to a host: the peers of all the host's sessions share the host's limit.
    pub(crate) fn set_host(&mut self, session: SessionIndex, host: HostIndex) {
        self.core.sessions.set_host(session, host);
    }

    /// Whether [`Self::take_reply`] has an answer.
    #[must_use]
    #[inline]
    pub(crate) fn has_reply(&self) -> bool {
        self.core.answers.has_reply()
    }

    /// The [`Self::write_one`] write with this number that the store completed without an error;
    /// number 0 is the oldest. None are listed unless [`Self::turn`] was busy. Ask until `None`,
    /// which empties the list.
    #[inline(always)]
    pub(crate) fn next_written(&mut self, number: usize) -> Option<PartToken> {
        self.core.answers.next_written(number)
    }

    /// The next answer.
    #[inline]
    pub(crate) fn take_reply(&mut self) -> Option<ShardReply> {
        self.core.answers.take_reply()
    }

    /// Answers a [`ShardRequest::Read`] at once, if the index has every block and the session may
    /// keep as many slots: lends them and counts a hit. `None` changes nothing.
    #[inline(always)]
    pub(crate) fn lend_hit(
        &mut self,
        session: SessionIndex,
        volume: VolumeIndex,
        offset: u64,
        len: u32,
    ) -> Option<Hit> {
        read_job::lend_hit(&mut self.core, session, volume, offset, len)
    }

    /// Carries out a [`ShardRequest::Read`] for which [`Self::lend_hit`] has just returned `None`.
    pub(crate) fn read_missed(
        &mut self,
        from: PartToken,
        volume: VolumeIndex,
        offset: u64,
        len: u32,
    ) {
        let job = read_job::start_missed(&mut self.core, from, volume, offset, len);
        self.enter(job);
        self.run_granted();
    }

    /// Takes a request.
    pub(crate) fn request(&mut self, request: ShardRequest) {
        match request {
            ShardRequest::Read { from, volume, offset, len } => {
                if let Some(job) = read_job::start(&mut self.core, from, volume, offset, len) {
                    self.enter(job);
                }
            }
            ShardRequest::Prefetch { volume, offset, len } => self.prefetch(volume, offset, len),
            ShardRequest::Reserve { from, volume, offset, len } => {
                if let Some((job, memory)) = self.reserve(from, volume, offset, len) {
                    self.core.answers.reply(ShardReply::Reserved { to: from, job, memory });
                }
            }
            ShardRequest::Write { from, job, memory, fua } => {
                if self.write(job, memory, fua) {
                    self.core.answers.done(from, Ok(()), Spent::default());
                }
            }
            ShardRequest::Cancel { job, memory } => {
                self.core.lists.take_back(memory);
                if let Some(job) = self.find(job) {
                    self.core.end(job);
                }
            }
            ShardRequest::Release { memory } => self.release(memory),
            ShardRequest::Flush { from, volume } => {
                self.write_backs.flush(&mut self.core, Some(from), volume);
            }
            ShardRequest::Sync { from, volume } => self.sync(Some(from), volume),
            ShardRequest::Change { from, volume, kind, locked } => {
                let (offset, len) = kind.range();
                let job = self.core.start(JobKind::Change(kind), Some(from), volume, offset, len);
                if locked || self.core.volumes.mode(volume) == CacheMode::None {
                    discard_zero::submit(&mut self.core, job);
                } else {
                    self.enter(job);
                }
            }
            ShardRequest::LockRange { from, volume, offset, len } => {
                let job = self.core.start(JobKind::LockRange, Some(from), volume, offset, len);
                self.enter(job);
            }
            ShardRequest::UnlockRange { from, job, outcome } => {
                if let Some(job) = self.find(job) {
                    discard_zero::changed(&mut self.core, &mut self.write_backs, job, outcome);
                    self.core.end(job);
                }
                self.core.answers.done(from, Ok(()), Spent::default());
            }
        }
        self.run_granted();
    }

    // The job of a name. Only the name's holder ends the job, so the job still exists.
    fn find(&self, name: JobId) -> Option<u32> {
        let job = self.core.jobs.find(name);
        debug_assert!(job.is_some(), "{name:?} has ended");
        if job.is_none() {
            tracing::error!(job = ?name, "bug: a request for a job that has ended");
        }
        job
    }

    // No request waits for a prefetch, and a prefetch waits for no memory.
    fn prefetch(&mut self, volume: VolumeIndex, offset: u64, len: u32) {
        if self.memory.is_short() {
            return;
        }
        let Some(job) = read_job::start_prefetch(&mut self.core, volume, offset, len) else {
            return;
        };
        let entry = self.core.jobs.get(job);
        let has_share = self.memory.take_share(&mut self.core.volumes, entry);
        if !has_share || !read_job::with_memory(&mut self.core, job) {
            self.core.end(job);
        }
    }

    /// Answers a [`ShardRequest::Reserve`] at once, if memory is free and no job waits for it.
    /// `None`: the answer comes later.
    pub(crate) fn reserve(
        &mut self,
        from: PartToken,
        volume: VolumeIndex,
        offset: u64,
        len: u32,
    ) -> Option<(JobId, Segments)> {
        let job = self.core.start(JobKind::Reserve, Some(from), volume, offset, len.into());
        if !self.enter_session(job) || !self.enter_share(job) {
            return None;
        }
        let memory = if self.memory.is_short() { None } else { self.core.reserve(job) };
        if memory.is_none() {
            self.wait_for_memory(job);
        }
        Some((self.core.jobs.id(job), memory?))
    }

    /// Carries out a [`ShardRequest::Write`]. True: the write succeeded. False: the answer comes
    /// later.
    pub(crate) fn write(&mut self, job: JobId, memory: Segments, fua: bool) -> bool {
        self.core.lists.take_back(memory);
        let Some(job) = self.find(job) else { return false };
        self.core.end_promise(job);
        let done = write_job::start(&mut self.core, &mut self.write_backs, job, fua);
        self.run_granted();
        done
    }

    /// Ends a reservation that was filled to be sent, not to be written. Its memory is lent until
    /// [`ShardRequest::Release`].
    pub(crate) fn lend_reserved(&mut self, job: JobId) {
        let Some(job) = self.find(job) else { return };
        let core = &mut self.core;
        let entry = core.jobs.get(job);
        for block in entry.blocks.iter_mut().filter(|block| block.own) {
            block.own = false;
            core.slots.lend_private(block.slot);
        }
        // The session keeps the slots until they come back.
        core.sessions.lent(std::mem::take(&mut entry.promised));
        core.end(job);
    }

    /// A reservation and its write in one, for the data of one block that has already landed. The
    /// answer of [`OneWrite::AtStore`] comes from [`Self::next_written`] or, as for
    /// [`ShardRequest::Write`], from [`Self::take_reply`].
    #[inline(always)]
    pub(crate) fn write_one(&mut self, write: OneBlock, data: impl Landed) -> OneWrite {
        write_job::start_one(&mut self.core, &self.memory, &mut self.write_backs, write, data)
    }

    /// Carries out a [`ShardRequest::Release`].
    pub(crate) fn release(&mut self, memory: Segments) {
        // Most lent memory is in one slot.
        if let [run] = memory.as_slice()
            && let Some(slot) = self.core.slots.slot_of(*run)
        {
            self.core.slots.unlend(slot);
            self.core.sessions.give_back(memory.session(), 1);
            return memory.came_back();
        }
        self.release_more(memory);
    }

    #[inline(never)]
    fn release_more(&mut self, memory: Segments) {
        let mut count = 0;
        for run in memory.as_slice() {
            for slot in self.core.slots.slots_of(*run) {
                self.core.slots.unlend(slot);
                count += 1;
            }
        }
        self.core.sessions.give_back(memory.session(), count);
        self.core.lists.take_back(memory);
    }

    /// Starts a turn and sets its time.
    #[inline(always)]
    pub(crate) fn tick(&mut self, now: Micros) {
        self.core.clock.tick(now);
    }

    /// Collects the operations that the store completed, for [`Self::turn`]. Returns whether there
    /// are any.
    #[inline(always)]
    pub(crate) fn reap(&mut self) -> bool {
        self.core.store.reap()
    }

    /// Whether an operation waits for the store, a job for memory, or a dirty block for its time.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        let waiting = self.core.store.waiting() | self.memory.waiting();
        let waiting = waiting | self.core.sessions.waiting();
        waiting | self.core.slots.dirty() > 0
    }

    /// Acts on completed store operations, if [`Self::reap`] found any, and continues waiting work.
    /// Returns whether there was anything to do, and whether any work waited.
    #[inline]
    pub(crate) fn turn(&mut self, reaped: bool) -> (bool, bool) {
        if reaped {
            self.take_done();
        }
        let waits = self.has_waiting();
        (reaped | (waits && self.let_waiting_go_on()), waits)
    }

    /// The time from which a turn must continue waiting work even if it finds nothing else to do.
    /// `None`: no work waits.
    pub(crate) fn looks_at(&self) -> Option<Micros> {
        let core = &self.core;
        if core.store.waiting() | self.memory.waiting() | core.sessions.waiting() > 0 {
            return Some(Micros::default());
        }
        // Dirty blocks fall due in whole milliseconds. Their other causes come with a turn that
        // finds work anyway.
        (core.slots.dirty() > 0).then(|| core.clock.now().later(1000))
    }

    // Continues work that waits for the store, for memory, or for the time of its write-back. True:
    // the next turn has more of this work in any case.
    #[inline(never)]
    fn let_waiting_go_on(&mut self) -> bool {
        if self.core.store.waiting() > 0 {
            self.core.store.submit_waiting(&mut self.core.volumes, &mut self.core.lists);
        }
        if self.core.sessions.waiting() > 0 {
            self.retry_sessions();
        }
        if self.memory.waiting() > 0 {
            self.retry_memory();
        }
        self.write_backs.start_due(&mut self.core);
        self.run_granted();
        let trims = self.memory.is_trim_due() && self.trim();
        trims || self.memory.is_short() && self.core.slots.is_cut()
    }

    #[inline(never)]
    fn take_done(&mut self) {
        while let Some(done) = self.core.store.next_done() {
            if !BlockWrites::has_token(done.token) {
                self.on_op_done(done);
            } else if !write_job::finish_one(&mut self.core, &mut self.write_backs, done) {
                unknown_op(done);
            }
            if self.core.locks.has_granted() {
                self.run_granted();
            }
        }
        self.run_granted();
    }

    #[inline(never)]
    fn on_op_done(&mut self, done: OpDone) {
        let Some((job, len)) = self.core.jobs.of_token(done.token) else {
            return unknown_op(done);
        };
        let error = match done.result {
            // The store promises all bytes or an error; a short result would pass for data.
            Ok(bytes) if len > 0 && bytes != len => Some(Errno::EIO),
            Ok(_) => None,
            Err(errno) => Some(errno),
        };
        let entry = self.core.jobs.get(job);
        let (volume, kind) = (entry.span.volume, entry.kind);
        let is_last = entry.op_ended(error);
        self.core.op_ended(volume, kind, error);
        if is_last {
            self.on_stored(job);
        }
    }

    // All store operations of a job ended.
    fn on_stored(&mut self, job: u32) {
        let (core, write_backs) = (&mut self.core, &mut self.write_backs);
        match core.jobs.peek(job).kind {
            JobKind::Read => read_job::finish(core, job),
            JobKind::Write { .. } => write_job::finish(core, write_backs, job),
            JobKind::Merge => write_job::finish_merge(core, write_backs, job),
            JobKind::Change(_) => discard_zero::finish(core, write_backs, job),
            JobKind::WriteBack { .. } => write_backs.finish(core, job),
            JobKind::Sync => core.finish(job),
            kind @ (JobKind::Free
            | JobKind::Reserve
            | JobKind::Flush { .. }
            | JobKind::LockRange) => {
                debug_assert!(false, "an operation of {kind:?} ended");
            }
        }
    }

    // A job was granted the lock for which it waited.
    fn on_granted(&mut self, job: u32) {
        self.core.jobs.get(job).lock_granted();
        self.on_lock(job);
    }

    // A job holds its lock.
    fn on_lock(&mut self, job: u32) {
        let (core, write_backs) = (&mut self.core, &mut self.write_backs);
        match core.jobs.peek(job).kind {
            JobKind::Read => read_job::fill(core, job),
            JobKind::Write { .. } => write_job::locked(core, write_backs, job),
            JobKind::WriteBack { .. } => write_backs.locked(core, job),
            JobKind::Change(_) => discard_zero::submit(core, job),
            JobKind::LockRange => {
                let (from, name) = (core.jobs.peek(job).from, core.jobs.id(job));
                if let Some(to) = from {
                    core.answers.reply(ShardReply::RangeLocked { to, job: name });
                }
            }
            kind => debug_assert!(false, "a lock was granted to {kind:?}"),
        }
    }

    // Continues the jobs that were granted their locks. A job that ends at once may grant more
    // locks; their jobs follow.
    #[inline]
    pub(super) fn run_granted(&mut self) {
        while let Some(job) = self.core.locks.next_granted() {
            self.on_granted(job);
        }
        if self.stopping.is_some() {
            self.go_on_stopping();
        }
    }

    // Makes a job wait for its session's limit, for its volume's share and for memory, or continues
    // the job if it gets all three.
    fn enter(&mut self, job: u32) {
        if self.enter_session(job) && self.enter_share(job) {
            self.stand_in_line(job);
        }
    }

    #[inline(always)]
    fn enter_session(&mut self, job: u32) -> bool {
        let entered = self.core.promise(job);
        self.core.counters.memory_waits += u64::from(!entered);
        entered
    }

    #[inline(always)]
    fn enter_share(&mut self, job: u32) -> bool {
        let entry = self.core.jobs.get(job);
        let entered = self.memory.enter_share(&mut self.core.volumes, job, entry);
        if !entered {
            self.core.jobs.get(job).waits(self.core.clock.now());
        }
        self.core.counters.memory_waits += u64::from(!entered);
        entered
    }

    fn stand_in_line(&mut self, job: u32) {
        if self.memory.is_short() || !self.with_memory(job) {
            self.wait_for_memory(job);
        }
    }

    fn wait_for_memory(&mut self, job: u32) {
        self.core.counters.memory_waits += 1;
        self.core.jobs.get(job).waits(self.core.clock.now());
        self.memory.wait(job);
    }

    // Continues jobs that waited for their sessions' limits.
    fn retry_sessions(&mut self) {
        while let Some((job, slots)) = self.core.sessions.promise_next(self.core.slots.pinned()) {
            self.core.jobs.get(job).promised = slots;
            if self.enter_share(job) {
                self.stand_in_line(job);
            }
            self.run_granted();
        }
    }

    // Continues jobs that waited for memory, or for their volume's share of it.
    fn retry_memory(&mut self) {
        if self.memory.without_share() > 0 {
            self.core.volumes.indexes().for_each(|volume| self.retry_share(volume));
        }
        if !self.memory.should_try(&mut self.core.slots, self.core.clock.now_ms()) {
            return;
        }
        while let Some(job) = self.memory.first() {
            if !self.with_memory(job) {
                return;
            }
            self.memory.first_served();
            self.run_granted();
        }
    }

    // Continues a volume's jobs that waited for its share.
    fn retry_share(&mut self, volume: VolumeIndex) {
        while let Some(state) = self.core.volumes.get_mut(volume)
            && let Some(&job) = state.share.waiting.front()
            && self.memory.take_share(&mut self.core.volumes, self.core.jobs.get(job))
        {
            self.memory.has_share();
            if let Some(state) = self.core.volumes.get_mut(volume) {
                state.share.waiting.pop_front();
            }
            self.stand_in_line(job);
            self.run_granted();
        }
    }

    // Allocates a job's memory and continues the job. False: too few slots are free, and nothing
    // changed.
    fn with_memory(&mut self, job: u32) -> bool {
        let core = &mut self.core;
        let entry = core.jobs.peek(job);
        match entry.kind {
            JobKind::Read => read_job::with_memory(core, job),
            JobKind::Reserve => {
                let (from, name) = (entry.from, core.jobs.id(job));
                let Some(memory) = core.reserve(job) else { return false };
                core.jobs.get(job).waited(core.clock.now());
                match from {
                    Some(to) => {
                        core.answers.reply(ShardReply::Reserved { to, job: name, memory });
                    }
                    None => debug_assert!(false, "a reservation without an asker: {memory:?}"),
                }
                true
            }
            JobKind::Change(_) | JobKind::LockRange => {
                let edges = entry.edges_needed();
                if !core.allocate(job, 0, edges) {
                    return false;
                }
                if core.lock(job) {
                    self.on_lock(job);
                }
                true
            }
            kind => {
                debug_assert!(false, "{kind:?} waits for memory");
                true
            }
        }
    }

    fn sync(&mut self, from: Option<PartToken>, volume: VolumeIndex) {
        let job = self.core.start(JobKind::Sync, from, volume, 0, 0);
        self.core.submit(job, OpKind::Flush, 0, &[]);
    }

    /// Time until [`Self::turn`] has work that no completion announces.
    #[must_use]
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        let write_back = self.write_backs.deadline_ms(&self.core).map(Duration::from_millis);
        let looks_at = self.stopping.as_ref().and_then(ShardStopping::looks_at);
        let now = self.core.clock.now();
        let retry = looks_at.map(|at| Duration::from_micros(at.since(now)));
        write_back.into_iter().chain(retry).min()
    }

    /// Whether no request and no store operation is running.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let core = &self.core;
        core.jobs.len() == 0 && core.block_writes.len() == 0 && core.store.in_flight() == 0
    }

    /// Starts to stop, and in later calls continues: writes dirty blocks to the stores, then makes
    /// every store durable. From the first call on, writes are acknowledged only from the store.
    /// Refused flushes are retried after a pause, as long as this is called.
    pub(crate) fn stop(&mut self) {
        if self.stopping.is_none() {
            self.write_backs.stop();
            self.stopping = Some(ShardStopping::new(self.core.volumes.writable()));
        }
        self.run_granted();
    }

    // Starts the next step of each volume's end.
    #[cold]
    fn go_on_stopping(&mut self) {
        let Some(mut stopping) = self.stopping.take() else { return };
        let now = self.core.clock.now();
        loop {
            for own in self.core.answers.take_own() {
                stopping.ended(own, now);
            }
            let core = &self.core;
            let is_dirty = |volume| {
                let writable = core.volumes.get(volume).filter(|state| !state.is_read_only());
                writable.map(|_| core.slots.counts(volume).dirty > 0)
            };
            match stopping.next(now, is_dirty) {
                Some((volume, StopStep::Flush)) => {
                    self.write_backs.flush(&mut self.core, None, volume);
                }
                Some((volume, StopStep::Sync)) => self.sync(None, volume),
                None => break,
            }
        }
        self.stopping = Some(stopping);
    }

    /// After [`Self::stop`]: whether all acknowledged writes are durable. `None` while this is
    /// unknown.
    #[must_use]
    pub(crate) fn stopped(&self) -> Option<bool> {
        let clean = self.stopping.as_ref()?.outcome()?;
        self.is_idle().then_some(clean && self.core.slots.dirty() == 0)
    }

    /// Volumes with acknowledged writes that are not durable, or not known to be durable, and
    /// volumes with writes at the store, which may still change data there.
    #[must_use]
    pub(crate) fn unsaved(&self) -> Vec<Unsaved> {
        let core = &self.core;
        let mut unsaved: Vec<_> = match &self.stopping {
            Some(stopping) => stopping.unsaved().collect(),
            None => core.volumes.writable().into_iter().map(|volume| (volume, None)).collect(),
        };
        for volume in core.volumes.indexes() {
            let is_listed = unsaved.iter().any(|(other, _)| *other == volume);
            let is_writable = core.volumes.get(volume).is_some_and(|state| !state.is_read_only());
            let may_change =
                is_writable && (core.jobs.change(volume) || core.block_writes.has_any_of(volume));
            if !is_listed && (may_change || core.slots.counts(volume).dirty > 0) {
                unsaved.push((volume, None));
            }
        }
        unsaved.into_iter().map(|(volume, errno)| self.unsaved_of(volume, errno)).collect()
    }

    /// After [`Self::stop`]: the volumes of [`Self::unsaved`] with a store that returned an error.
    #[must_use]
    pub(crate) fn refused(&self) -> Vec<Unsaved> {
        let unsaved = self.stopping.iter().flat_map(ShardStopping::unsaved);
        let refused = unsaved.filter(|(_, errno)| errno.is_some());
        refused.map(|(volume, errno)| self.unsaved_of(volume, errno)).collect()
    }

    fn unsaved_of(&self, volume: VolumeIndex, refused: Option<Errno>) -> Unsaved {
        let dirty = u64::from(self.core.slots.counts(volume).dirty);
        Unsaved::new(volume, dirty * wide64(SLOT_BYTES), refused)
    }
}

// The store ended an operation that was not running: the store ended it twice, or this code has a
// bug.
#[cold]
fn unknown_op(done: OpDone) {
    debug_assert!(false, "the store has done an operation that is not under way: {done:?}");
    tracing::error!(token = done.token.0, "bug: the store ended an operation twice");
}
