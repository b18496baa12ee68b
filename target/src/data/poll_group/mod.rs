//! [`PollGroup`]: the data thread's engine: connections of several devices, and a shard of the
//! cache.
//!
//! One owner, no locks, no clock of its own, no allocation per I/O. A turn takes mail, reaps every
//! CQ, the other poll groups' messages and the store, moves requests forward, then posts: one list
//! of RECVs and one list of send WRs per connection. The poll group of a connection serves its
//! commands; memory and store belong to a [`Shard`]. The group calls its own shard, and asks the
//! shards of other groups by messages. The thread around it ([`group_thread`]) sleeps and wakes;
//! tests and simulations call [`PollGroup::turn`] themselves, with a store and a fabric of their
//! own.
//!
//! The way of a command. Each module is entered once on the way down and once on the way up:
//!
//! ```text
//! down: mod (reap) -> completion -> block -> read | write | without_data -> shard
//!                                 '> admin -> control
//! up:   mod (reap, deliver) -> completion | reply -> read | write | without_data -> respond
//! post: mod (post), at the end of the turn
//! ```
//!
//! [`PollGroup::serve`] looks a connection up for each completion, [`PollGroup::serve_named`] for
//! each answer of a shard. The functions below them take `(&mut Connection, &mut GroupState)`. The
//! states of a command are in `data/request/mod.rs`; a violation of a rule returns as a value and
//! ends the connection.
//!
//! Order of a command's memory: memory is released only when no device and no store may touch it.
//! Memory that a WRITE was sent from goes back to its shard when a later signaled WR of the QP
//! completed, whatever the peer does with the tag; on an ended connection, when control has
//! destroyed the QP.

mod access;
mod command;
mod completion;
mod connections;
mod control_mail;
mod cq_age;
mod ending;
mod group_state;
pub mod group_thread;
mod held;
mod limit_waiters;
mod log_lines;
mod mail;
pub mod other_groups;
mod over_limit;
mod pollers;
mod settles;
mod silence;
mod silent_stores;
pub mod slow;
mod steps;
pub(crate) mod trace_ring;
mod zeroing;

use access::AccessTable;
use command::{reply, respond, send_barrier, without_data};
use connections::Connections;
use group_state::{GroupState, Later, Told, TurnTime};
pub use mail::{FromGroup, Notice, PollerMemory, SettleTicket, StepTicket, ToGroup, VolumeStep};
use other_groups::{GroupMail, OtherGroups};
use pollers::Pollers;
use settles::{OF_SETTLES, Settles};
use slow::{SlowIo, SlowIos};
use steps::Steps;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::{Completion, Poller};
use rblk_protocol::width::wide;
use rblk_runtime::{Micros, Moment};

use crate::cache::{Shard, ShardReply, StoreFailure, Unsaved};
use crate::data::connection::{Connection, Served};
use crate::data::group_stats::Publish;
use crate::store::Store;
use crate::volume::ids::{ConnectionId, SessionIndex};
use crate::volume::limits::Ticks;
use rblk_operate::target::group_counts::Stats;

/// Interval at which other groups are reminded that a shard is short of memory.
const REMIND_INTERVAL: Duration = Duration::from_millis(1);
/// A time later than any turn.
const NEVER: Micros = Micros::new(u64::MAX);
/// Most completions of one poll.
const REAP: usize = 64;
/// Most polls of one device in a turn.
const REAP_ROUNDS: usize = 4;

/// The progress of a poll group that stops.
#[derive(Default)]
struct GroupStopping {
    began: bool,
    // The other groups know that this group acknowledges nothing any more; number of groups that
    // reported this.
    said_silent: bool,
    silent_groups: usize,
    // The other groups know that this group has no connection left; number of groups that reported
    // this.
    said_quiet: bool,
    quiet_groups: usize,
}

/// The engine of one data thread.
pub struct PollGroup<S> {
    state: GroupState<S>,
    connections: Connections,
    // Buffer of reaped completions.
    reaped: Box<[Completion; REAP]>,
    // Time of the last reminder to the other groups that this shard is short of memory.
    reminded: Option<Instant>,
    stopping: GroupStopping,
    steps: Steps,
    settles: Settles,
    // From this time on a turn checks for waiting work even if it finds none: see `turn`.
    look_at: Micros,
}

