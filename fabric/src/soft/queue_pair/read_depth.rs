//! READs on their way: [`ReadsOut`], which this QP asked for, and [`ReadsIn`], which the peer did.

use std::collections::VecDeque;

/// READs of this QP that are on the wire without their response, oldest first.
#[derive(Debug)]
pub(super) struct ReadsOut {
    pending: VecDeque<usize>,
    // Responses received, all told.
    answered: u32,
}

impl ReadsOut {
    /// For a send queue of `most` WRs.
    pub(super) fn new(most: usize) -> Self {
        Self { pending: VecDeque::with_capacity(most), answered: 0 }
    }

    /// The READ at this position of the send queue is on the wire.
    #[inline]
    pub(super) fn sent(&mut self, position: usize) {
        self.pending.push_back(position);
    }

    /// The READ that the next response answers.
    #[inline]
    pub(super) fn oldest(&self) -> Option<usize> {
        self.pending.front().copied()
    }

    /// How many READs are without a response.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.pending.len()
    }

    /// The READs without a response, oldest first.
    pub(super) fn pending(&self) -> impl Iterator<Item = usize> + '_ {
        self.pending.iter().copied()
    }

    /// The oldest READ has its whole response.
    pub(super) fn finished(&mut self) {
        self.pending.pop_front();
        self.answered = self.answered.wrapping_add(1);
    }

    /// Responses received so far. A READ request tells the peer, so that the responder counts
    /// outstanding READs exactly.
    pub(super) fn answered(&self) -> u32 {
        self.answered
    }

    pub(super) fn clear(&mut self) {
        self.pending.clear();
    }
}

/// READs of the peer. Counts are all told, and wrap.
#[derive(Debug)]
pub(super) struct ReadsIn {
    // READs that may be outstanding at once, as negotiated.
    depth: u32,
    requested: u32,
    // Responses wholly sent, and those of them that the peer says it received.
    responded: u32,
    received: u32,
}

impl ReadsIn {
    pub(super) fn new(depth: u8) -> Self {
        Self { depth: u32::from(depth), requested: 0, responded: 0, received: 0 }
    }

    /// Counts a READ request, sent after `received` responses arrived at the peer. Returns whether
    /// it is within the negotiated depth.
    ///
    /// # Errors
    /// The peer cannot have received that many.
    #[inline]
    pub(super) fn request(&mut self, received: u32) -> Result<bool, &'static str> {
        if received.wrapping_sub(self.received) > self.responded.wrapping_sub(self.received) {
            return Err("counts READ responses that were never sent");
        }
        self.received = received;
        self.requested = self.requested.wrapping_add(1);
        Ok(self.requested.wrapping_sub(received) <= self.depth)
    }

    /// A whole response was sent.
    pub(super) fn responded(&mut self) {
        self.responded = self.responded.wrapping_add(1);
    }
}
