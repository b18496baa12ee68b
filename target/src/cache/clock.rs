//! [`Clock`]: the time of a shard, in its own milliseconds.
//!
//! A shard reads no clock. Its data thread passes the time of the turn, and the clock counts
//! milliseconds of it. Slots and retries keep these as 32 bits.

use std::time::{Duration, Instant};

/// The time of the turn.
#[derive(Debug)]
pub(super) struct Clock {
    started: Instant,
    now: Instant,
    now_ms: u32,
    // When `now_ms` is to be counted again.
    next_ms: Instant,
}

impl Clock {
    pub(super) fn new(now: Instant) -> Self {
        Self { started: now, now, now_ms: 0, next_ms: now }
    }

    /// Takes the time of the turn.
    #[inline]
    pub(super) fn tick(&mut self, now: Instant) {
        self.now = now;
        // Most turns are shorter than a millisecond.
        if now >= self.next_ms {
            self.count_ms(now);
        }
    }

    #[cold]
    fn count_ms(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.started);
        // Wraps after 49 days. Differences are taken modulo 2^32.
        self.now_ms = (since.as_millis() & 0xffff_ffff) as u32;
        let into_ms = Duration::from_nanos(u64::from(since.subsec_nanos() % 1_000_000));
        self.next_ms = now + Duration::from_millis(1) - into_ms;
    }

    /// The time of the turn.
    pub(super) fn now(&self) -> Instant {
        self.now
    }

    /// Milliseconds since the shard was made, modulo 2^32.
    #[inline]
    pub(super) fn now_ms(&self) -> u32 {
        self.now_ms
    }

    /// Whole seconds since the shard was made.
    pub(super) fn seconds(&self) -> u64 {
        self.now.saturating_duration_since(self.started).as_secs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_are_counted_when_they_are_full() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        for (us, ms) in [(0, 0), (999, 0), (1000, 1), (1999, 1), (3500, 3), (3999, 3), (4000, 4)] {
            clock.tick(start + Duration::from_micros(us));
            assert_eq!(clock.now_ms(), ms, "{us} us");
        }
        clock.tick(start + Duration::from_secs(7));
        assert_eq!((clock.now_ms(), clock.seconds()), (7000, 7));
    }

    #[test]
    fn milliseconds_wrap_after_49_days() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        clock.tick(start + Duration::from_millis((1 << 32) + 5));
        assert_eq!(clock.now_ms(), 5);
    }
}
