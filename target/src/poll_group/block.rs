//! Block commands: from a checked command through shards, RDMA READ and back to an outcome.

use std::sync::Arc;

use nix::errno::Errno;
use rblk_fabric::{Region, RemoteBuffer, Rkey, SendOp};
use rblk_protocol::{AccessMode, CommandCapsule, Opcode, Status, Tag};

use super::{Opened, PollGroup, SessionView, Zeroing, mark_dirty};
use crate::cache::message::Changed;
use crate::cache::{JobId, PartToken, STRIPE_BYTES, Segments, ShardReply, ShardRequest, shard_of};
use crate::connection::{ConnectionId, Lent, SCRATCH_BYTES, SessionSlot, WrKind};
use crate::read_ahead::ReadAhead;
use crate::request::{Held, Part, Payload, Request, State, Step};
use crate::store::{OpKind, Store, VolumeIndex};
use crate::volume::{CacheMode, Placement, Volume};

/// Bytes of a READ that only proves. Not fewer: soft-iWARP answers a READ of up to 32 bytes from a
/// shortcut that may look at a user's memory from a kernel thread, and then the connection or the
/// kernel dies.
const PROOF_BYTES: u32 = SCRATCH_BYTES;
/// Bytes of a memory volume that are zeroed in one turn.
const ZERO_STEP: usize = 4 << 20;

impl<S: Store> PollGroup<S> {
    /// Begins a block command that was admitted.
    #[inline]
    pub(super) fn start_block(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let request = &mut connection.requests[tag.index()];
        let Some(command) = request.command else { return };
        let params = &connection.params;
        let reads_out = params.reads_out;
        let checked = opened_volume(&self.sessions, &self.volumes, params.session, &command)
            .and_then(|(volume, mode)| {
                Ok((volume, volume.check(&command, mode, params.io_max_bytes)?))
            });
        let (volume, range) = match checked {
            Ok(checked) => checked,
            Err(status) => return self.finish(slot, tag, status),
        };
        let (offset_bytes, len_bytes) = range.map_or((0, 0), |r| (r.offset_bytes(), r.len_bytes()));
        // Data commands were checked against io_max_bytes; others have no use for it.
        let len = u32::try_from(len_bytes).unwrap_or(u32::MAX);
        request.volume = volume.index;
        (request.offset_bytes, request.len_bytes) = (offset_bytes, len_bytes);
        let (own, groups, volume_index) = (self.index, self.peers.groups(), volume.index);
        match (command.opcode, &volume.placement) {
            (Opcode::Read, Placement::Memory(_)) => {
                // The range is inside a region in memory, so it fits usize.
                let offset = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
                request.payload = Payload::Memory { volume: volume.index, offset, len };
                self.finish(slot, tag, Status::Ok);
            }
            (Opcode::Read, Placement::Null) => {
                request.payload = Payload::Zeros { len };
                self.finish(slot, tag, Status::Ok);
            }
            (Opcode::Write, Placement::Memory(region)) if command.in_capsule_bytes > 0 => {
                let data_at = request.data_at;
                if let Some(recv) = request.recv_slot {
                    let from = connection.recv_offset(recv) + data_at;
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
                let ahead = read_ahead(&mut connection.read_ahead, volume, offset_bytes, len);
                if command.in_capsule_bytes > 0 {
                    // Of no use: its slot is free at once.
                    connection.repost_recv(tag);
                    mark_dirty(&mut self.dirty, connection);
                }
                let end = offset_bytes + len_bytes;
                let is_own = first_part(volume, own, groups, offset_bytes, end) == (end, own);
                // Most reads are of one part, which is there.
                if is_own && let Some(memory) = self.shard.lend_hit(volume_index, offset_bytes, len)
                {
                    self.send_whole(slot, tag, len, memory);
                } else {
                    let request = &mut connection.requests[tag.index()];
                    split(request, volume, own, groups, offset_bytes, len);
                    self.read_parts(slot, tag, volume_index);
                }
                if let Some((from, bytes)) = ahead {
                    self.prefetch(volume_index, from, bytes);
                }
            }
            // Most writes that bring their data are of one part.
            (Opcode::Write, Placement::Store)
                if command.in_capsule_bytes > 0
                    && first_part(volume, own, groups, offset_bytes, offset_bytes + len_bytes)
                        == (offset_bytes + len_bytes, own) =>
            {
                self.write_whole(slot, tag);
            }
            (Opcode::Write, placement) => {
                let in_memory = matches!(placement, Placement::Memory(_));
                split(request, volume, own, groups, offset_bytes, len);
                if in_memory {
                    self.start_landing(slot, tag, 0);
                } else {
                    self.ask_memory(slot, tag, volume_index);
                }
            }
            (Opcode::Flush, Placement::Store) => {
                let (volume, cache) = (volume.index, volume.cache);
                self.working(slot, tag);
                if cache == CacheMode::WriteBack {
                    for shard in 0..groups {
                        let from = self.token(slot, tag, 0);
                        self.ask(slot, tag, shard, ShardRequest::Flush { from, volume });
                    }
                } else {
                    self.sync(slot, tag, volume);
                }
            }
            (Opcode::Discard, Placement::Store) if volume.discard => {
                let kind = OpKind::Discard { offset: offset_bytes, len: len_bytes };
                let volume = Arc::clone(volume);
                self.change(slot, tag, &volume, kind);
            }
            (Opcode::WriteZeroes, Placement::Store) => {
                let may_unmap = command.flags.may_unmap;
                let kind = OpKind::WriteZeroes { offset: offset_bytes, len: len_bytes, may_unmap };
                let volume = Arc::clone(volume);
                self.change(slot, tag, &volume, kind);
            }
            (Opcode::Discard | Opcode::WriteZeroes, Placement::Memory(region)) => {
                let region = Arc::clone(region);
                self.start_zeroing(slot, tag, region, offset_bytes, len_bytes);
            }
            _ => self.finish(slot, tag, Status::Ok),
        }
    }

    /// Zeroes a range of a memory volume: at once, or in steps of a turn, so that others are served
    /// meanwhile.
    fn start_zeroing(&mut self, slot: usize, tag: Tag, region: Arc<Region>, offset: u64, len: u64) {
        // The range is inside a region in memory, so it fits usize.
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if len <= ZERO_STEP && self.zeroing.is_empty() {
            region.zero(from, len);
            return self.finish(slot, tag, Status::Ok);
        }
        self.working(slot, tag);
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        connection.requests[tag.index()].pending += 1;
        let connection = connection.id;
        self.zeroing.push_back(Zeroing { connection, tag, region, range: from..from + len });
    }

    /// One step of the zeroing that waits longest. Returns whether there was any.
    #[cold]
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

    fn working(&mut self, slot: usize, tag: Tag) {
        if let Some(connection) = self.connections[slot].as_deref_mut() {
            connection.requests[tag.index()].state = State::Working;
        }
        self.repost_recv(slot, tag);
    }

    pub(super) fn token(&self, slot: usize, tag: Tag, part: usize) -> PartToken {
        let connection = self.connections[slot].as_ref().map(|c| c.id);
        let nobody = ConnectionId { slot: u16::MAX, generation: 0 };
        token(self.index, connection.unwrap_or(nobody), tag, part)
    }

    /// Asks a shard something that it will answer.
    pub(super) fn ask(&mut self, slot: usize, tag: Tag, shard: usize, request: ShardRequest) {
        if let Some(connection) = self.connections[slot].as_deref_mut() {
            connection.requests[tag.index()].pending += 1;
        }
        self.tell(shard, request);
    }

    /// Asks the shard of each part of a read. What this group's own has in memory need not be asked
    /// for.
    fn read_parts(&mut self, slot: usize, tag: Tag, volume: VolumeIndex) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let (mut hits, mut misses) = (false, false);
        for part in connection.requests[tag.index()].parts_mut() {
            if usize::from(part.shard) == self.index
                && let Some(memory) = self.shard.lend_hit(volume, part.offset, part.len)
            {
                (part.memory, part.step) = (memory, Step::Ready);
                hits = true;
            } else {
                misses = true;
            }
        }
        if misses {
            self.ask_missing(slot, tag, volume);
        }
        if hits {
            self.send_parts(slot, tag);
        }
    }

