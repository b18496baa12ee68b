//! [`Timing`]: when a command came, and what it waited for since. Pure; times are microseconds of
//! the poll group's own clock, which stands still during a turn.
//!
//! A command that is answered in the turn that found it has only waited in the CQ. So most commands
//! note nothing else.

use rblk_fabric::turn_clock::TurnTimes;

use crate::traffic::Stages;

/// What a shard did for a command: part of its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Spent {
    /// The store was asked.
    pub(crate) at_store: bool,
    /// How long the job waited for memory and for its range, in microseconds.
    pub(crate) waited_us: u32,
}

impl Spent {
    /// All of it at the store.
    pub(crate) const fn at_store() -> Self {
        Self { at_store: true, waited_us: 0 }
    }
}

/// When a command came, and what it waited for. See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Timing {
    // Of the turn that found it; none before that, and when it was answered.
    found: Option<TurnTimes>,
    // When its data was first waited for, and how long.
    data_from: Option<u64>,
    data_us: u64,
    // When there was something to send, and no credit.
    ready: Option<u64>,
    spent: Spent,
}

impl Timing {
    /// It begins in this turn.
    #[inline(always)]
    pub(crate) fn begin(&mut self, turn: TurnTimes) {
        *self = Self { found: Some(turn), ..Self::default() };
    }

    /// It waits for data that RDMA READs bring.
    #[inline]
    pub(crate) fn awaits_data(&mut self, now: u64) {
        self.data_from.get_or_insert(now);
    }

    /// Data came.
    #[inline]
    pub(crate) fn data_came(&mut self, now: u64) {
        if let Some(from) = self.data_from {
            self.data_us = now.saturating_sub(from);
        }
    }

    /// A shard answered. Parts wait at the same time, so the longest wait counts.
    #[inline]
    pub(crate) fn spent(&mut self, spent: Spent) {
        self.spent.at_store |= spent.at_store;
        self.spent.waited_us = self.spent.waited_us.max(spent.waited_us);
    }

    /// There is something to send, and no credit for it.
    #[cold]
    pub(crate) fn awaits_credits(&mut self, now: u64) {
        self.ready.get_or_insert(now);
    }

    /// Its end: gives the turn that found it, if it had begun.
    #[inline(always)]
    pub(crate) fn end(&mut self) -> Option<TurnTimes> {
        self.found.take()
    }

    /// What a command waited for that was found in turn `found`, and is answered now. The stages
    /// add up to the time since [`TurnTimes::looked`].
    pub(crate) fn stages(&self, found: TurnTimes, now: u64) -> Stages {
        let queue = found.now.saturating_sub(found.looked);
        let served = now.saturating_sub(found.now);
        let answer = self.ready.map_or(0, |ready| now.saturating_sub(ready)).min(served);
        let data = self.data_us.min(served - answer);
        let rest = served - answer - data;
        let cache = if self.spent.at_store { rest.min(self.spent.waited_us.into()) } else { rest };
        Stages { queue, data, cache, store: rest - cache, answer }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum(stages: Stages) -> u64 {
        let Stages { queue, data, cache, store, answer } = stages;
        queue + data + cache + store + answer
    }

    proptest! {
        #[test]
        fn the_stages_add_up_whatever_was_noted(
            times in proptest::collection::vec(0..1000_u64, 6),
            waited_us in 0..1000_u32,
            at_store: bool,
            noted in 0..16_u32,
        ) {
            let mut timing = Timing::default();
            let (looked, now) = (times[0], times[0] + times[1]);
            timing.begin(TurnTimes { now, looked });
            if noted & 1 != 0 { timing.awaits_data(times[2]); }
            if noted & 2 != 0 { timing.data_came(times[3]); }
            if noted & 4 != 0 { timing.awaits_credits(times[4]); }
            if noted & 8 != 0 { timing.spent(Spent { at_store, waited_us }); }
            let found = timing.end().unwrap();
            let end = now + times[5];
            prop_assert_eq!(sum(timing.stages(found, end)), end - looked);
            prop_assert_eq!(timing.end(), None);
        }
    }

    #[test]
    fn each_wait_has_its_stage() {
        let turn = TurnTimes { now: 110, looked: 100 };
        let mut write = Timing::default();
        write.begin(turn);
        write.awaits_data(130);
        write.data_came(170);
        write.spent(Spent { at_store: true, waited_us: 5 });
        write.awaits_credits(400);
        let found = write.end().unwrap();
        let stages = write.stages(found, 420);
        assert_eq!(stages, Stages { queue: 10, data: 40, cache: 5, store: 245, answer: 20 });

        let mut hit = Timing::default();
        hit.begin(turn);
        hit.spent(Spent::default());
        let found = hit.end().unwrap();
        let stages = hit.stages(found, 150);
        assert_eq!(stages, Stages { queue: 10, cache: 40, ..Stages::default() });
    }
}
