//! Answers: data back to the initiator, then the response, in one list and one doorbell.
//!
//! A READ's answer rides on its data where immediates were agreed. Other responses are collected
//! per connection and go out at the end of the turn, several in one message where that was agreed:
//! behind all data of the turn, their own included.

use rblk_fabric::{MemoryRegion, RemoteBuffer, Rkey, Sge, SgeList};
use rblk_protocol::digest::crc32c;
use rblk_protocol::width::{wide, wide64};
use rblk_protocol::{CommandCapsule, Immediate, Opcode, ResponseCapsule, Status, Tag};

use super::PollerMemory;
use super::turn::Turn;
use crate::connection::Connection;
use crate::request::{Event, Outcome, Payload};
use crate::stats::Stats;
use crate::store::{Store, VolumeIndex};

/// A command has its outcome: its answer is queued, or waits for send credits.
#[inline(always)]
pub(super) fn finish<S: Store>(
    connection: &mut Connection,
    turn: &mut Turn<S>,
    tag: Tag,
    outcome: Outcome,
) {
    if let Some(command) = connection.conclude(tag, outcome) {
        turn.stats.count(command, outcome.status);
    }
    if connection.may_send(credits_for(connection, tag, outcome)) {
        answer(connection, turn, tag);
    } else {
        turn.stats.send_credit_waits.add(1);
        connection.wait_for_credits(tag);
    }
}

/// Send credits that an answer takes: for its data and for its response.
#[inline(always)]
fn credits_for(connection: &Connection, tag: Tag, outcome: Outcome) -> u64 {
    match outcome.payload {
        Payload::None => connection.response_needs(),
        _ if rides_on_data(connection, tag) => 1,
        _ => 1 + connection.response_needs(),
    }
}

/// Queues the answer of a command that has its outcome, and for which there are send credits.
#[inline(always)]
pub(super) fn answer<S: Store>(connection: &mut Connection, turn: &Turn<S>, tag: Tag) {
    let request = connection.request_mut(tag);
    let outcome = request.outcome();
    let _ = request.step(Event::Answered);
    let Some(command) = request.command() else {
        debug_assert!(false, "an answer without a command");
        return;
    };
    let mut response = ResponseCapsule::new(tag, command.sequence, outcome.status);
    response.value = outcome.value;
    if outcome.payload == Payload::None || !send_data(connection, turn, &mut response) {
        respond(connection, &turn.stats, &response);
    }
}

/// Queues the WRITE of an answer's data. True: the answer rides on it.
#[inline]
fn send_data<S: Store>(
    connection: &mut Connection,
    turn: &Turn<S>,
    response: &mut ResponseCapsule,
) -> bool {
    let tag = response.tag;
    let memory = &turn.pollers[connection.poller()].memory;
    let Some((sge, remote)) = answer_data(connection, memory, tag) else {
        // Ranges were checked. The peer must not hang for a bug.
        debug_assert!(false, "an answer without memory");
        response.status = Status::Internal;
        return false;
    };
    let rides = rides_on_data(connection, tag);
    let immediate = rides.then_some(Immediate { tag, check: response.check });
    let digests = connection.has_digests();
    let sges = if digests { with_trailer(connection, memory, tag, sge) } else { SgeList::one(sge) };
    connection.queue_write(tag, &sges, remote, immediate, false);
    rides
}

/// The data of an answer where digests were agreed: that of a READ has its trailer behind it. It is
/// zeros, which never change: memory volumes go by copies where digests were agreed.
#[cold]
#[inline(never)]
fn with_trailer(connection: &Connection, memory: &PollerMemory, tag: Tag, data: Sge) -> SgeList {
    match connection.request(tag).command() {
        Some(command) if command.opcode == Opcode::Read => {
            let crc = memory.zeros.region().sum(0, wide(data.len), crc32c);
            SgeList::two(data, connection.write_trailer(command, crc))
        }
        _ => SgeList::one(data),
    }
}

/// A READ was answered well by the WR that was just queued, which carries `immediate`, or by the
/// response that this adds.
#[inline]
pub(super) fn read_answered(
    connection: &mut Connection,
    stats: &Stats,
    command: &CommandCapsule,
    with_immediate: bool,
) {
    let _ = connection.request_mut(command.tag).step(Event::Answered);
    stats.count(command, Status::Ok);
    if !with_immediate {
        let response = ResponseCapsule::new(command.tag, command.sequence, Status::Ok);
        respond(connection, stats, &response);
    }
}

/// Collects a response, for which there is a send credit.
#[inline(always)]
pub(super) fn respond(connection: &mut Connection, stats: &Stats, response: &ResponseCapsule) {
    if connection.add_response(response) {
        queue_responses(connection, stats);
    }
}

/// Queues the SEND of the responses that a connection has collected.
#[inline(always)]
pub(super) fn queue_responses(connection: &mut Connection, stats: &Stats) {
    let count = connection.queue_responses();
    if count > 1 {
        stats.lists.add(1);
        stats.listed.add(wide64(count));
    }
}

/// Whether the WR that writes the data of an answer carries the answer, too.
#[inline]
fn rides_on_data(connection: &Connection, tag: Tag) -> bool {
    connection.has_immediates() && connection.request(tag).opcode() == Some(Opcode::Read)
}

/// Source and destination of the data that goes back.
#[inline]
fn answer_data(
    connection: &Connection,
    memory: &PollerMemory,
    tag: Tag,
) -> Option<(Sge, RemoteBuffer)> {
    let request = connection.request(tag);
    let buffer = request.command()?.buffer?;
    let sge = match request.outcome().payload {
        Payload::None => return None,
        Payload::Zeros { len } => memory.zeros.sge(0, len)?,
        Payload::Memory { offset, len } => {
            memory_volume(memory, request.span().volume)?.sge(offset, len)?
        }
        Payload::Reply { len } => connection.reply_sge(tag, len),
    };
    (sge.len <= buffer.length)
        .then_some((sge, RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) }))
}

/// A memory volume, as the device knows it.
#[inline]
pub(super) fn memory_volume(memory: &PollerMemory, volume: VolumeIndex) -> Option<&MemoryRegion> {
    memory.volumes.iter().find(|(index, _)| *index == volume).map(|(_, region)| &**region)
}
