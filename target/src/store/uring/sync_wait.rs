//! [`SyncWaiters`]: ops that wait for a sync of their backing: flushes, and durable writes that are
//! written. They follow the rules of [`Syncs`](crate::store::syncs::Syncs).

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use nix::errno::Errno;

use crate::store::backing::Backing;
use crate::store::syncs::{Door, SyncLook, SyncNumber};
use crate::volume::ids::VolumeIndex;

/// The ops of a store that wait for syncs, and the door that wakes the store for them.
#[derive(Debug)]
pub(super) struct SyncWaiters {
    // Places of the ops.
    ops: Vec<u32>,
    door: Door,
    // Backings that lost writes, for the owner of the store.
    lost: Vec<(VolumeIndex, Arc<Backing>)>,
}

impl SyncWaiters {
    /// Memory for `capacity` ops.
    pub(super) fn new(capacity: usize) -> io::Result<Self> {
        Ok(Self { ops: Vec::with_capacity(capacity), door: Door::new()?, lost: Vec::new() })
    }

    /// Readable when an op may continue.
    pub(super) fn fd(&self) -> RawFd {
        self.door.fd()
    }

    /// The door, for others that wake the store.
    pub(super) fn door(&self) -> Door {
        self.door.clone()
    }

    /// The descriptor was readable. The caller looks at all waiting ops.
    pub(super) fn answer(&self) {
        self.door.answer();
    }

    /// The store ends: none of its ops waits for a sync of this backing.
    pub(super) fn leave(&self, backing: &Backing) {
        backing.syncs().leave(&self.door);
    }

    /// The next step of an op that waits for this sync.
    pub(super) fn look(&self, backing: &Backing, number: SyncNumber) -> SyncLook {
        backing.syncs().look(number, &self.door)
    }

    /// The sync that an op ran for all waiting ops ended.
    pub(super) fn sync_ended(
        &mut self,
        volume: VolumeIndex,
        backing: &Arc<Backing>,
        result: Result<(), Errno>,
    ) {
        if backing.syncs().end(result, &self.door) {
            self.lost.push((volume, Arc::clone(backing)));
        }
    }

    /// A backing that lost writes, as this store learned.
    pub(super) fn take_lost(&mut self) -> Option<(VolumeIndex, Arc<Backing>)> {
        self.lost.pop()
    }

    /// Adds a waiting op.
    pub(super) fn add(&mut self, op: u32) {
        self.ops.push(op);
    }

    /// Takes the op at an index of the list; the last op takes its place.
    pub(super) fn take(&mut self, at: usize) -> Option<u32> {
        (at < self.ops.len()).then(|| self.ops.swap_remove(at))
    }

    /// Puts an op of [`Self::take`] back.
    pub(super) fn put_back(&mut self, at: usize, op: u32) {
        self.ops.push(op);
        let last = self.ops.len() - 1;
        self.ops.swap(at, last);
    }
}
