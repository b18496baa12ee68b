//! Block commands: from an admitted command to the steps for its opcode and its volume.

use std::sync::Arc;

use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{AccessMode, CommandCapsule, Features, Opcode, Status, Tag};
use rblk_runtime::Micros;

use super::cut::Cut;
use super::data_digest;
use super::respond::{acknowledge, finish};
use super::{read, write};
use crate::cache::{STRIPE_BYTES, shard_of};
use crate::data::connection::{Connection, Served, Violation};
use crate::data::poll_group::access::AccessTable;
use crate::data::poll_group::command::{counting, without_data};
use crate::data::poll_group::group_state::GroupState;
use crate::data::poll_group::held::Held;
use crate::data::poll_group::over_limit;
use crate::data::poll_group::over_limit::Delayed;
use crate::data::read_ahead::ReadAhead;
use crate::data::request::{Action, CommandOutcome, Payload, RequestEvent, Span};
use crate::store::{OpKind, Store};
use crate::volume::{CacheMode, Placement, Volume};

/// Starts an admitted block command, or lets it wait for a limit. Out of line, so that this
/// function and the loop over the message do not compete for registers.
///
/// # Errors
/// A bug: the connection ends.
#[inline(never)]
pub(in crate::data::poll_group) fn admit_by_limits<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Served {
    if group.access.has_limits() {
        return start_limited(connection, group, tag);
    }
    check_and_dispatch(connection, group, tag)
}

/// [`admit_by_limits`] where some volume or host has limits. Out of line, with a second lookup of
/// the volume, so that a target without limits pays one test per command.
#[inline(never)]
fn start_limited<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Served {
    let (command, came) = (*connection.command(tag)?, group.time.us);
    if is_delayed(connection, group, &command, came) {
        return Ok(());
    }
    begin_cold(connection, group, tag)
}

/// Whether a command, which arrived at `came`, must wait for a limit. If so, it is now in its line.
fn is_delayed<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    command: &CommandCapsule,
    came: Micros,
) -> bool {
    let Ok((volume, _, span)) = allowed(connection, &group.access, command) else { return false };
    let host = group.access.host_limits(connection.params().session);
    if volume.limits.is_none() && host.is_none() {
        return false;
    }
    let (times, limits) = ((came, group.time.us), (volume, host));
    if !over_limit::must_wait(&mut group.later.waiting, connection, (command, span), limits, times)
    {
        return false;
    }
    group.rare = true;
    over_limit::count_delayed(group.access.stats(span.volume));
    true
}

/// Starts a command after its wait for a limit. If the writes of its volume are held, it waits on.
///
/// # Errors
/// A bug: the connection ends.
#[inline(never)]
pub(in crate::data::poll_group) fn start_delayed<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    delayed: Delayed,
) -> Served {
    let request = connection.request_mut(delayed.tag);
    if request.step(RequestEvent::MayBegin) != Action::Begin {
        return Err(Violation("a command waited for a limit and was answered"));
    }
    let command = *connection.command(delayed.tag)?;
    let allowed = allowed(connection, &group.access, &command).map(|(_, _, span)| span.volume);
    let is_held =
        allowed == Err(Status::ReadOnly) && hold(connection, group, &command, delayed.came, true);
    if is_held || allowed.is_ok() {
        let volume = connection.request(delayed.tag).span().volume;
        let waited_us = group.time.us.since(delayed.since);
        over_limit::count_waited(group.access.stats(volume), waited_us);
    }
    if is_held {
        return Ok(());
    }
    begin_kept(connection, group, delayed.tag, delayed.came)
}

/// Starts a write after a hold; a limit may still delay it. Has no effect if its connection ended.
///
/// # Errors
/// A bug: the connection ends.
#[inline(never)]
pub(in crate::data::poll_group) fn start_held<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    held: Held,
) -> Served {
    let request = connection.request_mut(held.tag);
    if request.step(RequestEvent::MayBegin) != Action::Begin {
        return Ok(());
    }
    let command = *connection.command(held.tag)?;
    group.io = true;
    if !held.is_let_in && is_delayed(connection, group, &command, held.came) {
        return Ok(());
    }
    begin_kept(connection, group, held.tag, held.came)
}

/// Lets a command wait, if the writes of its volume are held. The command arrived at `came`; with
/// `is_let_in` its limits have let it pass. Returns whether it waits.
#[cold]
fn hold<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    command: &CommandCapsule,
    came: Micros,
    is_let_in: bool,
) -> bool {
    let volume = Volume::index_of(command.volume).and_then(|index| group.access.volume(index));
    let Some(volume) = volume.filter(|_| group.later.held.holds(command)) else { return false };
    group.later.held.keep(connection, (command, volume), came, is_let_in);
    true
}

/// Lets a command wait, if the store of its volume is silent. Returns whether it waits.
#[cold]
fn keep_for_silence<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    command: &CommandCapsule,
    came: Micros,
) -> bool {
    let index = Volume::index_of(command.volume).filter(|index| group.access.is_silent(*index));
    let Some(volume) = index.and_then(|index| group.access.volume(index)) else { return false };
    group.later.silence.keep(connection, (command, volume), came);
    true
}

