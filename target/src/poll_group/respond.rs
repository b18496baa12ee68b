//! Answers: data back to the initiator, then the response, in one list and one doorbell.
//!
//! A READ's answer rides on its data where immediates were agreed. Other responses are collected
//! per connection and go out at the end of the turn, many in one message where that was agreed:
//! behind all data of the turn, their own included.

use rblk_fabric::{MAX_SGE, MemoryRegion, RemoteBuffer, Rkey, SendOp, Sge, SgeList};
use rblk_protocol::{
    CommandCapsule, Features, Immediate, KeyedDescriptor, Opcode, ResponseCapsule, Status, Tag,
    self_test_pattern,
};

use super::pollers::Pollers;
use super::{PollGroup, PollerMemory, mark_dirty};
use crate::cache::Segments;
use crate::connection::{
    Connection, ConnectionId, ConnectionParams, REPLY_AREA_BYTES, SCRATCH_BYTES, WrKind,
};
use crate::request::{Part, Payload, Request, State, Step};
use crate::stats::Stats;
use crate::store::Store;

impl<S: Store> PollGroup<S> {
    /// A command has its outcome.
    pub(super) fn finish(&mut self, slot: usize, tag: Tag, status: Status) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        finish(connection, &self.pollers, &self.stats, &mut self.dirty, tag, status);
    }

    /// Sends all that a READ wants, of which this group's own shard has lent `memory`: by one WR,
    /// if it is in one run and nobody waits for a slot; else as a part.
    #[inline]
    pub(super) fn send_whole(&mut self, slot: usize, tag: Tag, len: u32, memory: Segments) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let arena = &self.pollers[connection.poller].memory.arena;
        let can = connection.params.features.has(Features::WRITE_WITH_IMM)
            && connection.free_sends() > 0
            && connection.waiting_sends.is_empty();
        let request = &mut connection.requests[tag.index()];
        // Groups are few.
        let shard = u16::try_from(self.index).unwrap_or(u16::MAX);
        if let ([run], Some(command), true) = (memory.as_slice(), &request.command, can)
            && let (Some(sge), Some(buffer)) = (arena.sge(run.offset, run.len), command.buffer)
            && (run.len, buffer.length) == (len, len)
        {
            let remote = RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) };
            let immediate = Immediate::new(tag, command.sequence);
            answered(request, &self.stats);
            let data = (&SgeList::one(sge), remote);
            let sent_at = queue_data(connection, tag, data, Some(immediate), true);
            connection.pinned.push_back((sent_at, shard, memory));
            mark_dirty(&mut self.dirty, connection);
            if has_much_pinned(connection) {
                self.prove_tail(slot);
            }
            return;
        }
        request.state = State::Working;
        let (offset, step) = (request.offset_bytes, Step::Ready);
        request.add_part(Part { offset, len, shard, step, memory, ..Part::default() });
        self.send_parts(slot, tag);
    }

    /// Sends what is there of a READ's parts, as far as send-queue slots allow. The last WR of all
    /// carries the answer. So a part's memory is free again without waiting for the other parts.
    pub(super) fn send_parts(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let request = &connection.requests[tag.index()];
        if request.state != State::Working {
            return;
        }
        if !connection.waiting_sends.is_empty() {
            // Nobody overtakes those who wait. A tag waits once.
            if !connection.waiting_sends.contains(&tag) {
                connection.waiting_sends.push_back(tag);
            }
            return;
        }
        self.continue_parts(slot, tag);
    }

    fn continue_parts(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let arena = &self.pollers[connection.poller].memory.arena;
        let mut end = Sent::Some;
        while matches!(end, Sent::Some) {
            end = send_part(connection, arena, &self.stats, tag);
        }
        mark_dirty(&mut self.dirty, connection);
        if has_much_pinned(connection) {
            self.prove_tail(slot);
        }
        match end {
            Sent::Failed(status) => self.finish(slot, tag, status),
            // Only a bug gets here: ranges were checked.
            Sent::NoMemory => self.protocol_error(slot, "a read without memory"),
            _ => {}
        }
    }

    /// Slots or READ credits came back.
    pub(super) fn continue_connection(&mut self, slot: usize) {
        while let Some(connection) = self.connections[slot].as_deref_mut() {
            let Some(&tag) = connection.waiting_sends.front() else { break };
            if connection.free_sends() < 2 {
                return;
            }
            connection.waiting_sends.pop_front();
            if connection.requests[tag.index()].state == State::Working {
                self.continue_parts(slot, tag);
                continue;
            }
            post_answer(connection, &self.pollers, &self.stats, tag);
            mark_dirty(&mut self.dirty, connection);
        }
        while let Some(connection) = self.connections[slot].as_deref_mut() {
            if connection.reads_in_flight >= connection.params.reads_out
                || connection.free_sends() == 0
            {
                break;
            }
            let Some((tag, part)) = connection.waiting_reads.pop_front() else { break };
            self.start_reads(slot, tag, usize::from(part));
        }
    }

    /// Answers a self-test with the verbs that were agreed, into the buffer it names.
    pub(super) fn self_test(&mut self, slot: usize, command: &CommandCapsule) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let Some(buffer) = command.buffer.filter(|b| b.length >= SCRATCH_BYTES) else {
            return self.finish(slot, command.tag, Status::BadLength);
        };
        if connection.free_sends() < 2 {
            return self.protocol_error(slot, "self-tests faster than their answers are taken");
        }
        connection.tested = true;
        connection.peer_scratch = Some(KeyedDescriptor { length: SCRATCH_BYTES, ..buffer });
        let sge = connection.scratch_sge(SCRATCH_BYTES);
        let pattern = self_test_pattern(command.sequence);
        let at = usize::try_from(sge.addr - connection.region().address()).unwrap_or(0);
        connection.region().write(at, &pattern);
        let remote = RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) };
        let tag = command.tag;
        if connection.params.features.has(Features::WRITE_WITH_IMM) {
            let imm = Immediate::new(tag, command.sequence).to_bits();
            connection.queue_send(
                WrKind::WriteData(tag),
                SendOp::WriteWithImm(remote, imm),
                sge,
                true,
                false,
            );
        } else {
            connection.queue_send(WrKind::WriteData(tag), SendOp::Write(remote), sge, false, false);
            let response = ResponseCapsule::new(tag, command.sequence, Status::Ok);
            let sge = connection.response_sge(tag, &response.to_wire());
            connection.queue_send(WrKind::Answer(tag), SendOp::Send, sge, true, true);
        }
        connection.requests[tag.index()].state = State::Answered;
        self.repost_recv(slot, tag);
    }

    /// Control's answer to an admin command.
    pub(super) fn admin_reply(
        &mut self,
        id: ConnectionId,
        tag: Tag,
        status: Status,
        value: u32,
        payload: &[u8],
    ) {
        let slot = usize::from(id.slot);
        let Some(connection) = self.connections.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        if connection.id != id || tag.index() >= connection.requests.len() {
            return;
        }
        let (live, at) = (connection.is_live(), connection.reply_offset(tag));
        let request = &mut connection.requests[tag.index()];
        if !request.is_executing() {
            return;
        }
        if !live {
            request.state = State::Free;
            return;
        }
        let room = request.command.and_then(|c| c.buffer).map_or(0, |b| b.length as usize);
        let mut status = status;
        request.value = value;
        if !payload.is_empty() {
            if payload.len() > room.min(REPLY_AREA_BYTES) {
                if status == Status::Ok {
                    status = Status::BadLength;
                }
                request.value = 0;
            } else {
                request.payload = Payload::Reply { len: u32::try_from(payload.len()).unwrap_or(0) };
                connection.region().write(at, payload);
            }
        }
        self.finish(slot, tag, status);
    }
}

