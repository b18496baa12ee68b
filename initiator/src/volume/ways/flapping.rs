//! [`Flapping`]: how long a way that died or failed is left alone.

use std::time::Duration;

/// A life of a way that counts as steady.
const STEADY: Duration = Duration::from_secs(600);
/// Limit of the doublings by lives that were not steady.
const FALLS_MAX: u32 = 6;
/// Limit of the pause between two tries in a row, before those doublings.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// The record of one way. Each failure in a row doubles the pause, up to 10 s. Each life that was
/// not steady doubles all pauses, up to 64 times, until a life is steady.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Flapping {
    // Tries in a row that failed.
    failed: u32,
    // Lives in a row that were not steady.
    falls: u32,
}

impl Flapping {
    /// The way begins to live.
    pub(super) fn lives(&mut self) {
        self.failed = 0;
    }

    /// The way died after that time.
    pub(super) fn died(&mut self, lasted: Duration) {
        self.falls = if lasted >= STEADY { 0 } else { (self.falls + 1).min(FALLS_MAX) };
    }

    /// A probe or a join failed.
    pub(super) fn failed(&mut self) {
        self.failed = self.failed.saturating_add(1);
    }

    /// The way leads elsewhere: only a person can change that.
    pub(super) fn misled(&mut self) {
        self.failed();
        self.falls = FALLS_MAX;
    }

    /// The pause before the next try, with up to a quarter more by chance.
    pub(super) fn pause(&self, delay: Duration, random: u64) -> Duration {
        let doubled = delay.saturating_mul(1 << self.failed.min(16));
        let pause = doubled.min(PAUSE_MAX.max(delay)).saturating_mul(1 << self.falls);
        let by_chance = u32::try_from(random % 256).unwrap_or(0);
        pause.saturating_add(pause / 1024 * by_chance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_a_steady_life_forgives() {
        let (delay, second) = (Duration::from_secs(1), Duration::from_secs(1));
        let mut way = Flapping::default();
        let pauses = |way: &mut Flapping, times: usize| -> Vec<u64> {
            let mut pause = || {
                let pause = way.pause(delay, 0).as_secs();
                way.failed();
                pause
            };
            (0..times).map(|_| pause()).collect()
        };
        assert_eq!(pauses(&mut way, 6), [1, 2, 4, 8, 10, 10]);
        way.lives();
        way.died(second);
        assert_eq!(pauses(&mut way, 6), [2, 4, 8, 16, 20, 20]);
        for _ in 0..20 {
            way.lives();
            way.died(STEADY - second);
        }
        assert_eq!(pauses(&mut way, 5), [64, 128, 256, 512, 640]);
        way.lives();
        way.died(STEADY);
        assert_eq!(pauses(&mut way, 2), [1, 2]);
        way.misled();
        assert!(way.pause(delay, 0) >= 64 * second);
        let (least, most) = (way.pause(delay, 0), way.pause(delay, 255));
        assert!(most > least && most <= least * 5 / 4);
        // A delay above the limit of pauses is kept.
        assert_eq!(Flapping::default().pause(60 * second, 0), 60 * second);
    }
}
