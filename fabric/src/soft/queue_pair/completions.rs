//! [`SoftCq`]: the completions of a poller that the caller has not polled.

use std::collections::VecDeque;
use std::time::Instant;

use rblk_protocol::width::wide64;

use crate::work::{Completion, QpIndex, WcStatus};
use rblk_runtime::log_limit::LogLimit;

/// Polls between two flushes, at most, on a device that flushes late.
const LATE_POLLS: u64 = 4;

/// The resources that return to a QP when the caller polls a completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::soft) enum Returns {
    /// Every entry of the send queue before this position.
    Sends(usize),
    /// One entry of the receive queue.
    Recv,
}

/// Completions in order. It cannot overflow: an entry of a send or receive queue is free only when
/// its completion was polled, and the CQ has an entry for each: `promised <= entries`.
#[derive(Debug)]
pub(in crate::soft) struct SoftCq {
    ready: VecDeque<(Completion, Returns)>,
    entries: u64,
    // Entries that the QPs on the CQ may fill.
    promised: u64,
    // Flushes that come later, each with the number of polls after the one before it.
    late: VecDeque<(u64, (Completion, Returns))>,
    // Decides how late. `None` on a device that flushes at once.
    lateness: Option<u64>,
    // QPs that ended because of a record of their peer.
    bad_records: u64,
    // Limits their log lines.
    bad_record_lines: LogLimit,
}

impl SoftCq {
    pub(in crate::soft) fn new(entries: usize) -> Self {
        Self {
            ready: VecDeque::with_capacity(entries),
            entries: wide64(entries),
            promised: 0,
            late: VecDeque::new(),
            lateness: None,
            bad_records: 0,
            bad_record_lines: LogLimit::default(),
        }
    }

    /// A QP of this CQ ends because of a bad record of its peer.
    pub(super) fn count_bad_record(&mut self) {
        self.bad_records += 1;
    }

    /// Whether the log may say so now.
    pub(super) fn may_log_bad_record(&mut self) -> bool {
        self.bad_record_lines.may_write(Instant::now())
    }

    /// QPs of this CQ that ended because of a bad record.
    pub(in crate::soft) fn bad_records(&self) -> u64 {
        self.bad_records
    }

    /// Entries in all.
    pub(in crate::soft) fn entries(&self) -> u64 {
        self.entries
    }

    /// Entries that the QPs on the CQ may fill.
    pub(in crate::soft) fn promised(&self) -> u64 {
        self.promised
    }

    /// Sets how many entries the QPs on the CQ may fill: at most [`Self::entries`].
    pub(in crate::soft) fn promise(&mut self, entries: u64) {
        debug_assert!(entries <= self.entries, "{entries} of {} CQ entries", self.entries);
        self.promised = entries;
    }

    /// Delays all later completions with an error by some polls. The seed decides the number.
    pub(in crate::soft) fn flush_late(&mut self, seed: u64) {
        self.lateness = Some(seed);
    }

    /// A poll begins.
    #[inline]
    pub(in crate::soft) fn age(&mut self) {
        while let Some((left, entry)) = self.late.front_mut() {
            if *left > 0 {
                *left -= 1;
                return;
            }
            self.ready.push_back(*entry);
            self.late.pop_front();
        }
    }

    pub(in crate::soft) fn len(&self) -> usize {
        self.ready.len()
    }

    pub(in crate::soft) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    pub(super) fn push(&mut self, completion: Completion, returns: Returns) {
        match &mut self.lateness {
            Some(random) if completion.status != WcStatus::Success => {
                *random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                self.late.push_back(((*random >> 33) % LATE_POLLS, (completion, returns)));
            }
            _ => self.ready.push_back((completion, returns)),
        }
    }

    pub(in crate::soft) fn pop(&mut self) -> Option<(Completion, Returns)> {
        let entry = self.ready.pop_front();
        if self.ready.is_empty() {
            // Starts again at the front, so that memory is touched only as far as completions wait.
            self.ready.clear();
        }
        entry
    }

    /// Removes the completions of a QP that is detached.
    pub(in crate::soft) fn purge(&mut self, qp: QpIndex) {
        self.ready.retain(|(completion, _)| completion.qp != qp);
        self.late.retain(|(_, (completion, _))| completion.qp != qp);
    }
}
