//! Block commands: from a checked command through memory, RDMA READ and store to an outcome.

use rblk_fabric::{RemoteBuffer, Rkey, SendOp, Sge};
use rblk_protocol::limits::COMMAND_BYTES;
use rblk_protocol::{AccessMode, CommandCapsule, Opcode, Status, Tag};

use super::{Opened, PollGroup};
use crate::connection::{ConnectionId, WrKind};
use crate::request::{Payload, State};
use crate::store::{Op, OpDone, OpKind, OpToken, Store};
use crate::volume::{Placement, Volume};

impl<S: Store> PollGroup<S> {
    fn opened_volume(
        &self,
        session: crate::connection::SessionSlot,
        command: &CommandCapsule,
    ) -> Result<(std::sync::Arc<Volume>, AccessMode), Status> {
        let index = Volume::index_of(command.volume).ok_or(Status::NoSuchVolume)?;
        let at = usize::from(index.0);
        let opened = self
            .sessions
            .get(usize::from(session.0))
            .and_then(Option::as_ref)
            .and_then(|view| view.opened.get(at).copied().flatten())
            .ok_or(Status::NoSuchVolume)?;
        let mode = match opened {
            Opened::Mode(mode) => mode,
            Opened::Refused(status) => return Err(status),
        };
        let volume = self.volumes.get(at).and_then(Option::as_ref).ok_or(Status::VolumeGone)?;
        Ok((std::sync::Arc::clone(volume), mode))
    }

