//! READs of stores: the requests to the shards, and the data that goes back to the initiator.
//!
//! A READ that this group's own shard has in memory is answered with one WR, without parts. Other
//! READs are cut into parts; each part is sent when its shard has lent its bytes, so its memory is
//! freed without a wait for other parts. The last WR carries the answer.

use rblk_fabric::{MAX_SGE, MemoryRegion, RemoteBuffer, Rkey, Sge, SgeList};
use rblk_protocol::digest::crc32c;
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{Immediate, KeyedDescriptor, Tag};

use super::cut::Cut;
use super::data_digest;
use super::respond::{finish, memory_volume, read_answered};
use crate::cache::{Hit, STRIPE_BYTES, Segments, ShardRequest, shard_of};
use crate::data::connection::{Connection, Served, Violation};
use crate::data::parts::{Part, PartIndex, PartState};
use crate::data::poll_group::command::{counting, send_barrier};
use crate::data::poll_group::group_state::GroupState;
use crate::data::request::{Action, CommandOutcome, PartEvent, RequestEvent, Span};
use crate::store::{Segment, Store};
use crate::volume::Placement;
use crate::volume::ids::VolumeIndex;

/// Starts a READ of a store, and reads `ahead` (first byte and bytes) of its reader. A READ that is
/// not answered at once starts to wait.
///
/// # Errors
/// A bug: the connection ends.
#[inline(always)]
pub(in crate::data::poll_group) fn start<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    cut: Cut,
    ahead: Option<(u64, u32)>,
) -> Served {
    if connection.command(tag)?.in_capsule_bytes > 0 {
        // A READ does not use in-capsule data.
        connection.release_data(tag);
    }
    let (session, span) = (connection.params().session, connection.request(tag).span());
    // Most reads have one part, which is in memory.
    let hit = if cut.is_own(span) {
        group.shard.lend_hit(session, span.volume, span.offset, narrow(span.len))
    } else {
        None
    };
    match hit {
        Some(Hit::One(run)) => {
            send_whole(connection, group, tag, run, Segments::one(session, run))?;
        }
        Some(Hit::More(memory)) => send_blocks(connection, group, tag, memory)?,
        None => {
            counting::begin(connection, group, tag);
            ask_parts(connection, group, tag, cut)?;
        }
    }
    if let Some((from, bytes)) = ahead {
        prefetch(group, span.volume, from, bytes);
    }
    Ok(())
}

/// Answers a READ of a memory volume by one WR, if the answer rides on the data. False: the READ
/// must be answered like other commands.
#[inline(always)]
pub(in crate::data::poll_group) fn send_memory<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    tag: Tag,
) -> Result<bool, Violation> {
    let (command, span) = (connection.command(tag)?, connection.request(tag).span());
    let memory = group.pollers[connection.poller()].memory.as_ref();
    let region = memory.and_then(|memory| memory_volume(memory, span.volume));
    if command.in_capsule_bytes == 0
        && connection.bounce().is_none()
        && connection.has_immediates()
        && connection.sends().may_take(1)
        && let Some(buffer) = command.buffer
        && let Some(sge) = region.and_then(|region| region.sge(wide(span.offset), narrow(span.len)))
    {
        let sequence = command.sequence;
        let remote = RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) };
        let immediate = Some(Immediate::new(tag, sequence));
        connection.sends_mut().queue_write(tag, &SgeList::one(sge), remote, immediate, false);
        read_answered(connection, group, (tag, sequence), true);
        return Ok(true);
    }
    Ok(false)
}

/// Sends the blocks of a READ, for which this group's own shard has lent `memory`.
#[inline(never)]
fn send_blocks<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    memory: Segments,
) -> Served {
    match *memory.as_slice() {
        [run] => send_whole(connection, group, tag, run, memory),
        _ => send_as_part(connection, group, tag, memory),
    }
}

