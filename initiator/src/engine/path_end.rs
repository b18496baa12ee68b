//! [`PathEnd`]: the reason for a path's end.

use std::fmt;

use rblk_fabric::WcStatus;

/// The reason for a path's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathEnd {
    /// The QP died: the peer, the link, or an RDMA error.
    Lost(WcStatus),
    /// The self-test failed or was not answered: an agreed verb does not work on this path.
    SelfTest,
    /// The target owes an answer and is silent: see
    /// [`Engine::set_pulse`](super::Engine::set_pulse).
    Silent,
    /// The target broke a rule of the protocol.
    Protocol(&'static str),
    /// An answer was damaged: its digest does not match.
    Corrupted,
    /// Control ended the path.
    Dropped,
    /// The queue gave the path up, to give its buffers back.
    GivenUp,
    /// The path could not be taken over.
    Unusable,
}

/// For logs and `status`.
impl fmt::Display for PathEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathEnd::Lost(WcStatus::Flushed) => f.write_str("the connection broke"),
            PathEnd::Lost(status) => write!(f, "the connection broke: {status}"),
            PathEnd::SelfTest => f.write_str("the self-test failed"),
            PathEnd::Silent => f.write_str("the target does not answer"),
            PathEnd::Protocol(rule) => write!(f, "the target broke the protocol: {rule}"),
            PathEnd::Corrupted => f.write_str("an answer was damaged: its digest does not match"),
            PathEnd::Dropped | PathEnd::GivenUp => f.write_str("the path was given up"),
            PathEnd::Unusable => f.write_str("the path could not be taken over"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_said_in_words() {
        for (end, words) in [
            (PathEnd::Lost(WcStatus::Flushed), "the connection broke"),
            (
                PathEnd::Lost(WcStatus::RetryExceeded),
                "the connection broke: the peer does not acknowledge",
            ),
            (PathEnd::Silent, "the target does not answer"),
        ] {
            assert_eq!(end.to_string(), words);
        }
    }
}
