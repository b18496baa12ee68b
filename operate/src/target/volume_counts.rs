//! [`VolumeStats`]: the counters of one volume in one poll group and its shard. Only their thread
//! writes them; every thread may read them.
//!
//! The shard counts in plain numbers and publishes them every few turns, so its counters may be a
//! few turns old. A sleeping poll group has published all its counters. The poll group's own
//! counters of commands ([`VolumeStats::io`], [`VolumeStats::latency`]) are always current.

use nix::errno::Errno;
use rblk_runtime::Counter;
use serde::{Deserialize, Serialize};

use crate::target::delays::{DelayCounts, Delays};
use crate::target::traffic::{IoCounts, IoStats, VolumeLatency, VolumeTimes};

rblk_runtime::counters! {
    /// The sums of a [`VolumeStats`].
    #[derive(Debug, Default)]
    pub struct VolumeCounters;

    /// The counters of a volume at one moment; also their sum over poll groups. Blocks are of 4
    /// KiB.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct VolumeCounts;

    /// Blocks of 4 KiB that reads found in the cache.
    hits: Counter Number => "rblk_target_volume_cache_hits_total",
    /// Blocks of 4 KiB that reads did not find.
    misses: Counter Number => "rblk_target_volume_cache_misses_total",
    /// Blocks of 4 KiB that left the cache to make room.
    ///
    /// For this volume or another.
    evictions: Counter Number => "rblk_target_volume_cache_evictions_total",
    /// Operations that the store failed.
    store_errors: Counter Number => "rblk_target_volume_store_errors_total",
    /// Bytes in the cache, dirty ones included.
    cached_bytes: Gauge Bytes => "rblk_target_volume_cached_bytes",
    /// Acknowledged bytes that are in memory only.
    dirty_bytes: Gauge Bytes => "rblk_target_volume_dirty_bytes",
    /// Dirty blocks of 4 KiB that the store refused last time.
    ///
    /// The write-back is retried.
    failed_blocks: Gauge Number => "rblk_target_volume_unwritable_blocks",
}

impl VolumeCounts {
    /// Share of the blocks asked for by reads that the cache had; `None` before the first such
    /// read.
    #[must_use]
    pub fn hit_ratio(&self) -> Option<f64> {
        hit_ratio(self.hits, self.misses)
    }
}

pub(super) fn hit_ratio(hits: u64, misses: u64) -> Option<f64> {
    let all = hits.saturating_add(misses);
    // Exact up to 2^53 blocks.
    (all > 0).then(|| hits as f64 / all as f64)
}

/// The last failure of a store, and its time: the latest of several is the maximum.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct LastError(u64);

impl LastError {
    const ERRNO_BITS: u32 = 16;

    /// A failure `at_s` seconds after a moment that all compared values share.
    #[must_use]
    pub fn new(at_s: u64, errno: Errno) -> Self {
        // Errnos are below 4096; 48 bits of seconds do not end. Adds one, so that 0 means no
        // failure.
        let errno = u64::from(u16::try_from(errno as i32).unwrap_or(0));
        Self(((at_s + 1) << Self::ERRNO_BITS) | errno)
    }

    /// Seconds since the failure, where `now_s` counts from the shared moment; `None` without a
    /// failure.
    #[must_use]
    pub fn age_s(self, now_s: u64) -> Option<u64> {
        (self.0 != 0).then(|| now_s.saturating_sub((self.0 >> Self::ERRNO_BITS) - 1))
    }

    /// The errno, 0 for an unnamed one; `None` without a failure.
    #[must_use]
    pub fn errno(self) -> Option<i32> {
        (self.0 != 0).then(|| i32::from((self.0 & 0xffff) as u16))
    }
}

/// The age of the oldest dirty block that no write-back has: a time of the shards' clock, with
/// milliseconds that wrap after 49 days.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DirtySince(u64);

impl DirtySince {
    /// Dirty since this time; `None`: no block is dirty.
    #[must_use]
    pub fn new(since_ms: Option<u32>) -> Self {
        Self(since_ms.map_or(0, |ms| u64::from(ms) + 1))
    }

    /// The age in milliseconds when the shards' clock shows `now_ms`; `None` if no block is dirty.
    /// The caller's clock may be a little behind.
    #[must_use]
    pub fn age_ms(self, now_ms: u32) -> Option<u32> {
        let since = u32::try_from(self.0.checked_sub(1)?).ok()?;
        let age = now_ms.wrapping_sub(since);
        Some(if age > u32::MAX / 2 { 0 } else { age })
    }
}

