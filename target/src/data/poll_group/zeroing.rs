//! [`ZeroingQueue`]: ranges of memory volumes to zero: at once, or in steps of a turn, so that
//! other commands are served in between.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use rblk_fabric::Region;
use rblk_protocol::Tag;

use crate::volume::ids::ConnectionId;

/// Bytes of a memory volume zeroed in one turn.
const STEP_BYTES: usize = 4 << 20;

struct Zeroing {
    connection: ConnectionId,
    tag: Tag,
    region: Arc<Region>,
    // The rest of the range.
    range: Range<usize>,
}

/// The ranges to zero, in the order of their commands.
#[derive(Default)]
pub(super) struct ZeroingQueue(VecDeque<Zeroing>);

impl ZeroingQueue {
    /// Whether the queue is empty.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Zeroes a range at once, if it is short and no other range waits.
    pub(super) fn zero_now(&self, region: &Region, range: &Range<usize>) -> bool {
        let may = range.len() <= STEP_BYTES && self.0.is_empty();
        if may {
            region.zero(range.start, range.len());
        }
        may
    }

    /// Zeroes a range for a command, step by step.
    pub(super) fn push(
        &mut self,
        (connection, tag): (ConnectionId, Tag),
        region: Arc<Region>,
        range: Range<usize>,
    ) {
        self.0.push_back(Zeroing { connection, tag, region, range });
    }

    /// Zeroes one step of the range that has waited longest. Returns its command after the last
    /// step.
    #[cold]
    pub(super) fn step(&mut self) -> Option<(ConnectionId, Tag)> {
        let zeroing = self.0.front_mut()?;
        let bytes = zeroing.range.len().min(STEP_BYTES);
        zeroing.region.zero(zeroing.range.start, bytes);
        zeroing.range.start += bytes;
        if !zeroing.range.is_empty() {
            return None;
        }
        self.0.pop_front().map(|Zeroing { connection, tag, .. }| (connection, tag))
    }
}
