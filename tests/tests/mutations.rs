//! The simulation finds each deliberate fault of [`Mutation`], but for those of records, which the
//! model of runs finds, those of ways, which [`several_ways`] finds, and those of groups of
//! targets, which [`group`] finds. A fault that none finds is a hole in them.
//!
//! ```text
//! cargo test --profile lab -p rblk-tests --features mutations --test mutations -- --nocapture
//! ```
//!
//! A process has at most one fault, which `RBLK_MUTATION` names, so this program runs itself once
//! for each. `RBLK_SEED=0..3000` tries other seeds than the first 1500, and
//! `RBLK_MUTATION=NAME,NAME` some of the faults.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use rblk_protocol::Mutation;
use rblk_tests::sim::{Plan, World};
use rblk_tests::storm::seeds;
use rblk_tests::{group, runs, several_ways};

/// Seeds to try for each fault.
const SEEDS: u64 = 1500;
/// Seeds of the model of runs, which is fast.
const SEEDS_OF_RUNS: u64 = 20_000;
/// The faults that the model of runs finds. The simulation finds the others.
const FOUND_BY_RUNS: [Mutation; 4] = [
    Mutation::RecordOfFailedStart,
    Mutation::RecordOfOthers,
    Mutation::RecordOfCacheMode,
    Mutation::RecordOfNeighbours,
];
/// The faults that two ways find.
const FOUND_BY_WAYS: [Mutation; 8] = [
    Mutation::WayDropEarly,
    Mutation::WayDropForgetsGroup,
    Mutation::WayLateLogin,
    Mutation::WayResumeKeeps,
    Mutation::WaySkipsDrop,
    Mutation::WayReadEarly,
    Mutation::WayAnyAnswer,
    Mutation::WayStopsOthers,
];
/// The faults that the simulation of a group finds.
const FOUND_BY_GROUPS: [Mutation; 8] = [
    Mutation::GroupServesBeforeMap,
    Mutation::GroupReopensEarly,
    Mutation::GroupStateBlindWrite,
    Mutation::GroupCleanLie,
    Mutation::GroupHitAfterLoss,
    Mutation::GroupTwoClaims,
    Mutation::GroupOpensUnproven,
    Mutation::GroupOthersAtOnce,
];
/// Processes at a time.
const THREADS: usize = 2;
/// Precedes the seed that found a fault, in the output of a process.
const FOUND: &str = "found by seed ";

#[test]
#[cfg_attr(
    not(feature = "mutations"),
    ignore = "needs the feature `mutations`: `cargo xtask test` runs it"
)]
fn each_mutation_is_found() {
    let only = std::env::var("RBLK_MUTATION").ok();
    let is_meant =
        |name: &&str| only.as_ref().is_none_or(|only| only.split(',').any(|one| one == *name));
    let names = Mutex::new(Mutation::ALL.iter().map(|(_, name)| *name).filter(is_meant));
    let next = || names.lock().unwrap_or_else(PoisonError::into_inner).next();
    let missed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(name) = next() {
                    match try_one(name) {
                        Ok(how) => println!("{name}: {how}"),
                        Err(why) => {
                            println!("{name}: NOT found: {why}");
                            missed.lock().unwrap_or_else(PoisonError::into_inner).push(name);
                        }
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(missed.is_empty(), "nothing finds {missed:?}");
}

/// Runs the search for a fault. Returns the seed that found the fault, and the finder.
fn try_one(name: &str) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.args(["--exact", "run_with_mutation", "--ignored", "--nocapture"]);
    let output = command.env("RBLK_MUTATION", name).output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout);
    // The test program may have begun the line.
    let found = said.lines().find_map(|line| Some(&line[line.find(FOUND)?..]));
    let end = || {
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().next_back().unwrap_or_default();
        format!("{}, {last}", output.status)
    };
    found.map(str::to_owned).ok_or_else(end)
}

/// Not a test: the process with the fault.
#[test]
#[ignore = "run by other tests"]
fn run_with_mutation() {
    let by_runs = FOUND_BY_RUNS.iter().any(|mutation| mutation.is_on());
    let by_ways = FOUND_BY_WAYS.iter().any(|mutation| mutation.is_on());
    let by_groups = FOUND_BY_GROUPS.iter().any(|mutation| mutation.is_on());
    let try_seed = |seed| {
        if by_groups {
            let _ = group::World::run(group::Plan::random(seed));
        } else if by_ways {
            several_ways::run(seed);
        } else if by_runs {
            let _ = runs::World::run(runs::Plan::random(seed, runs::Kind::Memory));
        } else {
            let _ = World::run(Plan::random(seed));
        }
    };
    let seeds = seeds(if by_runs { SEEDS_OF_RUNS } else { SEEDS });
    for seed in seeds.clone() {
        let run = catch_unwind(AssertUnwindSafe(|| try_seed(seed)));
        if let Err(panic) = run {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            println!("{FOUND}{seed}: {}", text.lines().next().unwrap_or_default());
            return;
        }
    }
    eprintln!("no seed of {seeds:?}");
}
