//! The end of connections, including connections that are ended because their peer is silent.
//!
//! When a connection ends, its QP goes at once to control, which destroys it: a driver may take its
//! time for that. Only a destroyed QP proves that the device no longer touches the connection's
//! memory. A QP in the error state does not prove it, nor does a flushed WR: cards flush after
//! `modify_qp` returned, and a READ on its way may still land. So lent memory stays lent until
//! control reports that the QP is destroyed ([`ToGroup::Destroyed`]), however long that takes. The
//! connection leaves the table when, in addition, no shard works for it.
//!
//! [`ToGroup::Destroyed`]: super::ToGroup::Destroyed

use std::time::{Duration, Instant};

use rblk_protocol::Mutation;
use rblk_protocol::width::wide;

use super::group_state::GroupState;
use super::log_lines::LogLine;
use super::{FromGroup, PollGroup, over_limit};
use crate::data::connection::{Connection, Life, Violation};
use crate::data::poll_group::command::counting;
use crate::data::request::Request;
use crate::store::Store;
use crate::volume::ids::ConnectionId;

/// Interval of the warnings that the QP of a dead connection is not destroyed yet.
const DESTROY_WARNING: Duration = Duration::from_secs(5);

impl<S: Store> PollGroup<S> {
    /// A CQ broke, or its device is gone: ends its connections. Connections of other devices stay.
    #[cold]
    pub(super) fn end_poller(&mut self, poller: usize, error: &rblk_fabric::FabricError) {
        let group = self.state.index;
        let Some(entry) = self.state.pollers.working(poller) else { return };
        tracing::error!(
            device = entry.poller.caps().name,
            poll_group = group,
            %error,
            "a completion queue broke: every connection on it ends, all others go on; if the device does not come \
             back by itself, reset it (devlink dev reload) or load its driver anew"
        );
        self.state.pollers.note_broken(poller);
        self.expect_rare_work();
        self.state.told.outbox.push(FromGroup::PollerBroken { group, poller });
        self.end_all("its completion queue broke", |connection| connection.poller() == poller);
    }

    /// Asks every CQ for an event at its next completion. The thread calls this before a sleep, and
    /// then looks once more. A CQ that cannot be armed counts as broken, like one that cannot be
    /// polled.
    pub fn arm(&mut self) {
        self.state.time.cq_age.armed(self.state.time.us);
        for place in 0..self.state.pollers.places() {
            let Some(entry) = self.state.pollers.working(place) else { continue };
            if let Err(error) = entry.poller.arm() {
                self.end_poller(place, &error);
            }
        }
    }

    /// Ends a connection that broke a rule or hit a bug in this code, and logs the reason.
    #[cold]
    pub(super) fn end_for(&mut self, index: usize, violation: Violation) {
        let Violation(reason) = violation;
        if violation == Violation::VOLUME_CHANGES {
            return self.end(index, reason);
        }
        self.state.stats.protocol_errors.add(1);
        if self.state.may_log(LogLine::Violation)
            && let Some(connection) = self.connections.at(index)
        {
            let peer = &connection.params().peer;
            tracing::warn!(peer, reason, "ending a connection that broke a rule");
        }
        self.end(index, reason);
    }

    /// Ends the connections that are `chosen`.
    pub(super) fn end_all(&mut self, reason: &'static str, chosen: impl Fn(&Connection) -> bool) {
        for index in 0..self.connections.places() {
            if self.connections.at(index).is_some_and(|connection| chosen(connection)) {
                self.end(index, reason);
            }
        }
    }

    /// Moves a connection's QP to the error state and gives it to control to destroy. Has no effect
    /// if the connection ended before.
    #[cold]
    pub(super) fn end(&mut self, index: usize, reason: &'static str) {
        let group = &mut self.state;
        let Some(connection) = self.connections.at(index).filter(|c| c.is_live()) else { return };
        let params = connection.params();
        if group.may_log(LogLine::Ends) {
            tracing::info!(
                peer = params.peer,
                kind = %params.kind,
                epoch = params.epoch.0,
                reason,
                "connection ends"
            );
        }
        connection.end(group.time.now, group.time.now + DESTROY_WARNING);
        counting::abandon(connection, group);
        over_limit::drop_of(&mut group.later.waiting, &group.access, connection);
        let qp = group.pollers.detach(connection.poller(), connection.qp());
        group.told.outbox.push(FromGroup::Ended {
            group: group.index,
            connection: connection.id(),
            qp,
        });
        if Mutation::DestroyTarget.is_on() {
            give_back(connection, group);
        }
        self.connections.note_end();
        self.expect_rare_work();
    }

