//! Block commands: from a checked command through shards, RDMA READ and back to an outcome.

use nix::errno::Errno;
use rblk_fabric::{RemoteBuffer, Rkey, SendOp};
use rblk_protocol::{AccessMode, CommandCapsule, Opcode, Status, Tag};

use super::{Opened, PollGroup, Zeroing};
use crate::cache::message::Changed;
use crate::cache::{JobId, PartToken, STRIPE_BYTES, Segments, ShardReply, ShardRequest, shard_of};
use crate::connection::{ConnectionId, Lent, SCRATCH_BYTES, WrKind};
use crate::request::{Held, Part, Payload, Request, State, Step};
use crate::store::{OpKind, Store, VolumeIndex};
use crate::volume::{CacheMode, Placement, Volume};

/// Bytes of a READ that only proves. Not fewer: soft-iWARP answers a READ of up to 32 bytes from a shortcut that
/// may look at a user's memory from a kernel thread, and then the connection or the kernel dies.
const PROOF_BYTES: u32 = SCRATCH_BYTES;
/// Bytes of a memory volume that are zeroed in one turn.
const ZERO_STEP: usize = 4 << 20;

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
            (request.offset_bytes, request.len_bytes) = (offset_bytes, len_bytes);
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
                    && let Some(from) = connection.data_offset(tag)
                {
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
            (Opcode::Read, Placement::Store) => {
                self.split(slot, tag, &volume, offset_bytes, len);
                self.repost_recv(slot, tag);
                self.ask_reads(slot, tag, volume.index);
                self.read_ahead(slot, &volume, offset_bytes, len);
            }
            (Opcode::Write, Placement::Memory(_)) => {
                self.split(slot, tag, &volume, offset_bytes, len);
                self.start_landing(slot, tag, 0);
            }
            (Opcode::Write, _) => {
                self.split(slot, tag, &volume, offset_bytes, len);
                self.ask_parts(slot, tag, |from, part| ShardRequest::Reserve {
                    from,
                    volume: volume.index,
                    offset: part.offset,
                    len: part.len,
                });
            }
            (Opcode::Flush, Placement::Store) => {
                self.working(slot, tag);
                if volume.cache == CacheMode::WriteBack {
                    for shard in 0..self.peers.groups() {
                        let from = self.token(slot, tag, 0);
                        let flush = ShardRequest::Flush { from, volume: volume.index };
                        self.ask(slot, tag, shard, flush);
                    }
                } else {
                    self.sync(slot, tag, volume.index);
                }
            }
            (Opcode::Discard, Placement::Store) if volume.discard => {
                let kind = OpKind::Discard { offset: offset_bytes, len: len_bytes };
                self.change(slot, tag, &volume, kind);
            }
            (Opcode::WriteZeroes, Placement::Store) => {
                let may_unmap = command.flags.may_unmap;
                let kind = OpKind::WriteZeroes { offset: offset_bytes, len: len_bytes, may_unmap };
                self.change(slot, tag, &volume, kind);
            }
            (Opcode::Discard | Opcode::WriteZeroes, Placement::Memory(region)) => {
                self.start_zeroing(slot, tag, region, offset_bytes, len_bytes);
            }
            _ => self.finish(slot, tag, Status::Ok),
        }
    }

    /// Zeroes a range of a memory volume: at once, or in steps of a turn, so that others are served meanwhile.
    fn start_zeroing(
        &mut self,
        slot: usize,
        tag: Tag,
        region: &std::sync::Arc<rblk_fabric::Region>,
        offset: u64,
        len: u64,
    ) {
        // The range is inside a region in memory, so it fits usize.
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if len <= ZERO_STEP && self.zeroing.is_empty() {
            region.zero(from, len);
            return self.finish(slot, tag, Status::Ok);
        }
        self.working(slot, tag);
        let Some(connection) = self.connections[slot].as_mut() else { return };
        connection.requests[tag.index()].pending += 1;
        let (connection, region) = (connection.id, std::sync::Arc::clone(region));
        self.zeroing.push_back(Zeroing { connection, tag, region, range: from..from + len });
    }

    /// One step of the zeroing that waits longest. Returns whether there was any.
    pub(super) fn zero_on(&mut self) -> bool {
        let Some(zeroing) = self.zeroing.front_mut() else { return false };
        let step = zeroing.range.len().min(ZERO_STEP);
        zeroing.region.zero(zeroing.range.start, step);
        zeroing.range.start += step;
        if zeroing.range.is_empty()
            && let Some(Zeroing { connection: id, tag, .. }) = self.zeroing.pop_front()
        {
            let slot = usize::from(id.slot);
            if let Some(Some(connection)) = self.connections.get_mut(slot)
                && connection.id == id
            {
                connection.requests[tag.index()].pending -= 1;
                if connection.is_live() {
                    self.finish(slot, tag, Status::Ok);
                }
            }
        }
        true
    }

    fn set_payload(&mut self, slot: usize, tag: Tag, payload: Payload) {
        if let Some(connection) = self.connections[slot].as_mut() {
            connection.requests[tag.index()].payload = payload;
        }
    }

    fn working(&mut self, slot: usize, tag: Tag) {
        if let Some(connection) = self.connections[slot].as_mut() {
            connection.requests[tag.index()].state = State::Working;
        }
        self.repost_recv(slot, tag);
    }

    /// Cuts a command's range into the parts of its shards.
    #[allow(clippy::cast_possible_truncation)] // within a command's length; groups are few
    fn split(&mut self, slot: usize, tag: Tag, volume: &Volume, offset: u64, len: u32) {
        let groups = self.peers.groups();
        let own = self.index;
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let request = &mut connection.requests[tag.index()];
        request.state = State::Working;
        let end = offset + u64::from(len);
        let mut from = offset;
        while from < end {
            let (to, shard) = if volume.cache == CacheMode::None || groups == 1 {
                (end, own)
            } else {
                let stripe = (from / STRIPE_BYTES + 1) * STRIPE_BYTES;
                (end.min(stripe), shard_of(volume.index, from, groups))
            };
            request.add_part(Part {
                offset: from,
                at: (from - offset) as u32,
                len: (to - from) as u32,
                shard: shard as u16,
                ..Part::default()
            });
            from = to;
        }
    }

    #[allow(clippy::cast_possible_truncation)] // groups and parts are few
    pub(super) fn token(&self, slot: usize, tag: Tag, part: usize) -> PartToken {
        let connection = self.connections[slot].as_ref().map(|c| c.id);
        let nobody = ConnectionId { slot: u16::MAX, generation: 0 };
        PartToken {
            group: self.index as u16,
            connection: connection.unwrap_or(nobody),
            tag,
            part: part as u8,
        }
    }

    /// Asks a shard something that it will answer.
    pub(super) fn ask(&mut self, slot: usize, tag: Tag, shard: usize, request: ShardRequest) {
        if let Some(connection) = self.connections[slot].as_mut() {
            connection.requests[tag.index()].pending += 1;
        }
        self.tell(shard, request);
    }

    /// Asks the shard of each part.
    fn ask_parts(
        &mut self,
        slot: usize,
        tag: Tag,
        make: impl Fn(PartToken, &Part) -> ShardRequest,
    ) {
        let count =
            self.connections[slot].as_ref().map_or(0, |c| c.requests[tag.index()].parts().len());
        for at in 0..count {
            let token = self.token(slot, tag, at);
            let Some(connection) = self.connections[slot].as_mut() else { return };
            let part = &mut connection.requests[tag.index()].parts_mut()[at];
            part.step = Step::Asked;
            let (shard, request) = (usize::from(part.shard), make(token, part));
            self.ask(slot, tag, shard, request);
        }
    }

    /// Asks the shard of each part of a read. What this group's own has in memory need not be asked for.
    fn ask_reads(&mut self, slot: usize, tag: Tag, volume: VolumeIndex) {
        let count =
            self.connections[slot].as_ref().map_or(0, |c| c.requests[tag.index()].parts().len());
        let mut hits = false;
        for at in 0..count {
            let Some(connection) = self.connections[slot].as_mut() else { return };
            let part = &mut connection.requests[tag.index()].parts_mut()[at];
            let (shard, offset, len) = (usize::from(part.shard), part.offset, part.len);
            if shard == self.index
                && let Some(memory) = self.shard.lend_hit(volume, offset, len)
            {
                (part.memory, part.step) = (memory, Step::Ready);
                hits = true;
                continue;
            }
            part.step = Step::Asked;
            let from = self.token(slot, tag, at);
            self.ask(slot, tag, shard, ShardRequest::Read { from, volume, offset, len });
        }
        if hits {
            self.send_parts(slot, tag);
        }
    }

    fn read_ahead(&mut self, slot: usize, volume: &Volume, offset: u64, len: u32) {
        if volume.cache == CacheMode::None {
            return;
        }
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let size = volume.blocks.bytes(volume.block_size).unwrap_or(0);
        let max = volume.read_ahead_bytes;
        let wanted = connection.read_ahead.on_read(volume.index, offset, len, max, size);
        let Some((mut from, bytes)) = wanted else { return };
        let end = from + u64::from(bytes);
        while from < end {
            let to = end.min((from / STRIPE_BYTES + 1) * STRIPE_BYTES);
            let shard = shard_of(volume.index, from, self.peers.groups());
            let len = u32::try_from(to - from).unwrap_or(0);
            self.tell(shard, ShardRequest::Prefetch { volume: volume.index, offset: from, len });
            from = to;
        }
    }

    fn sync(&mut self, slot: usize, tag: Tag, volume: VolumeIndex) {
        let from = self.token(slot, tag, 1);
        self.ask(slot, tag, self.index, ShardRequest::Sync { from, volume });
    }

    /// A discard or zeroing: by the shard that has all of it, or after every shard holds the range.
    fn change(&mut self, slot: usize, tag: Tag, volume: &Volume, kind: OpKind) {
        self.working(slot, tag);
        let groups = self.peers.groups();
        let (offset, len) = kind.range();
        let one_stripe = offset / STRIPE_BYTES == (offset + len - 1) / STRIPE_BYTES;
        let (from, volume_index) = (self.token(slot, tag, 0), volume.index);
        if volume.cache == CacheMode::None || groups == 1 || one_stripe {
            let shard = match volume.cache {
                CacheMode::None => self.index,
                _ => shard_of(volume.index, offset, groups),
            };
            let change = ShardRequest::Change { from, volume: volume_index, kind, held: false };
            return self.ask(slot, tag, shard, change);
        }
        // One after the other in the order of the shards, so that two of these never wait for each other.
        let hold = ShardRequest::Hold { from, volume: volume_index, offset, len };
        self.ask(slot, tag, 0, hold);
    }

    fn on_held(&mut self, slot: usize, to: PartToken, job: JobId) {
        let shard = usize::from(to.part);
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let live = connection.is_live();
        let request = &mut connection.requests[to.tag.index()];
        request.holds.push(Held { shard: to.part.into(), job });
        if !live {
            return self.unhold(slot, to.tag, Changed::No);
        }
        let (volume, offset, len) = (request.volume, request.offset_bytes, request.len_bytes);
        let Some(command) = request.command else { return };
        let next = shard + 1;
        if next < self.peers.groups() {
            let from = self.token(slot, to.tag, next);
            return self.ask(slot, to.tag, next, ShardRequest::Hold { from, volume, offset, len });
        }
        let kind = if command.opcode == Opcode::Discard {
            OpKind::Discard { offset, len }
        } else {
            OpKind::WriteZeroes { offset, len, may_unmap: command.flags.may_unmap }
        };
        let from = self.token(slot, to.tag, 0);
        self.ask(slot, to.tag, self.index, ShardRequest::Change { from, volume, kind, held: true });
    }

    /// Ends the holds of a command. It is answered when every shard has heard of it: until then one of them
    /// might still answer others with what the change made old.
    fn unhold(&mut self, slot: usize, tag: Tag, outcome: Changed) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let mut holds = std::mem::take(&mut connection.requests[tag.index()].holds);
        for Held { shard, job } in holds.drain(..) {
            let from = self.token(slot, tag, 0);
            self.ask(slot, tag, usize::from(shard), ShardRequest::Unhold { from, job, outcome });
        }
        if let Some(connection) = self.connections[slot].as_mut() {
            connection.requests[tag.index()].holds = holds;
        }
    }

    /// A shard answered.
    pub(super) fn on_reply(&mut self, reply: ShardReply) {
        let to = reply.to();
        let slot = usize::from(to.connection.slot);
        let request = self
            .connections
            .get_mut(slot)
            .and_then(Option::as_mut)
            .filter(|c| c.id == to.connection)
            .map(|c| (c.is_live(), &mut c.requests[to.tag.index()]));
        let Some((live, request)) = request else {
            // No connection is buried while a shard works for it.
            debug_assert!(false, "an answer to nobody: {reply:?}");
            return;
        };
        request.pending = request.pending.saturating_sub(1);
        let shard = request.parts().get(usize::from(to.part)).map_or(0, |p| usize::from(p.shard));
        match reply {
            ShardReply::Read { result: Ok(memory), .. } if !live => {
                self.tell(shard, ShardRequest::Release { memory });
            }
            ShardReply::Read { result, .. } => {
                let part = &mut request.parts_mut()[usize::from(to.part)];
                match result {
                    Ok(memory) => (part.memory, part.step) = (memory, Step::Ready),
                    Err(errno) => {
                        part.step = Step::Done;
                        request.fail(status_of(errno));
                    }
                }
                if live {
                    self.send_parts(slot, to.tag);
                }
            }
            ShardReply::Reserved { job, memory, .. } => {
                if !live {
                    return self.tell(shard, ShardRequest::Cancel { job, memory });
                }
                let part = &mut request.parts_mut()[usize::from(to.part)];
                (part.memory, part.job) = (memory, Some(job));
                self.start_landing(slot, to.tag, usize::from(to.part));
            }
            ShardReply::Held { job, .. } => self.on_held(slot, to, job),
            ShardReply::Done { result, .. } => self.on_done(slot, to, result),
        }
    }

    fn on_done(&mut self, slot: usize, to: PartToken, result: Result<(), Errno>) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let live = connection.is_live();
        let request = &mut connection.requests[to.tag.index()];
        if let Err(errno) = result {
            request.fail(status_of(errno));
        }
        let (pending, status, volume) = (request.pending, request.status, request.volume);
        match request.command.map(|c| c.opcode) {
            Some(Opcode::Write) => {
                if let Some(part) = request.parts_mut().get_mut(usize::from(to.part)) {
                    part.step = Step::Done;
                }
                if live {
                    self.finish_write(slot, to.tag);
                }
            }
            // The shards have written their dirty blocks; now the store.
            Some(Opcode::Flush) if to.part == 0 => {
                if pending > 0 || !live {
                } else if status == Status::Ok {
                    self.sync(slot, to.tag, volume);
                } else {
                    self.finish(slot, to.tag, status);
                }
            }
            _ => {
                let held = !request.holds.is_empty();
                if held {
                    let outcome = if result.is_ok() { Changed::Yes } else { Changed::Unknown };
                    self.unhold(slot, to.tag, outcome);
                } else if live && pending == 0 {
                    self.finish(slot, to.tag, status);
                }
            }
        }
    }

    pub(super) fn finish_write(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_ref() else { return };
        let request = &connection.requests[tag.index()];
        if request.pending == 0 && request.parts().iter().all(|p| p.step == Step::Done) {
            let status = request.status;
            self.finish(slot, tag, status);
        }
    }

    /// Gives back what a dead connection's device no longer touches: the markers came back, or the QP is
    /// destroyed. Others may wait for this memory, even commands of the same connection.
    pub(super) fn give_back_memory(&mut self, lent: &mut Lent) {
        for (_, shard, memory) in lent.pinned.drain(..) {
            self.release(shard, memory);
        }
        let poller = lent.poller;
        let sink = self.pollers[poller].sink.as_mut();
        if let (Some(extent), Some(sink)) = (lent.proof_sink.take(), sink) {
            sink.release(extent);
        }
        for part in lent.requests.iter_mut().flat_map(Request::parts_mut) {
            let (shard, memory) = (usize::from(part.shard), std::mem::take(&mut part.memory));
            match part.job.take() {
                Some(job) => self.tell(shard, ShardRequest::Cancel { job, memory }),
                None if memory.is_empty() => {}
                None => self.tell(shard, ShardRequest::Release { memory }),
            }
            let sink = self.pollers[poller].sink.as_mut();
            if let (Some(extent), Some(sink)) = (part.sink.take(), sink) {
                sink.release(extent);
            }
        }
    }

    /// Lends go back to their shard.
    pub(super) fn release(&mut self, shard: u16, memory: Segments) {
        self.tell(usize::from(shard), ShardRequest::Release { memory });
    }

    /// Memory is short: connections may hold some behind unsignaled WRs.
    pub(super) fn prove_tails(&mut self) {
        for slot in 0..self.connections.len() {
            self.prove_tail(slot);
        }
    }

    /// Posts a READ of the peer's scratch, unless something else on its way will release what is pinned:
    /// it completes behind everything posted so far and proves that it is done.
    pub(super) fn prove_tail(&mut self, slot: usize) {
        let Some(connection) = self.connections[slot].as_mut() else { return };
        let Some(position) = connection.pinned.back().map(|(position, ..)| *position) else {
            return;
        };
        let Some(scratch) = connection.peer_scratch else { return };
        let can = connection.is_live()
            && !connection.proving
            && !(connection.sends_prove && connection.credits.will_prove(position))
            && connection.free_sends() > 0
            && connection.reads_in_flight < connection.params.reads_out;
        if can {
            let entry = &mut self.pollers[connection.poller];
            let sge = match (&mut entry.sink, &entry.memory.sink) {
                // There a READ may land in the sink only.
                (Some(sink), Some(mr)) => {
                    let Some(extent) = sink.allocate(PROOF_BYTES as usize) else { return };
                    let sge = mr.sge(extent.offset(), PROOF_BYTES);
                    connection.proof_sink = Some(extent);
                    sge.unwrap_or_else(|| connection.scratch_sge(PROOF_BYTES))
                }
                _ => connection.scratch_sge(PROOF_BYTES),
            };
            connection.proving = true;
            connection.reads_in_flight += 1;
            let remote = RemoteBuffer { addr: scratch.address, rkey: Rkey(scratch.rkey) };
            connection.queue_send(WrKind::Proof, SendOp::Read(remote), sge, true, false);
            self.mark_dirty(slot);
        }
    }
}

fn status_of(errno: Errno) -> Status {
    Status::from_store_errno(errno as i32)
}
