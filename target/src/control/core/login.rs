//! LOGIN: a session begins or is resumed, once nothing of its older epochs is left.

use std::time::{Duration, Instant};

use rblk_protocol::{
    CommandCapsule, Epoch, LoginReply, LoginRequest, Mutation, Status, Tag, limits,
};

use super::{Answer, ConnectionRef, Core, Effect, QUIESCE_DEADLINE, refuse};
use crate::identity::SessionIndex;

/// Silence that every initiator may keep before its session counts as lost.
const SILENCE_MIN: Duration = Duration::from_secs(2);

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
    pub(super) fn login(
        &mut self,
        from: ConnectionRef,
        index: SessionIndex,
        command: &CommandCapsule,
        body: &[u8],
        now: Instant,
    ) -> Answer {
        let request = match LoginRequest::from_wire(body) {
            Ok(request) => request,
            Err(error) => {
                tracing::warn!(error, "bad LOGIN");
                return refuse(Status::InvalidField);
            }
        };
        let Some(session) = self.sessions.get_mut(index) else {
            return refuse(Status::NoSuchSession);
        };
        if session.logged_in || self.waiting_logins.contains_key(&index) {
            return refuse(Status::NotReady);
        }
        if session.host.is_some_and(|(host, _)| host != request.host) {
            // Another host has learned the id of this host's session.
            return refuse(Status::NoSuchSession);
        }
        session.host = Some((request.host, request.host_name));
        // Four times what the initiator promised, and time for a busy host.
        let detect = Duration::from_millis(u64::from(request.keep_alive_ms));
        session.detect = Some(detect);
        let silence = detect * 4 + SILENCE_MIN;
        let epoch = session.epoch;
        let waits = session.has_older_connections() && !Mutation::EpochOrderLogin.is_on();
        self.effects.push_back(Effect::Watch { on: from, silence });
        self.waiting_logins
            .insert(index, WaitingLogin { from, tag: command.tag, epoch, since: now });
        if waits {
            tracing::info!(
                session = index.0,
                epoch = epoch.0,
                "waiting for the commands of older epochs"
            );
        } else {
            self.finish_login(index);
        }
        Answer::Later
    }

    /// Nothing of an older epoch is left: the new epoch may begin.
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
        tracing::info!(
            session = index.0,
            host = session.host_name(),
            peer = session.peer,
            epoch = session.epoch.0,
            "login"
        );
        self.reply(login.from, login.tag, Status::Ok, 0, reply.to_wire().to_vec());
    }

    pub(super) fn end_late_logins(&mut self, now: Instant) {
        let late =
            |login: &WaitingLogin| now.saturating_duration_since(login.since) > QUIESCE_DEADLINE;
        let late_sessions: Vec<SessionIndex> =
            self.waiting_logins.iter().filter(|(_, l)| late(l)).map(|(index, _)| *index).collect();
        for index in late_sessions {
            if let Some(login) = self.waiting_logins.remove(&index) {
                tracing::error!(session = index.0, "connections of an older epoch do not end");
                self.reply(login.from, login.tag, Status::TimedOut, 0, Vec::new());
            }
        }
    }
}
