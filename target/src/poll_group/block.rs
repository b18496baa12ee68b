//! Block commands: from an admitted command to what it needs ([`Plan`]).

use std::sync::Arc;

use rblk_fabric::Region;
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{BlockRange, CommandCapsule, Opcode, Status};

use super::respond::finish;
use super::turn::Turn;
use super::{change, read, write, zeroing};
use crate::cache::{STRIPE_BYTES, shard_of};
use crate::connection::{Connection, Served};
use crate::read_ahead::ReadAhead;
use crate::request::{Event, Outcome, Payload, Span};
use crate::store::{OpKind, Store, VolumeIndex};
use crate::volume::{CacheMode, Placement, Volume};

/// How the ranges of a volume are cut into the parts of its shards. Pure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// The volume.
    pub(super) volume: VolumeIndex,
    // All of a range belongs to the shard that is asked.
    is_whole: bool,
    own: usize,
    groups: usize,
}

impl Cut {
    #[inline]
    fn of(volume: &Volume, own: usize, groups: usize) -> Self {
        let is_whole = groups == 1 || volume.cache == CacheMode::None;
        Self { volume: volume.index, is_whole, own, groups }
    }

    /// Where the first part of a range ends, and which shard has it.
    #[inline]
    pub(super) fn first(&self, from: u64, end: u64) -> (u64, usize) {
        if self.is_whole {
            return (end, self.own);
        }
        let stripe = (from / STRIPE_BYTES + 1) * STRIPE_BYTES;
        (end.min(stripe), shard_of(self.volume, from, self.groups))
    }

    /// Whether this group's own shard has all of a range.
    #[inline]
    pub(super) fn is_own(&self, span: Span) -> bool {
        let end = span.offset + span.len;
        self.first(span.offset, end) == (end, self.own)
    }
}

/// What a command needs.
enum Plan {
    /// No more than to be answered.
    Answer(Outcome),
    /// Its in-capsule data goes to a memory volume.
    CopyToMemory,
    /// Bytes of a store; and what its reader may want soon: first byte and bytes.
    Read(Cut, Option<(u64, u32)>),
    /// Data in its capsule for this group's own shard.
    WriteWhole,
    /// Data in parts, to a store.
    WriteParts(Cut),
    /// Data by RDMA READ to a memory volume, or to nowhere.
    WriteMemory,
    /// Everything written so far is made durable; the shards have dirty blocks.
    FlushCache,
    /// Everything written so far is made durable; no shard has dirty blocks.
    FlushStore,
    /// A discard or zeroing of a store; `true` where one shard has all of the range.
    Change(OpKind, Option<usize>),
    /// Zeroes for a memory volume.
    Zero(Arc<Region>),
}

/// Begins a block command that was admitted.
///
/// # Errors
/// A bug: the connection ends.
#[inline]
pub(super) fn start<S: Store>(
    connection: &mut Connection,
    turn: &mut Turn<S>,
    command: &CommandCapsule,
) -> Served {
    let (session, io_max) = (connection.params().session, connection.params().io_max_bytes);
    let reads_out = connection.params().reads_out;
    let (own, groups) = (turn.group, turn.groups());
    let checked = turn.exports.opened(session, command).and_then(|(volume, mode)| {
        let range = volume.check(command, mode, io_max)?;
        Ok((volume, range))
    });
    let tag = command.tag;
    let (volume, range) = match checked {
        Ok(checked) => checked,
        Err(status) => {
            finish(connection, turn, tag, Outcome::of(status));
            return Ok(());
        }
    };
    let (offset, len) = range.as_ref().map_or((0, 0), bytes_of);
    let span = Span { volume: volume.index, offset, len };
    let cut = Cut::of(volume, own, groups);
    let needs_reads = command.in_capsule_bytes == 0;
    let plan = match command.opcode {
        Opcode::Read => plan_read(volume, connection.read_ahead_mut(), cut, span),
        Opcode::Write if needs_reads && reads_out == 0 => {
            Plan::Answer(Outcome::of(Status::NotSupported))
        }
        Opcode::Write => plan_write(volume, cut, span, needs_reads),
        Opcode::Flush => plan_flush(volume),
        _ => plan_change(volume, command, cut, span, groups),
    };
    let _ = connection.request_mut(tag).step(Event::Checked(span));
    match plan {
        Plan::Answer(outcome) => finish(connection, turn, tag, outcome),
        Plan::CopyToMemory => write::copy_to_memory(connection, turn, tag, span),
        Plan::Read(cut, ahead) => return read::start(connection, turn, command, cut, ahead),
        Plan::WriteWhole => return write::whole(connection, turn, command, span),
        Plan::WriteParts(cut) => return write::parts(connection, turn, tag, cut),
        Plan::WriteMemory => return write::to_memory(connection, turn, tag, span),
        Plan::FlushCache => change::flush(connection, turn, tag),
        Plan::FlushStore => change::sync_now(connection, turn, tag),
        Plan::Change(kind, shard) => change::start(connection, turn, tag, kind, shard),
        Plan::Zero(region) => {
            let from = wide(span.offset);
            zeroing::start(connection, turn, tag, region, from..from + wide(span.len));
        }
    }
    Ok(())
}

