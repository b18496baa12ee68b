//! [`Gate`]: the connections that ask to be let in. It decides which may be made, which prove
//! themselves, and which session each is of.
//!
//! Until its LOGIN is accepted or its membership is proven, a connection changes nothing of any
//! session: it has a [place](places) and takes nothing else. A connection that names a session and
//! a higher epoch proves nothing by that.

mod admissions;
mod allowance;
mod places;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_protocol::auth::SessionSecret;
use rblk_protocol::width::narrow;
use rblk_protocol::{
    ConnectionKind, Epoch, HelloRequest, HostId, LoginRequest, Mutation, Name, RejectReason,
    SessionId, Status, limits::WAYS_MAX,
};

use super::admin_command::{AdminAnswer, AdminCommand, refuse, refuse_saying};
use super::budget::Capacity;
use super::connect_refusal::{ConnectRefusal, refused};
use super::effect::{ConnectionRef, Effect};
use super::outbox::Outbox;
use super::sessions::proofs::{Introduction, NO_KEYS, Proven};
use super::sessions::{AcceptedLogin, HostSessions};
use super::{QUIESCE_DEADLINE, sessions::occurrences};
use crate::control::peers::account::{Origin, Payer};
use crate::control::peers::peer_lines::PeerLine;
use crate::control::peers::session::LoggingIn;
use crate::data::connection::STRANGER_TIME;
use crate::volume::ids::{AdmissionId, SessionIndex};

pub(super) use admissions::Member;
use admissions::{Admissions, Evicted, Stranger};
use allowance::HostAllowance;

/// Silence that every initiator may keep before its session counts as lost.
const SILENCE_MIN: Duration = Duration::from_secs(2);
/// The longest `detect` of a mount's configuration. A LOGIN that names more gets this.
const DETECT_MAX: Duration = Duration::from_secs(300);

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
    /// Both ends know [`WAYS`](rblk_protocol::Features::WAYS).
    pub has_ways: bool,
}

/// A connection that may be made. It counts as made: if it cannot be made after all, the caller
/// must call [`Core::gone`](super::Core::gone).
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
    /// itself in its self-test. After the proof,
    /// [`proved`](super::Core::proved) must be called.
    pub secret: Option<(SessionSecret, Duration)>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Gate {
    admissions: Admissions,
    allowance: HostAllowance,
    // Initiators that failed to prove their identity.
    unproven: u64,
}

impl Gate {
    /// No connections yet, at a target with these resources.
    pub(super) fn new(capacity: Capacity) -> Self {
        let admissions = Admissions::new(capacity.of_a_host());
        Self { admissions, allowance: HostAllowance::new(capacity), unproven: 0 }
    }

    /// Connections that take the places of strangers.
    pub(super) fn strangers(&self) -> usize {
        self.admissions.strangers()
    }

    /// The sessions that have I/O connections, and whether all of these are encrypted.
    pub(super) fn encryption(&self) -> BTreeMap<SessionIndex, bool> {
        self.admissions.encryption()
    }

    /// Initiators that failed to prove their identity.
    pub(super) fn unproven(&self) -> u64 {
        self.unproven
    }

    /// An initiator wants to connect.
    ///
    /// # Errors
    /// Why the connection is refused.
    pub(super) fn connect(
        &mut self,
        knock: &Knock<'_>,
        sessions: &mut HostSessions,
        out: &mut Outbox,
        now: Instant,
    ) -> Result<Admitted, ConnectRefusal> {
        match knock.asked.kind {
            ConnectionKind::Admin => self.connect_admin(knock, sessions, out, now),
            ConnectionKind::Io { queue } => self.connect_queue((knock, queue), sessions, out, now),
        }
    }

    /// An admin connection is a stranger. Its LOGIN decides; the check here only refuses a hopeless
    /// one early. If hosts prove their keys, only the sealed reply to LOGIN says that a session is
    /// lost: an impostor could say it here.
    fn connect_admin(
        &mut self,
        knock: &Knock<'_>,
        sessions: &HostSessions,
        out: &mut Outbox,
        now: Instant,
    ) -> Result<Admitted, ConnectRefusal> {
        let Knock { asked, introduction, peer, memory_bytes, fresh, has_ways, .. } = *knock;
        let limit = |text: String| refused(RejectReason::LimitReached, text);
        let handshake = sessions.proofs().new_handshake(introduction.as_ref())?;
        let resume = (!asked.session.is_none()).then_some((asked.session, asked.epoch));
        match resume {
            Some((session, epoch)) if handshake.is_none() && !Mutation::WayOtherRun.is_on() => {
                let resumable = sessions.table().resumable(session, epoch);
                resumable.map_err(|reason| refused(reason, "cannot resume the session"))?;
            }
            None if sessions.table().is_full() => return Err(limit(sessions.too_many())),
            Some(_) | None => {}
        }
        let origin = Origin::of(peer);
        end_all_of(self.admissions.make_place(&origin, now).map_err(crowded)?, out);
        let peer = peer.to_owned();
        let stranger = Stranger { peer, fresh, resume, memory_bytes, has_ways, handshake };
        let id = self.admissions.add_stranger(stranger, origin, now);
        let epoch = resume.map_or(Epoch(1), |(_, epoch)| epoch);
        let session = SessionIndex::NONE;
        Ok(Admitted { id, session, epoch, queue: None, is_stranger: true, secret: None })
    }