    pub(super) fn start_block(&mut self, slot: usize, command: &CommandCapsule) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let (session, io_max) = (connection.params.session, connection.params.io_max_bytes);
        let reads_out = connection.params.reads_out;
        let checked = self.opened_volume(session, command).and_then(|(volume, mode)| {
            let range = volume.check(command, mode, io_max)?;
            Ok((volume, range))
        });
        let (volume, range) = match checked {
            Ok(checked) => checked,
            Err(status) => return self.finish(slot, command.tag, status),
        };
        let (offset_bytes, len_bytes) = range.map_or((0, 0), |r| (r.offset_bytes(), r.len_bytes()));
        // Data commands were checked against io_max_bytes; others have no use for it.
        let len = u32::try_from(len_bytes).unwrap_or(u32::MAX);
        let tag = command.tag;
        if let Some(connection) = self.connections[slot].as_mut() {
            let request = &mut connection.requests[tag.index()];
            request.volume = volume.index;
            request.offset_bytes = offset_bytes;
        }
        match (command.opcode, &volume.placement) {
            (Opcode::Read, Placement::Memory(_)) => {
                // The range is inside a region in memory, so it fits usize.
                let offset = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
                self.set_payload(slot, tag, Payload::Memory { volume: volume.index, offset, len });
                self.finish(slot, tag, Status::Ok);
            }
            (Opcode::Read, Placement::Null) => {
                self.set_payload(slot, tag, Payload::Zeros { len });
                self.finish(slot, tag, Status::Ok);
            }
            (Opcode::Write, Placement::Memory(region)) if command.in_capsule_bytes > 0 => {
                if let Some(connection) = self.connections[slot].as_ref()
                    && let Some(recv) = connection.requests[tag.index()].recv_slot
                {
                    let from = connection.recv_offset(recv) + COMMAND_BYTES;
                    let to = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
                    connection.region().copy_to(from, region, to, len as usize);
                    self.stats.copied_bytes.add(u64::from(len));
                }
                self.finish(slot, tag, Status::Ok);
            }
            (Opcode::Write, Placement::Null) if command.in_capsule_bytes > 0 => {
                self.finish(slot, tag, Status::Ok);
            }
            (Opcode::Write, _) if command.in_capsule_bytes == 0 && reads_out == 0 => {
                self.finish(slot, tag, Status::NotSupported);
            }
            (Opcode::Read | Opcode::Write, _) => {
                let id = self.connections[slot].as_ref().map(|c| c.id);
                if let Some(id) = id {
                    // Nobody overtakes those who wait.
                    if !self.waiting_extents.is_empty() || !self.try_memory(slot, tag) {
                        self.stats.extent_waits.add(1);
                        if let Some(connection) = self.connections[slot].as_mut() {
                            connection.requests[tag.index()].state = State::NeedExtent;
                        }
                        self.waiting_extents.push_back((id, tag));
                    }
                }
            }
            (Opcode::Flush, Placement::Store) => self.submit(slot, tag, OpKind::Flush),
            (Opcode::Discard, Placement::Store) if volume.discard => {
                self.submit(slot, tag, OpKind::Discard { offset: offset_bytes, len: len_bytes });
            }
            (Opcode::WriteZeroes, Placement::Store) => {
                let may_unmap = command.flags.may_unmap;
                self.submit(
                    slot,
                    tag,
                    OpKind::WriteZeroes { offset: offset_bytes, len: len_bytes, may_unmap },
                );
            }
            (Opcode::Discard | Opcode::WriteZeroes, Placement::Memory(region)) => {
                let offset = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
                region.zero(offset, usize::try_from(len_bytes).unwrap_or(usize::MAX));
                self.finish(slot, tag, Status::Ok);
            }
            _ => self.finish(slot, tag, Status::Ok),
        }
    }

    fn set_payload(&mut self, slot: usize, tag: Tag, payload: Payload) {
        if let Some(connection) = self.connections[slot].as_mut() {
            connection.requests[tag.index()].payload = payload;
        }
    }

    /// Tries to get the memory a READ or WRITE needs; goes on with it and returns true, or returns false.
    pub(super) fn try_memory(&mut self, slot: usize, tag: Tag) -> bool {
        let Some(connection) = self.connections[slot].as_mut() else { return true };
        let request = &mut connection.requests[tag.index()];
        let Some(command) = request.command else { return true };
        let placement = self.volumes[usize::from(request.volume.0)].as_ref().map(|v| &v.placement);
        let keyed_write = command.opcode == Opcode::Write && command.in_capsule_bytes == 0;
        let sink = self.pollers[connection.poller].sink.as_mut().filter(|_| keyed_write);
        let wants_extent = match placement {
            Some(Placement::Store) => true,
            Some(Placement::Null) => sink.is_none(),
            _ => false,
        };
        let bytes = command.buffer.map_or(command.in_capsule_bytes, |b| b.length);
        if wants_extent && request.extent.is_none() {
            match self.arena.allocate(bytes as usize) {
                Some(extent) => request.extent = Some(extent),
                None => return false,
            }
        }
        if let Some(sink) = sink
            && request.sink.is_none()
        {
            match sink.allocate(bytes as usize) {
                Some(extent) => request.sink = Some(extent),
                // What was taken is kept: the head of the queue is served before anyone else.
                None => return false,
            }
        }
        match (command.opcode, &request.extent) {
            (Opcode::Read, Some(extent)) => {
                let (offset, extent_offset) = (request.offset_bytes, extent.offset());
                self.submit(slot, tag, OpKind::Read { offset, extent_offset, len: bytes });
            }
            (_, Some(extent)) if command.in_capsule_bytes > 0 => {
                let to = extent.offset();
                if let Some(recv) = request.recv_slot {
                    let from = connection.recv_offset(recv) + COMMAND_BYTES;
                    connection.region().copy_to(from, self.arena.region(), to, bytes as usize);
                    self.stats.copied_bytes.add(u64::from(bytes));
                }
                self.submit_write(slot, tag);
            }
            _ => self.start_read(slot, tag),
        }
        true
    }

    /// Posts the READ of write data, or queues it for a credit.
    pub(super) fn start_read(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let no_credit = connection.reads_in_flight >= connection.params.reads_out
            || connection.credits.available() == 0;
        connection.requests[tag.index()].state = State::TransferIn { posted: !no_credit };
        if no_credit {
            self.stats.read_credit_waits.add(1);
            connection.waiting_reads.push_back(tag);
            self.repost_recv(slot, tag);
            return;
        }
        let Some((sge, remote)) = self.read_landing(slot, tag) else {
            return self.finish(slot, tag, Status::Internal);
        };
        if let Some(connection) = self.connections[slot].as_mut() {
            connection.reads_in_flight += 1;
            connection.queue_send(WrKind::ReadData(tag), SendOp::Read(remote), sge, true, false);
        }
        self.repost_recv(slot, tag);
    }

    /// Where the data of a write lands, and where it is at the initiator.
    fn read_landing(&self, slot: usize, tag: Tag) -> Option<(Sge, RemoteBuffer)> {
        let connection = self.connections[slot].as_ref()?;
        let request = &connection.requests[tag.index()];
        let buffer = request.command?.buffer?;
        let memory = &self.pollers[connection.poller].memory;
        let sge = if let (Some(extent), Some(sink)) = (&request.sink, &memory.sink) {
            sink.sge(extent.offset(), buffer.length)?
        } else if let Some(extent) = &request.extent {
            memory.arena.sge(extent.offset(), buffer.length)?
        } else {
            let (_, mr) = memory.volumes.iter().find(|(index, _)| *index == request.volume)?;
            mr.sge(usize::try_from(request.offset_bytes).ok()?, buffer.length)?
        };
        Some((sge, RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) }))
    }

    /// The data of a write arrived.
    pub(super) fn on_data_read(&mut self, slot: usize, tag: Tag, _bytes: u32) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let Some(request) = connection.requests.get_mut(tag.index()) else { return };
        if request.state != (State::TransferIn { posted: true }) {
            return self.protocol_error(slot, "a READ completed that was not posted");
        }
        let bytes = request.command.and_then(|c| c.buffer).map_or(0, |b| b.length) as usize;
        let entry = &mut self.pollers[connection.poller];
        if let (Some(extent), Some(sink)) = (request.sink.take(), entry.sink.as_mut()) {
            let volume = self.volumes[usize::from(request.volume.0)].as_ref().map(|v| &v.placement);
            let from = extent.offset();
            match (&request.extent, volume) {
                (Some(to), _) => {
                    sink.region().copy_to(from, self.arena.region(), to.offset(), bytes)
                }
                (None, Some(Placement::Memory(region))) => {
                    let to = usize::try_from(request.offset_bytes).unwrap_or(usize::MAX);
                    sink.region().copy_to(from, region, to, bytes);
                }
                _ => {}
            }
            self.stats.copied_bytes.add(bytes as u64);
            sink.release(extent);
        }
        self.submit_write(slot, tag);
    }

    /// The data of a write is in our memory: to the store, or done.
    fn submit_write(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_ref() else { return };
        let request = &connection.requests[tag.index()];
        let is_store = self.volumes[usize::from(request.volume.0)]
            .as_ref()
            .is_some_and(|v| matches!(v.placement, Placement::Store));
        match (&request.extent, request.command) {
            (Some(extent), Some(command)) if is_store => {
                let len = command.buffer.map_or(command.in_capsule_bytes, |b| b.length);
                let (offset, extent_offset) = (request.offset_bytes, extent.offset());
                self.submit(
                    slot,
                    tag,
                    OpKind::Write { offset, extent_offset, len, fua: command.flags.fua },
                );
            }
            _ => self.finish(slot, tag, Status::Ok),
        }
    }

    fn submit(&mut self, slot: usize, tag: Tag, kind: OpKind) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let request = &mut connection.requests[tag.index()];
        request.state = State::Execute;
        let op = Op { token: token(connection.id, tag), volume: request.volume, kind };
        if let Err(op) = self.store.submit(op) {
            self.waiting_store.push_back(op);
        }
        self.repost_recv(slot, tag);
    }

    pub(super) fn on_store_done(&mut self, done: OpDone) {
        let (id, tag) = untoken(done.token);
        let slot = usize::from(id.slot);
        let Some(connection) = self.connections.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        if connection.id != id {
            return;
        }
        let live = connection.is_live();
        let Some(request) = connection.requests.get_mut(tag.index()) else { return };
        if !live {
            // Its memory goes with the connection.
            request.state = State::Free;
            return;
        }
        let status = match done.result {
            Ok(bytes) => match request.command {
                Some(CommandCapsule { opcode: Opcode::Read, buffer, .. }) => {
                    request.payload = Payload::Extent { len: bytes };
                    // The store promised all or an error; less would pass for data here.
                    if buffer.is_some_and(|b| b.length == bytes) {
                        Status::Ok
                    } else {
                        Status::StoreError
                    }
                }
                _ => Status::Ok,
            },
            Err(errno) => Status::from_store_errno(errno as i32),
        };
        self.finish(slot, tag, status);
    }

    /// Lets those go on who waited for the store or for memory, in order.
    pub(super) fn retry_waiters(&mut self) {
        while let Some(op) = self.waiting_store.pop_front() {
            let (id, tag) = untoken(op.token);
            let alive = self.is_current(id);
            if alive {
                if let Err(op) = self.store.submit(op) {
                    self.waiting_store.push_front(op);
                    break;
                }
            } else if let Some(connection) = self.connections[usize::from(id.slot)].as_mut()
                && connection.id == id
            {
                connection.requests[tag.index()].state = State::Free;
            }
        }
        while let Some(&(id, tag)) = self.waiting_extents.front() {
            if self.is_current(id) && !self.try_memory(usize::from(id.slot), tag) {
                self.prove_tails();
                break;
            }
            self.waiting_extents.pop_front();
        }
    }

    fn is_current(&self, id: ConnectionId) -> bool {
        self.connections
            .get(usize::from(id.slot))
            .and_then(Option::as_ref)
            .is_some_and(|c| c.id == id && c.is_live())
    }

    /// Memory is short: connections may hold extents behind unsignaled WRs.
    fn prove_tails(&mut self) {
        for slot in 0..self.connections.len() {
            self.prove_tail(slot);
        }
    }

    /// Posts a READ of the peer's scratch, unless something else on its way will release what is pinned:
    /// it completes behind everything posted so far and proves that it is done.
    pub(super) fn prove_tail(&mut self, slot: usize) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let Some(position) = connection.pinned.back().map(|(position, _)| *position) else {
            return;
        };
        let Some(scratch) = connection.peer_scratch else { return };
        let can = connection.is_live()
            && !connection.proving
            && !(connection.sends_prove && connection.credits.will_prove(position))
            && connection.credits.available() > 0
            && connection.reads_in_flight < connection.params.reads_out;
        if can {
            connection.proving = true;
            connection.reads_in_flight += 1;
            let remote = RemoteBuffer { addr: scratch.address, rkey: Rkey(scratch.rkey) };
            let sge = connection.scratch_sge(8);
            connection.queue_send(WrKind::Proof, SendOp::Read(remote), sge, true, false);
            self.mark_dirty(slot);
        }
    }
}

fn token(id: ConnectionId, tag: Tag) -> OpToken {
    OpToken(u64::from(id.generation) << 32 | u64::from(id.slot) << 16 | u64::from(tag.0))
}

fn untoken(token: OpToken) -> (ConnectionId, Tag) {
    let id =
        ConnectionId { slot: (token.0 >> 16 & 0xffff) as u16, generation: (token.0 >> 32) as u32 };
    (id, Tag((token.0 & 0xffff) as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_round_trip() {
        let id = ConnectionId { slot: 0xabcd, generation: 0x1234_5678 };
        assert_eq!(untoken(token(id, Tag(0x7ff))), (id, Tag(0x7ff)));
    }
}
