//! [`Locks`]: the range locks of a shard, and the jobs that were granted locks.
//!
//! The release of a lock may grant waiting locks. Their jobs enter a list, which the shard
//! processes after the release ([`Locks::next_granted`]). So the end of a job never calls the next
//! job.

use std::ops::Range;

use super::range_lock::{Acquired, LockId, RangeLocks};
use crate::volume::ids::VolumeIndex;

/// Memory is reserved for this many locks.
const CAPACITY: usize = 1024;

/// The range locks of a shard.
#[derive(Debug)]
pub(super) struct Locks {
    table: RangeLocks,
    // Jobs that were granted their locks and must continue, oldest first.
    granted: Vec<u32>,
    // Number of these jobs that were taken.
    taken: usize,
}

impl Locks {
    pub(super) fn new() -> Self {
        Self { table: RangeLocks::new(CAPACITY), granted: Vec::with_capacity(64), taken: 0 }
    }

    /// Asks for the lock on a byte range, for a job.
    pub(super) fn acquire(&mut self, volume: VolumeIndex, range: Range<u64>, job: u32) -> Acquired {
        self.table.acquire(volume.0, range, job)
    }

    /// The lock on a range inside one stripe, unless another lock overlaps it.
    #[inline(always)]
    pub(super) fn try_acquire(&mut self, volume: VolumeIndex, range: Range<u64>) -> Option<LockId> {
        self.table.try_acquire(volume.0, range)
    }

    /// Releases a held lock. Jobs that waited for it may be granted theirs.
    #[inline(always)]
    pub(super) fn release(&mut self, lock: LockId) {
        debug_assert!(self.table.is_held(lock), "{lock:?} is not held");
        self.table.release(lock, &mut self.granted);
    }

    /// Whether [`Self::next_granted`] has a job.
    #[inline]
    pub(super) fn has_granted(&self) -> bool {
        !self.granted.is_empty()
    }

    /// The next job that was granted its lock and must continue.
    pub(super) fn next_granted(&mut self) -> Option<u32> {
        let job = self.granted.get(self.taken).copied();
        match job {
            Some(_) => self.taken += 1,
            None => {
                self.granted.clear();
                self.taken = 0;
            }
        }
        job
    }

    /// Whether any lock, held or waiting, overlaps a range.
    pub(super) fn overlaps(&self, volume: VolumeIndex, range: Range<u64>) -> bool {
        self.table.overlaps(volume.0, range)
    }

    /// Locks, held or waiting.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }
}
