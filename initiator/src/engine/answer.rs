//! [`CommandAnswer`]: the target's answer to one command, and the lane that it came by.
//! [`Carrier`]: the way and the lane of a command.

use rblk_protocol::{Sequence, Status, Tag};

use super::ways::WayIndex;

/// The index of a lane in its path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LaneIndex(pub(super) u8);

impl LaneIndex {
    /// The lane of small commands, and of work without a lane.
    pub(super) const FIRST: Self = Self(0);
}

/// The QP of a command among all of its queue. On another QP an answer could overtake its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Carrier {
    pub(super) way: WayIndex,
    pub(super) lane: LaneIndex,
}

#[cfg(test)]
impl Carrier {
    /// The first lane of that way.
    pub(super) fn of(way: WayIndex) -> Self {
        Self { way, lane: LaneIndex::FIRST }
    }
}

/// An answer, by immediate or in a list.
pub(super) struct CommandAnswer {
    pub(super) by: LaneIndex,
    pub(super) tag: Tag,
    pub(super) status: Status,
    /// The low bits of the answered sequence.
    pub(super) check: u16,
    pub(super) immediate: bool,
    /// Bytes of the WRITE that carried the immediate.
    pub(super) written: u32,
}

impl CommandAnswer {
    /// Whether it can be the answer to the command of that sequence.
    #[inline]
    pub(super) fn answers(&self, sequence: Sequence) -> bool {
        self.check == (sequence.0 & 0xffff) as u16
    }
}
