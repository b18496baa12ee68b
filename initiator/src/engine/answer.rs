//! [`CommandAnswer`]: the target's answer to one command, and the lane that it came by.

use rblk_protocol::{Sequence, Status, Tag};

/// The index of a lane in its path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LaneIndex(pub(super) u8);

impl LaneIndex {
    /// The lane of small commands, and of work without a lane.
    pub(super) const FIRST: Self = Self(0);
    /// No lane.
    pub(super) const NONE: Self = Self(u8::MAX);
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
