//! [`Session`]: an initiator's use of a target: admin connection, login, volumes, I/O connections.
//!
//! Connecting is a function from an address to a session. The owner of a session ([`crate::mount`])
//! sees that it was lost, and reconnects.

mod lanes;
mod wish;

use std::sync::Arc;
use std::time::Duration;

use rblk_fabric::{
    Address, ConnectOptions, ConnectionHello, Device, FabricError, ProtectionDomain, Region, Route,
};
use rblk_protocol::limits::{self, ADMIN_DEPTH};
use rblk_protocol::width::{wide, wide64};
use rblk_protocol::{
    AccessMode, AsyncEvent, ConnectionKind, Epoch, Features, Generation, HelloAccept, HelloError,
    HelloReject, HelloRequest, HostId, LoginReply, LoginRequest, Name, Opcode, OpenReply,
    OpenRequest, QueueDepth, SessionId, Status, Version, VolumeEntry, VolumeHandle,
    VolumeListHeader,
};

use crate::admin::{AdminChannel, Pulse, Reply};
use crate::error::SessionError;
use crate::path::Path;
use lanes::Lanes;
pub(crate) use wish::LISTS;
pub use wish::{QueueWish, REPLAY_QUEUE};

/// How long a command may take that the target answers only when it has finished what older
/// connections began: the LOGIN of a session that is resumed, and an OPEN for writing. The LOGIN of
/// a new session is answered at once, or was lost. KEEP_ALIVEs show meanwhile that the target
/// lives.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(35);

/// The identity of this host to targets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostIdentity {
    /// Stable id.
    pub id: HostId,
    /// Name for people.
    pub name: Name,
}

/// How a volume is to be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// How it is used.
    pub mode: AccessMode,
    /// Fence the host that holds it.
    pub take_over: bool,
    /// The generation of the last OPEN, for a mount that comes back; [`Generation::FRESH`] for a
    /// new mount.
    pub generation: Generation,
}

impl From<AccessMode> for Claim {
    /// A new mount that fences no host.
    fn from(mode: AccessMode) -> Self {
        Self { mode, take_over: false, generation: Generation::FRESH }
    }
}

/// A session.
#[derive(Debug)]
pub struct Session {
    /// Where it goes.
    pub address: Address,
    /// Its admin connection.
    pub admin: AdminChannel,
    options: ConnectOptions,
    device: Device,
    pd: ProtectionDomain,
    login: LoginReply,
    // A lane could not be connected, so no queue asks for one again.
    without_lanes: bool,
}

impl Session {
    /// Connects and logs in. `resume` names a session and the epoch to raise it to. Each step of
    /// beginning a new session takes at most `options.timeout`.
    ///
    /// # Errors
    /// [`SessionError`].
    pub async fn connect(
        address: &Address,
        options: &ConnectOptions,
        host: &HostIdentity,
        resume: Option<(SessionId, Epoch)>,
    ) -> Result<Self, SessionError> {
        let route = Route::resolve(address, options).await?;
        let device = route.device();
        let pd = device.alloc_pd()?;
        let (session, epoch) = resume.unwrap_or((SessionId::default(), Epoch(0)));
        let asked = HelloRequest {
            kind: ConnectionKind::Admin,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(ADMIN_DEPTH)
                .unwrap_or_else(|| unreachable!("within the bounds")),
            features: Features::default(),
            in_capsule_bytes: limits::IN_CAPSULE_DEFAULT_BYTES,
            io_max_bytes: limits::IO_MIN_BYTES,
            epoch,
            session,
        };
        let sizes = AdminChannel::qp_limits();
        let (poller, handle) = pd.poller(sizes.send_wrs + sizes.recv_wrs)?;
        let established = route
            .connect(&pd, &handle, sizes, &ConnectionHello(asked.to_wire().to_vec()))
            .await
            .map_err(|error| explain(address, error))?;
        let accept = parse_accept(address, &established.hello.0, &asked)?;
        let epoch = if resume.is_some() { epoch } else { Epoch(1) };
        let mut admin = AdminChannel::new(&pd, poller, established.connection, &accept, epoch)?;
        admin.set_pulse(Pulse::of(options.detect));
        let login = LoginRequest {
            host: host.id,
            host_name: host.name,
            keep_alive_ms: u32::try_from(options.detect.as_millis()).unwrap_or(u32::MAX),
        };
        let timeout = if resume.is_some() { QUIESCE_TIMEOUT } else { options.timeout };
        let reply =
            admin.call(Opcode::Login, VolumeHandle(0), 0, &login.to_wire(), timeout).await?;
        if reply.status != Status::Ok {
            return Err(SessionError::Status {
                what: format!("login at {address}"),
                status: reply.status,
                text: text_of(&reply),
            });
        }
        let login = LoginReply::from_wire(&reply.payload[..LoginReply::BYTES])
            .map_err(SessionError::Protocol)?;
        let (address, options) = (address.clone(), options.clone());
        Ok(Self { address, admin, options, device, pd, login, without_lanes: false })
    }

