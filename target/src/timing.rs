//! [`Timing`]: when a command came, and what it waited for since. Pure: the time of the turn is an
//! argument, and stands still during a turn.
//!
//! A command that is answered in the turn that found it has only waited in the CQ. So most commands
//! note nothing else.

use std::time::Instant;

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

/// Microseconds from one time to a later one; 0, if it is not later.
#[inline]
pub(crate) fn us_between(from: Instant, to: Instant) -> u64 {
    let time = to.saturating_duration_since(from);
    time.as_secs() * 1_000_000 + u64::from(time.subsec_micros())
}

/// How far a command is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Course {
    /// It did not begin, or was answered.
    #[default]
    None,
    /// It noted nothing.
    Plain,
    /// See [`Noted`].
    Noted,
}

/// When a command came, and what it waited for. See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Timing {
    found: Instant,
    queue_us: u32,
    course: Course,
    // Of a command that noted something.
    noted: Noted,
}

/// What few commands wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Noted {
    // When its data was first waited for, and how long.
    data_from: Option<Instant>,
    data_us: u64,
    // When there was something to send, and no credit.
    ready: Option<Instant>,
    spent: Spent,
}

/// How long a command took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Took {
    /// It was answered in the turn that found it, after so long in the CQ.
    OneTurn(u32),
    /// Longer.
    Longer(Stages),
}

impl Timing {
    /// Of no command; `now` is any time.
    pub(crate) fn new(now: Instant) -> Self {
        Self { found: now, queue_us: 0, course: Course::None, noted: Noted::default() }
    }

    /// It was found in this turn, and lay so long in the CQ at most.
    #[inline(always)]
    pub(crate) fn begin(&mut self, now: Instant, queue_us: u32) {
        (self.found, self.queue_us, self.course) = (now, queue_us, Course::Plain);
    }

    fn noted(&mut self) -> &mut Noted {
        if self.course == Course::Plain {
            (self.course, self.noted) = (Course::Noted, Noted::default());
        }
        &mut self.noted
    }

    /// It waits for data that RDMA READs bring.
    #[inline]
    pub(crate) fn awaits_data(&mut self, now: Instant) {
        self.noted().data_from.get_or_insert(now);
    }

    /// Data came.
    #[inline]
    pub(crate) fn data_came(&mut self, now: Instant) {
        let noted = self.noted();
        noted.data_us = noted.data_from.map_or(0, |from| us_between(from, now));
    }

    /// A shard answered. Parts wait at the same time, so the longest wait counts.
    #[inline]
    pub(crate) fn spent(&mut self, spent: Spent) {
        let noted = &mut self.noted().spent;
        noted.at_store |= spent.at_store;
        noted.waited_us = noted.waited_us.max(spent.waited_us);
    }

    /// There is something to send, and no credit for it.
    #[cold]
    pub(crate) fn awaits_credits(&mut self, now: Instant) {
        self.noted().ready.get_or_insert(now);
    }

    /// Its end, in this turn; `None`, if it had not begun.
    #[inline(always)]
    pub(crate) fn end(&mut self, now: Instant) -> Option<Took> {
        if self.course == Course::None {
            return None;
        }
        self.course = match self.course {
            Course::Plain if self.found == now => {
                self.course = Course::None;
                return Some(Took::OneTurn(self.queue_us));
            }
            Course::Plain => {
                self.noted = Noted::default();
                Course::None
            }
            _ => Course::None,
        };
        Some(Took::Longer(self.stages(now)))
    }

    /// What it waited for. The stages add up to the time since it came.
    fn stages(&self, now: Instant) -> Stages {
        let Noted { data_us, ready, spent, .. } = self.noted;
        let served = us_between(self.found, now);
        let answer = ready.map_or(0, |ready| us_between(ready, now)).min(served);
        let data = data_us.min(served - answer);
        let rest = served - answer - data;
        let cache = if spent.at_store { rest.min(spent.waited_us.into()) } else { rest };
        Stages { queue: self.queue_us.into(), data, cache, store: rest - cache, answer }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_stages_add_up_whatever_was_noted(
            times in proptest::collection::vec(0..1000_u64, 5),
            queue_us in 0..1000_u32,
            waited_us in 0..1000_u32,
            at_store: bool,
            noted in 0..16_u32,
        ) {
            let start = Instant::now();
            let at = |us: u64| start + Duration::from_micros(us);
            let mut timing = Timing::new(start);
            // What the command before noted is of no effect.
            timing.begin(start, 7);
            timing.spent(Spent { at_store: true, waited_us: 77 });
            timing.awaits_data(start);
            timing.data_came(at(900));
            prop_assert!(timing.end(at(9)).is_some());

            timing.begin(at(times[0]), queue_us);
            if noted & 1 != 0 { timing.awaits_data(at(times[1])); }
            if noted & 2 != 0 { timing.data_came(at(times[2])); }
            if noted & 4 != 0 { timing.awaits_credits(at(times[3])); }
            if noted & 8 != 0 { timing.spent(Spent { at_store, waited_us }); }
            let served = times[4] + u64::from(noted == 0);
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
    fn each_wait_has_its_stage() {
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let mut write = Timing::new(start);
        write.begin(at(110), 10);
        write.awaits_data(at(130));
        write.data_came(at(170));
        write.spent(Spent { at_store: true, waited_us: 5 });
        write.awaits_credits(at(400));
        let stages = Stages { queue: 10, data: 40, cache: 5, store: 245, answer: 20 };
        assert_eq!(write.end(at(420)), Some(Took::Longer(stages)));

        let mut hit = Timing::new(start);
        hit.begin(at(110), 10);
        assert_eq!(hit.end(at(110)), Some(Took::OneTurn(10)));
        hit.begin(at(110), 10);
        hit.spent(Spent::default());
        let stages = Stages { queue: 10, cache: 40, ..Stages::default() };
        assert_eq!(hit.end(at(150)), Some(Took::Longer(stages)));
        assert_eq!(hit.end(at(150)), None);
    }
}