/// The counters of one volume in one poll group and its shard, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct VolumeStats {
    /// The commands of connections of this poll group.
    pub io: IoStats,
    /// The times of these commands.
    pub latency: VolumeLatency,
    /// Counters of commands that waited for a limit.
    pub delays: Delays,
    counters: VolumeCounters,
    last_error: Counter,
    dirty_since: Counter,
}

impl VolumeStats {
    /// Publishes the shard's counters. Only the owning thread calls it.
    pub fn set(&self, counts: &VolumeCounts, last_error: LastError, dirty_since: DirtySince) {
        self.counters.set(counts);
        self.last_error.set(last_error.0);
        self.dirty_since.set(dirty_since.0);
    }

    /// Number of commands without an answer when their connections ended.
    #[must_use]
    pub fn abandoned(&self) -> u64 {
        self.io.never_answered()
    }

    /// The counters of this poll group's commands for the volume.
    #[must_use]
    pub fn io(&self) -> IoCounts {
        self.io.snapshot()
    }

    /// The times of these commands.
    #[must_use]
    pub fn times(&self) -> VolumeTimes {
        self.latency.snapshot()
    }

    /// The counters of commands that waited for a limit.
    #[must_use]
    pub fn delays(&self) -> DelayCounts {
        self.delays.snapshot()
    }

    /// The last published counters.
    #[must_use]
    pub fn snapshot(&self) -> VolumeCounts {
        self.counters.snapshot()
    }

    /// The last published age of the oldest dirty block.
    #[must_use]
    pub fn dirty_since(&self) -> DirtySince {
        DirtySince(self.dirty_since.get())
    }

    /// The last published failure.
    #[must_use]
    pub fn last_error(&self) -> LastError {
        LastError(self.last_error.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_needs_a_read() {
        let counts = VolumeCounts::default();
        assert_eq!(counts.hit_ratio(), None);
        assert_eq!(VolumeCounts { misses: 4, ..counts }.hit_ratio(), Some(0.0));
        assert_eq!(VolumeCounts { hits: 4, ..counts }.hit_ratio(), Some(1.0));
        assert_eq!(VolumeCounts { hits: 1, misses: 3, ..counts }.hit_ratio(), Some(0.25));
        assert_eq!(hit_ratio(u64::MAX, u64::MAX), Some(1.0), "a sum that does not fit is no panic");
    }

    #[test]
    fn the_latest_error_is_the_maximum_whatever_its_errno() {
        let none = LastError::default();
        assert_eq!(none.errno(), None);
        let first = LastError::new(0, Errno::ENOSPC);
        let later = LastError::new(1, Errno::EIO);
        assert_eq!(first.max(none).errno(), Some(Errno::ENOSPC as i32));
        assert_eq!(first.max(later).max(none).errno(), Some(Errno::EIO as i32));
        assert_eq!(LastError::new(0, Errno::UnknownErrno).errno(), Some(0));
        assert!(LastError::new(0, Errno::UnknownErrno) > none);
    }

    #[test]
    fn ages_follow_the_given_clock_and_survive_its_wrap() {
        assert_eq!(DirtySince::new(None).age_ms(5), None);
        assert_eq!(DirtySince::new(Some(0)).age_ms(5), Some(5));
        assert_eq!(DirtySince::new(Some(u32::MAX)).age_ms(4), Some(5), "the clock wrapped");
        assert_eq!(DirtySince::new(Some(9)).age_ms(5), Some(0), "the clocks differ a little");
        let error = LastError::new(7, Errno::EIO);
        assert_eq!((error.age_s(7), error.age_s(30), error.age_s(3)), (Some(0), Some(23), Some(0)));
        assert_eq!(LastError::default().age_s(9), None);
    }

    #[test]
    fn published_counters_are_read_back() {
        let counts = VolumeCounts {
            hits: 1,
            misses: 2,
            evictions: 3,
            store_errors: 4,
            cached_bytes: 5,
            dirty_bytes: 6,
            failed_blocks: 7,
        };
        let stats = VolumeStats::default();
        stats.set(&counts, LastError::new(9, Errno::EROFS), DirtySince::new(Some(70)));
        assert_eq!(stats.snapshot(), counts);
        assert_eq!(stats.last_error(), LastError::new(9, Errno::EROFS));
        assert_eq!(stats.dirty_since().age_ms(100), Some(30));
        let mut sum = counts;
        sum.add(&stats.snapshot());
        assert_eq!((sum.hits, sum.failed_blocks), (2, 14));
    }
}
