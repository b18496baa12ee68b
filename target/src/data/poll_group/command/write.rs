//! WRITEs: how their data arrives, in the capsule or by RDMA READs, and goes to its shard.

use rblk_fabric::{Region, RemoteBuffer, Rkey, Sge};
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{Opcode, Tag};

use super::cut::Cut;
use super::data_digest;
use super::read::{self, split};
use super::respond::{acknowledge, finish, memory_volume};
use crate::cache::policy::Slot;
use crate::cache::slots::Slots;
use crate::cache::{Landed, OneBlock, OneWrite, PartToken, ShardRequest};
use crate::data::connection::{Connection, Served, Violation};
use crate::data::parts::{Part, PartIndex};
use crate::data::poll_group::command::counting;
use crate::data::poll_group::group_state::{GroupState, token};
use crate::data::request::{Action, CommandOutcome, InCapsule, PartEvent, RequestEvent, Span};
use crate::memory::arena::Extent;
use crate::store::Store;
use crate::volume::Placement;
use rblk_operate::target::group_counts::Stats;

/// Copies the data of a WRITE out of its capsule, into a memory volume at `to`.
#[inline(always)]
pub(in crate::data::poll_group) fn copy_in(
    connection: &Connection,
    stats: &Stats,
    tag: Tag,
    region: &Region,
    to: usize,
) {
    let request = connection.request(tag);
    if let (Some(command), Some(data)) = (request.command(), request.data()) {
        let bytes = command.in_capsule_bytes;
        let (own, from) = connection.place_of_data(data);
        own.copy_to(from, region, to, wide(bytes));
        stats.copied_bytes.add(u64::from(bytes));
    }
}

/// A WRITE with all its data in the capsule, for this group's own shard: at once and without a
/// part, or, if it must wait for memory, as a part. Starts to count its wait if it must wait.
///
/// # Errors
/// A bug: the connection ends.
#[inline(never)]
pub(in crate::data::poll_group) fn whole<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Served {
    let request = connection.request_mut(tag);
    let (Some(command), Some(data)) = (request.command(), request.data()) else {
        return Err(Violation("a write without its data"));
    };
    let (len, fua) = (command.in_capsule_bytes, command.flags.fua);
    let Span { volume, offset, .. } = request.span();
    let _ = request.take_data();
    let (own, stats) = (group.index, &*group.stats);
    let source = InCapsuleData { connection: &mut *connection, stats, own, tag, data, len };
    match group.shard.write_one(OneBlock { volume, offset, len, fua }, source) {
        OneWrite::Done => {
            connection.data_used(data);
            acknowledge(connection, group, tag);
            Ok(())
        }
        OneWrite::AtStore => {
            let _ = counting::begin(connection, group, tag).step(RequestEvent::StoreAsked);
            connection.data_used(data);
            Ok(())
        }
        OneWrite::Declined => {
            let request = counting::begin(connection, group, tag);
            request.keep_data(data);
            let part = Part::new(group.index, offset, 0, len);
            let _ = request.step(RequestEvent::Part(part));
            ask_memory(connection, group, tag)
        }
    }
}

/// The in-capsule data of a WRITE, for its shard.
struct InCapsuleData<'a> {
    connection: &'a mut Connection,
    stats: &'a Stats,
    // Number of the poll group.
    own: usize,
    tag: Tag,
    data: InCapsule,
    len: u32,
}

impl Landed for InCapsuleData<'_> {
    #[inline(always)]
    fn land(&mut self, slots: &mut Slots, slot: Slot) -> Slot {
        let to = slots.offset(slot);
        if let Some(landed) = self.connection.take_slot(self.data, to) {
            return slots.exchange(slot, landed);
        }
        let (own, from) = self.connection.place_of_data(self.data);
        copy(own, from, slots.region(), to, wide(self.len));
        self.stats.copied_bytes.add(u64::from(self.len));
        slot
    }

    #[inline(always)]
    fn from(&self) -> PartToken {
        token(self.own, self.connection, self.tag, PartIndex::FIRST)
    }
}

/// Out of line: most data fills a slot, and is not copied.
#[inline(never)]
fn copy(own: &Region, from: usize, region: &Region, to: usize, len: usize) {
    own.copy_to(from, region, to, len);
}

/// A WRITE to a store, in parts.
///
/// # Errors
/// A bug: the connection ends.
pub(in crate::data::poll_group) fn parts<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    cut: Cut,
) -> Served {
    split(connection, tag, cut);
    ask_memory(connection, group, tag)
}

