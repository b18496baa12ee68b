//! [`Way`]: a way of a host to the target, in one epoch of its session.

use super::ended_epochs::EndedEpochs;

/// One life of one way: from its LOGIN until it is ended, by a later LOGIN or by a DROP. Its
/// connections may all be gone before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Way {
    /// The address of its admin connection.
    pub(crate) peer: String,
    /// The epochs that its LOGIN ended.
    pub(crate) ends: EndedEpochs,
    /// Both ends know [`WAYS`](rblk_protocol::Features::WAYS).
    pub(crate) has_ways: bool,
    /// Its LOGIN was answered.
    pub(crate) logged_in: bool,
}

impl Way {
    /// Whether it stands beside others: its LOGIN did not end them.
    pub(crate) fn has_joined(&self) -> bool {
        !matches!(self.ends, EndedEpochs::Below(_))
    }
}
