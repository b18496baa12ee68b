//! [`Timing`]: the arrival of a command, and its waits. Pure: the time of the turn is an argument,
//! and does not change during a turn.
//!
//! A command that is answered in the turn that found it has only waited in the CQ. A command that
//! is answered without a wait is not recorded here at all; most others record only their start.

use rblk_runtime::{BinnedUs, Micros};

use rblk_operate::target::traffic::Stages;

/// A shard's work for a command, which its answer reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Spent {
    /// The store had an operation.
    pub(crate) at_store: bool,
    /// Time that the job waited for memory and for its range, in microseconds.
    pub(crate) waited_us: u32,
}

impl Spent {
    /// Spent at the store only.
    pub(crate) const fn at_store() -> Self {
        Self { at_store: true, waited_us: 0 }
    }
}

/// The recording state of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum TimingState {
    /// The command waits for nothing, or was answered.
    #[default]
    None,
    /// The command started, and recorded no wait.
    Plain,
    /// The command recorded waits, see [`Noted`].
    Noted,
}

/// The arrival of a command, and its waits. See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Timing {
    found: Micros,
    queue: BinnedUs,
    spent: Spent,
    course: TimingState,
    // Waits, if the command recorded any.
    noted: Noted,
}

/// Waits that few commands have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Noted {
    // Parts that wait for data, and the time from which at least one did.
    awaiting: u16,
    data_from: Micros,
    // Time with such a part; and that time up to the moment when the last part got its memory.
    // Until then the part waited in its shard, which reports that time, too.
    data_us: u64,
    data_before_us: u64,
    // Time from which the answer was complete and lacked a credit.
    ready: Option<Micros>,
}

/// The time that a command took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Took {
    /// The command was answered in the turn that found it, after this time in the CQ.
    OneTurn(BinnedUs),
    /// The command took longer, in these stages.
    Longer(Stages),
}

impl Timing {
    /// Whether the command has started and waits for its answer.
    #[inline(always)]
    pub(crate) fn has_begun(&self) -> bool {
        self.course != TimingState::None
    }

    /// The command was found in this turn, after at most `queue` in the CQ, and must wait.
    #[inline(always)]
    pub(crate) fn begin(&mut self, now: Micros, queue: BinnedUs) {
        (self.found, self.queue) = (now, queue);
        (self.spent, self.course) = (Spent::default(), TimingState::Plain);
    }

    fn noted(&mut self) -> &mut Noted {
        if self.course == TimingState::Plain {
            (self.course, self.noted) = (TimingState::Noted, Noted::default());
        }
        &mut self.noted
    }

    /// Another part got its memory and waits for data from RDMA READs.
    #[inline]
    pub(crate) fn awaits_data(&mut self, now: Micros) {
        let noted = self.noted();
        if noted.awaiting == 0 {
            noted.data_from = now;
        }
        noted.awaiting += 1;
        noted.data_before_us = noted.data_us + now.since(noted.data_from);
    }

    /// The data of a part arrived.
    #[inline]
    pub(crate) fn data_came(&mut self, now: Micros) {
        let noted = self.noted();
        noted.awaiting = noted.awaiting.saturating_sub(1);
        if noted.awaiting == 0 {
            noted.data_us += now.since(noted.data_from);
        }
    }

    /// A shard answered. Parts wait at the same time, so the longest wait counts.
    #[inline]
    pub(crate) fn spent(&mut self, spent: Spent) {
        self.spent.at_store |= spent.at_store;
        self.spent.waited_us = self.spent.waited_us.max(spent.waited_us);
    }

    /// The answer is complete, and lacks a credit.
    #[cold]
    pub(crate) fn awaits_credits(&mut self, now: Micros) {
        self.noted().ready.get_or_insert(now);
    }

    /// Ends the recording, if this is the turn that found the command and it recorded no wait.
    /// Returns its time in the CQ. `None` changes nothing.
    #[inline(always)]
    pub(crate) fn end_in_its_turn(&mut self, now: Micros) -> Option<BinnedUs> {
        if self.course != TimingState::Plain || self.found != now {
            return None;
        }
        self.course = TimingState::None;
        Some(self.queue)
    }

    /// Ends the recording; `None` if it had not started.
    #[inline(always)]
    pub(crate) fn end(&mut self, now: Micros) -> Option<Took> {
        match std::mem::take(&mut self.course) {
            TimingState::None => None,
            TimingState::Plain if self.found == now => Some(Took::OneTurn(self.queue)),
            TimingState::Plain => Some(Took::Longer(self.stages(Noted::default(), now))),
            TimingState::Noted => Some(Took::Longer(self.noted_stages(now))),
        }
    }

