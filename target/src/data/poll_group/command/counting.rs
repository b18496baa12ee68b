//! The counting of block commands: when a command starts to wait, when it is answered, and when its
//! connection ends before that. By poll group, by connection and by volume.

use rblk_protocol::{ConnectionKind, Opcode, Status, Tag};
use rblk_runtime::Micros;

use crate::data::connection::{Connection, ConnectionParams};
use crate::data::poll_group::group_state::GroupState;
use crate::data::poll_group::slow::SlowIo;
use crate::data::poll_group::trace_ring::TracedIo;
use crate::data::request::{Request, RequestEvent};
use crate::store::Store;
use crate::volume::timing::Took;
use rblk_operate::target::group_counts::Stats;
use rblk_operate::target::traffic::{IoKind, Stages};
use rblk_operate::target::volume_counts::VolumeStats;

/// A block command, for a volume that its session opened, starts to wait. A command that is
/// answered at once is not recorded here. Returns its request.
#[inline(always)]
pub(in crate::data::poll_group) fn begin<'a, S: Store>(
    connection: &'a mut Connection,
    group: &GroupState<S>,
    tag: Tag,
) -> &'a mut Request {
    let (params, request) = connection.of(tag);
    if let Some(volume) = group.access.stats(request.span().volume) {
        request.timing().begin(group.time.us, group.time.cq_age.get());
        params.io.begin();
        volume.io.begin();
    }
    request
}

/// A command that was about to be answered must wait for send credits.
#[cold]
#[inline(never)]
pub(in crate::data::poll_group) fn begin_late<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    tag: Tag,
) {
    if !connection.request_mut(tag).timing().has_begun() {
        begin(connection, group, tag);
    }
}

/// Counts a command with this status. Its answer is queued.
#[inline(never)]
pub(in crate::data::poll_group) fn answered<S: Store>(
    params: &ConnectionParams,
    request: &mut Request,
    group: &GroupState<S>,
    status: Status,
) {
    let Some(command) = request.command() else { return };
    let (kind, bytes) = (IoKind::of(command.opcode), Stats::data_bytes(command));
    group.stats.count(command, bytes, status);
    if let Some(kind) = kind {
        record(params, request, group, (kind, bytes, status != Status::Ok));
    }
}

/// Counts a successful command without data to send back. Its answer is queued.
#[inline(always)]
pub(in crate::data::poll_group) fn acknowledged<S: Store>(
    params: &ConnectionParams,
    request: &mut Request,
    group: &GroupState<S>,
) {
    let Some(command) = request.command() else { return };
    if command.opcode == Opcode::Write {
        let bytes = Stats::data_bytes(command);
        group.stats.count_write(bytes, command.in_capsule_bytes > 0);
        record(params, request, group, (IoKind::Write, bytes, false));
    } else {
        answered(params, request, group, Status::Ok);
    }
}

/// Counts a successful READ, and puts it into the answered state. Its answer is queued.
#[inline(always)]
pub(in crate::data::poll_group) fn answered_read<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    tag: Tag,
) {
    let (params, request) = connection.of(tag);
    let _ = request.step(RequestEvent::Answered);
    let bytes = request.span().len;
    group.stats.count_read(bytes);
    record(params, request, group, (IoKind::Read, bytes, false));
}

/// Counts an answer by connection and by volume. A command that failed before it started has no
/// volume.
#[inline(always)]
fn record<S: Store>(
    params: &ConnectionParams,
    request: &mut Request,
    group: &GroupState<S>,
    (kind, bytes, failed): (IoKind, u64, bool),
) {
    params.io.answered(kind, bytes, failed);
    let begun = request.timing().has_begun();
    if failed && !begun {
        return;
    }
    let Some(volume) = group.access.stats(request.span().volume) else { return };
    volume.io.answered(kind, bytes, failed);
    if !begun {
        return volume.latency.record_one_turn(kind, group.time.cq_age.get());
    }
    params.io.end();
    volume.io.end();
    match request.timing().end_in_its_turn(group.time.us) {
        Some(queue) => volume.latency.record_one_turn(kind, queue),
        None => end_later(params, request, group, volume, (kind, failed)),
    }
}

/// A started command is answered in a later turn, or recorded a wait.
#[inline(never)]
fn end_later<S: Store>(
    params: &ConnectionParams,
    request: &mut Request,
    group: &GroupState<S>,
    volume: &VolumeStats,
    (kind, failed): (IoKind, bool),
) {
    match request.timing().end(group.time.us) {
        None => debug_assert!(false, "it had begun"),
        Some(Took::OneTurn(queue)) => volume.latency.record_one_turn(kind, queue),
        Some(Took::Longer(stages)) => {
            volume.latency.record(kind, &stages);
            if group.told.slow.is_slow(stages.total()) {
                note_slow(params, request, group, (stages, failed));
            }
        }
    }
}

/// A kept command, which arrived at `came`, started. If it was answered at once, this checks
/// whether it was slow; the other checks see no time pass.
#[cold]
pub(in crate::data::poll_group) fn kept_began<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
    tag: Tag,
    came: Micros,
) {
    let (params, request) = connection.of(tag);
    let queue = group.time.us.since(came);
    if request.is_answered() && group.told.slow.is_slow(queue) {
        let failed = request.outcome().status != Status::Ok;
        note_slow(params, request, group, (Stages { queue, ..Stages::default() }, failed));
    }
}

#[cold]
fn note_slow<S: Store>(
    params: &ConnectionParams,
    request: &Request,
    group: &GroupState<S>,
    (stages, failed): (Stages, bool),
) {
    let Some(opcode) = request.opcode() else { return };
    let (volume, session) = (request.span().volume, params.session);
    let total = stages.total();
    if let Some(ring) = group.told.slow.ring_for(volume, total) {
        let queue = match params.kind {
            ConnectionKind::Io { queue } => queue,
            ConnectionKind::Admin => 0,
        };
        let io = TracedIo {
            at: group.time.now,
            group: group.index,
            session,
            queue,
            opcode,
            offset: 0,
            len: 0,
            failed,
            stages,
        };
        ring.push(io.of(request.span()));
    }
    group.told.slow.note(SlowIo { volume, session, opcode, total, stages, others: 0 });
}

/// A connection ends: none of its commands is in flight any more, and waiting commands never start.
#[cold]
pub(in crate::data::poll_group) fn abandon<S: Store>(
    connection: &mut Connection,
    group: &GroupState<S>,
) {
    for index in 0..connection.requests().len() {
        let tag = Tag(rblk_protocol::width::narrow(index));
        let (params, request) = connection.of(tag);
        let had_begun = request.timing().end(group.time.us).is_some();
        if !had_begun && !request.waits_to_begin() {
            continue;
        }
        params.io.abandon(had_begun);
        if let Some(volume) = group.access.stats(request.span().volume) {
            volume.io.abandon(had_begun);
        }
    }
}
