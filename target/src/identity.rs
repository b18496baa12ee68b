//! Names that control, poll groups and shards share: of connections and of sessions.

/// Names a connection of one poll group for as long as anything may refer to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ConnectionId {
    /// Index in the poll group's table.
    pub index: u16,
    /// Changes with every use of the index.
    pub generation: u32,
}

/// A session's place in the tables of the poll groups. Control gives it, and gives it again only
/// after every poll group was told that the old session is gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionIndex(pub u16);
