//! [`ShardVolumes`]: a shard's state of each volume, and the counters it publishes.
//!
//! A shard counts in plain numbers. [`ShardVolumes::publish`] and
//! [`ShardVolumes::publish_some`] copy them to memory that other threads read.

use std::collections::VecDeque;
use std::sync::Arc;

use nix::errno::Errno;
use rblk_protocol::width::narrow;
use rblk_runtime::Micros;

use super::job::JobKind;
use super::slots::Slots;
use super::span::{BLOCK, CachedSpan};
use crate::cache::shard_clock::Clock;
use crate::store::{Op, Segment};
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;
use rblk_operate::target::volume_counts::{DirtySince, LastError, VolumeCounts, VolumeStats};

/// Errors of one volume within this many microseconds are one burst, and one line of the log.
const BURST_US: u64 = 10_000_000;
/// Number of volumes that publish their counters in one busy turn.
const PUBLISHED_PER_TURN: usize = 8;

/// A shard's state of a volume.
#[derive(Debug)]
pub(super) struct VolumeState {
    cache: CacheMode,
    size_bytes: u64,
    read_only: bool,
    is_given_up: bool,
    /// Clean slots that the volume keeps when others need memory.
    pub cache_min: u32,
    /// Most slots of the index that the volume may occupy.
    pub cache_max: Option<u32>,
    /// The volume's share of memory.
    pub share: SlotShare,
    /// The volume's operations at the store.
    pub ops: VolumeOps,
    /// The volume's write-backs.
    pub write_backs: VolumeWriteBacks,
    /// The volume's counters and errors.
    pub report: ShardReport,
}

/// The slots that jobs of one volume hold, and the jobs that wait for slots.
#[derive(Debug, Default)]
pub(super) struct SlotShare {
    used: usize,
    /// Waiting jobs, oldest first.
    pub waiting: VecDeque<u32>,
}

impl SlotShare {
    /// Whether the share, of `limit` slots, has `need` left. A volume that uses none may always
    /// take `need`.
    #[inline]
    pub(super) fn has(&self, need: usize, limit: usize) -> bool {
        self.used == 0 || self.used + need <= limit
    }

    /// Takes `need` slots if the share has that many.
    #[inline]
    pub(super) fn take(&mut self, need: usize, limit: usize) -> bool {
        let fits = self.has(need, limit);
        if fits {
            self.used += need;
        }
        fits
    }

    /// Takes one slot, which [`Self::has`] found available.
    #[inline]
    pub(super) fn take_one(&mut self) {
        self.used += 1;
    }

    /// Gives slots of the share back.
    #[inline]
    pub(super) fn give_back(&mut self, slots: usize) {
        debug_assert!(slots <= self.used, "{slots} slots come back of {}", self.used);
        self.used = self.used.saturating_sub(slots);
    }

    /// Slots in use.
    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used
    }
}

/// The operations of one volume at the store, and its waiting operations.
#[derive(Debug, Default)]
pub(super) struct VolumeOps {
    /// At the store.
    pub at_store: usize,
    /// Waiting operations, oldest first, each with its memory.
    pub waiting: VecDeque<(Op, Vec<Segment>)>,
}

impl VolumeOps {
    /// A store operation ended.
    #[inline]
    pub(super) fn ended(&mut self) {
        debug_assert!(self.at_store > 0, "an operation ended that was not at the store");
        self.at_store = self.at_store.saturating_sub(1);
    }
}

/// The state of one volume's write-backs.
#[derive(Debug, Default)]
pub(super) struct VolumeWriteBacks {
    /// Write-backs on their way to the store.
    pub under_way: usize,
    /// After a failure: the time of the retry, in milliseconds.
    pub retry_at_ms: Option<u32>,
    /// The last wait before a retry.
    pub backoff_ms: u32,
}

