//! [`Clock`]: the time of a shard.
//!
//! A shard reads no clock: its data thread passes the time of each turn. Slots and retries keep
//! milliseconds as 32 bits. Only the few turns that need milliseconds compute them.

use rblk_protocol::width::narrow;
use rblk_runtime::Micros;

/// The time of the turn.
#[derive(Debug)]
pub(super) struct Clock {
    started: Micros,
    now: Micros,
}

impl Clock {
    pub(super) fn new(now: Micros) -> Self {
        Self { started: now, now }
    }

    /// Sets the time of the turn.
    #[inline(always)]
    pub(super) fn tick(&mut self, now: Micros) {
        self.now = now;
    }

    /// The time of the turn.
    #[inline]
    pub(super) fn now(&self) -> Micros {
        self.now
    }

    /// Milliseconds since the shard was made, modulo 2^32: the value wraps after 49 days. Callers
    /// subtract modulo 2^32.
    #[inline]
    pub(super) fn now_ms(&self) -> u32 {
        narrow((self.now.since(self.started) / 1000) & 0xffff_ffff)
    }

    /// Whole seconds since the shard was made.
    pub(super) fn seconds(&self) -> u64 {
        self.now.since(self.started) / 1_000_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_are_counted_when_they_are_full_and_wrap_after_49_days() {
        let start = 12_345_678;
        let mut clock = Clock::new(Micros::new(start));
        let wrapped = (1 << 32) * 1000;
        for (us, ms) in
            [(0, 0), (999, 0), (1000, 1), (1999, 1), (7_000_000, 7000), (wrapped + 5999, 5)]
        {
            clock.tick(Micros::new(start + us));
            assert_eq!((clock.now_ms(), clock.seconds()), (ms, us / 1_000_000), "{us} us");
        }
    }
}
