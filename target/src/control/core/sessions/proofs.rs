//! [`Proofs`]: what hosts have proven, and may do therefore: keys on admin connections, session
//! secrets on I/O connections.
//!
//! With `auth = "none"` there are no proofs, and a session belongs to any peer that names it.

use std::collections::BTreeMap;
use std::sync::Arc;

use rblk_protocol::auth::{Carrier, Hellos, PublicKey, SecretKey, SessionSecret, TargetHandshake};
use rblk_protocol::{
    AccessMode, Epoch, HostId, LoginReply, Name, OpenRequest, RejectReason, Status,
};

use crate::control::core::connect_refusal::{ConnectRefusal, refused};
use crate::control::core::effect::Effect;
use crate::control::core::hosts::{Host, Hosts};
use crate::control::core::outbox::Outbox;
use crate::control::peers::session::EndedEpochs;
use crate::volume::ids::SessionIndex;
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

/// The proven identity of the host of a LOGIN.
#[derive(Debug)]
pub(in crate::control::core) struct Proven {
    pub(in crate::control::core) key: PublicKey,
    pub(in crate::control::core) host: Arc<Host>,
    /// Of its epoch.
    pub(in crate::control::core) secret: SessionSecret,
}

/// The proven identity of the host of a session.
#[derive(Debug)]
struct ProvenSession {
    host: Arc<Host>,
    // The key and the secret of each epoch that was not ended.
    ways: BTreeMap<Epoch, (PublicKey, SessionSecret)>,
}

/// The rights of a session.
#[derive(Clone, Copy, Debug)]
pub(in crate::control::core) enum Rights<'a> {
    /// Everything: no proof is required here.
    All,
    /// The rights of its host.
    Of(&'a Host),
    /// Nothing.
    None,
}