/// A command of a connection has its outcome.
#[inline(always)]
pub(super) fn finish(
    connection: &mut Connection,
    pollers: &Pollers,
    stats: &Stats,
    dirty: &mut Vec<u16>,
    tag: Tag,
    status: Status,
) {
    let request = &mut connection.requests[tag.index()];
    request.state = State::Respond;
    request.status = status;
    // An admin command may be refused in words.
    if status != Status::Ok && !matches!(request.payload, Payload::Reply { .. }) {
        request.payload = Payload::None;
    }
    if let Some(command) = &request.command {
        stats.count(command, status);
    }
    let recv = request.recv_slot.take();
    let has_data = request.payload != Payload::None;
    let needed = if has_data && rides_on_data(&connection.params, request) {
        1
    } else {
        u64::from(has_data) + connection.response_needs()
    };
    if let Some(recv) = recv {
        connection.release_recv(recv);
    }
    if connection.free_sends() >= needed && connection.waiting_sends.is_empty() {
        post_answer(connection, pollers, stats, tag);
    } else {
        stats.send_credit_waits.add(1);
        connection.waiting_sends.push_back(tag);
    }
    mark_dirty(dirty, connection);
}

/// Whether memory should be seen to come back: where sends prove nothing, nobody else bounds what
/// is pinned.
#[inline]
fn has_much_pinned(connection: &Connection) -> bool {
    !connection.sends_prove && connection.pinned.len() >= connection.requests.len() / 2
}