    /// Begins a new session. Tries a second time if LOGIN is not answered: a faulty device or path
    /// may lose a message, and a target that lives answers at once.
    ///
    /// # Errors
    /// [`SessionError`].
    pub async fn begin(
        address: &Address,
        options: &ConnectOptions,
        host: &HostIdentity,
    ) -> Result<Self, SessionError> {
        match Self::connect(address, options, host, None).await {
            Err(SessionError::TimedOut { what: Opcode::Login | Opcode::KeepAlive }) => {
                tracing::warn!(%address, "no answer to LOGIN; trying once more");
                Self::connect(address, options, host, None).await
            }
            result => result,
        }
    }

    /// The device the session goes by.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// All volumes of the target.
    ///
    /// # Errors
    /// [`SessionError`].
    pub async fn list(&mut self) -> Result<Vec<VolumeEntry>, SessionError> {
        let mut volumes = Vec::new();
        loop {
            let from = wide64(volumes.len());
            let reply = self
                .admin
                .call(Opcode::ListVolumes, VolumeHandle(0), from, &[], self.options.timeout)
                .await?;
            if reply.status != Status::Ok {
                return Err(self.status("listing volumes", &reply));
            }
            let (head, rest) = reply.payload.split_at(VolumeListHeader::BYTES);
            let header = VolumeListHeader::from_wire(head).map_err(SessionError::Protocol)?;
            let (entries, total) = (wide(header.entries), wide(header.total));
            let room = rest.len() / VolumeEntry::BYTES;
            if entries > room || entries == 0 && total > volumes.len() {
                return Err(SessionError::Protocol("a list that does not add up"));
            }
            for entry in rest.chunks_exact(VolumeEntry::BYTES).take(entries) {
                volumes.push(VolumeEntry::from_wire(entry).map_err(SessionError::Protocol)?);
            }
            if volumes.len() >= total {
                return Ok(volumes);
            }
        }
    }

    /// The answer to LOGIN: the session, its epoch, and the run and name of the target.
    #[must_use]
    pub fn login(&self) -> LoginReply {
        self.login
    }

    /// Opens a volume. Waits up to 35 s while commands of earlier holders finish.
    ///
    /// # Errors
    /// [`SessionError::NoSuchVolume`] with what there is; [`SessionError::Status`] with the
    /// holder's name when it is in use; [`SessionError::Fenced`] when another host had it since the
    /// generation that is named.
    pub async fn open(
        &mut self,
        volume: &Name,
        claim: impl Into<Claim>,
    ) -> Result<OpenReply, SessionError> {
        let Claim { mode, take_over, generation } = claim.into();
        let request = OpenRequest { name: *volume, mode, take_over, generation };
        let timeout = self.options.timeout.max(QUIESCE_TIMEOUT);
        let reply = self
            .admin
            .call(Opcode::OpenVolume, VolumeHandle(0), 0, &request.to_wire(), timeout)
            .await?;
        let what = || format!("opening volume `{volume}` at {}", self.address);
        match (reply.status, reply.value) {
            (Status::Ok, _) => OpenReply::from_wire(&reply.payload[..OpenReply::BYTES])
                .map_err(SessionError::Protocol),
            (Status::NoSuchVolume, _) => {
                let names: Vec<String> =
                    self.list().await?.iter().map(|v| v.name.to_string()).collect();
                Err(SessionError::NoSuchVolume {
                    address: self.address.to_string(),
                    volume: volume.to_string(),
                    has: if names.is_empty() { "none".to_owned() } else { names.join(", ") },
                })
            }
            // Without a text the session is of no use any more; the volume was not taken.
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
        buffers: &Arc<Region>,
    ) -> Result<Path, SessionError> {
        // A lane that failed is not tried again and again while requests wait.
        let lanes = if self.without_lanes { 1 } else { wish.lanes(self.device.caps()) };
        let wish = QueueWish { lanes: Some(lanes), ..wish };
        let Self { address, options, device, pd, admin, login, without_lanes } = self;
        let pulse = Pulse::of(options.detect);
        let (session, epoch) = (login.session, login.epoch);
        let connector = Lanes { address, options, device, pd, session, epoch };
        let connect = connector.connect_queue(queue, wish, volume, buffers);
        tokio::pin!(connect);
        loop {
            tokio::select! {
                path = &mut connect => {
                    *without_lanes |= path
                        .as_ref()
                        .is_ok_and(|path| path.connections.len() < usize::from(lanes));
                    return path;
                }
                event = admin.event(pulse) => match event? {
                    Some(AsyncEvent::Draining) => {
                        return Err(SessionError::Lost("the target drains".to_owned()));
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
    let len = wide(reply.value).min(reply.payload.len()).min(256);
    String::from_utf8_lossy(&reply.payload[..len]).chars().filter(|c| !c.is_control()).collect()
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
