//! Progress on stderr: one line per step that takes time, none when everything is cached.

use std::io::Write;
use std::time::Instant;

use anyhow::Result;

/// Says `what` is being done, does it, and completes the line with the time it took.
///
/// The text is shown before the work starts, so that a step that hangs is named.
pub(crate) fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprint!("lab: {what} ... ");
    // Progress is advice: a closed stderr must not fail the run.
    let _ = std::io::stderr().flush();
    let start = Instant::now();
    let result = work();
    let seconds = start.elapsed().as_secs_f64();
    match &result {
        Ok(_) => eprintln!("{seconds:.1} s"),
        Err(_) => eprintln!("failed after {seconds:.1} s"),
    }
    result
}