/// Whether the WR that writes the data of an answer tells of the outcome, too.
#[inline]
fn rides_on_data(params: &ConnectionParams, request: &Request) -> bool {
    params.features.has(Features::WRITE_WITH_IMM)
        && request.payload != Payload::None
        && request.command.as_ref().is_some_and(|command| command.opcode == Opcode::Read)
}

/// Queues the WRs of an answer, for which there are send-queue slots.
#[inline(always)]
fn post_answer(connection: &mut Connection, pollers: &Pollers, stats: &Stats, tag: Tag) {
    let request = &mut connection.requests[tag.index()];
    let Some(sequence) = request.command.as_ref().map(|c| c.sequence) else { return };
    let mut response = ResponseCapsule::new(tag, sequence, request.status);
    response.value = request.value;
    request.state = State::Answered;
    if request.payload != Payload::None {
        let with_imm = rides_on_data(&connection.params, &connection.requests[tag.index()]);
        let memory = &pollers[connection.poller].memory;
        match post_data(connection, memory, tag, with_imm.then(|| Immediate::new(tag, sequence))) {
            Some(()) if with_imm => return,
            Some(()) => {}
            // Only a bug gets here: ranges were checked. The peer must not hang for it.
            None => response.status = Status::Internal,
        }
    }
    respond(connection, stats, &response);
}

/// Queues the WRITE of an answer's data, which tells of the outcome where there is an immediate for
/// it. `None`: it has none.
fn post_data(
    connection: &mut Connection,
    memory: &PollerMemory,
    tag: Tag,
    immediate: Option<Immediate>,
) -> Option<()> {
    let (sge, remote) = answer_data(connection, memory, &connection.requests[tag.index()])?;
    let op = match immediate {
        Some(immediate) => SendOp::WriteWithImm(remote, immediate.to_bits()),
        None => SendOp::Write(remote),
    };
    connection.queue_send(WrKind::WriteData(tag), op, sge, false, false);
    Some(())
}

/// Collects a response, for which there is a send-queue slot.
#[inline(always)]
fn respond(connection: &mut Connection, stats: &Stats, response: &ResponseCapsule) {
    if connection.add_response(response.tag, &response.to_wire()) {
        queue_responses(connection, stats);
    }
}

/// Source and destination of the data that goes back.
#[inline]
fn answer_data(
    connection: &Connection,
    memory: &PollerMemory,
    request: &Request,
) -> Option<(Sge, RemoteBuffer)> {
    let buffer = request.command.as_ref()?.buffer?;
    let sge = match request.payload {
        Payload::None => return None,
        Payload::Zeros { len } => memory.zeros.sge(0, len)?,
        Payload::Memory { volume, offset, len } => {
            memory.volumes.iter().find(|(index, _)| *index == volume)?.1.sge(offset, len)?
        }
        Payload::Reply { len } => {
            connection.own_sge(connection.reply_offset(request.command.as_ref()?.tag), len)
        }
    };
    (sge.len <= buffer.length)
        .then_some((sge, RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) }))
}

/// What came of a try to send a part.
enum Sent {
    /// It was sent, as far as one WR goes, and there may be more to send.
    Some,
    /// There is no more to send now, or no slot to send it with.
    All,
    /// The command failed and no shard works on it any more.
    Failed(Status),
    /// A part has no memory.
    NoMemory,
}

