//! The minimums of the volumes: the slots of a shard that each volume keeps when others need
//! memory.
//!
//! The configuration checks that the minimums fit. A shard does not rely on that: a reload applies
//! its changes one after the other, and the parts of shards are rounded. The shard reduces minimums
//! that do not fit, all in proportion.

use rblk_protocol::width::{narrow, wide};

use super::shard::Shard;
use crate::cache::shard_volumes::ShardVolumes;
use crate::store::Store;
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;

/// At most one of this many parts of the memory that is never dirty is kept for volumes. Any
/// request may use the rest, so every request finds memory even when each volume has its minimum.
pub(super) const PART: usize = 2;
/// This many requests of the largest size always find memory that no volume keeps.
const REQUESTS: usize = 2;

impl<S: Store> Shard<S> {
    /// Sets the number of clean slots of this shard that a volume keeps.
    pub(crate) fn set_cache_min(&mut self, volume: VolumeIndex, slots: u32) {
        let Some(state) = self.core.volumes.get_mut(volume) else { return };
        if state.cache_min != slots {
            state.cache_min = slots;
            self.share_anew();
        }
    }

    /// The slots of all minimums together.
    pub(super) fn minimums(&self) -> usize {
        let volumes = &self.core.volumes;
        volumes.indexes().map(|volume| wide(wanted(volumes, volume))).sum()
    }

    /// Recomputes the minimums: `clean` slots are never dirty. Returns the number of slots kept for
    /// volumes.
    pub(super) fn keep_minimums(&mut self, clean: usize) -> usize {
        let for_requests = REQUESTS * self.request_slots;
        let budget = narrow((clean / PART).min(clean.saturating_sub(for_requests)));
        let core = &mut self.core;
        let sum: u64 = core.volumes.indexes().map(|v| u64::from(wanted(&core.volumes, v))).sum();
        let mut kept = 0;
        for volume in core.volumes.indexes() {
            let min = fitted(wanted(&core.volumes, volume), sum, budget);
            core.slots.set_min(volume, min);
            kept += min as usize;
        }
        kept
    }
}

/// The minimum of a volume: 0 if the volume is not served or not cached.
fn wanted(volumes: &ShardVolumes, volume: VolumeIndex) -> u32 {
    let cached = volumes.get(volume).filter(|state| state.cache() != CacheMode::None);
    cached.map_or(0, |state| state.cache_min)
}

/// The reduced minimum of a volume, where the minimums sum up to `sum` and `budget` slots are
/// available.
fn fitted(min: u32, sum: u64, budget: u32) -> u32 {
    if sum <= budget.into() {
        return min;
    }
    // Rounding down keeps the sum within `budget`.
    narrow(u64::from(min) * u64::from(budget) / sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minimums_that_do_not_fit_are_smaller_by_the_same_part() {
        let fit = |mins: [u32; 3], budget| {
            let sum = mins.iter().map(|min| u64::from(*min)).sum();
            mins.map(|min| fitted(min, sum, budget))
        };
        assert_eq!(fit([0, 30, 70], 100), [0, 30, 70]);
        assert_eq!(fit([0, 30, 70], 50), [0, 15, 35]);
        assert_eq!(fit([1, 1, 1], 2), [0, 0, 0]);
        assert_eq!(fit([7, 0, 3], 0), [0, 0, 0]);
        let most = fit([u32::MAX; 3], u32::MAX);
        assert!(most.iter().map(|min| u64::from(*min)).sum::<u64>() <= u64::from(u32::MAX));
    }
}
