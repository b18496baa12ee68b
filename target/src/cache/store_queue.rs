//! [`StoreQueue`]: the store of a shard, and the operations that wait to go there.
//!
//! With several volumes, each has a bounded number of operations at the store, so a hanging store
//! does not fill the ring. Waiting operations are submitted volume by volume in turn. A store may
//! refuse those of one volume and take those of another.

use nix::errno::Errno;

use super::lists::Lists;
use crate::cache::shard_volumes::{ShardVolumes, VolumeOps, VolumeState};
use crate::store::{Op, OpDone, Segment, Store};
use crate::volume::ids::VolumeIndex;

/// Most operations of one volume at the store, if there are several volumes: half of a ring.
const OPS_PER_VOLUME: usize = 512;

/// A store, and the operations that wait to go there.
#[derive(Debug)]
pub(super) struct StoreQueue<S> {
    store: S,
    // Completed operations, and the number of them that were taken.
    done: Vec<OpDone>,
    taken: usize,
    // Waiting operations of all volumes.
    waiting: usize,
    // Operations that one volume may have at the store.
    per_volume: usize,
    // The volume that submits next.
    next_volume: usize,
    // The store took none of the waiting operations, and nothing has changed since.
    is_stuck: bool,
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
            is_stuck: false,
        }
    }

    /// The store, to read.
    #[cfg(test)]
    pub(super) fn store(&self) -> &S {
        &self.store
    }

    /// The store, to set it up.
    pub(super) fn store_mut(&mut self) -> &mut S {
        &mut self.store
    }

    /// Sets the number of served volumes.
    pub(super) fn set_volumes(&mut self, served: usize) {
        self.per_volume = if served < 2 { usize::MAX } else { OPS_PER_VOLUME };
        // The store shares its places anew, too.
        self.is_stuck = false;
    }

    /// Submits an operation of a volume, or queues it behind waiting ones.
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

    /// Fails an operation that was not submitted, like an error of the store.
    #[cold]
    pub(super) fn fail(&mut self, op: Op, errno: Errno) {
        self.done.push(OpDone { token: op.token, result: Err(errno) });
    }

    /// Fails the waiting operations of one volume.
    pub(super) fn fail_waiting(&mut self, of: &mut VolumeOps, lists: &mut Lists, errno: Errno) {
        while let Some((op, memory)) = of.waiting.pop_front() {
            lists.give_back(memory);
            self.waiting -= 1;
            // The end of this operation counts like the end of a submitted one.
            of.at_store += 1;
            self.fail(op, errno);
        }
    }

    /// Number of waiting operations.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Submits waiting operations, one of each volume in turn, until the store takes none of any.
    /// Does nothing more until an operation has ended: only that makes room for another.
    pub(super) fn submit_waiting(&mut self, volumes: &mut ShardVolumes, lists: &mut Lists) {
        if self.is_stuck {
            return;
        }
        let all = volumes.indexes().count();
        let (mut idle, mut refused) = (0, None);
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
                refused.get_or_insert(at);
                continue;
            }
            ops.at_store += 1;
            self.waiting -= 1;
            lists.give_back(memory);
            // Others had a place since a volume was refused: the next call begins behind them.
            (idle, refused) = (0, None);
        }
        self.is_stuck = self.waiting > 0;
        if let Some(first) = refused {
            self.next_volume = first;
        }
    }

    /// Collects completed operations. Returns whether there are any.
    #[inline]
    pub(super) fn reap(&mut self) -> bool {
        self.store.reap(&mut self.done);
        let has_ended = !self.done.is_empty();
        self.is_stuck &= !has_ended;
        has_ended
    }

    /// The next completed operation.
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
