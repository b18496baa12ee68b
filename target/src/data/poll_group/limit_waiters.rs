//! Commands that waited, and begin now: writes that were held ([`HeldWrites`]), and commands over a
//! limit ([`Delayed`]).
//!
//! Everything about such a command is looked at again when it begins. A command whose connection
//! ended meanwhile never begins.
//!
//! [`HeldWrites`]: super::held::HeldWrites
//! [`Delayed`]: super::over_limit::Delayed

use std::sync::Arc;

use rblk_protocol::Tag;
use rblk_protocol::width::{narrow, wide};

use super::{PollGroup, over_limit};
use crate::data::connection::Connection;
use crate::data::poll_group::command::block;
use crate::store::Store;
use crate::volume::Volume;
use crate::volume::ids::{ConnectionId, SessionIndex, VolumeIndex};
use crate::volume::limits::{Head, Ticks};

/// How many lines of waiting commands one turn looks at: a limit that went does not keep others
/// from being served.
const LOOKS: usize = 256;

impl<S: Store> PollGroup<S> {
    /// Begins no new write of a volume from now on. Returns those that are in flight.
    pub(super) fn hold_writes(&mut self, volume: &Volume) -> Vec<(ConnectionId, Tag)> {
        let index = volume.index;
        self.turn.later.held.hold(index);
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
        for held in self.turn.later.held.release(volume) {
            if self.connections.has(held.connection) {
                self.serve(wide(held.connection.index), |connection, turn| {
                    block::start_held(connection, turn, held)
                });
            }
        }
    }

    /// Begins commands whose time has come. Returns whether there were any.
    #[cold]
    pub(super) fn begin_due(&mut self) -> bool {
        let now = Ticks::of(self.turn.time.us);
        let mut any = false;
        for _ in 0..LOOKS {
            let Some((name, head, first)) = self.turn.later.waiting.first(now) else { break };
            if head == Head::Unasked {
                let due = over_limit::take_for(&self.turn.access, name, first.bytes, now);
                self.turn.later.waiting.set_due(name, due);
                continue;
            }
            let Some(delayed) = self.turn.later.waiting.pop(name) else { break };
            any = true;
            if self.connections.has(delayed.connection) {
                self.serve(wide(delayed.connection.index), |connection, turn| {
                    block::start_delayed(connection, turn, delayed)
                });
            }
        }
        self.turn.io |= any;
        any
    }

    /// The limits of a volume, or of every volume of a session, are about to be others.
    pub(super) fn limits_change(
        &mut self,
        volume: Option<VolumeIndex>,
        session: Option<SessionIndex>,
    ) {
        let access = &self.turn.access;
        self.turn.later.waiting.ask_anew(
            |name| Some(name.volume) == volume || Some(name.session) == session,
            |name, delayed| over_limit::give_back(access, name, delayed),
        );
    }
}