    /// An I/O connection. Before its proof it takes nothing of its host: the id of a session is no
    /// secret. From another address than its session, it takes the place of a stranger.
    fn connect_queue(
        &mut self,
        (knock, queue): (&Knock<'_>, u16),
        sessions: &mut HostSessions,
        out: &mut Outbox,
        now: Instant,
    ) -> Result<Admitted, ConnectRefusal> {
        let Knock { asked, introduction, peer, memory_bytes, is_encrypted, .. } = *knock;
        let limit = |text: String| refused(RejectReason::LimitReached, text);
        let epoch = asked.epoch;
        let session = sessions
            .table()
            .join(asked.session, epoch, queue)
            .map_err(|reason| refused(reason, "cannot join the session"))?;
        let secret = sessions.proofs().secret_of(session, epoch)?;
        if secret.is_some() && introduction.is_none() {
            return Err(refused(RejectReason::NotAllowed, NO_KEYS));
        }
        let state = sessions.table().get(session);
        let origin = Origin::of(peer);
        let way = state.and_then(|state| state.way(epoch));
        let is_foreign = secret.is_some() && way.is_some_and(|way| Origin::of(&way.peer) != origin);
        if secret.is_some() && !state.is_some_and(|state| state.has_admin(epoch)) {
            // Its queues do not outlive it, so no session waits for new ones.
            return Err(limit("the session is lost: log in in a new epoch".to_owned()));
        }
        self.allowance.check_budget(sessions, session, memory_bytes)?;
        if is_foreign {
            end_all_of(self.admissions.make_place(&origin, now).map_err(crowded)?, out);
        } else if secret.is_some() {
            let evicted = self.admissions.make_room_to_join(session, memory_bytes, now);
            end_all_of(evicted.map_err(crowded)?, out);
        }
        let (queue, is_proven) = (Some(queue), secret.is_none());
        let member = Member { session, epoch, queue, memory_bytes, is_proven, is_encrypted };
        let table = sessions.table_mut();
        table.connection_added(session, (epoch, queue, is_proven), memory_bytes);
        let id = self.admissions.add_member(member, is_foreign.then_some(origin), now);
        // An initiator may connect many queues before it tests the first.
        let within = if is_foreign { STRANGER_TIME } else { QUIESCE_DEADLINE };
        let secret = secret.map(|secret| (secret, within));
        Ok(Admitted { id, session, epoch, queue, is_stranger: is_foreign, secret })
    }

    /// A connection ended. Returns its membership if it was of a session.
    pub(super) fn gone(&mut self, id: AdmissionId, out: &mut Outbox) -> Option<Member> {
        out.seals().end(id);
        self.admissions.remove(id)
    }

    /// A connection that has logged in, or belongs to a session.
    pub(super) fn member(&self, id: AdmissionId) -> Option<Member> {
        self.admissions.member(id)
    }

    /// Whether a connection is there and has not logged in.
    pub(super) fn is_stranger(&mut self, id: AdmissionId) -> bool {
        self.admissions.stranger_mut(id).is_some()
    }

    /// AUTHENTICATE: the target proves its key.
    pub(super) fn authenticate(
        &mut self,
        command: &AdminCommand<'_>,
        out: &mut Outbox,
    ) -> AdminAnswer {
        let Some(stranger) = self.admissions.stranger_mut(command.id) else {
            return refuse(Status::NotReady);
        };
        let Some(handshake) = &mut stranger.handshake else {
            // No proof is required here, or this connection failed its own.
            return refuse(Status::NotAllowed);
        };
        match handshake.read_first(command.body) {
            Ok(second) => AdminAnswer::Now(Status::Ok, narrow(second.len()), second.to_vec()),
            Err(error) => {
                self.distrust(command, &error.to_string(), out);
                refuse(Status::NotAllowed)
            }
        }
    }

    /// LOGIN of a connection that has not logged in.
    pub(super) fn login(
        &mut self,
        command: &AdminCommand<'_>,
        is_draining: bool,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) -> AdminAnswer {
        let AdminCommand { from, id, now, .. } = *command;
        let (request, proven) = match self.proven_login(command, sessions, out) {
            Ok(login) => login,
            Err(answer) => return answer,
        };
        let Some(stranger) = self.admissions.stranger_mut(id) else { return AdminAnswer::Later };
        let Stranger { fresh, resume, memory_bytes, has_ways, .. } = *stranger;
        let (peer, join) = (stranger.peer.clone(), request.join);
        if join.is_some() && !may_join(&request, resume, has_ways) {
            return refuse(Status::InvalidField);
        }
        if is_draining {
            return refuse_saying(Status::ShuttingDown, "the target is draining".to_owned());
        }
        let detect = Duration::from_millis(u64::from(request.keep_alive_ms)).min(DETECT_MAX);
        let (host, host_name) = (request.host, request.host_name);
        let account = match &proven {
            Some(proven) => Payer::Host(proven.host.id()),
            None => Payer::Origin(Origin::of(&peer)),
        };
        if resume.is_none() {
            let whose = (&account, proven.as_ref().map(|proven| &*proven.host));
            let checked = self.allowance.check_new_session(sessions.table(), whose, memory_bytes);
            if let Err(text) = checked {
                out.happened(occurrences::wanted_more(host_name, &peer, &text));
                return refuse_saying(Status::LimitReached, text);
            }
        }
        // Another LOGIN that resumes a session ends connections; one that joins adds to them.
        if let (Some(resume), true) = (resume, join.is_some())
            && let Err(text) = self.has_room_for_way(sessions, resume, host, memory_bytes)
        {
            out.happened(occurrences::wanted_more(host_name, &peer, &text));
            return refuse_saying(Status::LimitReached, text);
        }
        let login = LoggingIn { host, host_name, account, detect, peer, has_ways };
        let entry = AcceptedLogin { fresh, resume, join, login, proven };
        let (session, epoch) = match sessions.enter(entry, out, now) {
            Ok(entered) => entered,
            Err(RejectReason::LimitReached) if join.is_some() => {
                let text = format!("{WAYS_MAX} ways are the limit of a session");
                return refuse_saying(Status::LimitReached, text);
            }
            Err(RejectReason::LimitReached) => {
                return refuse_saying(Status::LimitReached, sessions.too_many());
            }
            Err(reason) => return no_session(host_name, reason, out, now),
        };
        let (queue, is_proven, is_encrypted) = (None, true, false);
        let member = Member { session, epoch, queue, memory_bytes, is_proven, is_encrypted };
        self.admissions.adopt(id, member);
        let table = sessions.table_mut();
        table.connection_added(session, (epoch, queue, is_proven), memory_bytes);
        // Four times what the initiator promised, and time for a busy host.
        let silence = detect * 4 + SILENCE_MIN;
        out.order(Effect::Adopt { connection: from, admission: id, session, epoch, silence });
        sessions.await_burial((from, command.capsule.tag), (session, epoch), out, now);
        AdminAnswer::Later
    }

    /// Whether a session may have one more admin connection, for a LOGIN that joins it.
    ///
    /// # Errors
    /// The text for the peer names the limit.
    fn has_room_for_way(
        &self,
        sessions: &HostSessions,
        (session, epoch): (SessionId, Epoch),
        host: HostId,
        memory_bytes: u64,
    ) -> Result<(), String> {
        let Ok(index) = sessions.table().resumable(session, epoch) else { return Ok(()) };
        let is_its = sessions.table().get(index).is_some_and(|session| session.host == host);
        if !is_its {
            // The table refuses it.
            return Ok(());
        }
        let checked = self.allowance.check_budget(sessions, index, memory_bytes);
        checked.map_err(|refusal| refusal.text)
    }

    /// The LOGIN of a stranger: the request, and the proven identity of its host.
    ///
    /// # Errors
    /// The answer, if it is refused.
    fn proven_login(
        &mut self,
        command: &AdminCommand<'_>,
        sessions: &HostSessions,
        out: &mut Outbox,
    ) -> Result<(LoginRequest, Option<Proven>), AdminAnswer> {
        let AdminCommand { from, id, capsule, body, now } = *command;
        if !sessions.proofs().are_required() {
            return Ok((parsed_login(body, out, now)?, None));
        }
        let handshake = self.admissions.stranger_mut(id).and_then(|s| s.handshake.as_mut());
        // A failed proof gets no second try.
        let Some(handshake) = handshake else { return Err(refuse(Status::NotAllowed)) };
        let logged_in = match handshake.read_last(body, capsule.sequence) {
            Ok(logged_in) => logged_in,
            Err(error) => {
                self.distrust(command, &error.to_string(), out);
                return Err(refuse(Status::NotAllowed));
            }
        };
        let key = logged_in.host;
        let Some(host) = sessions.proofs().host_with(&key).cloned() else {
            self.distrust(command, &format!("no host has its key {key}"), out);
            return Err(refuse(Status::NotAllowed));
        };
        out.seals().begin(id, from, logged_in.seal, (capsule.tag, logged_in.ticket));
        let request = parsed_login(&logged_in.login, out, now)?;
        let secret = SessionSecret::random().map_err(|error| {
            tracing::error!(%error, "LOGIN refused");
            refuse(Status::Internal)
        })?;
        // The host's own name for itself is informal; the administrator wrote one into the table.
        let request = LoginRequest { host: host.id(), host_name: host.name(), ..request };
        Ok((request, Some(Proven { key, host, secret })))
    }

    /// A peer failed its proof: its connection ends once the reply is sent.
    pub(super) fn distrust(&mut self, command: &AdminCommand<'_>, why: &str, out: &mut Outbox) {
        self.unproven += 1;
        let stranger = self.admissions.stranger_mut(command.id);
        let peer = stranger.map(|stranger| {
            stranger.handshake = None;
            stranger.peer.clone()
        });
        let of = peer.as_deref().unwrap_or_default();
        if out.lines().may_say(PeerLine::Unproven, of, why, command.now) {
            tracing::warn!(peer, why, "an initiator did not prove its key");
        }
        let text = format!("an initiator did not prove its key: {why}");
        out.happened(Occurrence { address: peer, ..Occurrence::new(EventKind::Refuse, text) });
        out.order(Effect::Expel { connection: command.from });
    }

    /// An I/O connection has proven that it is of its session: it now owns its queue number, and
    /// its memory is booked on its host. Returns its session if that worked.
    pub(super) fn proved(
        &mut self,
        (from, id): (ConnectionRef, AdmissionId),
        sessions: &mut HostSessions,
        out: &mut Outbox,
        now: Instant,
    ) -> Option<SessionIndex> {
        // A connection that gave its place up meanwhile is ending.
        let member = self.admissions.unproven(id)?;
        let Member { session, epoch, queue: Some(queue), memory_bytes, .. } = member else {
            return None;
        };
        // Like any unproven connection, one that cannot have its number or exceeds its budget keeps
        // nothing.
        let fits = self.allowance.check_budget(sessions, session, memory_bytes);
        if let (Err(ConnectRefusal { text, .. }), Some(state)) =
            (&fits, sessions.table().get(session))
        {
            let (host, peer) = (state.host_name, &state.peer);
            if out.lines().may_say(PeerLine::Refused, peer, text, now) {
                tracing::warn!(%host, peer, text, "ending a connection that its host may not have");
            }
            out.happened(occurrences::wanted_more(host, peer, text));
        }
        let connection = (epoch, queue, memory_bytes);
        let is_booked = fits.is_ok() && sessions.table_mut().connection_proved(session, connection);
        if is_booked {
            self.admissions.prove(id);
        } else {
            out.order(Effect::Expel { connection: from });
        }
        is_booked.then_some(session)
    }
}

/// Whether a LOGIN that joins a session keeps the rules of that: both ends know them, the session
/// is named, and the epoch that it ends is an older one.
fn may_join(request: &LoginRequest, resume: Option<(SessionId, Epoch)>, has_ways: bool) -> bool {
    let ends = request.join.and_then(|join| join.ends);
    has_ways && resume.is_some_and(|(_, epoch)| ends.is_none_or(|ends| ends < epoch))
}

/// Ends the connections that gave up their places.
fn end_all_of(evicted: impl IntoIterator<Item = Evicted>, out: &mut Outbox) {
    evicted.into_iter().for_each(|Evicted(admission)| out.order(Effect::Evict { admission }));
}

/// The refusal when no place is left for an unproven connection.
fn crowded(text: String) -> ConnectRefusal {
    refused(RejectReason::Crowded, text)
}

/// Refuses a LOGIN without such a session. All reasons get one reply.
fn no_session(host: Name, reason: RejectReason, out: &mut Outbox, now: Instant) -> AdminAnswer {
    if out.lines().may_write(PeerLine::NoSession, now) {
        tracing::info!(
            %host,
            ?reason,
            "an initiator comes back with a session that this target does not know, as after a restart of the \
             target: it begins a new session"
        );
    }
    refuse(Status::NoSuchSession)
}

fn parsed_login(body: &[u8], out: &mut Outbox, now: Instant) -> Result<LoginRequest, AdminAnswer> {
    LoginRequest::from_wire(body).map_err(|error| {
        if out.lines().may_write(PeerLine::BadCommand, now) {
            tracing::warn!(error, "bad LOGIN");
        }
        refuse(Status::InvalidField)
    })
}
