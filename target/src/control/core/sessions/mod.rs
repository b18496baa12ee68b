//! [`HostSessions`]: the sessions of hosts, with what each has proven, the LOGIN that waits, and
//! the news that it waits for.
//!
//! LOGIN: a stranger becomes the admin connection of a session, which begins, is resumed or gets
//! one more way. The reply waits until the epochs that the LOGIN ends have no connection left. Of
//! two connections that name one epoch, the first LOGIN gets it. DROP: the reply waits for the
//! same.

mod async_events;
mod burials;
pub(super) mod occurrences;
pub(super) mod proofs;

use std::collections::BTreeSet;
use std::time::Instant;

use rblk_operate::target::events::Occurrence;
use rblk_protocol::{
    AccessMode, AsyncEvent, DropRequest, Epoch, InstanceId, Join, LoginReply, Mutation, Name,
    RejectReason, SessionId, Status, Tag, limits,
};

use super::admin_command::{AdminAnswer, AdminCommand, refuse};
use super::effect::ConnectionRef;
use super::exports::Exports;
use super::outbox::Outbox;
use crate::control::peers::peer_lines::PeerLine;
use crate::control::peers::session::{EndedEpochs, LoggingIn, Session, SessionTable};
use crate::data::poll_group::Notice;
use crate::volume::ids::{SessionIndex, VolumeIndex};
use async_events::AsyncEvents;
use burials::{Burials, Waiting, Waits};
use proofs::{AuthConfig, Proofs, Proven};

/// An accepted LOGIN, for [`HostSessions::enter`].
#[derive(Debug)]
pub(super) struct AcceptedLogin {
    /// The id of the session that it begins, if it begins one.
    pub(super) fresh: SessionId,
    /// The session that it resumes, and in which epoch.
    pub(super) resume: Option<(SessionId, Epoch)>,
    /// How it joins that session, if it lets its other epochs live.
    pub(super) join: Option<Join>,
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
    burials: Burials,
    events: AsyncEvents,
}

impl HostSessions {
    /// No sessions yet.
    pub(super) fn new(
        target: TargetIdentity,
        table: SessionTable,
        auth: Option<AuthConfig>,
    ) -> Self {
        let (proofs, burials, events) =
            (Proofs::new(auth), Burials::default(), AsyncEvents::default());
        Self { target, table, proofs, burials, events }
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
        !self.burials.is_empty()
            || self.table.iter().any(|session| session.connections() == 0)
            || Mutation::WayLease.is_on()
    }

    /// The text for a peer when the table of sessions is full.
    pub(super) fn too_many(&self) -> String {
        format!("{} sessions are the limit (sessions_max)", self.table.max())
    }

    /// Begins, resumes or joins the session of a LOGIN.
    ///
    /// # Errors
    /// Those of [`SessionTable::begin`], [`SessionTable::resume`] and [`SessionTable::add_way`].
    /// Nothing has changed.
    pub(super) fn enter(
        &mut self,
        entry: AcceptedLogin,
        out: &mut Outbox,
        now: Instant,
    ) -> Result<(SessionIndex, Epoch), RejectReason> {
        let AcceptedLogin { fresh, resume, join, login, proven } = entry;
        let (session, epoch) = match (resume, join) {
            (None, _) => (self.table.begin(fresh, login, now)?, Epoch(1)),
            (Some((id, epoch)), None) => (self.table.resume(id, epoch, login)?, epoch),
            (Some((id, epoch)), Some(join)) => {
                if Mutation::WayOtherRun.is_on() && self.table.iter().all(|s| s.id != id) {
                    self.table.begin(id, login.clone(), now)?;
                    (self.table.resume(id, epoch, login)?, epoch)
                } else {
                    (self.table.add_way(id, epoch, join, login)?, epoch)
                }
            }
        };
        let ends = self.ends_of(session, epoch);
        // One that joins opens nothing, and news may have gone to a way that died with them.
        if self.events.end_epochs(session, &ends) || join.is_some() {
            self.events.begin_untold(session, epoch);
        }
        if resume.is_some() {
            // What waits in an epoch that ended gets no reply any more.
            self.burials.forget_asked_in(session, &ends);
            end_connections(session, &ends, out);
        }
        if let Some(proven) = proven {
            self.proofs.note((session, epoch), proven, &ends, out);
        }
        Ok((session, epoch))
    }

    /// The epochs that the LOGIN of an epoch ended.
    fn ends_of(&self, session: SessionIndex, epoch: Epoch) -> EndedEpochs {
        let way = self.table.get(session).and_then(|session| session.way(epoch));
        way.map_or(EndedEpochs::None, |way| way.ends)
    }

    /// A later LOGIN of a connection, after its first was accepted.
    pub(super) fn login_again(
        &mut self,
        command: &AdminCommand<'_>,
        (session, epoch): (SessionIndex, Epoch),
        out: &mut Outbox,
    ) -> AdminAnswer {
        let answered = self.table.get(session).is_some_and(|session| session.is_in(epoch));
        if answered || self.burials.has_login(session, epoch) {
            return refuse(Status::NotReady);
        }
        // Its first LOGIN timed out, and the peer knows.
        self.await_burial((command.from, command.capsule.tag), (session, epoch), out, command.now);
        AdminAnswer::Later
    }

