//! Hosts and a target in one thread, with everything that goes wrong between them, against a history: see
//! [`rblk_tests::sim`].
//!
//! An optimised build runs 5000 seeds, others fewer unless `RBLK_LONG=1`; `RBLK_SEED=N` runs one seed alone.

use rblk_tests::sim::{Plan, World};
use rblk_tests::storm::{is_long, seeds};

fn size() -> u64 {
    if is_long() || !cfg!(debug_assertions) { 5000 } else { 100 }
}

#[test]
fn nothing_is_lost_stale_or_stuck() {
    let begun = std::time::Instant::now();
    let count = seeds(size());
    let (mut requests, mut errors, mut steps, mut fenced, mut restarts, mut recoveries) =
        (0, 0, 0, 0, 0, 0);
    for seed in count.clone() {
        let report = World::run(Plan::random(seed));
        requests += report.requests;
        errors += report.errors;
        steps += report.steps;
        fenced += report.fenced;
        restarts += report.restarts;
        recoveries += report.recoveries;
    }
    println!(
        "{count:?}: {requests} requests ({errors} failed), {steps} steps, {fenced} mounts fenced, {restarts} ends of \
         the target, {recoveries} recoveries in {:?}",
        begun.elapsed()
    );
}

#[test]
fn a_seed_decides_everything() {
    for seed in seeds(20) {
        let run = || World::run(Plan::random(seed));
        assert_eq!(run(), run(), "seed {seed}");
    }
}
