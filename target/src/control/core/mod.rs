//! [`Core`]: the decisions of control. Core decides which host may connect, which session belongs
//! to it, which volumes it may use, and when a command is answered. Pure: the time is an argument,
//! and the actions come out as [`Effect`]s.
//!
//! The caller makes one call at a time and then takes the effects, in order, until there is none:
//! mail to the poll groups must be sent in that order, and behind the connections that were
//! admitted before. Core promises:
//!
//! - A connection that has not logged in changes nothing but the count of strangers
//!   (`admissions.rs`).
//! - LOGIN is answered when its session has no connection of an older epoch left (`login.rs`).
//! - OPEN for writing is answered when three things hold (`open.rs`). Every session that held the
//!   volume before and lost it has no connection of that time left. The next run of the target
//!   would know of the change of holder. And all writes of earlier holders are durable.
//! - Fencing takes effect once the record of the new holder is durable. A take-over that cannot be
//!   remembered leaves the holder as it is.
//! - So a command of an earlier holder takes effect before the answer, or never.
//! - A volume changes while the target runs, and no command sees half of a change (`alter.rs`).
//! - Every wait ends: by its event, or by [`QUIESCE_DEADLINE`].

mod admissions;
mod allowance;
mod alter;
mod async_events;
mod budget;
mod changes;
mod claim;
mod connect;
mod connect_refusal;
mod draining;
mod exports;
mod given_up;
mod hosts;
mod list;
mod login;
mod occurrences;
mod open;
mod open_settles;
mod places;
mod proof;
mod seals;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_protocol::width::narrow;
use rblk_protocol::{
    CommandCapsule, Epoch, Generation, InstanceId, Name, Opcode, Status, Tag, WriteVerifier,
};

use crate::control::peers::peer_lines::PeerLines;
use crate::control::peers::session::{After, Leave, SessionTable};
use crate::data::poll_group::{Notice, SettleTicket, VolumeStep};
use crate::record::holders::{HolderRecord, Holders, VolumeUuid};
use crate::store::StoreIdentity;
use crate::volume::Volume;
use crate::volume::ids::{AdmissionId, ConnectionId, SessionIndex, VolumeIndex};
use crate::volume::limits::Limiter;
use rblk_operate::target::events::{EventKind, Occurrence};

pub use alter::{OrderError, VolumeOrder};
pub use budget::Capacity;
pub use connect::{Admitted, Knock};
pub use connect_refusal::ConnectRefusal;
pub use draining::DrainState;
pub use hosts::{Hosts, HostsError};
pub(crate) use proof::NO_KEYS;
pub use proof::{AuthConfig, Introduction};

use admissions::{Admissions, Member};
use alter::Alteration;
use async_events::AsyncEvents;
use changes::Changes;
use connect_refusal::refused;
use draining::Drain;
use exports::Exports;
use given_up::OwedFences;
use login::WaitingLogin;
use open::WaitingOpen;
use open_settles::OpenSettles;
use proof::Proven;
use seals::{Seals, Unsealed};

/// How long a LOGIN may wait for the connections of older epochs to end, and an OPEN for those of
/// earlier holders.
pub(crate) const QUIESCE_DEADLINE: Duration = Duration::from_secs(30);

/// The connection of an admin command, which also takes its reply.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ConnectionRef {
    /// The poll group.
    pub group: usize,
    /// The connection there.
    pub connection: ConnectionId,
}

/// The number of an [`Effect::Persist`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub u64);

