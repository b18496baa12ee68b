//! A volume gets its share of the cache, and no more: in all poll groups together, dirty blocks
//! included, and also when the maximum changes while the volume is used.

use std::sync::Arc;

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::Tag;
use rblk_rig::crash_store::CrashStore;
use rblk_rig::inprocess::{QueueId, Rig, VolumeSpec};
use rblk_target::data::poll_group::VolumeStep;
use rblk_target::volume::ids::VolumeIndex;
use rblk_target::volume::{CacheMode, Volume};
use rblk_tests::bed::{PATIENCE, pattern};
use rblk_tests::two_volumes::TwoVolumes;

const SCANNED: VolumeIndex = VolumeIndex(0);
const OTHER: VolumeIndex = VolumeIndex(1);
const MIB: usize = 1 << 20;
const IO: usize = 64 << 10;

struct World {
    rig: Rig<CrashStore>,
    queues: [QueueId; 2],
    images: [Vec<u8>; 2],
}

impl World {
    /// Two volumes over an arena of 8 MiB in two poll groups, with a maximum for the first one.
    fn new(cache: CacheMode, cache_max_bytes: Option<u64>) -> Self {
        let images = [pattern(1, 32 * MIB), pattern(2, 4 * MIB)];
        let TwoVolumes { rig, queues, images } =
            TwoVolumes::new(cache, images, |spec| VolumeSpec { cache_max_bytes, ..spec });
        Self { rig, queues, images }
    }

    fn run(&mut self, volume: VolumeIndex, op: IoOp, from: usize, len: usize) {
        let queue = self.queues[usize::from(volume.0)];
        let io = self.rig.request(queue, op, from as u64, len as u64);
        self.rig.submit(queue, Tag(0), io).expect("a free tag");
        let mut all = Vec::new();
        let done = self.rig.run(PATIENCE, |rig| {
            all.extend(rig.take_outcomes());
            !all.is_empty()
        });
        assert!(done.is_ok() && all[0].result >= 0, "{op:?} at {from}: {all:?}");
    }

    /// Reads the first bytes of a volume. Returns the number of ops at the store.
    fn read(&mut self, volume: VolumeIndex, bytes: usize) -> u64 {
        let (at, before) = (usize::from(volume.0), self.rig.store_mut().ops());
        for from in (0..bytes).step_by(IO) {
            self.run(volume, IoOp::Read, from, IO);
            let got = self.rig.buffer(self.queues[at], Tag(0), IO);
            assert!(got == self.images[at][from..from + IO], "at {from} of {at}");
        }
        self.rig.store_mut().ops() - before
    }

    /// Writes new bytes to the beginning of the first volume, and reads them back.
    fn write(&mut self, bytes: usize, seed: u64) {
        let new = pattern(seed, bytes);
        for from in (0..bytes).step_by(IO) {
            self.rig.fill_buffer(self.queues[0], Tag(0), &new[from..from + IO]);
            self.run(SCANNED, IoOp::Write, from, IO);
        }
        self.images[0][..bytes].copy_from_slice(&new);
        self.read(SCANNED, bytes);
        self.run(SCANNED, IoOp::Flush, 0, 0);
    }

    /// Sets the maximum of the first volume.
    fn bound(&mut self, cache_max_bytes: Option<u64>) {
        let volume = Volume { cache_max_bytes, ..Volume::clone(&self.rig.volumes()[0]) };
        let volume = Arc::new(volume);
        self.rig.begin_step(&volume, VolumeStep::Access);
        let mut outcome = None;
        let stepped = self.rig.run(PATIENCE, |rig| {
            outcome = rig.step_outcome();
            outcome.is_some()
        });
        assert!(stepped.is_ok() && outcome == Some(Ok(())), "{outcome:?}");
        self.rig.note_volume(volume);
    }

    /// Bytes of a volume in the cache, all poll groups together.
    fn cached(&mut self, volume: VolumeIndex) -> u64 {
        // Publishes all counters.
        let _ = self.rig.target_counts();
        self.rig.published(volume).0.cached_bytes
    }
}

const CACHED: [CacheMode; 2] = [CacheMode::WriteThrough, CacheMode::WriteBack];

#[test]
fn a_scan_leaves_the_cache_to_others_beyond_its_maximum() {
    for cache in CACHED {
        let max = 2 << 20;
        let mut world = World::new(cache, Some(max));
        assert!(world.read(OTHER, 3 * MIB) > 0, "{cache:?}: nothing is cached yet");
        assert!(world.read(SCANNED, 32 * MIB) > 0, "{cache:?}: more than the cache");
        assert!(world.cached(SCANNED) <= max, "{cache:?}");
        assert!(world.cached(SCANNED) >= max / 2, "{cache:?}: it uses what it may have");
        assert_eq!(world.read(OTHER, 3 * MIB), 0, "{cache:?}: all of it is still there");
        // Without a maximum the scan takes the place of the other volume.
        world.bound(None);
        assert!(world.read(SCANNED, 32 * MIB) > 0);
        assert!(world.cached(SCANNED) > max, "{cache:?}");
    }
}

#[test]
fn a_lower_maximum_counts_at_once() {
    for cache in CACHED {
        let mut world = World::new(cache, None);
        world.read(SCANNED, 6 * MIB);
        assert!(world.cached(SCANNED) > 4 << 20, "{cache:?}");
        world.bound(Some(1 << 20));
        for _ in 0..100 {
            world.rig.step();
        }
        assert!(world.cached(SCANNED) <= 1 << 20, "{cache:?}: {}", world.cached(SCANNED));
        assert!(world.cached(SCANNED) > 0, "{cache:?}: it keeps what it may have");
        world.read(SCANNED, 6 * MIB);
        assert!(world.cached(SCANNED) <= 1 << 20, "{cache:?}: {}", world.cached(SCANNED));
    }
}

#[test]
fn writes_to_a_volume_at_its_maximum_are_kept() {
    for cache in CACHED {
        let mut world = World::new(cache, Some(1 << 20));
        for (round, max) in
            [Some(1 << 20), None, Some(1 << 20), Some(2 << 20)].into_iter().enumerate()
        {
            world.bound(max);
            world.write(5 * MIB, 10 + round as u64);
            let most = max.unwrap_or(8 << 20);
            assert!(world.cached(SCANNED) <= most, "{cache:?}: {}", world.cached(SCANNED));
        }
    }
}
