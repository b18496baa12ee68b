//! Answers: data back to the initiator, then the response, in one list and one doorbell.
//!
//! A READ's answer rides on its data if the peers agreed on immediates. Other responses are
//! collected per connection and are sent at the end of the turn, behind all data of the turn;
//! several go in one message if the peers agreed on lists.

use rblk_fabric::{MemoryRegion, RemoteBuffer, Rkey, Sge, SgeList};
use rblk_protocol::digest::crc32c;
use rblk_protocol::width::{wide, wide64};
use rblk_protocol::{Immediate, Opcode, ResponseCapsule, Sequence, Status, Tag};

use crate::data::connection::{Bounce, Connection};
use crate::data::poll_group::PollerMemory;
use crate::data::poll_group::command::{counting, send_barrier};
use crate::data::poll_group::group_state::GroupState;
use crate::data::request::{CommandOutcome, Payload, RequestEvent};
use crate::store::Store;
use crate::volume::Placement;
use crate::volume::ids::VolumeIndex;
use rblk_operate::target::group_counts::Stats;

/// Queues the answer of a command that has its outcome, or lets it wait for send credits. Out of
/// line, so that the functions that end most commands, [`acknowledge`] and [`read_answered`], get
/// the registers.
#[inline(never)]
pub(in crate::data::poll_group) fn finish<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    outcome: CommandOutcome,
) {
    connection.conclude(tag, outcome);
    if connection.sends().may_take(credits_for(connection, tag, outcome)) {
        answer_with(connection, group, tag, outcome);
    } else {
        group.stats.send_credit_waits.add(1);
        connection.request_mut(tag).timing().awaits_credits(group.time.us);
        connection.sends_mut().wait(tag);
    }
}

/// Answers a successful command without data to send back: like [`finish`], for most WRITEs.
#[inline(always)]
pub(in crate::data::poll_group) fn acknowledge<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) {
    if !connection.sends().may_take(connection.sends().response_needs()) {
        counting::begin_late(connection, group, tag);
        return finish(connection, group, tag, CommandOutcome::OK);
    }
    let (params, request) = connection.acknowledge(tag);
    let Some(sequence) = request.command().map(|command| command.sequence) else {
        return debug_assert!(false, "an answer without a command");
    };
    counting::acknowledged(params, request, group);
    respond(connection, &group.stats, &ResponseCapsule::new(tag, sequence, Status::Ok));
}

/// Send credits of an answer: for its data and for its response.
#[inline(always)]
fn credits_for(connection: &Connection, tag: Tag, outcome: CommandOutcome) -> u64 {
    match outcome.payload {
        Payload::None => connection.sends().response_needs(),
        _ if rides_on_data(connection, tag) => 1,
        _ => 1 + connection.sends().response_needs(),
    }
}

/// Queues the answer of a command that has its outcome and its send credits. If its data passes
/// through memory of the connection, and that has no room, the command waits on.
#[inline(never)]
pub(in crate::data::poll_group) fn answer<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    tag: Tag,
) {
    answer_with(connection, group, tag, connection.request(tag).outcome());
}

#[inline(always)]
fn answer_with<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    tag: Tag,
    outcome: CommandOutcome,
) {
    if outcome.payload != Payload::None && !prepare(connection, group, tag, outcome.payload) {
        return;
    }
    let (params, request) = connection.of(tag);
    let _ = request.step(RequestEvent::Answered);
    let Some(command) = request.command() else {
        debug_assert!(false, "an answer without a command");
        return;
    };
    let mut response = ResponseCapsule::new(tag, command.sequence, outcome.status);
    counting::answered(params, request, group, outcome.status);
    response.value = outcome.value;
    if outcome.payload == Payload::None || !send_data(connection, group, &mut response) {
        respond(connection, &group.stats, &response);
    }
}

/// Puts an answer's data where the device may send it from: only iWARP needs a copy. False: the
/// copy has no room, and the command waits for it.
#[inline]
fn prepare<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    tag: Tag,
    payload: Payload,
) -> bool {
    connection.bounce().is_none() || copy_out(connection, group, tag, payload)
}

#[cold]
fn copy_out<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    tag: Tag,
    payload: Payload,
) -> bool {
    let len = match payload {
        Payload::Zeros { len } | Payload::Memory { len, .. } => len,
        Payload::None | Payload::Reply { .. } => return true,
    };
    if !connection.may_prepare(len) {
        group.stats.send_credit_waits.add(1);
        connection.request_mut(tag).timing().awaits_credits(group.time.us);
        connection.sends_mut().keep_waiting_first(tag);
        send_barrier::ask_if_much(connection);
        return false;
    }
    let Some((to, at)) = connection.bounce().and_then(Bounce::prepared) else { return true };
    let placement = group.access.placement(connection.request(tag).span().volume);
    match (payload, placement) {
        (Payload::Memory { offset, .. }, Some(Placement::Memory(region))) => {
            region.copy_to(offset, to, at, wide(len));
            group.stats.copied_bytes.add(u64::from(len));
        }
        _ => to.zero(at, wide(len)),
    }
    true
}

