//! Commands over the limit of their volume or host, which wait before they start.
//!
//! The command was checked and is valid. While it waits it has no memory of a shard, uses no store,
//! and keeps only the receive buffer of its own connection, if its data came with it. When its time
//! comes, it is checked again: its session may have lost the volume meanwhile. A connection that
//! ends takes its commands out, so none of them starts after its epoch.

use rblk_protocol::width::narrow;
use rblk_protocol::{CommandCapsule, Opcode, Tag};
use rblk_runtime::Micros;

use super::access::AccessTable;
use crate::data::connection::Connection;
use crate::data::request::{RequestEvent, Span};
use crate::volume::Volume;
use crate::volume::ids::{ConnectionId, VolumeIndex};
use crate::volume::limits::{Limiter, LineName, Ticks, Waiting};
use rblk_operate::target::volume_counts::VolumeStats;

/// A waiting command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delayed {
    /// The connection.
    pub(super) connection: ConnectionId,
    /// The tag.
    pub(super) tag: Tag,
    /// Bytes that count against a limit of bytes.
    pub(super) bytes: u32,
    /// Time of arrival.
    pub(super) came: Micros,
    /// Start of the wait for the limit.
    pub(super) since: Micros,
}

/// Whether a command, which arrived at `came`, must wait. If so, it stays in its line until a turn
/// finds that its time has come.
#[inline(never)]
pub(super) fn must_wait(
    waiting: &mut Waiting<Delayed>,
    connection: &mut Connection,
    (command, span): (&CommandCapsule, Span),
    (volume, host): (&Volume, Option<&Limiter>),
    (came, now): (Micros, Micros),
) -> bool {
    let bytes = match command.opcode {
        Opcode::Read | Opcode::Write => narrow(span.len),
        // These commands move no data.
        Opcode::Discard | Opcode::WriteZeroes => 0,
        // A FLUSH makes earlier writes durable, which have already passed the limit.
        _ => return false,
    };
    let name = LineName { session: connection.params().session, volume: volume.index };
    let (at, has_line) = (Ticks::of(now), waiting.has(name));
    // Behind other commands, it gets its time when it becomes the first.
    let due = if has_line { at } else { take([volume.limits.as_deref(), host], bytes, at) };
    let waits = has_line || due > at;
    if waits {
        let (id, tag) = (connection.id(), command.tag);
        waiting.push(name, due, Delayed { connection: id, tag, bytes, came, since: now });
        let request = connection.request_mut(tag);
        request.names(span);
        let _ = request.step(RequestEvent::OverLimit);
    }
    waits
}

/// Counts a command that must wait.
#[cold]
pub(super) fn count_delayed(stats: Option<&VolumeStats>) {
    if let Some(stats) = stats {
        stats.delays.commands.add(1);
    }
}

/// Counts a command that its limits let pass, and its time of waiting.
#[cold]
pub(super) fn count_waited(stats: Option<&VolumeStats>, us: u64) {
    if let Some(stats) = stats {
        stats.delays.begun.add(1);
        stats.delays.waited_us.add(us);
    }
}

/// The limits of a line: its volume's and its host's.
fn limiters(access: &AccessTable, name: LineName) -> [Option<&Limiter>; 2] {
    let volume = access.volume(name.volume).and_then(|volume| volume.limits.as_deref());
    [volume, access.host_limits(name.session)]
}

/// Charges a command to both limits. Returns the time at which it may start.
fn take(limiters: [Option<&Limiter>; 2], bytes: u32, now: Ticks) -> Ticks {
    let times = limiters.into_iter().flatten().map(|limiter| limiter.take(bytes, now));
    times.fold(now, Ticks::max)
}

/// [`take`] for the first command of its line.
pub(super) fn take_for(access: &AccessTable, name: LineName, bytes: u32, now: Ticks) -> Ticks {
    take(limiters(access, name), bytes, now)
}

/// Returns the charge of a command that loses its time to both limits.
pub(super) fn give_back(access: &AccessTable, name: LineName, delayed: &Delayed) {
    for limiter in limiters(access, name).into_iter().flatten() {
        limiter.give_back(delayed.bytes);
    }
}

/// Drops the commands of an ended connection. Their charges return to the limits: so a host with
/// connections that end again and again does not use up a limit that it shares.
pub(super) fn drop_of(
    waiting: &mut Waiting<Delayed>,
    access: &AccessTable,
    connection: &Connection,
) {
    let (id, session) = (connection.id(), connection.params().session);
    let delayed = connection.requests().iter().filter(|request| request.awaits_limit());
    let mut volumes: Vec<VolumeIndex> = delayed.map(|request| request.span().volume).collect();
    volumes.sort_unstable();
    volumes.dedup();
    for volume in volumes {
        let is_dropped = |delayed: &Delayed| delayed.connection == id;
        waiting.drop_of(LineName { session, volume }, is_dropped, |name, delayed| {
            give_back(access, name, delayed);
        });
    }
}