/// A WRITE to a memory volume, by RDMA READ. Without digests and encryption, so that the data may
/// land directly in the volume.
///
/// # Errors
/// A bug: the connection ends.
pub(in crate::data::poll_group) fn to_memory<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    span: Span,
) -> Served {
    let request = connection.request_mut(tag);
    let _ =
        request.step(RequestEvent::Part(Part::new(group.index, span.offset, 0, narrow(span.len))));
    let _ = request.step(RequestEvent::OfPart(PartIndex::FIRST, PartEvent::NeedsNoMemory));
    request.timing().awaits_data(group.time.us);
    post_reads(connection, group, tag, PartIndex::FIRST)
}

/// Asks the shard of each part for memory. Memory that this group's own shard has at once needs no
/// wait.
pub(in crate::data::poll_group) fn ask_memory<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Served {
    for at in 0..connection.request(tag).parts().len() {
        let index = PartIndex(narrow(at));
        let request = connection.request(tag);
        let (volume, part) = (request.span().volume, &request.parts()[at]);
        let (shard, offset, len) = (part.shard(), part.offset(), part.len());
        let from = group.token(connection, tag, index);
        if shard != group.index {
            let reserve = ShardRequest::Reserve { from, volume, offset, len };
            group.ask(connection, tag, shard, reserve);
        } else if let Some((job, memory)) = group.shard.reserve(from, volume, offset, len) {
            let _ = connection
                .request_mut(tag)
                .step(RequestEvent::OfPart(index, PartEvent::ReservedNow(job, memory)));
            fetch(connection, group, tag, index)?;
        } else {
            let _ = connection.request_mut(tag).step(RequestEvent::Asked);
        }
    }
    Ok(())
}

/// A READ of a memory volume with digests: by a copy that does not change until it is sent.
///
/// # Errors
/// A bug: the connection ends.
pub(in crate::data::poll_group) fn copy_of_read<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    cut: Cut,
) -> Served {
    // A READ does not use in-capsule data.
    connection.release_data(tag);
    split(connection, tag, cut);
    ask_memory(connection, group, tag)
}

/// A part has its memory: fetches its data.
///
/// # Errors
/// A bug: the connection ends.
pub(in crate::data::poll_group) fn fetch<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    index: PartIndex,
) -> Served {
    let Some((own, data)) = connection.data_place(tag) else {
        if connection.request(tag).opcode() == Some(Opcode::Read) {
            return read::send_copy(connection, group, tag, index);
        }
        connection.request_mut(tag).timing().awaits_data(group.time.us);
        return post_reads(connection, group, tag, index);
    };
    let part = &connection.request(tag).parts()[wide(index.0)];
    let start = data + wide(part.at());
    let arena = group.shard.slots().region();
    part.memory().each_run(0, part.len(), |run, begins| {
        own.copy_to(start + wide(begins), arena, run.offset, wide(run.len));
    });
    group.stats.copied_bytes.add(u64::from(part.len()));
    let request = connection.request_mut(tag);
    let _ = request.step(RequestEvent::OfPart(index, PartEvent::Copied));
    if request.parts().iter().all(Part::is_posted) {
        connection.release_data(tag);
    }
    place(connection, group, tag, index);
    Ok(())
}

/// Posts the RDMA READs of a part's data as far as credits and landing room allow, or queues the
/// part for them.
///
/// # Errors
/// A bug: the connection ends.
pub(in crate::data::poll_group) fn post_reads<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    index: PartIndex,
) -> Served {
    while !connection.request(tag).parts()[wide(index.0)].is_posted() {
        if !connection.may_read() {
            group.stats.read_credit_waits.add(1);
            connection.wait_for_read(tag, index);
            return Ok(());
        }
        // After the credit, so that no part waits for a READ while it keeps others from landing.
        if !connection.may_land(tag, index) {
            group.stats.read_credit_waits.add(1);
            return Ok(());
        }
        // Ranges were checked.
        let ends = read_ends(connection, group, tag, index);
        let (sge, remote) = ends.ok_or(Violation("a write without memory"))?;
        let _ = connection
            .request_mut(tag)
            .step(RequestEvent::OfPart(index, PartEvent::ReadPosted(sge.len)));
        connection.queue_read(tag, index, sge, remote);
    }
    Ok(())
}

/// The landing place of a part's next RDMA READ, and its data at the initiator.
fn read_ends<S: Store>(
    connection: &Connection,
    group: &GroupState<S>,
    tag: Tag,
    index: PartIndex,
) -> Option<(Sge, RemoteBuffer)> {
    let request = connection.request(tag);
    let buffer = request.command()?.buffer?;
    let part = &request.parts()[wide(index.0)];
    let memory = &group.pollers[connection.poller()].memory;
    let left = part.len() - part.posted();
    let sge = if let Some(extent) = part.landing() {
        connection.bounce()?.landing_sge(extent, left)?
    } else if part.memory().is_empty() {
        memory_volume(memory.as_ref()?, request.span().volume)?.sge(wide(part.offset()), left)?
    } else {
        let mut first = None;
        part.memory().each_run(part.posted(), part.len(), |run, _| {
            first.get_or_insert(run);
        });
        let run = first?;
        memory.as_ref()?.arena.sge(run.offset, run.len)?
    };
    let addr = buffer.address + u64::from(part.at() + part.posted());
    Some((sge, RemoteBuffer { addr, rkey: Rkey(buffer.rkey) }))
}