impl<S> std::fmt::Debug for PollGroup<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PollGroup")
            .field("index", &self.state.index)
            .field("pollers", &self.state.pollers.places())
            .field("connections", &self.connections.iter().count())
            .finish_non_exhaustive()
    }
}

impl<S: Store> PollGroup<S> {
    /// An engine without devices, volumes or connections.
    #[must_use]
    pub fn new(
        index: usize,
        shard: Shard<S>,
        others: OtherGroups,
        stats: Arc<Stats>,
        now: Instant,
    ) -> Self {
        let state = GroupState {
            index,
            pollers: Pollers::default(),
            shard,
            others,
            access: AccessTable::default(),
            stats,
            time: TurnTime::new(now),
            later: Later::default(),
            told: Told::default(),
            io: false,
            rare: false,
        };
        Self {
            state,
            connections: Connections::default(),
            reaped: Box::new([Completion::default(); REAP]),
            reminded: None,
            stopping: GroupStopping::default(),
            steps: Steps::default(),
            settles: Settles::default(),
            look_at: NEVER,
        }
    }

    /// The store.
    pub fn store_mut(&mut self) -> &mut S {
        self.state.shard.store_mut()
    }

    /// This group's shard of the cache.
    #[must_use]
    pub fn shard(&self) -> &Shard<S> {
        &self.state.shard
    }

    /// A store that began to fail, for control.
    #[inline]
    pub(crate) fn take_store_failure(&mut self) -> Option<StoreFailure> {
        self.state.shard.take_failure()
    }

    /// Reports commands that take at least `threshold` to control.
    pub fn tell_slow_ios(&mut self, threshold: Duration) {
        self.state.told.slow = SlowIos::above(threshold);
    }

    /// The slowest command since the last report, at most one a second.
    #[inline]
    pub fn take_slow_io(&mut self, now: Instant) -> Option<SlowIo> {
        self.state.told.slow.take(now)
    }

    /// The other poll groups.
    pub fn others_mut(&mut self) -> &mut OtherGroups {
        &mut self.state.others
    }

    /// The pollers with a working CQ, with their places: for a sleep.
    pub(crate) fn pollers_mut(
        &mut self,
    ) -> impl Iterator<Item = (usize, &mut (dyn Poller + 'static))> {
        self.state.pollers.all_working().map(|(place, entry)| (place, &mut *entry.poller))
    }

    /// Messages for control since the last call.
    pub fn take_outbox(&mut self) -> std::vec::Drain<'_, FromGroup> {
        self.state.told.outbox.drain(..)
    }

    /// Whether there are messages for control.
    #[must_use]
    pub fn has_outbox(&self) -> bool {
        !self.state.told.outbox.is_empty()
    }

    /// Whether [`ToGroup::Stop`] was carried out: no connection is left, and every acknowledged
    /// write is durable in its store (true), or some were lost (false). `None` also while a store
    /// refuses writes: they are retried, and [`Self::unsaved`] lists the volumes.
    #[must_use]
    pub fn stopped(&self) -> Option<bool> {
        let is_quiet = self.stopping.quiet_groups + 1 >= self.state.groups();
        let over = self.stopping.began && !self.has_connections() && is_quiet;
        if over && !self.state.others.keeps() { self.state.shard.stopped() } else { None }
    }

    /// Volumes with acknowledged data in this shard that is not durable, or not known to be: if the
    /// thread ended now, this data would be lost.
    #[must_use]
    pub fn unsaved(&self) -> Vec<Unsaved> {
        self.state.shard.unsaved()
    }

    /// While the group stops: the volumes of [`Self::unsaved`] with a store that returned an error.
    #[must_use]
    pub(crate) fn refused(&self) -> Vec<Unsaved> {
        self.state.shard.refused()
    }

