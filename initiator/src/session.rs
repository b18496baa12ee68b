//! [`Session`]: an initiator's use of a target: admin connection, login, volumes, I/O connections.
//!
//! Connecting is a function from an address to a session; losing it and connecting again is the
//! business of whoever holds it ([`crate::mount`]).

use std::time::Duration;

use rblk_fabric::{
    Address, ConnectOptions, Connection, ConnectionHello, Device, DeviceCaps, FabricError, Poller,
    PollerHandle, ProtectionDomain, QpLimits, Region, Route,
};
use rblk_protocol::limits::{self, ADMIN_DEPTH};
use rblk_protocol::{
    AccessMode, AsyncEvent, ConnectionKind, Epoch, Features, Generation, HelloAccept, HelloError,
    HelloReject, HelloRequest, HostId, InstanceId, LoginReply, LoginRequest, Name, Opcode,
    OpenReply, OpenRequest, QueueDepth, SessionId, Status, Version, VolumeEntry, VolumeHandle,
    VolumeListHeader,
};
use std::sync::Arc;

use crate::admin::{AdminChannel, Pulse, Reply};
use crate::error::SessionError;
use crate::path::{DATA_LIST_SGES, Path, PathLayout, PathMemory, retire};

/// The queue by which writes are written again: the number behind those of all queues and lanes
/// that a mount can have.
pub const REPLAY_QUEUE: u16 = limits::MOUNT_QPS_MAX;
const _: () = assert!(REPLAY_QUEUE < limits::QUEUES_MAX, "targets refuse others");
/// READs of a target that a queue serves at once, where the device can.
const READS_IN_MAX: u8 = 16;
/// How long a command may take that the target answers when it has finished what older connections
/// began: the LOGIN of a session that goes on, and an OPEN for writing. The LOGIN of a new session
/// is answered at once, or was lost. KEEP_ALIVEs show meanwhile that the target lives.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(35);

/// Who we are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostIdentity {
    /// Stable id.
    pub id: HostId,
    /// Name for people.
    pub name: Name,
}

/// Lists of capsules, in every form that this version knows: what a queue wishes for unless it has
/// reasons not to.
pub const LISTS: Features = Features(Features::CAPSULE_LISTS.0 | Features::DATA_LISTS.0);

/// What one I/O queue asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueWish {
    /// Commands outstanding.
    pub depth: QueueDepth,
    /// Most data per command.
    pub io_max_bytes: u32,
    /// In-capsule data.
    pub in_capsule_bytes: u32,
    /// Optional verbs to try.
    pub features: Features,
    /// QPs of each queue; what the device profits from if absent. Fewer where the target has no
    /// room for them.
    pub lanes: Option<u16>,
    /// Queues of the session: lanes other than the first are numbered behind them.
    pub queues: u16,
}

impl QueueWish {
    /// How many lanes to try on such a device. A card serves one QP with all that it has. A
    /// software device has a kernel thread for each QP, and one thread moves less than its host
    /// can.
    ///
    /// All queues have as many, and none the number of the [`REPLAY_QUEUE`]: what is written in a
    /// configuration was checked, and what is not is lowered.
    fn lanes(&self, caps: &DeviceCaps) -> u16 {
        let wanted = self.lanes.unwrap_or(if caps.kernel_software { 2 } else { 1 });
        let room = limits::MOUNT_QPS_MAX / self.queues.max(1);
        wanted.min(room).clamp(1, limits::LANES_MAX)
    }

    /// The number of a lane among the queues of the session.
    fn number(&self, queue: u16, lane: u16) -> u16 {
        queue.saturating_add(lane.saturating_mul(self.queues))
    }
}

/// How a volume is to be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// How it is used.
    pub mode: AccessMode,
    /// Fence whoever holds it.
    pub take_over: bool,
    /// That of the last OPEN, of one that comes back; [`Generation::FRESH`] of one that has nothing
    /// to go on with.
    pub generation: Generation,
}

impl From<AccessMode> for Claim {
    /// A fresh start that fences nobody.
    fn from(mode: AccessMode) -> Self {
        Self { mode, take_over: false, generation: Generation::FRESH }
    }
}

