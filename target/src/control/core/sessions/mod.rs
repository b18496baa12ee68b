//! [`HostSessions`]: the sessions of hosts, with what each has proven, the LOGIN that waits, and
//! the news that it waits for.
//!
//! LOGIN: a stranger becomes the admin connection of a session, which begins or is resumed. The
//! reply waits until the session's older epochs have no connection left. Of two connections that
//! name one epoch, the first LOGIN gets it.

mod async_events;
pub(super) mod occurrences;
pub(super) mod proofs;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use rblk_operate::target::events::Occurrence;
use rblk_protocol::{
    AccessMode, AsyncEvent, Epoch, InstanceId, LoginReply, Mutation, Name, RejectReason, SessionId,
    Status, Tag, limits,
};

use super::QUIESCE_DEADLINE;
use super::admin_command::{AdminAnswer, AdminCommand, refuse};
use super::effect::ConnectionRef;
use super::exports::Exports;
use super::outbox::Outbox;
use crate::control::peers::peer_lines::PeerLine;
use crate::control::peers::session::{LoggingIn, Session, SessionTable};
use crate::data::poll_group::Notice;
use crate::volume::ids::{SessionIndex, VolumeIndex};
use async_events::AsyncEvents;
use proofs::{AuthConfig, Proofs, Proven};

/// A LOGIN that waits for the connections of older epochs to end. A session has one: the LOGIN of a
/// newer epoch takes its place.
#[derive(Debug)]
struct WaitingLogin {
    from: ConnectionRef,
    tag: Tag,
    epoch: Epoch,
    since: Instant,
}

/// An accepted LOGIN, for [`HostSessions::enter`].
#[derive(Debug)]
pub(super) struct AcceptedLogin {
    /// The id of the session that it begins, if it begins one.
    pub(super) fresh: SessionId,
    /// The session that it resumes, and in which epoch.
    pub(super) resume: Option<(SessionId, Epoch)>,
    /// The facts about the host.
    pub(super) login: LoggingIn,
    /// The proven identity of the host, if one is required.
    pub(super) proven: Option<Proven>,
}

/// The target, as its sessions hear of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct TargetIdentity {
    /// Its name.
    pub(super) name: Name,
    /// This run.
    pub(super) instance: InstanceId,
}

/// See the module.
#[derive(Debug)]
pub(super) struct HostSessions {
    target: TargetIdentity,
    table: SessionTable,
    proofs: Proofs,
    logins: BTreeMap<SessionIndex, WaitingLogin>,
    events: AsyncEvents,
}

impl HostSessions {
    /// No sessions yet.
    pub(super) fn new(
        target: TargetIdentity,
        table: SessionTable,
        auth: Option<AuthConfig>,
    ) -> Self {
        let (proofs, logins) = (Proofs::new(auth), BTreeMap::new());
        Self { target, table, proofs, logins, events: AsyncEvents::default() }
    }

    /// The sessions, their connections and the volumes that they hold.
    pub(super) fn table(&self) -> &SessionTable {
        &self.table
    }

    /// The sessions, for a change of their connections or volumes. After one by which a session
    /// ended, [`Self::forget`] must be called.
    pub(super) fn table_mut(&mut self) -> &mut SessionTable {
        &mut self.table
    }

    /// What the hosts have proven.
    pub(super) fn proofs(&self) -> &Proofs {
        &self.proofs
    }

    /// What the hosts have proven, for a new table of hosts.
    pub(super) fn proofs_mut(&mut self) -> &mut Proofs {
        &mut self.proofs
    }

    /// The mode in which a session opened a volume, or asked to open it.
    pub(super) fn mode_of(&self, session: SessionIndex, volume: VolumeIndex) -> Option<AccessMode> {
        self.table.get(session)?.mode_of(volume)
    }

    /// The sessions that have a volume open.
    pub(super) fn users_of(&self, volume: VolumeIndex) -> impl Iterator<Item = &Session> {
        self.table.iter().filter(move |session| session.mode_of(volume).is_some())
    }

