//! [`Visits`]: the work of a poller's turn on each QP: it receives, and sends the responses.

use super::owner_shares::{Shares, Way};
use super::qp_set::{AttachedPair, QpSet};
use super::wake::Wake;
use crate::soft::keys::KeyTable;
use crate::soft::queue_pair::completions::SoftCq;
use crate::work::QpIndex;

/// Receive calls per QP and turn, so that one busy peer cannot delay the others.
const CALLS_PER_TURN: usize = 16;

/// The visits of one turn, and their results.
pub(super) struct Visits<'a> {
    pub(super) keys: &'a KeyTable,
    pub(super) wake: &'a Wake,
    pub(super) shares: &'a mut Shares,
    pub(super) cq: &'a mut SoftCq,
    pub(super) owing: &'a mut Vec<QpIndex>,
    pub(super) staging: &'a mut [u8],
    pub(super) send_bytes: &'a mut [u8],
    /// Completions that the caller takes.
    pub(super) room: usize,
    /// A link brought something, or a QP goes on in the next turn.
    pub(super) found: bool,
    /// No link has more.
    pub(super) drained: bool,
    /// Calls into links.
    pub(super) calls: u64,
}

impl Visits<'_> {
    /// Visits a QP, unless it waits in the queue of its owner. `readable` and `writable`: the
    /// directions that the link is asked for.
    #[inline]
    pub(super) fn visit(&mut self, attached: &mut AttachedPair, readable: bool, writable: bool) {
        if writable {
            attached.pair.unblock();
        }
        if attached.in_queue {
            return;
        }
        let own = attached.pair.own_keys().cloned();
        let own = own.as_ref().map(|keys| keys.read());
        let keys: &KeyTable = own.as_deref().unwrap_or(self.keys);
        let share = self.shares.left(attached.account, Way::In);
        let (mut left, mut more) = (share, readable);
        for _ in 0..CALLS_PER_TURN {
            if !more || self.cq.len() >= self.room || left == 0 {
                break;
            }
            more = attached.pair.receive(keys, self.cq, self.staging, &mut left);
            self.found |= attached.pair.link().quiet() == 0;
        }
        self.shares.moved(attached.account, Way::In, share - left);
        let waits = more && left == 0;
        if waits {
            wait(self.shares, attached, left < share);
        }
        let waits = pump(self.shares, attached, keys, self.cq, self.send_bytes) || waits;
        self.found |= waits;
        self.drained &= !more && !waits;
        self.calls += end_visit(self.wake, attached, self.owing);
    }

    /// Visits the QPs in the queue.
    #[cold]
    pub(super) fn serve(&mut self, queue: Vec<QpIndex>, qps: &mut QpSet) {
        for index in &queue {
            if let Some(attached) = qps.get_mut(*index) {
                attached.in_queue = false;
                self.visit(attached, true, false);
            }
        }
        self.shares.return_queue(queue);
    }
}

/// Sends the waiting frames of a QP, as far as its owner has a share left. Returns whether the QP
/// waits for the next share.
#[inline]
pub(super) fn pump(
    shares: &mut Shares,
    attached: &mut AttachedPair,
    keys: &KeyTable,
    cq: &mut SoftCq,
    send_bytes: &mut [u8],
) -> bool {
    let pair = &mut attached.pair;
    if !pair.wants_to_send() {
        return false;
    }
    let share = shares.left(attached.account, Way::Out);
    let mut left = share;
    pair.pump(keys, cq, send_bytes, &mut left);
    shares.moved(attached.account, Way::Out, share - left);
    let waits = left == 0 && pair.wants_to_send() && !pair.is_blocked();
    if waits {
        wait(shares, attached, left < share);
    }
    waits
}

/// Puts a QP into the queue for the next share of its owner. `served` says that it used a share.
#[cold]
fn wait(shares: &mut Shares, attached: &mut AttachedPair, served: bool) {
    if !std::mem::replace(&mut attached.in_queue, true) {
        shares.wait(attached.pair.index(), served);
    }
}

/// Books the visit of a QP: the readiness that epoll watches, an acknowledgement due to the peer,
/// and the calls made. Returns the calls.
#[inline]
pub(super) fn end_visit(wake: &Wake, attached: &mut AttachedPair, owing: &mut Vec<QpIndex>) -> u64 {
    if attached.pair.acks().is_due() && !attached.owing {
        attached.owing = true;
        owing.push(attached.pair.index());
    }
    attached.pair.take_calls() + wake.update(attached)
}
