//! [`CqAge`]: how long a command lay in its CQ before a turn found it.

use rblk_runtime::{BinnedUs, Micros};

use super::NEVER;

/// How long what a turn finds may have lain in a CQ: since the turn before looked there, unless the
/// thread may have slept since then. Computed where a turn finds something: most idle turns do not.
#[derive(Debug)]
pub(super) struct CqAge {
    looked: Micros,
    // Of the last turn after which the thread may have slept; `NEVER` before the first.
    armed: Micros,
    age: BinnedUs,
}

impl Default for CqAge {
    fn default() -> Self {
        Self { looked: Micros::default(), armed: NEVER, age: BinnedUs::default() }
    }
}

impl CqAge {
    /// A turn begins; the one before began then.
    #[inline(always)]
    pub(super) fn turn(&mut self, before: Micros) {
        self.looked = before;
    }

    /// The thread may sleep from this turn on: what it finds then has woken it.
    pub(super) fn armed(&mut self, now: Micros) {
        self.armed = now;
    }

    /// What begins next came then, and was kept; until this or [`Self::found`] is called again.
    #[cold]
    pub(super) fn kept(&mut self, then: Micros, now: Micros) {
        self.age = BinnedUs::new(now.since(then));
    }

    /// The turn found something in a CQ.
    #[inline(always)]
    pub(super) fn found(&mut self, now: Micros) {
        let us = if self.armed == self.looked { 0 } else { now.since(self.looked) };
        self.age = BinnedUs::new(us);
    }

    /// How long that may have lain there.
    #[inline(always)]
    pub(super) fn get(&self) -> BinnedUs {
        self.age
    }
}
