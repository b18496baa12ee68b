//! Progress on stderr: one line at a time, each with the seconds since the start.

use std::time::Instant;

/// The clock of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    start: Instant,
}

impl Progress {
    /// Starts the clock.
    pub(crate) fn start() -> Self {
        Progress { start: Instant::now() }
    }

    /// Says something.
    pub(crate) fn say(&self, text: &str) {
        eprintln!("[{:7.1} s] {text}", self.seconds());
    }

    /// Seconds since the start.
    pub(crate) fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}
