//! [`WriteBacks`]: dirty blocks on their way to the store, and the flushes that wait for them.
//!
//! The dirty slots of a volume are in a list, ordered by the acknowledgement of their oldest write.
//! A write-back takes the oldest, joins the dirty neighbours of its block, waits for the lock on
//! the range and writes the whole range in one operation. A write-back starts when a flush asks for
//! it, when a block has been dirty for [`write_back_delay`](super::ShardOptions::write_back_delay),
//! or when half of the room for dirty blocks is taken, or half of the volume's maximum.
//!
//! A flush covers every block that was dirty when it came: it waits until neither the list nor a
//! running write-back has a write as old as that. A block that is written again before that keeps
//! its age, so the flush waits for the newer data rather than miss the older. A write-back that
//! fails puts its blocks back into their places and fails the flushes that cover them. The blocks
//! stay dirty. Every flush retries them, and so does the shard after a while.

use std::ops::Range;

use nix::errno::Errno;

use super::core::ShardCore;
use super::job::{JobBlock, JobKind};
use super::policy::Slot;
use super::shard_messages::PartToken;
use super::slots::{Install, SlotState, Slots};
use super::span::{BLOCK, in_one_stripe};
use super::{SLOT_BYTES, ShardOptions};
use crate::cache::shard_clock::Clock;
use crate::store::{OpKind, Store};
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;
use crate::volume::timing::Spent;

/// Most write-backs of a volume at the store at a time, in one shard that does not stop.
const IN_FLIGHT: usize = 16;
/// Wait before a failed write-back is retried: at first, and at most.
const BACKOFF_MS: Range<u32> = 1000..30_000;

/// The write-backs of a shard, and the flushes that wait for them.
#[derive(Debug)]
pub(super) struct WriteBacks {
    // Job numbers.
    under_way: Vec<u32>,
    flushes: Vec<u32>,
    // Most slots that may be dirty.
    dirty_max: usize,
    delay_ms: u32,
    // Most blocks of one write-back.
    blocks_max: u64,
    // Blocks of writes that become dirty after their edges are read.
    merging: usize,
    // Rises with every write that makes blocks dirty.
    order: u64,
    // The shard stops: writes are acknowledged only from the store.
    stopping: bool,
}

impl WriteBacks {
    pub(super) fn new(options: &ShardOptions, dirty_max_bytes: usize) -> Self {
        let delay_ms = u32::try_from(options.write_back_delay.as_millis()).unwrap_or(u32::MAX);
        Self {
            under_way: Vec::with_capacity(64),
            flushes: Vec::with_capacity(64),
            dirty_max: dirty_max_bytes / SLOT_BYTES,
            delay_ms,
            blocks_max: u64::from(options.write_back_max_bytes) / BLOCK,
            merging: 0,
            order: 0,
            stopping: false,
        }
    }

    /// The shard stops.
    pub(super) fn stop(&mut self) {
        self.stopping = true;
    }

    /// Most slots that may be dirty.
    pub(super) fn dirty_max(&self) -> usize {
        self.dirty_max
    }

    /// Whether this many more blocks of a volume may be dirty. A volume with a failing store has no
    /// room: its users learn of the failure from their writes, and the volume does not take the
    /// others' room. A volume also has no room above its maximum.
    #[inline]
    pub(super) fn has_room(&self, slots: &Slots, volume: VolumeIndex, more: usize) -> bool {
        let more = self.merging + more;
        slots.dirty() + slots.outdated() + more <= self.dirty_max
            && !self.stopping
            && slots.may_be_dirty(volume, more)
    }

    /// A write of this many blocks starts to read its edges; after that its blocks become dirty.
    pub(super) fn merge_begins(&mut self, blocks: usize) {
        self.merging += blocks;
    }

    /// The edges of the write are read, or the write failed.
    pub(super) fn merge_ended(&mut self, blocks: usize) {
        self.merging -= blocks;
    }

    /// The index entry of the next write-back write.
    #[inline]
    pub(super) fn next_dirty(&mut self, clock: &Clock) -> Install {
        self.order += 1;
        Install::Dirty { order: self.order, now_ms: clock.now_ms() }
    }

