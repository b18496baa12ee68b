//! How write data comes: out of the capsule, or by RDMA READs into the memory of a part.

use rblk_fabric::{Region, RemoteBuffer, Rkey, SendOp, Sge};
use rblk_protocol::{Status, Tag};

use super::block::token;
use super::respond::finish;
use super::{PollGroup, mark_dirty};
use crate::cache::{PartToken, ShardRequest};
use crate::connection::{ConnectionId, WrKind};
use crate::request::{Part, State, Step};
use crate::store::Store;
use crate::volume::Placement;

impl<S: Store> PollGroup<S> {
    /// A part of a write has its memory: its data may come.
    pub(super) fn start_landing(&mut self, slot: usize, tag: Tag, at: usize) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let data = connection.data_offset(tag);
        let own = connection.params.memory.region();
        let request = &mut connection.requests[tag.index()];
        let Some(command) = &request.command else { return };
        let in_capsule = command.in_capsule_bytes > 0;
        let part = &mut request.parts_mut()[at];
        part.step = Step::Landing;
        if !in_capsule {
            return self.start_reads(slot, tag, at);
        }
        if let Some(data) = data {
            let start = data + part.at as usize;
            let arena = self.shard.slots().region();
            part.memory.each_run(0, part.len, |run, begins| {
                own.copy_to(start + begins as usize, arena, run.offset, run.len as usize);
            });
            self.stats.copied_bytes.add(u64::from(part.len));
        }
        part.posted = part.len;
        if request.parts().iter().all(|p| p.posted == p.len) {
            connection.repost_recv(tag);
            mark_dirty(&mut self.dirty, connection);
        }
        self.landed(slot, tag, at);
    }

    /// Posts the READs of a part's data as far as credits and sink allow, or queues it for them.
    pub(super) fn start_reads(&mut self, slot: usize, tag: Tag, at: usize) {
        loop {
            let Some(connection) = self.connections[slot].as_deref_mut() else { return };
            let id = connection.id;
            let has_credit = connection.reads_in_flight < connection.params.reads_out
                && connection.free_sends() > 0;
            let sink = self.pollers[connection.poller].sink.as_mut();
            let part = &mut connection.requests[tag.index()].parts_mut()[at];
            if part.posted == part.len {
                return;
            }
            // Parts are few.
            let index = u8::try_from(at).unwrap_or(u8::MAX);
            if let Some(sink) = sink
                && part.sink.is_none()
            {
                part.sink = sink.allocate(part.len as usize);
                if part.sink.is_none() {
                    self.waiting_sink.push_back((id, tag, index));
                    return;
                }
            }
            if !has_credit {
                self.stats.read_credit_waits.add(1);
                connection.waiting_reads.push_back((tag, index));
                return;
            }
            let Some((sge, remote)) = self.read_landing(slot, tag, at) else {
                // Only a bug gets here: ranges were checked.
                return self.protocol_error(slot, "a write without memory");
            };
            if let Some(connection) = self.connections[slot].as_deref_mut() {
                let part = &mut connection.requests[tag.index()].parts_mut()[at];
                part.posted += sge.len;
                part.reads += 1;
                connection.reads_in_flight += 1;
                let kind = WrKind::ReadData(tag, index);
                connection.queue_send(kind, SendOp::Read(remote), sge, true, false);
                self.mark_dirty(slot);
            }
        }
    }

    /// Where the next READ of a part lands, and where its data is at the initiator.
    fn read_landing(&self, slot: usize, tag: Tag, at: usize) -> Option<(Sge, RemoteBuffer)> {
        let connection = self.connections[slot].as_ref()?;
        let request = &connection.requests[tag.index()];
        let buffer = request.command?.buffer?;
        let part = &request.parts()[at];
        let memory = &self.pollers[connection.poller].memory;
        let left = part.len - part.posted;
        let sge = if let (Some(extent), Some(sink)) = (&part.sink, &memory.sink) {
            sink.sge(extent.offset(), left)?
        } else if part.memory.is_empty() {
            let (_, mr) = memory.volumes.iter().find(|(index, _)| *index == request.volume)?;
            mr.sge(usize::try_from(part.offset).ok()?, left)?
        } else {
            let mut first = None;
            part.memory.each_run(part.posted, part.len, |run, _| {
                first.get_or_insert(run);
            });
            let run = first?;
            memory.arena.sge(run.offset, run.len)?
        };
        let addr = buffer.address + u64::from(part.at + part.posted);
        Some((sge, RemoteBuffer { addr, rkey: Rkey(buffer.rkey) }))
    }

    /// A READ of write data completed.
    pub(super) fn on_data_read(&mut self, slot: usize, tag: Tag, at: u8) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let Some(request) = connection.requests.get_mut(tag.index()) else { return };
        let volume = request.volume;
        let part = request.parts_mut().get_mut(usize::from(at));
        let Some(part) = part.filter(|p| p.step == Step::Landing && p.reads > 0) else {
            return self.protocol_error(slot, "a READ completed that was not posted");
        };
        part.reads -= 1;
        if part.reads > 0 || part.posted < part.len {
            return;
        }
        let sink = self.pollers[connection.poller].sink.as_mut();
        if let (Some(extent), Some(sink)) = (part.sink.take(), sink) {
            let from = extent.offset();
            let placement = self.volumes[usize::from(volume.0)].as_ref().map(|v| &v.placement);
            if let Some(Placement::Memory(region)) = placement {
                let to = usize::try_from(part.offset).unwrap_or(usize::MAX);
                sink.region().copy_to(from, region, to, part.len as usize);
            } else {
                let arena = self.shard.slots().region();
                part.memory.each_run(0, part.len, |run, begins| {
                    let from = from + begins as usize;
                    sink.region().copy_to(from, arena, run.offset, run.len as usize);
                });
            }
            self.stats.copied_bytes.add(part.len.into());
            sink.release(extent);
        }
        self.landed(slot, tag, usize::from(at));
    }

    /// The data of a part is in our memory: to its shard, or done.
    fn landed(&mut self, slot: usize, tag: Tag, at: usize) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let request = &mut connection.requests[tag.index()];
        let fua = request.command.as_ref().is_some_and(|c| c.flags.fua);
        let volume = self.volumes[usize::from(request.volume.0)].as_ref();
        let part = &mut request.parts_mut()[at];
        let (shard, memory) = (usize::from(part.shard), std::mem::take(&mut part.memory));
        match part.job.take() {
            Some(job) if volume.is_some_and(|v| matches!(v.placement, Placement::Store)) => {
                part.step = Step::Asked;
                if shard != self.index {
                    request.pending += 1;
                    let from = token(self.index, connection.id, tag, at);
                    self.tell(shard, ShardRequest::Write { from, job, memory, fua });
                } else if self.shard.write(job, memory, fua, self.now) {
                    part.step = Step::Done;
                    self.finish_write(slot, tag);
                } else {
                    request.pending += 1;
                }
            }
            job => {
                part.step = Step::Done;
                if let Some(job) = job {
                    self.tell(shard, ShardRequest::Cancel { job, memory });
                }
                self.finish_write(slot, tag);
            }
        }
    }

    /// A write whose data came in its capsule, all of it for this group's own shard: at once and
    /// without a part, or, if it must wait for memory, as a part.
    #[inline(never)]
    pub(super) fn write_whole(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let request = &connection.requests[tag.index()];
        // It was admitted with its data.
        let (Some(recv), Some(command)) = (request.recv_slot, &request.command) else { return };
        let (volume, offset, fua) = (request.volume, request.offset_bytes, command.flags.fua);
        // What is in a capsule is short.
        let len = command.in_capsule_bytes;
        let data = connection.recv_offset(recv) + request.data_at;
        let (own, from) = (connection.region(), token(self.index, connection.id, tag, 0));
        let land = |arena: &Region, to: usize| own.copy_to(data, arena, to, len as usize);
        let done = self.shard.write_one(from, volume, offset, len, fua, self.now, land);
        let request = &mut connection.requests[tag.index()];
        match done {
            Some(true) => {
                self.stats.copied_bytes.add(u64::from(len));
                self.finish(slot, tag, Status::Ok);
            }
            Some(false) => {
                self.stats.copied_bytes.add(u64::from(len));
                request.state = State::Working;
                request.pending += 1;
                request.recv_slot = None;
                connection.release_recv(recv);
                mark_dirty(&mut self.dirty, connection);
            }
            None => {
                // Groups are few.
                let shard = u16::try_from(self.index).unwrap_or(u16::MAX);
                request.state = State::Working;
                let step = Step::Asked;
                request.add_part(Part { offset, len, shard, step, ..Part::default() });
                self.ask_memory(slot, tag, volume);
            }
        }
    }

    /// This group's own shard has written all data of a command, which has no parts.
    #[inline]
    pub(super) fn on_written(&mut self, to: PartToken) {
        let slot = usize::from(to.connection.slot);
        let connection = self.connections.get_mut(slot).and_then(Option::as_deref_mut);
        let Some(connection) = connection.filter(|c| c.id == to.connection) else {
            // No connection is buried while a shard works for it.
            debug_assert!(false, "an answer to nobody: {to:?}");
            return;
        };
        let live = connection.is_live();
        let request = &mut connection.requests[to.tag.index()];
        request.pending = request.pending.saturating_sub(1);
        if live {
            let (pollers, stats, dirty) = (&self.pollers, &self.stats, &mut self.dirty);
            finish(connection, pollers, stats, dirty, to.tag, Status::Ok);
        }
    }

    /// Lets those go on who waited for the sink, in order.
    #[cold]
    pub(super) fn retry_sink(&mut self) {
        for _ in 0..self.waiting_sink.len() {
            let Some((id, tag, at)) = self.waiting_sink.pop_front() else { return };
            if self.is_current(id) {
                let slot = usize::from(id.slot);
                let before = self.waiting_sink.len();
                self.start_reads(slot, tag, usize::from(at));
                if self.waiting_sink.len() > before {
                    // Still nothing: the head stays the head.
                    if let Some(waiting) = self.waiting_sink.pop_back() {
                        self.waiting_sink.push_front(waiting);
                    }
                    return;
                }
            }
        }
    }

    fn is_current(&self, id: ConnectionId) -> bool {
        self.connections
            .get(usize::from(id.slot))
            .and_then(Option::as_ref)
            .is_some_and(|c| c.id == id && c.is_live())
    }
}
