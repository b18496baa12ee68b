//! The maximums of the volumes: the most slots of a shard that each volume's blocks may occupy.
//!
//! The sum of the maximums may exceed the shard, and so may a single one. A maximum bounds the
//! blocks in the index, not the memory of running requests.

use super::shard::Shard;
use crate::store::Store;
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;

impl<S: Store> Shard<S> {
    /// Limits a volume to this many slots of this shard's index. `None`: no limit. The next turns
    /// evict the volume's slots above the limit.
    pub(crate) fn set_cache_max(&mut self, volume: VolumeIndex, slots: Option<u32>) {
        let Some(state) = self.core.volumes.get_mut(volume) else { return };
        if state.cache_max != slots {
            state.cache_max = slots;
            self.keep_maximums();
        }
    }

    /// Applies the maximums of the served and cached volumes to the slots.
    pub(super) fn keep_maximums(&mut self) {
        let core = &mut self.core;
        for volume in core.volumes.indexes() {
            let cached = core.volumes.get(volume).filter(|v| v.cache() != CacheMode::None);
            core.slots.set_max(volume, cached.and_then(|state| state.cache_max));
        }
        self.memory.set_trim(core.slots.is_trim_due());
    }

    /// Evicts some of the slots that volumes have above their maximums. True: some remain.
    pub(super) fn trim(&mut self) -> bool {
        self.core.slots.trim();
        let more = self.core.slots.is_trim_due();
        self.memory.set_trim(more);
        more
    }
}