    /// Asks the shards of those parts of a read that are not there.
    fn ask_missing(&mut self, slot: usize, tag: Tag, volume: VolumeIndex) {
        let mut at = 0;
        while let Some(connection) = self.connections[slot].as_deref_mut() {
            let request = &mut connection.requests[tag.index()];
            let Some(part) = request.parts().get(at) else { return };
            if part.step == Step::Asked {
                let from = token(self.index, connection.id, tag, at);
                let (shard, offset, len) = (usize::from(part.shard), part.offset, part.len);
                request.pending += 1;
                self.tell(shard, ShardRequest::Read { from, volume, offset, len });
            }
            at += 1;
        }
    }

    /// Asks the shard of each part of a write for memory. What this group's own has at once need
    /// not be waited for.
    #[inline]
    pub(super) fn ask_memory(&mut self, slot: usize, tag: Tag, volume: VolumeIndex) {
        let mut at = 0;
        while let Some(connection) = self.connections[slot].as_deref_mut().filter(|c| c.is_live()) {
            let request = &mut connection.requests[tag.index()];
            let Some(part) = request.parts_mut().get_mut(at) else { return };
            let from = token(self.index, connection.id, tag, at);
            let (shard, offset, len) = (usize::from(part.shard), part.offset, part.len);
            if shard != self.index {
                request.pending += 1;
                self.tell(shard, ShardRequest::Reserve { from, volume, offset, len });
            } else if let Some((job, memory)) = self.shard.reserve(from, volume, offset, len) {
                (part.memory, part.job) = (memory, Some(job));
                self.start_landing(slot, tag, at);
            } else {
                request.pending += 1;
            }
            at += 1;
        }
    }

