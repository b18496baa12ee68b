//! Hosts and a target in one thread, with faults of every kind between them, compared with a
//! history: see [`rblk_tests::sim`].
//!
//! An optimised build runs 5000 seeds, others fewer unless `RBLK_LONG=1`; `RBLK_SEED=N` runs one
//! seed alone.

use std::time::Duration;

use rblk_initiator::engine::io::IoOp;
use rblk_rig::seed::Random;
use rblk_tests::oracle::Oracle;
use rblk_tests::sim::World;
use rblk_tests::sim::plan::{Break, Death, Fault, Moment, Plan, When};
use rblk_tests::sim::world::Report;
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

/// The steps of a DROP and of a join.
const STEPS: [Moment; 7] = [
    Moment::Drop,
    Moment::Buried,
    Moment::Dropped,
    Moment::Login,
    Moment::LoggedIn,
    Moment::Queue,
    Moment::Arrived,
];

/// The deaths of either end, and of both.
fn deaths(random: &mut Random) -> [Vec<Fault>; 5] {
    let mut steps = || random.below(400);
    let server = Fault::Server { host: 0, steps: steps() };
    let program = Fault::Target { death: Death::Program, steps: steps() };
    let machine = Fault::Target { death: Death::Machine, steps: steps() };
    let host = Fault::Host { host: 0, steps: steps() };
    [vec![server], vec![program], vec![machine], vec![host], vec![program, server]]
}

/// One of several ways breaks while the store holds a write. Later, in a step of the DROP or of the
/// way's return, an end dies.
fn one_of_several_ways_breaks(seed: u64, random: &mut Random) -> Plan {
    let base = Plan { hosts: 1, addresses: 2 + random.index(3), ways: true, ..Plan::random(seed) };
    // The moments come within the patience of a fault.
    let detect = Duration::from_millis(200);
    let plan = Plan { queues: 2, fail_after: None, detect, requests: 120, ..base };
    let hold = Fault::Hold { steps: random.within(50, 600) };
    let address = Some(random.index(plan.addresses));
    let how = [Break::Cut, Break::Silence, Break::Stall][random.index(3)];
    let link = Fault::Link { host: 0, address, how, steps: random.below(400) };
    let whole = When::After(Moment::Arrived, random.below(60));
    let faults = vec![(whole, hold), (When::At(Moment::Held), link)];
    Plan { faults, ..plan }
}

#[test]
fn either_end_may_die_in_each_step_of_a_drop_and_of_a_join() {
    let count = rblk_tests::long::times(if is_thorough() { 12 } else { 1 }, 300);
    for at in STEPS {
        for which in 0..5 {
            let mut met = 0;
            for seed in seeds(count) {
                let mut random = Random::new(seed ^ 0x6b69_6c6c ^ (which << 32) as u64);
                let mut plan = one_of_several_ways_breaks(seed, &mut random);
                let deaths = deaths(&mut random);
                let (first, others) = deaths[which].split_first().expect("a death");
                plan.faults.push((When::After(at, random.below(12)), *first));
                plan.faults.extend(others.iter().map(|other| (When::Steps(0), *other)));
                met += World::run(plan).after_moments;
            }
            // Otherwise no run reached the step.
            let few = std::env::var_os("RBLK_SEED").is_some() || !is_thorough();
            assert!(few || met > count, "{at:?}, death {which}: {met} of {count}");
        }
    }
}

#[test]
fn a_seed_decides_everything() {
    for seed in seeds(20) {
        let run = || World::run(Plan::random(seed));
        assert_eq!(run(), run(), "seed {seed}");
    }
}
