//! How sessions lose volumes: by CLOSE, by LOGOUT, with their rights, or with the volume.

use rblk_protocol::{AccessMode, Epoch, Status};

use super::Holdings;
use super::openings::WaitingOpen;
use crate::control::core::admin_command::{AdminAnswer, AdminCommand, refuse};
use crate::control::core::outbox::Outbox;
use crate::control::core::sessions::{HostSessions, occurrences};
use crate::control::peers::session::Session;
use crate::data::poll_group::Notice;
use crate::volume::Volume;
use crate::volume::ids::{SessionIndex, VolumeIndex};

impl Holdings {
    /// CLOSE.
    pub(in crate::control::core) fn close(
        &mut self,
        command: &AdminCommand<'_>,
        session: SessionIndex,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) -> AdminAnswer {
        let Some(volume) = Volume::index_of(command.capsule.volume) else {
            return refuse(Status::NoSuchVolume);
        };
        let which = (session, volume);
        let waiting = self.openings.take(|open| (open.session, open.volume) == which);
        refuse_all(&waiting, Status::NoSuchVolume, out);
        if !self.give_up(which, Status::NoSuchVolume, sessions, out) && waiting.is_empty() {
            return refuse(Status::NoSuchVolume);
        }
        AdminAnswer::Now(Status::Ok, 0, Vec::new())
    }

    /// LOGOUT.
    pub(in crate::control::core) fn logout(
        &mut self,
        session: SessionIndex,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) -> AdminAnswer {
        if let Some(state) = sessions.table().get(session) {
            out.happened(occurrences::logged_out(state));
        }
        refuse_all(&self.take_opens_of(session), Status::NotReady, out);
        let held = sessions.table_mut().logout(session);
        self.lost(session, held, Status::NoSuchVolume, sessions, out);
        AdminAnswer::Now(Status::Ok, 0, Vec::new())
    }

    /// Takes a volume from a session. Returns false if the session did not have it.
    pub(super) fn give_up(
        &mut self,
        (session, volume): (SessionIndex, VolumeIndex),
        refusal: Status,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) -> bool {
        let Some(mode) = sessions.table_mut().close(session, volume) else { return false };
        self.lost(session, [(volume, mode)], refusal, sessions, out);
        true
    }

    /// A session has lost these volumes.
    fn lost(
        &mut self,
        session: SessionIndex,
        held: impl IntoIterator<Item = (VolumeIndex, AccessMode)>,
        refusal: Status,
        sessions: &HostSessions,
        out: &mut Outbox,
    ) {
        for (volume, mode) in held {
            out.tell_all(Notice::Close { session, volume, refusal });
            let is_in_use =
                mode == AccessMode::ReadOnly || sessions.table().writer(volume).is_some();
            if let Some(volume) = self.exports.volume(volume).filter(|_| !is_in_use) {
                self.book.leave(volume, out);
            }
        }
    }

    /// The admin connection of that epoch is gone: its OPENs cannot be answered, and the session
    /// was not let in.
    pub(in crate::control::core) fn drop_opens_of(
        &mut self,
        (session, epoch): (SessionIndex, Epoch),
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) {
        let its = |open: &WaitingOpen| (open.session, open.epoch) == (session, epoch);
        for open in self.openings.take(its) {
            self.give_up_open(&open, sessions, out);
        }
    }

    /// An OPEN ends without its volume. A host that came back still has its device, and tries
    /// again: until the end of a lease, no other host gets the volume without a take-over.
    pub(super) fn give_up_open(
        &mut self,
        open: &WaitingOpen,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) {
        if !open.is_granted() {
            return;
        }
        if open.returns {
            self.book.keep_for_absent(open.volume, open.since + sessions.table().lease());
        }
        self.give_up((open.session, open.volume), Status::NoSuchVolume, sessions, out);
    }

    /// Ends a session after its host lost its place in the table. The session loses its volumes
    /// now, and ends with its connections.
    pub(in crate::control::core) fn revoke(
        &mut self,
        session: SessionIndex,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) {
        let Some(state) = sessions.table().get(session) else { return };
        tracing::warn!(host = %state.host_name, peer = state.peer, "ending a session: its key is revoked");
        let before = state.newest.next();
        out.happened(occurrences::revoked(state));
        let ended = self.take_everything(session, Status::NotAllowed, sessions, out);
        if let Some(before) = before {
            out.tell_all(Notice::EndConnections { session, before });
        }
        if ended {
            self.forget_ended(session, sessions, out);
        }
    }

    /// Ends a session with its connections. Returns whether there was such a session.
    pub(in crate::control::core) fn kick(
        &mut self,
        session: SessionIndex,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) -> bool {
        let Some(state) = sessions.table().get(session) else { return false };
        tracing::warn!(host = %state.host_name, peer = state.peer, "ending a session: it is kicked");
        // The connections first: so no command under way is refused, and the host resends them all.
        if let Some(before) = state.newest.next() {
            out.tell_all(Notice::EndConnections { session, before });
        }
        if self.take_everything(session, Status::NotReady, sessions, out) {
            self.forget_ended(session, sessions, out);
        }
        true
    }

    /// Takes all volumes from a session and forbids to resume it. Returns whether it has no
    /// connection left either.
    fn take_everything(
        &mut self,
        session: SessionIndex,
        refusal: Status,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) -> bool {
        refuse_all(&self.take_opens_of(session), refusal, out);
        let (held, ended) = sessions.table_mut().revoke(session);
        self.lost(session, held, refusal, sessions, out);
        ended
    }

    /// Takes a volume from every session.
    pub(in crate::control::core) fn take_from_all(
        &mut self,
        volume: VolumeIndex,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) {
        let users: Vec<SessionIndex> =
            sessions.users_of(volume).map(|session| session.index).collect();
        let waiting = self.openings.take(|open| open.volume == volume);
        refuse_all(&waiting, Status::NoSuchVolume, out);
        for session in users {
            self.give_up((session, volume), Status::VolumeGone, sessions, out);
        }
    }

    /// Closes the volumes that the host of a session has no right to any more.
    pub(in crate::control::core) fn close_forbidden(
        &mut self,
        session: SessionIndex,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) {
        let rights = sessions.proofs().rights(session);
        let is_forbidden = |volume: VolumeIndex, mode: AccessMode| {
            let name = self.exports.volume(volume).map(|volume| volume.name);
            !name.is_some_and(|name| rights.may_open(name, mode))
        };
        let opened = sessions.table().get(session).into_iter().flat_map(Session::opened);
        let forbidden: Vec<VolumeIndex> =
            opened.filter(|(volume, mode)| is_forbidden(*volume, *mode)).map(|(v, _)| v).collect();
        let waits =
            |open: &WaitingOpen| open.session == session && is_forbidden(open.volume, open.mode);
        for open in self.openings.take(waits) {
            let text = "the right to it was withdrawn".to_owned();
            self.fail_open(&open, (Status::NotAllowed, text), sessions, out);
        }
        for volume in forbidden {
            tracing::warn!(session = session.index, volume = volume.0, "a right was withdrawn");
            self.give_up((session, volume), Status::NotAllowed, sessions, out);
        }
    }

    fn take_opens_of(&mut self, session: SessionIndex) -> Vec<WaitingOpen> {
        self.openings.take(|open| open.session == session)
    }
}

/// Refuses OPENs that waited.
fn refuse_all(opens: &[WaitingOpen], status: Status, out: &mut Outbox) {
    opens.iter().for_each(|open| out.reply_status(open.from, open.tag, status));
}
