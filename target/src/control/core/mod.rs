//! [`Core`]: the decisions of control. Core decides which host may connect, which session belongs
//! to it, which volumes it may use, and when a command is answered. Pure: the time is an argument,
//! and the actions come out as [`Effect`]s.
//!
//! Core only puts its parts together. Each part owns its state, and its functions take the other
//! parts that they need:
//!
//! | part | it has |
//! | --- | --- |
//! | [`Gate`] | the connections that ask to be let in |
//! | [`HostSessions`] | the sessions of hosts, their proofs, and their LOGINs |
//! | [`Holdings`] | the volumes, their holders with the records of them, and the OPENs that wait |
//! | [`Alterations`] | the change of a volume that is carried out |
//! | [`Drain`] | the end of the target |
//! | [`Outbox`] | the decisions that the caller has not taken yet |
//!
//! The caller makes one call at a time and then takes the effects, in order, until there is none:
//! mail to the poll groups must be sent in that order, and behind the connections that were
//! admitted before. Core promises:
//!
//! - A connection that has not logged in changes nothing but the count of strangers
//!   (`gate/`).
//! - LOGIN and DROP are answered when no connection of the epochs that they end is left
//!   (`sessions/`).
//! - OPEN for writing is answered when three things hold (`holdings/`). Every session that held the
//!   volume before and lost it has no connection of that time left. The next run of the target
//!   would know of the change of holder. And all writes of earlier holders are durable.
//! - Fencing takes effect once the record of the new holder is durable. A take-over that cannot be
//!   remembered leaves the holder as it is.
//! - So a command of an earlier holder takes effect before the answer, or never.
//! - A volume changes while the target runs, and no command sees half of a change (`alter/`).
//! - Every wait ends: by its event, or by [`QUIESCE_DEADLINE`].

mod admin_command;
mod alter;
mod budget;
mod commands;
mod connect_refusal;
mod draining;
mod effect;
mod exports;
mod gate;
mod holdings;
mod hosts;
mod list;
mod outbox;
mod seals;
mod sessions;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_operate::target::events::Occurrence;
use rblk_protocol::auth::PublicKey;
use rblk_protocol::{Generation, HostId, InstanceId, Name, WriteVerifier};

use crate::control::peers::peer_lines::PeerLines;
use crate::control::peers::session::{After, SessionTable};
use crate::data::poll_group::{Notice, SettleTicket};
use crate::record::holders::{HolderRecord, Holders, VolumeUuid};
use crate::store::StoreIdentity;
use crate::volume::Volume;
use crate::volume::ids::{AdmissionId, SessionIndex, VolumeIndex};

pub use alter::{OrderError, VolumeChange};
pub use budget::Capacity;
pub use connect_refusal::ConnectRefusal;
pub use draining::DrainState;
pub use effect::{ConnectionRef, Effect, Ticket};
pub use gate::{Admitted, Knock};
pub use hosts::{Hosts, HostsError};
pub(crate) use sessions::proofs::NO_KEYS;
pub use sessions::proofs::{AuthConfig, Introduction};

use alter::Alterations;
use connect_refusal::refused;
use draining::Drain;
use exports::Exports;
use gate::{Gate, Member};
use holdings::Holdings;
use outbox::Outbox;
use sessions::proofs::Followed;
use sessions::{HostSessions, TargetIdentity};

/// How long a LOGIN may wait for the connections of older epochs to end, and an OPEN for those of
/// earlier holders.
pub(crate) const QUIESCE_DEADLINE: Duration = Duration::from_secs(30);

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

/// The decisions of one run of a target. See the module.
#[derive(Debug)]
pub struct Core {
    gate: Gate,
    sessions: HostSessions,
    holdings: Holdings,
    alterations: Alterations,
    drain: Drain,
    out: Outbox,
    // The time of the last call that named one.
    latest: Instant,
}

