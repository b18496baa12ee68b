//! What control hands over with a connection, and the names of connections and sessions.

use std::time::Duration;

use rblk_fabric::MemoryRegion;
use rblk_protocol::{ConnectionKind, Epoch, Features};

use super::layout::Layout;

/// Bounds of [`ConnectionParams::patience`].
const PATIENCE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(20));

/// Names a connection of one poll group for as long as anything may refer to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ConnectionId {
    /// Index in the poll group's table.
    pub slot: u16,
    /// Changes with every use of the index.
    pub generation: u32,
}

/// A session's place in the tables of the poll groups. Control gives it, and gives it again only
/// after every poll group was told that the old session is gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionSlot(pub u16);

/// What control hands over.
#[derive(Debug)]
pub struct ConnectionParams {
    /// What it is for.
    pub kind: ConnectionKind,
    /// The session's place in the tables of the poll groups.
    pub session: SessionSlot,
    /// Epoch that its commands must name.
    pub epoch: Epoch,
    /// Sizes.
    pub layout: Layout,
    /// In-capsule bytes agreed.
    pub in_capsule_bytes: u32,
    /// Most data per command agreed.
    pub io_max_bytes: u32,
    /// Features agreed.
    pub features: Features,
    /// READs that the target may have outstanding.
    pub reads_out: u8,
    /// Runs of memory that one WRITE may gather.
    pub send_sges: u32,
    /// Its memory, registered with the poller's domain.
    pub memory: MemoryRegion,
    /// A connection on which send WRs wait and none completes for this long has ended:
    /// [`patience`].
    pub patience: Duration,
    /// The initiator's name and address, for logs.
    pub peer: String,
}

/// How long the send WRs of a connection may wait, none of them completing, where the initiator
/// wants a dead path seen within `detect`. Devices give a lost message up much sooner; this limit
/// is for devices that do not, and for peers that live and take nothing.
#[must_use]
pub fn patience(detect: Option<Duration>) -> Duration {
    detect.map_or(PATIENCE.1, |detect| detect.clamp(PATIENCE.0, PATIENCE.1))
}
