//! Targets that die in the middle of random requests, by a loss of power or alone, and start again
//! on the remaining disk. Some hand over to another program in good order before that.
//!
//! No durable write is lost. If only the program died and does not write back, no acknowledged
//! write is lost. No read returns data that was never written.
//!
//! Each seed is a chain of [`CYCLES`] lives. `RBLK_LONG=1` makes it 10,000 lives per cache mode;
//! `RBLK_SEED=N` runs one seed alone.

use rblk_rig::seed::Random;
use rblk_target::volume::CacheMode;
use rblk_tests::long::times;
use rblk_tests::oracle::{CrashCount, Oracle};
use rblk_tests::storm::{Crash, Storm, StormOptions, seeds};

/// Lives of the target in one chain.
const CYCLES: u64 = 10;

fn chain(seed: u64, cache: CacheMode) -> CrashCount {
    let mut random = Random::new(seed ^ 0xdead);
    let block_bytes = [512, 512, 4096][random.index(3)];
    let volume_bytes = [16 << 10, 64 << 10, 256 << 10, 1152 << 10][random.index(4)];
    let mut image = vec![0; volume_bytes];
    let mut oracle = Oracle::new(image.clone(), block_bytes as usize);
    let mut total = CrashCount::default();
    for cycle in 0..CYCLES {
        let life = seed * CYCLES + cycle;
        let options = StormOptions::random(life, cache, block_bytes, volume_bytes);
        let crash = [Crash::Machine, Crash::Machine, Crash::Program][random.index(3)];
        println!("seed {seed}, life {life}: {crash:?}, {volume_bytes} bytes, {options:?}");
        let mut storm = Storm::new(&options, oracle, &image);
        let most = [20, 200, 2000][random.index(3)];
        for _ in 0..random.within(1, most) {
            storm.step();
        }
        // Another program goes on with the same disk. The crash covers its leftovers, too.
        if random.chance(300) {
            storm.upgrade();
            for _ in 0..random.below(most) {
                storm.step();
            }
        }
        let count;
        (oracle, image, count) = storm.crash(crash);
        total.open += count.open;
        total.older += count.older;
    }
    total
}

fn run(cache: CacheMode) {
    let chains = times(30, 1000);
    let mut total = CrashCount::default();
    for seed in seeds(chains) {
        let count = chain(seed, cache);
        total.open += count.open;
        total.older += count.older;
    }
    println!(
        "of {} sectors that could have several values, {} were older",
        total.open, total.older
    );
    if seeds(chains).end == chains {
        // Otherwise no write was ever at stake.
        assert!(total.older > 1000 && total.open > total.older + 1000, "{total:?}");
    }
}

#[test]
fn no_cache() {
    run(CacheMode::None);
}

#[test]
fn write_through() {
    run(CacheMode::WriteThrough);
}

#[test]
fn write_back() {
    run(CacheMode::WriteBack);
}
