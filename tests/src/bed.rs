//! [`Bed`]: a [`Rig`] with one volume of each kind, to run I/O on.

use rblk_fabric::soft::network::Conditions;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::inprocess::{
    Outcome, QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec,
};
use rblk_rig::ram_store::{RamStore, StoreConditions};
use rblk_rig::seed::Random;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::{SessionIndex, VolumeIndex};

/// The volume in memory.
pub const MEMORY: VolumeIndex = VolumeIndex(0);
/// The volume that keeps no data.
pub const NULL: VolumeIndex = VolumeIndex(1);
/// The volume in the store.
pub const STORE: VolumeIndex = VolumeIndex(2);
/// A volume in the store that refuses writes.
pub const FROZEN: VolumeIndex = VolumeIndex(3);
/// Bytes of each volume.
pub const VOLUME_BYTES: u64 = 4 << 20;
/// Bytes at the beginning of [`FROZEN`] that are `pattern(7, FROZEN_BYTES)`; the others are zeros.
pub const FROZEN_BYTES: usize = 16 << 10;
/// Steps after which a test gives up on something.
pub const PATIENCE: u64 = 200_000;

/// A rig with volumes and one session.
#[derive(Debug)]
pub struct Bed {
    /// The rig.
    pub rig: Rig<RamStore>,
    /// Its first session, which has every volume open.
    pub session: SessionIndex,
}

/// Bytes that follow from a seed.
#[must_use]
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::new(seed).fill(&mut bytes);
    bytes
}

impl Bed {
    /// A bed with these options. It replaces their volumes.
    ///
    /// # Panics
    /// The rig cannot be built.
    #[must_use]
    pub fn new(options: &RigOptions) -> Self {
        Self::with_cache(options, VolumeSpec::new(VolumeKind::Store, VOLUME_BYTES).cache)
    }

    /// A bed whose store volumes use this cache mode.
    ///
    /// # Panics
    /// The rig cannot be built.
    #[must_use]
    pub fn with_cache(options: &RigOptions, cache: CacheMode) -> Self {
        let spec = |kind| VolumeSpec { cache, ..VolumeSpec::new(kind, VOLUME_BYTES) };
        let frozen = VolumeSpec { read_only: true, ..spec(VolumeKind::Store) };
        let volumes =
            vec![spec(VolumeKind::Memory), spec(VolumeKind::Null), spec(VolumeKind::Store), frozen];
        let options = RigOptions { volumes, ..options.clone() };
        let mut rig = Rig::new(&options, |arena| {
            let mut store = RamStore::new(arena, options.seed);
            let len = usize::try_from(VOLUME_BYTES).expect("a small volume");
            store.set_volume(STORE, vec![0; len]);
            let mut frozen = pattern(7, FROZEN_BYTES);
            frozen.resize(len, 0);
            store.set_volume(FROZEN, frozen);
            store
        })
        .expect("a rig");
        let session = rig.begin_session();
        let mut bed = Self { rig, session };
        bed.open_all(session);
        bed
    }

    /// Opens every volume for a session.
    pub fn open_all(&mut self, session: SessionIndex) {
        for volume in [MEMORY, NULL, STORE, FROZEN] {
            self.rig.open(session, volume, AccessMode::Shared);
        }
    }

    /// A connected queue of the first session.
    ///
    /// # Panics
    /// The queue gets no path.
    pub fn queue(&mut self, volume: VolumeIndex, options: QueueOptions) -> QueueId {
        let session = self.session;
        let queue = self.rig.add_queue(session, volume, options).expect("a queue");
        self.rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
        queue
    }

    /// Submits a request over a range in bytes.
    ///
    /// # Panics
    /// The tag is in use.
    pub fn submit(&mut self, queue: QueueId, tag: u16, op: IoOp, offset: u64, len: u64) {
        let io = self.rig.request(queue, op, offset, len);
        self.submit_io(queue, tag, io);
    }

    /// Submits a request.
    ///
    /// # Panics
    /// The tag is in use.
    pub fn submit_io(&mut self, queue: QueueId, tag: u16, io: Io) {
        self.rig.submit(queue, Tag(tag), io).expect("a free tag");
    }

    /// Waits for `count` outcomes and returns them in order.
    ///
    /// # Panics
    /// Fewer outcomes arrive.
    pub fn outcomes(&mut self, count: usize) -> Vec<Outcome> {
        let mut all = Vec::new();
        let done = self.rig.run(PATIENCE, |rig| {
            all.extend(rig.take_outcomes());
            all.len() >= count
        });
        assert!(done.is_ok(), "{} of {count} requests ended: {:?}", all.len(), self.rig);
        all
    }

    /// Runs one request alone and returns its result.
    ///
    /// # Panics
    /// The request does not end, or another request ends.
    pub fn io(&mut self, queue: QueueId, op: IoOp, offset: u64, len: u64) -> i32 {
        let io = self.rig.request(queue, op, offset, len);
        self.run_io(queue, io)
    }

    /// Runs one request alone and returns its result.
    ///
    /// # Panics
    /// The request does not end, or another request ends.
    pub fn run_io(&mut self, queue: QueueId, io: Io) -> i32 {
        self.submit_io(queue, 0, io);
        let outcomes = self.outcomes(1);
        assert_eq!(
            outcomes.iter().map(|o| (o.queue, o.tag)).collect::<Vec<_>>(),
            [(queue, Tag(0))]
        );
        outcomes[0].result
    }

    /// Writes bytes.
    ///
    /// # Panics
    /// The write fails.
    pub fn write(&mut self, queue: QueueId, offset: u64, bytes: &[u8]) {
        self.rig.fill_buffer(queue, Tag(0), bytes);
        let len = bytes.len();
        let result = self.io(queue, IoOp::Write, offset, len as u64);
        assert_eq!(usize::try_from(result), Ok(len), "write of {len} bytes at {offset}");
    }

    /// Checks that nothing holds memory of the arena. The session's connections must have ended.
    ///
    /// # Panics
    /// Something holds memory.
    pub fn assert_arena_is_whole(&mut self, options: &RigOptions) {
        self.rig.store_mut().set_conditions(StoreConditions::default());
        self.rig.network().set_conditions(Conditions::default());
        for group in self.rig.groups_mut() {
            let held: Vec<_> = group.shard().slots().held().collect();
            assert!(held.is_empty(), "slots are held: {held:?}");
        }
        // Reads of the longest kind, one after the other, show that all memory can be allocated.
        let (depth, io_max_bytes) = (1, options.io_max_bytes);
        let queue =
            self.queue(STORE, QueueOptions { depth, io_max_bytes, ..QueueOptions::default() });
        for _ in 0..options.arena_bytes / options.io_max_bytes as usize + 1 {
            assert_eq!(
                self.io(queue, IoOp::Read, 0, io_max_bytes.into()),
                io_max_bytes.cast_signed()
            );
        }
    }

    /// Reads bytes. The buffer is overwritten first, so that old bytes cannot pass for the data.
    ///
    /// # Panics
    /// The read fails.
    pub fn read(&mut self, queue: QueueId, offset: u64, len: usize) -> Vec<u8> {
        self.rig.fill_buffer(queue, Tag(0), &vec![0xee; len]);
        let result = self.io(queue, IoOp::Read, offset, len as u64);
        assert_eq!(usize::try_from(result), Ok(len), "read of {len} bytes at {offset}");
        self.rig.buffer(queue, Tag(0), len)
    }
}
