//! [`Session`]: an initiator's use of a target: admin connection, login, volumes, I/O connections.
//!
//! To connect is a function from an address to a session. The owner of a session ([`crate::mount`])
//! notices its loss, and reconnects.

mod credentials;
mod crowded;
mod lanes;
mod login;
mod volume_list;
mod wish;

use std::time::{Duration, Instant};

use rblk_config::Encrypt;
use rblk_fabric::{Address, ConnectOptions, Device, FabricError, ProtectionDomain};
use rblk_protocol::auth::SessionSecret;
use rblk_protocol::width::wide;
use rblk_protocol::{
    AccessMode, AsyncEvent, Epoch, Generation, HelloAccept, HelloError, HelloReject, HelloRequest,
    HostId, Join, LoginReply, Name, Opcode, OpenReply, OpenRequest, SessionId, Status, VolumeEntry,
    VolumeHandle,
};

use super::admin::{AdminChannel, Reply};
use super::error::SessionError;
use crate::engine::path::memory_registration::Early;
use crate::engine::path::{Path, QueueMemory};
use crate::engine::pulse::Pulse;
use crate::engine::ways::WayIndex;
pub use credentials::{Credentials, TargetKeysError};
use lanes::Lanes;
use login::{Login, StartedSession};
use volume_list::VolumeList;
pub(crate) use wish::MESSAGES;
pub use wish::{QueueWish, REPLAY_QUEUE};

/// Time for commands that the target answers only after it has finished the commands of older
/// connections: the LOGIN of a resumed session, and an OPEN for writing. The LOGIN of a new session
/// is answered at once, or was lost. KEEP_ALIVEs prove meanwhile that the target lives.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(35);

/// The identity of this host to targets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostIdentity {
    /// Stable id.
    pub id: HostId,
    /// Name for people.
    pub name: Name,
}

/// The way to open a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeClaim {
    /// The access mode.
    pub mode: AccessMode,
    /// Fence the host that holds the volume.
    pub take_over: bool,
    /// The generation of the last OPEN, for a mount that reconnects; [`Generation::FRESH`] for a
    /// new mount.
    pub generation: Generation,
}

impl From<AccessMode> for VolumeClaim {
    /// A new mount that fences no host.
    fn from(mode: AccessMode) -> Self {
        Self { mode, take_over: false, generation: Generation::FRESH }
    }
}

/// How a session is entered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Entry {
    /// The session and the epoch to raise it to; `None` begins a new session.
    pub(crate) resume: Option<(SessionId, Epoch)>,
    /// For one more way: the ways that stay beside it, and the life that it ends.
    pub(crate) join: Option<Join>,
    /// The mount uses several ways at once, if the target knows that.
    pub(crate) asks_ways: bool,
}

/// A session.
#[derive(Debug)]
pub struct Session {
    /// The target's address.
    pub address: Address,
    /// The admin connection.
    pub admin: AdminChannel,
    options: ConnectOptions,
    device: Device,
    // Memory of queues without a path yet.
    early: Early,
    pd: ProtectionDomain,
    login: LoginReply,
    // With credentials: the secret for the proofs of I/O connections.
    secret: Option<SessionSecret>,
    // The encryption of I/O connections over TCP; without credentials there is none.
    encrypt: Encrypt,
    // A lane could not be connected, so no queue requests lanes again.
    without_lanes: bool,
    // Both ends know several ways.
    has_ways: bool,
    // The way of its paths.
    way: WayIndex,
}

impl Session {
    /// Connects and logs in. `resume` names a session and the epoch to raise it to. Each step of a
    /// new session takes at most `options.timeout`; a crowded target is tried again for 30 s. With
    /// credentials both ends must prove their keys.
    ///
    /// # Errors
    /// [`SessionError`].
    pub async fn connect(
        address: &Address,
        options: &ConnectOptions,
        host: &HostIdentity,
        credentials: Option<&Credentials>,
        resume: Option<(SessionId, Epoch)>,
    ) -> Result<Self, SessionError> {
        let entry = Entry { resume, ..Entry::default() };
        Self::connect_for(address, options, (host, credentials), entry, &[]).await
    }

