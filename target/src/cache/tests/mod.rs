//! The cache from inside: a [`Shard`] over a [`Script`], a store that does nothing until a test
//! tells it to.
//!
//! [`Case`] sends requests like a poll group and keeps the answers by tag. Contents have versions
//! ([`bytes`]): a read that mixes two of them within a sector, or returns bytes of another place,
//! equals none of them.

mod changes;
mod given_up;
mod landing;
mod maximums;
mod minimums;
mod reads;
mod run_memory;
mod script;
mod shares;
mod slots;
mod write_back;
mod writes;

use std::collections::HashMap;
use std::fmt::{self, Debug, Formatter};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rblk_fabric::{PageKind, Region};
use rblk_protocol::Tag;
use rblk_runtime::Moment;

use super::policy::Slot;
use super::shard::Shard;
use super::shard_messages::{Changed, JobId, PartToken, Segments, ShardReply, ShardRequest};
use super::slots::Slots;
use super::{Landed, OneBlock, OneWrite, SLOT_BYTES, STRIPE_BYTES, ShardOptions};
use crate::memory::arena::Arena;
use crate::store::OpKind;
use crate::volume::CacheMode;
use crate::volume::ids::{ConnectionId, HostIndex, SessionIndex, VolumeIndex};
use crate::volume::timing::Spent;
use script::Script;

const VOLUME: VolumeIndex = VolumeIndex(0);
const BLOCK: u64 = SLOT_BYTES as u64;
const DELAY: Duration = Duration::from_millis(50);

/// The landed data of a write of one block.
struct Here<'a>(PartToken, &'a [u8]);

impl Landed for Here<'_> {
    fn land(&mut self, slots: &mut Slots, slot: Slot) -> Slot {
        slots.region().write(slots.offset(slot), self.1);
        slot
    }

    fn from(&self) -> PartToken {
        self.0
    }
}

/// splitmix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 32).unwrap() % bound
    }
}

/// Bytes of a volume.
#[derive(Clone, PartialEq, Eq)]
struct Data(Vec<u8>);

impl Deref for Data {
    type Target = Vec<u8>;

    fn deref(&self) -> &Vec<u8> {
        &self.0
    }
}

impl DerefMut for Data {
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }
}

/// One number for each sector with equal bytes, as in every version.
impl Debug for Data {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let one = |part: &[u8]| part.iter().all(|byte| *byte == part[0]).then_some(part[0]);
        f.debug_list().entries(self.0.chunks(512).map(one)).finish()
    }
}

/// The bytes of a version in a range of the volume. Offsets are multiples of a sector.
fn bytes(version: u8, offset: u64, len: usize) -> Data {
    let mut all = vec![0; len];
    for (sector, part) in (offset / 512..).zip(all.chunks_mut(512)) {
        // Never 0, the content after a discard.
        part.fill(1 + u8::try_from((sector * 37 + u64::from(version) * 101) % 255).unwrap());
    }
    Data(all)
}

#[derive(Clone, Copy)]
struct Setup {
    cache: CacheMode,
    /// Size of the volume. Its content is version 0.
    size: u64,
    slots: usize,
    dirty_max: usize,
    write_back_max: u32,
}

impl Setup {
    fn new(cache: CacheMode) -> Self {
        let dirty_max = 64 * SLOT_BYTES;
        Self { cache, size: 4 << 20, slots: 256, dirty_max, write_back_max: 1 << 20 }
    }

    fn case(self) -> Case {
        let region = Region::allocate(self.slots * SLOT_BYTES, PageKind::Normal).unwrap();
        let mut store = Script::new(&region);
        store.add_volume(bytes(0, 0, usize::try_from(self.size).unwrap()).0);
        let arena = Arena::new(Arc::clone(&region), 4 * 4096).unwrap();
        let options = ShardOptions {
            dirty_max_bytes: self.dirty_max,
            write_back_delay: DELAY,
            write_back_max_bytes: self.write_back_max,
            seed: 7,
        };
        let now = Instant::now();
        let mut shard = Shard::new(store, arena, options, now);
        shard.add_volume(VOLUME, self.cache, self.size, false, Arc::default());
        Case { shard, region, now, tags: 0, replies: HashMap::new(), at_home: false }
    }
}

/// A shard and its asker.
struct Case {
    shard: Shard<Script>,
    region: Arc<Region>,
    now: Instant,
    tags: u16,
    replies: HashMap<Tag, ShardReply>,
    /// Makes writes by the direct way of the shard's own poll group, where possible.
    at_home: bool,
}

impl Case {
    fn request(&mut self, request: ShardRequest) {
        self.shard.request(request);
        self.collect();
    }

    fn turn(&mut self) {
        self.turn_shard();
        self.collect();
    }

    /// A turn without the collection of its answers. Returns whether there was any work.
    fn turn_shard(&mut self) -> bool {
        self.shard.tick(Moment::from(self.now).us());
        let reaped = self.shard.reap();
        self.shard.turn(reaped).0
    }