/// An action for the caller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Answer an admin command. Does nothing if the connection is gone by now.
    Reply {
        /// The connection.
        to: ConnectionRef,
        /// The command's tag.
        tag: Tag,
        /// Outcome.
        status: Status,
        /// Value of the response.
        value: u32,
        /// Written to the command's descriptor first.
        payload: Vec<u8>,
    },
    /// The LOGIN of an admin connection was accepted: tell its poll group the session.
    Adopt {
        /// The connection. May be gone by now; then there is nothing to do.
        connection: ConnectionRef,
        /// Its name.
        admission: AdmissionId,
        /// Its session.
        session: SessionIndex,
        /// Its epoch.
        epoch: Epoch,
        /// The connection ends when it is silent for longer.
        silence: Duration,
    },
    /// End a connection that failed its proof, once the replies before are sent.
    Expel {
        /// The connection. May be gone by now; then there is nothing to do.
        connection: ConnectionRef,
    },
    /// End a connection that has proven nothing: its place went to a newer one.
    Evict {
        /// Its name. The connection may be gone by now; then there is nothing to do.
        admission: AdmissionId,
    },
    /// Tell every poll group the limits per second of the host of a session.
    LimitHost {
        /// The session.
        session: SessionIndex,
        /// `None`: no limit.
        limits: Option<Arc<Limiter>>,
    },
    /// Tell every poll group.
    All(Notice),
    /// Make the record durable, in the order of these effects, and then call [`Core::persisted`],
    /// now or later. No peer hears of anything that the next run must know before that call.
    Persist {
        /// To name in that call.
        ticket: Ticket,
        /// The new record.
        record: HolderRecord,
    },
    /// Make durable all writes of hosts to the volume so far, and then call [`Core::settled`].
    Settle {
        /// To name in that call.
        ticket: SettleTicket,
        /// The volume.
        volume: VolumeIndex,
    },
    /// Carry out a step of the alteration of [`Core::altered`], and then call [`Core::stepped`].
    Step(VolumeStep),
    /// The step before has taken too long. Stop waiting for it.
    GiveUpStep,
    /// A removal by force goes on without the store, for this reason.
    GivenUp(String),
    /// The alteration has ended. On an error the volume is as it was.
    Altered(Result<(), String>),
    /// The drain is over: stop every poll group. Comes once.
    StopGroups,
}

/// The parts of a core.
#[derive(Debug)]
pub struct CoreParts {
    /// The target's name.
    pub name: Name,
    /// This run.
    pub instance: InstanceId,
    /// The volumes that are exported at first.
    pub volumes: Vec<Arc<Volume>>,
    /// The target's resources for connections.
    pub capacity: Capacity,
    /// How long a session without connections keeps its volumes, and how long a holder of the run
    /// before may come back.
    pub lease: Duration,
    /// How long a drain may take.
    pub drain_timeout: Duration,
    /// The holders that earlier runs left.
    pub holders: Holders,
    /// How hosts prove their identity; `None`: no host has to.
    pub auth: Option<AuthConfig>,
}

/// Counters of decisions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Decisions {
    /// Sessions that were fenced by a take-over.
    pub take_overs: u64,
    /// OPENs that were refused because the volume had another holder meanwhile.
    pub refused_returns: u64,
    /// Initiators that failed to prove their identity.
    pub unproven: u64,
}

/// The decisions of one run of a target.
#[derive(Debug)]
pub struct Core {
    exports: Exports,
    auth: Option<AuthConfig>,
    admissions: Admissions,
    capacity: Capacity,
    // Admin connections with sealed commands.
    seals: Seals,
    // The proven identity of the host of each session. Of every session, or of none.
    proven: BTreeMap<SessionIndex, Proven>,
    sessions: SessionTable,
    holders: Holders,
    // Changes of the holders that are not durable yet.
    changes: Changes,
    // Until when an absent holder may come back, by volume.
    kept_for: BTreeMap<VolumeIndex, Instant>,
    waiting_logins: BTreeMap<SessionIndex, WaitingLogin>,
    // In the order in which they came.
    waiting_opens: Vec<WaitingOpen>,
    settles: OpenSettles,
    // The volume that is being added, removed or changed.
    alteration: Option<Alteration>,
    // Volumes that only their present users may open.
    closing: BTreeSet<VolumeIndex>,
    fences: OwedFences,
    events: AsyncEvents,
    drain: Drain,
    decisions: Decisions,
    effects: VecDeque<Effect>,
    // Occurrences for the log of events that the caller has not taken yet.
    occurrences: VecDeque<Occurrence>,
    // Lines that peers made control log.
    lines: PeerLines,
    // The time of the last call that named one.
    latest: Instant,
}

/// The outcome of an admin command.
enum AdminAnswer {
    Now(Status, u32, Vec<u8>),
    Later,
}

fn refuse(status: Status) -> AdminAnswer {
    AdminAnswer::Now(status, 0, Vec::new())
}

