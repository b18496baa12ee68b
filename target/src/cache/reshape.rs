//! What becomes of a shard when one of its volumes changes while others are served.
//!
//! A size can grow while requests run. Everything else is done to a volume that nothing works on
//! ([`Shard::is_quiet`]): no command names it any more, and what was asked for before has ended.

use super::shard::Shard;
use super::span::BLOCK;
use crate::store::{Store, StoreError, VolumeIndex};
use crate::volume::CacheMode;

impl<S: Store> Shard<S> {
    /// A volume has grown. Requests that came before were checked against the old size.
    pub(crate) fn grow_volume(&mut self, volume: VolumeIndex, size_bytes: u64) {
        self.core.volumes.set_size(volume, size_bytes);
    }

    /// Whether nothing works on a volume: no job, no write and no operation of the store.
    #[must_use]
    pub(crate) fn is_quiet(&self, volume: VolumeIndex) -> bool {
        let core = &self.core;
        let is_idle = core.volumes.get(volume).is_none_or(super::volumes::VolumeState::is_idle);
        is_idle && !core.jobs.has_any_of(volume)
    }

    /// Whether the store of a volume may have something to make durable.
    #[must_use]
    pub(crate) fn is_writable(&self, volume: VolumeIndex) -> bool {
        self.core.volumes.get(volume).is_some_and(|state| !state.is_read_only())
    }

    /// A volume that is [quiet](Self::is_quiet) has this size and this cache mode from now on.
    /// Nothing of it is cached any more. What was dirty was written before.
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

    /// Serves a volume no longer that is [quiet](Self::is_quiet), and closes its store. What was
    /// dirty was written before.
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

    // Takes every block of a volume out of the index.
    fn forget_all(&mut self, volume: VolumeIndex) {
        debug_assert_eq!(self.core.slots.counts(volume).dirty, 0, "it was written before");
        let last = u64::MAX / BLOCK;
        self.core.slots.for_each_in(volume, 0, last, |slots, slot| slots.forget(slot));
    }
}