impl Core {
    /// A run that begins at `now`, without connections. Call [`Self::ready`] before the first one.
    #[must_use]
    pub fn new(parts: CoreParts, now: Instant) -> Self {
        let CoreParts { name, instance, volumes, capacity, lease, drain_timeout, holders, auth } =
            parts;
        let table = SessionTable::new(capacity.sessions, lease);
        Self {
            gate: Gate::new(capacity),
            sessions: HostSessions::new(TargetIdentity { name, instance }, table, auth),
            holdings: Holdings::new(Exports::new(instance, volumes), holders),
            alterations: Alterations::default(),
            drain: Drain::new(drain_timeout),
            out: Outbox::default(),
            latest: now,
        }
    }

    /// Hosts can connect from `now` on. For a lease after that, volumes are kept for their last
    /// holders. Registering a large arena may have taken longer than a lease.
    pub fn ready(&mut self, now: Instant) {
        self.holdings.keep_all(now + self.sessions.table().lease());
    }

    /// The verifier of a volume, as its record has it.
    pub fn vouch(&mut self, volume: VolumeUuid, verifier: WriteVerifier) {
        self.holdings.exports_mut().vouch(volume, verifier);
    }

    /// Takes over the records that an earlier run left of a volume, before it is served.
    pub fn adopt(
        &mut self,
        volume: VolumeUuid,
        holder: Option<HolderRecord>,
        store: Option<StoreIdentity>,
    ) {
        self.holdings.book_mut().adopt(volume, holder, store);
    }

    /// As [`Self::adopt`], for a volume of a group: other members may have written the records
    /// since this run served it. Generations of a volume that no host ever held there begin
    /// above `base`.
    pub fn adopt_shared(
        &mut self,
        volume: VolumeUuid,
        known: (Option<HolderRecord>, Option<StoreIdentity>),
        base: Generation,
    ) {
        self.holdings.book_mut().adopt_shared(volume, known, base);
    }

    /// Until then, a former owner of the image of a volume of a group may answer its holder: no
    /// other host gets the volume, not even by a take-over. Their OPENs wait.
    pub fn keep_for_holder(&mut self, volume: VolumeIndex, until: Instant) {
        self.holdings.keep_for_holder(volume, until);
    }