/// The volume, the access and the bytes of a command, if its volume and its session allow it.
///
/// # Errors
/// The status for the command's response.
#[inline(always)]
fn allowed<'a>(
    connection: &Connection,
    access: &'a AccessTable,
    command: &CommandCapsule,
) -> Result<(&'a Volume, AccessMode, Span), Status> {
    let params = connection.params();
    let (volume, mode) = access.opened(params.session, command)?;
    let range = volume.check(command, mode, params.io_max_bytes)?;
    let (offset, len) = range.map_or((0, 0), |range| (range.offset_bytes(), range.len_bytes()));
    Ok((volume, mode, Span { volume: volume.index, offset, len }))
}

/// Starts a command that was kept since it arrived.
#[cold]
#[inline(never)]
fn begin_kept<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    came: Micros,
) -> Served {
    group.time.cq_age.kept(came, group.time.us);
    begin_cold(connection, group, tag)?;
    counting::kept_began(connection, group, tag, came);
    Ok(())
}

/// [`check_and_dispatch`], out of line: one copy for all commands that [`admit_by_limits`] does not
/// start itself.
#[inline(never)]
fn begin_cold<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Served {
    check_and_dispatch(connection, group, tag)
}

/// Checks a command and takes the first step for its opcode and its volume, without regard to
/// limits.
#[inline(always)]
fn check_and_dispatch<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) -> Served {
    let command = connection.command(tag)?;
    let (volume, mode, span) = match allowed(connection, &group.access, command) {
        Ok(allowed) => allowed,
        Err(status) => return refuse(connection, group, tag, status),
    };
    let (opcode, has_digest) = (command.opcode, command.flags.digest);
    let has_data = command.in_capsule_bytes > 0;
    connection.request_mut(tag).names(span);
    let is_stored_read = opcode == Opcode::Read && matches!(volume.placement, Placement::Store);
    // A READ of a store works as without digests, until its data is sent.
    if has_digest && !is_stored_read {
        let in_memory = matches!(volume.placement, Placement::Memory(_));
        let digested = check_digest(connection, group, tag, in_memory)?;
        if digested != Digested::AsWithout {
            return start_digested(connection, group, tag, digested);
        }
    }
    match (opcode, &volume.placement) {
        (Opcode::Read, Placement::Store) => {
            let ahead = read_ahead(connection.read_ahead_mut(), volume, span);
            let cut = Cut::of(volume, group.index, group.groups());
            return read::start(connection, group, tag, cut, ahead);
        }
        (Opcode::Read, Placement::Memory(_)) if read::send_memory(connection, group, tag)? => {
            return Ok(());
        }
        // Most writes with in-capsule data have one part.
        (Opcode::Write, Placement::Store)
            if has_data && Cut::of(volume, group.index, group.groups()).is_own(span) =>
        {
            return write::whole(connection, group, tag);
        }
        (Opcode::Write, Placement::Memory(region)) if has_data => {
            write::copy_in(connection, &group.stats, tag, region, wide(span.offset));
            acknowledge(connection, group, tag);
            return Ok(());
        }
        _ => {}
    }
    let cut = Cut::of(volume, group.index, group.groups());
    start_other(connection, group, tag, cut, mode)
}

/// Answers a command that its volume, or its session's access mode, does not allow.
#[cold]
#[inline(never)]
fn refuse<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    status: Status,
) -> Served {
    let (command, came) = (*connection.command(tag)?, group.time.us);
    if group.access.is_changing(connection.params().session, &command) {
        return Err(Violation::VOLUME_CHANGES);
    }
    if status == Status::VolumeGone && keep_for_silence(connection, group, &command, came) {
        return Ok(());
    }
    if status == Status::ReadOnly && hold(connection, group, &command, came, false) {
        return Ok(());
    }
    finish(connection, group, tag, CommandOutcome::of(status));
    Ok(())
}

/// Starts a less frequent command. Out of line, like [`start_rare`], so that the frequent commands
/// get the registers.
#[inline(never)]
fn start_other<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    cut: Cut,
    mode: AccessMode,
) -> Served {
    counting::begin(connection, group, tag);
    let (span, reads_out) = (connection.request(tag).span(), connection.params().reads_out);
    let is_encrypted = connection.params().features.has(Features::ENCRYPT);
    let Some(placement) = group.access.placement(span.volume) else {
        return Err(Violation("a command without its volume"));
    };
    let command = connection.command(tag)?;
    let has_data = command.in_capsule_bytes > 0;
    let outcome = match (command.opcode, placement) {
        (Opcode::Read, Placement::Memory(_)) => CommandOutcome::with(Payload::Memory {
            offset: wide(span.offset),
            len: narrow(span.len),
        }),
        (Opcode::Read, Placement::Null) => {
            CommandOutcome::with(Payload::Zeros { len: narrow(span.len) })
        }
        (Opcode::Write, _) if !has_data && reads_out == 0 => {
            CommandOutcome::of(Status::NotSupported)
        }
        (Opcode::Write, Placement::Null) if has_data => CommandOutcome::OK,
        // The kernel may decrypt a record of a stream into its place before it has authenticated
        // the record, and others can read this place.
        (Opcode::Write, Placement::Memory(_)) if is_encrypted => {
            let cut = Cut::own(span.volume, group.index, group.groups());
            return write::parts(connection, group, tag, cut);
        }
        (Opcode::Write, Placement::Memory(_)) => {
            return write::to_memory(connection, group, tag, span);
        }
        (Opcode::Write, _) => return write::parts(connection, group, tag, cut),
        // A session with read-only access has no writes to make durable, and must not keep the
        // store busy. A volume that was made read-only may have earlier writes.
        (Opcode::Flush, _) if mode == AccessMode::ReadOnly => CommandOutcome::OK,
        _ => return start_rare(connection, group, tag, cut),
    };
    finish(connection, group, tag, outcome);
    Ok(())
}