fn refuse_saying(status: Status, text: String) -> AdminAnswer {
    let text = text.into_bytes();
    AdminAnswer::Now(status, narrow(text.len()), text)
}

impl Core {
    /// Hosts can connect from `now` on. For a lease after that, volumes are kept for their last
    /// holders. Registering a large arena may have taken longer than a lease.
    pub fn ready(&mut self, now: Instant) {
        let (until, holders) = (now + self.sessions.lease(), &self.holders);
        let may_come_back = |volume: &&Arc<Volume>| {
            holders.record(&volume.uuid).is_some_and(|record| record.present)
        };
        let kept = self.exports.volumes().iter().filter(may_come_back);
        self.kept_for = kept.map(|volume| (volume.index, until)).collect();
    }

    /// A run that begins at `now`, without connections. Call [`Self::ready`] before the first one.
    #[must_use]
    pub fn new(parts: CoreParts, now: Instant) -> Self {
        Self {
            kept_for: BTreeMap::new(),
            exports: Exports::new(parts.name, parts.instance, parts.volumes),
            auth: parts.auth,
            admissions: Admissions::new(parts.capacity.of_a_host()),
            capacity: parts.capacity,
            seals: Seals::default(),
            proven: BTreeMap::new(),
            sessions: SessionTable::new(parts.capacity.sessions, parts.lease),
            holders: parts.holders,
            changes: Changes::default(),
            waiting_logins: BTreeMap::new(),
            waiting_opens: Vec::new(),
            settles: OpenSettles::default(),
            alteration: None,
            closing: BTreeSet::new(),
            fences: OwedFences::default(),
            events: AsyncEvents::default(),
            drain: Drain::new(parts.drain_timeout),
            decisions: Decisions::default(),
            effects: VecDeque::new(),
            occurrences: VecDeque::new(),
            lines: PeerLines::default(),
            latest: now,
        }
    }

    /// The lines that peers made control log, here and at the caller.
    pub(super) fn lines(&mut self) -> &mut PeerLines {
        &mut self.lines
    }

    /// The verifier of a volume, as its record has it.
    pub fn vouch(&mut self, volume: VolumeUuid, verifier: WriteVerifier) {
        self.exports.vouch(volume, verifier);
    }

    /// Takes over the records that an earlier run left of a volume, before it is served.
    pub fn adopt(
        &mut self,
        volume: VolumeUuid,
        holder: Option<HolderRecord>,
        store: Option<StoreIdentity>,
    ) {
        self.holders.adopt(volume, holder, store);
    }

    /// The next action for the caller. After every other call, take all effects.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// An admitted connection ended and is used no more, or it could not be made.
    pub fn gone(&mut self, id: AdmissionId, now: Instant) {
        self.latest = now;
        self.seals.end(id);
        if let Some(member) = self.admissions.remove(id) {
            self.member_gone(member, now);
        }
    }

    fn member_gone(&mut self, member: Member, now: Instant) {
        let Member { session, epoch, queue, memory_bytes, is_proven, .. } = member;
        if queue.is_none() {
            self.told_gone(session, epoch);
            self.events.forget_epoch(session, epoch);
            if self.waiting_logins.get(&session).is_some_and(|login| login.epoch == epoch) {
                self.waiting_logins.remove(&session);
            }
            self.drop_opens_of(session, epoch);
            // A session without its admin connection is lost: its queues do not outlive it.
            if let Some(before) = epoch.next() {
                self.all(Notice::EndConnections { session, before });
            }
        }
        let connection = (epoch, queue, is_proven);
        match self.sessions.connection_gone(session, connection, memory_bytes, now) {
            After::Lives => {}
            After::Quiesced => self.finish_login(session),
            After::Ended => self.forget(session),
        }
        self.finish_opens();
        self.stop_if_drained(now);
    }

    /// An admin command came by a connection, with its in-capsule data.
    pub fn command(
        &mut self,
        from: ConnectionRef,
        id: AdmissionId,
        command: &CommandCapsule,
        body: &[u8],
        now: Instant,
    ) {
        self.latest = now;
        let answer = match self.admissions.member(id) {
            Some(member) => self.member_says(from, id, member, command, body, now),
            None => self.stranger_says(from, id, command, body, now),
        };
        match answer {
            AdminAnswer::Now(status, value, payload) => {
                self.reply(from, command.tag, status, value, payload);
            }
            AdminAnswer::Later => {}
        }
        self.finish_opens();
    }