    /// As [`Self::connect`], for queues with that memory. It is registered while the target answers
    /// LOGIN.
    ///
    /// # Errors
    /// As of [`Self::connect`].
    pub(crate) async fn connect_for(
        address: &Address,
        options: &ConnectOptions,
        (host, credentials): (&HostIdentity, Option<&Credentials>),
        entry: Entry,
        memory: &[QueueMemory],
    ) -> Result<Self, SessionError> {
        let login = Login { address, options, host, credentials, entry, memory };
        let started = login.run().await?;
        let StartedSession { admin, device, pd, reply: login, secret, early, has_ways } = started;
        Ok(Self {
            address: address.clone(),
            admin,
            options: options.clone(),
            device,
            early,
            pd,
            login,
            secret,
            encrypt: credentials.map_or(Encrypt::Off, Credentials::encrypt),
            without_lanes: false,
            has_ways,
            way: WayIndex::FIRST,
        })
    }

    /// Whether both ends know several ways.
    pub(crate) fn has_ways(&self) -> bool {
        self.has_ways
    }

    /// Makes every later path one of that way.
    pub(crate) fn set_way(&mut self, way: WayIndex) {
        self.way = way;
    }

    /// Starts a new session. Tries a second time if LOGIN is not answered: a faulty device or path
    /// may lose a message, and a living target answers at once.
    ///
    /// # Errors
    /// [`SessionError`].
    pub async fn begin(
        address: &Address,
        options: &ConnectOptions,
        host: &HostIdentity,
        credentials: Option<&Credentials>,
    ) -> Result<Self, SessionError> {
        Self::begin_by(address, options, (host, credentials), false).await
    }

    /// As [`Self::begin`]. With `asks_ways`, of a mount that uses several ways at once.
    ///
    /// # Errors
    /// As of [`Self::begin`].
    pub(crate) async fn begin_by(
        address: &Address,
        options: &ConnectOptions,
        known_by: (&HostIdentity, Option<&Credentials>),
        asks_ways: bool,
    ) -> Result<Self, SessionError> {
        let entry = Entry { asks_ways, ..Entry::default() };
        match Self::connect_for(address, options, known_by, entry, &[]).await {
            Err(SessionError::TimedOut { what: Opcode::Login | Opcode::KeepAlive }) => {
                tracing::warn!(%address, "no answer to LOGIN; trying once more");
                Self::connect_for(address, options, known_by, entry, &[]).await
            }
            result => result,
        }
    }

    /// The device of the session.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// All volumes of the target. The whole list takes at most the time of one step.
    ///
    /// # Errors
    /// [`SessionError`].
    pub async fn list(&mut self) -> Result<Vec<VolumeEntry>, SessionError> {
        let mut list = VolumeList::new(self.options.timeout, Instant::now());
        loop {
            let (from, left) = (list.next(), list.left(Instant::now()));
            if left.is_zero() {
                return Err(SessionError::TimedOut { what: Opcode::ListVolumes });
            }
            let reply =
                self.admin.call(Opcode::ListVolumes, VolumeHandle(0), from, &[], left).await?;
            if reply.status != Status::Ok {
                return Err(self.status("listing volumes", &reply));
            }
            if list.take(&reply.payload)? {
                return Ok(list.finish());
            }
        }
    }

    /// The answer to LOGIN: the session, its epoch, and the run and name of the target.
    #[must_use]
    pub fn login(&self) -> LoginReply {
        self.login
    }

    /// Opens a volume. Waits up to 35 s for commands of earlier holders to finish.
    ///
    /// # Errors
    /// [`SessionError::NoSuchVolume`] with the target's volumes; [`SessionError::Status`] with the
    /// holder's name when it is in use; [`SessionError::Fenced`] when another host had it since the
    /// named generation.
    pub async fn open(
        &mut self,
        volume: &Name,
        claim: impl Into<VolumeClaim>,
    ) -> Result<OpenReply, SessionError> {
        let VolumeClaim { mode, take_over, generation } = claim.into();
        let request = OpenRequest { name: *volume, mode, take_over, generation };
        let timeout = self.options.timeout.max(QUIESCE_TIMEOUT);
        let reply = self
            .admin
            .call(Opcode::OpenVolume, VolumeHandle(0), 0, &request.to_wire(), timeout)
            .await?;
        let what = || format!("opening volume `{volume}` at {}", self.address);
        match (reply.status, reply.value) {
            (Status::Ok, _) => {
                OpenReply::from_wire(reply.begin(OpenReply::BYTES)).map_err(SessionError::Protocol)
            }
            (Status::NoSuchVolume, _) => {
                let names: Vec<String> =
                    self.list().await?.iter().map(|v| v.name.to_string()).collect();
                Err(SessionError::NoSuchVolume {
                    address: self.address.to_string(),
                    volume: volume.to_string(),
                    has: if names.is_empty() { "none".to_owned() } else { names.join(", ") },
                })
            }
            // Without a text, only the session is useless; the volume was not taken over.
            (Status::Fenced, 1..) => {
                Err(SessionError::Fenced { volume: volume.to_string(), by: text_of(&reply) })
            }
            _ => Err(self.status(&what(), &reply)),
        }
    }

