//! Dirty blocks on their way to the store, and the flushes that wait for them.
//!
//! Dirty slots of a volume stand in a list in the order in which their oldest write was
//! acknowledged. A write-back takes the oldest, joins the dirty neighbours of its block, waits for
//! the lock on the range and writes all of it in one operation. It begins when a flush asks for it,
//! when a block has been dirty for [`write_back_delay`](super::ShardOptions::write_back_delay), or
//! when half of the room for dirty blocks is taken.
//!
//! A flush covers every block that was dirty when it came: it waits until the list has nothing as
//! old and no write-back with anything as old is on its way. A block that is written again
//! meanwhile stays as old as it was, so the flush waits for the newer data rather than miss the
//! older. A write-back that fails puts its blocks back where they were and fails the flushes that
//! cover them; the blocks stay dirty, are tried again by every flush, and now and then by
//! ourselves.

use std::ops::Range;

use super::SLOT_BYTES;
use super::job::{Entry, Kind};
use super::message::PartToken;
use super::shard::{Shard, Stopping};
use super::slots::State;
use crate::store::{Store, VolumeIndex};
use crate::volume::CacheMode;

/// Write-backs of a volume on their way at a time, in one shard.
const IN_FLIGHT: usize = 16;
/// Wait before a failed write-back is tried again: at first, and at most.
const BACKOFF_MS: Range<u32> = 1000..30_000;

impl<S: Store> Shard<S> {
    pub(super) fn flush(&mut self, from: Option<PartToken>, volume: VolumeIndex) {
        let write_back = self.volume(volume).is_some_and(|v| v.cache == CacheMode::WriteBack);
        if !write_back {
            return self.done(from, Ok(()));
        }
        let job = self.start(Kind::Flush, from, volume, 0, 0);
        self.jobs.get(job).order = self.order;
        if self.oldest(volume).is_none() {
            return self.end_flush(job, None);
        }
        self.flushes.push(job);
        self.pump();
    }

    // The oldest acknowledged write of a volume that is not in the store.
    fn oldest(&self, volume: VolumeIndex) -> Option<u64> {
        let listed = self.slots.oldest_dirty(volume).map(|slot| self.slots.since(slot).0);
        let under_way = self.write_backs.iter().map(|job| self.jobs.peek(*job));
        under_way.filter(|job| job.volume == volume).map(|job| job.order).chain(listed).min()
    }

    // Answers the flushes of a volume whose blocks are all in the store.
    fn end_flushes(&mut self, volume: VolumeIndex) {
        let oldest = self.oldest(volume);
        self.end_flushes_if(volume, None, |order| oldest.is_none_or(|oldest| order < oldest));
    }

    fn end_flushes_if(
        &mut self,
        volume: VolumeIndex,
        error: Option<nix::errno::Errno>,
        ends: impl Fn(u64) -> bool,
    ) {
        let mut flushes = std::mem::take(&mut self.flushes);
        flushes.retain(|&flush| {
            let job = self.jobs.peek(flush);
            let goes = job.volume == volume && ends(job.order);
            if goes {
                self.end_flush(flush, error);
            }
            !goes
        });
        // Ending one begins no other.
        debug_assert!(self.flushes.is_empty());
        self.flushes = flushes;
    }

    fn end_flush(&mut self, flush: u32, error: Option<nix::errno::Errno>) {
        let from = self.jobs.get(flush).from;
        self.done(from, error.map_or(Ok(()), Err));
        self.end(flush);
        if from.is_none() {
            self.stop_job_ended(error);
        }
    }

    /// Begins the write-backs that are due.
    pub(super) fn pump(&mut self) {
        if self.slots.dirty() == 0 {
            return;
        }
        let crowded = self.slots.dirty() * SLOT_BYTES * 2 > self.options.dirty_max_bytes;
        let delay = u32::try_from(self.options.write_back_delay.as_millis()).unwrap_or(u32::MAX);
        for index in (0u16..).take(self.volumes.len()).map(VolumeIndex) {
            if self.slots.oldest_dirty(index).is_none() {
                continue;
            }
            let rests = self.rests(index);
            for _ in self.under_way(index)..IN_FLIGHT {
                let Some(slot) = self.slots.oldest_dirty(index) else { break };
                let (order, since_ms) = self.slots.since(slot);
                let jobs = &mut self.jobs;
                let asked = self.flushes.iter().any(|flush| {
                    let flush = jobs.get(*flush);
                    flush.volume == index && flush.order >= order
                });
                let old = self.now_ms.wrapping_sub(since_ms) >= delay;
                if !(asked || !rests && (crowded || old)) {
                    break;
                }
                self.begin_write_back(index, slot);
            }
        }
    }

