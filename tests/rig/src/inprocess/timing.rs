//! The time of the engines of both ends, without the fabric below them.

use std::cell::Cell;
use std::time::Instant;

thread_local! {
    static CLOCK: Cell<Clock> = const { Cell::new(Clock { runs: false, below_ns: 0, readings: 0 }) };
}

/// The measurements of a thread.
#[derive(Clone, Copy)]
struct Clock {
    runs: bool,
    // Time in calls of an engine into the fabric.
    below_ns: u64,
    // Pairs of readings.
    readings: u64,
}

/// The time of the engines of one end, and the number of pairs of clock readings. Each pair adds
/// the duration of a reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EngineTime {
    /// Nanoseconds.
    pub ns: u64,
    /// Nanoseconds of its calls into the fabric.
    pub below_ns: u64,
    /// Pairs of readings.
    pub readings: u64,
}

/// The time of both ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Times {
    /// Of queues, in [`Rig::submit`](super::Rig::submit) too.
    pub initiator: EngineTime,
    /// Of poll groups, with the cache and the store.
    pub target: EngineTime,
}

/// Switches the timing of this thread's turns on or off.
pub fn time_turns(runs: bool) {
    CLOCK.set(Clock { runs, ..CLOCK.get() });
}

/// Whether the turns of this thread are timed.
pub(super) fn is_timed() -> bool {
    CLOCK.get().runs
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Runs a call into the fabric.
#[inline]
pub(super) fn below<T>(call: impl FnOnce() -> T) -> T {
    if !CLOCK.get().runs {
        return call();
    }
    let begun = Instant::now();
    let result = call();
    let Clock { runs, below_ns, readings } = CLOCK.get();
    let below_ns = below_ns + nanoseconds(begun);
    CLOCK.set(Clock { runs, below_ns, readings: readings + 1 });
    result
}

/// Runs a turn of an engine, and adds up its time without the calls into the fabric.
#[inline]
pub(super) fn turn<T>(time: &mut EngineTime, turn: impl FnOnce() -> T) -> T {
    let before = CLOCK.get();
    if !before.runs {
        return turn();
    }
    let begun = Instant::now();
    let result = turn();
    let all = nanoseconds(begun);
    let after = CLOCK.get();
    let below_ns = after.below_ns - before.below_ns;
    time.ns += all.saturating_sub(below_ns);
    time.below_ns += below_ns;
    time.readings += after.readings - before.readings + 1;
    result
}
