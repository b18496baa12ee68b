//! [`Plan`]: one round of the test, from its seed.

use std::fmt;

use rblk_config::CacheMode;
use rblk_rig::seed::Random;
use rblk_tests::lab::Fault;

use super::{WRITERS, by_turns};

/// The time of the fault.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Scene {
    /// While all writers write and synchronise.
    DuringSyncs,
    /// While no sync runs: the kernel writes back, and fails. The disk works again when all writers
    /// synchronise.
    BetweenSyncs,
}

/// How a writer writes and synchronises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// `O_DIRECT`, then `fdatasync`.
    Direct,
    /// Through the page cache of the mount, then `fdatasync`.
    Buffered,
    /// `O_DIRECT` with `O_DSYNC`: a FUA write, and a FLUSH.
    Fua,
}

/// One round, from its seed.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) fault: Fault,
    pub(super) direct: bool,
    pub(super) cache: CacheMode,
    pub(super) scene: Scene,
    pub(super) rdma: bool,
    /// Whether the disk has a volatile cache.
    pub(super) volatile: bool,
    /// Whether the target stands still while the disk fails, as on a busy machine. Then any of its
    /// threads may be the first to hear of its FLUSH.
    pub(super) standstill: bool,
    /// Chunks that a thin pool has room for.
    pub(super) room: u64,
    /// Acknowledged writes before the fault.
    pub(super) writes_before: u64,
    pub(super) ways: [Way; WRITERS],
}

impl Plan {
    pub(super) fn of(seed: u64, faults: &[Fault]) -> Self {
        let mut random = Random::new(seed);
        let kinds = faults.len() as u64;
        let (fault, turn) = (faults[by_turns(seed, kinds)], seed / kinds);
        let scene = match (turn % 4, turn / 4 % 2) {
            (0 | 2, _) | (3, 0) => Scene::DuringSyncs,
            _ => Scene::BetweenSyncs,
        };
        let caches = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];
        Self {
            seed,
            fault,
            direct: turn % 4 == 3,
            cache: caches[by_turns(turn, 3)],
            scene,
            rdma: seed % 5 == 4,
            volatile: random.chance(500),
            standstill: random.chance(750),
            // The first chunk, the chunks that writers fill before the scene between syncs, and
            // more.
            room: 1 + 4 * WRITERS as u64 + random.within(0, 20),
            writes_before: random.within(8, 80),
            ways: std::array::from_fn(|writer| match random.below(3) {
                // One direct writer on each mount: every round then has acknowledged writes at
                // stake.
                _ if writer < 2 => Way::Direct,
                0 => Way::Buffered,
                1 => Way::Fua,
                _ => Way::Direct,
            }),
        }
    }

    pub(super) fn store(&self) -> &'static str {
        if self.direct { "direct" } else { "buffered" }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, fault, cache, scene, ways, .. } = self;
        let address = if self.rdma { "rdma" } else { "tcp" };
        let disk = if self.volatile { "volatile" } else { "non-volatile" };
        let still = if self.standstill { ", standstill" } else { "" };
        write!(f, "seed {seed}: fault {fault}, {} store, cache {cache}, ", self.store())?;
        write!(f, "{scene:?}{still}, {disk} disk, {address}, writers {ways:?}")
    }
}