    /// The next action for the caller. After every other call, take all effects.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.out.next_effect()
    }

    /// The next occurrence. After every call, take all.
    pub fn next_occurrence(&mut self) -> Option<Occurrence> {
        self.out.next_occurrence()
    }

    /// The lines that peers made control log, here and at the caller.
    pub(super) fn lines(&mut self) -> &mut PeerLines {
        self.out.lines()
    }

    /// An initiator wants to connect.
    ///
    /// # Errors
    /// Why the connection is refused.
    pub fn connect(&mut self, knock: &Knock<'_>, now: Instant) -> Result<Admitted, ConnectRefusal> {
        self.latest = now;
        if self.drain.has_begun() {
            let reason = rblk_protocol::RejectReason::ShuttingDown;
            return Err(refused(reason, "the target is draining"));
        }
        self.gate.connect(knock, &mut self.sessions, &mut self.out, now)
    }

    /// An I/O connection has proven that it is of its session: it now owns its queue number, and
    /// its memory is booked on its host. Returns its session if that worked.
    pub fn proved(
        &mut self,
        from: ConnectionRef,
        id: AdmissionId,
        now: Instant,
    ) -> Option<SessionIndex> {
        self.latest = now;
        self.gate.proved((from, id), &mut self.sessions, &mut self.out, now)
    }

    /// An admitted connection ended and is used no more, or it could not be made.
    pub fn gone(&mut self, id: AdmissionId, now: Instant) {
        self.latest = now;
        if let Some(member) = self.gate.gone(id, &mut self.out) {
            self.member_gone(member, now);
        }
    }

    fn member_gone(&mut self, member: Member, now: Instant) {
        let Self { sessions, holdings, drain, out, .. } = self;
        let Member { session, epoch, queue, memory_bytes, is_proven, .. } = member;
        if queue.is_none() {
            if !drain.has_begun() {
                sessions.tell_admin_gone((session, epoch), holdings.exports(), out);
            }
            sessions.admin_gone(session, epoch);
            holdings.drop_opens_of((session, epoch), sessions, out);
            // An epoch without its admin connection is lost: its queues do not outlive it.
            out.tell_all(Notice::EndEpoch { session, epoch });
        }
        let connection = (epoch, queue, is_proven);
        match sessions.table_mut().connection_gone(session, connection, memory_bytes, now) {
            After::Lives => {}
            After::Quiesced => sessions.answer_buried(session, out, now),
            After::Ended => {
                holdings.forget(session);
                sessions.forget(session, out);
            }
        }
        holdings.finish_opens(sessions, out, now);
        drain.stop_if_drained(sessions.connected(), out, now);
    }

    /// Replaces the table of the hosts. Sessions without their key or host in it end at once, and
    /// so does the use of volumes to which a host has no right any more. Returns the hosts that
    /// lost sessions. Does nothing if no proof is required.
    pub fn set_hosts(&mut self, hosts: Hosts, now: Instant) -> Vec<Name> {
        self.latest = now;
        let Self { sessions, holdings, out, .. } = self;
        let Some(former) = sessions.proofs_mut().replace(hosts) else { return Vec::new() };
        let lasting = sessions.table().iter().filter(|session| session.leave().is_none());
        let lasting: Vec<SessionIndex> = lasting.map(|session| session.index).collect();
        let mut ended = Vec::new();
        for session in lasting {
            match sessions.proofs_mut().follow(session, &former, out) {
                None => {}
                Some(Followed::Stays) => holdings.close_forbidden(session, sessions, out),
                Some(Followed::Gone(host)) => {
                    ended.push(host);
                    holdings.revoke(session, sessions, out);
                }
            }
        }
        holdings.finish_opens(sessions, out, now);
        ended
    }

    /// Ends a session: its volumes are free, and its connections end. Its host may connect again at
    /// once, and is then admitted as after a loss of the link. Returns whether there was such a
    /// session.
    pub fn kick(&mut self, session: SessionIndex, now: Instant) -> bool {
        self.latest = now;
        let Self { sessions, holdings, drain, out, .. } = self;
        if !holdings.kick(session, sessions, out) {
            return false;
        }
        holdings.finish_opens(sessions, out, now);
        drain.stop_if_drained(sessions.connected(), out, now);
        true
    }

    /// The record of an [`Effect::Persist`] is durable, or may not be durable for that reason.
    pub fn persisted(&mut self, ticket: Ticket, result: Result<(), String>) {
        let Self { sessions, holdings, out, latest, .. } = self;
        holdings.persisted(ticket, &result, (sessions, out), *latest);
        holdings.finish_opens(sessions, out, *latest);
    }

    /// The store has answered an [`Effect::Settle`]: the earlier writes to the volume are durable,
    /// or not all of them are, for this reason.
    pub fn settled(&mut self, ticket: SettleTicket, result: Result<(), String>) {
        let Self { sessions, holdings, out, latest, .. } = self;
        holdings.settled(ticket, &result, sessions, out);
        holdings.finish_opens(sessions, out, *latest);
    }

    /// Whether a change may be carried out that makes this volume. Nothing changes.
    ///
    /// # Errors
    /// [`OrderError`].
    pub fn judge(&self, change: &VolumeChange, volume: &Volume) -> Result<(), OrderError> {
        if self.drain.has_begun() {
            return Err(OrderError::Stopping);
        }
        Alterations::judge(change, volume, &self.holdings, &self.sessions)
    }

    /// Begins to carry out a change. `volume`: as it will be; as it is, if it goes or stays. The
    /// index of a new one was never used in this run. [`Effect::Altered`] tells how it ended.
    ///
    /// # Errors
    /// [`OrderError`]. Nothing has changed.
    pub fn change(
        &mut self,
        change: &VolumeChange,
        volume: Arc<Volume>,
        now: Instant,
    ) -> Result<(), OrderError> {
        self.latest = now;
        self.alterations.check_free()?;
        self.judge(change, &volume)?;
        let Self { alterations, sessions, holdings, out, .. } = self;
        alterations.begin((change, volume), holdings, (sessions, out), now)
    }

    /// The volume that is being altered, as it will be.
    #[must_use]
    pub fn altered(&self) -> Option<&Arc<Volume>> {
        self.alterations.altered()
    }

    /// The step that [`Effect::Step`] asked for is done everywhere, or failed somewhere.
    pub fn stepped(&mut self, result: Result<(), String>, now: Instant) {
        self.latest = now;
        let Self { alterations, sessions, holdings, out, .. } = self;
        alterations.stepped(result, holdings, (sessions, out), now);
    }

    /// A volume that is to be added is served from that store; one in memory has none. If it may be
    /// another store than before, the hosts that had the volume are fenced. Returns whether it may.
    pub fn serve_from(&mut self, volume: &Volume, store: Option<&StoreIdentity>) -> bool {
        self.holdings.book_mut().serve_from(volume, store, &mut self.out)
    }

    /// A volume has another size, became read-only or writable, or is about to be taken from its
    /// users. Tells the sessions that have it open. Call it
    ///
    /// - after a change, when LIST and OPEN answer with the new state;
    /// - for a removal, before the sessions lose the volume.
    pub fn volume_changed(&mut self, volume: VolumeIndex) {
        self.sessions.volume_changed(volume, &mut self.out);
    }

    /// The store of a volume is lost, and the volume is about to go: no OPEN of it is granted any
    /// more.
    pub fn lose(&mut self, volume: VolumeIndex) {
        self.holdings.lose(volume);
    }

    /// A volume of the group that this member does not serve: not yet, or no longer. Its hosts are
    /// not told that it is gone. `given_away`: another member is about to claim it.
    pub fn leave_to_others(&mut self, name: Name, given_away: Option<Instant>) {
        self.holdings.leave_to_others(name, given_away);
    }

    /// The volumes of the group that this member does not serve, by its configuration now.
    pub fn configure_others(&mut self, names: &BTreeSet<Name>) {
        self.holdings.configure_others(names);
    }

    /// The claim of an [`Effect::Claim`] has ended: this member serves the volume now, or not, for
    /// this reason.
    pub fn claim_ended(&mut self, name: Name, result: &Result<(), String>) {
        let Self { sessions, holdings, out, latest, .. } = self;
        holdings.claim_ended(name, result, (sessions, out), *latest);
    }

    /// The hosts that have a volume open, and connections.
    pub(crate) fn connected_hosts(&self, volume: VolumeIndex) -> impl Iterator<Item = HostId> {
        let users = self.sessions.users_of(volume);
        users.filter(|user| user.all_connections() > 0).map(|user| user.host)
    }

    /// Closes a volume to hosts that do not have it open, or opens it (false) to all again.
    pub fn close_to_others(&mut self, volume: VolumeIndex, close: bool) {
        self.holdings.close_to_others(volume, close);
    }

    /// Begins to drain: refuses new connections, tells the initiators, and stops the poll groups
    /// when they have left or after the drain's time. Does nothing the second time.
    pub fn drain(&mut self, now: Instant) {
        self.latest = now;
        self.drain.stop(&mut self.sessions, &mut self.out, now);
    }

    /// Drains because another program takes the place of this one. Mounts have little time to
    /// leave.
    pub fn drain_for_upgrade(&mut self, now: Instant) {
        self.latest = now;
        self.drain.upgrade(&mut self.sessions, &mut self.out, now);
    }

    /// Whether the time alone may change something. Then call [`Self::tick`] every half second or
    /// so.
    #[must_use]
    pub fn needs_ticks(&self) -> bool {
        self.sessions.need_ticks()
            || self.holdings.need_ticks()
            || self.alterations.is_under_way()
            || self.drain.is_about_to_stop()
    }

    /// Ends the waits that are over. Needed while [`Self::needs_ticks`].
    pub fn tick(&mut self, now: Instant) {
        self.latest = now;
        let Self { sessions, holdings, alterations, drain, out, .. } = self;
        let told = sessions.expiries(holdings.exports());
        for session in sessions.expire(now) {
            tracing::info!(session = session.index, "a lost session's lease ended");
            if let Some((_, what)) = told.iter().find(|(index, _)| *index == session) {
                out.happened(what.clone());
            }
            holdings.forget(session);
            sessions.forget(session, out);
        }
        holdings.expire(now);
        sessions.end_late_waits(out, now);
        holdings.end_late_opens(sessions, out, now);
        holdings.finish_opens(sessions, out, now);
        alterations.end_late_step(holdings, (sessions, out), now);
        holdings.fence_again(out);
        drain.stop_if_drained(sessions.connected(), out, now);
    }

    // What core knows.

    /// Connections that have not logged in.
    #[must_use]
    pub fn strangers(&self) -> usize {
        self.gate.strangers()
    }

    /// The sessions that have I/O connections, and whether all of these are encrypted.
    #[must_use]
    pub(crate) fn encryption(&self) -> BTreeMap<SessionIndex, bool> {
        self.gate.encryption()
    }

    /// All sessions.
    #[must_use]
    pub fn sessions(&self) -> &SessionTable {
        self.sessions.table()
    }

    /// An I/O connection of a session was granted, with digests or without.
    pub(crate) fn note_digest(&mut self, session: SessionIndex, digest: bool) {
        if let Some(session) = self.sessions.table_mut().get_mut(session) {
            session.digest = digest;
        }
    }

    /// The key that the host of a session has proven.
    #[must_use]
    pub(crate) fn key_of(&self, session: SessionIndex) -> Option<PublicKey> {
        self.sessions.proofs().key_of(session)
    }

    /// Whether hosts must prove their keys.
    #[must_use]
    pub(crate) fn requires_proof(&self) -> bool {
        self.sessions.proofs().are_required()
    }

    /// The last holders of the volumes.
    #[must_use]
    pub(crate) fn holders(&self) -> &Holders {
        self.holdings.book().holders()
    }

    /// The exported volumes.
    #[must_use]
    pub(crate) fn volumes(&self) -> &[Arc<Volume>] {
        self.holdings.exports().volumes()
    }

    /// The exported volume with that index.
    #[must_use]
    pub fn volume(&self, index: VolumeIndex) -> Option<&Arc<Volume>> {
        self.holdings.exports().volume(index)
    }

    /// The exported volume with that name.
    #[must_use]
    pub(crate) fn volume_named(&self, name: &str) -> Option<&Arc<Volume>> {
        self.volumes().iter().find(|volume| volume.name.as_str() == name)
    }

    /// The hosts that have a volume open, or may come back to it.
    #[must_use]
    pub fn users(&self, volume: VolumeIndex) -> Vec<String> {
        self.holdings.users(volume, &self.sessions)
    }

    /// A volume's generation; fresh for none.
    #[must_use]
    pub(crate) fn generation(&self, volume: VolumeIndex) -> Generation {
        let volume = self.holdings.exports().volume(volume);
        volume.map_or(Generation::FRESH, |v| self.holders().generation(&v.uuid))
    }

    /// Whether an absent holder of the volume may come back.
    #[must_use]
    pub(crate) fn is_kept(&self, volume: VolumeIndex) -> bool {
        self.holdings.book().is_kept(volume)
    }

    /// True while a fence is not durable.
    #[must_use]
    pub fn owes_fences(&self) -> bool {
        self.holdings.book().owes_fences()
    }

    /// The volumes with such a fence. Their mounts must learn of a loss.
    pub(crate) fn owed_fences(&self) -> impl Iterator<Item = VolumeUuid> {
        self.holdings.book().owed_fences()
    }

    /// The counters of decisions.
    #[must_use]
    pub(crate) fn decisions(&self) -> Decisions {
        self.holdings.decisions(self.gate.unproven())
    }

    /// Whether the target drains.
    #[must_use]
    pub(crate) fn is_draining(&self) -> bool {
        self.drain.has_begun()
    }

    /// Whether the target drains to make room for another program.
    #[must_use]
    pub fn is_upgrading(&self) -> bool {
        self.drain.is_upgrading()
    }

    /// Sessions that a drain ended, because they had not left in time.
    #[must_use]
    pub fn stayed(&self) -> usize {
        self.drain.stayed()
    }

    /// How far the drain is; `None` when there is none.
    #[must_use]
    pub(crate) fn drain_state(&self, now: Instant) -> Option<DrainState> {
        self.drain.state(self.sessions.connected(), now)
    }

    /// How far the end of the target is, if something has lasted so long, may last so much longer,
    /// and the drain begins then.
    #[must_use]
    pub(crate) fn drain_ahead(&self, (lasted, left): (Duration, Duration)) -> DrainState {
        self.drain.ahead(self.sessions.connected(), (lasted, left))
    }
}