    /// Lets time pass.
    fn wait(&mut self, time: Duration) {
        self.now += time;
        self.turn();
    }

    fn collect(&mut self) {
        let mut written = Vec::new();
        while let Some(to) = self.shard.next_written(written.len()) {
            written.push(to);
        }
        let done = |to| ShardReply::Done { to, result: Ok(()), spent: Spent::default() };
        let mut written = written.into_iter().map(done);
        while let Some(reply) = written.next().or_else(|| self.shard.take_reply()) {
            let tag = reply.to().tag;
            let old = self.replies.insert(tag, reply);
            assert!(old.is_none(), "answered twice: {old:?}, {:?}", self.replies[&tag]);
        }
    }

    fn token(&mut self) -> PartToken {
        self.tags += 1;
        let connection = ConnectionId { index: 0, generation: 1 };
        // Each request has its own session and host: the limit of one does not affect another.
        let session = SessionIndex { index: self.tags, life: 1 };
        self.shard.set_host(session, HostIndex::new(self.tags + 1));
        PartToken { group: 0, session, connection, tag: Tag(self.tags), part: 0 }
    }

    fn is_answered(&self, tag: Tag) -> bool {
        self.replies.contains_key(&tag)
    }

    fn read(&mut self, offset: u64, len: u32) -> Tag {
        let from = self.token();
        self.request(ShardRequest::Read { from, volume: VOLUME, offset, len });
        from.tag
    }

    /// The result of a read, still lent.
    fn lent(&mut self, tag: Tag) -> Result<Segments, Errno> {
        match self.replies.remove(&tag) {
            Some(ShardReply::Read { result, .. }) => result,
            other => panic!("{tag:?}: {other:?}"),
        }
    }

    fn copy(&self, memory: &Segments) -> Data {
        let mut all = Vec::new();
        for segment in memory.as_slice() {
            let mut part = vec![0; segment.len as usize];
            self.region.read(segment.offset, &mut part);
            all.extend(part);
        }
        Data(all)
    }

    fn release(&mut self, memory: Segments) {
        self.request(ShardRequest::Release { memory });
    }

    /// The result of a read. Returns its slots.
    fn got(&mut self, tag: Tag) -> Result<Data, Errno> {
        let memory = self.lent(tag)?;
        let data = self.copy(&memory);
        self.release(memory);
        Ok(data)
    }

    /// Reads bytes that must be cached.
    fn hit(&mut self, offset: u64, len: u32) -> Data {
        let (ops, copied) = (self.ops().len(), self.shard.counters().copied_bytes);
        let tag = self.read(offset, len);
        assert!(self.is_answered(tag), "{offset}+{len} is not cached");
        assert_eq!(self.ops().len(), ops, "a hit went to the store");
        assert_eq!(self.shard.counters().copied_bytes, copied, "a hit copied");
        self.got(tag).unwrap()
    }

    /// Reads, from the cache or the store.
    fn read_all(&mut self, offset: u64, len: u32) -> Data {
        let tag = self.read(offset, len);
        self.finish_all();
        self.got(tag).unwrap()
    }

    fn prefetch(&mut self, offset: u64, len: u32) {
        self.request(ShardRequest::Prefetch { volume: VOLUME, offset, len });
    }

    fn reserve(&mut self, offset: u64, len: usize) -> Tag {
        let from = self.token();
        let len = u32::try_from(len).unwrap();
        self.request(ShardRequest::Reserve { from, volume: VOLUME, offset, len });
        from.tag
    }

    fn reserved(&mut self, tag: Tag) -> (JobId, Segments) {
        match self.replies.remove(&tag) {
            Some(ShardReply::Reserved { job, memory, .. }) => (job, memory),
            other => panic!("{tag:?}: {other:?}"),
        }
    }

    /// Fills the memory of a reservation and writes it.
    fn land(&mut self, tag: Tag, data: &[u8], fua: bool) -> Tag {
        let (job, memory) = self.reserved(tag);
        let mut at = 0;
        for segment in memory.as_slice() {
            self.region.write(segment.offset, &data[at..at + segment.len as usize]);
            at += segment.len as usize;
        }
        assert_eq!(at, data.len());
        let from = self.token();
        self.request(ShardRequest::Write { from: PartToken { tag, ..from }, job, memory, fua });
        tag
    }

    fn write_one(&mut self, from: PartToken, at: u64, data: &[u8], fua: bool) -> OneWrite {
        let len = u32::try_from(data.len()).unwrap();
        self.shard.write_one(OneBlock { volume: VOLUME, offset: at, len, fua }, Here(from, data))
    }

    fn write_bytes(&mut self, offset: u64, data: &[u8], fua: bool) -> Tag {
        if self.at_home {
            let from = self.token();
            let write = self.write_one(from, offset, data, fua);
            if write != OneWrite::Declined {
                if write == OneWrite::Done {
                    let spent = Spent::default();
                    let reply = ShardReply::Done { to: from, result: Ok(()), spent };
                    self.replies.insert(from.tag, reply);
                }
                self.collect();
                return from.tag;
            }
        }
        let tag = self.reserve(offset, data.len());
        self.land(tag, data, fua)
    }

