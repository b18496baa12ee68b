//! Waiting with a deadline.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// For whatever should take no time at all: generous, since the lab's CPUs are emulated.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Looks until `look` has something, and returns it.
///
/// # Panics
/// Nothing came within `deadline`; the text says that it was `what`.
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

/// Begins something that may wait indefinitely, on a thread of its own, which sends the result.
pub fn begin<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // The receiver may be gone.
        let _ = sender.send(work());
    });
    receiver
}

/// Does something that a stall may hold up, on a thread of its own.
///
/// # Panics
/// It is not done within `deadline`, or panics; the text says that it was `what`. The thread goes
/// on.
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
