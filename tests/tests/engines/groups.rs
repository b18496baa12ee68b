//! Groups of targets in front of one image, with random faults: see [`rblk_tests::group`].
//!
//! 400 seeds, and 20,000 with `RBLK_LONG=1`. `RBLK_SEED=N` runs one seed alone.

use rblk_tests::group::{Plan, Report, World};
use rblk_tests::long::times;
use rblk_tests::storm::seeds;

/// Threads that share the seeds.
const THREADS: u64 = 2;

#[test]
fn an_image_has_one_owner_and_no_read_is_stale_under_faults() {
    let begun = std::time::Instant::now();
    let seeds = seeds(times(2_000, 20_000));
    let sums: Vec<Report> = std::thread::scope(|scope| {
        let share = |thread| {
            let own = seeds.clone().filter(move |seed| seed % THREADS == thread);
            scope.spawn(move || {
                let mut sum = Report::default();
                own.for_each(|seed| sum.add(&World::run(Plan::random(seed))));
                sum
            })
        };
        let threads: Vec<_> = (0..THREADS).map(share).collect();
        threads.into_iter().map(|thread| thread.join().expect("its seeds")).collect()
    });
    let mut sum = Report::default();
    sums.iter().for_each(|report| sum.add(report));
    println!("{seeds:?} in {:?}: {sum:?}", begun.elapsed());
    let count = seeds.end - seeds.start;
    let is_rich = sum.owners > 2 * count
        && sum.resumed > count
        && sum.fenced * 5 > count
        && sum.losses * 10 > count
        && sum.refused > count;
    assert!(count < 200 || is_rich, "{sum:?}");
}

#[test]
fn a_seed_decides_everything() {
    for seed in seeds(10) {
        let run = || World::run(Plan::random(seed));
        assert_eq!(run(), run(), "seed {seed}");
    }
}
