//! [`Waiters`]: tasks that wait for one event, in the order of their arrival. Pure.

use std::collections::VecDeque;
use std::task::Waker;

/// A place in the line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct WaiterTicket(u64);

/// Tasks in a line. The first one stays there until it leaves.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    last: u64,
    line: VecDeque<(WaiterTicket, Waker)>,
}

impl Waiters {
    /// Whether the holder of that ticket is first in line.
    pub(super) fn is_first(&self, ticket: Option<WaiterTicket>) -> bool {
        match (self.line.front(), ticket) {
            (None, _) => true,
            (Some((first, _)), Some(ticket)) => *first == ticket,
            (Some(_), None) => false,
        }
    }

    /// Takes a ticket, or stays in line with the present one. Returns a waker to drop when nothing
    /// is borrowed.
    pub(super) fn wait(
        &mut self,
        ticket: &mut Option<WaiterTicket>,
        waker: &Waker,
    ) -> Option<Waker> {
        if let Some(held) = *ticket
            && let Some((_, known)) = self.line.iter_mut().find(|(known, _)| *known == held)
        {
            let differs = !known.will_wake(waker);
            return differs.then(|| std::mem::replace(known, waker.clone()));
        }
        self.last += 1;
        let new = WaiterTicket(self.last);
        *ticket = Some(new);
        self.line.push_back((new, waker.clone()));
        None
    }

    /// Leaves the line. Returns a waker to drop when nothing is borrowed.
    pub(super) fn leave(&mut self, ticket: Option<WaiterTicket>) -> Option<Waker> {
        let ticket = ticket?;
        let at = self.line.iter().position(|(known, _)| *known == ticket)?;
        self.line.remove(at).map(|(_, waker)| waker)
    }

    /// The waker of the first in line.
    pub(super) fn first(&self) -> Option<Waker> {
        self.line.front().map(|(_, waker)| waker.clone())
    }

    /// The wakers of all, which stay in line until they leave.
    pub(super) fn all(&self) -> Vec<Waker> {
        self.line.iter().map(|(_, waker)| waker.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newcomer_does_not_overtake() {
        let mut waiters = Waiters::default();
        assert!(waiters.is_first(None));
        let (mut one, mut two) = (None, None);
        assert!(waiters.wait(&mut one, Waker::noop()).is_none());
        assert!(waiters.wait(&mut two, Waker::noop()).is_none());
        assert!(waiters.is_first(one) && !waiters.is_first(two) && !waiters.is_first(None));
        // A repeated wait changes nothing.
        let before = one;
        drop(waiters.wait(&mut one, Waker::noop()));
        assert!(one == before && waiters.is_first(one));
        assert_eq!(waiters.all().len(), 2);
        assert!(waiters.leave(one).is_some() && waiters.leave(one).is_none());
        assert!(waiters.is_first(two) && waiters.first().is_some());
        assert!(waiters.leave(two).is_some() && waiters.first().is_none());
    }
}
