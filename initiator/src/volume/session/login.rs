//! [`Login`]: the start of a session: an admin connection, the proofs of both ends, LOGIN.
//!
//! With [`Credentials`], a peer's messages before its proof can only fail this try: any peer may
//! answer at the address.

use std::time::{Duration, Instant};

use rblk_fabric::{
    Address, ConnectOptions, ConnectionHello, Device, ProtectionDomain, Route, Transport,
};
use rblk_protocol::auth::{
    Carrier, Hellos, InitiatorHandshake, PublicKey, SECOND_BYTES, SealedReply, SecretKey,
    SessionSecret,
};
use rblk_protocol::limits::{self, ADMIN_DEPTH};
use rblk_protocol::{
    ConnectionKind, Epoch, Features, HelloRequest, LoginReply, LoginRequest, Opcode, QueueDepth,
    SessionId, Status, Version, VolumeHandle,
};

use super::crowded::Crowded;
use super::{
    Credentials, Entry, HostIdentity, QUIESCE_TIMEOUT, explain, parse_accept, text_in, text_of,
};
use crate::engine::path::QueueMemory;
use crate::engine::path::memory_registration::Early;
use crate::engine::pulse::Pulse;
use crate::volume::admin::AdminChannel;
use crate::volume::error::SessionError;

/// The longest silence of a host before LOGIN. A target gives a stranger 5 s, and Soft-iWARP may
/// leave the first message of a connection unseen until the next one comes.
const STRANGER_PERIOD: Duration = Duration::from_secs(1);

/// The parameters of a login.
#[derive(Clone, Copy, Debug)]
pub(super) struct Login<'s> {
    pub(super) address: &'s Address,
    pub(super) options: &'s ConnectOptions,
    pub(super) host: &'s HostIdentity,
    pub(super) credentials: Option<&'s Credentials>,
    pub(super) entry: Entry,
    /// Memory to register while the target answers.
    pub(super) memory: &'s [QueueMemory],
}

/// A started session.
#[derive(Debug)]
pub(super) struct StartedSession {
    pub(super) admin: AdminChannel,
    pub(super) device: Device,
    pub(super) pd: ProtectionDomain,
    pub(super) reply: LoginReply,
    /// With credentials.
    pub(super) secret: Option<SessionSecret>,
    /// The memory under registration with the domain.
    pub(super) early: Early,
    /// The target knows several ways.
    pub(super) has_ways: bool,
}

/// The key of this host, and the key that the target must prove.
type Keys<'s> = (&'s SecretKey, &'s PublicKey);

/// An admin connection without a message yet.
struct Fresh {
    admin: AdminChannel,
    device: Device,
    pd: ProtectionDomain,
    hellos: Hellos,
    has_ways: bool,
}

/// The carrier of a device's connections, as the proofs name it.
fn carrier(device: &Device) -> Carrier {
    match device.caps().transport {
        Transport::Iwarp => Carrier::Iwarp,
        Transport::SoftTcp => Carrier::Tcp,
        Transport::SoftMemory => Carrier::Memory,
        Transport::InfiniBand | Transport::Roce | Transport::Unknown => Carrier::Verbs,
    }
}

