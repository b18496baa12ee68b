//! SIGINT and SIGTERM as a flag that loops check, so that a run undoes its steps in good order.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

static WATCHED: AtomicBool = AtomicBool::new(false);
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Catches SIGINT and SIGTERM: [`check`] fails after the first. A second one ends this process at
/// once, with exit code 130; `rblk-bench clean-up` takes away the rest.
pub(crate) fn watch() -> Result<()> {
    if WATCHED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot watch for signals")?;
    let (mut int, mut term) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = int.recv() => {}
                    _ = term.recv() => {}
                }
                if INTERRUPTED.swap(true, Ordering::Relaxed) {
                    eprintln!(
                        "rblk-bench: ended at once; `rblk-bench clean-up` removes its leftovers"
                    );
                    std::process::exit(130);
                }
                eprintln!("rblk-bench: interrupted; taking down what was set up");
            }
        });
    })?;
    Ok(())
}

pub(crate) fn is_set() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Fails once this process was asked to end.
pub(crate) fn check() -> Result<()> {
    if is_set() {
        bail!("interrupted");
    }
    Ok(())
}

/// Sleeps, or less when this process is asked to end.
pub(crate) fn sleep(time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    loop {
        check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}
