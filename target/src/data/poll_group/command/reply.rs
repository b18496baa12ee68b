//! Answers of shards, and returned credits: the next step of each command.

use rblk_protocol::width::wide;
use rblk_protocol::{Status, Tag};

use super::respond::{acknowledge, answer, finish};
use super::{read, write};
use crate::cache::ShardReply;
use crate::data::connection::{Connection, Served, Violation};
use crate::data::parts::PartIndex;
use crate::data::poll_group::command::without_data;
use crate::data::poll_group::group_state::GroupState;
use crate::data::request::{Action, CommandOutcome, LockedRange, PartEvent, RequestEvent};
use crate::store::Store;
use crate::volume::timing::Spent;

/// A shard answered a request for a command of this connection.
///
/// # Errors
/// A bug: the connection ends.
#[inline]
pub(in crate::data::poll_group) fn on_reply<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    reply: ShardReply,
) -> Served {
    let to = reply.to();
    let (tag, part) = (to.tag, PartIndex(to.part));
    connection.request_mut(tag).timing().spent(reply.spent());
    let event = match reply {
        ShardReply::Read { result, .. } => RequestEvent::OfPart(part, PartEvent::Lent(result)),
        ShardReply::Reserved { job, memory, .. } => {
            RequestEvent::OfPart(part, PartEvent::Reserved(job, memory))
        }
        ShardReply::RangeLocked { job, .. } => {
            RequestEvent::Locked(LockedRange { shard: part.0.into(), job })
        }
        ShardReply::Done { result, .. } => RequestEvent::Done(part, result),
    };
    let action = connection.request_mut(tag).step(event);
    carry_out(connection, group, tag, action)
}

/// The store of the own shard wrote the data of a command without parts.
#[inline]
pub(in crate::data::poll_group) fn on_stored<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) {
    let request = connection.request_mut(tag);
    request.timing().spent(Spent::at_store());
    match request.step(RequestEvent::Stored) {
        Action::Finish(Status::Ok) => acknowledge(connection, group, tag),
        Action::Finish(status) => finish(connection, group, tag, CommandOutcome::of(status)),
        _ => {}
    }
}

/// Carries out the action that follows a shard's answer.
fn carry_out<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    action: Action,
) -> Served {
    match action {
        Action::Wait => {}
        Action::Fetch(part) => return write::fetch(connection, group, tag, part),
        Action::Send => return read::send_parts(connection, group, tag),
        Action::Sync => without_data::sync(connection, group, tag),
        Action::LockRange(shard) => without_data::lock_range(connection, group, tag, shard),
        Action::UnlockRange(outcome) => without_data::unlock_range(connection, group, tag, outcome),
        Action::Finish(status) => finish(connection, group, tag, CommandOutcome::of(status)),
        Action::GiveBack(part) => {
            group.give_back(&mut connection.request_mut(tag).parts_mut()[wide(part.0)]);
        }
        Action::Begin | Action::Place | Action::Pin | Action::Change | Action::Impossible => {
            debug_assert!(false, "no answer of a shard calls for this");
            return Err(Violation("a command lost its way"));
        }
    }
    Ok(())
}

/// Send credits or READ credits returned: continues the commands that waited longest.
///
/// # Errors
/// A bug: the connection ends.
#[inline]
pub(in crate::data::poll_group) fn on_credits<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
) -> Served {
    while let Some(tag) = connection.next_for_credits() {
        if connection.request(tag).awaits_parts() {
            read::continue_parts(connection, group, tag)?;
        } else {
            debug_assert!(connection.request(tag).awaits_credits());
            answer(connection, group, tag);
        }
    }
    if connection.sends().has_waiting() {
        // READs would take the credits that answers wait for.
        return Ok(());
    }
    while let Some((tag, part)) = connection.next_for_read() {
        write::post_reads(connection, group, tag, part)?;
    }
    Ok(())
}
