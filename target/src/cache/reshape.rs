//! Changes of one volume of a shard while others are served.
//!
//! A size can grow while requests run. All other changes need a quiet volume ([`Shard::is_quiet`]):
//! no command names it any more, and earlier requests have ended.

use nix::errno::Errno;

use super::shard::Shard;
use super::span::BLOCK;
use crate::store::{Store, StoreError};
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;

impl<S: Store> Shard<S> {
    /// Sets a larger size. Earlier requests were checked against the old size.
    pub(crate) fn grow_volume(&mut self, volume: VolumeIndex, size_bytes: u64) {
        self.core.volumes.set_size(volume, size_bytes);
    }

    /// Whether a volume has no job, no write and no store operation.
    #[must_use]
    pub(crate) fn is_quiet(&self, volume: VolumeIndex) -> bool {
        let core = &self.core;
        let is_idle =
            core.volumes.get(volume).is_none_or(crate::cache::shard_volumes::VolumeState::is_idle);
        is_idle && !core.jobs.has_any_of(volume)
    }

    /// Hosts may now write to a volume. The volume's end makes their writes durable.
    pub(crate) fn open_for_writing(&mut self, volume: VolumeIndex) {
        if let Some(state) = self.core.volumes.get_mut(volume) {
            state.open_for_writing();
        }
    }

    /// Whether the store of a volume may have data to make durable.
    #[must_use]
    pub(crate) fn is_writable(&self, volume: VolumeIndex) -> bool {
        self.core.volumes.get(volume).is_some_and(|state| !state.is_read_only())
    }

    /// Gives a [quiet](Self::is_quiet) volume a new size and cache mode, and drops its blocks from
    /// the cache. Its dirty blocks were written before.
    pub(crate) fn reshape_volume(
        &mut self,
        volume: VolumeIndex,
        cache: CacheMode,
        size_bytes: u64,
    ) {
        debug_assert!(self.is_quiet(volume), "something works on the volume");
        self.forget_all(volume);
        self.core.volumes.set_size(volume, size_bytes);
        self.core.volumes.set_cache(volume, cache);
        self.share_anew();
    }

    /// Ends the service of a [quiet](Self::is_quiet) volume, and closes its store. Its dirty blocks
    /// were written before.
    ///
    /// # Errors
    /// The store keeps its backing.
    pub(crate) fn remove_volume(&mut self, volume: VolumeIndex) -> Result<(), StoreError> {
        debug_assert!(self.is_quiet(volume), "something works on the volume");
        if self.core.volumes.get(volume).is_none() {
            return Ok(());
        }
        self.store_mut().close(volume)?;
        self.forget_all(volume);
        self.core.volumes.remove(volume);
        self.share_anew();
        Ok(())
    }

    /// Abandons a volume when its store does not answer or takes no writes. The volume's blocks
    /// leave the index, dirty or not, and operations that wait for its store fail. Operations at
    /// the store keep their memory until the store ends them. See [`Self::is_left`].
    pub(crate) fn abandon_volume(&mut self, volume: VolumeIndex) {
        let core = &mut self.core;
        let Some(state) = core.volumes.get_mut(volume) else { return };
        state.give_up();
        core.store.fail_waiting(&mut state.ops, &mut core.lists, Errno::ENXIO);
        // The volume no longer keeps memory from others.
        self.set_cache_min(volume, 0);
        self.set_cache_max(volume, None);
        self.is_left(volume);
    }

    /// Whether no job works any more on an [abandoned](Self::abandon_volume) volume. Drops the
    /// blocks of writes acknowledged since then.
    pub(crate) fn is_left(&mut self, volume: VolumeIndex) -> bool {
        self.take_out(volume);
        self.write_backs.give_up(&mut self.core, volume);
        self.is_quiet(volume)
    }

    // Takes every block of a volume out of the index. Dirty blocks were written before.
    fn forget_all(&mut self, volume: VolumeIndex) {
        debug_assert_eq!(self.core.slots.counts(volume).dirty, 0, "it was written before");
        self.take_out(volume);
    }

    // Takes every block of a volume out of the index. Slots of running store operations are freed
    // when the store ends them.
    fn take_out(&mut self, volume: VolumeIndex) {
        if self.core.slots.counts(volume).cached == 0 {
            return;
        }
        let last = u64::MAX / BLOCK;
        self.core.slots.for_each_in(volume, 0, last, |slots, slot| slots.forget(slot));
    }
}
