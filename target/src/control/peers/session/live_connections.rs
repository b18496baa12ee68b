//! [`SessionConnections`]: the connections of one session that are not gone, of all its epochs.

use std::time::{Duration, Instant};

use rblk_protocol::{Epoch, Mutation};

use super::ended_epochs::EndedEpochs;

/// A connection that is not gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Live {
    pub(super) epoch: Epoch,
    /// `None` for an admin connection.
    pub(super) queue: Option<u16>,
    /// The connection proved that it belongs to the session, or needs no proof.
    pub(super) is_proven: bool,
}

/// The live connections of one session. Connections without their proof must also be gone before
/// the session ends, but they keep neither the session nor the number of their queue.
#[derive(Debug)]
pub(super) struct SessionConnections {
    live: Vec<Live>,
    // The time when the last proven connection went, or the session began. `None` while one exists.
    lost_at: Option<Instant>,
    /// Memory of the proven connections.
    pub(super) memory_bytes: u64,
}

impl SessionConnections {
    /// None yet, of a session that begins.
    pub(super) fn none(now: Instant) -> Self {
        Self { live: Vec::new(), lost_at: Some(now), memory_bytes: 0 }
    }

    /// All that are not gone.
    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    /// A connection is made, or being made.
    pub(super) fn add(&mut self, live: Live, memory_bytes: u64) {
        self.live.push(live);
        if live.is_proven {
            self.memory_bytes = self.memory_bytes.saturating_add(memory_bytes);
            self.lost_at = None;
        }
    }

    /// A connection is gone.
    pub(super) fn remove(&mut self, live: Live, memory_bytes: u64, now: Instant) {
        if live.is_proven {
            self.memory_bytes = self.memory_bytes.saturating_sub(memory_bytes);
        }
        if let Some(at) = self.live.iter().position(|c| *c == live) {
            self.live.swap_remove(at);
        }
        let is_way = live.queue.is_none() && Mutation::WayLease.is_on();
        if live.is_proven && (self.proven() == 0 || is_way) {
            self.lost_at = Some(now);
        }
    }

    /// The first connection of a queue with a proof gets the queue number.
    pub(super) fn prove(&mut self, (epoch, queue, memory_bytes): (Epoch, u16, u64)) -> bool {
        if self.has(epoch, queue) {
            return false;
        }
        let unproven = Live { epoch, queue: Some(queue), is_proven: false };
        let Some(found) = self.live.iter_mut().find(|live| **live == unproven) else {
            return false;
        };
        found.is_proven = true;
        self.memory_bytes = self.memory_bytes.saturating_add(memory_bytes);
        self.lost_at = None;
        true
    }

    /// The number of proven ones.
    pub(super) fn proven(&self) -> usize {
        self.live.iter().filter(|live| live.is_proven).count()
    }

    /// Whether a proven connection has that queue number.
    pub(super) fn has(&self, epoch: Epoch, queue: u16) -> bool {
        self.live.contains(&Live { epoch, queue: Some(queue), is_proven: true })
    }

    /// Whether the admin connection of an epoch is there.
    pub(super) fn has_admin(&self, epoch: Epoch) -> bool {
        self.live.contains(&Live { epoch, queue: None, is_proven: true })
    }

    /// Whether a connection of these epochs is there.
    pub(super) fn has_any_of(&self, ended: &EndedEpochs) -> bool {
        self.live.iter().any(|live| ended.has(live.epoch))
    }

    /// Whether a connection of that epoch or an older one is there.
    pub(super) fn has_up_to(&self, epoch: Epoch) -> bool {
        let is_older = |live: &Live| live.epoch < epoch && !Mutation::WayFenceOne.is_on();
        self.live.iter().any(|live| live.epoch == epoch || is_older(live))
    }

    /// Whether the last connection has been gone for longer than `time`.
    pub(super) fn are_lost_for(&self, time: Duration, now: Instant) -> bool {
        let is_lost = self.proven() == 0 || Mutation::WayLease.is_on();
        let lost_at = self.lost_at.filter(|_| is_lost);
        lost_at.is_some_and(|at| now.saturating_duration_since(at) > time)
    }
}
