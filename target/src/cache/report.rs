//! What a shard tells of its volumes: lookups and errors as they happen, counters for anyone to
//! read.
//!
//! The shard counts in plain numbers; [`Shard::publish_volumes`] and
//! [`Shard::publish_some_volumes`] copy them to where other threads may look.

use std::time::Duration;

use nix::errno::Errno;

use super::job::Kind;
use super::shard::{BLOCK, Shard};
use crate::store::{Store, VolumeIndex};
use crate::volume_stats::{LastError, VolumeCounts};

/// Errors of one volume within this time are one burst, and one line of the log.
const BURST: Duration = Duration::from_secs(10);
/// Volumes whose counters are published in one busy turn.
const PUBLISHED_PER_TURN: usize = 8;

impl<S: Store> Shard<S> {
    /// Publishes the counters of every volume.
    pub fn publish_volumes(&self) {
        (0..self.volumes.len()).for_each(|at| self.publish_volume(at));
    }

    /// Publishes the counters of a few volumes, the next ones at the next call: the cost does not
    /// grow with their number.
    pub fn publish_some_volumes(&mut self) {
        for _ in 0..PUBLISHED_PER_TURN.min(self.volumes.len()) {
            self.publish_next = (self.publish_next + 1) % self.volumes.len();
            self.publish_volume(self.publish_next);
        }
    }

    fn publish_volume(&self, at: usize) {
        let Some(Some(state)) = self.volumes.get(at) else { return };
        let slots = self.slots.counts(VolumeIndex(u16::try_from(at).unwrap_or(u16::MAX)));
        let counts = VolumeCounts {
            hits: state.hits,
            misses: state.misses,
            evictions: slots.evictions,
            store_errors: state.store_errors,
            cached_bytes: u64::from(slots.cached) * BLOCK,
            dirty_bytes: u64::from(slots.dirty) * BLOCK,
            failed_blocks: slots.failed.into(),
        };
        state.stats.set(&counts, state.last_error);
    }

    /// Counts blocks that a read asked the cache for.
    pub(super) fn count_lookups(&mut self, volume: VolumeIndex, hits: u64, misses: u64) {
        self.counters.hits += hits;
        self.counters.misses += misses;
        if let Some(state) = self.volume(volume) {
            state.hits += hits;
            state.misses += misses;
        }
    }

    /// Counts an operation that the store failed, and logs the first of a burst.
    pub(super) fn note_error(&mut self, volume: VolumeIndex, kind: Kind, errno: Errno) {
        self.counters.store_errors += 1;
        let (now, began) = (self.now, self.began);
        let Some(state) = self.volume(volume) else { return };
        state.store_errors += 1;
        state.last_error = LastError::new(now.saturating_duration_since(began).as_secs(), errno);
        if state.logged.is_some_and(|at| now.saturating_duration_since(at) < BURST) {
            state.unlogged += 1;
            return;
        }
        let more = std::mem::take(&mut state.unlogged);
        state.logged = Some(now);
        tracing::error!(volume = volume.0, job = ?kind, %errno, since_last = more, "the store failed");
    }
}
