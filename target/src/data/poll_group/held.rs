//! [`HeldWrites`]: writes of one volume that may not start now, in order of arrival.
//!
//! While a volume is held, commands are checked against a read-only copy of it. So a write leaves
//! the I/O path at the same test as a write to a read-only volume, and the path costs no more. A
//! held write has asked for no resources, and its in-capsule data stays in the receive buffer. If
//! its connection ends, the write is dropped.

use rblk_protocol::{BlockRange, CommandCapsule, Tag};
use rblk_runtime::Micros;

use crate::data::connection::Connection;
use crate::data::request::{RequestEvent, Span};
use crate::volume::Volume;
use crate::volume::ids::{ConnectionId, VolumeIndex};

/// A command that may not start now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// The connection.
    pub(super) connection: ConnectionId,
    /// The tag.
    pub(super) tag: Tag,
    /// Time of arrival.
    pub(super) came: Micros,
    /// The write's limits have let it pass: it will not wait for them again.
    pub(super) is_let_in: bool,
}

impl Held {
    /// Lets a command of a volume wait.
    pub(super) fn of(
        connection: &mut Connection,
        (command, volume): (&CommandCapsule, &Volume),
        came: Micros,
        is_let_in: bool,
    ) -> Self {
        let range = BlockRange::new(command.lba, command.count, volume.blocks, volume.block_size);
        let (offset, len) = range.map_or((0, 0), |range| (range.offset_bytes(), range.len_bytes()));
        let (tag, id) = (command.tag, connection.id());
        let request = connection.request_mut(tag);
        request.names(Span { volume: volume.index, offset, len });
        let _ = request.step(RequestEvent::WritesHeld);
        Self { connection: id, tag, came, is_let_in }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct HeldWrites {
    volume: Option<VolumeIndex>,
    // At most the depth of all connections: each tag has one command.
    writes: Vec<Held>,
}

impl HeldWrites {
    /// Whether the writes of a command's volume are kept.
    #[cold]
    pub(super) fn holds(&self, command: &CommandCapsule) -> bool {
        self.volume.is_some() && self.volume == Volume::index_of(command.volume)
    }

    /// Keeps a command for a held volume. The command arrived at `came`; `is_let_in` as in
    /// [`Held`].
    #[cold]
    pub(super) fn keep(
        &mut self,
        connection: &mut Connection,
        (command, volume): (&CommandCapsule, &Volume),
        came: Micros,
        is_let_in: bool,
    ) {
        self.writes.push(Held::of(connection, (command, volume), came, is_let_in));
    }

    /// Starts to keep the writes of this volume.
    pub(super) fn hold(&mut self, volume: VolumeIndex) {
        self.volume = Some(volume);
    }

    /// Ends the hold of this volume. Returns the kept writes; none if the volume was not held.
    pub(super) fn release(&mut self, volume: VolumeIndex) -> Vec<Held> {
        if self.volume != Some(volume) {
            return Vec::new();
        }
        self.volume = None;
        std::mem::take(&mut self.writes)
    }
}
