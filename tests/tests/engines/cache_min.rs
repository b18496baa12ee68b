//! A volume keeps its part of the cache while another one is read from end to end.

use rblk_rig::inprocess::VolumeSpec;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::VolumeIndex;
use rblk_tests::bed::pattern;
use rblk_tests::two_volumes::TwoVolumes;

const KEEPS: VolumeIndex = VolumeIndex(0);
const SCANNED: VolumeIndex = VolumeIndex(1);
const MIB: usize = 1 << 20;

/// Ops at the store for the first volume, after it was read once and the other volume was scanned.
/// The minimum changes before the last scan.
fn asked_after(cache: CacheMode, mins: [u64; 2]) -> u64 {
    let images = [pattern(1, 4 * MIB), pattern(2, 32 * MIB)];
    let mut world =
        TwoVolumes::new(cache, images, |spec| VolumeSpec { cache_min_bytes: mins[0], ..spec });
    assert!(world.read(KEEPS, 2 * MIB) > 0, "{cache:?}: nothing is cached yet");
    if mins[0] > 0 {
        assert!(world.read(SCANNED, 32 * MIB) > 0, "{cache:?}: more than the cache");
    }
    world.change(|volume| volume.cache_min_bytes = mins[1]);
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