impl Rights<'_> {
    /// Whether the session may know of a volume.
    pub(in crate::control::core) fn may_see(self, volume: Name) -> bool {
        match self {
            Self::All => true,
            Self::Of(host) => host.may_see(volume),
            Self::None => false,
        }
    }

    /// Whether the session may have a volume open in that mode.
    pub(in crate::control::core) fn may_open(self, volume: Name, mode: AccessMode) -> bool {
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
    pub(in crate::control::core) fn check_open(
        self,
        request: &OpenRequest,
    ) -> Result<(), (Status, String)> {
        match self {
            Self::All => Ok(()),
            Self::Of(host) => host.check_open(request),
            Self::None => Err((Status::NoSuchVolume, String::new())),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(in crate::control::core) struct Proofs {
    // `None`: no host has to prove its identity.
    auth: Option<AuthConfig>,
    // Of every session, or of none.
    proven: BTreeMap<SessionIndex, ProvenSession>,
}

impl Proofs {
    /// No session has proven anything yet.
    pub(super) fn new(auth: Option<AuthConfig>) -> Self {
        Self { auth, proven: BTreeMap::new() }
    }

    /// The rights of a session.
    pub(in crate::control::core) fn rights(&self, session: SessionIndex) -> Rights<'_> {
        match (&self.auth, self.proven.get(&session)) {
            (None, _) => Rights::All,
            (Some(_), Some(proven)) => Rights::Of(&proven.host),
            (Some(_), None) => Rights::None,
        }
    }

    /// The key that the host of a session has proven last.
    pub(in crate::control::core) fn key_of(&self, session: SessionIndex) -> Option<PublicKey> {
        let (_, (key, _)) = self.proven.get(&session)?.ways.last_key_value()?;
        Some(*key)
    }

    /// Whether hosts must prove their keys.
    pub(in crate::control::core) fn are_required(&self) -> bool {
        self.auth.is_some()
    }

    /// The host that may log in by a key.
    pub(in crate::control::core) fn host_with(&self, key: &PublicKey) -> Option<&Arc<Host>> {
        self.auth.as_ref().and_then(|auth| auth.hosts.with_key(key))
    }

    /// The handshake of a new admin connection, if proofs are required.
    ///
    /// # Errors
    /// The initiator has no keys.
    pub(in crate::control::core) fn new_handshake(
        &self,
        introduction: Option<&Introduction>,
    ) -> Result<Option<TargetHandshake>, ConnectRefusal> {
        let Some(AuthConfig { keys, .. }) = &self.auth else { return Ok(None) };
        let Some(Introduction { hellos, carrier }) = introduction else {
            return Err(refused(RejectReason::NotAllowed, NO_KEYS));
        };
        Ok(Some(TargetHandshake::new(keys, hellos, *carrier)))
    }

    /// The secret with which an I/O connection proves that it is of an epoch of a session; `None`
    /// if no proof is required.
    ///
    /// # Errors
    /// The session has proven nothing in that epoch.
    pub(in crate::control::core) fn secret_of(
        &self,
        session: SessionIndex,
        epoch: Epoch,
    ) -> Result<Option<SessionSecret>, ConnectRefusal> {
        if self.auth.is_none() {
            return Ok(None);
        }
        let Some(secret) = self.secret(session, epoch) else {
            return Err(refused(RejectReason::NoSuchSession, "cannot join the session"));
        };
        Ok(Some(secret.clone()))
    }

    fn secret(&self, session: SessionIndex, epoch: Epoch) -> Option<&SessionSecret> {
        self.proven.get(&session)?.ways.get(&epoch).map(|(_, secret)| secret)
    }

    /// The payload of the reply to LOGIN: with the secret of the epoch if its host proved itself.
    pub(super) fn login_payload(
        &self,
        (session, epoch): (SessionIndex, Epoch),
        reply: &LoginReply,
    ) -> Vec<u8> {
        match self.secret(session, epoch) {
            Some(secret) => secret.login_payload(reply).to_vec(),
            None => reply.to_wire().to_vec(),
        }
    }

    /// The host of a session has proven itself in an epoch, which ends others: tells the poll
    /// groups of its limits, if it has any.
    pub(super) fn note(
        &mut self,
        (session, epoch): (SessionIndex, Epoch),
        Proven { key, host: proven, secret }: Proven,
        ends: &EndedEpochs,
        out: &mut Outbox,
    ) {
        let host = proven.id();
        let none = || ProvenSession { host: Arc::clone(&proven), ways: BTreeMap::new() };
        let known = self.proven.entry(session).or_insert_with(none);
        known.ways.retain(|epoch, _| !ends.has(*epoch));
        known.ways.insert(epoch, (key, secret));
        known.host = proven;
        if let Some(limits) = self.limits(host).cloned() {
            out.order(Effect::LimitHost { session, limits: Some(limits) });
        }
    }

    /// Epochs of a session ended.
    pub(super) fn end_epochs(&mut self, session: SessionIndex, ended: &EndedEpochs) {
        if let Some(known) = self.proven.get_mut(&session) {
            known.ways.retain(|epoch, _| !ended.has(*epoch));
        }
    }

    /// A session ended. Returns whether its host had proven itself.
    pub(super) fn forget(&mut self, session: SessionIndex) -> bool {
        self.proven.remove(&session).is_some()
    }

    /// Replaces the table of the hosts. Returns the former one, for [`Self::follow`]. Does nothing
    /// if no proof is required.
    pub(in crate::control::core) fn replace(&mut self, mut hosts: Hosts) -> Option<Hosts> {
        let auth = self.auth.as_mut()?;
        hosts.follow(&auth.hosts);
        Some(std::mem::replace(&mut auth.hosts, hosts))
    }

    /// Gives a session the entry that its host has in the new table, and tells the poll groups of
    /// its limits. `None`: the session has proven nothing.
    pub(in crate::control::core) fn follow(
        &mut self,
        session: SessionIndex,
        former: &Hosts,
        out: &mut Outbox,
    ) -> Option<Followed> {
        let proven = self.proven.get_mut(&session)?;
        let hosts = self.auth.as_ref().map(|auth| &auth.hosts);
        // A key that is not allowed any more must not have let in one of its ways.
        let entry = |key| hosts?.with_key(key).filter(|host| host.id() == proven.host.id());
        let entries: Option<Vec<&Arc<Host>>> =
            proven.ways.values().map(|(key, _)| entry(key)).collect();
        let Some(host) = entries.and_then(|all| all.last().map(|host| Arc::clone(host))) else {
            return Some(Followed::Gone(proven.host.name()));
        };
        let id = host.id();
        proven.host = host;
        let limits = self.limits(id).cloned();
        if limits.is_some() || former.limits(id).is_some() {
            out.order(Effect::LimitHost { session, limits });
        }
        Some(Followed::Stays)
    }

    fn limits(&self, host: HostId) -> Option<&Arc<Limiter>> {
        self.auth.as_ref().and_then(|auth| auth.hosts.limits(host))
    }
}

/// The host of a session, in a new table of hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::control::core) enum Followed {
    /// The host may log in by its key.
    Stays,
    /// The key or the host of this name is not in the table.
    Gone(Name),
}

/// The text for an initiator without keys.
pub(crate) const NO_KEYS: &str = "hosts must prove their keys here";

const _: () = assert!(NO_KEYS.len() <= rblk_protocol::limits::REJECT_TEXT_BYTES, "it would be cut");
