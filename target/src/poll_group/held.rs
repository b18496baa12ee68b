//! [`HeldWrites`]: writes of one volume that may not begin now, in the order in which they came.
//!
//! While a volume is held, commands are checked against a copy of it that is read-only. So a write
//! leaves the path of an I/O where writes to read-only volumes do, and the path costs nothing more.
//! A held write is in its state of admission: nothing was asked for it, and its in-capsule data
//! stays where it came. If its connection ends, nothing is left of it.

use std::sync::Arc;

use rblk_fabric::Micros;
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{CommandCapsule, Tag};

use super::{PollGroup, block};
use crate::connection::Connection;
use crate::identity::ConnectionId;
use crate::store::{Store, VolumeIndex};
use crate::volume::Volume;

/// A write, and when it came.
type Held = (ConnectionId, Tag, Micros);

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
}

impl<S: Store> PollGroup<S> {
    /// Begins no new write of a volume from now on. Returns those that are in flight.
    pub(super) fn hold_writes(&mut self, volume: &Volume) -> Vec<(ConnectionId, Tag)> {
        let index = volume.index;
        self.turn.held.volume = Some(index);
        self.turn.access.open_to_commands(Arc::new(Volume { read_only: true, ..volume.clone() }));
        let of = |connection: &Connection| {
            let id = connection.id();
            let requests = connection.requests().iter().enumerate();
            let changing = requests.filter(move |(_, request)| request.may_change(index));
            changing.map(move |(at, _)| (id, Tag(narrow(at)))).collect::<Vec<_>>()
        };
        self.connections.iter().flat_map(of).collect()
    }

    /// Whether one of these writes is still in flight.
    pub(super) fn are_in_flight(
        &mut self,
        volume: VolumeIndex,
        writes: &[(ConnectionId, Tag)],
    ) -> bool {
        writes.iter().any(|(id, tag)| {
            let connection = self.connections.at(wide(id.index)).filter(|c| c.id() == *id);
            connection.is_some_and(|connection| connection.request(*tag).may_change(volume))
        })
    }

    /// Begins the writes that were held, if any were, in their order.
    pub(super) fn release_writes(&mut self, volume: VolumeIndex) {
        if self.turn.held.volume != Some(volume) {
            return;
        }
        self.turn.held.volume = None;
        for (id, tag, then) in std::mem::take(&mut self.turn.held.writes) {
            if !self.connections.has(id) {
                continue;
            }
            self.serve(wide(id.index), |connection, turn| {
                let request = connection.request(tag);
                let Some(command) = request.command().copied().filter(|_| request.is_held()) else {
                    return Ok(());
                };
                turn.io = true;
                turn.cq_age.kept(then, turn.us);
                block::start(connection, turn, &command)
            });
        }
    }
}