/// The counters and errors of one volume.
#[derive(Debug)]
pub(super) struct ShardReport {
    hits: u64,
    misses: u64,
    store_errors: u64,
    last_error: LastError,
    // The time of the last logged error, and the number of unlogged errors since.
    logged: Option<Micros>,
    unlogged: u64,
    // The place where the counters are published.
    stats: Arc<VolumeStats>,
}

impl ShardReport {
    /// Counts the blocks of a read as hits and misses.
    #[inline]
    pub(super) fn count_lookups(&mut self, hits: u64, misses: u64) {
        self.hits += hits;
        self.misses += misses;
    }

    /// Counts a failed store operation. Returns the first failure of a burst, to be reported.
    pub(super) fn note_error(
        &mut self,
        volume: VolumeIndex,
        kind: JobKind,
        errno: Errno,
        clock: &Clock,
    ) -> Option<StoreFailure> {
        self.store_errors += 1;
        let now = clock.now();
        self.last_error = LastError::new(clock.seconds(), errno);
        if self.logged.is_some_and(|at| now.since(at) < BURST_US) {
            self.unlogged += 1;
            return None;
        }
        let since_last = std::mem::take(&mut self.unlogged);
        self.logged = Some(now);
        Some(StoreFailure { volume, errno, job: kind.word(), since_last })
    }
}

/// A store began to fail operations of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreFailure {
    /// The volume.
    pub volume: VolumeIndex,
    /// The store's error.
    pub errno: Errno,
    /// The kind of the failed job.
    pub job: &'static str,
    /// Failures since the last reported one.
    pub since_last: u64,
}

/// The volumes of a shard, by index.
#[derive(Debug, Default)]
pub(super) struct ShardVolumes {
    table: Vec<Option<VolumeState>>,
    served: usize,
    // The volume that publishes next.
    publish_next: usize,
}

impl ShardVolumes {
    /// Adds a volume to serve.
    pub(super) fn add(
        &mut self,
        volume: VolumeIndex,
        cache: CacheMode,
        size_bytes: u64,
        read_only: bool,
        stats: Arc<VolumeStats>,
    ) {
        let at = usize::from(volume.0);
        if self.table.len() <= at {
            self.table.resize_with(at + 1, || None);
        }
        self.table[at] = Some(VolumeState {
            cache,
            size_bytes,
            read_only,
            is_given_up: false,
            cache_min: 0,
            cache_max: None,
            share: SlotShare::default(),
            ops: VolumeOps::default(),
            write_backs: VolumeWriteBacks::default(),
            report: ShardReport {
                hits: 0,
                misses: 0,
                store_errors: 0,
                last_error: LastError::default(),
                logged: None,
                unlogged: 0,
                stats,
            },
        });
        self.served = self.iter().count();
    }

    /// Sets the size of a volume.
    pub(super) fn set_size(&mut self, volume: VolumeIndex, size_bytes: u64) {
        if let Some(state) = self.get_mut(volume) {
            state.size_bytes = size_bytes;
        }
    }

    /// Sets the cache mode of a quiet volume.
    pub(super) fn set_cache(&mut self, volume: VolumeIndex, cache: CacheMode) {
        if let Some(state) = self.get_mut(volume) {
            state.cache = cache;
        }
    }

    /// Ends the service of a quiet volume.
    pub(super) fn remove(&mut self, volume: VolumeIndex) {
        if let Some(place) = self.table.get_mut(usize::from(volume.0)) {
            *place = None;
        }
        self.served = self.iter().count();
    }

    /// The state of a volume. `None`: the volume has no store, only memory.
    #[inline]
    pub(super) fn get(&self, volume: VolumeIndex) -> Option<&VolumeState> {
        self.table.get(usize::from(volume.0)).and_then(Option::as_ref)
    }

    /// The state of a volume, to change it.
    #[inline]
    pub(super) fn get_mut(&mut self, volume: VolumeIndex) -> Option<&mut VolumeState> {
        self.table.get_mut(usize::from(volume.0)).and_then(Option::as_mut)
    }

