//! What a shard has of each volume at most: the maximums of its volumes.
//!
//! They need not fit together, and each may be more than the shard has. They bound what stays in
//! the index, not the memory of requests that are under way.

use super::shard::Shard;
use crate::store::Store;
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;

impl<S: Store> Shard<S> {
    /// A volume has at most so many slots of this shard in the index from now on. `None`: as many
    /// as there are. If it has more, the next turns take out what is too much.
    pub(crate) fn set_cache_max(&mut self, volume: VolumeIndex, slots: Option<u32>) {
        let Some(state) = self.core.volumes.get_mut(volume) else { return };
        if state.cache_max != slots {
            state.cache_max = slots;
            self.keep_maximums();
        }
    }

    /// Has the slots keep to the maximums of the volumes that are served, and cached.
    pub(super) fn keep_maximums(&mut self) {
        let core = &mut self.core;
        for volume in core.volumes.indexes() {
            let cached = core.volumes.get(volume).filter(|v| v.cache() != CacheMode::None);
            core.slots.set_max(volume, cached.and_then(|state| state.cache_max));
        }
        self.memory.set_trim(core.slots.is_trim_due());
    }

    /// Takes out some of what volumes have above their maximums. True: there is more.
    pub(super) fn trim(&mut self) -> bool {
        self.core.slots.trim();
        let more = self.core.slots.is_trim_due();
        self.memory.set_trim(more);
        more
    }
}
