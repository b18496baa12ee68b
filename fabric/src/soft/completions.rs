//! The completion queue of a poller.

use std::collections::VecDeque;

use crate::work::{Completion, QpIndex, WcStatus};

/// Polls between two flushes, at most, of a device that flushes late.
const LATE_POLLS: u64 = 4;

/// What reaping a completion gives back to its QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Returns {
    /// Every send slot before this position.
    Sends(usize),
    /// One RECV slot.
    Recv,
}

/// Completions in order. It cannot overflow: a slot of a queue comes back only when its completion
/// is reaped, and the slots of all QPs together fit.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    entries: VecDeque<(Completion, Returns)>,
    // Flushes that are not there yet, and the polls until each after the one before.
    late: VecDeque<(u64, (Completion, Returns))>,
    // Decides how late; `None` where flushes come at once.
    lateness: Option<u64>,
}

impl CompletionQueue {
    pub(super) fn new(entries: usize) -> Self {
        Self { entries: VecDeque::with_capacity(entries), late: VecDeque::new(), lateness: None }
    }

    /// What fails or is flushed from now on comes some polls later, as the seed has it.
    pub(super) fn flush_late(&mut self, seed: u64) {
        self.lateness = Some(seed);
    }

    /// A poll begins.
    #[inline]
    pub(super) fn age(&mut self) {
        while let Some((left, entry)) = self.late.front_mut() {
            if *left > 0 {
                *left -= 1;
                return;
            }
            self.entries.push_back(*entry);
            self.late.pop_front();
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn push(&mut self, completion: Completion, returns: Returns) {
        match &mut self.lateness {
            Some(random) if completion.status != WcStatus::Success => {
                *random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                self.late.push_back(((*random >> 33) % LATE_POLLS, (completion, returns)));
            }
            _ => self.entries.push_back((completion, returns)),
        }
    }

    pub(super) fn pop(&mut self) -> Option<(Completion, Returns)> {
        let entry = self.entries.pop_front();
        if self.entries.is_empty() {
            // Begins anew at the front: the memory behind is touched only when so many are waiting.
            self.entries.clear();
        }
        entry
    }

    /// Forgets what belongs to a QP that goes.
    pub(super) fn purge(&mut self, qp: QpIndex) {
        self.entries.retain(|(completion, _)| completion.qp != qp);
        self.late.retain(|(_, (completion, _))| completion.qp != qp);
    }
}
