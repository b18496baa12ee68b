//! The completion queue of a poller.

use std::collections::VecDeque;

use crate::work::{Completion, QpIndex};

/// What reaping a completion gives back to its QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Returns {
    /// Every send slot before this position.
    Sends(usize),
    /// One RECV slot.
    Recv,
}

/// Completions in order. It cannot overflow: a slot of a queue comes back only when its completion is
/// reaped, and the slots of all QPs together fit.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    entries: VecDeque<(Completion, Returns)>,
}

impl CompletionQueue {
    pub(super) fn new(entries: usize) -> Self {
        Self { entries: VecDeque::with_capacity(entries) }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn push(&mut self, completion: Completion, returns: Returns) {
        self.entries.push_back((completion, returns));
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
    }
}
