//! [`TurnClock`]: the times of a data thread that reads the clock once in a turn, in whole
//! microseconds. Pure: the time of the turn is an argument.

use std::time::Instant;

/// The times of a turn, in microseconds of the thread's own clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TurnTimes {
    /// When it began.
    pub now: u64,
    /// What it finds has come after this: when the turn before began, or, after a sleep, now.
    pub looked: u64,
}

/// The clock of a data thread. See the module.
#[derive(Debug)]
pub struct TurnClock {
    epoch: Instant,
    last: Instant,
    times: TurnTimes,
    // It may have slept since the last turn: what it finds then has woken it.
    slept: bool,
}

impl TurnClock {
    /// A clock that counts from now on.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { epoch: now, last: now, times: TurnTimes::default(), slept: false }
    }

    /// A turn begins. Turns of the same time are one turn, and the time never goes back.
    #[inline(always)]
    pub fn turn(&mut self, now: Instant) -> TurnTimes {
        if now > self.last {
            self.last = now;
            let since = now.saturating_duration_since(self.epoch);
            let now = since.as_secs() * 1_000_000 + u64::from(since.subsec_micros());
            let looked = if self.slept { now } else { self.times.now };
            self.times = TurnTimes { now, looked };
            self.slept = false;
        }
        self.times
    }

    /// The times of the turn.
    #[inline(always)]
    #[must_use]
    pub fn times(&self) -> TurnTimes {
        self.times
    }

    /// The thread is about to sleep.
    pub fn sleeps(&mut self) {
        self.slept = true;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_thread_that_slept_was_woken_by_what_it_finds() {
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let mut clock = TurnClock::new(start);
        assert_eq!(clock.turn(at(10)), TurnTimes { now: 10, looked: 0 });
        assert_eq!(clock.turn(at(25)), TurnTimes { now: 25, looked: 10 });
        clock.sleeps();
        assert_eq!(clock.turn(at(25)), TurnTimes { now: 25, looked: 10 }, "the late look");
        assert_eq!(clock.turn(at(2_000_025)), TurnTimes { now: 2_000_025, looked: 2_000_025 });
        assert_eq!(clock.turn(at(2_000_030)), TurnTimes { now: 2_000_030, looked: 2_000_025 });
        assert_eq!(clock.turn(at(7)).now, 2_000_030, "it never goes back");
        assert_eq!(clock.times(), TurnTimes { now: 2_000_030, looked: 2_000_025 });
    }
}