    fn stranger_says(
        &mut self,
        from: ConnectionRef,
        id: AdmissionId,
        command: &CommandCapsule,
        body: &[u8],
        now: Instant,
    ) -> AdminAnswer {
        if self.admissions.stranger_mut(id).is_none() {
            // The connection ended meanwhile: there is no peer to answer.
            return AdminAnswer::Later;
        }
        match command.opcode {
            Opcode::Authenticate => self.authenticate(from, id, body),
            Opcode::Login => self.login(from, id, command, body, now),
            _ => refuse(Status::NotReady),
        }
    }

    fn member_says(
        &mut self,
        from: ConnectionRef,
        id: AdmissionId,
        member: Member,
        command: &CommandCapsule,
        body: &[u8],
        now: Instant,
    ) -> AdminAnswer {
        match self.seals.open(from, command, body) {
            Unsealed::Plain => self.answer(from, member, command, body, now),
            Unsealed::Sealed(opened) => self.answer(from, member, command, &opened, now),
            Unsealed::Broken(error) => {
                self.distrust(from, id, &error.to_string());
                AdminAnswer::Later
            }
            Unsealed::Ignored => AdminAnswer::Later,
        }
    }

    fn answer(
        &mut self,
        from: ConnectionRef,
        member: Member,
        command: &CommandCapsule,
        body: &[u8],
        now: Instant,
    ) -> AdminAnswer {
        let Member { session, epoch, .. } = member;
        let Some(state) = self.sessions.get(session) else { return refuse(Status::NoSuchSession) };
        match state.leave() {
            Some(Leave::Fenced) => return refuse(Status::Fenced),
            Some(Leave::LoggedOut) => return refuse(Status::NotReady),
            Some(Leave::Revoked) => return refuse(Status::NotAllowed),
            None => {}
        }
        if epoch != state.epoch || command.epoch != epoch {
            return refuse(Status::Fenced);
        }
        if !state.logged_in && command.opcode != Opcode::Login {
            return refuse(Status::NotReady);
        }
        match command.opcode {
            Opcode::Login => self.login_again(from, session, command.tag, now),
            Opcode::ListVolumes => self.list(from, session, command),
            Opcode::OpenVolume => self.open(from, session, command, body, now),
            Opcode::CloseVolume => self.close(session, command),
            Opcode::AsyncEvent => self.async_event(from, session, command),
            Opcode::Logout => self.logout(session),
            _ => refuse(Status::InvalidOpcode),
        }
    }

    /// The record of an [`Effect::Persist`] is durable, or may not be durable for that reason.
    pub fn persisted(&mut self, ticket: Ticket, result: Result<(), String>) {
        self.changes.confirmed(ticket, result.is_ok());
        self.fences.look(&self.changes, &result);
        match result {
            Ok(()) => {
                self.claim_persisted(ticket);
                self.open_persisted(ticket);
            }
            Err(error) => {
                self.open_not_persisted(ticket, &error);
                self.claim_not_persisted(ticket);
            }
        }
        self.finish_opens();
    }

    /// Whether the time alone may change something. Then call [`Self::tick`] every half second or
    /// so.
    #[must_use]
    pub fn needs_ticks(&self) -> bool {
        self.sessions.iter().any(|session| session.connections() == 0)
            || !self.kept_for.is_empty()
            || !self.waiting_logins.is_empty()
            || !self.waiting_opens.is_empty()
            || self.is_altering()
            || self.owes_fences()
            || self.drain.is_about_to_stop()
            // Decisions that wait for a record use the time of the last call.
            || !self.changes.are_confirmed()
    }

    /// Ends the waits that are over. Needed while [`Self::needs_ticks`].
    pub fn tick(&mut self, now: Instant) {
        self.latest = now;
        let told = self.expiries();
        for session in self.sessions.expire(now) {
            tracing::info!(session = session.index, "a lost session's lease ended");
            if let Some((_, what)) = told.iter().find(|(index, _)| *index == session) {
                self.happened(what.clone());
            }
            self.forget(session);
        }
        self.kept_for.retain(|_, until| *until > now);
        self.end_late_logins(now);
        self.end_late_opens(now);
        self.end_late_step(now);
        self.fence_again();
        self.stop_if_drained(now);
    }