    /// Hands every block that is dirty now to the store, and then answers. A flush without an asker
    /// is part of the shard's stop.
    pub(super) fn flush<S: Store>(
        &mut self,
        core: &mut ShardCore<S>,
        from: Option<PartToken>,
        volume: VolumeIndex,
    ) {
        if core.volumes.mode(volume) != CacheMode::WriteBack || self.oldest(core, volume).is_none()
        {
            return core.answers.ended(from, volume, Ok(()), Spent::default());
        }
        let job = core.start(JobKind::Flush { order: self.order }, from, volume, 0, 0);
        self.flushes.push(job);
        self.start_due(core);
    }

    // The order of a volume's oldest acknowledged write that is not in the store.
    fn oldest<S: Store>(&self, core: &ShardCore<S>, volume: VolumeIndex) -> Option<u64> {
        let listed = core.slots.oldest_dirty(volume).map(|slot| core.slots.since(slot).0);
        let under_way = self.under_way.iter().map(|job| core.jobs.peek(*job));
        let of_volume = under_way.filter(|job| job.span.volume == volume);
        let orders = of_volume.filter_map(|job| match job.kind {
            JobKind::WriteBack { oldest } => Some(oldest),
            _ => None,
        });
        orders.chain(listed).min()
    }

    // Answers the flushes of a volume that `ends` selects by their order.
    fn end_flushes<S: Store>(
        &mut self,
        core: &mut ShardCore<S>,
        volume: VolumeIndex,
        result: Result<(), Errno>,
        ends: impl Fn(u64) -> bool,
    ) {
        self.flushes.retain(|&flush| {
            let job = core.jobs.peek(flush);
            let JobKind::Flush { order } = job.kind else {
                debug_assert!(false, "a flush has become {:?}", job.kind);
                return false;
            };
            let over = job.span.volume == volume && ends(order);
            if over {
                core.answers.ended(job.from, volume, result, Spent::at_store());
                core.end(flush);
            }
            !over
        });
    }

    /// Fails the flushes of an abandoned volume.
    pub(super) fn give_up<S: Store>(&mut self, core: &mut ShardCore<S>, volume: VolumeIndex) {
        self.end_flushes(core, volume, Err(Errno::ENXIO), |_| true);
    }

    /// Starts the write-backs that are due.
    pub(super) fn start_due<S: Store>(&mut self, core: &mut ShardCore<S>) {
        if core.slots.dirty() == 0 {
            return;
        }
        let crowded = core.slots.dirty() * 2 > self.dirty_max;
        // A stopping shard tries every block: old blocks that the store refuses do not hold back
        // others.
        let most = if self.stopping { usize::MAX } else { IN_FLIGHT };
        for volume in core.volumes.indexes() {
            if core.slots.oldest_dirty(volume).is_none() {
                continue;
            }
            let rests = rests(core, volume);
            let crowded = crowded || core.slots.is_crowded(volume);
            for _ in under_way(core, volume)..most {
                let Some(slot) = core.slots.oldest_dirty(volume) else { break };
                let (order, since_ms) = core.slots.since(slot);
                let old = core.clock.now_ms().wrapping_sub(since_ms) >= self.delay_ms;
                let due = !rests && (crowded || old);
                if !(due || self.is_asked_for(core, volume, order)) {
                    break;
                }
                self.start(core, volume, slot);
            }
        }
    }

    // Whether a flush of a volume covers a write of this order.
    fn is_asked_for<S: Store>(&self, core: &ShardCore<S>, volume: VolumeIndex, write: u64) -> bool {
        self.flushes.iter().map(|flush| core.jobs.peek(*flush)).any(|flush| {
            let covers = matches!(flush.kind, JobKind::Flush { order } if order >= write);
            covers && flush.span.volume == volume
        })
    }

