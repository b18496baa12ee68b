//! What is counted of block commands: when one begins, when it is answered, and when its
//! connection ends before that. By poll group, by connection and by volume.

use rblk_fabric::turn_clock::TurnTimes;
use rblk_protocol::limits::READ_TRAILER_BYTES;
use rblk_protocol::width::wide64;
use rblk_protocol::{CommandCapsule, Opcode, Status};

use super::slow::SlowIo;
use super::turn::Turn;
use crate::connection::Connection;
use crate::request::Request;
use crate::store::Store;
use crate::traffic::{IoStats, Stages, VolumeLatency};
use crate::volume_stats::VolumeStats;

/// A block command begins, for a volume that its session opened.
#[inline(always)]
pub(super) fn begin(request: &mut Request, io: &IoStats, volume: &VolumeStats, times: TurnTimes) {
    request.timing().begin(times);
    io.in_flight.add(1);
    volume.io.in_flight.add(1);
}

/// A command is answered with this status: its answer is queued.
#[inline(always)]
pub(super) fn answered<S: Store>(
    connection: &mut Connection,
    turn: &Turn<S>,
    command: &CommandCapsule,
    status: Status,
) {
    turn.stats.count(command, status);
    if !command.opcode.is_block() {
        return;
    }
    let (io, request) = connection.io_of(command.tag);
    count(io, command, status);
    let Some(found) = request.timing().end() else { return };
    io.in_flight.sub(1);
    let Some(volume) = turn.access.stats(request.span().volume) else { return };
    count(&volume.io, command, status);
    volume.io.in_flight.sub(1);
    if let Some((total, stages)) =
        record(&volume.latency, command.opcode, request, found, turn.times)
        && turn.slow.is_slow(total)
    {
        let (volume, session) = (request.span().volume, connection.params().session);
        turn.slow.note(SlowIo {
            volume,
            session,
            opcode: command.opcode,
            total,
            stages,
            others: 0,
        });
    }
}

/// A connection ends: nothing of it is in flight any more.
#[cold]
pub(super) fn abandon<S: Store>(connection: &mut Connection, turn: &Turn<S>) {
    for request in connection.requests_mut() {
        if request.timing().end().is_some()
            && let Some(volume) = turn.access.stats(request.span().volume)
        {
            volume.io.in_flight.sub(1);
        }
    }
    connection.io().in_flight.set(0);
}

#[inline(always)]
fn count(io: &IoStats, command: &CommandCapsule, status: Status) {
    let bytes = data_bytes(command);
    match command.opcode {
        Opcode::Read => {
            io.reads.add(1);
            io.read_bytes.add(bytes);
        }
        Opcode::Write => {
            io.writes.add(1);
            io.written_bytes.add(bytes);
        }
        Opcode::Flush => io.flushes.add(1),
        Opcode::Discard => io.discards.add(1),
        _ => io.write_zeroes.add(1),
    }
    if status != Status::Ok {
        io.errors.add(1);
    }
}

/// Bytes of the volume that a READ or WRITE moves.
#[inline(always)]
pub(crate) fn data_bytes(command: &CommandCapsule) -> u64 {
    let bytes = u64::from(command.buffer.map_or(command.in_capsule_bytes, |b| b.length));
    let has_trailer = command.flags.digest && command.opcode == Opcode::Read;
    bytes.saturating_sub(if has_trailer { wide64(READ_TRAILER_BYTES) } else { 0 })
}

/// Records the times of a command. Returns those of one that was not answered in the turn that
/// found it.
#[inline(always)]
fn record(
    latency: &VolumeLatency,
    opcode: Opcode,
    request: &mut Request,
    found: TurnTimes,
    turn: TurnTimes,
) -> Option<(u64, Stages)> {
    let op = match opcode {
        Opcode::Read => &latency.read,
        Opcode::Write => &latency.write,
        Opcode::Flush => &latency.flush,
        _ => return None,
    };
    if found == turn {
        op.record_queued(found.now - found.looked);
        return None;
    }
    let stages = request.timing().stages(found, turn.now);
    let total = turn.now.saturating_sub(found.looked);
    op.record(total, &stages);
    Some((total, stages))
}
