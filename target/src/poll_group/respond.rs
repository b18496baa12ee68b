//! Answers: data back to the initiator, then the response, in one list and one doorbell.

use rblk_fabric::{RemoteBuffer, Rkey, SendOp, Sge};
use rblk_protocol::{
    CommandCapsule, Immediate, KeyedDescriptor, Opcode, ResponseCapsule, Status, Tag,
    self_test_pattern,
};

use super::PollGroup;
use crate::connection::{ConnectionId, REPLY_AREA_BYTES, SCRATCH_BYTES, WrKind};
use crate::request::{Payload, State};
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
        if !matches!(request.payload, Payload::Extent { .. })
            && let Some(extent) = request.extent.take()
        {
            self.arena.release(extent);
        }
        let poller = connection.poller;
        if let (Some(extent), Some(sink)) =
            (request.sink.take(), self.pollers[poller].sink.as_mut())
        {
            sink.release(extent);
        }
        if let Some(command) = request.command {
            self.count(&command, status);
        }
        self.repost_recv(slot, tag);
        self.answer(slot, tag);
    }

    fn count(&self, command: &CommandCapsule, status: Status) {
        let stats = &self.stats;
        let bytes = u64::from(command.buffer.map_or(command.in_capsule_bytes, |b| b.length));
        match command.opcode {
            Opcode::Read => {
                stats.reads.add(1);
                stats.read_bytes.add(bytes);
            }
            Opcode::Write => {
                stats.writes.add(1);
                stats.written_bytes.add(bytes);
                stats.in_capsule_writes.add(u64::from(command.in_capsule_bytes > 0));
            }
            Opcode::Flush => stats.flushes.add(1),
            Opcode::Discard => stats.discards.add(1),
            Opcode::WriteZeroes => stats.write_zeroes.add(1),
            _ => stats.admin_commands.add(1),
        }
        stats.failed_commands.add(u64::from(status != Status::Ok));
    }

    /// Queues the WRs of an answer, or waits for send-queue slots.
    fn answer(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let request = &connection.requests[tag.index()];
        let Some(command) = request.command else { return };
        let with_imm = connection.params.write_with_imm
            && command.opcode == Opcode::Read
            && request.payload != Payload::None;
        let needed = if request.payload == Payload::None || with_imm { 1 } else { 2 };
        if connection.credits.available() < needed || !connection.waiting_sends.is_empty() {
            self.stats.send_credit_waits.add(1);
            connection.waiting_sends.push_back(tag);
            return;
        }
        self.post_answer(slot, tag, &command, with_imm);
    }

    fn post_answer(&mut self, slot: usize, tag: Tag, command: &CommandCapsule, with_imm: bool) {
        let data = self.answer_data(slot, tag, command);
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let request = &connection.requests[tag.index()];
        let holds_extent = matches!(request.payload, Payload::Extent { .. });
        let mut response = ResponseCapsule::new(tag, command.sequence, request.status);
        response.value = request.value;
        if request.payload != Payload::None && data.is_none() {
            // Only a bug gets here: ranges were checked. The peer must not hang for it.
            response.status = Status::Internal;
        }
        // Without a scratch to read, only a signaled WR can prove that the extent is free.
        let must_signal = holds_extent && connection.peer_scratch.is_none();
        let sent_at = match data {
            Some((sge, remote)) if with_imm => {
                let imm = Immediate::new(tag, command.sequence).to_bits();
                connection.queue_send(
                    WrKind::Answer(tag),
                    SendOp::WriteWithImm(remote, imm),
                    sge,
                    must_signal,
                    false,
                )
            }
            data => {
                if let Some((sge, remote)) = data {
                    connection.queue_send(
                        WrKind::Answer(tag),
                        SendOp::Write(remote),
                        sge,
                        false,
                        false,
                    );
                }
                let sge = connection.response_sge(tag, &response.to_wire());
                connection.queue_send(WrKind::Answer(tag), SendOp::Send, sge, must_signal, true)
            }
        };
        connection.requests[tag.index()].state = State::Answered { sent_at };
        if let Some(extent) = connection.requests[tag.index()].extent.take() {
            connection.pinned.push_back((sent_at, extent));
        }
        // Where sends prove nothing, nobody else bounds what is pinned.
        let many =
            !connection.sends_prove && connection.pinned.len() >= connection.requests.len() / 2;
        self.mark_dirty(slot);
        if many {
            self.prove_tail(slot);
        }
    }

    /// Source and destination of the data that goes back.
    fn answer_data(
        &self,
        slot: usize,
        tag: Tag,
        command: &CommandCapsule,
    ) -> Option<(Sge, RemoteBuffer)> {
        let connection = self.connections[slot].as_ref()?;
        let request = &connection.requests[tag.index()];
        let buffer = command.buffer?;
        let memory = &self.pollers[connection.poller].memory;
        let sge = match request.payload {
            Payload::None => return None,
            Payload::Extent { len } => memory.arena.sge(request.extent.as_ref()?.offset(), len)?,
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
            if connection.credits.available() < 2 {
                return;
            }
            connection.waiting_sends.pop_front();
            let Some(command) = connection.requests[tag.index()].command else { continue };
            let with_imm = connection.params.write_with_imm && command.opcode == Opcode::Read;
            let with_imm = with_imm && connection.requests[tag.index()].payload != Payload::None;
            self.post_answer(slot, tag, &command, with_imm);
        }
        while let Some(connection) = self.connections[slot].as_mut() {
            if connection.reads_in_flight >= connection.params.reads_out
                || connection.credits.available() == 0
            {
                break;
            }
            let Some(tag) = connection.waiting_reads.pop_front() else { break };
            self.start_read(slot, tag);
        }
    }

    /// Answers a self-test with the verbs that were agreed, into the buffer it names.
    pub(super) fn self_test(&mut self, slot: usize, command: &CommandCapsule) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let Some(buffer) = command.buffer.filter(|b| b.length >= SCRATCH_BYTES) else {
            return self.finish(slot, command.tag, Status::BadLength);
        };
        if connection.credits.available() < 2 {
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
        let sent_at = if connection.params.write_with_imm {
            let imm = Immediate::new(tag, command.sequence).to_bits();
            connection.queue_send(
                WrKind::Answer(tag),
                SendOp::WriteWithImm(remote, imm),
                sge,
                true,
                false,
            )
        } else {
            connection.queue_send(WrKind::Answer(tag), SendOp::Write(remote), sge, false, false);
            let response = ResponseCapsule::new(tag, command.sequence, Status::Ok);
            let sge = connection.response_sge(tag, &response.to_wire());
            connection.queue_send(WrKind::Answer(tag), SendOp::Send, sge, true, true)
        };
        connection.requests[tag.index()].state = State::Answered { sent_at };
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