    /// Tells the shards what may be wanted soon.
    fn prefetch(&mut self, volume: VolumeIndex, mut from: u64, bytes: u32) {
        let end = from + u64::from(bytes);
        while from < end {
            let to = end.min((from / STRIPE_BYTES + 1) * STRIPE_BYTES);
            let shard = shard_of(volume, from, self.peers.groups());
            let len = u32::try_from(to - from).unwrap_or(0);
            self.tell(shard, ShardRequest::Prefetch { volume, offset: from, len });
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
        // One after the other in the order of the shards, so that two of these never wait for each
        // other.
        let hold = ShardRequest::Hold { from, volume: volume_index, offset, len };
        self.ask(slot, tag, 0, hold);
    }

    fn on_held(&mut self, slot: usize, to: PartToken, job: JobId) {
        let shard = usize::from(to.part);
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
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

    /// Ends the holds of a command. It is answered when every shard has heard of it: until then one
    /// of them might still answer others with what the change made old.
    fn unhold(&mut self, slot: usize, tag: Tag, outcome: Changed) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let mut holds = std::mem::take(&mut connection.requests[tag.index()].holds);
        for Held { shard, job } in holds.drain(..) {
            let from = self.token(slot, tag, 0);
            self.ask(slot, tag, usize::from(shard), ShardRequest::Unhold { from, job, outcome });
        }
        if let Some(connection) = self.connections[slot].as_deref_mut() {
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
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
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
                if live && request.is_written() {
                    self.finish(slot, to.tag, status);
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
        if request.is_written() {
            let status = request.status;
            self.finish(slot, tag, status);
        }
    }

    /// Gives back what a dead connection's device no longer touches: its QP is destroyed.
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
        if usize::from(shard) == self.index {
            self.shard.release(memory);
        } else {
            self.tell(usize::from(shard), ShardRequest::Release { memory });
        }
    }

    /// Memory is short: connections may hold some behind unsignaled WRs.
    pub(super) fn prove_tails(&mut self) {
        for slot in 0..self.connections.len() {
            self.prove_tail(slot);
        }
    }

    /// Posts a READ of the peer's scratch, unless something else on its way will release what is
    /// pinned: it completes behind everything posted so far and proves that it is done.
    pub(super) fn prove_tail(&mut self, slot: usize) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
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

/// The volume that a command names, as its session opened it.
#[inline]
fn opened_volume<'a>(
    sessions: &[Option<SessionView>],
    volumes: &'a [Option<Arc<Volume>>],
    session: SessionSlot,
    command: &CommandCapsule,
) -> Result<(&'a Arc<Volume>, AccessMode), Status> {
    let index = Volume::index_of(command.volume).ok_or(Status::NoSuchVolume)?;
    let at = usize::from(index.0);
    let opened = sessions
        .get(usize::from(session.0))
        .and_then(Option::as_ref)
        .and_then(|view| view.opened.get(at).copied().flatten())
        .ok_or(Status::NoSuchVolume)?;
    let mode = match opened {
        Opened::Mode(mode) => mode,
        Opened::Refused(status) => return Err(status),
    };
    let volume = volumes.get(at).and_then(Option::as_ref).ok_or(Status::VolumeGone)?;
    Ok((volume, mode))
}

/// Cuts a command's range into the parts of its shards, of which there are as many as `groups`.
#[inline]
#[allow(clippy::cast_possible_truncation)] // within a command's length; groups are few
fn split(request: &mut Request, volume: &Volume, own: usize, groups: usize, offset: u64, len: u32) {
    request.state = State::Working;
    let end = offset + u64::from(len);
    let mut from = offset;
    while from < end {
        let (to, shard) = first_part(volume, own, groups, from, end);
        request.add_part(Part {
            offset: from,
            at: (from - offset) as u32,
            len: (to - from) as u32,
            shard: shard as u16,
            step: Step::Asked,
            ..Part::default()
        });
        from = to;
    }
}

/// Where the first part of a range ends, and whose it is.
#[inline]
fn first_part(volume: &Volume, own: usize, groups: usize, from: u64, end: u64) -> (u64, usize) {
    if volume.cache == CacheMode::None || groups == 1 {
        return (end, own);
    }
    let stripe = (from / STRIPE_BYTES + 1) * STRIPE_BYTES;
    (end.min(stripe), shard_of(volume.index, from, groups))
}

/// What a reader of a cached volume may want soon: first byte and bytes.
#[inline]
fn read_ahead(
    streams: &mut ReadAhead,
    volume: &Volume,
    offset: u64,
    len: u32,
) -> Option<(u64, u32)> {
    let max = volume.read_ahead_bytes;
    if volume.cache == CacheMode::None || max == 0 {
        return None;
    }
    let size = volume.blocks.bytes(volume.block_size).unwrap_or(0);
    streams.on_read(volume.index, offset, len, max, size)
}

#[inline]
#[allow(clippy::cast_possible_truncation)] // groups and parts are few
pub(super) fn token(group: usize, connection: ConnectionId, tag: Tag, part: usize) -> PartToken {
    PartToken { group: group as u16, connection, tag, part: part as u8 }
}

fn status_of(errno: Errno) -> Status {
    Status::from_store_errno(errno as i32)
}
