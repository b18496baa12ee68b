//! Commands over the limit of their volume or host: they wait before they begin.
//!
//! Such a command was looked at, and found in order. It has no memory of a shard, asks no store,
//! and keeps the receive buffer of its own connection, if its data came with it. When its time
//! comes, everything about it is looked at again: its session may have lost the volume meanwhile.
//! A connection that ends takes its commands out, so none of them begins after its epoch.

use rblk_fabric::Micros;
use rblk_protocol::width::narrow;
use rblk_protocol::{CommandCapsule, Opcode, Tag};

use super::access::Access;
use crate::data::connection::Connection;
use crate::data::request::{Event, Span};
use crate::volume::Volume;
use crate::volume::counts::VolumeStats;
use crate::volume::ids::{ConnectionId, VolumeIndex};
use crate::volume::limits::{Limiter, LineName, Ticks, Waiting};

/// A command that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delayed {
    /// Its connection.
    pub(super) connection: ConnectionId,
    /// Its tag.
    pub(super) tag: Tag,
    /// What it takes of a limit of bytes.
    pub(super) bytes: u32,
    /// When it came.
    pub(super) came: Micros,
    /// Since when it waits for the limit.
    pub(super) since: Micros,
}

/// Whether a command, which came then, has to wait from now on. Then it is in its line, until a
/// turn finds its time come.
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
        // They move no data.
        Opcode::Discard | Opcode::WriteZeroes => 0,
        // A FLUSH makes durable what was let in before.
        _ => return false,
    };
    let name = LineName { session: connection.params().session, volume: volume.index };
    let (at, has_line) = (Ticks::of(now), waiting.has(name));
    // Behind others it gets its time when it is the first.
    let due = if has_line { at } else { take([volume.limits.as_deref(), host], bytes, at) };
    let waits = has_line || due > at;
    if waits {
        let (id, tag) = (connection.id(), command.tag);
        waiting.push(name, due, Delayed { connection: id, tag, bytes, came, since: now });
        let request = connection.request_mut(tag);
        request.names(span);
        let _ = request.step(Event::OverLimit);
    }
    waits
}

/// Counts a command that has to wait.
#[cold]
pub(super) fn count_delayed(stats: Option<&VolumeStats>) {
    if let Some(stats) = stats {
        stats.delays.commands.add(1);
    }
}

/// Counts a command that its limits let begin, and how long it waited for them.
#[cold]
pub(super) fn count_waited(stats: Option<&VolumeStats>, us: u64) {
    if let Some(stats) = stats {
        stats.delays.begun.add(1);
        stats.delays.waited_us.add(us);
    }
}

/// What limits a line: its volume and its host.
fn limiters(access: &Access, name: LineName) -> [Option<&Limiter>; 2] {
    let volume = access.volume(name.volume).and_then(|volume| volume.limits.as_deref());
    [volume, access.host_limits(name.session)]
}

/// Takes a command from both limits. Returns when it may begin.
fn take(limiters: [Option<&Limiter>; 2], bytes: u32, now: Ticks) -> Ticks {
    let times = limiters.into_iter().flatten().map(|limiter| limiter.take(bytes, now));
    times.fold(now, Ticks::max)
}

/// The same for a command that is the first of its line.
pub(super) fn take_for(access: &Access, name: LineName, bytes: u32, now: Ticks) -> Ticks {
    take(limiters(access, name), bytes, now)
}

/// Gives back to both limits what a command booked that loses its time.
pub(super) fn give_back(access: &Access, name: LineName, delayed: &Delayed) {
    for limiter in limiters(access, name).into_iter().flatten() {
        limiter.give_back(delayed.bytes);
    }
}

/// A connection ended: its commands never begin. What they booked is free for others: a host whose
/// connections end again and again keeps nobody from a limit that it shares.
pub(super) fn drop_of(waiting: &mut Waiting<Delayed>, access: &Access, connection: &Connection) {
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
