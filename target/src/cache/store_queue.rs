//! [`StoreQueue`]: the store of a shard, and the operations that wait to go there.
//!
//! Where several volumes are served, each has a bounded number of operations at the store: a volume
//! whose store hangs does not fill the ring. Waiting operations go on volume by volume in turn.

use nix::errno::Errno;

use super::lists::Lists;
use crate::cache::shard_volumes::{ShardVolumes, VolumeOps, VolumeState};
use crate::store::{Op, OpDone, Segment, Store};
use crate::volume::ids::VolumeIndex;

/// Operations of one volume at the store, where there are several volumes: half of what a ring
/// holds.
const OPS_PER_VOLUME: usize = 512;

/// A store, and the operations that wait to go there.
#[derive(Debug)]
pub(super) struct StoreQueue<S> {
    store: S,
    // What the store has done, and how much of it was taken.
    done: Vec<OpDone>,
    taken: usize,
    // Operations that wait, of all volumes.
    waiting: usize,
    // Operations that one volume may have at the store.
    per_volume: usize,
    // Whose waiting operations go first.
    next_volume: usize,
}

impl<S: Store> StoreQueue<S> {
    pub(super) fn new(store: S) -> Self {
        Self {
            store,
            done: Vec::with_capacity(1024),
            taken: 0,
            waiting: 0,
            per_volume: usize::MAX,
            next_volume: 0,
        }
    }

    /// The store, to look at.
    #[cfg(test)]
    pub(super) fn store(&self) -> &S {
        &self.store
    }

    /// The store, to set it up.
    pub(super) fn store_mut(&mut self) -> &mut S {
        &mut self.store
    }

    /// So many volumes are served from now on.
    pub(super) fn set_volumes(&mut self, served: usize) {
        self.per_volume = if served < 2 { usize::MAX } else { OPS_PER_VOLUME };
    }

    /// Submits an operation of a volume, or queues it behind those that wait.
    #[inline(always)]
    pub(super) fn submit(
        &mut self,
        of: &mut VolumeOps,
        lists: &mut Lists,
        op: Op,
        memory: &[Segment],
    ) {
        let left = if of.waiting.is_empty() && of.at_store < self.per_volume {
            self.store.submit(op, memory)
        } else {
            Err(op)
        };
        match left {
            Ok(()) => of.at_store += 1,
            Err(op) => self.queue(of, lists, op, memory),
        }
    }

    #[cold]
    fn queue(&mut self, of: &mut VolumeOps, lists: &mut Lists, op: Op, memory: &[Segment]) {
        let mut list = lists.take();
        list.extend_from_slice(memory);
        of.waiting.push_back((op, list));
        self.waiting += 1;
    }

    /// Fails an operation that was not submitted, as if the store had.
    #[cold]
    pub(super) fn fail(&mut self, op: Op, errno: Errno) {
        self.done.push(OpDone { token: op.token, result: Err(errno) });
    }

    /// Fails what waits of one volume.
    pub(super) fn fail_waiting(&mut self, of: &mut VolumeOps, lists: &mut Lists, errno: Errno) {
        while let Some((op, memory)) = of.waiting.pop_front() {
            lists.give_back(memory);
            self.waiting -= 1;
            // Its end is counted like that of one that was at the store.
            of.at_store += 1;
            self.fail(op, errno);
        }
    }

    /// Operations that wait.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Submits what waits, one operation of each volume in turn, as far as the store takes them.
    pub(super) fn submit_waiting(&mut self, volumes: &mut ShardVolumes, lists: &mut Lists) {
        let all = volumes.indexes().count();
        let mut idle = 0;
        while self.waiting > 0 && idle < all {
            let at = self.next_volume % all;
            self.next_volume = at + 1;
            idle += 1;
            let volume = VolumeIndex(rblk_protocol::width::narrow(at));
            let Some(VolumeState { ops, .. }) = volumes.get_mut(volume) else { continue };
            if ops.at_store >= self.per_volume {
                continue;
            }
            let Some((op, memory)) = ops.waiting.pop_front() else { continue };
            if let Err(op) = self.store.submit(op, &memory) {
                ops.waiting.push_front((op, memory));
                self.next_volume = at;
                return;
            }
            ops.at_store += 1;
            self.waiting -= 1;
            lists.give_back(memory);
            idle = 0;
        }
    }

    /// Collects what the store has done. Returns whether there is anything.
    #[inline]
    pub(super) fn reap(&mut self) -> bool {
        self.store.reap(&mut self.done);
        !self.done.is_empty()
    }

    /// The next operation that is done.
    #[inline(always)]
    pub(super) fn next_done(&mut self) -> Option<OpDone> {
        let done = self.done.get(self.taken).copied();
        match done {
            Some(_) => self.taken += 1,
            None => {
                self.done.clear();
                self.taken = 0;
            }
        }
        done
    }

    /// Operations at the store.
    pub(super) fn in_flight(&self) -> usize {
        self.store.in_flight()
    }
}