impl Login<'_> {
    /// Connects and logs in. Tries the keys of the target in turn, each on a connection of its own.
    ///
    /// # Errors
    /// [`SessionError`].
    pub(super) async fn run(&self) -> Result<StartedSession, SessionError> {
        let Some(credentials) = self.credentials else { return self.with(None).await };
        let mut lost = None;
        for target in credentials.target_keys() {
            match self.with(Some((credentials.key(), target))).await {
                Err(SessionError::WrongTargetKey { .. }) => {}
                // The target may have ended the connection because it cannot read the message.
                Err(error @ SessionError::Lost(_)) => lost = Some(error),
                result => return result,
            }
        }
        let keys = credentials.target_keys().iter().map(ToString::to_string);
        Err(lost.unwrap_or_else(|| self.wrong_key(keys.collect::<Vec<_>>().join(", "))))
    }

    fn wrong_key(&self, keys: String) -> SessionError {
        SessionError::WrongTargetKey { address: self.address.to_string(), keys }
    }

    async fn with(&self, keys: Option<Keys<'_>>) -> Result<StartedSession, SessionError> {
        let mut fresh = self.find_place(keys.is_some()).await?;
        let early = Early::begin(&fresh.pd, self.memory);
        let (reply, secret) = match keys {
            None => (self.log_in(&mut fresh.admin).await?, None),
            Some(keys) => {
                let (reply, secret) = self.prove(&mut fresh, keys).await?;
                (reply, Some(secret))
            }
        };
        let Fresh { mut admin, device, pd, has_ways, .. } = fresh;
        admin.set_pulse(Pulse::of(self.options.detect));
        Ok(StartedSession { admin, device, pd, reply, secret, early, has_ways })
    }

    /// Makes the admin connection, and waits for room at the target if it must.
    async fn find_place(&self, with_keys: bool) -> Result<Fresh, SessionError> {
        let crowded = Crowded::new(self.options.timeout, Instant::now());
        loop {
            let tried = self.connect(with_keys).await;
            let Some(pause) = crowded.pause_after(&tried, Instant::now()) else { return tried };
            tokio::time::sleep(pause).await;
        }
    }

    /// Makes the admin connection.
    async fn connect(&self, with_keys: bool) -> Result<Fresh, SessionError> {
        let Self { address, options, entry: Entry { resume, asks_ways, .. }, .. } = *self;
        let route = Route::resolve(address, options).await?;
        let device = route.device();
        let pd = device.alloc_pd_with(self.options.order)?;
        let (session, epoch) = resume.unwrap_or((SessionId::default(), Epoch(0)));
        let asked = HelloRequest {
            kind: ConnectionKind::Admin,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(ADMIN_DEPTH)
                .unwrap_or_else(|| unreachable!("within the bounds")),
            features: [(Features::AUTH, with_keys), (Features::WAYS, asks_ways)]
                .into_iter()
                .filter(|(_, wanted)| *wanted)
                .fold(Features::default(), |all, (feature, _)| all.or(feature)),
            in_capsule_bytes: limits::IN_CAPSULE_DEFAULT_BYTES,
            io_max_bytes: limits::IO_MIN_BYTES,
            epoch,
            // The target sends no RDMA READ on it.
            reads_in: 0,
            session,
        };
        let sizes = AdminChannel::qp_limits();
        let (poller, handle) = pd.poller(sizes.send_wrs + sizes.recv_wrs)?;
        let request = asked.to_wire();
        let established = route
            .connect(&pd, &handle, sizes, &ConnectionHello(request.to_vec()))
            .await
            .map_err(|error| explain(address, error))
            .map_err(|error| if with_keys { error.before_proof() } else { error })?;
        let accept = parse_accept(address, &established.hello.0, &asked)?;
        if with_keys && !accept.features.has(Features::AUTH) {
            return Err(SessionError::NoProof { address: address.to_string() });
        }
        let hellos = Hellos::from_private_data(&request, &established.hello.0)?;
        let epoch = if resume.is_some() { epoch } else { Epoch(1) };
        let mut admin = AdminChannel::new(&pd, poller, established.connection, &accept, epoch)?;
        let pulse = Pulse::of(options.detect);
        admin.set_pulse(Pulse { period: pulse.period.min(STRANGER_PERIOD), ..pulse });
        let has_ways = accept.features.has(Features::WAYS);
        Ok(Fresh { admin, device, pd, hellos, has_ways })
    }

    /// LOGIN without proofs of either end.
    async fn log_in(&self, admin: &mut AdminChannel) -> Result<LoginReply, SessionError> {
        let body = self.request().to_wire();
        let reply = admin.call(Opcode::Login, VolumeHandle(0), 0, &body, self.timeout()).await?;
        if reply.status != Status::Ok {
            return Err(self.refused(reply.status, text_of(&reply), None));
        }
        LoginReply::from_wire(reply.begin(LoginReply::BYTES)).map_err(SessionError::Protocol)
    }

    /// AUTHENTICATE and LOGIN: the target proves its key, this host proves its own.
    async fn prove(
        &self,
        fresh: &mut Fresh,
        (key, target): Keys<'_>,
    ) -> Result<(LoginReply, SessionSecret), SessionError> {
        let admin = &mut fresh.admin;
        let (handshake, first) =
            InitiatorHandshake::begin(key, target, &fresh.hellos, carrier(&fresh.device))?;
        let (authenticate, none) = (Opcode::Authenticate, VolumeHandle(0));
        let timeout = self.options.timeout;
        let answer = match admin.call(authenticate, none, 0, &first, timeout).await {
            Ok(answer) if answer.status == Status::Ok => answer,
            // The target cannot read the message.
            Ok(_) => return Err(self.wrong_key(target.to_string())),
            Err(error) => return Err(error),
        };
        let sequence = admin.next_sequence();
        let (third, seal) = handshake
            .finish(answer.begin(SECOND_BYTES), &self.request().to_wire(), sequence)
            .map_err(|_| self.wrong_key(target.to_string()))?;
        match admin.log_in(&third, seal, self.timeout()).await? {
            Ok(reply) if reply.status == Status::Ok => {
                Ok(SessionSecret::from_login_payload(&reply.payload)?)
            }
            // The target does not know this host's key, so it has no seal.
            Err(Status::NotAllowed) => {
                Err(self.refused(Status::NotAllowed, String::new(), Some(key)))
            }
            Err(status) => Err(SessionError::Unproven { what: Opcode::Login, status }),
            Ok(SealedReply { status, value, payload }) => {
                Err(self.refused(status, text_in(value, &payload), Some(key)))
            }
        }
    }

    fn request(&self) -> LoginRequest {
        LoginRequest {
            host: self.host.id,
            host_name: self.host.name,
            keep_alive_ms: u32::try_from(self.options.detect.as_millis()).unwrap_or(u32::MAX),
            join: self.entry.join,
        }
    }

    fn timeout(&self) -> Duration {
        if self.entry.resume.is_some() { QUIESCE_TIMEOUT } else { self.options.timeout }
    }

    fn refused(&self, status: Status, text: String, key: Option<&SecretKey>) -> SessionError {
        let address = self.address.to_string();
        match (status, key) {
            (Status::NotAllowed, Some(key)) => {
                SessionError::HostNotAllowed { address, key: key.public().to_string() }
            }
            _ => {
                let what = format!("login at {address}");
                SessionError::Status { what, status, text }
            }
        }
    }
}
