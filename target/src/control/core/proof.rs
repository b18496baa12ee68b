//! The proofs of identity: keys on admin connections, session secrets on I/O connections. And the
//! effect of a new table of hosts on running sessions.
//!
//! With `auth = "none"` there are no proofs, and a session belongs to any peer that names it.

use std::sync::Arc;
use std::time::Instant;

use rblk_protocol::auth::{Carrier, Hellos, PublicKey, SecretKey, SessionSecret, TargetHandshake};
use rblk_protocol::width::narrow;
use rblk_protocol::{
    AccessMode, CommandCapsule, HostId, LoginRequest, Name, OpenRequest, RejectReason, Status,
};

use super::admissions::Member;
use super::hosts::{Host, Hosts};
use super::{
    AdminAnswer, ConnectRefusal, ConnectionRef, Core, Effect, EventKind, Occurrence, refuse,
    refused,
};
use crate::control::peers::peer_lines::PeerLine;
use crate::volume::ids::{AdmissionId, SessionIndex};
use crate::volume::limits::Limiter;

/// How hosts prove their identity, at a target that requires it.
#[derive(Debug)]
pub struct AuthConfig {
    /// The target's keys: one, or two while it changes its key.
    pub keys: Vec<SecretKey>,
    /// The hosts that may log in.
    pub hosts: Hosts,
}

/// Both hellos of an admin connection, and its carrier: the handshake covers them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Introduction {
    /// The hellos, as they are sent.
    pub hellos: Hellos,
    /// The carrier of the connection.
    pub carrier: Carrier,
}

/// The proven identity of the host of a session.
#[derive(Debug)]
pub(super) struct Proven {
    pub(super) key: PublicKey,
    pub(super) host: Arc<Host>,
    /// Of the session's present epoch.
    pub(super) secret: SessionSecret,
}

/// The rights of a session.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rights<'a> {
    /// Everything: no proof is required here.
    All,
    /// The rights of its host.
    Of(&'a Host),
    /// Nothing.
    None,
}

impl Rights<'_> {
    /// Whether the session may know of a volume.
    pub(super) fn may_see(self, volume: Name) -> bool {
        match self {
            Self::All => true,
            Self::Of(host) => host.may_see(volume),
            Self::None => false,
        }
    }

    /// Whether the session may have a volume open in that mode.
    pub(super) fn may_open(self, volume: Name, mode: AccessMode) -> bool {
        match self {
            Self::All => true,
            Self::Of(host) => host.may_open(volume, mode),
            Self::None => false,
        }
    }

    /// Whether an OPEN is allowed.
    ///
    /// # Errors
    /// The status and the text of the refusal.
    pub(super) fn check_open(self, request: &OpenRequest) -> Result<(), (Status, String)> {
        match self {
            Self::All => Ok(()),
            Self::Of(host) => host.check_open(request),
            Self::None => Err((Status::NoSuchVolume, String::new())),
        }
    }
}

