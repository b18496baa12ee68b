//! Connect requests: which connections may be made.

use std::time::{Duration, Instant};

use rblk_protocol::auth::SessionSecret;
use rblk_protocol::{ConnectionKind, Epoch, HelloRequest, RejectReason, SessionId};

use super::admissions::{Evicted, Member, Stranger};
use super::connect_refusal::{ConnectRefusal, refused};
use super::proof::{Introduction, NO_KEYS};
use super::{Core, Effect, QUIESCE_DEADLINE};
use crate::control::peers::account::Origin;
use crate::control::peers::session::Session;
use crate::data::connection::STRANGER_TIME;
use crate::volume::ids::{AdmissionId, SessionIndex};

/// A connect request.
#[derive(Clone, Copy, Debug)]
pub struct Knock<'a> {
    /// The request of its hello.
    pub asked: &'a HelloRequest,
    /// Both hellos, if the ends have agreed to prove their keys.
    pub introduction: Option<Introduction>,
    /// The peer's address.
    pub peer: &'a str,
    /// Bytes of memory that the connection would take.
    pub memory_bytes: u64,
    /// Random: the id of the session that its LOGIN begins, if it begins one.
    pub fresh: SessionId,
    /// Its stream will be encrypted.
    pub is_encrypted: bool,
}

/// A connection that may be made. It counts as made: if it cannot be made after all, the caller
/// must call [`Core::gone`].
#[derive(Clone, Debug)]
pub struct Admitted {
    /// Its name.
    pub id: AdmissionId,
    /// Its session; [`SessionIndex::NONE`] for an admin connection, which has none before LOGIN.
    pub session: SessionIndex,
    /// The epoch that its commands name.
    pub epoch: Epoch,
    /// Its index, for an I/O queue.
    pub queue: Option<u16>,
    /// It has the place of a stranger: it is an admin connection, or an unproven one from another
    /// address than its session.
    pub is_stranger: bool,
    /// The secret of its session and the time for the proof, for an I/O queue that has to prove
    /// itself in its self-test. After the proof, [`Core::proved`] must be called.
    pub secret: Option<(SessionSecret, Duration)>,
}

/// The refusal when no place is left for an unproven connection.
fn crowded(text: String) -> ConnectRefusal {
    refused(RejectReason::Crowded, text)
}

impl Core {
    /// An initiator wants to connect.
    ///
    /// # Errors
    /// Why the connection is refused.
    pub fn connect(&mut self, knock: &Knock<'_>, now: Instant) -> Result<Admitted, ConnectRefusal> {
        self.latest = now;
        if self.drain.has_begun() {
            return Err(refused(RejectReason::ShuttingDown, "the target is draining"));
        }
        match knock.asked.kind {
            ConnectionKind::Admin => self.connect_admin(knock, now),
            ConnectionKind::Io { queue } => self.connect_queue(knock, queue, now),
        }
    }

    /// An admin connection is a stranger. Its LOGIN decides; the check here only refuses a hopeless
    /// one early. If hosts prove their keys, only the sealed reply to LOGIN says that a session is
    /// lost: an impostor could say it here.
    fn connect_admin(
        &mut self,
        knock: &Knock<'_>,
        now: Instant,
    ) -> Result<Admitted, ConnectRefusal> {
        let Knock { asked, introduction, peer, memory_bytes, fresh, .. } = *knock;
        let limit = |text: String| refused(RejectReason::LimitReached, text);
        let handshake = self.new_handshake(introduction.as_ref())?;
        let resume = (!asked.session.is_none()).then_some((asked.session, asked.epoch));
        match resume {
            Some((session, epoch)) if handshake.is_none() => {
                let resumable = self.sessions.resumable(session, epoch);
                resumable.map_err(|reason| refused(reason, "cannot resume the session"))?;
            }
            None if self.sessions.is_full() => return Err(limit(self.too_many_sessions())),
            Some(_) | None => {}
        }
        let origin = Origin::of(peer);
        let evicted = self.admissions.make_place(&origin, now).map_err(crowded)?;
        self.end_all_of(evicted);
        let peer = peer.to_owned();
        let stranger = Stranger { peer, fresh, resume, memory_bytes, handshake };
        let id = self.admissions.add_stranger(stranger, origin, now);
        let epoch = resume.map_or(Epoch(1), |(_, epoch)| epoch);
        let session = SessionIndex::NONE;
        Ok(Admitted { id, session, epoch, queue: None, is_stranger: true, secret: None })
    }

    /// An I/O connection. Before its proof it takes nothing of its host: the id of a session is no
    /// secret. From another address than its session, it takes the place of a stranger.
    fn connect_queue(
        &mut self,
        knock: &Knock<'_>,
        queue: u16,
        now: Instant,
    ) -> Result<Admitted, ConnectRefusal> {
        let Knock { asked, introduction, peer, memory_bytes, is_encrypted, .. } = *knock;
        let limit = |text: String| refused(RejectReason::LimitReached, text);
        let epoch = asked.epoch;
        let session = self
            .sessions
            .join(asked.session, epoch, queue)
            .map_err(|reason| refused(reason, "cannot join the session"))?;
        let secret = self.secret_of(session)?;
        if secret.is_some() && introduction.is_none() {
            return Err(refused(RejectReason::NotAllowed, NO_KEYS));
        }
        let state = self.sessions.get(session);
        let origin = Origin::of(peer);
        let is_foreign =
            secret.is_some() && state.is_some_and(|state| Origin::of(&state.peer) != origin);
        if secret.is_some() && !state.is_some_and(Session::has_admin) {
            // Its queues do not outlive it, so no session waits for new ones.
            return Err(limit("the session is lost: log in in a new epoch".to_owned()));
        }
        self.check_budget(session, memory_bytes)?;
        if is_foreign {
            let evicted = self.admissions.make_place(&origin, now).map_err(crowded)?;
            self.end_all_of(evicted);
        } else if secret.is_some() {
            let evicted = self.admissions.make_room_to_join(session, memory_bytes, now);
            self.end_all_of(evicted.map_err(crowded)?);
        }
        let (queue, is_proven) = (Some(queue), secret.is_none());
        let member = Member { session, epoch, queue, memory_bytes, is_proven, is_encrypted };
        self.sessions.connection_added(session, (epoch, queue, is_proven), memory_bytes);
        let id = self.admissions.add_member(member, is_foreign.then_some(origin), now);
        // An initiator may connect many queues before it tests the first.
        let within = if is_foreign { STRANGER_TIME } else { QUIESCE_DEADLINE };
        let secret = secret.map(|secret| (secret, within));
        Ok(Admitted { id, session, epoch, queue, is_stranger: is_foreign, secret })
    }

    /// Ends the connections that gave up their places.
    fn end_all_of(&mut self, evicted: impl IntoIterator<Item = Evicted>) {
        let ended = evicted.into_iter().map(|Evicted(admission)| Effect::Evict { admission });
        self.effects.extend(ended);
    }
}
