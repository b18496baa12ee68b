//! [`Sessions`]: how much memory of a shard the peers of each session keep from all others.
//!
//! Memory that is lent for a READ comes back when the peer has the data. Memory that is reserved
//! for a WRITE is filled when the peer gives the data. A peer may take its time for both, so what
//! it keeps is bounded: a session gets more only while that is at most half of what no peer keeps.
//! One session alone keeps up to a third of the memory, each of two a quarter, each of `n` one part
//! of `n + 2`: however many peers take nothing, something is left for the next session. (A dynamic
//! threshold, as for the shared buffer of a switch: Choudhury and Hahne, IEEE/ACM Transactions on
//! Networking 6, 1998.) A session that keeps nothing gets what it asks for, however much that is.
//!
//! So that most lends need no more than one comparison, a session may always keep one part of
//! [`QUICK`] of the memory, unless a job of it waits.
//!
//! Memory that may be dirty does not count as memory that could be kept. A slot that is lent twice
//! counts twice for the sessions that have it, and once for all.

use std::collections::VecDeque;

use rblk_protocol::width::wide;

use crate::identity::SessionIndex;

/// A job that waits, and the slots that it needs.
type Waiter = (u32, usize);

/// A session may keep at least one of so many parts of the memory.
const QUICK: usize = 128;

#[derive(Debug, Default)]
struct State {
    // Slots lent to its peers or reserved for their data, or promised.
    kept: usize,
    // What it may keep in any case: nothing while a job waits.
    quick: usize,
    // Jobs that wait until the session keeps less, oldest first.
    waiting: VecDeque<Waiter>,
}

impl State {
    // `free`: slots that no peer keeps.
    fn may_take(&self, need: usize, free: usize) -> bool {
        self.kept == 0 || 2 * (self.kept + need) <= free
    }
}

/// What the peers of each session keep. See the module.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    table: Vec<State>,
    // Slots that peers may keep, all together.
    slots: usize,
    // One part of `QUICK` of these.
    quick: usize,
    // Slots that jobs were promised and that are not lent yet.
    promised: usize,
    // Sessions with jobs that wait, in turn.
    line: VecDeque<SessionIndex>,
}

impl Sessions {
    /// So many slots are never dirty: peers may keep these.
    pub(super) fn set_slots(&mut self, slots: usize) {
        (self.slots, self.quick) = (slots, slots / QUICK);
        for state in self.table.iter_mut().filter(|state| state.waiting.is_empty()) {
            state.quick = self.quick;
        }
    }

    // `pinned`: slots that are lent, each counted once.
    fn free(&self, pinned: usize) -> usize {
        self.slots.saturating_sub(self.promised + pinned)
    }

    /// Takes slots to be lent to a session at once. False: it keeps as much as it may.
    #[inline(always)]
    pub(super) fn take(&mut self, session: SessionIndex, slots: usize, pinned: usize) -> bool {
        if let Some(state) = self.table.get_mut(wide(session.index))
            && state.kept + slots <= state.quick
        {
            state.kept += slots;
            return true;
        }
        self.take_much(session, slots, pinned)
    }

    #[inline(never)]
    fn take_much(&mut self, session: SessionIndex, slots: usize, pinned: usize) -> bool {
        let free = self.free(pinned);
        let state = self.state(session);
        let takes = state.waiting.is_empty() && state.may_take(slots, free);
        if takes {
            state.kept += slots;
        }
        takes
    }

    fn state(&mut self, session: SessionIndex) -> &mut State {
        let (at, quick) = (wide(session.index), self.quick);
        if self.table.len() <= at {
            self.table.resize_with(at + 1, || State { quick, ..State::default() });
        }
        &mut self.table[at]
    }

    /// Promises slots to a job of a session, or puts the job in the session's line and returns
    /// false.
    #[inline(always)]
    pub(super) fn promise(
        &mut self,
        session: SessionIndex,
        job: u32,
        slots: usize,
        pinned: usize,
    ) -> bool {
        if self.take(session, slots, pinned) {
            self.promised += slots;
            return true;
        }
        self.stand_in_line(session, job, slots);
        false
    }

    #[cold]
    #[inline(never)]
    fn stand_in_line(&mut self, session: SessionIndex, job: u32, slots: usize) {
        let state = self.state(session);
        let is_first = state.waiting.is_empty();
        state.waiting.push_back((job, slots));
        state.quick = 0;
        if is_first {
            self.line.push_back(session);
        }
    }

    /// Promises slots to the first job of the first session in line that may have them. Returns the
    /// job and its slots; `None`: none may.
    pub(super) fn promise_next(&mut self, pinned: usize) -> Option<Waiter> {
        for _ in 0..self.line.len() {
            let (free, quick) = (self.free(pinned), self.quick);
            let session = self.line.pop_front()?;
            let state = self.state(session);
            let first = state.waiting.front().filter(|(_, need)| state.may_take(*need, free));
            let served = first.copied();
            if let Some((_, need)) = served {
                state.waiting.pop_front();
                state.kept += need;
            }
            if state.waiting.is_empty() {
                state.quick = quick;
            } else {
                self.line.push_back(session);
            }
            if let Some((_, need)) = served {
                self.promised += need;
                return served;
            }
        }
        None
    }