    /// The cache mode of a volume: none if the volume has no store.
    #[inline]
    pub(super) fn mode(&self, volume: VolumeIndex) -> CacheMode {
        self.get(volume).map_or(CacheMode::None, |state| state.cache)
    }

    /// A byte range of a volume.
    #[inline]
    pub(super) fn span(&self, volume: VolumeIndex, offset: u64, len: u64) -> CachedSpan {
        let (cache, volume_bytes) =
            self.get(volume).map_or((CacheMode::None, 0), |state| (state.cache, state.size_bytes));
        CachedSpan { volume, cache, volume_bytes, offset, len }
    }

    /// The states of all volumes.
    pub(super) fn iter(&self) -> impl Iterator<Item = &VolumeState> {
        self.table.iter().flatten()
    }

    /// Volumes served.
    #[inline]
    pub(super) fn served(&self) -> usize {
        self.served
    }

    /// Whether a volume may have dirty blocks.
    pub(super) fn write_back(&self) -> bool {
        self.iter().any(|volume| volume.cache == CacheMode::WriteBack)
    }

    /// Every index that a volume may have.
    pub(super) fn indexes(&self) -> impl Iterator<Item = VolumeIndex> + use<> {
        (0..narrow::<u16, _>(self.table.len())).map(VolumeIndex)
    }

    /// Volumes that may have data to make durable.
    pub(super) fn writable(&self) -> Vec<VolumeIndex> {
        let writable = |volume: &VolumeIndex| self.get(*volume).is_some_and(|v| !v.is_read_only());
        self.indexes().filter(writable).collect()
    }

    /// Publishes the counters of every volume.
    pub(super) fn publish(&self, slots: &Slots) {
        self.indexes().for_each(|volume| self.publish_one(volume, slots));
    }

    /// Publishes the counters of a few volumes, and of the next ones at the next call: the cost
    /// does not grow with the number of volumes.
    pub(super) fn publish_some(&mut self, slots: &Slots) {
        for _ in 0..PUBLISHED_PER_TURN.min(self.table.len()) {
            self.publish_next = (self.publish_next + 1) % self.table.len();
            self.publish_one(VolumeIndex(narrow(self.publish_next)), slots);
        }
    }

    fn publish_one(&self, volume: VolumeIndex, slots: &Slots) {
        // No volume with a store has this index.
        let Some(state) = self.get(volume) else { return };
        let oldest = slots.oldest_dirty(volume).map(|slot| slots.since(slot).1);
        let slots = slots.counts(volume);
        // While all dirty slots are at the store, their age does not change.
        let dirty_since = match oldest {
            None if slots.dirty > 0 => state.report.stats.dirty_since(),
            oldest => DirtySince::new(oldest),
        };
        let report = &state.report;
        let counts = VolumeCounts {
            hits: report.hits,
            misses: report.misses,
            evictions: slots.evictions,
            store_errors: report.store_errors,
            cached_bytes: u64::from(slots.cached) * BLOCK,
            dirty_bytes: u64::from(slots.dirty) * BLOCK,
            failed_blocks: slots.failed.into(),
        };
        report.stats.set(&counts, report.last_error, dirty_since);
    }
}

impl VolumeState {
    /// How the volume is cached.
    #[inline]
    pub(super) fn cache(&self) -> CacheMode {
        self.cache
    }

    /// Marks the volume as abandoned: its data is no longer made durable.
    pub(super) fn give_up(&mut self) {
        self.is_given_up = true;
    }

    /// Allows hosts to write to the volume.
    pub(super) fn open_for_writing(&mut self) {
        self.read_only = false;
    }

    /// Whether no host could write to the volume in this run, or it was abandoned.
    pub(super) fn is_read_only(&self) -> bool {
        self.read_only || self.is_given_up
    }

    /// Whether no operation of the volume is at the store or waits to go there.
    pub(super) fn is_idle(&self) -> bool {
        self.ops.at_store == 0 && self.ops.waiting.is_empty() && self.share.waiting.is_empty()
    }
}