    fn status(&self, what: &str, reply: &Reply) -> SessionError {
        SessionError::Status { what: what.to_owned(), status: reply.status, text: text_of(reply) }
    }

    /// Logs out, if the target answers in time, and ends the admin connection.
    pub async fn logout(mut self, timeout: Duration) {
        let _ = self.admin.call(Opcode::Logout, VolumeHandle(0), 0, &[], timeout).await;
        self.admin.close();
    }

    /// Connects an I/O queue over `buffers`, for an engine. The session is kept alive meanwhile.
    ///
    /// # Errors
    /// [`SessionError`]; [`SessionError::Lost`] when the target drains, or gave the volume to
    /// another host.
    pub async fn connect_queue(
        &mut self,
        queue: u16,
        wish: QueueWish,
        volume: VolumeHandle,
        memory: &QueueMemory,
    ) -> Result<Path, SessionError> {
        // A failed lane is not tried again while requests wait.
        let lanes = if self.without_lanes { 1 } else { wish.lanes(self.device.caps()) };
        let wish = QueueWish { lanes: Some(lanes), ..wish };
        let registering = self.early.take(&self.pd, memory);
        let Self {
            address,
            options,
            device,
            pd,
            admin,
            login,
            secret,
            encrypt,
            without_lanes,
            way,
            ..
        } = self;
        let pulse = Pulse::of(options.detect);
        let (session, epoch) = (login.session, login.epoch);
        let (secret, encrypt) = (secret.as_ref(), *encrypt);
        let connector = Lanes { address, options, device, pd, session, epoch, secret, encrypt };
        let connect = connector.connect_queue(queue, wish, volume, registering);
        tokio::pin!(connect);
        loop {
            tokio::select! {
                path = &mut connect => {
                    let path = Path { way: *way, ..path? };
                    *without_lanes |= path.lanes() < usize::from(lanes);
                    return Ok(path);
                }
                event = admin.event(pulse) => match event? {
                    Some(AsyncEvent::Draining) => {
                        return Err(SessionError::Lost("the target drains".to_owned()));
                    }
                    Some(AsyncEvent::Upgrading) => {
                        return Err(SessionError::Lost("the target is being upgraded".to_owned()));
                    }
                    Some(AsyncEvent::Fenced) => {
                        return Err(SessionError::Lost("the volume was taken over".to_owned()));
                    }
                    event => tracing::debug!(?event, "event of the target"),
                },
            }
        }
    }
}

/// The target's text of a refusal, without control characters.
fn text_of(reply: &Reply) -> String {
    text_in(reply.value, &reply.payload)
}

fn text_in(value: u32, payload: &[u8]) -> String {
    let len = wide(value).min(payload.len()).min(256);
    String::from_utf8_lossy(&payload[..len]).chars().filter(|c| !c.is_control()).collect()
}

fn explain(address: &Address, error: FabricError) -> SessionError {
    match error {
        FabricError::Rejected { hello, .. } => match HelloReject::from_wire(&hello) {
            Ok(reject) => SessionError::Refused { address: address.to_string(), reject },
            Err(error) => not_rblk(address, error),
        },
        error => error.into(),
    }
}

fn not_rblk(address: &Address, error: HelloError) -> SessionError {
    SessionError::NotRblk { address: address.to_string(), reason: error.to_string() }
}

fn parse_accept(
    address: &Address,
    hello: &[u8],
    asked: &HelloRequest,
) -> Result<HelloAccept, SessionError> {
    HelloAccept::from_wire(hello, asked).map_err(|error| not_rblk(address, error))
}
