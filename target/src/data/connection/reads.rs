//! [`ReadCredits`]: credits for outstanding RDMA READs, and the parts of commands that wait for
//! them.

use std::collections::VecDeque;

use rblk_protocol::Tag;

use crate::data::parts::PartIndex;

/// Credits for RDMA READs of a connection.
#[derive(Debug)]
pub(super) struct ReadCredits {
    most: u8,
    in_flight: u8,
    waiting: VecDeque<(Tag, PartIndex)>,
}

impl ReadCredits {
    /// Credits for `most` READs, with room for `tags` waiting parts.
    pub(super) fn new(most: u8, tags: usize) -> Self {
        Self { most, in_flight: 0, waiting: VecDeque::with_capacity(tags) }
    }

    /// Whether another READ may be posted.
    #[inline]
    pub(super) fn is_free(&self) -> bool {
        self.in_flight < self.most
    }

    /// READs posted and not completed.
    #[inline]
    pub(super) fn in_flight(&self) -> u8 {
        self.in_flight
    }

    /// A READ is queued.
    #[inline]
    pub(super) fn take(&mut self) {
        debug_assert!(self.is_free(), "a READ without credit");
        self.in_flight += 1;
    }

    /// A READ completed.
    #[inline]
    pub(super) fn completed(&mut self) {
        debug_assert!(self.in_flight > 0, "a READ completed that was not posted");
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Parts that wait for a credit, oldest first.
    #[inline]
    pub(super) fn waiting(&mut self) -> &mut VecDeque<(Tag, PartIndex)> {
        &mut self.waiting
    }
}
