//! [`CqAge`]: how long a command lay in its CQ before a turn found it.

use rblk_fabric::{BinnedUs, Micros};

/// How long what a turn finds may have lain in a CQ: since the turn before looked there, unless the
/// thread may have slept since then. Computed when it is first asked for in a turn.
#[derive(Debug, Default)]
pub(super) struct CqAge {
    looked: Micros,
    armed: Option<Micros>,
    age: Option<BinnedUs>,
}

impl CqAge {
    /// A turn begins; the one before began then.
    #[inline(always)]
    pub(super) fn turn(&mut self, before: Micros) {
        (self.looked, self.age) = (before, None);
    }

    /// The thread may sleep from this turn on: what it finds then has woken it.
    pub(super) fn armed(&mut self, now: Micros) {
        self.armed = Some(now);
    }

    /// What is begun next was found then, until [`Self::found_now`].
    #[cold]
    pub(super) fn found(&mut self, then: Micros, now: Micros) {
        self.age = Some(BinnedUs::new(now.since(then)));
    }

    /// What is begun next was found in this turn.
    #[cold]
    pub(super) fn found_now(&mut self) {
        self.age = None;
    }

    #[inline(always)]
    pub(super) fn get(&mut self, now: Micros) -> BinnedUs {
        if let Some(age) = self.age { age } else { self.compute(now) }
    }

    #[inline(never)]
    fn compute(&mut self, now: Micros) -> BinnedUs {
        let us = if self.armed == Some(self.looked) { 0 } else { now.since(self.looked) };
        *self.age.insert(BinnedUs::new(us))
    }
}