    /// Slots that a job was promised are lent: [`Self::give_back`] takes them when they come back.
    #[inline]
    pub(super) fn lent(&mut self, slots: usize) {
        debug_assert!(slots <= self.promised, "{slots} slots are lent of {}", self.promised);
        self.promised = self.promised.saturating_sub(slots);
    }

    /// Slots that a job was promised are not the peer's affair any more: its data came, or it gets
    /// none.
    #[inline]
    pub(super) fn end_promise(&mut self, session: SessionIndex, slots: usize) {
        self.lent(slots);
        self.give_back(session, slots);
    }

    /// Lent slots came back.
    #[inline(always)]
    pub(super) fn give_back(&mut self, session: SessionIndex, slots: usize) {
        if let Some(state) = self.table.get_mut(wide(session.index)) {
            debug_assert!(slots <= state.kept, "{slots} slots come back of {}", state.kept);
            state.kept -= slots;
        }
    }

    /// Sessions that have jobs in line.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.line.len()
    }

    /// Whether a session has jobs in line.
    pub(super) fn waits(&self, session: SessionIndex) -> bool {
        self.table.get(wide(session.index)).is_some_and(|state| !state.waiting.is_empty())
    }

    /// The sessions that have jobs in line.
    pub(super) fn in_line(&self) -> impl Iterator<Item = SessionIndex> {
        self.line.iter().copied()
    }

    /// Slots that jobs were promised and that are not lent yet.
    #[cfg(test)]
    pub(super) fn promised(&self) -> usize {
        self.promised
    }

    /// Slots that all sessions keep, each as often as it is kept.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        self.table.iter().map(|state| state.kept).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: SessionIndex = SessionIndex { index: 1, life: 1 };
    const TWO: SessionIndex = SessionIndex { index: 2, life: 1 };
    const THREE: SessionIndex = SessionIndex { index: 3, life: 1 };

    /// What a session gets, slot by slot. Nothing comes back.
    fn fill(sessions: &mut Sessions, session: SessionIndex, pinned: &mut usize) -> usize {
        let before = *pinned;
        while sessions.take(session, 1, *pinned) {
            *pinned += 1;
        }
        *pinned - before
    }

    #[test]
    fn each_further_session_finds_a_part_of_what_is_left() {
        let mut sessions = Sessions::default();
        sessions.set_slots(1200);
        let mut pinned = 0;
        assert_eq!(fill(&mut sessions, ONE, &mut pinned), 400);
        assert_eq!(fill(&mut sessions, TWO, &mut pinned), 267);
        assert_eq!(fill(&mut sessions, THREE, &mut pinned), 178);
        assert_eq!(sessions.kept(), pinned);
        // And the first gets more when others keep less.
        sessions.give_back(TWO, 267);
        pinned -= 267;
        assert_eq!(fill(&mut sessions, ONE, &mut pinned), 0);
        sessions.give_back(ONE, 200);
        assert!(sessions.take(ONE, 1, pinned - 200));
    }

    #[test]
    fn a_session_that_keeps_nothing_gets_whatever_it_asks_for() {
        let mut sessions = Sessions::default();
        sessions.set_slots(16);
        assert!(sessions.promise(ONE, 7, 256, 0));
        assert!(!sessions.promise(ONE, 8, 1, 0));
        assert!(sessions.promise(TWO, 9, 16, 0));
        sessions.end_promise(ONE, 256);
        sessions.end_promise(TWO, 16);
        assert_eq!(sessions.promise_next(0), Some((8, 1)));
        assert_eq!((sessions.promised(), sessions.kept(), sessions.waiting()), (1, 1, 0));
    }

    #[test]
    fn jobs_of_a_session_go_on_in_order_and_sessions_in_turn() {
        let mut sessions = Sessions::default();
        sessions.set_slots(30);
        for session in [ONE, TWO] {
            assert!(sessions.promise(session, 0, 7, 0));
        }
        // A large one is in front of a small one, which does not overtake it.
        for (job, need) in [(1, 8), (2, 1)] {
            assert!(!sessions.promise(ONE, job, need, 0));
            assert!(!sessions.promise(TWO, 10 + job, need, 0));
        }
        assert!(!sessions.take(ONE, 1, 0));
        assert_eq!((sessions.waiting(), sessions.promise_next(0)), (2, None));
        sessions.end_promise(ONE, 7);
        sessions.end_promise(TWO, 7);
        let all: Vec<_> = std::iter::from_fn(|| sessions.promise_next(0)).collect();
        assert_eq!(all, [(1, 8), (11, 8)]);
        sessions.end_promise(TWO, 8);
        assert_eq!(sessions.promise_next(0), Some((2, 1)));
        assert_eq!(sessions.promise_next(0), Some((12, 1)));
        assert_eq!((sessions.promise_next(0), sessions.waiting()), (None, 0));
    }
}