/// Queues the WRITE of an answer's data. True: the response rides on it.
#[inline]
fn send_data<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    response: &mut ResponseCapsule,
) -> bool {
    let tag = response.tag;
    let memory = group.pollers[connection.poller()].memory.as_ref();
    let Some((sge, remote)) = answer_data(connection, memory, tag) else {
        // Ranges were checked. A bug must not make the peer hang.
        debug_assert!(false, "an answer without memory");
        response.status = Status::Internal;
        return false;
    };
    let rides = rides_on_data(connection, tag);
    let immediate = rides.then_some(Immediate { tag, check: response.check });
    let mut sges = SgeList::one(sge);
    if connection.has_digests() {
        add_trailer_of_zeros(connection, memory, tag, sge.len, &mut sges);
    }
    let at = connection.sends_mut().queue_write(tag, &sges, remote, immediate, false);
    connection.prepared_is_sent(at);
    rides
}

/// Adds the trailer of a READ to its data, if the peers agreed on digests. The data is zeros, which
/// never change: memory volumes send copies under digests.
#[cold]
#[inline(never)]
fn add_trailer_of_zeros(
    connection: &Connection,
    memory: Option<&PollerMemory>,
    tag: Tag,
    len: u32,
    sges: &mut SgeList,
) {
    let Some(command) = connection.request(tag).command() else { return };
    if command.opcode == Opcode::Read {
        // A device without registered zeros sends them from the connection's memory.
        let shared = memory.map(|memory| (&**memory.zeros.region(), 0));
        let zeros = shared.or_else(|| connection.bounce().and_then(Bounce::prepared));
        let Some((region, at)) = zeros else { return };
        let crc = region.sum(at, wide(len), crc32c);
        // The list has room for more than two entries.
        let _ = sges.push(connection.memory().write_trailer(command, crc));
    }
}

/// A READ succeeded. Its answer is in the WR that was just queued, if that carries `immediate`, or
/// in the response that this adds.
#[inline(always)]
pub(in crate::data::poll_group) fn read_answered<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    (tag, sequence): (Tag, Sequence),
    with_immediate: bool,
) {
    counting::answered_read(connection, group, tag);
    if !with_immediate {
        let response = ResponseCapsule::new(tag, sequence, Status::Ok);
        respond(connection, &group.stats, &response);
    }
}

/// Collects a response that has its send credit.
#[inline(always)]
pub(in crate::data::poll_group) fn respond(
    connection: &mut Connection,
    stats: &Stats,
    response: &ResponseCapsule,
) {
    if connection.add_response(response) {
        queue_responses(connection, stats);
    }
}

/// Queues the SEND of a connection's collected responses.
#[inline(always)]
pub(in crate::data::poll_group) fn queue_responses(connection: &mut Connection, stats: &Stats) {
    let count = connection.queue_responses();
    if count > 1 {
        stats.lists.add(1);
        stats.listed.add(wide64(count));
    }
}

/// Whether the WR that writes the data of an answer also carries the response.
#[inline]
fn rides_on_data(connection: &Connection, tag: Tag) -> bool {
    connection.has_immediates() && connection.request(tag).opcode() == Some(Opcode::Read)
}

/// Source and destination of the data to send back.
#[inline]
fn answer_data(
    connection: &Connection,
    memory: Option<&PollerMemory>,
    tag: Tag,
) -> Option<(Sge, RemoteBuffer)> {
    let request = connection.request(tag);
    let buffer = request.command()?.buffer?;
    let sge = match request.outcome().payload {
        Payload::None => return None,
        Payload::Zeros { len } | Payload::Memory { len, .. } if memory.is_none() => {
            connection.bounce()?.prepared_sge(len)?
        }
        Payload::Zeros { len } => memory?.zeros.sge(0, len)?,
        Payload::Memory { offset, len } => {
            memory_volume(memory?, request.span().volume)?.sge(offset, len)?
        }
        Payload::Reply { len } => connection.memory().reply_sge(tag, len),
    };
    (sge.len <= buffer.length)
        .then_some((sge, RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) }))
}

/// A memory volume's registration with the device.
#[inline]
pub(in crate::data::poll_group) fn memory_volume(
    memory: &PollerMemory,
    volume: VolumeIndex,
) -> Option<&MemoryRegion> {
    memory.volumes.iter().find(|(index, _)| *index == volume).map(|(_, region)| &**region)
}