    /// Whether [`ToGroup::Stop`] arrived.
    #[must_use]
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.began
    }

    /// The group's number.
    #[must_use]
    pub(crate) fn index(&self) -> usize {
        self.state.index
    }

    /// Whether the group has connections.
    #[must_use]
    pub fn has_connections(&self) -> bool {
        !self.connections.is_empty()
    }

    /// Whether a deadline runs, so that the thread must not sleep for long.
    #[must_use]
    pub(crate) fn has_deadline(&self) -> bool {
        self.connections.has_ending()
            || self.state.shard.is_short()
            || self.steps.are_waiting()
            || self.state.later.silence.has_any()
    }

    /// Whether the group did work since the last call that clients wait for. Beats, control's
    /// messages and completed sends do not count.
    pub(crate) fn take_io(&mut self) -> bool {
        std::mem::take(&mut self.state.io)
    }

    /// Time until the shard, or a command over its limit, has work that no event announces.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        let GroupState { shard, later, time, .. } = &self.state;
        let now = Ticks::of(time.us);
        let due = later.waiting.next().map(|at| Duration::from_micros(at.us_after(now)));
        [shard.next_deadline(), due].into_iter().flatten().min()
    }

    /// Reaps and acts until no work is left, at most a few rounds, then posts. Returns whether
    /// there was any work.
    ///
    /// Most turns of a spinning thread find no work, and must cost very little: without new events
    /// and due waits, the turn returns at once.
    pub fn turn(&mut self, now: impl Into<Moment>) -> bool {
        self.state.begin(now.into());
        if self.state.shard.store_mut().may_fall_silent() {
            self.look_at_silence();
        }
        let mut busy = self.reap();
        let mut waits = self.state.time.us >= self.look_at;
        if self.state.groups() > 1 {
            busy |= self.take_group_mail();
            waits |= self.state.others.keeps();
        }
        let stored = self.state.shard.reap();
        if busy | stored | waits {
            return self.act(busy, stored);
        }
        debug_assert!(!self.state.rare && !self.has_rare_work() && !self.state.shard.has_reply());
        debug_assert!(self.connections.listed(0).is_none());
        false
    }

    /// Acts on the events of a turn, and on waiting work. Returns whether there was any work.
    #[inline(always)]
    fn act(&mut self, mut busy: bool, stored: bool) -> bool {
        let (acted, waits) = self.state.shard.turn(stored);
        if acted {
            self.state.io = true;
            busy = true;
            self.deliver_written();
        }
        let replies = self.state.shard.has_reply();
        if replies {
            self.deliver();
        }
        self.look_at = NEVER;
        if waits || (replies && self.state.shard.has_waiting()) {
            self.note_waiting(replies);
        }
        if self.state.rare {
            busy |= self.do_rare_work();
        }
        self.post_all();
        busy | (self.state.groups() > 1 && self.state.others.flush())
    }

    /// Work waits in the shard, or may wait there since the `replies` were acted on: sets the time
    /// of the next check.
    #[inline(never)]
    fn note_waiting(&mut self, replies: bool) {
        self.state.rare |= self.state.shard.is_short();
        self.look_at = match self.state.shard.looks_at() {
            // The shard looked before it acted on the replies.
            Some(_) if replies => Micros::default(),
            Some(at) => at,
            None => NEVER,
        };
    }

    /// Whether there is work that most turns do not have. The code that starts such work says so in
    /// the turn, or by [`Self::expect_rare_work`].
    fn has_rare_work(&self) -> bool {
        !self.state.later.zeroing.is_empty()
            || self.state.shard.is_short()
            || self.connections.has_ending()
            || self.state.pollers.has_broken()
            || self.stopping.began
            || self.steps.are_waiting()
            || self.state.later.waiting.has_any()
    }

    /// Makes the next turn look for rare work in any case.
    fn expect_rare_work(&mut self) {
        (self.state.rare, self.look_at) = (true, Micros::default());
    }

    #[cold]
    #[inline(never)]
    fn do_rare_work(&mut self) -> bool {
        let mut busy = false;
        if self.state.later.waiting.is_due(Ticks::of(self.state.time.us)) {
            busy |= self.begin_due();
        }
        if self.state.shard.is_short() {
            self.seek_memory();
        }
        if !self.state.later.zeroing.is_empty() {
            busy = true;
            if let Some((id, tag)) = self.state.later.zeroing.step()
                && self.connections.has(id)
            {
                self.serve(wide(id.index), |connection, group| {
                    without_data::zeroed(connection, group, tag);
                    Ok(())
                });
            }
        }
        if self.connections.has_ending() || self.state.pollers.has_broken() {
            busy |= self.check_ending();
        }
        if self.steps.are_waiting() {
            busy |= self.go_on_stepping();
        }
        if self.stopping.began {
            self.end_shard();
        }
        // The rest, and work that started meanwhile, is for the next turn.
        self.state.rare = self.has_rare_work();
        self.look_at = Micros::default();
        busy
    }

    /// Serves the connection at an index: see [`Self::serve_if`].
    #[inline]
    fn serve(
        &mut self,
        index: usize,
        act: impl FnOnce(&mut Connection, &mut GroupState<S>) -> Served,
    ) {
        self.serve_if(index, |_| true, act);
    }

    /// Serves a connection by name, for an answer of a shard: no connection leaves the table before
    /// its last shard has answered.
    #[inline]
    fn serve_named(
        &mut self,
        id: ConnectionId,
        act: impl FnOnce(&mut Connection, &mut GroupState<S>) -> Served,
    ) {
        self.serve_if(wide(id.index), |connection| connection.id() == id, act);
    }

    /// Serves a connection: looks it up, acts, notes that it has WRs to post, and ends it if a rule
    /// was broken.
    #[inline(always)]
    fn serve_if(
        &mut self,
        index: usize,
        is: impl FnOnce(&Connection) -> bool,
        act: impl FnOnce(&mut Connection, &mut GroupState<S>) -> Served,
    ) {
        let Some(connection) = self.connections.at(index).filter(|connection| is(connection))
        else {
            debug_assert!(false, "the connection {index} is gone, or another");
            tracing::error!(
                connection = index,
                "bug: something came for a connection that is gone"
            );
            return;
        };
        let served = act(connection, &mut self.state);
        if connection.joins_list() {
            let index = connection.id().index;
            self.connections.list(index);
        }
        if let Err(violation) = served {
            self.end_for(index, violation);
        }
    }

    /// Acts on the completions of all devices. Returns whether there were any.
    #[inline]
    fn reap(&mut self) -> bool {
        let mut busy = false;
        for place in 0..self.state.pollers.places() {
            let Some(entry) = self.state.pollers.working(place) else { continue };
            match entry.poller.poll(&mut self.reaped[..]) {
                Ok(0) => busy |= entry.poller.has_more(),
                Ok(reaped) => {
                    busy = true;
                    self.on_completions(place, reaped);
                    if reaped == REAP {
                        self.reap_more(place);
                    }
                }
                Err(error) => self.end_poller(place, &error),
            }
        }
        busy
    }

    /// Acts on further completions of a device: a full poll may have left some.
    #[inline(never)]
    fn reap_more(&mut self, place: usize) {
        // Bounded, so that one busy device cannot starve the store or other devices.
        for _ in 1..REAP_ROUNDS {
            let Some(entry) = self.state.pollers.working(place) else { return };
            match entry.poller.poll(&mut self.reaped[..]) {
                Ok(0) => return,
                Ok(reaped) => {
                    self.on_completions(place, reaped);
                    if reaped < REAP {
                        return;
                    }
                }
                Err(error) => return self.end_poller(place, &error),
            }
        }
    }

    /// All connections of this group were ended, so the group acknowledges nothing any more. When
    /// this holds in all groups, the shard writes its dirty blocks: no client is left to see the
    /// answers to other requests. So a command that a store does not answer, and a QP that is not
    /// destroyed, keep no dirty block from its store. Other groups may ask the shard until they
    /// have no connection.
    #[cold]
    fn end_shard(&mut self) {
        let others = self.state.groups() - 1;
        if !std::mem::replace(&mut self.stopping.said_silent, true) {
            self.tell_others(|| GroupMail::Silent);
        }
        let is_quiet = !self.has_connections();
        if is_quiet && !std::mem::replace(&mut self.stopping.said_quiet, true) {
            self.tell_others(|| GroupMail::Quiet);
        }
        if self.stopping.silent_groups >= others {
            self.state.shard.stop();
            self.deliver();
        }
    }

    fn tell_others(&mut self, mail: impl Fn() -> GroupMail) {
        let own = self.state.index;
        for group in (0..self.state.groups()).filter(|group| *group != own) {
            self.state.others.send(group, mail());
        }
    }

    #[inline(never)]
    fn take_group_mail(&mut self) -> bool {
        let mut busy = false;
        // Bounded, so that busy groups cannot starve the devices.
        for _ in 0..1024 {
            let Some(mail) = self.state.others.receive() else { break };
            (busy, self.state.io) = (true, true);
            match mail {
                GroupMail::Request(request) => self.state.shard.request(request),
                GroupMail::Reply(reply) => self.on_reply(reply),
                GroupMail::ReturnMemory(of) => {
                    self.return_memory(|shard, session| shard.gives_back(session, &of))
                }
                GroupMail::Silent => self.stopping.silent_groups += 1,
                GroupMail::Quiet => self.stopping.quiet_groups += 1,
            }
        }
        busy
    }

    /// Delivers the shard's answers, which may cause more answers.
    #[inline(never)]
    fn deliver(&mut self) {
        while let Some(reply) = self.state.shard.take_reply() {
            let group = wide(reply.to().group);
            if group == self.state.index {
                self.on_reply(reply);
            } else {
                self.state.others.send(group, GroupMail::Reply(reply));
            }
        }
    }

    /// Answers the writes that need only the store's completion.
    #[inline]
    fn deliver_written(&mut self) {
        let mut number = 0;
        while let Some(to) = self.state.shard.next_written(number) {
            number += 1;
            self.serve_named(to.connection, |connection, group| {
                reply::on_stored(connection, group, to.tag);
                Ok(())
            });
        }
    }

    /// A shard answered.
    fn on_reply(&mut self, reply: ShardReply) {
        if let Some(number) = reply.to().number_of_control() {
            return match number & OF_SETTLES {
                0 => self.on_step_reply(number, &reply),
                _ => self.on_settle_reply(number, &reply),
            };
        }
        let id = reply.to().connection;
        self.serve_named(id, |connection, group| reply::on_reply(connection, group, reply));
    }

    /// The shard is short of memory: every poll group that sent from it makes the memory come back.
    #[cold]
    fn seek_memory(&mut self) {
        self.return_memory(Shard::seeks_from);
        let now = self.state.time.now;
        let due = |at| now.saturating_duration_since(at) >= REMIND_INTERVAL;
        if self.state.groups() > 1 && self.reminded.is_none_or(due) {
            self.reminded = Some(now);
            let of = self.state.shard.seeks();
            for group in (0..self.state.groups()).filter(|group| *group != self.state.index) {
                self.state.others.send(group, GroupMail::ReturnMemory(of.clone()));
            }
        }
    }

    /// Memory is short: connections of the sessions `chosen` may hold some behind unsignaled WRs.
    fn return_memory(&mut self, chosen: impl Fn(&Shard<S>, SessionIndex) -> bool) {
        for index in 0..self.connections.places() {
            let session = self.connections.at(index).map(|connection| connection.params().session);
            if session.is_some_and(|session| chosen(&self.state.shard, session)) {
                self.serve(index, |connection, _| {
                    send_barrier::ask(connection);
                    Ok(())
                });
            }
        }
    }

    /// Posts the WRs that the turn queued.
    #[inline(always)]
    fn post_all(&mut self) {
        let mut at = 0;
        while let Some(index) = self.connections.listed(at) {
            at += 1;
            self.post(index);
        }
        if at > 0 {
            self.connections.clear_list();
        }
    }

    #[inline(always)]
    fn post(&mut self, index: usize) {
        let Some(connection) = self.connections.at(index) else {
            debug_assert!(false, "a connection left its place and not the list");
            return;
        };
        connection.leave_list();
        if !connection.is_live() {
            return;
        }
        respond::queue_responses(connection, &self.state.stats);
        let poller = &mut self.state.pollers[connection.poller()].poller;
        let (qp, (recvs, sends)) = (connection.qp(), connection.posts());
        // RECVs first: an answer lets the peer send the next command.
        let mut result = if recvs.rows.is_empty() { Ok(()) } else { poller.post_recvs(qp, recvs) };
        if result.is_ok() && !sends.is_empty() {
            result = poller.post_send(qp, sends);
        }
        connection.posted();
        if let Err(error) = result {
            if self.state.told.lines.may_write(log_lines::LogLine::Post, self.state.time.now) {
                tracing::error!(peer = connection.params().peer, %error, "cannot post");
            }
            self.end(index, "posting failed");
        }
    }

    /// Publishes all counters: before a sleep, and on request.
    pub fn publish_stats(&self) {
        self.publish_own();
        self.state.shard.publish_volumes();
    }

    /// Publishes the counters after a busy turn: those of the group, and of a few volumes in turn.
    pub fn publish_turn(&mut self) {
        self.publish_own();
        self.state.shard.publish_some_volumes();
    }

    fn publish_own(&self) {
        let GroupState { stats, shard, pollers, others, .. } = &self.state;
        stats.set_fabric(&pollers.counters());
        stats.set_cache(&shard.counters(), shard.slots(), shard.dirty_max_bytes());
        stats.peer_messages.set(others.sent());
    }
}