/// A session.
#[derive(Debug)]
pub struct Session {
    /// Where it goes.
    pub address: Address,
    options: ConnectOptions,
    device: Device,
    pd: ProtectionDomain,
    /// Its admin connection.
    pub admin: AdminChannel,
    /// Its id.
    pub id: SessionId,
    /// Its epoch.
    pub epoch: Epoch,
    /// The target's run.
    pub instance: InstanceId,
    /// The target's name.
    pub target_name: Name,
    /// I/O queues the target allows.
    pub queues_max: u16,
    // A lane could not be had.
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
                text: String::new(),
            });
        }
        let login = LoginReply::from_wire(&reply.payload[..LoginReply::BYTES])
            .map_err(SessionError::Protocol)?;
        Ok(Self {
            address: address.clone(),
            options: options.clone(),
            device,
            pd,
            admin,
            id: login.session,
            epoch: login.epoch,
            instance: login.instance,
            target_name: login.target_name,
            queues_max: login.queues_max,
            without_lanes: false,
        })
    }

    /// Connects and logs in anew. If no answer to LOGIN comes, once more: a message may get lost
    /// where a device or a path is at fault, and a target that lives answers at once.
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
            let from = volumes.len() as u64;
            let reply = self
                .admin
                .call(Opcode::ListVolumes, VolumeHandle(0), from, &[], self.options.timeout)
                .await?;
            if reply.status != Status::Ok {
                return Err(self.status("listing volumes", &reply));
            }
            let (head, rest) = reply.payload.split_at(VolumeListHeader::BYTES);
            let header = VolumeListHeader::from_wire(head).map_err(SessionError::Protocol)?;
            let entries = usize::try_from(header.entries).unwrap_or(usize::MAX);
            let room = rest.len() / VolumeEntry::BYTES;
            if entries > room || entries == 0 && header.total as usize > volumes.len() {
                return Err(SessionError::Protocol("a list that does not add up"));
            }
            for entry in rest.chunks_exact(VolumeEntry::BYTES).take(entries) {
                volumes.push(VolumeEntry::from_wire(entry).map_err(SessionError::Protocol)?);
            }
            if volumes.len() >= header.total as usize {
                return Ok(volumes);
            }
        }
    }

    /// What LOGIN was answered with.
    #[must_use]
    pub fn login(&self) -> LoginReply {
        LoginReply {
            session: self.id,
            epoch: self.epoch,
            instance: self.instance,
            queues_max: self.queues_max,
            target_name: self.target_name,
        }
    }

    /// Opens a volume. Waits while commands of earlier holders are finished, up to 35 s.
    ///
    /// # Errors
    /// [`SessionError::NoSuchVolume`] with what there is; [`SessionError::Status`] with the
    /// holder's name when it is in use; [`SessionError::Fenced`] when somebody else had it since
    /// the generation that is named.
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
            // Without a word it is the session that is of no use any more, not the volume that was
            // taken.
            (Status::Fenced, 1..) => {
                Err(SessionError::Fenced { volume: volume.to_string(), by: words(&reply) })
            }
            _ => Err(self.status(&what(), &reply)),
        }
    }

    fn status(&self, what: &str, reply: &Reply) -> SessionError {
        SessionError::Status { what: what.to_owned(), status: reply.status, text: words(reply) }
    }

    /// Says goodbye, as far as the target listens, and ends the admin connection.
    pub async fn logout(mut self, timeout: Duration) {
        let _ = self.admin.call(Opcode::Logout, VolumeHandle(0), 0, &[], timeout).await;
        self.admin.close();
    }

    /// Connects an I/O queue over `buffers`, for an engine. The session is kept alive meanwhile.
    ///
    /// # Errors
    /// [`SessionError`]; [`SessionError::Lost`] when the target drains, or gave the volume to
    /// somebody else.
    pub async fn connect_queue(
        &mut self,
        queue: u16,
        wish: QueueWish,
        volume: VolumeHandle,
        buffers: &Arc<Region>,
    ) -> Result<Path, SessionError> {
        // One that cannot be had is not asked for again and again while requests wait.
        let lanes = if self.without_lanes { 1 } else { wish.lanes(self.device.caps()) };
        let wish = QueueWish { lanes: Some(lanes), ..wish };
        let Self { address, options, device, pd, admin, id, epoch, without_lanes, .. } = self;
        let pulse = Pulse::of(options.detect);
        let place = Place { address, options, device, pd, session: *id, epoch: *epoch };
        let connect = place.connect_queue(queue, wish, volume, buffers);
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

/// Connections that are not a path yet, with their CQ. If they do not become one they are
/// destroyed, and nobody waits for that.
struct Made {
    connections: Vec<Connection>,
    poller: Option<Box<dyn Poller>>,
}

impl Made {
    fn take(&mut self) -> Option<(Box<dyn Poller>, Vec<Connection>)> {
        self.poller.take().map(|poller| (poller, std::mem::take(&mut self.connections)))
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if let Some((poller, connections)) = self.take() {
            retire(connections, poller);
        }
    }
}

/// Where the I/O connections of a session go, apart from its admin connection.
#[derive(Debug)]
struct Place<'s> {
    address: &'s Address,
    options: &'s ConnectOptions,
    device: &'s Device,
    pd: &'s ProtectionDomain,
    session: SessionId,
    epoch: Epoch,
}

