//! What is counted of block commands: when one begins, when it is answered, and when its
//! connection ends before that. By poll group, by connection and by volume.

use rblk_fabric::{BinnedUs, Micros};
use rblk_protocol::{Status, Tag};

use super::slow::SlowIo;
use super::turn::Turn;
use crate::connection::Connection;
use crate::request::{Event, Request};
use crate::stats::Stats;
use crate::store::Store;
use crate::timing::Took;
use crate::traffic::{IoKind, IoStats, Stages};
use crate::volume_stats::VolumeStats;

/// How long what a turn finds may have lain in a CQ: since the turn before looked there, unless the
/// thread may have slept since then. Computed when it is first asked for in a turn.
#[derive(Debug, Default)]
pub(super) struct CqAge {
    looked: Micros,
    armed: Option<Micros>,
    age: Option<BinnedUs>,
}

impl CqAge {
    /// A turn begins; the one before began then.
    #[inline(always)]
    pub(super) fn turn(&mut self, before: Micros) {
        (self.looked, self.age) = (before, None);
    }

    /// The thread may sleep from this turn on: what it finds then has woken it.
    pub(super) fn armed(&mut self, now: Micros) {
        self.armed = Some(now);
    }

    #[inline(always)]
    fn get(&mut self, now: Micros) -> BinnedUs {
        if let Some(age) = self.age { age } else { self.compute(now) }
    }

    #[inline(never)]
    fn compute(&mut self, now: Micros) -> BinnedUs {
        let us = if self.armed == Some(self.looked) { 0 } else { now.since(self.looked) };
        *self.age.insert(BinnedUs::new(us))
    }
}

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
    let (io, request) = connection.io_of(tag);
    let Some(command) = request.command() else { return };
    let (kind, bytes) = (IoKind::of(command.opcode), Stats::data_bytes(command));
    turn.stats.count(command, bytes, status);
    if let Some(kind) = kind
        && let Some(slow) = record(io, request, turn, (kind, bytes, status != Status::Ok))
    {
        note_slow(connection, turn, tag, slow);
    }
}

/// A READ is answered well: its answer is queued. Its state says so from now on.
#[inline(always)]
pub(super) fn answered_read<S: Store>(connection: &mut Connection, turn: &Turn<S>, tag: Tag) {
    let (io, request) = connection.io_of(tag);
    let _ = request.step(Event::Answered);
    let bytes = request.span().len;
    let slow = record(io, request, turn, (IoKind::Read, bytes, false));
    turn.stats.count_read(bytes);
    if let Some(slow) = slow {
        note_slow(connection, turn, tag, slow);
    }
}

/// Returns what it waited for, if it took long enough to be told.
#[inline(always)]
fn record<S: Store>(
    io: &IoStats,
    request: &mut Request,
    turn: &Turn<S>,
    (kind, bytes, failed): (IoKind, u64, bool),
) -> Option<Stages> {
    let volume = turn.access.stats(request.span().volume);
    let Some(took) = request.timing().end(turn.us) else {
        io.refused(kind, bytes);
        return None;
    };
    io.answered(kind, bytes, failed);
    let volume = volume?;
    volume.io.answered(kind, bytes, failed);
    match took {
        Took::OneTurn(queue) => {
            volume.latency.record_one_turn(kind, queue);
            None
        }
        Took::Longer(stages) => {
            volume.latency.record(kind, &stages);
            turn.slow.is_slow(stages.total()).then_some(stages)
        }
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
        if request.timing().end(turn.us).is_none() {
            continue;
        }
        io.abandoned();
        if let Some(volume) = turn.access.stats(request.span().volume) {
            volume.io.abandoned();
        }
    }
}
