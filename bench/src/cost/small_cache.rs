//! [`SmallCache`]: a target with a cache that is much smaller than its volume, and requests to it
//! in a closed loop.

use anyhow::{Result, ensure};
use rblk_operate::target::group_counts::StatsSnapshot;
use rblk_protocol::{AccessMode, Features, Tag};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeSpec};
use rblk_rig::ram_store::{RamStore, StoreCounts};
use rblk_rig::seed::Random;
use rblk_target::volume::ids::VolumeIndex;

use super::{Op, Volume};

/// Steps without the end of a request, at most.
const IDLE_STEPS: u64 = 10_000;
/// Requests outstanding.
const DEPTH: u16 = 16;
/// Longest request, and longest extent of the arena.
const IO_MAX_BYTES: u32 = 1 << 20;
/// Most data of one request here.
const QUEUE_IO_BYTES: u32 = 256 << 10;

/// The size and the kind of a [`SmallCache`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    /// Write-through or write-back.
    pub(super) volume: Volume,
    /// Poll groups of the target.
    pub(super) groups: usize,
    /// Arena of each poll group.
    pub(super) arena_bytes: usize,
    /// The volume is as many times as large as the arena.
    pub(super) part: usize,
    /// Decides the requests and the behaviour of the network.
    pub(super) seed: u64,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) bytes: u32,
}

/// The counters of the target and of its stores.
#[derive(Clone, Debug)]
pub(super) struct SmallCounts {
    pub(super) target: StatsSnapshot,
    pub(super) store: StoreCounts,
}

/// A target with a small cache.
#[derive(Debug)]
pub(super) struct SmallCache {
    rig: Rig<RamStore>,
    queues: Vec<QueueId>,
    volume_bytes: u64,
    random: Random,
}

impl SmallCache {
    pub(super) fn new(setting: Setting) -> Result<Self> {
        let arena_bytes = setting.arena_bytes * setting.groups;
        let volume_bytes = arena_bytes * setting.part;
        let (kind, cache) = setting.volume.kind();
        let spec = VolumeSpec { cache, ..VolumeSpec::new(kind, volume_bytes as u64) };
        let options = RigOptions {
            seed: setting.seed,
            groups: setting.groups,
            arena_bytes,
            dirty_max_bytes: arena_bytes / 2,
            io_max_bytes: IO_MAX_BYTES,
            volumes: vec![spec],
            ..RigOptions::default()
        };
        let volume = VolumeIndex(0);
        let mut rig = Rig::new(&options, |arena| {
            let mut store = RamStore::new(arena, setting.seed);
            store.set_volume(volume, vec![0; volume_bytes]);
            store
        })?;
        let session = rig.begin_session();
        rig.open(session, volume, AccessMode::Exclusive);
        let features = Features::WRITE_WITH_IMM
            .or(Features::CAPSULE_LISTS)
            .or(Features::DATA_LISTS)
            .or(Features::DATA_FIRST);
        let of_queue = QueueOptions {
            depth: DEPTH,
            io_max_bytes: QUEUE_IO_BYTES,
            features,
            ..QueueOptions::default()
        };
        let queues = (0..setting.groups)
            .map(|_| rig.add_queue(session, volume, of_queue))
            .collect::<Result<_>>()?;
        rig.settle(IDLE_STEPS)?;
        let random = Random::new(setting.seed);
        Ok(Self { rig, queues, volume_bytes: volume_bytes as u64, random })
    }

    /// Bytes of the volume.
    pub(super) fn volume_bytes(&self) -> u64 {
        self.volume_bytes
    }

    /// Sends requests, until `count` have ended.
    pub(super) fn drive(
        &mut self,
        count: u64,
        mut next: impl FnMut(&mut Random) -> Request,
    ) -> Result<()> {
        let mut begun = 0;
        'all: for tag in 0..DEPTH {
            for at in 0..self.queues.len() {
                if begun == count {
                    break 'all;
                }
                begun += 1;
                let request = next(&mut self.random);
                self.submit(self.queues[at], Tag(tag), request)?;
            }
        }
        let (mut ended, mut idle) = (0, 0);
        while ended < count {
            self.rig.step();
            let outcomes = self.rig.take_outcomes();
            idle = if outcomes.is_empty() { idle + 1 } else { 0 };
            ensure!(idle < IDLE_STEPS, "no request ended in {idle} steps: {:?}", self.rig);
            for outcome in outcomes {
                ensure!(outcome.result >= 0, "a request failed with errno {}", -outcome.result);
                ended += 1;
                if begun < count {
                    begun += 1;
                    let request = next(&mut self.random);
                    self.submit(outcome.queue, outcome.tag, request)?;
                }
            }
        }
        Ok(())
    }

    fn submit(&mut self, queue: QueueId, tag: Tag, request: Request) -> Result<()> {
        let Request { op, offset, bytes } = request;
        let io = self.rig.request(queue, op.io(), offset, bytes.into());
        self.rig.submit(queue, tag, io)?;
        Ok(())
    }

    /// The counters so far.
    pub(super) fn counts(&mut self) -> SmallCounts {
        let mut store = StoreCounts::default();
        for group in self.rig.groups_mut() {
            let counts = group.store_mut().counts();
            store.ops += counts.ops;
            store.pieces += counts.pieces;
        }
        SmallCounts { target: self.rig.target_counts(), store }
    }
}
