//! [`GroupState`]: the state that a data thread uses for every connection: CQs, shard, the other
//! poll groups, counters, the time.
//!
//! The connections are separate: a function that serves a connection takes both, `&mut Connection`
//! and `&mut GroupState`. [`super::PollGroup::serve`] looks the connection up, and makes sure that
//! its queued WRs are posted.

use std::sync::Arc;
use std::time::Instant;

use rblk_fabric::MemoryRegion;
use rblk_protocol::Tag;
use rblk_protocol::width::narrow;
use rblk_runtime::{Micros, Moment};

use super::FromGroup;
use super::access::AccessTable;
use super::cq_age::CqAge;
use super::held::HeldWrites;
use super::log_lines::{LogLine, LogLines};
use super::other_groups::{GroupMail, OtherGroups};
use super::over_limit::Delayed;
use super::pollers::Pollers;
use super::silence::Silence;
use super::slow::SlowIos;
use super::zeroing::ZeroingQueue;
use crate::cache::{PartToken, Segments, Shard, ShardRequest};
use crate::data::connection::Connection;
use crate::data::parts::{Part, PartIndex};
use crate::data::request::RequestEvent;
use crate::store::Store;
use crate::volume::limits::Waiting;
use rblk_operate::target::group_counts::Stats;

/// See the module.
pub(super) struct GroupState<S> {
    /// Number of this poll group, and of its shard.
    pub(super) index: usize,
    /// The CQs.
    pub(super) pollers: Pollers,
    /// This group's shard of the cache.
    pub(super) shard: Shard<S>,
    /// The other poll groups.
    pub(super) others: OtherGroups,
    /// The volumes that sessions may reach.
    pub(super) access: AccessTable,
    /// Counters of this poll group.
    pub(super) stats: Arc<Stats>,
    /// The time of the turn.
    pub(super) time: TurnTime,
    /// Commands that continue in a later turn, whatever the devices do.
    pub(super) later: Later,
    /// Messages and log lines for others.
    pub(super) told: Told,
    /// The turn did work that clients wait for.
    pub(super) io: bool,
    /// There is work that most turns do not have.
    pub(super) rare: bool,
}

/// The time of a turn.
pub(super) struct TurnTime {
    /// Start of the turn.
    pub(super) now: Instant,
    /// The start in microseconds, for the times of commands.
    pub(super) us: Micros,
    /// The time that completions may have waited for this turn.
    pub(super) cq_age: CqAge,
}

impl TurnTime {
    /// Before the first turn.
    pub(super) fn new(now: Instant) -> Self {
        Self { now, us: Moment::from(now).us(), cq_age: CqAge::default() }
    }
}

/// Commands that continue in a later turn, whatever the devices do.
#[derive(Default)]
pub(super) struct Later {
    /// Ranges of memory volumes that are being zeroed.
    pub(super) zeroing: ZeroingQueue,
    /// Writes that may not start now.
    pub(super) held: HeldWrites,
    /// Commands of volumes with silent stores.
    pub(super) silence: Silence,
    /// Commands over a limit.
    pub(super) waiting: Waiting<Delayed>,
}

/// Messages and log lines for others.
#[derive(Default)]
pub(super) struct Told {
    /// Messages for control.
    pub(super) outbox: Vec<FromGroup>,
    /// Log lines that peers caused.
    pub(super) lines: LogLines,
    /// Commands that took long.
    pub(super) slow: SlowIos,
}

/// Names a part of a command of a poll group to a shard.
#[inline(always)]
pub(super) fn token(group: usize, connection: &Connection, tag: Tag, part: PartIndex) -> PartToken {
    PartToken {
        group: narrow(group),
        session: connection.params().session,
        connection: connection.id(),
        tag,
        part: part.0,
    }
}

impl<S: Store> GroupState<S> {
    /// Starts a turn.
    #[inline(always)]
    pub(super) fn begin(&mut self, moment: Moment) {
        self.time.cq_age.turn(self.time.us);
        self.tick(moment);
        self.stats.turns.add(1);
    }

    /// Sets the time of this turn.
    #[inline(always)]
    pub(super) fn tick(&mut self, moment: Moment) {
        (self.time.now, self.time.us) = (moment.instant(), moment.us());
        self.shard.tick(self.time.us);
    }

    /// Whether a log line of a kind that peers can cause may be written now.
    #[cold]
    pub(super) fn may_log(&mut self, line: LogLine) -> bool {
        self.told.lines.may_write(line, self.time.now)
    }

    /// Number of poll groups, including this one.
    #[inline]
    pub(super) fn groups(&self) -> usize {
        self.others.groups()
    }

    /// Names a part of a command to a shard.
    #[inline]
    pub(super) fn token(&self, connection: &Connection, tag: Tag, part: PartIndex) -> PartToken {
        token(self.index, connection, tag, part)
    }

    /// Sends a request without an answer, or one with an answer that is already counted.
    #[inline]
    pub(super) fn tell(&mut self, shard: usize, request: ShardRequest) {
        if shard == self.index {
            self.shard.request(request);
        } else {
            self.others.send(shard, GroupMail::Request(request));
        }
    }

    /// Sends a shard a request that it will answer.
    pub(super) fn ask(
        &mut self,
        connection: &mut Connection,
        tag: Tag,
        shard: usize,
        request: ShardRequest,
    ) {
        let _ = connection.request_mut(tag).step(RequestEvent::Asked);
        self.tell(shard, request);
    }

    /// Gives lent memory back to its shard.
    #[inline]
    pub(super) fn release(&mut self, shard: usize, memory: Segments) {
        if shard == self.index {
            self.shard.release(memory);
        } else {
            self.others.send(shard, GroupMail::Request(ShardRequest::Release { memory }));
        }
    }

    /// Gives the memory of a part, lent or reserved, back to its shard.
    pub(super) fn give_back(&mut self, part: &mut Part) {
        let shard = part.shard();
        match part.take_memory() {
            (Some(job), memory) => self.tell(shard, ShardRequest::Cancel { job, memory }),
            (None, memory) if memory.is_empty() => {}
            (None, memory) => self.release(shard, memory),
        }
    }

    /// The arena, if it is registered with the device of a connection.
    #[inline]
    pub(super) fn arena(&self, connection: &Connection) -> Option<&MemoryRegion> {
        let memory = self.pollers[connection.poller()].memory.as_ref();
        memory.map(|memory| &*memory.arena)
    }
}
