//! The start of commands that waited: held writes ([`HeldWrites`]), and commands over a limit
//! ([`Delayed`]).
//!
//! A command is checked again when it starts. If its connection ended meanwhile, it never starts.
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

/// Most lines of waiting commands that one turn examines: after a limit is removed, its commands do
/// not keep others from being served.
const LOOKS: usize = 256;

impl<S: Store> PollGroup<S> {
    /// Starts no new write of a volume until the hold ends. Returns the writes in flight.
    pub(super) fn hold_writes(&mut self, volume: &Volume) -> Vec<(ConnectionId, Tag)> {
        let index = volume.index;
        self.state.later.held.hold(index);
        self.state.access.open_to_commands(Arc::new(Volume { read_only: true, ..volume.clone() }));
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

    /// Starts the held writes of a volume in their order.
    pub(super) fn release_writes(&mut self, volume: VolumeIndex) {
        for held in self.state.later.held.release(volume) {
            if self.connections.has(held.connection) {
                self.serve(wide(held.connection.index), |connection, group| {
                    block::start_held(connection, group, held)
                });
            }
        }
    }

    /// Starts commands after their wait. Returns whether there were any.
    #[cold]
    pub(super) fn begin_due(&mut self) -> bool {
        let now = Ticks::of(self.state.time.us);
        let mut any = false;
        for _ in 0..LOOKS {
            let Some((name, head, first)) = self.state.later.waiting.first(now) else { break };
            if head == Head::Unasked {
                let due = over_limit::take_for(&self.state.access, name, first.bytes, now);
                self.state.later.waiting.set_due(name, due);
                continue;
            }
            let Some(delayed) = self.state.later.waiting.pop(name) else { break };
            any = true;
            if self.connections.has(delayed.connection) {
                self.serve(wide(delayed.connection.index), |connection, group| {
                    block::start_delayed(connection, group, delayed)
                });
            }
        }
        self.state.io |= any;
        any
    }

    /// The limits of a volume, or of every volume of a session, are about to change.
    pub(super) fn limits_change(
        &mut self,
        volume: Option<VolumeIndex>,
        session: Option<SessionIndex>,
    ) {
        let access = &self.state.access;
        self.state.later.waiting.ask_anew(
            |name| Some(name.volume) == volume || Some(name.session) == session,
            |name, delayed| over_limit::give_back(access, name, delayed),
        );
    }
}
