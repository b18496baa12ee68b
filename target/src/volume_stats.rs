//! [`VolumeStats`]: the counters of one volume in one poll group and its shard. Only their thread
//! writes them; every thread may read them.
//!
//! The shard counts in plain numbers and publishes them every few turns, so its counters may be a
//! few turns old. A poll group that sleeps has published everything. What the poll group counts of
//! commands ([`VolumeStats::io`], [`VolumeStats::latency`]) is there at once.

use nix::errno::Errno;
use rblk_fabric::{Counter, Micros};
use serde::{Deserialize, Serialize};

use crate::limits::{DelayCounts, Delays};
use crate::traffic::{IoCounts, IoStats, VolumeLatency, VolumeTimes};

rblk_fabric::counters! {
    /// The sums of a [`VolumeStats`].
    #[derive(Debug, Default)]
    pub struct VolumeCounters;

    /// The counters of a volume at one moment; also their sum over poll groups. Blocks are of 4
    /// KiB.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct VolumeCounts;

    /// Blocks that reads found in the cache.
    hits,
    /// Blocks that reads did not find.
    misses,
    /// Blocks that left the cache to make room, for this volume or another.
    evictions,
    /// Operations that the store failed.
    store_errors,
    /// Bytes in the cache now, dirty ones included.
    cached_bytes,
    /// Bytes that are in memory only, acknowledged and not yet in the store, now.
    dirty_bytes,
    /// Dirty blocks whose last write-back failed, now. They are tried again.
    failed_blocks,
}

impl VolumeCounts {
    /// Share of the blocks that reads asked the cache for and found; none before the first such
    /// read.
    #[must_use]
    pub fn hit_ratio(&self) -> Option<f64> {
        hit_ratio(self.hits, self.misses)
    }
}

pub(crate) fn hit_ratio(hits: u64, misses: u64) -> Option<f64> {
    let all = hits.saturating_add(misses);
    // Exact up to 2^53 blocks.
    (all > 0).then(|| hits as f64 / all as f64)
}

/// How a store failed last, and when: the latest of several is the maximum.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct LastError(u64);

impl LastError {
    const ERRNO_BITS: u32 = 16;

    /// A failure at that time.
    #[must_use]
    pub(crate) fn new(at: Micros, errno: Errno) -> Self {
        // Errnos are below 4096; 48 bits of seconds do not end. One more, so that no failure is 0.
        let errno = u64::from(u16::try_from(errno as i32).unwrap_or(0));
        Self(((seconds(at) + 1) << Self::ERRNO_BITS) | errno)
    }

    /// How many seconds before `now` it was; none if nothing failed.
    #[must_use]
    pub fn age_s(self, now: Micros) -> Option<u64> {
        let at = (self.0 >> Self::ERRNO_BITS).checked_sub(1)?;
        Some(seconds(now).saturating_sub(at))
    }

    /// The errno, 0 for one that has no name; none if nothing failed.
    #[must_use]
    pub fn errno(self) -> Option<i32> {
        (self.0 != 0).then(|| i32::from((self.0 & 0xffff) as u16))
    }
}

fn seconds(at: Micros) -> u64 {
    at.since(Micros::new(0)) / 1_000_000
}

/// What one poll group and its shard tell of one volume, on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct VolumeStats {
    /// The commands of connections of this poll group.
    pub(crate) io: IoStats,
    /// Their times.
    pub(crate) latency: VolumeLatency,
    /// Those that waited for a limit.
    pub(crate) delays: Delays,
    counters: VolumeCounters,
    last_error: Counter,
}

impl VolumeStats {
    /// Publishes; only the owning thread calls it.
    pub(crate) fn set(&self, counts: &VolumeCounts, last_error: LastError) {
        let to = &self.counters;
        to.hits.set(counts.hits);
        to.misses.set(counts.misses);
        to.evictions.set(counts.evictions);
        to.store_errors.set(counts.store_errors);
        to.cached_bytes.set(counts.cached_bytes);
        to.dirty_bytes.set(counts.dirty_bytes);
        to.failed_blocks.set(counts.failed_blocks);
        self.last_error.set(last_error.0);
    }

    /// Commands that were not answered before their connections ended.
    #[must_use]
    pub fn abandoned(&self) -> u64 {
        self.io.never_answered()
    }

    /// The commands that connections of this poll group had for the volume.
    #[must_use]
    pub fn io(&self) -> IoCounts {
        self.io.snapshot()
    }

    /// The times of these commands.
    #[must_use]
    pub fn times(&self) -> VolumeTimes {
        self.latency.snapshot()
    }

    /// Those of them that waited for a limit.
    #[must_use]
    pub fn delays(&self) -> DelayCounts {
        self.delays.snapshot()
    }

    /// What was published last.
    #[must_use]
    pub fn snapshot(&self) -> VolumeCounts {
        self.counters.snapshot()
    }

    /// The last failure that was published.
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
        let first = LastError::new(Micros::new(0), Errno::ENOSPC);
        let later = LastError::new(Micros::new(1_000_000), Errno::EIO);
        assert_eq!(first.max(none).errno(), Some(Errno::ENOSPC as i32));
        assert_eq!(first.max(later).max(none).errno(), Some(Errno::EIO as i32));
        assert_eq!(LastError::new(Micros::new(0), Errno::UnknownErrno).errno(), Some(0));
        assert!(LastError::new(Micros::new(0), Errno::UnknownErrno) > none);
    }

    #[test]
    fn what_is_published_is_what_is_read() {
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
        stats.set(&counts, LastError::new(Micros::new(9_000_000), Errno::EROFS));
        assert_eq!(stats.snapshot(), counts);
        assert_eq!(stats.last_error(), LastError::new(Micros::new(9_000_000), Errno::EROFS));
        let mut sum = counts;
        sum.add(&stats.snapshot());
        assert_eq!((sum.hits, sum.failed_blocks), (2, 14));
    }
}
