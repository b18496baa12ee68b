//! [`CqAge`]: the time that a command lay in its CQ before a turn found it.

use rblk_runtime::{BinnedUs, Micros};

use super::NEVER;

/// Upper bound for the time of a completion in a CQ: the time since the previous turn looked there,
/// or 0 if the thread may have slept since then. Computed only where a turn finds a completion:
/// most idle turns do not.
#[derive(Debug)]
pub(super) struct CqAge {
    looked: Micros,
    // The last turn after which the thread may have slept; `NEVER` before the first.
    armed: Micros,
    age: BinnedUs,
}

impl Default for CqAge {
    fn default() -> Self {
        Self { looked: Micros::default(), armed: NEVER, age: BinnedUs::default() }
    }
}

impl CqAge {
    /// Starts a turn. The previous turn started at `before`.
    #[inline(always)]
    pub(super) fn turn(&mut self, before: Micros) {
        self.looked = before;
    }

    /// The thread may sleep after this turn: a completion found next has woken it.
    pub(super) fn armed(&mut self, now: Micros) {
        self.armed = now;
    }

    /// The next command to start arrived at `then` and was kept. Valid until this or
    /// [`Self::found`] is called again.
    #[cold]
    pub(super) fn kept(&mut self, then: Micros, now: Micros) {
        self.age = BinnedUs::new(now.since(then));
    }

    /// The turn found a completion in a CQ.
    #[inline(always)]
    pub(super) fn found(&mut self, now: Micros) {
        let us = if self.armed == self.looked { 0 } else { now.since(self.looked) };
        self.age = BinnedUs::new(us);
    }

    /// The time that the command may have lain in its CQ.
    #[inline(always)]
    pub(super) fn get(&self) -> BinnedUs {
        self.age
    }
}
