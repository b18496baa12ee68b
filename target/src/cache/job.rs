//! [`Jobs`]: what a shard works on, in a table that is used again and again.

use nix::errno::Errno;

use super::message::{JobId, PartToken};
use super::policy::Slot;
use super::range_lock::LockId;
use crate::store::{OpKind, OpToken, VolumeIndex};
use crate::volume::CacheMode;

/// What a job is for, and how far it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Not in use.
    Free,
    /// A read that missed; without an asker a prefetch.
    Read,
    /// Memory for a write; waits for memory, then for the data.
    Reserve,
    /// A write that waits for its lock, or for the store.
    Write,
    /// A write whose edges are being read, to be dirty as whole blocks.
    Merge,
    /// Dirty blocks on their way to the store.
    WriteBack,
    /// Waits until older dirty blocks are in the store.
    Flush,
    /// Makes the store durable.
    Sync,
    /// A discard or zeroing.
    Change,
    /// A range held for a change by another shard.
    Hold,
}

/// A block of a job's range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub slot: Slot,
    /// A private slot of the job, or, in a write-back, still to be written.
    pub own: bool,
}

#[derive(Debug)]
pub(super) struct Job {
    pub kind: Kind,
    pub generation: u32,
    /// Nobody, for what the shard does by itself.
    pub from: Option<PartToken>,
    pub volume: VolumeIndex,
    /// Of the volume.
    pub cache: CacheMode,
    pub offset: u64,
    pub len: u64,
    // First and last block of the range.
    first: u64,
    last: u64,
    /// What the store is to do, for a change.
    pub change: OpKind,
    /// By block of the range.
    pub blocks: Vec<Entry>,
    /// Spare slots for blocks that are written or changed in part.
    pub edges: Vec<Slot>,
    pub lock: Option<LockId>,
    /// The lock is ours.
    pub holds: bool,
    /// Slots of its volume's share.
    pub held: usize,
    /// Store operations on their way.
    pub ops: u32,
    pub error: Option<Errno>,
    pub fua: bool,
    /// A write of the shard's own poll group, which hears of it by
    /// [`Shard::take_written`](super::Shard::take_written).
    pub at_home: bool,
    /// Flush: covers what is not newer. Write-back: the oldest it has.
    pub order: u64,
}

impl Job {
    fn new() -> Self {
        Self {
            kind: Kind::Free,
            generation: 0,
            from: None,
            volume: VolumeIndex(0),
            cache: CacheMode::None,
            offset: 0,
            len: 0,
            first: 0,
            last: 0,
            change: OpKind::Flush,
            blocks: Vec::new(),
            edges: Vec::new(),
            lock: None,
            holds: false,
            held: 0,
            ops: 0,
            error: None,
            fua: false,
            at_home: false,
            order: 0,
        }
    }

    /// First and last block of its range.
    #[inline]
    pub(super) fn block_range(&self) -> (u64, u64) {
        (self.first, self.last)
    }

    // Its slots and its lock were given back.
    #[inline]
    fn retire(&mut self) {
        debug_assert!(self.kind != Kind::Free && self.edges.is_empty() && self.lock.is_none());
        self.kind = Kind::Free;
        self.blocks.clear();
        self.generation = self.generation.wrapping_add(1) & ((1 << GENERATION_BITS) - 1);
    }

    /// A token for a store operation that must move `len` bytes. The job is at `index`.
    #[inline]
    pub(super) fn token(&self, index: u32, len: u32) -> OpToken {
        OpToken(
            u64::from(len / SECTOR) << (INDEX_BITS + GENERATION_BITS)
                | u64::from(self.generation) << INDEX_BITS
                | u64::from(index),
        )
    }

    /// Whether its range is whole slots.
    #[inline]
    pub(super) fn is_aligned(&self) -> bool {
        (self.offset | self.len).is_multiple_of(BLOCK)
    }
}

const BLOCK: u64 = super::SLOT_BYTES as u64;

// The token of a store operation: job, generation and the sectors it must move.
const INDEX_BITS: u32 = 24;
const GENERATION_BITS: u32 = 24;
const SECTOR: u32 = 512;

/// What is left of a write of one block that ended.
pub(super) struct Written {
    pub slot: Slot,
    pub from: Option<PartToken>,
    pub volume: VolumeIndex,
    pub block: u64,
    pub held: usize,
    /// Held, if the volume is cached.
    pub lock: Option<LockId>,
    pub at_home: bool,
}

/// The table of jobs.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    table: Vec<Job>,
    free: Vec<u32>,
}

