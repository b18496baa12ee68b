//! The parameters of a [`Rig`](super::Rig): volumes, the target, queues.

use std::time::Duration;

use rblk_fabric::soft::network::Conditions;
use rblk_protocol::{Features, limits};
use rblk_target::volume::CacheMode;
use rblk_target::volume::limits::Limits;

/// Where a volume's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VolumeKind {
    /// In registered memory.
    Memory,
    /// Without data.
    Null,
    /// In the store.
    Store,
}

/// A volume to serve; its index is its place in [`RigOptions::volumes`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeSpec {
    /// Where its bytes are.
    pub kind: VolumeKind,
    /// Bytes of a block.
    pub block_size: u32,
    /// Capacity.
    pub blocks: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// DISCARD is supported.
    pub discard: bool,
    /// Its cache mode, for [`VolumeKind::Store`] only.
    pub cache: CacheMode,
    /// Bytes of the cache that it keeps when others need memory.
    pub cache_min_bytes: u64,
    /// Bytes of the cache that it has at most.
    pub cache_max_bytes: Option<u64>,
    /// Most bytes to read ahead of a sequential reader.
    pub read_ahead_bytes: u32,
    /// Its limits, per second of the rig's clock.
    pub limits: Limits,
}

impl VolumeSpec {
    /// A volume that can be written, of blocks of 512 bytes, without a cache.
    #[must_use]
    pub fn new(kind: VolumeKind, bytes: u64) -> Self {
        Self {
            kind,
            block_size: 512,
            blocks: bytes / 512,
            read_only: false,
            discard: true,
            cache: CacheMode::None,
            cache_min_bytes: 0,
            cache_max_bytes: None,
            read_ahead_bytes: 0,
            limits: Limits::default(),
        }
    }
}

/// The parameters of a [`super::Rig`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RigOptions {
    /// Decides the behaviour of the network.
    pub seed: u64,
    /// The conditions of the network's streams.
    pub conditions: Conditions,
    /// The duration of one step.
    pub tick: Duration,
    /// Poll groups of the target; connections are dealt to them in turn.
    pub groups: usize,
    /// How many of a thousand turns a poll group sleeps through, so that they are not in step.
    pub skipped_turns_per_mille: u32,
    /// Memory of the target for data in flight and the cache, of all poll groups together.
    pub arena_bytes: usize,
    /// Most acknowledged bytes in memory only, of all poll groups together.
    pub dirty_max_bytes: usize,
    /// A dirty block is on its way to the store at the latest after this.
    pub write_back_delay: Duration,
    /// Longest extent of the arena, and most data of one command.
    pub io_max_bytes: u32,
    /// Entries of each CQ of the target.
    pub cq_entries: u32,
    /// Largest MR of the devices, in bytes.
    pub region_max_bytes: u64,
    /// Devices of the target; connections are dealt to them by session.
    pub devices: usize,
    /// QPs are over only when they are destroyed, as those of cards: see
    /// [`Network::with_late_rdma`].
    ///
    /// [`Network::with_late_rdma`]: rblk_fabric::soft::network::Network::with_late_rdma
    pub late_rdma: bool,
    /// The devices have the rules of iWARP: see [`Network::with_iwarp_rules`]. `late_rdma` and
    /// `region_max_bytes` are ignored then.
    ///
    /// [`Network::with_iwarp_rules`]: rblk_fabric::soft::network::Network::with_iwarp_rules
    pub iwarp: bool,
    /// Steps until the QP of a connection that ended is destroyed, at most, at either end.
    pub destroy_steps: u64,
    /// The volumes of the target.
    pub volumes: Vec<VolumeSpec>,
}

impl Default for RigOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            conditions: Conditions::default(),
            tick: Duration::from_micros(10),
            groups: 1,
            skipped_turns_per_mille: 0,
            arena_bytes: 16 << 20,
            dirty_max_bytes: 4 << 20,
            write_back_delay: Duration::from_millis(10),
            io_max_bytes: 1 << 20,
            // Enough for some tens of queues of default depth.
            cq_entries: 1 << 16,
            region_max_bytes: u64::MAX,
            devices: 1,
            late_rdma: false,
            iwarp: false,
            destroy_steps: 0,
            volumes: Vec::new(),
        }
    }
}

/// The options of an I/O queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueOptions {
    /// Commands outstanding.
    pub depth: u16,
    /// Most data per command.
    pub io_max_bytes: u32,
    /// Most in-capsule data of a command.
    pub in_capsule_bytes: u32,
    /// Optional verbs, and lists of capsules.
    pub features: Features,
    /// READs the target may have outstanding.
    pub reads_out: u8,
    /// QPs of the queue. The target moves data by the QP with the least data on its way.
    pub lanes: u16,
}

impl QueueOptions {
    /// Bytes from one buffer to the next, as in an initiator.
    #[must_use]
    pub fn buffer_stride(&self) -> usize {
        let room = if self.features.has(Features::DIGEST) { limits::IO_MIN_BYTES } else { 0 };
        (self.io_max_bytes + room) as usize
    }

    /// The number of a lane of `queue` among the queues of the session.
    ///
    /// # Panics
    /// The number of the queue or of the lane is too large.
    #[must_use]
    pub fn lane(queue: u16, lane: u16) -> u16 {
        const QUEUES: u16 = limits::QUEUES_MAX / limits::LANES_MAX;
        assert!(queue < QUEUES && lane < limits::LANES_MAX, "queue {queue}, lane {lane}");
        queue + lane * QUEUES
    }
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self {
            depth: 32,
            io_max_bytes: 1 << 20,
            in_capsule_bytes: limits::IN_CAPSULE_DEFAULT_BYTES,
            features: Features::WRITE_WITH_IMM.or(Features::CAPSULE_LISTS),
            reads_out: 16,
            lanes: 1,
        }
    }
}
