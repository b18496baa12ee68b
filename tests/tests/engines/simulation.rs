//! Hosts and a target in one thread, with faults of every kind between them, compared with a
//! history: see [`rblk_tests::sim`].
//!
//! An optimised build runs 5000 seeds, others fewer unless `RBLK_LONG=1`; `RBLK_SEED=N` runs one
//! seed alone.

use rblk_initiator::engine::io::IoOp;
use rblk_rig::seed::Random;
use rblk_tests::oracle::Oracle;
use rblk_tests::sim::plan::{Break, Fault};
use rblk_tests::sim::world::Report;
use rblk_tests::sim::{Plan, World};
use rblk_tests::storm::{is_thorough, seeds};

fn size() -> u64 {
    if is_thorough() { 5000 } else { 100 }
}

/// Threads that share the seeds.
const THREADS: u64 = 2;

#[test]
fn nothing_is_lost_stale_or_stuck() {
    let begun = std::time::Instant::now();
    let seeds = seeds(size());
    let sums: Vec<Report> = std::thread::scope(|scope| {
        let share = |thread| {
            let own = seeds.clone().filter(move |seed| seed % THREADS == thread);
            scope.spawn(move || {
                let mut sum = Report::default();
                for seed in own {
                    sum.add(&World::run(Plan::random(seed)));
                }
                sum
            })
        };
        let threads: Vec<_> = (0..THREADS).map(share).collect();
        threads.into_iter().map(|thread| thread.join().expect("its seeds")).collect()
    });
    let mut sum = Report::default();
    sums.iter().for_each(|report| sum.add(report));
    // Both modes of losses occurred, and ways came and went.
    let many = seeds.end - seeds.start >= 100;
    assert!(!many || sum.lasting > 0 && sum.remounts > 0, "{sum:?}");
    assert!(!many || sum.way_changes > 100, "{sum:?}");
    println!("{seeds:?} in {:?}: {sum:?}", begun.elapsed());
}

/// The store holds a write while its path dies and the host comes back by another path: later
/// writes stay.
#[test]
fn a_stale_write_never_lands() {
    let count = if is_thorough() { 1000 } else { 40 };
    for seed in seeds(count) {
        let mut random = Random::new(seed ^ 0x0073_7461_6c65);
        let plan = Plan { hosts: 1, addresses: 2, fail_after: None, ..Plan::random(seed) };
        let plan = Plan { requests: 0, faults: Vec::new(), ..plan };
        let block = plan.block_bytes as usize;
        let blocks = 1 + random.index(plan.io_max_bytes as usize / block);
        let range = 0..(blocks * block).min(plan.volume_bytes);
        let mut world = World::new(plan);
        world.by_hand();
        world.until("mounted", |world| world.is_mounted());
        world.submit(IoOp::Write, range.clone(), false);
        world.submit(IoOp::Flush, 0..0, false);
        world.until("the first write", |world| world.outstanding() == 0);
        let lasts = random.within(1, 2000);
        // A write with FUA reaches the store in every cache mode.
        world.fault(Fault::Hold { steps: lasts });
        world.submit(IoOp::Write, range.clone(), true);
        world.until("the store has it", |world| world.is_holding() || world.outstanding() == 0);
        if random.chance(200) {
            world.fault(Fault::Server { host: 0, steps: random.below(1000) });
        } else {
            let how = [Break::Cut, Break::Silence, Break::Stall][random.index(3)];
            let (address, steps) = (world.address(), random.below(3000));
            world.fault(Fault::Link { host: 0, address, how, steps });
        }
        world.until("the second write", |world| world.outstanding() == 0);
        let last = world.submit(IoOp::Write, range.clone(), random.chance(500));
        world.until("the third write", |world| world.outstanding() == 0);
        for _ in 0..random.below(500) {
            world.step();
        }
        world.submit(IoOp::Read, range.clone(), false);
        world.submit(IoOp::Flush, 0..0, false);
        world.until("the end", |world| world.outstanding() == 0);
        let mut data = vec![0; range.len()];
        Oracle::fill(last.expect("a change"), range.start, &mut data);
        assert!(world.stored()[range] == data, "seed {seed}: not what was written last");
        let _ = world.finish();
    }
}

#[test]
fn a_seed_decides_everything() {
    for seed in seeds(20) {
        let run = || World::run(Plan::random(seed));
        assert_eq!(run(), run(), "seed {seed}");
    }
}
