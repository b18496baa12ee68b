//! [`FenceCall`]: the calls to a cluster that fence a client, in their order.

use rblk_protocol::Mutation;

/// A call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FenceCall {
    /// Have the monitors refuse the client, by the next map of OSDs.
    Refuse,
    /// Wait for the newest map. An OSD learns of it with the first op by it, and not before.
    NewestMap,
}

impl FenceCall {
    /// Those that fence a client, and those (false) of a member that fences nobody: there may be
    /// fences that its map does not have.
    #[must_use]
    pub fn all(fences: bool) -> &'static [Self] {
        match (fences, Mutation::GroupServesBeforeMap.is_on()) {
            (true, false) => &[Self::Refuse, Self::NewestMap],
            (true, true) => &[Self::Refuse],
            (false, false) => &[Self::NewestMap],
            (false, true) => &[],
        }
    }
}
