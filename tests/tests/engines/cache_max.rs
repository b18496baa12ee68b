//! A volume gets its share of the cache, and no more: in all poll groups together, dirty blocks
//! included, and also when the maximum changes while the volume is used.

use rblk_initiator::engine::io::IoOp;
use rblk_rig::inprocess::VolumeSpec;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::VolumeIndex;
use rblk_tests::bed::pattern;
use rblk_tests::two_volumes::TwoVolumes;

const SCANNED: VolumeIndex = VolumeIndex(0);
const OTHER: VolumeIndex = VolumeIndex(1);
const MIB: usize = 1 << 20;

/// Two volumes, with a maximum for the first one.
fn two_volumes(cache: CacheMode, cache_max_bytes: Option<u64>) -> TwoVolumes {
    let images = [pattern(1, 32 * MIB), pattern(2, 4 * MIB)];
    TwoVolumes::new(cache, images, |spec| VolumeSpec { cache_max_bytes, ..spec })
}

/// Bytes of a volume in the cache, all poll groups together.
fn cached(world: &mut TwoVolumes, volume: VolumeIndex) -> u64 {
    // Publishes all counters.
    let _ = world.rig.target_counts();
    world.rig.published(volume).0.cached_bytes
}

const CACHED: [CacheMode; 2] = [CacheMode::WriteThrough, CacheMode::WriteBack];

#[test]
fn a_scan_leaves_the_cache_to_others_beyond_its_maximum() {
    for cache in CACHED {
        let max = 2 << 20;
        let mut world = two_volumes(cache, Some(max));
        assert!(world.read(OTHER, 3 * MIB) > 0, "{cache:?}: nothing is cached yet");
        assert!(world.read(SCANNED, 32 * MIB) > 0, "{cache:?}: more than the cache");
        assert!(cached(&mut world, SCANNED) <= max, "{cache:?}");
        assert!(cached(&mut world, SCANNED) >= max / 2, "{cache:?}: it uses what it may have");
        assert_eq!(world.read(OTHER, 3 * MIB), 0, "{cache:?}: all of it is still there");
        // Without a maximum the scan takes the place of the other volume.
        world.change(|volume| volume.cache_max_bytes = None);
        assert!(world.read(SCANNED, 32 * MIB) > 0);
        assert!(cached(&mut world, SCANNED) > max, "{cache:?}");
    }
}

#[test]
fn a_lower_maximum_counts_at_once() {
    for cache in CACHED {
        let mut world = two_volumes(cache, None);
        world.read(SCANNED, 6 * MIB);
        assert!(cached(&mut world, SCANNED) > 4 << 20, "{cache:?}");
        world.change(|volume| volume.cache_max_bytes = Some(1 << 20));
        for _ in 0..100 {
            world.rig.step();
        }
        let is = cached(&mut world, SCANNED);
        assert!(is <= 1 << 20, "{cache:?}: {is}");
        assert!(cached(&mut world, SCANNED) > 0, "{cache:?}: it keeps what it may have");
        world.read(SCANNED, 6 * MIB);
        let is = cached(&mut world, SCANNED);
        assert!(is <= 1 << 20, "{cache:?}: {is}");
    }
}

#[test]
fn writes_to_a_volume_at_its_maximum_are_kept() {
    for cache in CACHED {
        let mut world = two_volumes(cache, Some(1 << 20));
        for (round, max) in
            [Some(1 << 20), None, Some(1 << 20), Some(2 << 20)].into_iter().enumerate()
        {
            world.change(|volume| volume.cache_max_bytes = max);
            world.write(SCANNED, &pattern(10 + round as u64, 5 * MIB));
            world.read(SCANNED, 5 * MIB);
            world.run(SCANNED, IoOp::Flush, 0, 0);
            let most = max.unwrap_or(8 << 20);
            let is = cached(&mut world, SCANNED);
            assert!(is <= most, "{cache:?}: {is}");
        }
    }
}
