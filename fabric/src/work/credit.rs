//! [`SendCredits`]: credits of the send queue of one QP. One credit is one entry of the queue.
//!
//! The entry of an unsignaled WR is free only after a later signaled WR of the same QP has
//! completed. So entries are counted by position: everything up to the newest completed position is
//! free.

use std::collections::VecDeque;

use rblk_protocol::width::wide;

/// The credits of a send queue, counted by the code that posts.
#[derive(Debug)]
pub struct SendCredits {
    capacity: u64,
    posted: u64,
    reclaimed: u64,
    // Positions of signaled WRs that have not completed, oldest first. Completions come in this
    // order.
    signaled: VecDeque<u64>,
    // Position of the newest signaled WR, completed or not. 0 before the first.
    newest: u64,
    interval: u64,
}

impl SendCredits {
    /// Credits of a queue of `capacity` WRs. At least every `interval`-th WR is to be signaled.
    #[must_use]
    pub fn new(capacity: u32, interval: u32) -> Self {
        Self {
            capacity: u64::from(capacity),
            posted: 0,
            reclaimed: 0,
            signaled: VecDeque::with_capacity(wide(capacity)),
            newest: 0,
            interval: u64::from(interval.clamp(1, (capacity / 4).max(1))),
        }
    }

    /// Free credits.
    #[must_use]
    #[inline]
    pub fn available(&self) -> u64 {
        self.capacity - (self.posted - self.reclaimed)
    }

    /// Whether the next WR should be signaled, so that credits come back.
    #[must_use]
    #[inline]
    pub fn wants_signal(&self) -> bool {
        self.posted + 1 - self.newest >= self.interval
    }

    /// Takes a credit. Returns the position of the WR, 1 for the first.
    #[inline]
    pub fn take(&mut self, signaled: bool) -> u64 {
        debug_assert!(self.available() > 0, "a WR is posted without credit");
        self.posted += 1;
        if signaled {
            self.signaled.push_back(self.posted);
            self.newest = self.posted;
        }
        self.posted
    }

    /// A signaled WR completed, so everything up to it is done. Returns its position.
    pub fn completed(&mut self) -> u64 {
        if let Some(position) = self.signaled.pop_front() {
            self.reclaimed = position;
        }
        self.reclaimed
    }

    /// Whether a signaled WR is outstanding.
    #[must_use]
    #[inline]
    pub fn expects_completion(&self) -> bool {
        !self.signaled.is_empty()
    }

    /// Whether a signaled WR at or after `position` is outstanding.
    #[must_use]
    pub fn will_prove(&self, position: u64) -> bool {
        self.expects_completion() && self.newest >= position
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credits_come_back_in_order() {
        let mut credits = SendCredits::new(8, 16);
        assert_eq!(credits.interval, 2);
        assert!(!credits.wants_signal());
        assert_eq!(credits.take(false), 1);
        assert!(credits.wants_signal());
        assert_eq!(credits.take(true), 2);
        assert_eq!(credits.take(false), 3);
        assert_eq!(credits.available(), 5);
        assert!(credits.will_prove(2) && !credits.will_prove(3));
        assert_eq!(credits.completed(), 2);
        assert_eq!(credits.available(), 7);
        assert_eq!(credits.completed(), 2, "a stray completion changes nothing");
        assert!(!credits.will_prove(1) && !credits.expects_completion());
        // A WR that is signaled earlier than needed counts too.
        assert!(credits.wants_signal());
        assert_eq!(credits.take(true), 4);
        assert!(!credits.wants_signal() && credits.will_prove(4));
        assert_eq!(credits.completed(), 4);
        assert!(!credits.wants_signal());
    }
}
