//! Between slots and store: operations of jobs, and what comes back.
//!
//! When several volumes are served, one has a bounded number of operations at the store: one that
//! hangs does not fill it. What waits goes on volume by volume in turn.

use nix::errno::Errno;

use super::shard::{Shard, state_of};
use crate::store::{MAX_SEGMENTS, Op, OpDone, OpKind, Segment, Store};

/// Operations of one volume at the store, where there are several volumes: half of what a ring
/// holds.
const OPS_PER_VOLUME: usize = 512;

impl<S: Store> Shard<S> {
    // Sends data of some of a job's blocks to or from the store, in as many operations as it takes.
    #[inline(always)]
    pub(super) fn transfer(
        &mut self,
        job: u32,
        kind: OpKind,
        blocks: std::ops::Range<usize>,
        skip: usize,
    ) {
        if blocks.len() > 1 {
            return self.transfer_list(job, kind, blocks, skip);
        }
        // A part of one block.
        if let [only] = self.jobs.get(job).blocks[blocks] {
            let len = u32::try_from(kind.range().1).unwrap_or(0);
            let offset = self.slots.offset(only.slot) + skip;
            self.submit_with(job, kind, len, &[Segment { offset, len }]);
        }
    }

    fn transfer_list(
        &mut self,
        job: u32,
        kind: OpKind,
        blocks: std::ops::Range<usize>,
        skip: usize,
    ) {
        let (offset, len) = kind.range();
        let blocks = &self.jobs.get(job).blocks[blocks];
        let mut list = std::mem::take(&mut self.segments);
        list.clear();
        let slots = blocks.iter().map(|e| e.slot);
        self.slots.segments(slots, skip, u32::try_from(len).unwrap_or(0), &mut list);
        let mut at = offset;
        for part in list.chunks(MAX_SEGMENTS) {
            let len = part.iter().map(|s| s.len).sum();
            let kind = match kind {
                OpKind::Write { fua, .. } => OpKind::Write { offset: at, len, fua },
                _ => OpKind::Read { offset: at, len },
            };
            at += u64::from(len);
            self.submit_with(job, kind, len, part);
        }
        self.segments = list;
    }

    pub(super) fn submit(&mut self, job: u32, kind: OpKind, len: u32) {
        self.submit_with(job, kind, len, &[]);
    }

    #[inline]
    pub(super) fn submit_with(&mut self, job: u32, kind: OpKind, len: u32, memory: &[Segment]) {
        let token = self.jobs.token(job, len);
        let entry = self.jobs.get(job);
        entry.ops += 1;
        let volume = entry.volume;
        let op = Op { token, volume, kind };
        let most = self.ops_per_volume();
        if let Some(state) = state_of(&mut self.volumes, volume)
            && state.waiting_ops.is_empty()
            && state.ops < most
            && self.store.submit(op, memory).is_ok()
        {
            state.ops += 1;
        } else {
            self.wait_for_store(op, memory);
        }
    }

    #[cold]
    pub(super) fn wait_for_store(&mut self, op: Op, memory: &[Segment]) {
        let Some(state) = state_of(&mut self.volumes, op.volume) else {
            // Only a bug gets here: commands of volumes without a store ask for memory alone.
            return self.done.push(OpDone { token: op.token, result: Err(Errno::ENXIO) });
        };
        let mut list = self.pool.pop().unwrap_or_default();
        list.extend_from_slice(memory);
        state.waiting_ops.push_back((op, list));
        self.waiting_ops += 1;
    }

    #[inline]
    pub(super) fn ops_per_volume(&self) -> usize {
        if self.served < 2 { usize::MAX } else { OPS_PER_VOLUME }
    }

    /// Submits what waited for the store, one operation of each volume in turn.
    pub(super) fn retry_store(&mut self) {
        let (most, volumes) = (self.ops_per_volume(), self.volumes.len());
        let mut idle = 0;
        while self.waiting_ops > 0 && idle < volumes {
            let at = self.next_volume % volumes;
            self.next_volume = at + 1;
            idle += 1;
            let Some(state) = self.volumes[at].as_mut().filter(|state| state.ops < most) else {
                continue;
            };
            let Some((op, memory)) = state.waiting_ops.pop_front() else { continue };
            if let Err(op) = self.store.submit(op, &memory) {
                state.waiting_ops.push_front((op, memory));
                self.next_volume = at;
                return;
            }
            state.ops += 1;
            self.waiting_ops -= 1;
            self.recycle_list(memory);
            idle = 0;
        }
    }

    #[inline]
    pub(super) fn on_store_done(&mut self, done: OpDone) {
        let Some((job, len)) = self.jobs.of_token(done.token) else { return };
        if done.result == Ok(len) && self.finish_one(job) {
            return;
        }
        let error = match done.result {
            // The store promised all or an error; less would pass for data.
            Ok(bytes) if len > 0 && bytes != len => Some(Errno::EIO),
            Ok(_) => None,
            Err(errno) => Some(errno),
        };
        let entry = self.jobs.get(job);
        entry.ops = entry.ops.saturating_sub(1);
        entry.error = entry.error.or(error);
        let (volume, kind, last) = (entry.volume, entry.kind, entry.ops == 0);
        if let Some(state) = self.volume(volume) {
            state.ops = state.ops.saturating_sub(1);
        }
        if let Some(errno) = error {
            self.note_error(volume, kind, errno);
        }
        if last {
            self.advance(job);
        }
    }
}
