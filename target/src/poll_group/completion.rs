//! What a completion means: the next step of a command, memory that is free again, or the end of a
//! connection.

use rblk_fabric::{Completion, WcOpcode, WcStatus, WrId};
use rblk_protocol::{ConnectionKind, Opcode};

use super::PollGroup;
use crate::connection::{Connection, WrKind};
use crate::request::Request;
use crate::store::Store;

/// How a connection ended that nobody here ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Parting {
    /// As an initiator leaves: by LOGOUT, or by disconnecting when every command is answered.
    Left,
    /// The last answer got no acknowledgement, and every command is answered. An initiator that
    /// unmounts destroys its QPs at once, maybe before it acknowledges. If its host died, the admin
    /// connection tells.
    Gone,
    /// Something was unanswered, or the path failed.
    Lost,
}

impl Parting {
    fn of(connection: &Connection, status: WcStatus) -> Self {
        let is = |r: &Request, opcode| r.command.is_some_and(|c| c.opcode == opcode);
        // It is the last command of a session: no other takes its tag.
        if connection.requests.iter().any(|r| is(r, Opcode::Logout)) {
            return Self::Left;
        }
        // An event that has not come is no loss.
        let answered = |r: &Request| r.may_start() || is(r, Opcode::AsyncEvent);
        if !connection.requests.iter().all(answered) {
            return Self::Lost;
        }
        match status {
            WcStatus::Flushed => Self::Left,
            WcStatus::RetryExceeded if connection.params.kind != ConnectionKind::Admin => {
                Self::Gone
            }
            _ => Self::Lost,
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::Left => "the initiator left",
            Self::Gone => "the initiator is gone, and nothing was unanswered",
            Self::Lost => "the connection was lost",
        }
    }
}

impl<S: Store> PollGroup<S> {
    /// Acts on the first `count` completions of `reaped`. Apart from the turn, which is short where
    /// nothing came.
    #[inline(never)]
    pub(super) fn on_completions(&mut self, poller: usize, count: usize) {
        for at in 0..count {
            let Some(completion) = self.reaped.get(at).copied() else { return };
            self.on_completion(poller, completion);
        }
    }

    #[inline]
    fn on_completion(&mut self, poller: usize, completion: Completion) {
        let qps = &self.pollers[poller].qps;
        let Some(slot) = qps.get(usize::from(completion.qp.0)).copied().flatten().map(usize::from)
        else {
            return;
        };
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        if completion.status != WcStatus::Success {
            return self.on_failure(slot, completion.status, completion.id);
        }
        if !connection.is_live() {
            return;
        }
        let kind = WrKind::from_id(completion.id);
        // What the peer sends says nothing of what it takes.
        if let Some(WrKind::Recv(recv)) = kind {
            return if completion.opcode == WcOpcode::Recv {
                self.on_message(slot, recv, completion.byte_len as usize);
            } else {
                self.protocol_error(slot, "unexpected completion");
            };
        }
        connection.completed += 1;
        match kind {
            Some(WrKind::ReadData(tag, part)) => {
                self.io = true;
                connection.reads_in_flight = connection.reads_in_flight.saturating_sub(1);
                self.on_data_read(slot, tag, part);
                self.on_proof(slot, true);
            }
            Some(WrKind::Proof) => {
                connection.proving = false;
                if let (Some(extent), Some(sink)) =
                    (connection.proof_sink.take(), self.pollers[poller].sink.as_mut())
                {
                    sink.release(extent);
                }
                connection.reads_in_flight = connection.reads_in_flight.saturating_sub(1);
                self.on_proof(slot, true);
            }
            Some(WrKind::Answer(_) | WrKind::WriteData(_)) => self.on_proof(slot, false),
            _ => self.protocol_error(slot, "unexpected completion"),
        }
    }

    /// A WR completed with an error: the connection ends.
    #[cold]
    fn on_failure(&mut self, slot: usize, status: WcStatus, id: WrId) {
        let kind = WrKind::from_id(id);
        let Some(connection) = self.connections[slot].as_deref() else { return };
        // What was flushed never left. The rest found no memory: its key is dead, or the QP in
        // front of it.
        let blocked = status != WcStatus::Flushed && kind.is_some_and(WrKind::is_one_sided);
        self.stats.stale_rdma_blocked.add(u64::from(blocked));
        let parting = Parting::of(connection, status);
        if parting == Parting::Lost && status != WcStatus::Flushed {
            tracing::info!(peer = %connection.params.peer, ?status, wr = ?kind, "connection failed");
        }
        self.stats.lost_connections.add(u64::from(parting == Parting::Lost));
        self.kill(slot, parting.reason());
    }

    /// A signaled WR completed: send-queue slots before it are free, and pinned extents too if it
    /// proves that the peer has what was sent from them.
    fn on_proof(&mut self, slot: usize, is_read: bool) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let reclaimed = connection.credits.completed();
        if !is_read && !connection.sends_prove {
            return self.continue_connection(slot);
        }
        while let Some(connection) = self.connections[slot].as_deref_mut()
            && connection.pinned.front().is_some_and(|(position, ..)| *position <= reclaimed)
            && let Some((_, shard, memory)) = connection.pinned.pop_front()
        {
            self.release(shard, memory);
        }
        self.continue_connection(slot);
    }
}
