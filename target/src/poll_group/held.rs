//! [`HeldWrites`]: writes of one volume that may not begin now, in the order in which they came.
//!
//! While a volume is held, commands are checked against a copy of it that is read-only. So a write
//! leaves the path of an I/O where writes to read-only volumes do, and the path costs nothing more.
//! A held write is in its state of admission: nothing was asked for it, and its in-capsule data
//! stays where it came. If its connection ends, nothing is left of it.

use rblk_fabric::Micros;
use rblk_protocol::{CommandCapsule, Tag};

use crate::connection::Connection;
use crate::identity::ConnectionId;
use crate::store::VolumeIndex;
use crate::volume::Volume;

/// A write, and when it came.
pub(super) type Held = (ConnectionId, Tag, Micros);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct HeldWrites {
    volume: Option<VolumeIndex>,
    // At most the depth of all connections: each tag has one command.
    writes: Vec<Held>,
}

impl HeldWrites {
    /// Keeps a command, if its volume is held. Returns whether it is.
    #[cold]
    pub(super) fn keep(
        &mut self,
        connection: &Connection,
        command: &CommandCapsule,
        now: Micros,
    ) -> bool {
        let is_held = self.volume.is_some() && self.volume == Volume::index_of(command.volume);
        if is_held {
            self.writes.push((connection.id(), command.tag, now));
        }
        is_held
    }

    /// Keeps the writes of this volume from now on.
    pub(super) fn hold(&mut self, volume: VolumeIndex) {
        self.volume = Some(volume);
    }

    /// Keeps no more. Returns what was kept of this volume; none if it was not held.
    pub(super) fn release(&mut self, volume: VolumeIndex) -> Vec<Held> {
        if self.volume != Some(volume) {
            return Vec::new();
        }
        self.volume = None;
        std::mem::take(&mut self.writes)
    }
}
