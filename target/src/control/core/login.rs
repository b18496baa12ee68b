//! LOGIN: a stranger becomes the admin connection of a session, which begins or is resumed. The
//! reply waits until the session's older epochs have no connection left.
//!
//! Until LOGIN is accepted, nothing of any session changes: a connection that names a session and a
//! higher epoch proves nothing by that. Of two connections that name one epoch, the first LOGIN
//! gets it.

use std::time::{Duration, Instant};

use rblk_protocol::{
    CommandCapsule, Epoch, LoginReply, Mutation, Name, RejectReason, Status, Tag, limits,
};

use super::admissions::Member;
use super::{
    AdminAnswer, ConnectionRef, Core, Effect, Notice, QUIESCE_DEADLINE, refuse, refuse_saying,
};
use crate::control::peers::account::{Origin, Payer};
use crate::control::peers::peer_lines::PeerLine;
use crate::control::peers::session::LoggingIn;
use crate::volume::ids::{AdmissionId, SessionIndex};

/// Silence that every initiator may keep before its session counts as lost.
const SILENCE_MIN: Duration = Duration::from_secs(2);
/// The longest `detect` of a mount's configuration. A LOGIN that names more gets this.
pub(crate) const DETECT_MAX: Duration = Duration::from_secs(300);

/// A LOGIN that waits for the connections of older epochs to end. A session has one: the LOGIN of a
/// newer epoch takes its place.
#[derive(Debug)]
pub(super) struct WaitingLogin {
    from: ConnectionRef,
    tag: Tag,
    pub(super) epoch: Epoch,
    since: Instant,
}

impl Core {
    /// LOGIN of a connection that has not logged in.
    pub(super) fn login(
        &mut self,
        from: ConnectionRef,
        id: AdmissionId,
        command: &CommandCapsule,
        body: &[u8],
        now: Instant,
    ) -> AdminAnswer {
        let (request, proven) = match self.proven_login(from, id, command, body) {
            Ok(login) => login,
            Err(answer) => return answer,
        };
        let Some(stranger) = self.admissions.stranger_mut(id) else { return AdminAnswer::Later };
        let (fresh, resume, memory_bytes) =
            (stranger.fresh, stranger.resume, stranger.memory_bytes);
        let peer = stranger.peer.clone();
        if self.drain.has_begun() {
            return refuse_saying(Status::ShuttingDown, "the target is draining".to_owned());
        }
        let detect = Duration::from_millis(u64::from(request.keep_alive_ms)).min(DETECT_MAX);
        let (host, host_name) = (request.host, request.host_name);
        let account = match &proven {
            Some(proven) => Payer::Host(proven.host.id()),
            None => Payer::Origin(Origin::of(&peer)),
        };
        if resume.is_none() {
            let known = proven.as_ref().map(|proven| &*proven.host);
            if let Err(text) = self.check_new_session(&account, known, memory_bytes) {
                self.told_limit(host_name, &peer, &text);
                return refuse_saying(Status::LimitReached, text);
            }
        }
        let login = LoggingIn { host, host_name, account, detect, peer };
        let entered = match resume {
            None => self.sessions.begin(fresh, login, now).map(|s| (s, Epoch(1))),
            Some((session, epoch)) => {
                self.sessions.resume(session, epoch, login).map(|s| (s, epoch))
            }
        };
        let (session, epoch) = match entered {
            Ok(entered) => entered,
            Err(RejectReason::LimitReached) => {
                return refuse_saying(Status::LimitReached, self.too_many_sessions());
            }
            Err(reason) => return self.no_session(host_name, reason, now),
        };
        if resume.is_some() {
            // The older login was of an older epoch, which gets no reply any more.
            self.waiting_logins.remove(&session);
            self.all(Notice::EndConnections { session, before: epoch });
        }
        if let Some(proven) = proven {
            self.proven.insert(session, proven);
            if self.host_limits(host).is_some() {
                self.limit_host(session, host);
            }
        }
        self.adopt_admin(from, id, (session, epoch), (memory_bytes, detect));
        self.wait_for_older(from, session, command.tag, now);
        AdminAnswer::Later
    }

