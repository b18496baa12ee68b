//! Commands over the limit of their volume or host: they wait before they begin.
//!
//! Such a command was looked at, and found in order. It has no memory of a shard, asks no store,
//! and keeps the receive buffer of its own connection, if its data came with it. When its time
//! comes, everything about it is looked at again: its session may have lost the volume meanwhile.
//! A connection that ends takes its commands out, so none of them begins after its epoch.

use rblk_fabric::Micros;
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{CommandCapsule, Opcode, Tag};

use super::access::Access;
use super::{PollGroup, block};
use crate::connection::Connection;
use crate::identity::{ConnectionId, SessionIndex};
use crate::limits::{Head, Limiter, LineName, Ticks, Waiting};
use crate::request::Event;
use crate::store::{Store, VolumeIndex};
use crate::volume::Volume;
use crate::volume_stats::VolumeStats;

/// Looks at lines of waiting commands in one turn, so that a limit that went does not keep others
/// from being served.
const LOOKS: usize = 256;

/// A command that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delayed {
    connection: ConnectionId,
    /// Its tag.
    pub(super) tag: Tag,
    bytes: u32,
    /// When it came.
    pub(super) since: Micros,
}

/// Whether a command has to wait. Then it is in its line, until [`PollGroup::begin_due`] begins it.
#[inline(never)]
pub(super) fn must_wait(
    waiting: &mut Waiting<Delayed>,
    connection: &mut Connection,
    (command, len): (&CommandCapsule, u64),
    (volume, host): (&Volume, Option<&Limiter>),
    now: Micros,
) -> bool {
    let bytes = match command.opcode {
        Opcode::Read | Opcode::Write => narrow(len),
        // They move no data.
        Opcode::Discard | Opcode::WriteZeroes => 0,
        // A FLUSH makes durable what was let in before.
        _ => return false,
    };
    let name = LineName { session: connection.params().session, volume: volume.index };
    let (at, has_line) = (Ticks::of(now), waiting.has(name));
    // Behind others it gets its time when it is the first.
    let due = if has_line { at } else { take(volume.limits.as_deref(), host, bytes, at) };
    let waits = has_line || due > at;
    if waits {
        let delayed = Delayed { connection: connection.id(), tag: command.tag, bytes, since: now };
        waiting.push(name, due, delayed);
        let _ = connection.request_mut(command.tag).step(Event::OverLimit);
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

/// Counts how long a command waited that begins now.
#[cold]
pub(super) fn count_waited(stats: Option<&VolumeStats>, us: u64) {
    if let Some(stats) = stats {
        stats.delays.waited_us.add(us);
    }
}

/// Takes a command from both limits. Returns when it may begin.
fn take(volume: Option<&Limiter>, host: Option<&Limiter>, bytes: u32, now: Ticks) -> Ticks {
    let of = |limiter: Option<&Limiter>| limiter.map_or(now, |limiter| limiter.take(bytes, now));
    of(volume).max(of(host))
}

fn take_for(access: &Access, name: LineName, bytes: u32, now: Ticks) -> Ticks {
    let volume = access.volume(name.volume).and_then(|volume| volume.limits.as_deref());
    take(volume, access.host_limits(name.session), bytes, now)
}

impl<S: Store> PollGroup<S> {
    /// Begins commands whose time has come. Returns whether there were any.
    #[cold]
    pub(super) fn begin_due(&mut self) -> bool {
        let now = Ticks::of(self.turn.us);
        let mut any = false;
        for _ in 0..LOOKS {
            let Some((name, head, first)) = self.turn.waiting.first(now) else { break };
            if head == Head::Unasked {
                let due = take_for(&self.turn.access, name, first.bytes, now);
                self.turn.waiting.set_due(name, due);
                continue;
            }
            let Some(delayed) = self.turn.waiting.pop(name) else { break };
            any = true;
            if self.connections.has(delayed.connection) {
                self.serve(wide(delayed.connection.index), |connection, turn| {
                    block::start_delayed(connection, turn, delayed)
                });
            }
        }
        self.turn.io |= any;
        any
    }

    /// The limits of a volume are others, or of every volume of a session.
    pub(super) fn limits_changed(
        &mut self,
        volume: Option<VolumeIndex>,
        session: Option<SessionIndex>,
    ) {
        self.turn
            .waiting
            .ask_anew(|name| Some(name.volume) == volume || Some(name.session) == session);
    }
}

/// A connection ended: its commands never begin.
pub(super) fn drop_all(waiting: &mut Waiting<Delayed>, connection: ConnectionId) {
    waiting.drop_all(|delayed| delayed.connection == connection);
}