impl Place<'_> {
    async fn connect_queue(
        &self,
        queue: u16,
        wish: QueueWish,
        volume: VolumeHandle,
        buffers: &Arc<Region>,
    ) -> Result<Path, SessionError> {
        let route = Route::resolve(self.address, self.options).await?;
        if !route.device().same_as(self.device) {
            return Err(SessionError::Lost("the route changed to another device".to_owned()));
        }
        let caps = self.device.caps();
        let mut features = wish.features;
        if !caps.write_with_imm {
            features = features.without(Features::WRITE_WITH_IMM);
        }
        if caps.max_sges < DATA_LIST_SGES {
            features = features.without(Features::DATA_LISTS);
        }
        let asked = HelloRequest {
            kind: ConnectionKind::Io { queue },
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: wish.depth,
            features,
            in_capsule_bytes: wish.in_capsule_bytes,
            io_max_bytes: wish.io_max_bytes,
            epoch: self.epoch,
            session: self.session,
        };
        let layout = PathLayout { depth: wish.depth };
        let reads_in = caps.max_reads_in.min(READS_IN_MAX);
        let sizes = layout.qp_limits(caps.inline_bytes, reads_in, features);
        let lanes = wish.lanes(caps);
        let (poller, handle) =
            self.pd.poller(u32::from(lanes) * (sizes.send_wrs + sizes.recv_wrs))?;
        let (first, accept) = self.connect_lane(route, &handle, sizes, &asked).await?;
        let mut made = Made { connections: vec![first], poller: Some(poller) };
        // The others are for speed: it goes without those that cannot be had. They carry no data of
        // their own.
        let without = |features: Features| features.without(Features::DATA_LISTS);
        let granted =
            HelloAccept { in_capsule_bytes: 0, features: without(accept.features), ..accept };
        for lane in 1..lanes {
            let queue = wish.number(queue, lane);
            let asked = HelloRequest {
                kind: ConnectionKind::Io { queue },
                in_capsule_bytes: 0,
                features: without(features),
                ..asked
            };
            let lane = async {
                let route = Route::resolve(self.address, self.options).await?;
                if !route.device().same_as(self.device) {
                    return Err(SessionError::Lost("the route changed to another device".into()));
                }
                self.connect_lane(route, &handle, sizes, &asked).await
            };
            let lane = tokio::time::timeout(self.options.timeout, lane).await;
            match lane {
                Ok(Ok((connection, accept))) if accept == granted => {
                    made.connections.push(connection);
                    continue;
                }
                Ok(Ok((connection, _))) => {
                    connection.retire(());
                    tracing::warn!(queue, "a lane has other limits: going without it");
                }
                Ok(Err(error)) => {
                    tracing::warn!(queue, %error, "cannot have another lane: going without it");
                }
                Err(_) => {
                    tracing::warn!(queue, "a lane took too long to connect: going without it");
                }
            }
            break;
        }
        let layout = PathLayout { depth: accept.depth };
        let memory = PathMemory::register(self.pd, buffers, layout, made.connections.len())?;
        let Some((poller, connections)) = made.take() else {
            return Err(SessionError::Lost("the queue has no CQ".to_owned()));
        };
        Ok(Path {
            poller,
            connections,
            memory,
            accept,
            epoch: self.epoch,
            volume,
            lane_bytes: limits::LANE_BYTES,
        })
    }

    /// Connects one QP.
    async fn connect_lane(
        &self,
        route: Route,
        poller: &PollerHandle,
        sizes: QpLimits,
        asked: &HelloRequest,
    ) -> Result<(Connection, HelloAccept), SessionError> {
        let hello = ConnectionHello(asked.to_wire().to_vec());
        let established = route
            .connect(self.pd, poller, sizes, &hello)
            .await
            .map_err(|error| explain(self.address, error))?;
        let accept = parse_accept(self.address, &established.hello.0, asked)?;
        Ok((established.connection, accept))
    }
}

/// What the target says to a refusal, fit for a terminal.
fn words(reply: &Reply) -> String {
    let len = usize::try_from(reply.value).unwrap_or(0).min(reply.payload.len()).min(256);
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn lanes_have_numbers_of_their_own_and_all_queues_as_many() {
        let card = rblk_fabric::soft::Device::tcp().caps().clone();
        let played = DeviceCaps { kernel_software: true, ..card.clone() };
        let wish = |queues, lanes| QueueWish {
            depth: QueueDepth::new(1).unwrap(),
            io_max_bytes: limits::IO_MIN_BYTES,
            in_capsule_bytes: 0,
            features: Features::default(),
            lanes,
            queues,
        };
        for (queues, lanes, on_card, on_played) in [
            (4, None, 1, 2),
            (31, None, 1, 2),
            (32, None, 1, 1),
            (63, None, 1, 1),
            (4, Some(1), 1, 1),
            (15, Some(4), 4, 4),
            // No configuration says so.
            (16, Some(4), 3, 3),
            (1, Some(9), limits::LANES_MAX, limits::LANES_MAX),
        ] {
            let wish = wish(queues, lanes);
            let found = (wish.lanes(&card), wish.lanes(&played));
            assert_eq!(found, (on_card, on_played), "{queues} queues, {lanes:?}");
            let numbers: HashSet<u16> = (0..queues)
                .flat_map(|queue| (0..wish.lanes(&played)).map(move |lane| (queue, lane)))
                .map(|(queue, lane)| wish.number(queue, lane))
                .collect();
            assert_eq!(numbers.len(), usize::from(queues * on_played), "each once");
            assert!(numbers.iter().all(|number| *number < REPLAY_QUEUE), "{numbers:?}");
        }
    }
}
