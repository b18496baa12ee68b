//! [`Schedule`]: which sockets a turn of a poller asks for data.
//!
//! Asking a socket costs a call, whether the socket has something or not. A QP alone is asked
//! directly. Of a few QPs, those that had something lately are asked directly. epoll is asked about
//! the others every few turns, after each event, and when no QP had anything lately. Of many QPs,
//! epoll says which to ask. When no QP had anything for long, only some turns ask at all, because
//! the thread has other pollers to serve.

use super::qp_set::QpSet;
use crate::soft::queue_pair::QpState;

/// Up to this many QPs are asked directly, which is one call each and finds the data at once. Of
/// more, epoll says which to ask.
const ASKED_DIRECTLY: usize = 2;
/// Up to this many QPs are looked at one by one, to see which had something lately.
const FEW: usize = 8;
/// A QP that had nothing this many times is left to epoll.
pub(super) const QUIET: u8 = 16;
/// Turns without asking epoll, while there is a QP that is left to it.
const EPOLL_TURNS: u8 = 8;
/// After this many turns in which no socket had anything, only some turns ask. That takes longer
/// than a thread looks for an answer before it sleeps.
const IDLE_TURNS: u16 = 1024;
/// Then one turn in this many asks.
const IDLE_ASKS: u16 = 8;

/// Which QPs a turn asks for data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LinkAsk {
    /// Every QP.
    All,
    /// The QPs that had something lately.
    Busy,
    /// The QPs that epoll names.
    Epoll,
}

/// The results of the turns so far.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    // Turns since epoll was asked.
    epoll_age: u8,
    // Turns since a socket had something, or an event was taken.
    idle: u16,
    // The last turn drained every link, so a poll that only looks whether the turn is over need not
    // ask again.
    drained: bool,
    // The next poll asks no link.
    skip: bool,
}

impl Schedule {
    /// Whether this poll asks the links.
    #[inline]
    pub(super) fn is_due(&mut self, qps: &QpSet) -> bool {
        !std::mem::take(&mut self.skip) && !self.rests(qps)
    }

    /// Whether this turn asks no socket, because no socket had anything for long.
    #[inline]
    fn rests(&mut self, qps: &QpSet) -> bool {
        if self.idle < IDLE_TURNS || !qps.has_sockets() {
            return false;
        }
        self.idle = IDLE_TURNS + (self.idle + 1) % IDLE_ASKS;
        self.idle != IDLE_TURNS
    }

    /// Which QPs the turn asks.
    #[inline]
    pub(super) fn begin(&mut self, qps: &QpSet) -> LinkAsk {
        let ask = self.choose(qps);
        self.epoll_age = if ask == LinkAsk::Epoll { 0 } else { self.epoll_age.saturating_add(1) };
        ask
    }

    #[inline]
    fn choose(&self, qps: &QpSet) -> LinkAsk {
        if qps.len() > FEW {
            return if qps.has_sockets() { LinkAsk::Epoll } else { LinkAsk::All };
        }
        let (mut sockets, mut busy) = (0, 0);
        for attached in qps.iter() {
            let pair = &attached.pair;
            if pair.link().fd().is_none() || pair.state() == QpState::Dead {
                continue;
            }
            if pair.is_blocked() {
                // Direct asking happens only while no socket is full.
                return LinkAsk::Epoll;
            }
            sockets += 1;
            busy += usize::from(pair.link().quiet() < QUIET);
        }
        if sockets <= 1 {
            // A memory link costs nothing to ask.
            LinkAsk::All
        } else if busy == 0
            || busy > ASKED_DIRECTLY
            || busy < sockets && self.epoll_age >= EPOLL_TURNS
        {
            LinkAsk::Epoll
        } else {
            LinkAsk::Busy
        }
    }

    /// The turn is over: whether a link brought something, and whether all links were drained.
    #[inline]
    pub(super) fn end(&mut self, found: bool, drained: bool) {
        self.drained = drained;
        if found {
            self.idle = 0;
        } else if self.idle < IDLE_TURNS {
            self.idle += 1;
        }
    }

    /// The caller posted, accepted or failed something: the links may bring news of it.
    #[inline]
    pub(super) fn stir(&mut self) {
        self.skip = false;
        self.idle = 0;
    }

    /// A QP was left with something to move: the next poll goes on with it.
    #[cold]
    pub(super) fn go_on(&mut self) {
        self.stir();
        self.drained = false;
    }

    /// A QP came: the next poll asks the links.
    pub(super) fn ask_next(&mut self) {
        self.skip = false;
    }

    /// The next poll need not ask the links again, if the last turn drained them and `empty` says
    /// that no completion is left.
    #[inline]
    pub(super) fn skip_next(&mut self, empty: bool) {
        self.skip = self.drained && empty;
    }

    /// An event was taken. It may be of a QP that is left to epoll.
    pub(super) fn event(&mut self) {
        self.stir();
        self.epoll_age = EPOLL_TURNS;
    }
}