#[inline]
fn bytes_of(range: &BlockRange) -> (u64, u64) {
    (range.offset_bytes(), range.len_bytes())
}

#[inline]
fn plan_read(volume: &Volume, streams: &mut ReadAhead, cut: Cut, span: Span) -> Plan {
    // Checked against the connection's largest I/O.
    let len = narrow(span.len);
    match volume.placement {
        Placement::Store => Plan::Read(cut, read_ahead(streams, volume, span, len)),
        Placement::Memory(_) => {
            let offset = wide(span.offset);
            Plan::Answer(Outcome::with(Payload::Memory { offset, len }))
        }
        Placement::Null => Plan::Answer(Outcome::with(Payload::Zeros { len })),
    }
}

#[inline]
fn plan_write(volume: &Volume, cut: Cut, span: Span, needs_reads: bool) -> Plan {
    match volume.placement {
        // Most writes that bring their data are of one part.
        Placement::Store if !needs_reads && cut.is_own(span) => Plan::WriteWhole,
        Placement::Store => Plan::WriteParts(cut),
        Placement::Memory(_) if !needs_reads => Plan::CopyToMemory,
        Placement::Null if !needs_reads => Plan::Answer(Outcome::OK),
        Placement::Memory(_) => Plan::WriteMemory,
        Placement::Null => Plan::WriteParts(cut),
    }
}

#[inline]
fn plan_flush(volume: &Volume) -> Plan {
    match (&volume.placement, volume.cache) {
        (Placement::Store, CacheMode::WriteBack) => Plan::FlushCache,
        (Placement::Store, _) => Plan::FlushStore,
        _ => Plan::Answer(Outcome::OK),
    }
}

fn plan_change(
    volume: &Volume,
    command: &CommandCapsule,
    cut: Cut,
    span: Span,
    groups: usize,
) -> Plan {
    let Span { offset, len, .. } = span;
    let kind = match (command.opcode, &volume.placement) {
        (_, Placement::Memory(region)) => return Plan::Zero(Arc::clone(region)),
        (Opcode::Discard, Placement::Store) if volume.discard => OpKind::Discard { offset, len },
        (Opcode::WriteZeroes, Placement::Store) => {
            OpKind::WriteZeroes { offset, len, may_unmap: command.flags.may_unmap }
        }
        _ => return Plan::Answer(Outcome::OK),
    };
    let one_stripe = offset / STRIPE_BYTES == (offset + len - 1) / STRIPE_BYTES;
    let shard = match volume.cache {
        CacheMode::None => Some(cut.own),
        _ if groups == 1 || one_stripe => Some(shard_of(volume.index, offset, groups)),
        _ => None,
    };
    Plan::Change(kind, shard)
}

/// What a reader of a cached volume may want soon: first byte and bytes.
#[inline]
fn read_ahead(
    streams: &mut ReadAhead,
    volume: &Volume,
    span: Span,
    len: u32,
) -> Option<(u64, u32)> {
    let max = volume.read_ahead_bytes;
    if volume.cache == CacheMode::None || max == 0 {
        return None;
    }
    let size = volume.blocks.bytes(volume.block_size).unwrap_or(0);
    streams.on_read(volume.index, span.offset, len, max, size)
}
