//! [`Shares`]: the bytes that each owner of a poller's QPs may move in one turn, so that an owner
//! with much to move does not delay the others.
//!
//! The QPs of an owner share one account. While several owners moved bytes lately, each owner may
//! receive [`RECEIVED`] bytes and send [`SENT`] bytes in a turn. So the bytes in front of an
//! owner's request are bounded, however many QPs the other owners have. A QP with more to move
//! waits in a queue for the next turn. The queue begins with those that got nothing. A turn that
//! brought completions puts the queue off, once, so that the caller answers them first.
//!
//! An owner alone is never bounded: more and shorter calls would only cost it time.

use crate::work::{Owner, QpIndex};

/// Bytes that an owner may send in one turn: about 8 us of a link.
const SENT: usize = 32 << 10;
/// Bytes that an owner may receive in one turn. More than [`SENT`], because smaller parts need more
/// calls; eight times as many kept a quiet owner waiting four to five times as long.
const RECEIVED: usize = 2 * SENT;
/// Owners are bounded until one owner alone moved this many bytes.
const LATELY: u64 = 64 << 20;

/// The account of an owner.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct AccountIndex(usize);

/// Where bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// Received.
    In,
    /// Sent.
    Out,
}

impl Way {
    fn share(self) -> usize {
        match self {
            Self::In => RECEIVED,
            Self::Out => SENT,
        }
    }
}

#[derive(Debug)]
struct OwnerAccount {
    owner: Owner,
    qps: usize,
    // The turn that `received` and `sent` are of.
    turn: u64,
    received: usize,
    sent: usize,
}

/// The accounts of a poller, and the queue of the QPs that wait for their next share.
#[derive(Debug, Default)]
pub(super) struct Shares {
    accounts: Vec<OwnerAccount>,
    turn: u64,
    // Bytes that all owners moved so far.
    moved: u64,
    // The owner that moved the last of them.
    latest: AccountIndex,
    // Shares are bounded until `moved` is this.
    bounded_until: u64,
    // QPs that got nothing of their share, and those that used up theirs.
    unserved: Vec<QpIndex>,
    served: Vec<QpIndex>,
    // The turn before put the queue off.
    put_off: bool,
    // The queue of the turn, when no turn uses it: its memory is kept.
    queue: Vec<QpIndex>,
}

impl Shares {
    /// An owner has one QP more.
    pub(super) fn join(&mut self, owner: Owner) -> AccountIndex {
        let of_owner = |account: &OwnerAccount| account.qps > 0 && account.owner == owner;
        let at = self.accounts.iter().position(of_owner).unwrap_or_else(|| {
            let new = OwnerAccount { owner, qps: 0, turn: 0, received: 0, sent: 0 };
            let free = self.accounts.iter().position(|account| account.qps == 0);
            let at = free.unwrap_or(self.accounts.len());
            if free.is_some() {
                self.accounts[at] = new;
            } else {
                self.accounts.push(new);
            }
            at
        });
        self.accounts[at].qps += 1;
        AccountIndex(at)
    }

    /// An owner has one QP less.
    pub(super) fn leave(&mut self, account: AccountIndex) {
        let qps = &mut self.accounts[account.0].qps;
        debug_assert!(*qps > 0, "{account:?} has no QP left");
        *qps = qps.saturating_sub(1);
    }

    /// Makes room in the queue for `qps` QPs, so that a turn allocates nothing.
    pub(super) fn reserve(&mut self, qps: usize) {
        for queue in [&mut self.unserved, &mut self.served, &mut self.queue] {
            queue.reserve(qps);
        }
    }

    /// A QP left the poller.
    pub(super) fn forget(&mut self, qp: QpIndex) {
        self.unserved.retain(|waiting| *waiting != qp);
        self.served.retain(|waiting| *waiting != qp);
    }

    /// A turn begins: every owner has its whole share again, and the queue is that of this turn.
    #[inline]
    pub(super) fn begin_turn(&mut self) {
        self.turn += 1;
        if self.has_queue() {
            self.queue_up();
        }
    }

    #[cold]
    fn queue_up(&mut self) {
        self.queue.append(&mut self.unserved);
        self.queue.append(&mut self.served);
    }

    /// The queue of this turn: those that are served behind all others. Empty, if the turn has
    /// `completions` and puts the queue off.
    #[inline]
    pub(super) fn take_queue(&mut self, completions: bool) -> Vec<QpIndex> {
        if self.queue.is_empty() { Vec::new() } else { self.queue_unless_put_off(completions) }
    }

    #[cold]
    fn queue_unless_put_off(&mut self, completions: bool) -> Vec<QpIndex> {
        self.put_off = completions && !self.put_off;
        if self.put_off {
            self.queue.append(&mut self.unserved);
            std::mem::swap(&mut self.queue, &mut self.unserved);
        }
        std::mem::take(&mut self.queue)
    }

