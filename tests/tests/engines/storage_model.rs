//! Random overlapping requests over several queues against an oracle, in every cache mode and at
//! arena sizes from a few slots to more than the volume.
//!
//! An optimised build makes a million requests, others fewer unless `RBLK_LONG=1`; `RBLK_SEED=N`
//! runs one seed alone.

use rblk_rig::seed::Random;
use rblk_target::volume::CacheMode;
use rblk_tests::oracle::Oracle;
use rblk_tests::storm::{Storm, StormOptions, is_thorough, seeds};

/// Storms of each of the six tests, and requests of each storm.
fn size() -> (u64, u64) {
    if is_thorough() { (168, 1000) } else { (12, 600) }
}

fn run(cache: CacheMode, block_bytes: u32) {
    let (storms, requests) = size();
    let mut all = 0;
    for seed in seeds(storms) {
        let mut random = Random::new(seed);
        let volume_bytes = [32 << 10, 256 << 10, 2304 << 10][random.index(3)];
        let options = StormOptions::random(seed, cache, block_bytes, volume_bytes);
        println!("seed {seed}: {volume_bytes} bytes, {options:?}");
        let mut image = vec![0; volume_bytes];
        random.fill(&mut image);
        let oracle = Oracle::new(image.clone(), block_bytes as usize);
        let mut storm = Storm::new(&options, oracle, &image);
        // The oracle is strictest when no request is under way.
        for _ in 0..4 {
            storm.run(requests / 4);
            storm.settle();
            if random.chance(500) {
                storm.read_all();
            }
        }
        storm.calm();
        all += storm.ended();
    }
    println!("{all} requests");
}

#[test]
fn no_cache_blocks_of_512() {
    run(CacheMode::None, 512);
}

#[test]
fn no_cache_blocks_of_4096() {
    run(CacheMode::None, 4096);
}

#[test]
fn write_through_blocks_of_512() {
    run(CacheMode::WriteThrough, 512);
}

#[test]
fn write_through_blocks_of_4096() {
    run(CacheMode::WriteThrough, 4096);
}

#[test]
fn write_back_blocks_of_512() {
    run(CacheMode::WriteBack, 512);
}

#[test]
fn write_back_blocks_of_4096() {
    run(CacheMode::WriteBack, 4096);
}
