//! How connections end: killed, drained, buried; and who is ended for silence.
//!
//! A dead connection waits until both markers behind everything on its QP have come back: then the device
//! touches nothing of it any more, and what it lent goes back. It is buried when no shard works for it either.
//! Where the markers do not come in time, control gets the QP to destroy, and what was lent stays lent until it has:
//! not until the burial, since others of the same connection may wait in a shard for just that.

use std::time::{Duration, Instant};

use rblk_fabric::{SendOp, SendWr, SgeList};

use super::{FromGroup, PollGroup};
use crate::connection::{Life, WrKind};
use crate::store::Store;

/// A dead connection whose markers do not come back is given up after this long.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

impl<S: Store> PollGroup<S> {
    #[cold]
    pub(super) fn kill_poller(&mut self, poller: usize, error: &rblk_fabric::FabricError) {
        tracing::error!(%error, "a completion queue broke");
        for slot in 0..self.connections.len() {
            if self.connections[slot].as_ref().is_some_and(|c| c.poller == poller) {
                self.kill(slot, "its completion queue broke");
                if let Some(c) = self.connections[slot].as_deref_mut() {
                    // No marker will ever come back.
                    let Life::Dying { since, .. } = c.life else { continue };
                    c.life = Life::Dying { since, sends_drained: true, recvs_drained: true };
                    c.gave_up = true;
                }
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

    /// Moves a connection's QP to the error state and puts a marker behind everything on it.
    #[cold]
    pub(super) fn kill(&mut self, slot: usize, reason: &'static str) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        if !connection.is_live() {
            return;
        }
        tracing::info!(peer = %connection.params.peer, kind = ?connection.params.kind, epoch = connection.params.epoch.0, reason, "connection ends");
        connection.clear_posts();
        connection.waiting_reads.clear();
        connection.waiting_sends.clear();
        let poller = &mut self.pollers[connection.poller].poller;
        poller.fail(connection.qp);
        let sge = connection.scratch_sge(1);
        let send = SendWr {
            id: WrKind::DrainSend.id(),
            op: SendOp::Send,
            sges: SgeList::one(sge),
            signaled: true,
            inline: false,
        };
        let sends_drained = poller.post_send(connection.qp, &[send]).is_err();
        let recv = rblk_fabric::RecvWr { id: WrKind::DrainRecv.id(), sge };
        let recvs_drained = poller.post_recv(connection.qp, &[recv]).is_err();
        connection.life = Life::Dying { since: self.now, sends_drained, recvs_drained };
        self.dying += 1;
    }

    /// Takes a time in which this thread did not run out of what [`Self::check_silence`] judges.
    pub fn forgive(&mut self, paused: Duration) {
        for connection in self.connections.iter_mut().flatten() {
            connection.forgive(paused);
        }
    }

    /// Ends admin connections whose initiator has been silent for too long, and connections whose peer takes
    /// no data and gives none: what was lent to them is everybody's. The thread calls it now and then.
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

    // Returns whether something was given back, for which others may wait.
    #[cold]
    pub(super) fn check_dying(&mut self) -> bool {
        let mut gave = false;
        for slot in 0..self.connections.len() {
            let Some(connection) = self.connections[slot].as_deref_mut() else { continue };
            if let Life::Dying { since, sends_drained, recvs_drained } = connection.life
                && !(sends_drained && recvs_drained)
                && self.now.saturating_duration_since(since) > DRAIN_DEADLINE
            {
                tracing::error!(peer = %connection.params.peer, "a dead queue pair does not flush; giving up on it");
                connection.life = Life::Dying { since, sends_drained: true, recvs_drained: true };
                connection.gave_up = true;
            }
            if connection.gave_up && connection.has_qp {
                connection.has_qp = false;
                let (id, entry) = (connection.id, &mut self.pollers[connection.poller]);
                entry.qps[usize::from(connection.qp.0)] = None;
                let qp = entry.poller.detach(connection.qp);
                self.outbox.push(FromGroup::Undrained { group: self.index, connection: id, qp });
            }
            if connection.is_drained() && !connection.gave_up && !connection.emptied {
                connection.emptied = true;
                gave = true;
                let mut lent = connection.take_lent();
                self.give_back_memory(&mut lent);
                if let Some(connection) = self.connections[slot].as_deref_mut() {
                    connection.requests = lent.requests;
                }
            }
            if self.connections[slot].as_ref().is_some_and(|c| c.is_gone()) {
                self.bury(slot);
                gave = true;
            }
        }
        gave
    }

    /// Takes a connection whose markers came back apart and tells control.
    fn bury(&mut self, slot: usize) {
        let Some(connection) = self.connections[slot].take() else { return };
        self.dying -= 1;
        if connection.dirty {
            self.dirty.retain(|dirty| usize::from(*dirty) != slot);
        }
        debug_assert!(connection.requests.iter().all(|r| r.holds.is_empty() && r.pending == 0));
        debug_assert!(connection.proof_sink.is_none());
        let qp = if connection.has_qp {
            let entry = &mut self.pollers[connection.poller];
            entry.qps[usize::from(connection.qp.0)] = None;
            entry.poller.detach(connection.qp)
        } else {
            None
        };
        self.outbox.push(FromGroup::ConnectionGone {
            session: connection.params.session,
            kind: connection.params.kind,
            epoch: connection.params.epoch,
            connection: qp,
            memory: connection.params.memory,
            reason: "it ended",
        });
    }
}
