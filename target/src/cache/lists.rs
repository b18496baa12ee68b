//! [`Lists`]: lists that a shard reuses, so that the data path does not allocate.

use super::policy::Slot;
use super::shard_messages::Segments;
use crate::store::Segment;
use crate::volume::ids::SessionIndex;

/// Longest list: the blocks of the longest request.
const LONGEST: usize = 1025;

/// Lists without an owner.
#[derive(Debug)]
pub(super) struct Lists {
    /// Slots that were found or allocated. Empty between calls.
    pub slots: Vec<Slot>,
    /// Runs of one store operation. Empty between calls.
    pub runs: Vec<Segment>,
    spare: Vec<Vec<Segment>>,
}

impl Lists {
    pub(super) fn new() -> Self {
        let (slots, runs) = (Vec::with_capacity(LONGEST), Vec::with_capacity(LONGEST));
        Self { slots, runs, spare: Vec::new() }
    }

    /// An empty list of runs.
    pub(super) fn take(&mut self) -> Vec<Segment> {
        self.spare.pop().unwrap_or_default()
    }

    /// A list of runs is no longer needed.
    pub(super) fn give_back(&mut self, mut list: Vec<Segment>) {
        // A list whose memory was moved out has no capacity.
        if list.capacity() > 0 {
            list.clear();
            self.spare.push(list);
        }
    }

    /// Lends the runs of a list to a session.
    pub(super) fn lend(&mut self, session: SessionIndex, list: Vec<Segment>) -> Segments {
        let (memory, rest) = Segments::of_list(session, list);
        if let Some(list) = rest {
            self.give_back(list);
        }
        memory
    }

    /// Takes back lent runs.
    pub(super) fn take_back(&mut self, memory: Segments) {
        if let Some(list) = memory.into_list() {
            self.give_back(list);
        }
    }
}
