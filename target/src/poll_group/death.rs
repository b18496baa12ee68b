//! How connections end: killed, destroyed, buried; and who is ended for silence.
//!
//! The QP of a dead connection goes to control at once, which destroys it: a driver may take its
//! time for that, and only then a device is known to touch nothing of the connection any more. That
//! a QP is in the error state does not say so, nor does a flushed WR: cards flush after `modify_qp`
//! returned, and a READ that was on its way may land meanwhile. So what was lent stays lent until
//! control says that the QP is destroyed ([`ToGroup::Destroyed`]), however long that takes. The
//! connection is buried when no shard works for it either.
//!
//! [`ToGroup::Destroyed`]: super::ToGroup::Destroyed

use std::time::{Duration, Instant};

use super::{FromGroup, PollGroup};
use crate::connection::{ConnectionId, Life};
use crate::store::Store;

/// How often it is told that the QP of a dead connection is not destroyed yet.
const DESTROY_WARNING: Duration = Duration::from_secs(5);

impl<S: Store> PollGroup<S> {
    /// A CQ broke, or its device is gone: its connections end, and those of other devices go on.
    #[cold]
    pub(super) fn kill_poller(&mut self, poller: usize, error: &rblk_fabric::FabricError) {
        let group = self.index;
        let Some(entry) = self.pollers.working(poller) else { return };
        tracing::error!(
            device = entry.poller.caps().name,
            poll_group = group,
            %error,
            "a completion queue broke: every connection on it ends, all others go on; if the device does not come \
             back by itself, reset it (devlink dev reload) or load its driver anew"
        );
        self.pollers.note_broken(poller);
        self.outbox.push(FromGroup::PollerBroken { group, poller });
        for slot in 0..self.connections.len() {
            if self.connections[slot].as_ref().is_some_and(|c| c.poller == poller) {
                self.kill(slot, "its completion queue broke");
            }
        }
    }

    /// Asks every CQ for an event at its next completion: before a sleep, and then look once more.
    /// One that cannot be asked is broken, as one that cannot be polled.
    pub fn arm(&mut self) {
        for place in 0..self.pollers.places() {
            let Some(entry) = self.pollers.working(place) else { continue };
            if let Err(error) = entry.poller.arm() {
                self.kill_poller(place, &error);
            }
        }
    }

    #[cold]
    pub(super) fn protocol_error(&mut self, slot: usize, reason: &'static str) {
        self.stats.protocol_errors.add(1);
        if let Some(connection) = &self.connections[slot] {
            tracing::warn!(peer = %connection.params.peer, reason, "ending a connection that broke a rule");
        }
        self.kill(slot, reason);
    }

    /// Moves a connection's QP to the error state and gives it to control, to be destroyed.
    #[cold]
    pub(super) fn kill(&mut self, slot: usize, reason: &'static str) {
        let group = self.index;
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        if !connection.is_live() {
            return;
        }
        tracing::info!(peer = %connection.params.peer, kind = ?connection.params.kind, epoch = connection.params.epoch.0, reason, "connection ends");
        connection.clear_posts();
        connection.waiting_reads.clear();
        connection.waiting_sends.clear();
        let entry = &mut self.pollers[connection.poller];
        entry.poller.fail(connection.qp);
        entry.qps[usize::from(connection.qp.0)] = None;
        let qp = entry.poller.detach(connection.qp);
        connection.life = Life::Destroying { since: self.now, warn_at: self.now + DESTROY_WARNING };
        self.dying += 1;
        self.outbox.push(FromGroup::Ended { group, connection: connection.id, qp });
    }

    /// Takes a time in which this thread did not run out of what [`Self::check_silence`] judges.
    pub fn forgive(&mut self, paused: Duration) {
        for connection in self.connections.iter_mut().flatten() {
            connection.forgive(paused);
        }
    }

    /// Ends admin connections whose initiator has been silent for too long, and connections whose
    /// peer takes no data and gives none: what was lent to them is everybody's. The thread calls it
    /// now and then.
    pub fn check_silence(&mut self, now: Instant) {
        self.now = now;
        for slot in 0..self.connections.len() {
            let Some(connection) = self.connections[slot].as_ref() else { continue };
            let silent = now.saturating_duration_since(connection.heard);
            let mut reason = connection
                .silence
                .filter(|limit| silent > *limit)
                .map(|_| "its initiator is silent");
            if let Some(connection) = self.connections[slot].as_deref_mut()
                && connection.is_stuck(now)
            {
                reason = Some("its peer neither takes data nor gives any");
            }
            if let Some(reason) = reason {
                self.stats.lost_connections.add(1);
                self.kill(slot, reason);
            }
        }
    }

    /// The QP of a dead connection is destroyed: what was lent to its device goes back. Others may
    /// wait for this memory, even commands of the same connection in a shard.
    #[cold]
    pub(super) fn on_destroyed(&mut self, id: ConnectionId) {
        let slot = usize::from(id.slot);
        let connection = self.connections.get_mut(slot).and_then(Option::as_deref_mut);
        let Some(connection) = connection.filter(|c| c.id == id) else { return };
        let Life::Destroying { .. } = connection.life else { return };
        connection.life = Life::Destroyed;
        let mut lent = connection.take_lent();
        self.give_back_memory(&mut lent);
        if let Some(connection) = self.connections[slot].as_deref_mut() {
            connection.requests = lent.requests;
        }
    }

    /// Buries connections of which nothing is in use any more, and takes broken CQs out that have
    /// none left. Returns whether anything was done.
    #[cold]
    pub(super) fn check_dying(&mut self) -> bool {
        let mut done = false;
        for slot in 0..self.connections.len() {
            let Some(connection) = self.connections[slot].as_deref_mut() else { continue };
            if let Life::Destroying { since, warn_at } = &mut connection.life
                && self.now >= *warn_at
            {
                *warn_at = self.now + DESTROY_WARNING;
                tracing::warn!(
                    peer = %connection.params.peer,
                    seconds = self.now.saturating_duration_since(*since).as_secs(),
                    "the kernel has not destroyed the QP of a dead connection: its memory stays in use, and its \
                     initiator cannot come back before that"
                );
            }
            if connection.is_gone() {
                self.bury(slot);
                done = true;
            }
        }
        if self.pollers.has_broken() {
            done |= self.remove_broken();
        }
        done
    }

    /// Gives control the broken CQs that have no connection left.
    fn remove_broken(&mut self) -> bool {
        let mut done = false;
        for place in 0..self.pollers.places() {
            if self.connections.iter().flatten().any(|c| c.poller == place) {
                continue;
            }
            if let Some(entry) = self.pollers.take_broken(place) {
                done = true;
                let (group, poller, memory) = (self.index, entry.poller, entry.memory);
                self.outbox.push(FromGroup::PollerGone { group, place, poller, memory });
            }
        }
        done
    }

    /// Takes a connection apart whose QP is destroyed, and tells control.
    fn bury(&mut self, slot: usize) {
        let Some(connection) = self.connections[slot].take() else { return };
        self.dying -= 1;
        if connection.dirty {
            self.dirty.retain(|dirty| usize::from(*dirty) != slot);
        }
        debug_assert!(connection.requests.iter().all(|r| r.holds.is_empty() && r.pending == 0));
        debug_assert!(connection.proof_sink.is_none());
        self.outbox.push(FromGroup::ConnectionGone {
            session: connection.params.session,
            kind: connection.params.kind,
            epoch: connection.params.epoch,
            connection: None,
            memory: connection.params.memory,
            reason: "it ended",
        });
    }
}
