//! What is counted of block commands: when one begins, when it is answered, and when its
//! connection ends before that. By poll group, by connection and by volume.

use std::time::Instant;

use rblk_protocol::{Status, Tag};

use super::slow::SlowIo;
use super::turn::Turn;
use crate::connection::Connection;
use crate::request::Request;
use crate::stats::Stats;
use crate::store::Store;
use crate::timing::{Took, us_between};
use crate::traffic::{IoKind, IoStats, Stages};
use crate::volume_stats::VolumeStats;

/// How long what a turn finds may have lain in a CQ: since the turn before looked there, unless the
/// thread may have slept since then. Computed when it is first asked for in a turn.
#[derive(Debug, Default)]
pub(super) struct CqAge {
    looked: Option<Instant>,
    armed: Option<Instant>,
    us: Option<u32>,
}

impl CqAge {
    /// A turn begins; the one before began then.
    #[inline(always)]
    pub(super) fn turn(&mut self, before: Instant) {
        (self.looked, self.us) = (Some(before), None);
    }

    /// The thread may sleep from this turn on: what it finds then has woken it.
    pub(super) fn armed(&mut self, now: Instant) {
        self.armed = Some(now);
    }

    #[inline(always)]
    fn us(&mut self, now: Instant) -> u32 {
        if let Some(us) = self.us { us } else { self.compute(now) }
    }

    #[inline(never)]
    fn compute(&mut self, now: Instant) -> u32 {
        let awake = self.looked.filter(|looked| Some(*looked) != self.armed);
        let us = awake.map_or(0, |looked| us_between(looked, now));
        *self.us.insert(u32::try_from(us).unwrap_or(u32::MAX))
    }
}

/// A block command begins, for a volume that its session opened.
#[inline(always)]
pub(super) fn begin(
    request: &mut Request,
    io: &IoStats,
    volume: &VolumeStats,
    age: &mut CqAge,
    now: Instant,
) {
    request.timing().begin(now, age.us(now));
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
    let Some(command) = connection.request(tag).command() else { return };
    let (opcode, bytes) = (command.opcode, Stats::data_bytes(command));
    turn.stats.count(command, bytes, status);
    if let Some(kind) = IoKind::of(opcode) {
        record(connection, turn, tag, (kind, bytes, status != Status::Ok));
    }
}

/// A READ is answered well: its answer is queued.
#[inline(always)]
pub(super) fn answered_read<S: Store>(connection: &mut Connection, turn: &Turn<S>, tag: Tag) {
    let bytes = connection.request(tag).span().len;
    turn.stats.count_read(bytes);
    record(connection, turn, tag, (IoKind::READ, bytes, false));
}

#[inline(always)]
fn record<S: Store>(
    connection: &mut Connection,
    turn: &Turn<S>,
    tag: Tag,
    (kind, bytes, failed): (IoKind, u64, bool),
) {
    let (io, request) = connection.io_of(tag);
    let Some(took) = request.timing().end(turn.now) else {
        return io.refused(kind, bytes);
    };
    io.answered(kind, bytes, failed);
    let Some(volume) = turn.access.stats(request.span().volume) else { return };
    volume.io.answered(kind, bytes, failed);
    volume.latency.record(kind, &took);
    if let Took::Longer(stages) = &took
        && turn.slow.is_slow(stages.total())
    {
        note_slow(connection, turn, tag, *stages);
    }
}

#[cold]
fn note_slow<S: Store>(connection: &Connection, turn: &Turn<S>, tag: Tag, stages: Stages) {
    let request = connection.request(tag);
    let Some(opcode) = request.command().map(|command| command.opcode) else { return };
    let (volume, session) = (request.span().volume, connection.params().session);
    let total = stages.total();
    turn.slow.note(SlowIo { volume, session, opcode, total, stages, others: 0 });
}

/// A connection ends: nothing of it is in flight any more.
#[cold]
pub(super) fn abandon<S: Store>(connection: &mut Connection, turn: &Turn<S>) {
    for index in 0..connection.requests().len() {
        let tag = Tag(rblk_protocol::width::narrow(index));
        let (io, request) = connection.io_of(tag);
        if request.timing().end(turn.now).is_none() {
            continue;
        }
        io.abandoned();
        if let Some(volume) = turn.access.stats(request.span().volume) {
            volume.io.abandoned();
        }
    }
}