    // Starts the write-back of a dirty slot and of its dirty neighbours.
    fn start<S: Store>(&mut self, core: &mut ShardCore<S>, volume: VolumeIndex, slot: Slot) {
        let blocks = self.dirty_run(core, volume, core.slots.block(slot));
        let (offset, len) = (blocks.start * BLOCK, (blocks.end - blocks.start) * BLOCK);
        let job = core.start(JobKind::WriteBack { oldest: u64::MAX }, None, volume, offset, len);
        let mut oldest = u64::MAX;
        for block in blocks {
            let Some(slot) = core.slots.find(volume, block) else {
                debug_assert!(false, "block {block} was dirty just now");
                break;
            };
            oldest = oldest.min(core.slots.since(slot).0);
            core.slots.begin_writing(slot);
            core.jobs.get(job).blocks.push(JobBlock::own(slot));
        }
        core.jobs.get(job).kind = JobKind::WriteBack { oldest };
        self.under_way.push(job);
        if let Some(state) = core.volumes.get_mut(volume) {
            state.write_backs.under_way += 1;
        }
        if core.lock(job) {
            self.locked(core, job);
        }
    }

    // The dirty blocks around a dirty block, at most the length of one write-back.
    fn dirty_run<S: Store>(
        &self,
        core: &ShardCore<S>,
        volume: VolumeIndex,
        middle: u64,
    ) -> Range<u64> {
        let slots = &core.slots;
        let joins = |block: u64| {
            in_one_stripe(block, middle)
                && slots
                    .find(volume, block)
                    .is_some_and(|slot| slots.state(slot) == SlotState::Dirty)
        };
        let mut run = middle..middle + 1;
        while run.start > 0 && run.end - run.start < self.blocks_max && joins(run.start - 1) {
            run.start -= 1;
        }
        while run.end - run.start < self.blocks_max && joins(run.end) {
            run.end += 1;
        }
        run
    }

    /// A write-back has its lock: writes the blocks that were not recalled.
    pub(super) fn locked<S: Store>(&mut self, core: &mut ShardCore<S>, job: u32) {
        let entry = core.jobs.get(job);
        entry.op_begins();
        let (span, count) = (entry.span, entry.blocks.len());
        let mut run = 0..0;
        for at in 0..=count {
            if at < count && core.jobs.peek(job).blocks[at].own {
                run = if run.is_empty() { at..at + 1 } else { run.start..at + 1 };
            } else if !run.is_empty() {
                let (offset, len) = span.bytes_of(&run);
                core.counters.write_backs += 1;
                core.counters.write_back_bytes += u64::from(len);
                core.transfer(job, OpKind::Write { offset, len, fua: false }, run, 0);
                run = 0..0;
            }
        }
        if core.jobs.get(job).op_ended(None) {
            // All blocks were recalled.
            self.finish(core, job);
        }
    }

    /// The store ended a write-back, with or without an error.
    pub(super) fn finish<S: Store>(&mut self, core: &mut ShardCore<S>, job: u32) {
        let entry = core.jobs.peek(job);
        let (error, volume) = (entry.error(), entry.span.volume);
        let JobKind::WriteBack { oldest } = entry.kind else {
            return debug_assert!(false, "a write-back has become {:?}", entry.kind);
        };
        for block in entry.blocks.iter().filter(|block| block.own) {
            match error {
                None => core.slots.written(block.slot),
                Some(_) => core.slots.not_written(block.slot, true),
            }
        }
        self.under_way.retain(|other| *other != job);
        core.end(job);
        note_result(core, volume, error);
        if let Some(errno) = error {
            self.end_flushes(core, volume, Err(errno), |flush| flush >= oldest);
        }
        let oldest = self.oldest(core, volume);
        self.end_flushes(core, volume, Ok(()), |flush| oldest.is_none_or(|oldest| flush < oldest));
    }

    /// Takes the blocks of a range back from write-backs that wait for the range's lock: the lock's
    /// holder has newer blocks. The blocks are dirty again. The latest write-back goes first: so
    /// blocks of older write-backs find the newer data dirty, which then takes over their age.
    #[inline(always)]
    pub(super) fn recall<S: Store>(
        &mut self,
        core: &mut ShardCore<S>,
        volume: VolumeIndex,
        first: u64,
        last: u64,
    ) {
        if !self.under_way.is_empty() {
            self.recall_from_write_backs(core, volume, first, last);
        }
    }

