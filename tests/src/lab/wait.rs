//! Waiting with a deadline.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Time for steps that should take no time: generous, since the lab's CPUs are emulated.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Calls `look` until it finds something, and returns that.
///
/// # Panics
/// Nothing is found within `deadline`. The message names `what`.
pub fn until<T>(what: &str, deadline: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(since.elapsed() < deadline, "still waiting for {what} after {deadline:?}");
        // Long, because most looks start a program, and the lab's CPUs are few and slow.
        std::thread::sleep(Duration::from_millis(150));
    }
}

/// Starts work that may wait indefinitely, on its own thread. The thread sends the result.
pub fn begin<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // The receiver may be gone.
        let _ = sender.send(work());
    });
    receiver
}

/// Runs work that a stall may hold up, on its own thread.
///
/// # Panics
/// The work panics, or is not done within `deadline`; its thread then goes on. The message names
/// `what`.
pub fn within<T: Send + 'static>(
    what: &str,
    deadline: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    match begin(work).recv_timeout(deadline) {
        Ok(done) => done,
        Err(error) => panic!("{what} within {deadline:?}: {error}"),
    }
}