/// Sends the whole data of a READ, which this group's own shard has lent in one run: by one WR, if
/// no other command waits for send credits; else as a part.
#[inline(always)]
fn send_whole<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    run: Segment,
    memory: Segments,
) -> Served {
    let request = connection.request(tag);
    if let Some(command) = request.command()
        && let (Some(buffer), digest) = (command.buffer, command.flags.digest)
        && u64::from(run.len) == request.span().len
        && connection.has_immediates()
        && connection.sends().may_take(1)
        && let Some(sge) = group.arena(connection).and_then(|arena| arena.sge(run.offset, run.len))
    {
        let remote = RemoteBuffer { addr: buffer.address, rkey: Rkey(buffer.rkey) };
        let sequence = command.sequence;
        let at = if digest {
            queue_with_trailer(connection, group, (tag, sge, run), remote)?
        } else {
            let immediate = Some(Immediate::new(tag, sequence));
            connection.queue_lent(tag, &SgeList::one(sge), remote, immediate, true)
        };
        connection.pin(at, narrow(group.index), memory, buffer.length);
        read_answered(connection, group, (tag, sequence), true);
        send_barrier::ask_if_much(connection);
        return Ok(());
    }
    send_as_part(connection, group, tag, memory)
}

/// Sends the whole data of a READ as a part.
#[inline(never)]
fn send_as_part<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    memory: Segments,
) -> Served {
    counting::begin(connection, group, tag);
    let request = connection.request_mut(tag);
    let span = request.span();
    let part = Part::new(group.index, span.offset, 0, narrow(span.len));
    let _ = request.step(RequestEvent::Part(part));
    let _ = request.step(RequestEvent::OfPart(PartIndex::FIRST, PartEvent::Hit(memory)));
    send_parts(connection, group, tag)
}

/// Queues the WRITE of the whole data of a READ, which is in one run, and of its trailer. Returns
/// its position.
#[cold]
#[inline(never)]
fn queue_with_trailer<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    (tag, data, run): (Tag, Sge, Segment),
    remote: RemoteBuffer,
) -> Result<u64, Violation> {
    let command = connection.command(tag)?;
    let immediate = Some(Immediate::new(tag, command.sequence));
    let crc = group.shard.slots().region().sum(run.offset, wide(run.len), crc32c);
    let sges = SgeList::two(data, connection.memory().write_trailer(command, crc));
    Ok(connection.queue_lent(tag, &sges, remote, immediate, true))
}

/// Cuts a READ into parts, and asks the shard of each. Parts that this group's own shard has in
/// memory need no request.
#[inline(never)]
fn ask_parts<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    cut: Cut,
) -> Served {
    let span = connection.request(tag).span();
    if cut.is_own(span) {
        // The lookup for a part that is the whole READ has already failed.
        let request = connection.request_mut(tag);
        let part = Part::new(group.index, span.offset, 0, narrow(span.len));
        let _ = request.step(RequestEvent::Part(part));
        let _ = request.step(RequestEvent::Asked);
        let from = group.token(connection, tag, PartIndex::FIRST);
        group.shard.read_missed(from, span.volume, span.offset, narrow(span.len));
        return Ok(());
    }
    split(connection, tag, cut);
    let session = connection.params().session;
    let mut hits = false;
    for at in 0..connection.request(tag).parts().len() {
        let index = PartIndex(narrow(at));
        let part = &connection.request(tag).parts()[at];
        let (shard, offset, len) = (part.shard(), part.offset(), part.len());
        if shard == group.index
            && let Some(hit) = group.shard.lend_hit(session, cut.volume, offset, len)
        {
            let memory = hit.into_segments(session);
            let _ = connection
                .request_mut(tag)
                .step(RequestEvent::OfPart(index, PartEvent::Hit(memory)));
            hits = true;
        } else {
            let from = group.token(connection, tag, index);
            let read = ShardRequest::Read { from, volume: cut.volume, offset, len };
            group.ask(connection, tag, shard, read);
        }
    }
    if hits { send_parts(connection, group, tag) } else { Ok(()) }
}

/// The memory for the copy was reserved.
///
/// # Errors
/// A bug: the connection ends.
pub(in crate::data::poll_group) fn send_copy<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    index: PartIndex,
) -> Served {
    let request = connection.request_mut(tag);
    let Some(Placement::Memory(region)) = group.access.placement(request.span().volume) else {
        return Err(Violation("a copy of what is not in memory"));
    };
    let part = &mut request.parts_mut()[wide(index.0)];
    let (arena, from) = (group.shard.slots().region(), wide(part.offset()));
    part.memory().each_run(0, part.len(), |run, begins| {
        region.copy_to(from + wide(begins), arena, run.offset, wide(run.len));
    });
    group.stats.copied_bytes.add(u64::from(part.len()));
    let (Some(job), memory) = part.take_memory() else {
        return Err(Violation("a copy without memory"));
    };
    group.shard.lend_reserved(job);
    let _ = request.step(RequestEvent::OfPart(index, PartEvent::Hit(memory)));
    send_parts(connection, group, tag)
}