    fn recall_from_write_backs<S: Store>(
        &mut self,
        core: &mut ShardCore<S>,
        volume: VolumeIndex,
        first: u64,
        last: u64,
    ) {
        for job in self.under_way.iter().rev() {
            let entry = core.jobs.get(*job);
            let span = entry.span;
            let apart = span.last() < first || span.first() > last;
            if span.volume != volume || entry.has_lock() || apart {
                continue;
            }
            for (block, entry) in (span.first()..).zip(&mut entry.blocks) {
                if entry.own && (first..=last).contains(&block) {
                    entry.own = false;
                    core.slots.not_written(entry.slot, false);
                }
            }
        }
    }

    /// Milliseconds until a block is due without a flush. `None`: no block is dirty, or the end of
    /// a write-back restarts the work.
    pub(super) fn deadline_ms<S: Store>(&self, core: &ShardCore<S>) -> Option<u64> {
        if core.slots.dirty() == 0 {
            return None;
        }
        let now_ms = core.clock.now_ms();
        let left_of = |volume: VolumeIndex| {
            let slot = core.slots.oldest_dirty(volume)?;
            let state = core.volumes.get(volume)?;
            if state.write_backs.under_way >= IN_FLIGHT {
                return None;
            }
            let (_, since_ms) = core.slots.since(slot);
            let left = self.delay_ms.saturating_sub(now_ms.wrapping_sub(since_ms));
            let rest = state.write_backs.retry_at_ms.map_or(0, |at| ms_until(at, now_ms));
            Some(u64::from(left.max(rest).max(1)))
        };
        core.volumes.indexes().filter_map(left_of).min()
    }

    /// Running write-backs, and waiting flushes.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.under_way.len(), self.flushes.len())
    }
}

// Milliseconds from `now_ms` to `then_ms`, both modulo 2^32. 0: the time has passed.
fn ms_until(then_ms: u32, now_ms: u32) -> u32 {
    let left = then_ms.wrapping_sub(now_ms);
    if left.cast_signed() < 0 { 0 } else { left }
}

// Whether a volume pauses after a failed write-back. The pause ends with its time, or when no
// failed block is left. The time is then cleared, since the clock may wrap later.
fn rests<S: Store>(core: &mut ShardCore<S>, volume: VolumeIndex) -> bool {
    let (now_ms, failed) = (core.clock.now_ms(), core.slots.failed(volume));
    // Only volumes with a store have dirty blocks.
    let Some(state) = core.volumes.get_mut(volume) else { return false };
    let retry = &mut state.write_backs.retry_at_ms;
    *retry = retry.filter(|at| failed > 0 && ms_until(*at, now_ms) > 0);
    retry.is_some()
}

// Running write-backs of a volume.
fn under_way<S: Store>(core: &ShardCore<S>, volume: VolumeIndex) -> usize {
    core.volumes.get(volume).map_or(0, |state| state.write_backs.under_way)
}

// A write-back of a volume ended: after a failure the volume pauses.
fn note_result<S: Store>(core: &mut ShardCore<S>, volume: VolumeIndex, error: Option<Errno>) {
    let (now_ms, failed) = (core.clock.now_ms(), core.slots.failed(volume));
    let Some(state) = core.volumes.get_mut(volume) else {
        return debug_assert!(false, "a write-back of volume {}, which has no store", volume.0);
    };
    let write_backs = &mut state.write_backs;
    write_backs.under_way -= 1;
    if error.is_some() {
        let backoff = write_backs.backoff_ms * 2;
        write_backs.backoff_ms = backoff.clamp(BACKOFF_MS.start, BACKOFF_MS.end);
        write_backs.retry_at_ms = Some(now_ms.wrapping_add(write_backs.backoff_ms));
    } else if failed == 0 {
        (write_backs.retry_at_ms, write_backs.backoff_ms) = (None, 0);
    }
}