    // Whether a volume rests after a failed write-back. The rest is forgotten when it is over, or
    // when no block that failed is left: later the clock might have gone round.
    fn rests(&mut self, volume: VolumeIndex) -> bool {
        let (now, failed) = (self.now_ms, self.slots.failed(volume));
        let Some(state) = self.volume(volume) else { return false };
        state.retry_at_ms =
            state.retry_at_ms.filter(|at| failed > 0 && at.wrapping_sub(now).cast_signed() > 0);
        state.retry_at_ms.is_some()
    }

    // Write-backs of a volume on their way.
    fn under_way(&self, volume: VolumeIndex) -> usize {
        let state = self.volumes.get(usize::from(volume.0)).and_then(Option::as_ref);
        state.map_or(0, |state| state.write_backs)
    }

    fn begin_write_back(&mut self, volume: VolumeIndex, slot: super::policy::Slot) {
        let middle = self.slots.block(slot);
        let most = u64::from(self.options.write_back_max_bytes) / SLOT_BYTES as u64;
        let slots = &self.slots;
        let joins = |block: u64| {
            Self::same_stripe(block, middle)
                && slots.find(volume, block).is_some_and(|s| slots.state(s) == State::Dirty)
        };
        let mut first = middle;
        while first > 0 && middle - first + 1 < most && joins(first - 1) {
            first -= 1;
        }
        let mut last = middle;
        while last - first + 1 < most && joins(last + 1) {
            last += 1;
        }
        let size = SLOT_BYTES as u64;
        let offset = first * size;
        let job = self.start(Kind::WriteBack, None, volume, offset, (last - first + 1) * size);
        let mut order = u64::MAX;
        for block in first..=last {
            let Some(slot) = self.slots.find(volume, block) else { break };
            order = order.min(self.slots.since(slot).0);
            self.slots.begin_writing(slot);
            self.jobs.get(job).blocks.push(Entry { slot, own: true });
        }
        self.jobs.get(job).order = order;
        self.write_backs.push(job);
        if let Some(state) = self.volume(volume) {
            state.write_backs += 1;
        }
        self.lock(job);
    }

    pub(super) fn write_back_locked(&mut self, job: u32) {
        let count = self.jobs.get(job).blocks.len();
        self.jobs.get(job).ops += 1;
        let mut run = 0..0;
        for at in 0..=count {
            if at < count && self.jobs.get(job).blocks[at].own {
                run = if run.is_empty() { at..at + 1 } else { run.start..at + 1 };
            } else if !run.is_empty() {
                self.write_out(job, run);
                run = 0..0;
            }
        }
        let entry = self.jobs.get(job);
        entry.ops -= 1;
        if entry.ops == 0 {
            // Everything in it was recalled.
            self.finish_write_back(job);
        }
    }

    pub(super) fn finish_write_back(&mut self, job: u32) {
        let entry = self.jobs.get(job);
        let (error, volume, order) = (entry.error, entry.volume, entry.order);
        for at in 0..entry.blocks.len() {
            let Entry { slot, own } = self.jobs.get(job).blocks[at];
            match (own, error) {
                (false, _) => {}
                (true, None) => self.slots.written(slot),
                (true, Some(_)) => self.slots.not_written(slot, true),
            }
        }
        self.write_backs.retain(|other| *other != job);
        if let Some(state) = self.volume(volume) {
            state.write_backs -= 1;
        }
        self.end(job);
        let now = self.now_ms;
        if let Some(errno) = error {
            if let Some(state) = self.volume(volume) {
                state.backoff_ms = (state.backoff_ms * 2).clamp(BACKOFF_MS.start, BACKOFF_MS.end);
                state.retry_at_ms = Some(now.wrapping_add(state.backoff_ms));
            }
            self.end_flushes_if(volume, Some(errno), |flush| flush >= order);
        } else if self.slots.failed(volume) == 0
            && let Some(state) = self.volume(volume)
        {
            (state.retry_at_ms, state.backoff_ms) = (None, 0);
        }
        self.end_flushes(volume);
    }