    /// Refuses a LOGIN without such a session. All reasons get one reply.
    fn no_session(&mut self, host: Name, reason: RejectReason, now: Instant) -> AdminAnswer {
        if self.lines.may_write(PeerLine::NoSession, now) {
            tracing::info!(
                %host,
                ?reason,
                "an initiator comes back with a session that is not there for it, as after a restart of the target: \
                 it begins a new session"
            );
        }
        refuse(Status::NoSuchSession)
    }

    /// A stranger becomes the admin connection of a session.
    fn adopt_admin(
        &mut self,
        connection: ConnectionRef,
        admission: AdmissionId,
        (session, epoch): (SessionIndex, Epoch),
        (memory_bytes, detect): (u64, Duration),
    ) {
        let (queue, is_proven, is_encrypted) = (None, true, false);
        let member = Member { session, epoch, queue, memory_bytes, is_proven, is_encrypted };
        self.admissions.adopt(admission, member);
        self.sessions.connection_added(session, (epoch, queue, is_proven), memory_bytes);
        // Four times what the initiator promised, and time for a busy host.
        let silence = detect * 4 + SILENCE_MIN;
        self.effects.push_back(Effect::Adopt { connection, admission, session, epoch, silence });
    }

    /// A later LOGIN of a connection, after its first was accepted.
    pub(super) fn login_again(
        &mut self,
        from: ConnectionRef,
        session: SessionIndex,
        tag: Tag,
        now: Instant,
    ) -> AdminAnswer {
        let answered = self.sessions.get(session).is_some_and(|session| session.logged_in);
        if answered || self.waiting_logins.contains_key(&session) {
            return refuse(Status::NotReady);
        }
        // Its first LOGIN timed out, and the peer knows.
        self.wait_for_older(from, session, tag, now);
        AdminAnswer::Later
    }

    /// Holds the reply to LOGIN until no connection of an older epoch is left.
    fn wait_for_older(&mut self, from: ConnectionRef, index: SessionIndex, tag: Tag, now: Instant) {
        let Some(session) = self.sessions.get(index) else { return };
        let waits = session.has_older_connections() && !Mutation::EpochOrderLogin.is_on();
        let epoch = session.epoch;
        self.waiting_logins.insert(index, WaitingLogin { from, tag, epoch, since: now });
        if waits {
            if self.lines.may_write(PeerLine::Login, now) {
                tracing::info!(
                    session = index.index,
                    epoch = epoch.0,
                    "waiting for the commands of older epochs"
                );
            }
        } else {
            self.finish_login(index);
        }
    }

    /// The text for a peer when the table of sessions is full.
    pub(super) fn too_many_sessions(&self) -> String {
        format!("{} sessions are the limit (sessions_max)", self.sessions.max())
    }

    /// No connection of an older epoch is left: the new epoch may begin.
    pub(super) fn finish_login(&mut self, index: SessionIndex) {
        let Some(login) = self.waiting_logins.remove(&index) else { return };
        let Some(session) = self.sessions.get_mut(index) else { return };
        if session.epoch != login.epoch || session.leave().is_some() {
            return self.reply(login.from, login.tag, Status::Fenced, 0, Vec::new());
        }
        session.logged_in = true;
        let reply = LoginReply {
            session: session.id,
            epoch: session.epoch,
            instance: self.exports.instance(),
            queues_max: limits::QUEUES_MAX,
            target_name: self.exports.name(),
        };
        if self.lines.may_write(PeerLine::Login, self.latest) {
            tracing::info!(
                session = index.index,
                host = %session.host_name,
                peer = session.peer,
                epoch = session.epoch.0,
                "login"
            );
        }
        let payload = match self.proven.get(&index) {
            Some(proven) => proven.secret.login_payload(&reply).to_vec(),
            None => reply.to_wire().to_vec(),
        };
        self.reply(login.from, login.tag, Status::Ok, 0, payload);
        self.told_login(index);
    }

    pub(super) fn end_late_logins(&mut self, now: Instant) {
        let late =
            |login: &WaitingLogin| now.saturating_duration_since(login.since) > QUIESCE_DEADLINE;
        let late_sessions: Vec<SessionIndex> =
            self.waiting_logins.iter().filter(|(_, l)| late(l)).map(|(index, _)| *index).collect();
        for index in late_sessions {
            if let Some(login) = self.waiting_logins.remove(&index) {
                tracing::error!(session = index.index, "connections of an older epoch do not end");
                self.reply(login.from, login.tag, Status::TimedOut, 0, Vec::new());
            }
        }
    }
}