    /// Excludes a time in which this thread did not run from the silence of peers: see
    /// [`Self::check_silence`].
    pub(crate) fn forgive(&mut self, paused: Duration) {
        for connection in self.connections.iter_mut() {
            connection.forgive(paused);
        }
    }

    /// Ends admin connections with an initiator that has been silent too long, and connections with
    /// a peer that neither takes nor sends data: others need the memory lent to it. The thread
    /// calls this at intervals.
    pub fn check_silence(&mut self, now: Instant) {
        self.state.time.now = now;
        while let Some((line, count)) = self.state.told.lines.take_left_out(now) {
            tracing::warn!(line, count, "lines of the log were left out: too many in a second");
        }
        for index in 0..self.connections.places() {
            let live = self.connections.at(index).filter(|connection| connection.is_live());
            if let Some(reason) = live.and_then(|connection| connection.dead_reason(now)) {
                self.state.stats.lost_connections.add(1);
                self.end(index, reason);
            }
        }
    }

    /// The QP of an ended connection is destroyed: gives back the memory lent to its device. Others
    /// may wait for this memory, even commands of this connection in a shard.
    #[cold]
    pub(super) fn on_destroyed(&mut self, id: ConnectionId) {
        let connection = self.connections.at(wide(id.index)).filter(|c| c.id() == id);
        let Some(connection) = connection else {
            debug_assert!(false, "the QP of no connection was destroyed: {id:?}");
            return;
        };
        debug_assert!(matches!(connection.life_mut(), Life::Destroying { .. }));
        *connection.life_mut() = Life::Destroyed;
        give_back(connection, &mut self.state);
    }

    /// Removes connections without anything in use, and broken CQs without connections. Returns
    /// whether it removed any.
    #[cold]
    pub(super) fn check_ending(&mut self) -> bool {
        let mut done = false;
        for index in 0..self.connections.places() {
            let Some(connection) = self.connections.at(index) else { continue };
            warn_of_slow_destroy(connection, self.state.time.now);
            if connection.is_gone() {
                self.remove(index);
                done = true;
            }
        }
        if self.state.pollers.has_broken() {
            done |= self.remove_broken();
        }
        done
    }

    /// Gives control the broken CQs without a connection.
    fn remove_broken(&mut self) -> bool {
        let mut done = false;
        for place in 0..self.state.pollers.places() {
            if self.connections.iter().any(|connection| connection.poller() == place) {
                continue;
            }
            if let Some(entry) = self.state.pollers.take_broken(place) {
                done = true;
                let (group, poller, memory) = (self.state.index, entry.poller, entry.memory);
                self.state.told.outbox.push(FromGroup::PollerGone { group, place, poller, memory });
            }
        }
        done
    }

    /// Dismantles a connection with a destroyed QP, and reports it to control.
    fn remove(&mut self, index: usize) {
        let Some(mut connection) = self.connections.remove(index) else { return };
        let works = connection.requests().iter().any(Request::has_shards);
        debug_assert!(!works || Mutation::EpochOrderBurial.is_on(), "a shard works for it");
        self.state.shard.give_landing(&connection.take_slots());
        let params = connection.into_params();
        self.state.told.outbox.push(FromGroup::ConnectionGone {
            admission: params.admission,
            session: params.session,
            kind: params.kind,
            epoch: params.epoch,
            connection: None,
            memory: Box::new(params.into()),
            reason: "it ended",
        });
    }
}

/// Warns at intervals while the kernel takes long to destroy a QP.
fn warn_of_slow_destroy(connection: &mut Connection, now: Instant) {
    let Life::Destroying { since, warn_at } = connection.life_mut() else { return };
    if now < *warn_at {
        return;
    }
    *warn_at = now + DESTROY_WARNING;
    let seconds = now.saturating_duration_since(*since).as_secs();
    tracing::warn!(
        peer = connection.params().peer,
        seconds,
        "the kernel has not destroyed the QP of a dead connection: its memory stays in use, and its initiator \
         cannot come back before that"
    );
}

/// Gives back the memory that a connection lent to its device. Its QP is destroyed.
fn give_back<S: Store>(connection: &mut Connection, group: &mut GroupState<S>) {
    while let Some((shard, memory)) = connection.unpin_any() {
        group.release(wide(shard), memory);
    }
    connection.leave_landings();
    for part in connection.requests_mut().iter_mut().flat_map(Request::parts_mut) {
        group.give_back(part);
    }
}