    /// Takes the blocks of a range back from write-backs that wait for it: the holder of the lock
    /// has newer ones. They are dirty again. The latest first: so what the older ones had of a
    /// block finds the newer data dirty, which then is as old.
    #[inline]
    pub(super) fn recall(&mut self, volume: VolumeIndex, first: u64, last: u64) {
        if !self.write_backs.is_empty() {
            self.recall_from_write_backs(volume, first, last);
        }
    }

    fn recall_from_write_backs(&mut self, volume: VolumeIndex, first: u64, last: u64) {
        for at in (0..self.write_backs.len()).rev() {
            let entry = self.jobs.get(self.write_backs[at]);
            let (job_first, job_last) = entry.block_range();
            if entry.volume != volume || entry.holds || job_last < first || job_first > last {
                continue;
            }
            let mut blocks = std::mem::take(&mut entry.blocks);
            for (block, entry) in (job_first..).zip(&mut blocks) {
                if entry.own && (first..=last).contains(&block) {
                    entry.own = false;
                    self.slots.not_written(entry.slot, false);
                }
            }
            self.jobs.get(self.write_backs[at]).blocks = blocks;
        }
    }

    // Milliseconds until a block is due by itself.
    pub(super) fn write_back_deadline(&self) -> Option<u64> {
        if self.slots.dirty() == 0 {
            return None;
        }
        let delay = u32::try_from(self.options.write_back_delay.as_millis()).unwrap_or(u32::MAX);
        (0u16..)
            .zip(&self.volumes)
            .filter_map(|(index, volume)| {
                let slot = self.slots.oldest_dirty(VolumeIndex(index))?;
                if self.under_way(VolumeIndex(index)) >= IN_FLIGHT {
                    // The end of one of them will wake us.
                    return None;
                }
                let (_, since_ms) = self.slots.since(slot);
                let mut left = delay.saturating_sub(self.now_ms.wrapping_sub(since_ms));
                if let Some(at) = volume.as_ref()?.retry_at_ms {
                    let rest = at.wrapping_sub(self.now_ms);
                    left = left.max(if rest.cast_signed() < 0 { 0 } else { rest });
                }
                Some(u64::from(left.max(1)))
            })
            .min()
    }

    /// Begins the end: what is dirty goes to the store and every store is made durable. Nothing is
    /// acknowledged from memory any more.
    pub fn begin_stop(&mut self) {
        if self.stopping.is_some() {
            return;
        }
        let volumes = self.writable_volumes();
        self.stopping = Some(Stopping { jobs: volumes.len() + 1, syncing: false, clean: true });
        for volume in volumes {
            let write_back = self.volume(volume).is_some_and(|v| v.cache == CacheMode::WriteBack);
            if write_back {
                self.flush(None, volume);
            } else {
                self.stop_job_ended(None);
            }
        }
        self.stop_job_ended(None);
    }

    pub(super) fn stop_job_ended(&mut self, error: Option<nix::errno::Errno>) {
        let Some(stopping) = &mut self.stopping else { return };
        stopping.clean &= error.is_none();
        stopping.jobs -= 1;
        if stopping.jobs > 0 || stopping.syncing {
            return;
        }
        let volumes = self.writable_volumes();
        if let Some(stopping) = &mut self.stopping {
            (stopping.syncing, stopping.jobs) = (true, volumes.len());
        }
        for volume in volumes {
            self.sync(None, volume);
        }
    }

    /// After [`Self::begin_stop`]: whether everything that was acknowledged is durable; none while
    /// that is not known.
    #[must_use]
    pub fn stopped(&self) -> Option<bool> {
        let stopping = self.stopping?;
        let over = stopping.syncing && stopping.jobs == 0 && self.is_idle();
        over.then_some(stopping.clean && self.slots.dirty() == 0)
    }
}
