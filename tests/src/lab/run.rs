//! [`run`]: one test of the lab, from looking for the devices to proving that nothing is left.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::leftovers;
use super::place::Lab;
use super::usage::rdma_resources;

const HOW: &str = "Run the tests of the lab with `cargo xtask test`, or one of them with `cargo xtask lab -- \
                   TEST-BINARY --ignored --test-threads=1 --nocapture NAME`";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs one test after which this kernel is of no more use: what the test leaves cannot be removed.
/// Without the lab the test fails.
///
/// # Panics
/// As `body` does; or there is no lab.
pub fn run_last(test: &'static str, body: impl FnOnce(&Lab)) {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = found(test);
    leftovers::sweep();
    std::fs::create_dir_all(lab.dir())
        .unwrap_or_else(|e| panic!("making {}: {e}", lab.dir().display()));
    body(&lab);
}

fn found(test: &'static str) -> Lab {
    Lab::find(test).unwrap_or_else(|why| panic!("{test} cannot run here: {why}. {HOW}"))
}

/// Runs one test: prepares, runs, cleans up, and proves that nothing is left. Without the lab the
/// test fails.
///
/// # Panics
/// As `body` does; or something is left; or there is no lab.
pub fn run(test: &'static str, body: impl FnOnce(&Lab)) {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = found(test);
    leftovers::sweep();
    std::fs::create_dir_all(lab.dir())
        .unwrap_or_else(|e| panic!("making {}: {e}", lab.dir().display()));
    let before = rdma_resources();
    let since = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| body(&lab)));
    let took = since.elapsed();
    // A failed test most likely left something.
    let patience = Duration::from_secs(if outcome.is_ok() { 10 } else { 1 });
    let found = leftovers::find(&before, patience);
    leftovers::sweep();
    match outcome {
        Err(panic) => {
            println!("{test}: FAILED after {took:.1?}; its logs are in {}", lab.dir().display());
            if !found.is_empty() {
                println!("{test}: and it left: {}", found.join("; "));
            }
            resume_unwind(panic);
        }
        Ok(()) => {
            println!("{test}: passed in {took:.1?}");
            let _ = std::fs::remove_dir_all(lab.dir());
            assert!(found.is_empty(), "{test} left: {}", found.join("; "));
        }
    }
}
