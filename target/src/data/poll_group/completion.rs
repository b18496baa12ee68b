//! The effect of a completion: the next step of a command, freed memory, or the end of a
//! connection.

use rblk_fabric::{Completion, WcOpcode, WcStatus, WrId};
use rblk_protocol::width::wide;
use rblk_protocol::{CapsuleError, ConnectionKind, Opcode, Tag};

use super::PollGroup;
use super::group_state::GroupState;
use super::log_lines::LogLine;
use crate::data::connection::{AdmittedCommand, Connection, Served, Violation, WrKind};
use crate::data::poll_group::command::respond::finish;
use crate::data::poll_group::command::{admin, block, reply, send_barrier, write};
use crate::data::request::{CommandOutcome, Request};
use crate::store::Store;

/// How a connection ended at the peer's side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Parting {
    /// An initiator left: by LOGOUT, or by a disconnect when every command was answered.
    Left,
    /// The last answer got no acknowledgement, and every command is answered. An initiator that
    /// unmounts destroys its QPs at once, perhaps before it acknowledges. If its host died, the
    /// admin connection shows that.
    Gone,
    /// A command was unanswered, or the path failed.
    Lost,
}

impl Parting {
    fn of(connection: &Connection, status: WcStatus) -> Self {
        let requests = connection.requests();
        let is = |request: &Request, opcode| request.opcode() == Some(opcode);
        // LOGOUT is the last command of a session: no other takes its tag.
        if requests.iter().any(|request| is(request, Opcode::Logout)) {
            return Self::Left;
        }
        // A pending ASYNC_EVENT without an event is no loss.
        if !requests.iter().all(|request| request.is_answered() || is(request, Opcode::AsyncEvent))
        {
            return Self::Lost;
        }
        match status {
            WcStatus::Flushed => Self::Left,
            WcStatus::RetryExceeded if connection.params().kind != ConnectionKind::Admin => {
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
    /// Acts on the first `count` completions of `reaped`. Separate from the turn, which is short
    /// when no completion came.
    #[inline(never)]
    pub(super) fn on_completions(&mut self, poller: usize, count: usize) {
        self.state.time.cq_age.found(self.state.time.us);
        for at in 0..count {
            let completion = self.reaped[at];
            // The QP's connection ended: its remaining completions have no effect.
            let Some(index) = self.state.pollers.connection_at(poller, completion.qp) else {
                continue;
            };
            if completion.status == WcStatus::Success {
                self.serve(wide(index), |connection, group| {
                    on_success(connection, group, &completion)
                });
            } else {
                self.on_failure(wide(index), completion.status, completion.id);
            }
        }
    }

    /// A WR completed with an error: the connection ends.
    #[cold]
    fn on_failure(&mut self, index: usize, status: WcStatus, id: WrId) {
        let kind = WrKind::from_id(id);
        let Some(connection) = self.connections.at(index) else {
            debug_assert!(false, "a QP of no connection");
            return;
        };
        // A flushed WR was never sent. Any other failed WR found no memory: its key is dead, or the
        // QP in front of it.
        let blocked = status != WcStatus::Flushed && kind.is_some_and(WrKind::is_one_sided);
        self.state.stats.stale_rdma_blocked.add(u64::from(blocked));
        let parting = Parting::of(connection, status);
        if parting == Parting::Lost
            && status != WcStatus::Flushed
            && self.state.may_log(LogLine::Failed)
        {
            let peer = &connection.params().peer;
            tracing::info!(peer, ?status, wr = ?kind, "connection failed");
        }
        self.state.stats.lost_connections.add(u64::from(parting == Parting::Lost));
        self.end(index, parting.reason());
    }
}

/// A WR succeeded.
#[inline]
fn on_success<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    completion: &Completion,
) -> Served {
    debug_assert!(connection.is_live(), "a connection that ended has no QP");
    // A RECV does not prove that the peer takes our sends.
    if completion.opcode == WcOpcode::Recv
        && let Some(buffer) = WrKind::recv_of(completion.id)
    {
        return on_message(connection, group, buffer, completion.byte_len);
    }
    let kind = WrKind::from_id(completion.id);
    let kind = kind.filter(|kind| !matches!(kind, WrKind::Recv(_)));
    let kind = kind.ok_or(Violation("unexpected completion"))?;
    connection.note_progress();
    let is_read = match kind {
        WrKind::ReadData(tag, part) => {
            group.io = true;
            connection.read_completed();
            write::on_read(connection, group, tag, part)?;
            true
        }
        WrKind::Barrier => {
            send_barrier::done(connection);
            true
        }
        WrKind::Answer(_) | WrKind::WriteData(_) | WrKind::Recv(_) => false,
    };
    send_barrier::completed(connection, group, is_read);
    reply::on_credits(connection, group)
}

/// A message came: one command or, if the peers agreed on lists, several. Each is served like a
/// single one.
#[inline(never)]
fn on_message<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    buffer: u16,
    bytes: u32,
) -> Served {
    connection.begin_message(buffer, bytes, group.time.now)?;
    let mut message = connection.message(buffer, bytes);
    loop {
        // By reference: commands are not copied.
        match &connection.next_command(&mut message) {
            None => break,
            Some(Ok(command)) => {
                let (tag, admitted) = (command.tag, connection.admit(command, &mut message)?);
                on_command(connection, group, tag, admitted)?;
                if message.is_over() {
                    break;
                }
            }
            Some(Err(error)) => return Err(bad_command(connection, group, *error)),
        }
    }
    connection.release_message(&message);
    Ok(())
}

/// A command that breaks a rule of the protocol ends its connection.
#[cold]
#[inline(never)]
fn bad_command<S: Store>(
    connection: &Connection,
    group: &mut GroupState<S>,
    error: CapsuleError,
) -> Violation {
    let corrupted = error == CapsuleError::Digest;
    group.stats.digest_mismatches.add(u64::from(corrupted));
    if group.may_log(LogLine::BadCommand) {
        tracing::warn!(peer = connection.params().peer, %error, "bad command");
    }
    Violation("bad command")
}

/// A command came and was parsed.
#[inline]
fn on_command<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    admitted: AdmittedCommand,
) -> Served {
    match admitted {
        AdmittedCommand::Block => {
            group.io = true;
            return block::admit_by_limits(connection, group, tag);
        }
        AdmittedCommand::Admin => admin::forward(connection, group, tag),
        AdmittedCommand::SelfTest => return admin::self_test(connection, group, tag),
        AdmittedCommand::Answer(status) => {
            finish(connection, group, tag, CommandOutcome::of(status))
        }
    }
    Ok(())
}