/// Queues a WRITE of a READ's data, which tells of the outcome where there is an immediate for it.
/// Returns its position.
#[inline]
fn queue_data(
    connection: &mut Connection,
    tag: Tag,
    (sges, remote): (&SgeList, RemoteBuffer),
    immediate: Option<Immediate>,
    ends_part: bool,
) -> u64 {
    // Without a scratch to read, only a signaled WR can prove that the memory is free.
    let must_signal = ends_part && connection.peer_scratch.is_none();
    let op = match immediate {
        Some(immediate) => SendOp::WriteWithImm(remote, immediate.to_bits()),
        None => SendOp::Write(remote),
    };
    connection.queue_send_list(WrKind::WriteData(tag), op, sges, must_signal)
}

/// The WR that answers a READ well is queued.
#[inline]
fn answered(request: &mut Request, stats: &Stats) {
    request.state = State::Answered;
    if let Some(command) = &request.command {
        stats.count(command, Status::Ok);
    }
}

/// Queues one WR of the first part of a READ that is there, or waits for a send-queue slot.
#[inline]
fn send_part(connection: &mut Connection, arena: &MemoryRegion, stats: &Stats, tag: Tag) -> Sent {
    let request = &connection.requests[tag.index()];
    let Some(command) = &request.command else { return Sent::All };
    let (pending, status, parts) = (request.pending > 0, request.status, request.parts());
    let is_ready = |part: &Part| part.step == Step::Ready;
    let Some(at) = parts.iter().position(is_ready) else {
        return if pending || status == Status::Ok { Sent::All } else { Sent::Failed(status) };
    };
    let part = &parts[at];
    let mut sges = SgeList::default();
    let bytes = gather(part, arena, connection.params.send_sges, &mut sges);
    let (Some(bytes), Some(buffer)) = (bytes, command.buffer) else { return Sent::NoMemory };
    let remote = RemoteBuffer {
        addr: buffer.address + u64::from(part.at + part.posted),
        rkey: Rkey(buffer.rkey),
    };
    let ends_part = part.posted + bytes == part.len;
    let only = !pending && !parts[at + 1..].iter().any(is_ready);
    let is_last = only && ends_part && status == Status::Ok;
    let sequence = command.sequence;
    let with_imm = is_last && connection.params.features.has(Features::WRITE_WITH_IMM);
    let needed = if is_last && !with_imm { 1 + connection.response_needs() } else { 1 };
    if connection.free_sends() < needed {
        stats.send_credit_waits.add(1);
        connection.waiting_sends.push_front(tag);
        return Sent::All;
    }
    let immediate = with_imm.then(|| Immediate::new(tag, sequence));
    let sent_at = queue_data(connection, tag, (&sges, remote), immediate, ends_part);
    let request = &mut connection.requests[tag.index()];
    if is_last {
        answered(request, stats);
    }
    let part = &mut request.parts_mut()[at];
    part.posted += bytes;
    if ends_part {
        part.step = Step::Done;
        let (shard, memory) = (part.shard, std::mem::take(&mut part.memory));
        connection.pinned.push_back((sent_at, shard, memory));
    }
    if is_last && !with_imm {
        respond(connection, stats, &ResponseCapsule::new(tag, sequence, Status::Ok));
    }
    if is_last { Sent::All } else { Sent::Some }
}

/// What the next WRITE of a part gathers, at most `most` runs. Returns their bytes.
#[inline]
fn gather(part: &Part, arena: &MemoryRegion, most: u32, sges: &mut SgeList) -> Option<u32> {
    if let [run] = part.memory.as_slice()
        && (part.posted, run.len) == (0, part.len)
    {
        // Most answers are of one run.
        return sges.push(arena.sge(run.offset, run.len)?).then_some(run.len);
    }
    let most = (most as usize).clamp(1, MAX_SGE);
    let (mut count, mut bytes, mut inside) = (0, 0, true);
    part.memory.each_run(part.posted, part.len, |run, _| {
        if count < most {
            match arena.sge(run.offset, run.len) {
                Some(sge) => inside &= sges.push(sge),
                None => inside = false,
            }
            count += 1;
            bytes += run.len;
        }
    });
    (inside && bytes > 0).then_some(bytes)
}

/// Queues the SEND of the responses that a connection has collected.
#[inline]
pub(super) fn queue_responses(connection: &mut Connection, stats: &Stats) {
    let count = connection.queue_responses();
    if count > 1 {
        stats.lists.add(1);
        stats.listed.add(count.into());
    }
}