    #[inline(never)]
    fn noted_stages(&self, now: Micros) -> Stages {
        self.stages(self.noted, now)
    }

    /// The stages of the wait, which add up to the time since arrival.
    #[inline(always)]
    fn stages(&self, noted: Noted, now: Micros) -> Stages {
        let served = now.since(self.found);
        let answer = noted.ready.map_or(0, |ready| now.since(ready)).min(served);
        let data = noted.data_us.min(served - answer);
        let rest = served - answer - data;
        let Spent { at_store, waited_us } = self.spent;
        let waited = u64::from(waited_us).saturating_sub(noted.data_before_us);
        let cache = if at_store { rest.min(waited) } else { rest };
        Stages { queue: self.queue.us(), data, cache, store: rest - cache, answer }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_stages_always_add_up(
            times in proptest::collection::vec(0..1000_u64, 5),
            queue_us in 0..1000_u32,
            waited_us in 0..1000_u32,
            at_store: bool,
            noted in 0..16_u32,
        ) {
            let at = Micros::new;
            let mut timing = Timing::default();
            // The previous command's waits must have no effect.
            timing.begin(at(0), BinnedUs::new(7));
            timing.spent(Spent { at_store: true, waited_us: 77 });
            timing.awaits_data(at(0));
            timing.data_came(at(900));
            prop_assert!(timing.end(at(9)).is_some());

            timing.begin(at(times[0]), BinnedUs::new(queue_us.into()));
            if noted & 1 != 0 { timing.awaits_data(at(times[1])); }
            if noted & 2 != 0 { timing.data_came(at(times[2])); }
            if noted & 4 != 0 { timing.awaits_credits(at(times[3])); }
            if noted & 8 != 0 { timing.spent(Spent { at_store, waited_us }); }
            // A command with only a shard's report may be answered in its first turn.
            let served = times[4] + u64::from(noted & 7 == 0);
            let Some(Took::Longer(stages)) = timing.end(at(times[0] + served)) else {
                panic!("it took longer: {timing:?}");
            };
            prop_assert_eq!(stages.total(), u64::from(queue_us) + served);
            if noted == 0 {
                prop_assert_eq!(stages.cache, served);
            }
            prop_assert_eq!(timing.end(at(5000)), None);
        }
    }

    #[test]
    fn parts_that_wait_at_the_same_time_are_counted_once() {
        let (at, queue) = (Micros::new, BinnedUs::new(0));
        let mut write = Timing::default();
        write.begin(at(100), queue);
        // The first part has its memory at once.
        write.awaits_data(at(100));
        write.data_came(at(130));
        // The second part waited for its memory until now.
        write.awaits_data(at(200));
        write.data_came(at(210));
        write.spent(Spent { at_store: true, waited_us: 0 });
        // And then 7 for its range.
        write.spent(Spent { at_store: true, waited_us: 107 });
        let stages = Stages { data: 40, cache: 77, store: 183, ..Stages::default() };
        assert_eq!(write.end(at(400)), Some(Took::Longer(stages)));

        // Data of three parts is on its way at the same time.
        write.begin(at(100), queue);
        (0..3).for_each(|part| write.awaits_data(at(110 + part)));
        (0..3).for_each(|part| write.data_came(at(120 + part)));
        write.spent(Spent { at_store: true, waited_us: 12 });
        let stages = Stages { data: 12, cache: 10, store: 78, ..Stages::default() };
        assert_eq!(write.end(at(200)), Some(Took::Longer(stages)));
    }

    #[test]
    fn each_wait_has_its_stage() {
        let (at, queue) = (Micros::new, BinnedUs::new(10));
        let mut write = Timing::default();
        write.begin(at(110), queue);
        write.awaits_data(at(130));
        write.data_came(at(170));
        write.spent(Spent { at_store: true, waited_us: 5 });
        write.awaits_credits(at(400));
        let stages = Stages { queue: 10, data: 40, cache: 5, store: 245, answer: 20 };
        assert_eq!(write.end(at(420)), Some(Took::Longer(stages)));

        let mut hit = Timing::default();
        hit.begin(at(110), queue);
        assert_eq!(hit.end(at(110)), Some(Took::OneTurn(queue)));
        hit.begin(at(110), queue);
        assert_eq!(hit.end_in_its_turn(at(111)), None);
        assert_eq!(hit.end_in_its_turn(at(110)), Some(queue));
        assert!(!hit.has_begun() && hit.end_in_its_turn(at(110)).is_none());
        hit.begin(at(110), queue);
        hit.spent(Spent::default());
        let stages = Stages { queue: 10, cache: 40, ..Stages::default() };
        assert_eq!(hit.end(at(150)), Some(Took::Longer(stages)));
        assert_eq!(hit.end(at(150)), None);
    }
}
