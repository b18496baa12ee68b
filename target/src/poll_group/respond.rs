//! Answers: data back to the initiator, then the response, in one list and one doorbell.
//!
//! A READ's answer rides on its data where immediates were agreed. Other responses are collected per connection and go
//! out at the end of the turn, many in one message where that was agreed: behind all data of the turn, their own
//! included.

use rblk_fabric::{MAX_SGE, RemoteBuffer, Rkey, SendOp, Sge, SgeList};
use rblk_protocol::{
    CommandCapsule, Immediate, KeyedDescriptor, Opcode, ResponseCapsule, Status, Tag,
    self_test_pattern,
};

use super::PollGroup;
use crate::connection::{Connection, ConnectionId, REPLY_AREA_BYTES, SCRATCH_BYTES, WrKind};
use crate::request::{Payload, State, Step};
use crate::stats::Stats;
use crate::store::Store;

impl<S: Store> PollGroup<S> {
    /// A command has its outcome.
    pub(super) fn finish(&mut self, slot: usize, tag: Tag, status: Status) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let request = &mut connection.requests[tag.index()];
        request.state = State::Respond;
        request.status = status;
        // An admin command may be refused in words.
        if status != Status::Ok && !matches!(request.payload, Payload::Reply { .. }) {
            request.payload = Payload::None;
        }
        if let Some(connection) = self.connections[slot].as_ref()
            && let Some(command) = &connection.requests[tag.index()].command
        {
            self.stats.count(command, status);
        }
        self.repost_recv(slot, tag);
        self.answer(slot, tag);
    }

    /// Queues the WRs of an answer, or waits for send-queue slots.
    fn answer(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let request = &connection.requests[tag.index()];
        let Some(command) = &request.command else { return };
        let with_imm = connection.params.write_with_imm
            && command.opcode == Opcode::Read
            && request.payload != Payload::None;
        let needed = if with_imm {
            1
        } else {
            u64::from(request.payload != Payload::None) + connection.response_needs()
        };
        if connection.free_sends() < needed || !connection.waiting_sends.is_empty() {
            self.stats.send_credit_waits.add(1);
            connection.waiting_sends.push_back(tag);
            return;
        }
        self.post_answer(slot, tag, with_imm);
    }

    fn post_answer(&mut self, slot: usize, tag: Tag, with_imm: bool) {
        let data = self.answer_data(slot, tag);
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let request = &connection.requests[tag.index()];
        let Some(sequence) = request.command.as_ref().map(|c| c.sequence) else { return };
        let mut response = ResponseCapsule::new(tag, sequence, request.status);
        response.value = request.value;
        if request.payload != Payload::None && data.is_none() {
            // Only a bug gets here: ranges were checked. The peer must not hang for it.
            response.status = Status::Internal;
        }
        connection.requests[tag.index()].state = State::Answered;
        let kind = WrKind::WriteData(tag);
        match data {
            Some((sge, remote)) if with_imm => {
                let imm = Immediate::new(tag, sequence).to_bits();
                let op = SendOp::WriteWithImm(remote, imm);
                connection.queue_send(kind, op, sge, false, false);
            }
            data => {
                if let Some((sge, remote)) = data {
                    connection.queue_send(kind, SendOp::Write(remote), sge, false, false);
                }
                self.respond(slot, &response);
            }
        }
        self.mark_dirty(slot);
    }

    /// Collects a response, for which there is a send-queue slot.
    fn respond(&mut self, slot: usize, response: &ResponseCapsule) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        if connection.add_response(response.tag, &response.to_wire()) {
            queue_responses(connection, &self.stats);
        }
    }

    /// Sends what is there of a READ's parts, as far as send-queue slots allow. The last WR of all carries the
    /// answer. So a part's memory is free again without waiting for the other parts.
    pub(super) fn send_parts(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
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
        while let Some(connection) = self.connections[slot].as_mut() {
            let request = &connection.requests[tag.index()];
            let Some(sequence) = request.command.as_ref().map(|c| c.sequence) else { return };
            let pending = request.pending > 0;
            let status = request.status;
            let mut ready = (0..).zip(request.parts()).filter(|(_, p)| p.step == Step::Ready);
            let Some((at, _)) = ready.next() else {
                if !pending && status != Status::Ok {
                    self.finish(slot, tag, status);
                }
                return;
            };
            let only = !pending && ready.next().is_none();
            let Some((sges, remote, bytes)) = self.part_data(slot, tag, at) else {
                // Only a bug gets here: ranges were checked.
                return self.protocol_error(slot, "a read without memory");
            };
            let Some(connection) = self.connections[slot].as_mut() else { return };
            let part = &connection.requests[tag.index()].parts()[at];
            let ends_part = part.posted + bytes == part.len;
            let is_last = only && ends_part && status == Status::Ok;
            let with_imm = is_last && connection.params.write_with_imm;
            let needed = if is_last && !with_imm { 1 + connection.response_needs() } else { 1 };
            if connection.free_sends() < needed {
                self.stats.send_credit_waits.add(1);
                connection.waiting_sends.push_front(tag);
                return;
            }
            // Without a scratch to read, only a signaled WR can prove that the memory is free.
            let must_signal = ends_part && connection.peer_scratch.is_none();
            let kind = WrKind::WriteData(tag);
            let op = if with_imm {
                let imm = Immediate::new(tag, sequence).to_bits();
                SendOp::WriteWithImm(remote, imm)
            } else {
                SendOp::Write(remote)
            };
            let sent_at = connection.queue_send_list(kind, op, sges, must_signal);
            let part = &mut connection.requests[tag.index()].parts_mut()[at];
            part.posted += bytes;
            if ends_part {
                part.step = Step::Done;
                let (shard, memory) = (part.shard, std::mem::take(&mut part.memory));
                connection.pinned.push_back((sent_at, shard, memory));
            }
            // Where sends prove nothing, nobody else bounds what is pinned.
            let many =
                !connection.sends_prove && connection.pinned.len() >= connection.requests.len() / 2;
            if is_last {
                let request = &mut connection.requests[tag.index()];
                request.state = State::Answered;
                if let Some(command) = &request.command {
                    self.stats.count(command, Status::Ok);
                }
                if !with_imm {
                    let response = ResponseCapsule::new(tag, sequence, Status::Ok);
                    self.respond(slot, &response);
                }
            }
            self.mark_dirty(slot);
            if many {
                self.prove_tail(slot);
            }
            if is_last {
                return;
            }
        }
    }

    /// The next WRITE of a part: what it gathers, where it goes, and its bytes.
    fn part_data(&self, slot: usize, tag: Tag, at: usize) -> Option<(SgeList, RemoteBuffer, u32)> {
        let connection = self.connections[slot].as_ref()?;
        let request = &connection.requests[tag.index()];
        let buffer = request.command.as_ref()?.buffer?;
        let part = &request.parts()[at];
        let arena = &self.pollers[connection.poller].memory.arena;
        if let [run] = part.memory.as_slice()
            && (part.posted, run.len) == (0, part.len)
        {
            // Most answers are of one run.
            let list = SgeList::one(arena.sge(run.offset, run.len)?);
            let addr = buffer.address + u64::from(part.at);
            return Some((list, RemoteBuffer { addr, rkey: Rkey(buffer.rkey) }, run.len));
        }
        let most = (connection.params.send_sges as usize).clamp(1, MAX_SGE);
        let (mut list, mut count, mut bytes, mut inside) = (SgeList::default(), 0, 0, true);
        part.memory.each_run(part.posted, part.len, |run, _| {
            if count < most {
                match arena.sge(run.offset, run.len) {
                    Some(sge) => inside &= list.push(sge),
                    None => inside = false,
                }
                count += 1;
                bytes += run.len;
            }
        });
        let addr = buffer.address + u64::from(part.at + part.posted);
        (inside && bytes > 0).then_some((
            list,
            RemoteBuffer { addr, rkey: Rkey(buffer.rkey) },
            bytes,
        ))
    }

    /// Source and destination of the data that goes back.
    fn answer_data(&self, slot: usize, tag: Tag) -> Option<(Sge, RemoteBuffer)> {
        let connection = self.connections[slot].as_ref()?;
        let request = &connection.requests[tag.index()];
        let buffer = request.command.as_ref()?.buffer?;
        let memory = &self.pollers[connection.poller].memory;
        let sge = match request.payload {
            Payload::None => return None,
            Payload::Zeros { len } => memory.zeros.sge(0, len)?,
            Payload::Memory { volume, offset, len } => {
                memory.volumes.iter().find(|(index, _)| *index == volume)?.1.sge(offset, len)?
            }
            Payload::Reply { len } => connection.own_sge(connection.reply_offset(tag), len),
        };
        (sge.len <= buffer.length)
            .then_some((sge, RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) }))
    }

    /// Slots or READ credits came back.
    pub(super) fn continue_connection(&mut self, slot: usize) {
        while let Some(connection) = self.connections[slot].as_mut() {
            let Some(&tag) = connection.waiting_sends.front() else { break };
            if connection.free_sends() < 2 {
                return;
            }
            connection.waiting_sends.pop_front();
            if connection.requests[tag.index()].state == State::Working {
                self.continue_parts(slot, tag);
                continue;
            }
            let Some(command) = &connection.requests[tag.index()].command else { continue };
            let with_imm = connection.params.write_with_imm && command.opcode == Opcode::Read;
            let with_imm = with_imm && connection.requests[tag.index()].payload != Payload::None;
            self.post_answer(slot, tag, with_imm);
        }
        while let Some(connection) = self.connections[slot].as_mut() {
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
        let Some(connection) = self.connections[slot].as_mut() else { return };
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
        if connection.params.write_with_imm {
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

/// Queues the SEND of the responses that a connection has collected.
pub(super) fn queue_responses(connection: &mut Connection, stats: &Stats) {
    let count = connection.queue_responses();
    if count > 1 {
        stats.lists.add(1);
        stats.listed.add(count.into());
    }
}