    /// Sessions with connections.
    pub(super) fn connected(&self) -> usize {
        self.table.iter().filter(|session| session.connections() > 0).count()
    }

    /// Whether the time alone may change something.
    pub(super) fn need_ticks(&self) -> bool {
        !self.logins.is_empty() || self.table.iter().any(|session| session.connections() == 0)
    }

    /// The text for a peer when the table of sessions is full.
    pub(super) fn too_many(&self) -> String {
        format!("{} sessions are the limit (sessions_max)", self.table.max())
    }

    /// Begins or resumes the session of a LOGIN.
    ///
    /// # Errors
    /// Those of [`SessionTable::begin`] and [`SessionTable::resume`]. Nothing has changed.
    pub(super) fn enter(
        &mut self,
        entry: AcceptedLogin,
        out: &mut Outbox,
        now: Instant,
    ) -> Result<(SessionIndex, Epoch), RejectReason> {
        let AcceptedLogin { fresh, resume, login, proven } = entry;
        let (session, epoch) = match resume {
            None => (self.table.begin(fresh, login, now)?, Epoch(1)),
            Some((session, epoch)) => (self.table.resume(session, epoch, login)?, epoch),
        };
        if resume.is_some() {
            // The older login was of an older epoch, which gets no reply any more.
            self.logins.remove(&session);
            out.tell_all(Notice::EndConnections { session, before: epoch });
        }
        if let Some(proven) = proven {
            self.proofs.note(session, proven, out);
        }
        Ok((session, epoch))
    }

    /// A later LOGIN of a connection, after its first was accepted.
    pub(super) fn login_again(
        &mut self,
        command: &AdminCommand<'_>,
        session: SessionIndex,
        out: &mut Outbox,
    ) -> AdminAnswer {
        let answered = self.table.get(session).is_some_and(|session| session.logged_in);
        if answered || self.logins.contains_key(&session) {
            return refuse(Status::NotReady);
        }
        // Its first LOGIN timed out, and the peer knows.
        self.wait_for_older((command.from, command.capsule.tag), session, out, command.now);
        AdminAnswer::Later
    }

    /// Holds the reply to LOGIN until no connection of an older epoch is left.
    pub(super) fn wait_for_older(
        &mut self,
        (from, tag): (ConnectionRef, Tag),
        index: SessionIndex,
        out: &mut Outbox,
        now: Instant,
    ) {
        let Some(session) = self.table.get(index) else { return };
        let waits = session.has_older_connections() && !Mutation::EpochOrderLogin.is_on();
        let epoch = session.epoch;
        self.logins.insert(index, WaitingLogin { from, tag, epoch, since: now });
        if waits {
            if out.lines().may_write(PeerLine::Login, now) {
                tracing::info!(
                    session = index.index,
                    epoch = epoch.0,
                    "waiting for the commands of older epochs"
                );
            }
        } else {
            self.finish_login(index, out, now);
        }
    }

    /// No connection of an older epoch is left: the new epoch may begin.
    pub(super) fn finish_login(&mut self, index: SessionIndex, out: &mut Outbox, now: Instant) {
        let Some(login) = self.logins.remove(&index) else { return };
        let Some(session) = self.table.get_mut(index) else { return };
        if session.epoch != login.epoch || session.leave().is_some() {
            return out.reply_status(login.from, login.tag, Status::Fenced);
        }
        session.logged_in = true;
        let reply = LoginReply {
            session: session.id,
            epoch: session.epoch,
            instance: self.target.instance,
            queues_max: limits::QUEUES_MAX,
            target_name: self.target.name,
        };
        if out.lines().may_write(PeerLine::Login, now) {
            tracing::info!(
                session = index.index,
                host = %session.host_name,
                peer = session.peer,
                epoch = session.epoch.0,
                "login"
            );
        }
        let what = occurrences::logged_in(session);
        let payload = self.proofs.login_payload(index, &reply);
        out.reply(login.from, login.tag, (Status::Ok, 0), payload);
        out.happened(what);
    }

