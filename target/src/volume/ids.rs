//! Names that control, poll groups and shards share: of connections and of sessions.

use rblk_fabric::Owner;

/// Names a volume within a store: the index in the store's table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct VolumeIndex(pub u16);

/// Names a connection of one poll group for as long as anything may refer to it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId {
    /// Index in the poll group's table.
    pub index: u16,
    /// Changes with every use of the index.
    pub generation: u32,
}

/// Names a connection for control, from its connect request to its end. No other connection of this
/// run has the same number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct AdmissionId(pub u64);

/// A session's place in the tables of the poll groups. Control gives a place again only when the
/// session before has no connection left.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionIndex {
    /// The place.
    pub index: u16,
    /// Changes with every session that has the place, so that news of one session are not taken for
    /// another.
    pub life: u32,
}

/// A host's place in the tables of the shards: sessions of one host share the part of the memory
/// that a host may keep from others. Control gives a place again when the host has no session left.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct HostIndex(u16);

impl HostIndex {
    /// The place for control's own requests, and for sessions of a host that a shard does not know
    /// yet.
    pub const NONE: Self = Self(0);

    /// The host of that place.
    #[must_use]
    pub const fn new(place: u16) -> Self {
        Self(place)
    }

    /// The place in a table.
    #[inline(always)]
    pub(crate) fn place(self) -> usize {
        usize::from(self.0)
    }
}

impl SessionIndex {
    /// The place of a connection without a session, as before LOGIN. No session has this place.
    pub const NONE: Self = Self { index: u16::MAX, life: 0 };

    /// Its QPs have one owner: a poller shares its turns fairly between sessions.
    pub(crate) fn owner(self) -> Owner {
        Owner(u64::from(self.life) << 16 | u64::from(self.index))
    }
}
