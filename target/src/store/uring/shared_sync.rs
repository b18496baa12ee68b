//! What a store does for ops that wait for a sync of their backing: flushes, and durable writes
//! that are written. The rules are those of [`Syncs`](crate::store::syncs::Syncs).

use std::sync::Arc;

use nix::errno::Errno;

use super::slot::Phase;
use super::watch::DOOR;
use super::{UringStore, Volume};
use crate::store::syncs::{Look, SyncNumber};

impl UringStore {
    // Has a slot's op wait for the first sync that covers it, or run it.
    pub(super) fn await_sync(&mut self, index: usize) {
        let Some(volume) = self.volume_of(index) else {
            return self.finish(index, Err(Errno::ENXIO));
        };
        let number = volume.backing.syncs().join();
        self.slots[index].phase = Phase::Awaiting(number);
        if !self.look_at(index) {
            self.put_off(index);
        }
    }

    // The sync that a slot ran is over.
    pub(super) fn sync_ended(
        &mut self,
        index: usize,
        number: SyncNumber,
        result: Result<u32, Errno>,
    ) {
        self.counters.syncs += 1;
        let volume = self.slots[index].op.volume;
        let Some(Volume { backing, .. }) = self.volume_of(index) else {
            return self.finish(index, Err(Errno::ENXIO));
        };
        if backing.syncs().end(result.map(drop), &self.door) {
            let backing = Arc::clone(backing);
            self.lost.push((volume, backing));
        }
        self.slots[index].phase = Phase::Awaiting(number);
        self.put_off(index);
        self.look_at_syncs();
    }

    // Looks at all that waits: some is over, and one op may have to run the next sync.
    pub(super) fn look_at_syncs(&mut self) {
        let mut at = 0;
        while at < self.awaiting.len() {
            // Off the list first: acting on it may change the list.
            let index = self.awaiting.swap_remove(at);
            if !self.look_at(index as usize) {
                self.awaiting.push(index);
                let last = self.awaiting.len() - 1;
                self.awaiting.swap(at, last);
                at += 1;
            }
        }
    }

    // Whether a slot's op waits no more: it runs the sync that it waited for, or has ended.
    fn look_at(&mut self, index: usize) -> bool {
        let Phase::Awaiting(number) = self.slots[index].phase else { return true };
        // What waits keeps its volume.
        let look = self.volume_of(index).map(|v| v.backing.syncs().look(number, &self.door));
        match look.unwrap_or(Look::Over(Err(Errno::ENXIO))) {
            Look::Wait => return false,
            Look::Run => {
                self.slots[index].phase = Phase::Sync(number);
                self.send(index);
            }
            Look::Over(result) => {
                let value = self.slots[index].value();
                self.finish(index, result.map(|()| value));
            }
        }
        true
    }

    fn put_off(&mut self, index: usize) {
        // It has room for every slot.
        self.awaiting.push(u32::try_from(index).unwrap_or(u32::MAX));
        self.arm(DOOR.0);
    }

    fn volume_of(&self, index: usize) -> Option<&Volume> {
        let volume = self.slots[index].op.volume;
        self.volumes.get(usize::from(volume.0)).and_then(Option::as_ref)
    }
}
