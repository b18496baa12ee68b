//! Random sequences of runs, and the losses that hosts hear of: see [`rblk_tests::runs`].
//!
//! 20,000 seeds over the model of a state directory, 100,000 with `RBLK_LONG=1`, and a few hundred
//! over real files. `RBLK_SEED=N` runs one seed alone.

use rblk_tests::long::times;
use rblk_tests::runs::{Kind, Plan, Report, World};
use rblk_tests::storm::seeds;

/// Threads that share the seeds.
const THREADS: u64 = 2;

fn run(kind: Kind, count: u64) -> Report {
    let begun = std::time::Instant::now();
    let seeds = seeds(count);
    let sums: Vec<Report> = std::thread::scope(|scope| {
        let share = |thread| {
            let own = seeds.clone().filter(move |seed| seed % THREADS == thread);
            scope.spawn(move || {
                let mut sum = Report::default();
                own.for_each(|seed| sum.add(&World::run(Plan::random(seed, kind))));
                sum
            })
        };
        let threads: Vec<_> = (0..THREADS).map(share).collect();
        threads.into_iter().map(|thread| thread.join().expect("its seeds")).collect()
    });
    let mut sum = Report::default();
    sums.iter().for_each(|report| sum.add(report));
    println!("{kind:?}, {seeds:?} in {:?}: {sum:?}", begun.elapsed());
    // Writes were at stake; some were kept, and some were lost.
    let many = seeds.end - seeds.start >= 200;
    let is_rich = sum.kept > 100 && sum.told > 100 && sum.gone > 50 && sum.changes[0] > 100;
    assert!(!many || is_rich, "{sum:?}");
    sum
}

#[test]
fn an_equal_verifier_means_no_loss_and_a_loss_has_a_cause() {
    run(Kind::Memory, times(20_000, 100_000));
}

#[test]
fn the_files_of_a_state_directory_keep_what_the_model_keeps() {
    run(Kind::Files, times(300, 5000));
}

#[test]
fn a_seed_decides_everything() {
    for seed in seeds(50) {
        let run = || World::run(Plan::random(seed, Kind::Memory));
        assert_eq!(run(), run(), "seed {seed}");
    }
}
