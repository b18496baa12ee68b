//! The slowness of the rings' threads, for `tests/fuzz`.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Microseconds that the thread of a ring sleeps before each turn.
static PACE: AtomicU32 = AtomicU32::new(0);

/// Sets the microseconds that the threads of rings sleep before each turn.
pub(super) fn set(micros: u32) {
    PACE.store(micros, Ordering::Relaxed);
}

/// Sleeps before a turn of the thread of a ring.
pub(super) fn keep() {
    let micros = PACE.load(Ordering::Relaxed);
    if micros > 0 {
        std::thread::sleep(Duration::from_micros(micros.into()));
    }
}
