//! How full the queues of a QP are. Pure.
//!
//! An entry of the send queue is free once its WR, or a later WR, completed: the completion of a
//! signaled WR covers the unsignaled WRs before it. Only successful completions free entries. After
//! a failure the QP takes no more WRs.

use std::collections::VecDeque;

use rblk_protocol::width::wide;

use crate::work::SendWr;

/// The send queue of a QP.
#[derive(Debug)]
pub(in crate::verbs) struct SendEntries {
    limit: usize,
    used: usize,
    // How many entries each outstanding signaled WR frees, oldest first. Never longer than `limit`.
    signaled: VecDeque<usize>,
    // Entries that no signaled WR covers yet: those of the newest WRs.
    uncovered: usize,
}

impl SendEntries {
    pub(super) fn new(limit: u32) -> Self {
        let limit = wide(limit);
        Self { limit, used: 0, signaled: VecDeque::with_capacity(limit), uncovered: 0 }
    }

    pub(in crate::verbs) fn room(&self) -> usize {
        self.limit - self.used
    }

    /// WRs were posted, at most [`Self::room`].
    pub(in crate::verbs) fn post(&mut self, wrs: &[SendWr]) {
        self.used += wrs.len();
        for wr in wrs {
            self.uncovered += 1;
            if wr.signaled {
                self.signaled.push_back(std::mem::take(&mut self.uncovered));
            }
        }
    }

    /// The oldest signaled WR succeeded.
    pub(super) fn complete(&mut self) {
        self.used -= self.signaled.pop_front().unwrap_or(0);
    }
}

/// The receive queue of a QP.
#[derive(Debug)]
pub(in crate::verbs) struct RecvEntries {
    limit: usize,
    used: usize,
}

impl RecvEntries {
    pub(super) fn new(limit: u32) -> Self {
        Self { limit: wide(limit), used: 0 }
    }

    pub(in crate::verbs) fn room(&self) -> usize {
        self.limit - self.used
    }

    /// RECVs were posted, at most [`Self::room`].
    pub(in crate::verbs) fn post(&mut self, count: usize) {
        self.used += count;
    }

    /// A RECV completed.
    pub(super) fn complete(&mut self) {
        self.used = self.used.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{SendOp, SgeList, WrId};

    #[test]
    fn unsignaled_ones_are_freed_by_the_next_signaled_one() {
        let wr = |signaled| SendWr {
            id: WrId(0),
            op: SendOp::Send,
            sges: SgeList::default(),
            signaled,
            inline: false,
        };
        let mut queue = SendEntries::new(6);
        queue.post(&[wr(false), wr(false), wr(true), wr(true), wr(false)]);
        assert_eq!(queue.room(), 1);
        queue.complete();
        assert_eq!(queue.room(), 4);
        queue.complete();
        assert_eq!(queue.room(), 5);
        // No signaled WR covers the last one yet. An unexpected completion frees nothing.
        queue.complete();
        assert_eq!(queue.room(), 5);
        queue.post(&[wr(true)]);
        queue.complete();
        assert_eq!(queue.room(), 6);
    }
}