    /// Connections that have not logged in.
    #[must_use]
    pub fn strangers(&self) -> usize {
        self.admissions.strangers()
    }

    /// The sessions that have I/O connections, and whether all of these are encrypted.
    #[must_use]
    pub(crate) fn encryption(&self) -> BTreeMap<SessionIndex, bool> {
        self.admissions.encryption()
    }

    /// All sessions.
    #[must_use]
    pub fn sessions(&self) -> &SessionTable {
        &self.sessions
    }

    /// An I/O connection of a session was granted, with digests or without.
    pub(crate) fn note_digest(&mut self, session: SessionIndex, digest: bool) {
        if let Some(session) = self.sessions.get_mut(session) {
            session.digest = digest;
        }
    }

    /// The last holders of the volumes.
    #[must_use]
    pub(crate) fn holders(&self) -> &Holders {
        &self.holders
    }

    /// The exported volumes.
    #[must_use]
    pub(crate) fn volumes(&self) -> &[Arc<Volume>] {
        self.exports.volumes()
    }

    /// A volume's generation; fresh for none.
    #[must_use]
    pub(crate) fn generation(&self, volume: VolumeIndex) -> Generation {
        let volume = self.exports.volume(volume);
        volume.map_or(Generation::FRESH, |v| self.holders.generation(&v.uuid))
    }

    /// Whether an absent holder of the volume may come back.
    #[must_use]
    pub(crate) fn is_kept(&self, volume: VolumeIndex) -> bool {
        self.kept_for.contains_key(&volume)
    }

    /// The counters of decisions.
    #[must_use]
    pub(crate) fn decisions(&self) -> Decisions {
        self.decisions
    }

    /// A session ended; another session may have its index.
    fn forget(&mut self, session: SessionIndex) {
        self.waiting_logins.remove(&session);
        self.waiting_opens.retain(|open| open.session != session);
        self.events.forget(session);
        if self.proven.remove(&session).is_some() {
            // Connections that have not proven themselves do not keep a session.
            self.all(Notice::EndConnections { session, before: Epoch(u32::MAX) });
        }
        self.all(Notice::ForgetSession { session });
    }

    fn all(&mut self, notice: Notice) {
        self.effects.push_back(Effect::All(notice));
    }

    /// Answers a command: sealed if the command was.
    fn reply(&mut self, to: ConnectionRef, tag: Tag, status: Status, value: u32, payload: Vec<u8>) {
        let (value, payload) = match self.seals.seal(to, tag, (status, value), &payload) {
            Some(sealed) => (narrow(sealed.len()), sealed),
            None => (value, payload),
        };
        self.effects.push_back(Effect::Reply { to, tag, status, value, payload });
    }

    fn reply_saying(&mut self, to: ConnectionRef, tag: Tag, status: Status, text: String) {
        let text = text.into_bytes();
        self.reply(to, tag, status, narrow(text.len()), text);
    }

    /// Makes a record durable. It need not be the one of [`Self::holders`].
    fn persist(&mut self, record: HolderRecord) -> Ticket {
        let ticket = self.changes.next_ticket();
        self.effects.push_back(Effect::Persist { ticket, record });
        ticket
    }

    /// True while a fence is not durable.
    #[must_use]
    pub fn owes_fences(&self) -> bool {
        self.fences.are_owed()
    }

    /// The volumes with such a fence. Their mounts must learn of a loss.
    pub(crate) fn owed_fences(&self) -> impl Iterator<Item = VolumeUuid> {
        self.fences.iter()
    }

    /// Writes the records again that could not be written.
    fn fence_again(&mut self) {
        for volume in self.fences.due(&self.changes) {
            if let Some(record) = self.holders.record(&volume).cloned() {
                self.persist_change(record);
            }
        }
    }

    /// Makes the record of [`Self::holders`] durable, which just changed.
    fn persist_change(&mut self, record: HolderRecord) -> Ticket {
        let volume = record.volume;
        let ticket = self.persist(record);
        self.changes.writes(volume, ticket);
        ticket
    }
}
