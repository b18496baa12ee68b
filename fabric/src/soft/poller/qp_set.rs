//! [`QpSet`]: the QPs of a poller, by index.

use std::cell::Cell;

use super::owner_shares::AccountIndex;
use crate::soft::queue_pair::QueuePair;
use crate::work::QpIndex;

/// The readiness of a QP's link that epoll watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Interest {
    /// Nothing: the link has no descriptor, the QP is dead, or the sleeping thread watches the
    /// socket itself.
    None,
    /// Data to receive.
    Readable,
    /// Data to receive, and room to send.
    Both,
}

/// A QP on a poller.
#[derive(Debug)]
pub(in crate::soft) struct AttachedPair {
    /// The QP.
    pub(super) pair: Box<QueuePair>,
    /// The readiness that epoll watches now.
    pub(super) interest: Cell<Interest>,
    /// The account of its owner.
    pub(super) account: AccountIndex,
    /// The QP waits for the next share of its owner.
    pub(super) in_queue: bool,
    /// The poller remembers that it may owe its peer an acknowledgement.
    pub(super) owing: bool,
}

impl AttachedPair {
    pub(super) fn new(pair: Box<QueuePair>, account: AccountIndex) -> Self {
        let interest = Cell::new(Interest::None);
        Self { pair, interest, account, in_queue: false, owing: false }
    }
}

/// The QPs of a poller. An index is given out again after its QP was removed.
#[derive(Debug, Default)]
pub(super) struct QpSet {
    qps: Vec<Option<AttachedPair>>,
    // The indexes that are in use.
    live: Vec<u16>,
}

impl QpSet {
    /// The index that the next QP gets.
    pub(super) fn free_index(&self) -> usize {
        self.qps.iter().position(Option::is_none).unwrap_or(self.qps.len())
    }

    /// How many QPs there are.
    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    /// Adds a QP on the index that it carries, which [`Self::free_index`] named.
    pub(super) fn insert(&mut self, attached: AttachedPair) {
        let index = attached.pair.index().0;
        let at = usize::from(index);
        if at == self.qps.len() {
            self.qps.push(None);
        }
        debug_assert!(self.qps[at].is_none(), "QP index {at} is in use");
        self.qps[at] = Some(attached);
        self.live.push(index);
    }

    /// Takes a QP out.
    pub(super) fn remove(&mut self, qp: QpIndex) -> Option<AttachedPair> {
        let attached = self.qps.get_mut(usize::from(qp.0))?.take()?;
        self.live.retain(|i| *i != qp.0);
        Some(attached)
    }

    /// The QP of an index.
    #[inline]
    pub(super) fn get_mut(&mut self, qp: QpIndex) -> Option<&mut AttachedPair> {
        self.qps.get_mut(usize::from(qp.0))?.as_mut()
    }

    /// Calls `visit` with each QP.
    #[inline]
    pub(super) fn for_each(&mut self, mut visit: impl FnMut(&mut AttachedPair)) {
        for index in &self.live {
            let attached = self.qps.get_mut(usize::from(*index)).and_then(Option::as_mut);
            debug_assert!(attached.is_some(), "QP index {index} is live without a QP");
            if let Some(attached) = attached {
                visit(attached);
            }
        }
    }

    /// All QPs.
    #[inline]
    pub(super) fn iter(&self) -> impl Iterator<Item = &AttachedPair> {
        self.live.iter().filter_map(|index| {
            let attached = self.qps.get(usize::from(*index)).and_then(Option::as_ref);
            debug_assert!(attached.is_some(), "QP index {index} is live without a QP");
            attached
        })
    }

    /// The QP, if there is exactly one.
    pub(super) fn only(&self) -> Option<&AttachedPair> {
        if self.live.len() == 1 { self.iter().next() } else { None }
    }

    /// Whether the links have descriptors. They are all of one kind.
    pub(super) fn has_sockets(&self) -> bool {
        self.iter().next().is_some_and(|attached| attached.pair.link().fd().is_some())
    }
}