/// Cuts the range of a command into the parts of its shards.
pub(in crate::data::poll_group) fn split(connection: &mut Connection, tag: Tag, cut: Cut) {
    let request = connection.request_mut(tag);
    let span = request.span();
    let (mut from, end) = (span.offset, span.offset + span.len);
    while from < end {
        let (to, shard) = cut.first(from, end);
        let part = Part::new(shard, from, narrow(from - span.offset), narrow(to - from));
        let _ = request.step(RequestEvent::Part(part));
        from = to;
    }
}

/// Asks the shards to read a range ahead.
#[inline(never)]
fn prefetch<S: Store>(group: &mut GroupState<S>, volume: VolumeIndex, mut from: u64, bytes: u32) {
    let end = from + u64::from(bytes);
    while from < end {
        let to = end.min((from / STRIPE_BYTES + 1) * STRIPE_BYTES);
        let shard = shard_of(volume, from, group.groups());
        group.tell(shard, ShardRequest::Prefetch { volume, offset: from, len: narrow(to - from) });
        from = to;
    }
}

/// Sends the available parts of a READ, unless other commands wait for send credits: no command
/// overtakes them.
///
/// # Errors
/// A bug: the connection ends.
pub(in crate::data::poll_group) fn send_parts<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Served {
    if !connection.request(tag).awaits_parts() {
        return Ok(());
    }
    if connection.sends_mut().waits_behind_others(tag) {
        note_ready(connection, group, tag);
        return Ok(());
    }
    continue_parts(connection, group, tag)
}

/// Sends the available parts of a READ, as far as send credits allow.
///
/// # Errors
/// A bug: the connection ends.
pub(in crate::data::poll_group) fn continue_parts<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Served {
    while send_part(connection, group, tag)? {}
    send_barrier::ask_if_much(connection);
    let request = connection.request(tag);
    if request.has_failed() && request.awaits_parts() && request.next_to_send().is_none() {
        let status = request.outcome().status;
        finish(connection, group, tag, CommandOutcome::of(status));
    }
    Ok(())
}

/// A READ waits for send credits. If all its parts are available, it waits for nothing else.
#[cold]
fn note_ready<S: Store>(connection: &mut Connection, group: &GroupState<S>, tag: Tag) {
    let request = connection.request_mut(tag);
    if !request.has_shards() {
        request.timing().awaits_credits(group.time.us);
    }
}

/// Queues one WR of the first available part, or lets it wait for send credits or for room to send
/// from. False: no more can be sent now.
#[inline]
fn send_part<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Result<bool, Violation> {
    let request = connection.request(tag);
    let Some((index, is_last)) = request.next_to_send() else { return Ok(false) };
    let part = &request.parts()[wide(index.0)];
    let mut sges = SgeList::default();
    // The trailer takes the place of a run.
    let digests = connection.has_digests();
    let most = connection.params().send_sges - u32::from(digests);
    let bytes = match group.arena(connection) {
        Some(arena) => gather(part, arena, most, &mut sges),
        None => Some(part.len()),
    };
    let (Some(bytes), Some(command)) = (bytes, request.command()) else {
        return Err(Violation("a read without memory"));
    };
    let (Some(buffer), sequence) = (command.buffer, command.sequence) else {
        return Err(Violation("a read without a buffer"));
    };
    let remote = RemoteBuffer {
        addr: buffer.address + u64::from(part.at() + part.posted()),
        rkey: Rkey(buffer.rkey),
    };
    let ends_part = part.posted() + bytes == part.len();
    let answers = is_last && ends_part;
    let with_immediate = answers && connection.has_immediates();
    let apart = digests && answers && goes_apart(part, request.span());
    let mut needed = 1 + u64::from(apart);
    if answers && !with_immediate {
        needed += connection.sends().response_needs();
    }
    if connection.sends().free() < needed || !connection.may_prepare(bytes) {
        group.stats.send_credit_waits.add(1);
        note_ready(connection, group, tag);
        connection.sends_mut().keep_waiting_first(tag);
        return Ok(false);
    }
    if connection.bounce().is_some() {
        let copied = copy_out(connection, group, tag, index, &mut sges);
        copied.ok_or(Violation("a read without memory"))?;
    }
    if digests {
        sum_part(connection, group, tag, index);
        if answers && !apart {
            // The list has room: `gather` left one entry free.
            let _ = sges.push(trailer(connection, tag)?);
        }
    }
    let immediate = with_immediate.then(|| Immediate::new(tag, sequence));
    let with_data = if apart { None } else { immediate };
    let at = connection.queue_lent(tag, &sges, remote, with_data, ends_part);
    connection.prepared_is_sent(at);
    let request = connection.request_mut(tag);
    if request.step(RequestEvent::OfPart(index, PartEvent::Sent(bytes))) == Action::Pin {
        keep_sent(connection, group, tag, index, at);
    }
    if apart {
        queue_trailer(connection, tag, buffer, immediate)?;
    }
    if answers {
        read_answered(connection, group, (tag, sequence), with_immediate);
    }
    Ok(!answers)
}