/// An RDMA READ of write data completed.
///
/// # Errors
/// The READ was never posted: the connection ends.
pub(in crate::data::poll_group) fn on_read<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    index: PartIndex,
) -> Served {
    match connection.request_mut(tag).step(RequestEvent::OfPart(index, PartEvent::ReadDone)) {
        Action::Place => {}
        Action::Wait => return Ok(()),
        _ => return Err(Violation("a READ completed that was not posted")),
    }
    connection.request_mut(tag).timing().data_came(group.time.us);
    if let Some(bounce) = connection.bounce() {
        copy_landed(connection, bounce.landing_region(), group, tag, index);
        connection.leave_landing(tag, index);
    }
    place(connection, group, tag, index);
    Ok(())
}

/// Copies the landed data of a part to the place where a READ would have brought it on other
/// devices (iWARP): to the memory that its shard lent, or, without digests, to a volume in memory.
/// Only the copy is used, and a digest is checked in the copy: the peer can still change the landed
/// data.
#[cold]
fn copy_landed<S: Store>(
    connection: &Connection,
    landing: &Region,
    group: &GroupState<S>,
    tag: Tag,
    index: PartIndex,
) {
    let request = connection.request(tag);
    let part = &request.parts()[wide(index.0)];
    let Some(from) = part.landing().map(Extent::offset) else { return };
    if part.memory().is_empty()
        && let Some(Placement::Memory(region)) = group.access.placement(request.span().volume)
    {
        landing.copy_to(from, region, wide(part.offset()), wide(part.len()));
    } else {
        let arena = group.shard.slots().region();
        part.memory().each_run(0, part.len(), |run, begins| {
            landing.copy_to(from + wide(begins), arena, run.offset, wide(run.len));
        });
    }
    group.stats.copied_bytes.add(u64::from(part.len()));
}

/// The data of a part is in this group's memory: sends it to its shard, if its volume is in a
/// store, or finishes the part.
fn place<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    index: PartIndex,
) {
    let from = group.token(connection, tag, index);
    let request = connection.request_mut(tag);
    if let Some(command) = request.command()
        && command.flags.digest
        && command.buffer.is_some()
        && !data_digest::fits_part(group, command, request.span(), &request.parts()[wide(index.0)])
    {
        group.give_back(&mut request.parts_mut()[wide(index.0)]);
        let event = RequestEvent::OfPart(index, PartEvent::Mismatched);
        if let Action::Finish(status) = request.step(event) {
            finish(connection, group, tag, CommandOutcome::of(status));
        }
        return;
    }
    let fua = request.command().is_some_and(|command| command.flags.fua);
    let placement = group.access.placement(request.span().volume);
    let in_store = matches!(placement, Some(Placement::Store));
    let part = &mut request.parts_mut()[wide(index.0)];
    let shard = part.shard();
    let event = match part.take_memory() {
        (Some(job), memory) if !in_store => {
            // Data for a null volume is dropped.
            if let Some(Placement::Memory(region)) = placement {
                let (arena, to) = (group.shard.slots().region(), wide(part.offset()));
                memory.each_run(0, part.len(), |run, begins| {
                    arena.copy_to(run.offset, region, to + wide(begins), wide(run.len));
                });
                group.stats.copied_bytes.add(u64::from(part.len()));
            }
            group.tell(shard, ShardRequest::Cancel { job, memory });
            RequestEvent::OfPart(index, PartEvent::WrittenNow)
        }
        (Some(job), memory) if shard != group.index => {
            group.tell(shard, ShardRequest::Write { from, job, memory, fua });
            RequestEvent::OfPart(index, PartEvent::WriteAsked)
        }
        (Some(job), memory) => {
            if group.shard.write(job, memory, fua) {
                RequestEvent::OfPart(index, PartEvent::WrittenNow)
            } else {
                RequestEvent::OfPart(index, PartEvent::WriteAsked)
            }
        }
        (None, _) => RequestEvent::OfPart(index, PartEvent::WrittenNow),
    };
    if let Action::Finish(status) = connection.request_mut(tag).step(event) {
        finish(connection, group, tag, CommandOutcome::of(status));
    }
}
