//! What is counted of block commands: when one begins, when it is answered, and when its
//! connection ends before that. By poll group, by connection and by volume.

use rblk_fabric::Micros;
use rblk_protocol::{ConnectionKind, Opcode, Status, Tag};

use super::cq_age::CqAge;
use super::slow::SlowIo;
use super::trace::TracedIo;
use super::turn::Turn;
use crate::connection::{Connection, ConnectionParams};
use crate::request::{Event, Request};
use crate::stats::Stats;
use crate::store::Store;
use crate::timing::Took;
use crate::traffic::{IoKind, IoStats, Stages};
use crate::volume_stats::VolumeStats;

/// A block command begins, for a volume that its session opened.
#[inline(always)]
pub(super) fn begin(
    request: &mut Request,
    io: &IoStats,
    volume: &VolumeStats,
    age: &mut CqAge,
    now: Micros,
) {
    request.timing().begin(now, age.get(now));
    io.begin();
    volume.io.begin();
}

/// A command is answered with this status: its answer is queued.
#[inline(always)]
pub(super) fn answered<S: Store>(
    connection: &mut Connection,
    turn: &Turn<S>,
    tag: Tag,
    status: Status,
) {
    let (params, request) = connection.of(tag);
    let Some(command) = request.command() else { return };
    if command.opcode == Opcode::Write && status == Status::Ok {
        let bytes = Stats::data_bytes(command);
        turn.stats.count_write(bytes, command.in_capsule_bytes > 0);
        record(params, request, turn, (IoKind::Write, bytes, false));
    } else {
        answered_otherwise(params, request, turn, status);
    }
}

/// A command that is no WRITE, or failed.
#[inline(never)]
fn answered_otherwise<S: Store>(
    params: &ConnectionParams,
    request: &mut Request,
    turn: &Turn<S>,
    status: Status,
) {
    let Some(command) = request.command() else { return };
    let (kind, bytes) = (IoKind::of(command.opcode), Stats::data_bytes(command));
    turn.stats.count(command, bytes, status);
    if let Some(kind) = kind {
        record(params, request, turn, (kind, bytes, status != Status::Ok));
    }
}

/// A READ is answered well: its answer is queued. Its state says so from now on.
#[inline(always)]
pub(super) fn answered_read<S: Store>(connection: &mut Connection, turn: &Turn<S>, tag: Tag) {
    let (params, request) = connection.of(tag);
    let _ = request.step(Event::Answered);
    let bytes = request.span().len;
    turn.stats.count_read(bytes);
    record(params, request, turn, (IoKind::Read, bytes, false));
}

#[inline(always)]
fn record<S: Store>(
    params: &ConnectionParams,
    request: &mut Request,
    turn: &Turn<S>,
    (kind, bytes, failed): (IoKind, u64, bool),
) {
    let Some(took) = request.timing().end(turn.us) else {
        return params.io.refused(kind, bytes);
    };
    params.io.answered(kind, bytes, failed);
    let Some(volume) = turn.access.stats(request.span().volume) else { return };
    volume.io.answered(kind, bytes, failed);
    match took {
        Took::OneTurn(queue) => volume.latency.record_one_turn(kind, queue),
        Took::Longer(stages) => {
            volume.latency.record(kind, &stages);
            if turn.slow.is_slow(stages.total()) {
                note_slow(params, request, turn, (stages, failed));
            }
        }
    }
}

#[cold]
fn note_slow<S: Store>(
    params: &ConnectionParams,
    request: &Request,
    turn: &Turn<S>,
    (stages, failed): (Stages, bool),
) {
    let Some(opcode) = request.opcode() else { return };
    let (volume, session) = (request.span().volume, params.session);
    let total = stages.total();
    if let Some(ring) = turn.slow.ring_for(volume, total) {
        let queue = match params.kind {
            ConnectionKind::Io { queue } => queue,
            ConnectionKind::Admin => 0,
        };
        let (at, group) = (turn.now, turn.group);
        let io = TracedIo { at, group, session, queue, opcode, offset: 0, len: 0, failed, stages };
        ring.push(io.of(request.span()));
    }
    turn.slow.note(SlowIo { volume, session, opcode, total, stages, others: 0 });
}

/// A connection ends: nothing of it is in flight any more.
#[cold]
pub(super) fn abandon<S: Store>(connection: &mut Connection, turn: &Turn<S>) {
    for index in 0..connection.requests().len() {
        let tag = Tag(rblk_protocol::width::narrow(index));
        let (params, request) = connection.of(tag);
        if request.timing().end(turn.us).is_none() {
            continue;
        }
        params.io.abandoned();
        if let Some(volume) = turn.access.stats(request.span().volume) {
            volume.io.abandoned();
        }
    }
}
