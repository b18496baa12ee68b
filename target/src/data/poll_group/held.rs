//! [`HeldWrites`]: writes of one volume that may not begin now, in the order in which they came.
//!
//! While a volume is held, commands are checked against a copy of it that is read-only. So a write
//! leaves the path of an I/O where writes to read-only volumes do, and the path costs nothing more.
//! Nothing was asked for a held write, and its in-capsule data stays where it came. If its
//! connection ends, nothing is left of it.

use rblk_fabric::Micros;
use rblk_protocol::{BlockRange, CommandCapsule, Tag};

use crate::data::connection::Connection;
use crate::data::request::{Event, Span};
use crate::volume::Volume;
use crate::volume::ids::{ConnectionId, VolumeIndex};

/// A write that may not begin now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// Its connection.
    pub(super) connection: ConnectionId,
    /// Its tag.
    pub(super) tag: Tag,
    /// When it came.
    pub(super) came: Micros,
    /// Its limits have let it begin: it waits for none again.
    pub(super) is_let_in: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct HeldWrites {
    volume: Option<VolumeIndex>,
    // At most the depth of all connections: each tag has one command.
    writes: Vec<Held>,
}

impl HeldWrites {
    /// Whether the writes of the volume that a command names are kept.
    #[cold]
    pub(super) fn holds(&self, command: &CommandCapsule) -> bool {
        self.volume.is_some() && self.volume == Volume::index_of(command.volume)
    }

    /// Keeps a command for a volume that is held. It came then; `is_let_in` as in [`Held`].
    #[cold]
    pub(super) fn keep(
        &mut self,
        connection: &mut Connection,
        (command, volume): (&CommandCapsule, &Volume),
        came: Micros,
        is_let_in: bool,
    ) {
        let range = BlockRange::new(command.lba, command.count, volume.blocks, volume.block_size);
        let (offset, len) = range.map_or((0, 0), |range| (range.offset_bytes(), range.len_bytes()));
        let (tag, id) = (command.tag, connection.id());
        let request = connection.request_mut(tag);
        request.names(Span { volume: volume.index, offset, len });
        let _ = request.step(Event::WritesHeld);
        self.writes.push(Held { connection: id, tag, came, is_let_in });
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