    /// Holds the reply to LOGIN until no connection of an epoch that it ends is left.
    pub(super) fn await_burial(
        &mut self,
        (from, tag): (ConnectionRef, Tag),
        (session, epoch): (SessionIndex, Epoch),
        out: &mut Outbox,
        now: Instant,
    ) {
        let (waits, ends) = (Waits::Login, self.ends_of(session, epoch));
        self.burials.push(Waiting { waits, from, tag, session, epoch, ends, since: now });
        self.answer_buried(session, out, now);
        if self.burials.has_login(session, epoch) && out.lines().may_write(PeerLine::Login, now) {
            tracing::info!(
                session = session.index,
                epoch = epoch.0,
                "waiting for the commands of epochs that ended"
            );
        }
    }

    /// DROP: epochs end, whatever became of their connections. The reply waits for the last of
    /// these.
    pub(super) fn drop_epochs(
        &mut self,
        command: &AdminCommand<'_>,
        (session, epoch): (SessionIndex, Epoch),
        out: &mut Outbox,
    ) -> AdminAnswer {
        let AdminCommand { from, capsule, body, now, .. } = *command;
        let Some(state) = self.table.get(session) else { return refuse(Status::NoSuchSession) };
        if !state.way(epoch).is_some_and(|way| way.has_ways) {
            return refuse(Status::InvalidOpcode);
        }
        let Ok(request) = DropRequest::from_wire(body) else {
            return refuse(Status::InvalidField);
        };
        let ends = EndedEpochs::Of(request);
        if ends.has(epoch) {
            // The answer would wait for its own burial.
            return refuse(Status::InvalidField);
        }
        if self.burials.are_full(session) {
            return refuse(Status::LimitReached);
        }
        out.happened(occurrences::dropped(state, &request));
        self.table.drop_epochs(session, &request);
        self.proofs.end_epochs(session, &ends);
        self.events.end_epochs(session, &ends);
        self.burials.forget_asked_in(session, &ends);
        end_connections(session, &ends, out);
        let (waits, tag) = (Waits::Drop, capsule.tag);
        self.burials.push(Waiting { waits, from, tag, session, epoch, ends, since: now });
        self.answer_buried(session, out, now);
        AdminAnswer::Later
    }

    /// A connection of a session is gone, or nothing was to wait for: answers what waited for the
    /// last connection of its epochs.
    pub(super) fn answer_buried(&mut self, index: SessionIndex, out: &mut Outbox, now: Instant) {
        let Some(session) = self.table.get(index) else { return };
        let is_over = |waiting: &Waiting| {
            waiting.session == index
                && (!session.has_connections_of(&waiting.ends)
                    || Mutation::EpochOrderLogin.is_on() && waiting.waits == Waits::Login
                    || Mutation::WayDropEarly.is_on() && waiting.waits == Waits::Drop)
        };
        for waiting in self.burials.take(is_over) {
            match waiting.waits {
                Waits::Login => self.finish_login(&waiting, out, now),
                Waits::Drop => out.reply_status(waiting.from, waiting.tag, Status::Ok),
            }
        }
    }

    /// No connection of an epoch that it ends is left: the new epoch may begin.
    fn finish_login(&mut self, login: &Waiting, out: &mut Outbox, now: Instant) {
        let Waiting { session: index, epoch, .. } = *login;
        let Some(session) = self.table.get_mut(index) else { return };
        let has_left = session.leave().is_some();
        if session.let_in(epoch).is_none() || has_left {
            return out.reply_status(login.from, login.tag, Status::Fenced);
        }
        let reply = LoginReply {
            session: session.id,
            epoch,
            instance: self.target.instance,
            queues_max: limits::QUEUES_MAX,
            target_name: self.target.name,
        };
        if out.lines().may_write(PeerLine::Login, now) {
            tracing::info!(
                session = index.index,
                host = %session.host_name,
                peer = session.peer,
                epoch = epoch.0,
                "login"
            );
        }
        let what = occurrences::logged_in(session, epoch);
        let payload = self.proofs.login_payload((index, epoch), &reply);
        out.reply(login.from, login.tag, (Status::Ok, 0), payload);
        out.happened(what);
    }

    /// Refuses what waited too long.
    pub(super) fn end_late_waits(&mut self, out: &mut Outbox, now: Instant) {
        for late in self.burials.take_late(now) {
            let session = late.session.index;
            tracing::error!(session, "connections of an epoch that ended do not end");
            out.reply_status(late.from, late.tag, Status::TimedOut);
        }
    }

    /// The admin connection of an epoch of a session is gone.
    pub(super) fn admin_gone(&mut self, session: SessionIndex, epoch: Epoch) {
        self.events.forget_epoch(session, epoch);
        self.burials.forget_asked_in(session, &EndedEpochs::One(epoch));
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
        self.burials.forget(session);
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
        let ways_of = |session: &Session| {
            let index = session.index;
            session.live_epochs().map(move |epoch| (index, epoch)).collect::<Vec<_>>()
        };
        let users: Vec<_> = self.users_of(volume).flat_map(ways_of).collect();
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

/// Ends the connections of these epochs.
fn end_connections(session: SessionIndex, ended: &EndedEpochs, out: &mut Outbox) {
    match ended {
        EndedEpochs::None => {}
        EndedEpochs::One(epoch) => out.tell_all(Notice::EndEpoch { session, epoch: *epoch }),
        EndedEpochs::Below(before) => {
            out.tell_all(Notice::EndConnections { session, before: *before });
        }
        EndedEpochs::Of(request) => {
            let epochs = request.epochs().iter();
            epochs.for_each(|epoch| out.tell_all(Notice::EndEpoch { session, epoch: *epoch }));
        }
    }
}

/// The names of the volumes that a session opened.
fn held_by(session: &Session, exports: &Exports) -> String {
    let volumes = session.opened().filter_map(|(index, _)| exports.volume(index));
    volumes.map(|volume| volume.name.to_string()).collect::<Vec<_>>().join(", ")
}