/// The effect of digests on a command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Digested {
    /// No effect.
    AsWithout,
    /// Its data differs from the data that was sent.
    Mismatch,
    /// Its data goes through memory of this group's own shard: others may write a memory volume
    /// between the CRC and the WRITE, or read it between the READ and the CRC.
    ByCopy,
}

/// Checks the in-capsule data of a command with digests.
#[cold]
#[inline(never)]
fn check_digest<S: Store>(
    connection: &Connection,
    group: &GroupState<S>,
    tag: Tag,
    in_memory: bool,
) -> Result<Digested, Violation> {
    let request = connection.request(tag);
    let Some(command) = request.command() else {
        return Err(Violation("a request without its command"));
    };
    Ok(match (command.opcode, request.data()) {
        (Opcode::Write, Some(data)) => {
            let (own, at) = connection.place_of_data(data);
            let fits = data_digest::fits_capsule(group, command, request.span(), (own, at));
            if fits { Digested::AsWithout } else { Digested::Mismatch }
        }
        (Opcode::Write, None) if in_memory && connection.params().reads_out > 0 => Digested::ByCopy,
        (Opcode::Read, _) if in_memory => Digested::ByCopy,
        _ => Digested::AsWithout,
    })
}

/// Starts a command on which digests have an effect.
#[cold]
#[inline(never)]
fn start_digested<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    digested: Digested,
) -> Served {
    counting::begin(connection, group, tag);
    if digested == Digested::Mismatch {
        finish(connection, group, tag, CommandOutcome::of(Status::DigestMismatch));
        return Ok(());
    }
    let cut = Cut::own(connection.request(tag).span().volume, group.index, group.groups());
    match connection.command(tag)?.opcode {
        Opcode::Read => write::copy_of_read(connection, group, tag, cut),
        _ => write::parts(connection, group, tag, cut),
    }
}

/// Starts a FLUSH, DISCARD or WRITE_ZEROES.
#[inline(never)]
fn start_rare<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    cut: Cut,
) -> Served {
    let (Span { offset, len, .. }, command) =
        (connection.request(tag).span(), *connection.command(tag)?);
    let Some(volume) = group.access.volume(cut.volume) else {
        return Err(Violation("a command without its volume"));
    };
    let kind = match (command.opcode, &volume.placement) {
        (Opcode::Flush, Placement::Store) if volume.cache == CacheMode::WriteBack => {
            without_data::flush(connection, group, tag);
            return Ok(());
        }
        (Opcode::Flush, Placement::Store) => {
            without_data::sync_now(connection, group, tag);
            return Ok(());
        }
        (Opcode::Discard | Opcode::WriteZeroes, Placement::Memory(region)) => {
            let (region, from) = (Arc::clone(region), wide(offset));
            without_data::zero(connection, group, tag, region, from..from + wide(len));
            return Ok(());
        }
        (Opcode::Discard, Placement::Store) if volume.discard => OpKind::Discard { offset, len },
        (Opcode::WriteZeroes, Placement::Store) => {
            OpKind::WriteZeroes { offset, len, may_unmap: command.flags.may_unmap }
        }
        _ => {
            finish(connection, group, tag, CommandOutcome::OK);
            return Ok(());
        }
    };
    let one_stripe = offset / STRIPE_BYTES == (offset + len - 1) / STRIPE_BYTES;
    let shard = match volume.cache {
        CacheMode::None => Some(cut.own),
        _ if cut.groups == 1 || one_stripe => Some(shard_of(volume.index, offset, cut.groups)),
        _ => None,
    };
    without_data::start(connection, group, tag, kind, shard);
    Ok(())
}

/// The range that a reader of a cached volume may want soon: first byte and bytes.
#[inline]
fn read_ahead(streams: &mut ReadAhead, volume: &Volume, span: Span) -> Option<(u64, u32)> {
    let max = volume.read_ahead_bytes;
    if volume.cache == CacheMode::None || max == 0 {
        return None;
    }
    let size = volume.blocks.bytes(volume.block_size).unwrap_or(0);
    streams.on_read(volume.index, span.offset, narrow(span.len), max, size)
}