    /// Writes a version.
    fn write(&mut self, version: u8, offset: u64, len: usize) -> Tag {
        self.write_bytes(offset, &bytes(version, offset, len), false)
    }

    /// Writes bytes that must be acknowledged from memory.
    fn dirty(&mut self, version: u8, offset: u64, len: usize) {
        let ops = self.ops().len();
        let tag = self.write(version, offset, len);
        assert_eq!(self.done(tag), Ok(()), "{offset}+{len}");
        assert_eq!(self.ops().len(), ops, "a dirty write went to the store");
    }

    fn done(&mut self, tag: Tag) -> Result<(), Errno> {
        match self.replies.remove(&tag) {
            Some(ShardReply::Done { result, .. }) => result,
            other => panic!("{tag:?}: {other:?}"),
        }
    }

    fn flush(&mut self) -> Tag {
        let from = self.token();
        self.request(ShardRequest::Flush { from, volume: VOLUME });
        from.tag
    }

    fn change(&mut self, kind: OpKind) -> Tag {
        let from = self.token();
        self.request(ShardRequest::Change { from, volume: VOLUME, kind, locked: false });
        from.tag
    }

    fn discard(&mut self, offset: u64, len: u64) -> Tag {
        self.change(OpKind::Discard { offset, len })
    }

    fn lock_range(&mut self, offset: u64, len: u64) -> Tag {
        let from = self.token();
        self.request(ShardRequest::LockRange { from, volume: VOLUME, offset, len });
        from.tag
    }

    fn locked(&mut self, tag: Tag) -> JobId {
        match self.replies.remove(&tag) {
            Some(ShardReply::RangeLocked { job, .. }) => job,
            other => panic!("{tag:?}: {other:?}"),
        }
    }

    fn unlock_range(&mut self, job: JobId, outcome: Changed) {
        let from = self.token();
        self.request(ShardRequest::UnlockRange { from, job, outcome });
        assert_eq!(self.done(from.tag), Ok(()));
    }

    /// The store's ops, in the order of their submission.
    fn ops(&self) -> Vec<OpKind> {
        self.shard.core.store.store().ops()
    }

    /// Offset and length of each of the store's ops.
    fn ranges(&self) -> Vec<(u64, u64)> {
        self.ops().iter().map(OpKind::range).collect()
    }

    /// Index of the op that begins at this offset.
    fn op_at(&self, offset: u64) -> usize {
        let at = self.ranges().iter().position(|(at, _)| *at == offset);
        at.unwrap_or_else(|| panic!("nothing at {offset}: {:?}", self.ops()))
    }

    /// Ends the op at this index with success.
    fn finish(&mut self, at: usize) {
        self.shard.store_mut().finish(at);
        self.turn();
    }

    /// Ends the op at this index with this result, and without effect.
    fn finish_with(&mut self, at: usize, result: Result<u32, Errno>) {
        self.shard.store_mut().finish_with(at, result);
        self.turn();
    }

    /// Ends all ops with success, and the ops that follow from them.
    fn finish_all(&mut self) {
        for _ in 0..1000 {
            if self.ops().is_empty() {
                return;
            }
            self.finish(0);
        }
        panic!("the store is asked without an end: {:?}", self.ops());
    }

    /// The store's content of a range.
    fn stored(&self, offset: u64, len: usize) -> Data {
        Data(self.shard.core.store.store().bytes(offset, len))
    }

    /// Reads a range of cold blocks into the cache.
    fn warm(&mut self, offset: u64, len: u32) {
        let data = self.read_all(offset, len);
        assert_eq!(data, self.stored(offset, len as usize));
    }

    fn is_cached(&self, block: u64) -> bool {
        self.shard.core.slots.find(VOLUME, block).is_some()
    }

    fn dirty_blocks(&self) -> usize {
        self.shard.core.slots.dirty()
    }

    /// Checks that no job, no lock, no pin and no answer is left.
    fn end(&mut self) {
        self.finish_all();
        assert!(self.replies.is_empty(), "{:?}", self.replies);
        assert!(self.shard.is_idle(), "{:?}", self.shard);
        assert_eq!(self.shard.core.locks.len(), 0);
        assert_eq!(self.shard.core.slots.held().collect::<Vec<_>>(), []);
        let slots = &self.shard.core.slots;
        assert_eq!((slots.lent(), slots.pinned()), (0, 0));
        let sessions = &self.shard.core.sessions;
        assert_eq!((sessions.kept(), sessions.promised(), sessions.waiting()), (0, 0, 0));
        assert_eq!(self.shard.write_backs.counts(), (0, 0));
        for state in self.shard.core.volumes.iter() {
            assert_eq!((state.share.used(), state.ops.at_store), (0, 0), "nothing is under way");
        }
    }
}
