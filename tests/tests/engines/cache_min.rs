//! A volume keeps its part of the cache while another one is read from end to end.

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

const KEEPS: VolumeIndex = VolumeIndex(0);
const SCANNED: VolumeIndex = VolumeIndex(1);
const MIB: usize = 1 << 20;
const IO: usize = 64 << 10;

struct World {
    rig: Rig<CrashStore>,
    queues: [QueueId; 2],
    images: [Vec<u8>; 2],
}

impl World {
    /// Two volumes over an arena of 8 MiB in two poll groups, with a minimum for the first one.
    fn new(cache: CacheMode, cache_min_bytes: u64) -> Self {
        let images = [pattern(1, 4 * MIB), pattern(2, 32 * MIB)];
        let TwoVolumes { rig, queues, images } =
            TwoVolumes::new(cache, images, |spec| VolumeSpec { cache_min_bytes, ..spec });
        Self { rig, queues, images }
    }

    /// Reads the first bytes of a volume. Returns the number of ops at the store.
    fn read(&mut self, volume: VolumeIndex, bytes: usize) -> u64 {
        let (at, before) = (usize::from(volume.0), self.rig.store_mut().ops());
        for from in (0..bytes).step_by(IO) {
            let io = self.rig.request(self.queues[at], IoOp::Read, from as u64, IO as u64);
            self.rig.submit(self.queues[at], Tag(0), io).expect("a free tag");
            let mut all = Vec::new();
            let done = self.rig.run(PATIENCE, |rig| {
                all.extend(rig.take_outcomes());
                !all.is_empty()
            });
            assert!(done.is_ok() && all[0].result >= 0, "at {from} of {at}: {all:?}");
            let got = self.rig.buffer(self.queues[at], Tag(0), IO);
            assert!(got == self.images[at][from..from + IO], "at {from} of {at}");
        }
        self.rig.store_mut().ops() - before
    }

    /// Sets the minimum of the first volume.
    fn keep(&mut self, cache_min_bytes: u64) {
        let volume = Volume { cache_min_bytes, ..Volume::clone(&self.rig.volumes()[0]) };
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
}

/// Ops at the store for the first volume, after it was read once and the other volume was scanned.
/// The minimum changes before the last scan.
fn asked_after(cache: CacheMode, mins: [u64; 2]) -> u64 {
    let mut world = World::new(cache, mins[0]);
    assert!(world.read(KEEPS, 2 * MIB) > 0, "{cache:?}: nothing is cached yet");
    if mins[0] > 0 {
        assert!(world.read(SCANNED, 32 * MIB) > 0, "{cache:?}: more than the cache");
    }
    world.keep(mins[1]);
    assert!(world.read(SCANNED, 32 * MIB) > 0, "{cache:?}: more than the cache");
    world.read(KEEPS, 2 * MIB)
}

#[test]
fn a_scan_does_not_push_a_volume_below_its_minimum() {
    for cache in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        let min = 2 << 20;
        assert_eq!(asked_after(cache, [min, min]), 0, "{cache:?}: all of it is there");
        assert_eq!(asked_after(cache, [0, min]), 0, "{cache:?}: a minimum that came counts");
        assert!(asked_after(cache, [min, 0]) > 0, "{cache:?}: a minimum that went does not");
        assert!(asked_after(cache, [0, 0]) > 0, "{cache:?}: nothing is kept");
    }
}
