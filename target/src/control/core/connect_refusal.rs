//! [`ConnectRefusal`]: the reason why a connection is refused.

use rblk_protocol::RejectReason;

/// Why a connection is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectRefusal {
    /// The reason on the wire.
    pub reason: RejectReason,
    /// The reason in words.
    pub text: String,
}

pub(super) fn refused(reason: RejectReason, text: impl Into<String>) -> ConnectRefusal {
    ConnectRefusal { reason, text: text.into() }
}