/// A part was sent completely, by the WRITE at position `at` or before: keeps its memory until the
/// peer has the bytes, unless they were sent from a copy.
#[inline]
fn keep_sent<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    index: PartIndex,
    at: u64,
) {
    let part = &mut connection.request_mut(tag).parts_mut()[wide(index.0)];
    let (shard, len, (_, memory)) = (part.shard(), part.len(), part.take_memory());
    if connection.bounce().is_some() {
        group.release(shard, memory);
    } else {
        connection.pin(at, narrow(shard), memory, len);
    }
}

/// Copies a whole part to the memory from which the connection sends (iWARP).
#[cold]
fn copy_out<S: Store>(
    connection: &Connection,
    group: &GroupState<S>,
    tag: Tag,
    index: PartIndex,
    sges: &mut SgeList,
) -> Option<()> {
    let part = &connection.request(tag).parts()[wide(index.0)];
    let bounce = connection.bounce()?;
    let (to, at) = bounce.prepared()?;
    let arena = group.shard.slots().region();
    part.memory().each_run(0, part.len(), |run, begins| {
        arena.copy_to(run.offset, to, at + wide(begins), wide(run.len));
    });
    group.stats.copied_bytes.add(u64::from(part.len()));
    sges.push(bounce.prepared_sge(part.len())?).then_some(())
}

/// Whether the trailer of a READ needs its own WRITE, if this part is the last to be sent. Parts
/// are sent in any order, and the trailer follows the data.
#[cold]
#[inline(never)]
fn goes_apart(part: &Part, span: Span) -> bool {
    part.at() + part.len() != narrow::<u32, _>(span.len)
}

/// Computes the CRC of a part before its first bytes are sent.
#[cold]
#[inline(never)]
fn sum_part<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    tag: Tag,
    index: PartIndex,
) {
    let part = &mut connection.request_mut(tag).parts_mut()[wide(index.0)];
    if part.posted() == 0 {
        let crc = data_digest::sum(part.memory(), group.shard.slots().region(), 0, part.len());
        part.set_crc(crc);
    }
}

/// The trailer of a READ after all its parts have their CRCs.
#[cold]
#[inline(never)]
fn trailer(connection: &Connection, tag: Tag) -> Result<Sge, Violation> {
    let command = connection.request(tag).command();
    let command = command.ok_or(Violation("a trailer without a command"))?;
    Ok(connection.memory().write_trailer(command, data_digest::whole(connection, tag)))
}

/// Queues the WRITE of a separate trailer.
#[cold]
#[inline(never)]
fn queue_trailer(
    connection: &mut Connection,
    tag: Tag,
    buffer: KeyedDescriptor,
    immediate: Option<Immediate>,
) -> Served {
    let sges = SgeList::one(trailer(connection, tag)?);
    let addr = buffer.address + connection.request(tag).span().len;
    let remote = RemoteBuffer { addr, rkey: Rkey(buffer.rkey) };
    connection.sends_mut().queue_write(tag, &sges, remote, immediate, false);
    Ok(())
}

/// Gathers the data of a part's next WRITE, at most `most` runs. Returns its bytes.
#[inline]
fn gather(part: &Part, arena: &MemoryRegion, most: u32, sges: &mut SgeList) -> Option<u32> {
    debug_assert!(part.state() == PartState::AwaitsSend);
    if let [run] = part.memory().as_slice()
        && (part.posted(), run.len) == (0, part.len())
    {
        // Most answers have one run.
        return sges.push(arena.sge(run.offset, run.len)?).then_some(run.len);
    }
    let most = wide(most).clamp(1, MAX_SGE);
    let (mut count, mut bytes, mut inside) = (0, 0, true);
    part.memory().each_run(part.posted(), part.len(), |run, _| {
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