    /// Gives the queue back after the turn, so that its memory is used again.
    pub(super) fn return_queue(&mut self, mut queue: Vec<QpIndex>) {
        queue.clear();
        self.queue = queue;
    }

    /// Bytes that an owner may still move in this turn.
    #[inline]
    pub(super) fn left(&self, account: AccountIndex, way: Way) -> usize {
        if self.moved >= self.bounded_until {
            return usize::MAX;
        }
        let account = &self.accounts[account.0];
        if account.turn != self.turn {
            return way.share();
        }
        way.share().saturating_sub(match way {
            Way::In => account.received,
            Way::Out => account.sent,
        })
    }

    /// An owner moved bytes.
    #[inline]
    pub(super) fn moved(&mut self, account: AccountIndex, way: Way, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.moved += bytes as u64;
        if self.latest != account {
            self.latest = account;
            self.bounded_until = self.moved + LATELY;
        }
        if self.moved < self.bounded_until {
            let account = &mut self.accounts[account.0];
            if account.turn != self.turn {
                (account.turn, account.received, account.sent) = (self.turn, 0, 0);
            }
            match way {
                Way::In => account.received += bytes,
                Way::Out => account.sent += bytes,
            }
        }
    }

    /// A QP has more to move than its owner has left. The caller sees to it that a QP is in the
    /// queue once.
    #[cold]
    pub(super) fn wait(&mut self, qp: QpIndex, served: bool) {
        if served { &mut self.served } else { &mut self.unserved }.push(qp);
    }

    /// Whether a QP waits for its next share.
    #[inline]
    pub(super) fn has_queue(&self) -> bool {
        !self.unserved.is_empty() || !self.served.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Owner = Owner(7);
    const NOISY: Owner = Owner(9);

    #[test]
    fn an_owner_alone_is_not_bounded() {
        let mut shares = Shares::default();
        let (one, two) = (shares.join(NOISY), shares.join(NOISY));
        assert_eq!(one, two);
        for _ in 0..10 {
            shares.moved(one, Way::Out, 10 * SENT);
            assert_eq!(shares.left(two, Way::Out), usize::MAX);
        }
    }

    #[test]
    fn owners_are_bounded_while_several_move_bytes() {
        let mut shares = Shares::default();
        let (noisy, quiet) = (shares.join(NOISY), shares.join(QUIET));
        shares.moved(noisy, Way::In, 1);
        shares.moved(quiet, Way::In, 1);
        shares.begin_turn();
        for account in [noisy, quiet] {
            assert_eq!(shares.left(account, Way::In), RECEIVED);
        }
        shares.moved(noisy, Way::In, RECEIVED - 1);
        assert_eq!((shares.left(noisy, Way::In), shares.left(noisy, Way::Out)), (1, SENT));
        shares.moved(noisy, Way::In, 2);
        assert_eq!((shares.left(noisy, Way::In), shares.left(quiet, Way::In)), (0, RECEIVED));
        shares.begin_turn();
        assert_eq!(shares.left(noisy, Way::In), RECEIVED);
        // The other one is silent.
        let mut moved = 0;
        while shares.left(noisy, Way::Out) != usize::MAX {
            shares.moved(noisy, Way::Out, SENT);
            shares.begin_turn();
            moved += SENT as u64;
            assert!(moved <= LATELY + SENT as u64);
        }
        assert!(moved >= LATELY - SENT as u64);
    }

    #[test]
    fn the_queue_begins_with_those_that_got_nothing() {
        let mut shares = Shares::default();
        shares.wait(QpIndex(1), true);
        shares.wait(QpIndex(2), false);
        shares.wait(QpIndex(3), true);
        shares.wait(QpIndex(4), false);
        shares.forget(QpIndex(3));
        assert!(shares.has_queue());
        shares.begin_turn();
        let queue = shares.take_queue(false);
        assert_eq!(queue, [QpIndex(2), QpIndex(4), QpIndex(1)]);
        shares.return_queue(queue);
        assert!(!shares.has_queue());
    }

    #[test]
    fn a_queue_is_put_off_once() {
        let mut shares = Shares::default();
        shares.wait(QpIndex(1), true);
        shares.begin_turn();
        shares.wait(QpIndex(2), false);
        assert!(shares.take_queue(true).is_empty());
        shares.begin_turn();
        let queue = shares.take_queue(true);
        assert_eq!(queue, [QpIndex(1), QpIndex(2)]);
        shares.return_queue(queue);
        assert!(!shares.has_queue());
    }

    #[test]
    fn an_account_ends_with_its_last_qp() {
        let mut shares = Shares::default();
        let (first, again, quiet) = (shares.join(NOISY), shares.join(NOISY), shares.join(QUIET));
        shares.leave(first);
        assert_eq!(shares.join(NOISY), again);
        shares.leave(again);
        shares.leave(again);
        let other = shares.join(Owner(11));
        assert_eq!(other, first, "its place is free");
        assert_eq!(shares.join(QUIET), quiet);
    }
}