impl Jobs {
    /// A new job.
    #[inline(always)]
    pub(super) fn start(
        &mut self,
        kind: Kind,
        from: Option<PartToken>,
        volume: VolumeIndex,
        cache: CacheMode,
        offset: u64,
        len: u64,
    ) -> (u32, &mut Job) {
        let index = self.free.pop().unwrap_or_else(|| self.grow());
        let job = &mut self.table[index as usize];
        job.kind = kind;
        (job.from, job.volume, job.cache) = (from, volume, cache);
        (job.offset, job.len) = (offset, len);
        (job.first, job.last) = (offset / BLOCK, (offset + len.max(1) - 1) / BLOCK);
        debug_assert!(job.blocks.is_empty() && job.edges.is_empty() && job.lock.is_none());
        (job.holds, job.ops, job.error, job.order) = (false, 0, None, 0);
        (job.fua, job.at_home) = (false, false);
        (index, job)
    }

    #[cold]
    fn grow(&mut self) -> u32 {
        self.table.push(Job::new());
        // Bounded by what connections may have outstanding.
        u32::try_from(self.table.len() - 1).unwrap_or(u32::MAX)
    }

    /// A job that exists.
    #[inline]
    pub(super) fn get(&mut self, index: u32) -> &mut Job {
        &mut self.table[index as usize]
    }

    /// A job that exists, to look at.
    pub(super) fn peek(&self, index: u32) -> &Job {
        &self.table[index as usize]
    }

    /// Ends a job. Its slots and its lock were given back.
    #[inline]
    pub(super) fn end(&mut self, index: u32) {
        self.table[index as usize].retire();
        self.free.push(index);
    }

    /// Ends a write of one block that the store did well, if this is one and all that is left of it
    /// is to put the block in its place.
    #[inline(always)]
    pub(super) fn take_written(&mut self, index: u32) -> Option<Written> {
        let job = self.table.get_mut(index as usize)?;
        let &[Entry { slot, .. }] = &job.blocks[..] else { return None };
        // Without a cache there is no lock.
        let well = (job.kind, job.ops, job.error) == (Kind::Write, 1, None);
        if !well || job.holds && !job.is_aligned() || !job.edges.is_empty() {
            return None;
        }
        let written = Written {
            slot,
            from: job.from,
            volume: job.volume,
            block: job.first,
            held: std::mem::take(&mut job.held),
            lock: job.lock.take(),
            at_home: job.at_home,
        };
        job.retire();
        self.free.push(index);
        Some(written)
    }

    /// Jobs that have not ended.
    pub(super) fn len(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// The name of a job for others.
    #[inline]
    pub(super) fn id(&self, index: u32) -> JobId {
        JobId { index, generation: self.table[index as usize].generation }
    }

    /// The job of a name, if it has not ended.
    #[inline]
    pub(super) fn find(&self, id: JobId) -> Option<u32> {
        let job = self.table.get(id.index as usize)?;
        (job.kind != Kind::Free && job.generation == id.generation).then_some(id.index)
    }

    /// A token for a store operation that must move `len` bytes.
    #[inline]
    pub(super) fn token(&self, index: u32, len: u32) -> OpToken {
        self.table[index as usize].token(index, len)
    }

    /// The job of a token and the bytes that must have been moved.
    #[inline]
    pub(super) fn of_token(&self, token: OpToken) -> Option<(u32, u32)> {
        let index = u32::try_from(token.0 & ((1 << INDEX_BITS) - 1)).ok()?;
        let generation =
            u32::try_from(token.0 >> INDEX_BITS & ((1 << GENERATION_BITS) - 1)).ok()?;
        let sectors = u32::try_from(token.0 >> (INDEX_BITS + GENERATION_BITS)).ok()?;
        self.find(JobId { index, generation }).map(|index| (index, sectors * SECTOR))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_names_die_with_their_job() {
        let mut jobs = Jobs::default();
        let (first, _) = jobs.start(Kind::Read, None, VolumeIndex(0), CacheMode::None, 0, 4096);
        let (token, id) = (jobs.token(first, 4 << 20), jobs.id(first));
        assert_eq!(jobs.of_token(token), Some((first, 4 << 20)));
        jobs.end(first);
        assert_eq!((jobs.of_token(token), jobs.find(id)), (None, None));
        let (again, _) = jobs.start(Kind::Sync, None, VolumeIndex(0), CacheMode::None, 0, 0);
        assert_eq!((again, jobs.find(id), jobs.len()), (first, None, 1));
        assert_eq!(jobs.of_token(jobs.token(again, 0)), Some((again, 0)));
    }
}