impl Core {
    /// The rights of a session.
    pub(super) fn rights(&self, session: SessionIndex) -> Rights<'_> {
        match (&self.auth, self.proven.get(&session)) {
            (None, _) => Rights::All,
            (Some(_), Some(proven)) => Rights::Of(&proven.host),
            (Some(_), None) => Rights::None,
        }
    }

    /// The key that the host of a session has proven.
    #[must_use]
    pub(crate) fn key_of(&self, session: SessionIndex) -> Option<PublicKey> {
        self.proven.get(&session).map(|proven| proven.key)
    }

    /// Whether hosts must prove their keys.
    #[must_use]
    pub(crate) fn requires_proof(&self) -> bool {
        self.auth.is_some()
    }

    /// The limits of a host.
    pub(super) fn host_limits(&self, host: HostId) -> Option<&Arc<Limiter>> {
        self.auth.as_ref().and_then(|auth| auth.hosts.limits(host))
    }

    /// Tells the poll groups of the limits of the host of a session.
    pub(super) fn limit_host(&mut self, session: SessionIndex, host: HostId) {
        let limits = self.host_limits(host).cloned();
        self.effects.push_back(Effect::LimitHost { session, limits });
    }

    /// The handshake of a new admin connection, if proofs are required.
    ///
    /// # Errors
    /// The initiator has no keys.
    pub(super) fn new_handshake(
        &self,
        introduction: Option<&Introduction>,
    ) -> Result<Option<TargetHandshake>, ConnectRefusal> {
        let Some(AuthConfig { keys, .. }) = &self.auth else { return Ok(None) };
        let Some(Introduction { hellos, carrier }) = introduction else {
            return Err(refused(RejectReason::NotAllowed, NO_KEYS));
        };
        Ok(Some(TargetHandshake::new(keys, hellos, *carrier)))
    }

    /// The secret with which an I/O connection proves that it is of a session; `None` if no proof
    /// is required.
    ///
    /// # Errors
    /// The session has proven nothing.
    pub(super) fn secret_of(
        &self,
        session: SessionIndex,
    ) -> Result<Option<SessionSecret>, ConnectRefusal> {
        if self.auth.is_none() {
            return Ok(None);
        }
        let Some(proven) = self.proven.get(&session) else {
            return Err(refused(RejectReason::NoSuchSession, "cannot join the session"));
        };
        Ok(Some(proven.secret.clone()))
    }

    /// AUTHENTICATE: the target proves its key.
    pub(super) fn authenticate(
        &mut self,
        from: ConnectionRef,
        id: AdmissionId,
        body: &[u8],
    ) -> AdminAnswer {
        let Some(stranger) = self.admissions.stranger_mut(id) else {
            return refuse(Status::NotReady);
        };
        let Some(handshake) = &mut stranger.handshake else {
            // No proof is required here, or this connection failed its own.
            return refuse(Status::NotAllowed);
        };
        match handshake.read_first(body) {
            Ok(second) => AdminAnswer::Now(Status::Ok, narrow(second.len()), second.to_vec()),
            Err(error) => {
                self.distrust(from, id, &error.to_string());
                refuse(Status::NotAllowed)
            }
        }
    }

    /// The LOGIN of a stranger: the request, and the proven identity of its host.
    ///
    /// # Errors
    /// The answer, if it is refused.
    pub(super) fn proven_login(
        &mut self,
        from: ConnectionRef,
        id: AdmissionId,
        command: &CommandCapsule,
        body: &[u8],
    ) -> Result<(LoginRequest, Option<Proven>), AdminAnswer> {
        if self.auth.is_none() {
            return Ok((self.parsed_login(body)?, None));
        }
        let handshake = self.admissions.stranger_mut(id).and_then(|s| s.handshake.as_mut());
        // A failed proof gets no second try.
        let Some(handshake) = handshake else { return Err(refuse(Status::NotAllowed)) };
        let logged_in = match handshake.read_last(body, command.sequence) {
            Ok(logged_in) => logged_in,
            Err(error) => {
                self.distrust(from, id, &error.to_string());
                return Err(refuse(Status::NotAllowed));
            }
        };
        let key = logged_in.host;
        let host = self.auth.as_ref().and_then(|auth| auth.hosts.with_key(&key)).cloned();
        let Some(host) = host else {
            self.distrust(from, id, &format!("no host has its key {key}"));
            return Err(refuse(Status::NotAllowed));
        };
        self.seals.begin(id, from, logged_in.seal, (command.tag, logged_in.ticket));
        let request = self.parsed_login(&logged_in.login)?;
        let secret = SessionSecret::random().map_err(|error| {
            tracing::error!(%error, "LOGIN refused");
            refuse(Status::Internal)
        })?;
        // The host's own name for itself is informal; the administrator wrote one into the table.
        let request = LoginRequest { host: host.id(), host_name: host.name(), ..request };
        Ok((request, Some(Proven { key, host, secret })))
    }

    fn parsed_login(&mut self, body: &[u8]) -> Result<LoginRequest, AdminAnswer> {
        LoginRequest::from_wire(body).map_err(|error| {
            if self.lines.may_write(PeerLine::BadCommand, self.latest) {
                tracing::warn!(error, "bad LOGIN");
            }
            refuse(Status::InvalidField)
        })
    }

    /// A peer failed its proof: its connection ends once the reply is sent.
    pub(super) fn distrust(&mut self, from: ConnectionRef, id: AdmissionId, why: &str) {
        self.decisions.unproven += 1;
        let stranger = self.admissions.stranger_mut(id);
        let peer = stranger.map(|stranger| {
            stranger.handshake = None;
            stranger.peer.clone()
        });
        let of = peer.as_deref().unwrap_or_default();
        if self.lines.may_say(PeerLine::Unproven, of, why, self.latest) {
            tracing::warn!(peer, why, "an initiator did not prove its key");
        }
        let text = format!("an initiator did not prove its key: {why}");
        self.happened(Occurrence { address: peer, ..Occurrence::new(EventKind::Refuse, text) });
        self.effects.push_back(Effect::Expel { connection: from });
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
        // A connection that gave its place up meanwhile is ending.
        let member = self.admissions.unproven(id)?;
        let Member { session, epoch, queue: Some(queue), memory_bytes, .. } = member else {
            return None;
        };
        // Like any unproven connection, one that cannot have its number or exceeds its budget keeps
        // nothing.
        let fits = self.check_budget(session, memory_bytes);
        if let (Err(ConnectRefusal { text, .. }), Some(state)) = (&fits, self.sessions.get(session))
        {
            let (host, peer) = (state.host_name, state.peer.clone());
            if self.lines.may_say(PeerLine::Refused, &peer, text, now) {
                tracing::warn!(%host, peer, text, "ending a connection that its host may not have");
            }
            self.told_limit(host, &peer, text);
        }
        let connection = (epoch, queue, memory_bytes);
        let is_booked = fits.is_ok() && self.sessions.connection_proved(session, connection);
        if is_booked {
            self.admissions.prove(id);
        } else {
            self.effects.push_back(Effect::Expel { connection: from });
        }
        is_booked.then_some(session)
    }

    /// Replaces the table of the hosts. Sessions without their key or host in it end at once, and
    /// so does the use of volumes to which a host has no right any more. Returns the hosts that
    /// lost sessions. Does nothing if no proof is required.
    pub fn set_hosts(&mut self, mut hosts: Hosts, now: Instant) -> Vec<Name> {
        self.latest = now;
        let Some(auth) = &mut self.auth else { return Vec::new() };
        hosts.follow(&auth.hosts);
        let before = std::mem::replace(&mut auth.hosts, hosts);
        let mut ended = Vec::new();
        let sessions = self.sessions.iter().filter(|session| session.leave().is_none());
        let sessions: Vec<SessionIndex> = sessions.map(|session| session.index).collect();
        for session in sessions {
            let Some(proven) = self.proven.get_mut(&session) else { continue };
            let host = self.auth.as_ref().and_then(|auth| auth.hosts.with_key(&proven.key));
            match host.filter(|host| host.id() == proven.host.id()).cloned() {
                Some(host) => {
                    let id = host.id();
                    proven.host = host;
                    if self.host_limits(id).is_some() || before.limits(id).is_some() {
                        self.limit_host(session, id);
                    }
                    self.close_forbidden(session);
                }
                None => {
                    ended.push(proven.host.name());
                    self.revoke(session);
                }
            }
        }
        self.finish_opens();
        ended
    }
}

/// The text for an initiator without keys.
pub(crate) const NO_KEYS: &str = "hosts must prove their keys here";

const _: () = assert!(NO_KEYS.len() <= rblk_protocol::limits::REJECT_TEXT_BYTES, "it would be cut");
