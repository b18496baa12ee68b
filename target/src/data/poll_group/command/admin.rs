//! Commands without a volume: admin commands, which control answers, and the self-test of a
//! connection.

use rblk_fabric::{RemoteBuffer, Rkey, SgeList};
use rblk_protocol::auth::{AuthError, PROOF_BYTES};
use rblk_protocol::width::wide;
use rblk_protocol::{
    CommandCapsule, Immediate, ResponseCapsule, SELF_TEST_BYTES, Status, Tag, self_test_pattern,
};

use super::respond::{finish, respond};
use crate::data::connection::{Connection, SCRATCH_BYTES, Served, Violation};
use crate::data::poll_group::FromGroup;
use crate::data::poll_group::group_state::GroupState;
use crate::data::poll_group::log_lines::LogLine;
use crate::data::request::{CommandOutcome, Payload, RequestEvent};
use crate::store::Store;

/// Gives an admin command to control.
#[cold]
pub(in crate::data::poll_group) fn forward<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) {
    let Some(command) = command_of(connection, tag) else { return };
    let mut body = vec![0; wide(command.in_capsule_bytes)];
    if let Some((region, data)) = connection.data_place(command.tag) {
        region.read(data, &mut body);
    }
    let _ = connection.request_mut(command.tag).step(RequestEvent::Forwarded);
    group.told.outbox.push(FromGroup::Admin {
        group: group.index,
        connection: connection.id(),
        admission: connection.params().admission,
        command,
        body,
    });
    connection.release_data(command.tag);
}

/// Control answers an admin command: a status, a value, and bytes for the peer's buffer.
pub(in crate::data::poll_group) fn reply<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    (status, value, words): (Status, u32, &[u8]),
) {
    if !connection.requests().get(tag.index()).is_some_and(|request| request.awaits_control()) {
        // The command may have ended with its epoch before control answered.
        return;
    }
    if !connection.is_live() {
        let _ = connection.request_mut(tag).step(RequestEvent::ControlDone);
        return;
    }
    let mut outcome = CommandOutcome { status, value, payload: Payload::None };
    if !words.is_empty() {
        match connection.write_reply(tag, words) {
            Some(payload) => outcome.payload = payload,
            None if status == Status::Ok => outcome = CommandOutcome::of(Status::BadLength),
            None => outcome.value = 0,
        }
    }
    finish(connection, group, tag, outcome);
}

/// Answers a self-test with the agreed verbs, into the buffer that the self-test names.
///
/// # Errors
/// The peer sends self-tests faster than it takes their answers, or its proof is missing or wrong.
#[inline(never)]
pub(in crate::data::poll_group) fn self_test<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Served {
    let Some(command) = command_of(connection, tag) else {
        return Err(Violation("a request without its command"));
    };
    let Some(buffer) = command.buffer.filter(|buffer| buffer.length >= SCRATCH_BYTES) else {
        finish(connection, group, tag, CommandOutcome::of(Status::BadLength));
        return Ok(());
    };
    if connection.sends().free() < 2 {
        return Err(Violation("self-tests faster than their answers are taken"));
    }
    let pattern = match proven_pattern(connection, &command) {
        Ok(Some(pattern)) => {
            let first_time = connection.is_known();
            if first_time {
                group.told.outbox.push(FromGroup::Proven {
                    group: group.index,
                    connection: connection.id(),
                    admission: connection.params().admission,
                });
            }
            pattern
        }
        Ok(None) => self_test_pattern(command.sequence),
        Err(error) => {
            if group.may_log(LogLine::Unproven) {
                tracing::warn!(peer = connection.params().peer, %error, "a self-test proves nothing");
            }
            group.stats.failed_proofs.add(1);
            return Err(Violation("it does not prove that it is of its session"));
        }
    };
    connection.set_peer_scratch(buffer);
    let sges = SgeList::one(connection.memory().write_scratch(&pattern));
    let remote = RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) };
    let immediate = connection.has_immediates().then(|| Immediate::new(tag, command.sequence));
    connection.sends_mut().queue_write(tag, &sges, remote, immediate, true);
    let _ = connection.request_mut(tag).step(RequestEvent::Answered);
    if immediate.is_none() {
        let response = ResponseCapsule::new(tag, command.sequence, Status::Ok);
        respond(connection, &group.stats, &response);
    }
    connection.release_data(tag);
    Ok(())
}

/// The pattern that answers a self-test with a proof; `None` if no proof is due.
///
/// # Errors
/// The proof is wrong.
fn proven_pattern(
    connection: &Connection,
    command: &CommandCapsule,
) -> Result<Option<[u8; SELF_TEST_BYTES]>, AuthError> {
    let Some(due) = connection.params().proof.as_deref() else { return Ok(None) };
    let mut body = [0; PROOF_BYTES];
    let data = connection.data_place(command.tag);
    let data = data.filter(|_| wide(command.in_capsule_bytes) == PROOF_BYTES);
    let (region, data) = data.ok_or(AuthError::Proof)?;
    region.read(data, &mut body);
    let proof = due.key.check(&due.hellos, &body)?;
    Ok(Some(proof.answer(command.sequence)))
}

/// The command of a tag that was just admitted.
fn command_of(connection: &Connection, tag: Tag) -> Option<CommandCapsule> {
    let command = connection.request(tag).command().copied();
    debug_assert!(command.is_some(), "a request without its command");
    command
}