    /// Refuses the LOGINs that waited too long.
    pub(super) fn end_late_logins(&mut self, out: &mut Outbox, now: Instant) {
        let late =
            |login: &WaitingLogin| now.saturating_duration_since(login.since) > QUIESCE_DEADLINE;
        let late_sessions: Vec<SessionIndex> =
            self.logins.iter().filter(|(_, l)| late(l)).map(|(index, _)| *index).collect();
        for index in late_sessions {
            if let Some(login) = self.logins.remove(&index) {
                tracing::error!(session = index.index, "connections of an older epoch do not end");
                out.reply_status(login.from, login.tag, Status::TimedOut);
            }
        }
    }

    /// The admin connection of an epoch of a session is gone.
    pub(super) fn admin_gone(&mut self, session: SessionIndex, epoch: Epoch) {
        self.events.forget_epoch(session, epoch);
        if self.logins.get(&session).is_some_and(|login| login.epoch == epoch) {
            self.logins.remove(&session);
        }
    }

    /// Notes that the admin connection of an epoch of a session is gone, if that is a loss.
    pub(super) fn tell_admin_gone(
        &self,
        (session, epoch): (SessionIndex, Epoch),
        exports: &Exports,
        out: &mut Outbox,
    ) {
        let Some(session) = self.table.get(session) else { return };
        let held = held_by(session, exports);
        let what = occurrences::admin_gone(session, epoch, &held, self.table.lease());
        what.into_iter().for_each(|what| out.happened(what));
    }

    /// Ends the sessions that lost their connections longer ago than the lease. For each,
    /// [`Self::forget`] must be called.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<SessionIndex> {
        self.table.expire(now)
    }

    /// The occurrences for sessions that may lose their lease now. Taken before they
    /// [are gone](Self::expire).
    pub(super) fn expiries(&self, exports: &Exports) -> Vec<(SessionIndex, Occurrence)> {
        let silent = self.table.iter().filter(|session| session.connections() == 0);
        let told = silent.filter_map(|session| {
            let held = held_by(session, exports);
            (!held.is_empty()).then(|| (session.index, occurrences::expired(session, &held)))
        });
        told.collect()
    }

    /// A session ended; another session may have its index.
    pub(super) fn forget(&mut self, session: SessionIndex, out: &mut Outbox) {
        self.logins.remove(&session);
        self.events.forget(session);
        if self.proofs.forget(session) {
            // Connections that have not proven themselves do not keep a session.
            out.tell_all(Notice::EndConnections { session, before: Epoch(u32::MAX) });
        }
        out.tell_all(Notice::ForgetSession { session });
    }

    /// A volume changed, or is about to be taken from its users. Tells the sessions that have it
    /// open.
    pub(super) fn volume_changed(&mut self, volume: VolumeIndex, out: &mut Outbox) {
        let users: Vec<SessionIndex> = self.users_of(volume).map(|session| session.index).collect();
        self.events.tell(&users, out);
    }

    /// Answers every parked ASYNC_EVENT. Returns the sessions that were told, and their epochs.
    pub(super) fn tell_all(
        &mut self,
        event: AsyncEvent,
        out: &mut Outbox,
    ) -> BTreeSet<(SessionIndex, Epoch)> {
        self.events.tell_all(event, out)
    }

    /// ASYNC_EVENT. `news`: what the session does not know yet of the end of the target.
    pub(super) fn park(
        &mut self,
        command: &AdminCommand<'_>,
        session: SessionIndex,
        news: impl FnOnce() -> Option<AsyncEvent>,
    ) -> AdminAnswer {
        self.events.park(command.from, session, command.capsule, news)
    }
}

/// The names of the volumes that a session opened.
fn held_by(session: &Session, exports: &Exports) -> String {
    let volumes = session.opened().filter_map(|(index, _)| exports.volume(index));
    volumes.map(|volume| volume.name.to_string()).collect::<Vec<_>>().join(", ")
}
