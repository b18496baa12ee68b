//! [`LogLimit`]: how often a line is written that a peer can bring about. Pure: the caller has the
//! clock.
//!
//! A flood of connections must not be a flood of the log: the lines of a second are bounded. The
//! others are counted, and one line tells how many there were.

use std::time::{Duration, Instant};

/// Lines of one kind in one second, where nothing else is said.
pub const LINES_MAX: u32 = 10;
const SECOND: Duration = Duration::from_secs(1);

/// Lines of one kind. See the module.
#[derive(Clone, Copy, Debug)]
pub struct LogLimit {
    most: u32,
    // Since when lines are counted: for a second.
    since: Option<Instant>,
    count: u32,
    left_out: u64,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new(LINES_MAX)
    }
}

impl LogLimit {
    /// At most `most` lines in a second.
    #[must_use]
    pub const fn new(most: u32) -> Self {
        Self { most, since: None, count: 0, left_out: 0 }
    }

    fn is_over(&self, now: Instant) -> bool {
        self.since.is_none_or(|since| now.saturating_duration_since(since) >= SECOND)
    }

    /// Whether another line may be written now. If not, it is counted.
    pub fn may_write(&mut self, now: Instant) -> bool {
        if self.is_over(now) {
            (self.since, self.count) = (Some(now), 0);
        }
        let may = self.count < self.most;
        if may {
            self.count += 1;
        } else {
            self.left_out += 1;
        }
        may
    }

    /// How many lines were left out, once their second is over. `None`: none were, or it is not.
    pub fn take_left_out(&mut self, now: Instant) -> Option<u64> {
        let is_told = self.left_out > 0 && self.is_over(now);
        is_told.then(|| std::mem::take(&mut self.left_out))
    }

    /// True while the count of left-out lines waits to be logged.
    #[must_use]
    pub fn owes(&self) -> bool {
        self.left_out > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_so_many_lines_in_a_second_and_a_sum() {
        let begun = Instant::now();
        let mut limit = LogLimit::new(3);
        let flood = |limit: &mut LogLimit, now| (0..100).filter(|_| limit.may_write(now)).count();
        assert_eq!((flood(&mut limit, begun), limit.take_left_out(begun)), (3, None));
        assert!(limit.owes());
        let later = begun + SECOND;
        assert_eq!(limit.take_left_out(later), Some(97));
        assert_eq!((limit.take_left_out(later), limit.owes()), (None, false));
        assert_eq!(flood(&mut limit, later), 3);
    }
}
