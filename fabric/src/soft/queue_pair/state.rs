//! [`QpState`]: where a QP is in its life.

use crate::soft::wire::frame::NakReason;
use crate::work::WcStatus;

/// Where a QP is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::soft) enum QpState {
    /// Made by [`Incoming::prepare`](crate::Incoming::prepare). The peer waits for the answer.
    Prepared {
        /// READs that this QP may have outstanding, at most.
        most_reads_out: u8,
        /// READs of the peer that this QP may serve at once, at most.
        most_reads_in: u8,
    },
    /// Moving messages.
    Ready,
    /// A request of the peer was refused. Older requests are answered, then comes the NAK, then the
    /// error state. Nothing of the peer is taken any more.
    Refusing {
        /// Sequence number of the request.
        seq: usize,
        /// The refusal sent to the peer.
        refusal: NakReason,
        /// How the RECV that the request met completes, if it does.
        recv: Option<WcStatus>,
    },
    /// Error state after a NAK: the link is read to its end, so that the NAK arrives.
    Draining,
    /// Error state, link closed.
    Dead,
}

impl QpState {
    /// In the error state: every WR that is posted is flushed.
    pub(in crate::soft) fn is_error(self) -> bool {
        matches!(self, Self::Draining | Self::Dead)
    }
}
