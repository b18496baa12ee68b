//! What becomes of a shard when one of its volumes changes while others are served.
//!
//! A size can grow while requests run. Everything else is done to a volume that nothing works on
//! ([`Shard::is_quiet`]): no command names it any more, and what was asked for before has ended.

use nix::errno::Errno;

use super::shard::Shard;
use super::span::BLOCK;
use crate::store::{Store, StoreError};
use crate::volume::CacheMode;
use crate::volume::ids::VolumeIndex;

impl<S: Store> Shard<S> {
    /// A volume has grown. Requests that came before were checked against the old size.
    pub(crate) fn grow_volume(&mut self, volume: VolumeIndex, size_bytes: u64) {
        self.core.volumes.set_size(volume, size_bytes);
    }

    /// Whether nothing works on a volume: no job, no write and no operation of the store.
    #[must_use]
    pub(crate) fn is_quiet(&self, volume: VolumeIndex) -> bool {
        let core = &self.core;
        let is_idle =
            core.volumes.get(volume).is_none_or(crate::cache::shard_volumes::VolumeState::is_idle);
        is_idle && !core.jobs.has_any_of(volume)
    }

    /// Hosts may write to a volume now. What they write is made durable at the end.
    pub(crate) fn open_for_writing(&mut self, volume: VolumeIndex) {
        if let Some(state) = self.core.volumes.get_mut(volume) {
            state.open_for_writing();
        }
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

    /// Gives a volume up, whose store does not answer or takes no writes. No block of it is in the
    /// index any more, dirty or not, and what waits to go to its store fails. What its store works
    /// on keeps its memory until the store is done with it. See [`Self::is_left`].
    pub(crate) fn abandon_volume(&mut self, volume: VolumeIndex) {
        let core = &mut self.core;
        let Some(state) = core.volumes.get_mut(volume) else { return };
        state.give_up();
        core.store.fail_waiting(&mut state.ops, &mut core.lists, Errno::ENXIO);
        // It keeps nothing from others any more.
        self.set_cache_min(volume, 0);
        self.set_cache_max(volume, None);
        self.is_left(volume);
    }

    /// Whether nothing works any more on a volume that was [given up](Self::abandon_volume). What
    /// was still acknowledged since is forgotten.
    pub(crate) fn is_left(&mut self, volume: VolumeIndex) -> bool {
        self.take_out(volume);
        self.write_backs.give_up(&mut self.core, volume);
        self.is_quiet(volume)
    }

    // Takes every block of a volume out of the index that was written before.
    fn forget_all(&mut self, volume: VolumeIndex) {
        debug_assert_eq!(self.core.slots.counts(volume).dirty, 0, "it was written before");
        self.take_out(volume);
    }

    // Takes every block of a volume out of the index. Those that the store works on are free when
    // it is done with them.
    fn take_out(&mut self, volume: VolumeIndex) {
        if self.core.slots.counts(volume).cached == 0 {
            return;
        }
        let last = u64::MAX / BLOCK;
        self.core.slots.for_each_in(volume, 0, last, |slots, slot| slots.forget(slot));
    }
}
