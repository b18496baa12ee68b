//! [`Rig`]: one target and any number of initiator queues in one thread over the in-memory fabric.
//!
//! The parts are the real ones: [`PollGroup`] and [`Engine`], with QPs, regions and keys as control makes
//! them. What is missing is control itself: the caller begins sessions, opens volumes and raises epochs, and
//! the rig holds it to the rule that the connections of older epochs are gone before a new one is added.
//!
//! There are no sockets, no sleeps and no clock but the rig's own: [`Rig::step`] lets one tick pass and gives
//! each end one turn. One seed decides everything that happens, so a run can be had again from its seed;
//! [`Rig::fingerprint`] tells whether it was.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rblk_fabric::soft::PollerHandle as SoftHandle;
use rblk_fabric::soft::memory::{Conditions, Network, Wire};
use rblk_fabric::{
    AcceptParams, Access, Completion, Connection, ConnectionHello, Device, DeviceCaps, FabricError,
    MemoryRegion, PageKind, Poller, PollerCounters, PollerHandle, PostError, ProtectionDomain,
    QpIndex, QpLimits, RecvWr, Region, SendWr,
};
use rblk_initiator::engine::{Engine, PathEnd, QueueCounts, QueueStats};
use rblk_initiator::inflight::WrongState;
use rblk_initiator::io::{Io, IoOp};
use rblk_initiator::path::{Path, PathLayout, PathMemory};
use rblk_protocol::{
    AccessMode, BlockCount, BlockSize, CommandCapsule, ConnectionKind, Epoch, Features,
    HelloRequest, InstanceId, Name, Offer, QueueDepth, SessionId, Status, Tag, Version,
    VolumeHandle, limits, negotiate,
};
use rblk_target::arena::Arena;
use rblk_target::cache::{Shard, ShardOptions};
use rblk_target::connection::{ConnectionId, ConnectionParams, Layout, SessionSlot};
use rblk_target::poll_group::peers::Peers;
use rblk_target::poll_group::{FromGroup, PollGroup, PollerMemory, ToGroup};
use rblk_target::stats::{Stats, StatsSnapshot};
use rblk_target::store::{Store, VolumeIndex};
use rblk_target::volume::{CacheMode, Placement, Volume};
use rblk_target::volume_stats::{LastError, VolumeCounts, VolumeStats};

use crate::seed::Random;

/// Entries of the target's CQ: some tens of queues of default depth.
const TARGET_CQ_ENTRIES: u32 = 1 << 16;
/// Runs of memory that one WRITE of the target gathers.
const SEND_SGES: u32 = 4;
/// How often a poll group looks for silent peers, as its thread does.
const LISTEN: Duration = Duration::from_secs(1);
/// Steps that ending the connections of an older epoch may take.
const QUIESCE_STEPS: u64 = 1_000_000;

/// Where a volume's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VolumeKind {
    /// In registered memory.
    Memory,
    /// Nowhere.
    Null,
    /// In the store.
    Store,
}

/// A volume to serve; its index is its place in [`RigOptions::volumes`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeSpec {
    /// Where its bytes are.
    pub kind: VolumeKind,
    /// Bytes of a block.
    pub block_size: u32,
    /// Capacity.
    pub blocks: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// DISCARD does something.
    pub discard: bool,
    /// What the target's cache does for it; matters for [`VolumeKind::Store`] only.
    pub cache: CacheMode,
    /// Most bytes to read ahead of a sequential reader.
    pub read_ahead_bytes: u32,
}

impl VolumeSpec {
    /// A volume that can be written, of blocks of 512 bytes, without a cache.
    #[must_use]
    pub fn new(kind: VolumeKind, bytes: u64) -> Self {
        Self {
            kind,
            block_size: 512,
            blocks: bytes / 512,
            read_only: false,
            discard: true,
            cache: CacheMode::None,
            read_ahead_bytes: 0,
        }
    }
}

/// What a [`Rig`] is made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RigOptions {
    /// Decides how the network behaves.
    pub seed: u64,
    /// How its streams behave.
    pub conditions: Conditions,
    /// What one step takes.
    pub tick: Duration,
    /// Poll groups of the target; connections are dealt to them in turn.
    pub groups: usize,
    /// How many of a thousand turns a poll group sleeps through, so that they are not in step.
    pub skipped_turns_per_mille: u32,
    /// Memory of the target for data in flight and the cache, of all poll groups together.
    pub arena_bytes: usize,
    /// Most acknowledged bytes in memory only, of all poll groups together.
    pub dirty_max_bytes: usize,
    /// A dirty block is on its way to the store at the latest after this.
    pub write_back_delay: Duration,
    /// Longest extent of the arena, and most data of one command.
    pub io_max_bytes: u32,
    /// What the target serves.
    pub volumes: Vec<VolumeSpec>,
}

impl Default for RigOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            conditions: Conditions::default(),
            tick: Duration::from_micros(10),
            groups: 1,
            skipped_turns_per_mille: 0,
            arena_bytes: 16 << 20,
            dirty_max_bytes: 4 << 20,
            write_back_delay: Duration::from_millis(10),
            io_max_bytes: 1 << 20,
            volumes: Vec::new(),
        }
    }
}

/// What an I/O queue asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueOptions {
    /// Commands outstanding.
    pub depth: u16,
    /// Most data per command, and bytes of each buffer.
    pub io_max_bytes: u32,
    /// Most write data inside a command.
    pub in_capsule_bytes: u32,
    /// Optional verbs.
    pub features: Features,
    /// READs the target may have outstanding.
    pub reads_out: u8,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self {
            depth: 32,
            io_max_bytes: 1 << 20,
            in_capsule_bytes: limits::IN_CAPSULE_DEFAULT_BYTES,
            features: Features::WRITE_WITH_IMM,
            reads_out: 16,
        }
    }
}

/// Names an I/O queue of a rig.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct QueueId(usize);

/// The end of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Its queue.
    pub queue: QueueId,
    /// Its tag.
    pub tag: Tag,
    /// Bytes moved, or a negative errno.
    pub result: i32,
}

/// A connection that the target reported gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gone {
    /// Its session.
    pub session: SessionSlot,
    /// What it was.
    pub kind: ConnectionKind,
    /// Its epoch.
    pub epoch: Epoch,
}

/// An admin command that waits for [`Rig::reply`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AdminCommand {
    /// The connection it came by.
    pub connection: ConnectionId,
    /// Its session.
    pub session: SessionSlot,
    /// The command.
    pub command: CommandCapsule,
    /// Its in-capsule data.
    pub body: Vec<u8>,
    group: usize,
}

/// The initiator's end of a connection without an [`Engine`], to be driven by hand.
#[derive(Debug)]
pub struct RawEnd {
    /// Domain for memory of its own.
    pub pd: ProtectionDomain,
    /// Its CQ.
    pub poller: Box<dyn Poller>,
    /// Its QP.
    pub qp: QpIndex,
    /// The link, to break it.
    pub wire: Wire,
}

/// A condition that did not come about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("nothing came of it in {steps} steps")]
pub struct Stuck {
    /// How long was waited.
    pub steps: u64,
}

#[derive(Debug)]
struct SessionState {
    epoch: Epoch,
    // Epochs of the connections that the target has.
    connections: Vec<Epoch>,
}

#[derive(Debug)]
struct Queue {
    engine: Engine,
    stats: Arc<QueueStats>,
    buffers: Arc<Region>,
    options: QueueOptions,
    session: SessionSlot,
    number: u16,
    volume: VolumeHandle,
    wire: Option<Wire>,
    ended: Vec<PathEnd>,
}

#[derive(Debug)]
struct Group<S> {
    engine: PollGroup<S>,
    stats: Arc<Stats>,
    // By volume index.
    volumes: Vec<Arc<VolumeStats>>,
    poller: PollerHandle,
}

/// A target and its initiators in one thread.
pub struct Rig<S> {
    network: Network,
    began: Instant,
    now: Instant,
    tick: Duration,
    groups: Vec<Group<S>>,
    next_group: usize,
    skips: Random,
    skipped_turns_per_mille: u32,
    target_pd: ProtectionDomain,
    initiator_pd: ProtectionDomain,
    volumes: Vec<Arc<Volume>>,
    io_max_bytes: u32,
    sessions: Vec<SessionState>,
    queues: Vec<Queue>,
    outcomes: Vec<Outcome>,
    gone: Vec<Gone>,
    admin: Vec<AdminCommand>,
    fingerprint: u64,
    steps: u64,
    listened: Instant,
    jams: Arc<AtomicBool>,
    // QPs that did not flush, to be destroyed before their memory, with the poll groups to tell.
    jammed: Vec<(usize, ConnectionId, Option<Connection>, MemoryRegion)>,
}

impl<S: Store> std::fmt::Debug for Rig<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queues = self.queues.iter().map(|q| (q.engine.is_connected(), q.engine.outstanding()));
        f.debug_struct("Rig")
            .field("steps", &self.steps)
            .field("shards", &self.groups.iter().map(|g| g.engine.shard()).collect::<Vec<_>>())
            .field("sessions", &self.sessions)
            .field("queues (connected, outstanding)", &queues.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

/// QPs of the in-memory network are connected when they are made, so there is nothing left to accept.
#[derive(Debug)]
struct PairedPoller {
    inner: Box<dyn Poller>,
    // QPs that fail while this is set do not flush.
    jams: Arc<AtomicBool>,
    jammed: Vec<QpIndex>,
}

impl Poller for PairedPoller {
    fn caps(&self) -> &DeviceCaps {
        self.inner.caps()
    }

    fn attach(&mut self, connection: Connection) -> rblk_fabric::Result<QpIndex> {
        self.inner.attach(connection)
    }

    fn accept(&mut self, _qp: QpIndex, _params: &AcceptParams) -> rblk_fabric::Result<()> {
        Ok(())
    }

    fn post_recv(&mut self, qp: QpIndex, wrs: &[RecvWr]) -> std::result::Result<(), PostError> {
        self.inner.post_recv(qp, wrs)
    }

    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> std::result::Result<(), PostError> {
        self.inner.post_send(qp, wrs)
    }

    fn poll(&mut self, out: &mut [Completion]) -> rblk_fabric::Result<usize> {
        let count = self.inner.poll(out)?;
        if self.jammed.is_empty() {
            return Ok(count);
        }
        let mut kept = 0;
        for at in 0..count {
            if !self.jammed.contains(&out[at].qp) {
                out[kept] = out[at];
                kept += 1;
            }
        }
        Ok(kept)
    }

    fn arm(&mut self) -> rblk_fabric::Result<()> {
        self.inner.arm()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.inner.event_fd()
    }

    fn clear_event(&mut self) {
        self.inner.clear_event();
    }

    fn fail(&mut self, qp: QpIndex) {
        if self.jams.load(Ordering::Relaxed) {
            self.jammed.push(qp);
        }
        self.inner.fail(qp);
    }

    fn detach(&mut self, qp: QpIndex) -> Option<Connection> {
        self.jammed.retain(|jammed| *jammed != qp);
        self.inner.detach(qp)
    }

    fn counters(&self) -> PollerCounters {
        self.inner.counters()
    }
}

/// The software provider's handle behind a poller's.
///
/// # Errors
/// It is a poller of another provider.
pub fn soft_handle(handle: &PollerHandle) -> Result<&SoftHandle> {
    #[allow(irrefutable_let_patterns, reason = "verbs may be built in or not")]
    if let PollerHandle::Soft(handle) = handle {
        return Ok(handle);
    }
    Err(FabricError::Mixed("a poller of another provider on the in-memory network").into())
}

impl<S: Store> Rig<S> {
    /// A target with its volumes and without connections. `store` gets the region of the arena, once per poll
    /// group; with several groups the stores must have the same bytes.
    ///
    /// # Errors
    /// Memory is short, or the sizes do not fit.
    pub fn new(options: &RigOptions, mut store: impl FnMut(&Arc<Region>) -> S) -> Result<Self> {
        let network = Network::new(options.seed);
        network.set_conditions(options.conditions);
        let device = Device::Soft(network.device());
        let target_pd = device.alloc_pd()?;
        let arena = Region::allocate(options.arena_bytes, PageKind::Normal)?;
        let zeros = Region::allocate(options.io_max_bytes as usize, PageKind::Normal)?;
        let volumes = options
            .volumes
            .iter()
            .enumerate()
            .map(|(index, spec)| volume(index, spec))
            .collect::<Result<Vec<_>>>()?;
        let arena_mr = Arc::new(target_pd.register(&arena, Access::LOCAL_WRITE)?);
        let zeros_mr = Arc::new(target_pd.register(&zeros, Access::LOCAL_READ)?);
        let mut memories = Vec::new();
        for volume in &volumes {
            if let Placement::Memory(region) = &volume.placement {
                let mr = Arc::new(target_pd.register(region, Access::LOCAL_WRITE)?);
                memories.push((volume.index, mr));
            }
        }
        let now = Instant::now();
        let count = options.groups.max(1);
        let step = options.io_max_bytes as usize;
        let share = options.arena_bytes / count / step * step;
        let shard_options = ShardOptions {
            dirty_max_bytes: options.dirty_max_bytes / count,
            write_back_delay: options.write_back_delay,
            write_back_max_bytes: options.io_max_bytes,
            seed: options.seed,
        };
        let jams = Arc::new(AtomicBool::new(false));
        let mut groups = Vec::new();
        for (index, peers) in Peers::connect(count)?.into_iter().enumerate() {
            let (poller, handle) = target_pd.poller(TARGET_CQ_ENTRIES)?;
            let stats = Arc::new(Stats::default());
            let range = index * share..(index + 1) * share;
            let part = Arena::over(Arc::clone(&arena), range, options.io_max_bytes)?;
            let shard = Shard::new(store(&arena), part, shard_options, now);
            let mut engine = PollGroup::new(index, shard, peers, Arc::clone(&stats), now);
            let memory = PollerMemory {
                arena: Arc::clone(&arena_mr),
                zeros: Arc::clone(&zeros_mr),
                sink: None,
                sink_extent_max: options.io_max_bytes,
                volumes: memories.clone(),
            };
            let jams = Arc::clone(&jams);
            let poller = Box::new(PairedPoller { inner: poller, jams, jammed: Vec::new() });
            engine.take_mail(ToGroup::AddPoller { poller, memory }, now);
            let mut told = Vec::new();
            for volume in &volumes {
                let (volume, stats) = (Arc::clone(volume), Arc::new(VolumeStats::default()));
                told.push(Arc::clone(&stats));
                engine.take_mail(ToGroup::AddVolume { volume, backing: None, stats }, now);
            }
            groups.push(Group { engine, stats, volumes: told, poller: handle });
        }
        Ok(Self {
            network,
            began: now,
            now,
            tick: options.tick,
            groups,
            next_group: 0,
            skips: Random::new(options.seed ^ 0x736b_6970),
            skipped_turns_per_mille: options.skipped_turns_per_mille,
            target_pd,
            initiator_pd: device.alloc_pd()?,
            volumes,
            io_max_bytes: options.io_max_bytes,
            sessions: Vec::new(),
            queues: Vec::new(),
            outcomes: Vec::new(),
            gone: Vec::new(),
            admin: Vec::new(),
            fingerprint: options.seed,
            steps: 0,
            listened: now,
            jams,
            jammed: Vec::new(),
        })
    }

    /// The network, to change its conditions.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The store of the first poll group.
    pub fn store_mut(&mut self) -> &mut S {
        self.groups[0].engine.store_mut()
    }

    /// The first poll group.
    pub fn group_mut(&mut self) -> &mut PollGroup<S> {
        &mut self.groups[0].engine
    }

    /// All poll groups.
    pub fn groups_mut(&mut self) -> impl Iterator<Item = &mut PollGroup<S>> {
        self.groups.iter_mut().map(|group| &mut group.engine)
    }

    /// Whether the target ended after [`ToGroup::Stop`]: every acknowledged write is durable, or (false) not.
    #[must_use]
    pub fn stopped(&self) -> Option<bool> {
        self.groups
            .iter()
            .map(|group| group.engine.stopped())
            .try_fold(true, |all, one| one.map(|clean| all && clean))
    }

    /// Time of the rig's clock since it was made.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.now - self.began
    }

    /// Steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// A number over everything that happened and when: equal for equal runs.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn note(&mut self, what: &[u64]) {
        let mut hash = self.fingerprint;
        for number in [self.steps].iter().chain(what) {
            for byte in number.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        self.fingerprint = hash;
    }

    /// The bytes of a memory volume.
    #[must_use]
    pub fn memory(&self, volume: VolumeIndex) -> Option<&Arc<Region>> {
        match &self.volumes.get(usize::from(volume.0))?.placement {
            Placement::Memory(region) => Some(region),
            Placement::Null | Placement::Store => None,
        }
    }

    /// Begins a session in its first epoch.
    pub fn begin_session(&mut self) -> SessionSlot {
        self.sessions.push(SessionState { epoch: Epoch(1), connections: Vec::new() });
        SessionSlot(u16::try_from(self.sessions.len() - 1).unwrap_or(u16::MAX))
    }

    /// A session opens a volume.
    pub fn open(&mut self, session: SessionSlot, volume: VolumeIndex, mode: AccessMode) {
        self.mail(ToGroup::Open { session, volume, mode });
    }

    /// A session closes a volume, or loses it; later commands are answered with `refusal`.
    pub fn close(&mut self, session: SessionSlot, volume: VolumeIndex, refusal: Status) {
        self.mail(ToGroup::Close { session, volume, refusal });
    }

    /// Hands the target a message of control: to every poll group what concerns a session or all, else to the
    /// first.
    pub fn mail(&mut self, message: ToGroup) {
        for at in 1..self.groups.len() {
            let copy = match &message {
                ToGroup::Open { session, volume, mode } => {
                    ToGroup::Open { session: *session, volume: *volume, mode: *mode }
                }
                ToGroup::Close { session, volume, refusal } => {
                    ToGroup::Close { session: *session, volume: *volume, refusal: *refusal }
                }
                ToGroup::EndConnections { session, before } => {
                    ToGroup::EndConnections { session: *session, before: *before }
                }
                ToGroup::ForgetSession { session } => ToGroup::ForgetSession { session: *session },
                ToGroup::Stop => ToGroup::Stop,
                _ => break,
            };
            self.mail_to(at, copy);
        }
        self.mail_to(0, message);
    }

    fn mail_to(&mut self, group: usize, message: ToGroup) {
        self.groups[group].engine.take_mail(message, self.now);
    }

    /// While this is set, QPs of the target that fail do not flush, and control does not come to destroying them.
    pub fn jam_failed_qps(&mut self, jams: bool) {
        self.jams.store(jams, Ordering::Relaxed);
    }

    /// QPs that did not flush, were given up and are not destroyed.
    #[must_use]
    pub fn jammed_qps(&self) -> usize {
        self.jammed.len()
    }

    /// Destroys the QPs that did not flush, and tells their poll groups.
    pub fn destroy_jammed(&mut self) {
        for (group, id, connection, memory) in std::mem::take(&mut self.jammed) {
            drop(connection);
            drop(memory);
            self.mail_to(group, ToGroup::Destroyed { connection: id });
        }
    }

    /// The session's epoch.
    ///
    /// # Panics
    /// There is no such session.
    #[must_use]
    pub fn epoch(&self, session: SessionSlot) -> Epoch {
        self.sessions[usize::from(session.0)].epoch
    }

    /// Connections of a session that the target still has.
    ///
    /// # Panics
    /// There is no such session.
    #[must_use]
    pub fn connections(&self, session: SessionSlot) -> usize {
        self.sessions[usize::from(session.0)].connections.len()
    }

    /// Raises a session's epoch and waits until every connection of the older ones is reported gone.
    ///
    /// # Errors
    /// They do not go.
    pub fn new_epoch(&mut self, session: SessionSlot) -> Result<Epoch> {
        let state = &mut self.sessions[usize::from(session.0)];
        let epoch = state.epoch.next().context("no epoch is left")?;
        state.epoch = epoch;
        self.mail(ToGroup::EndConnections { session, before: epoch });
        self.run(QUIESCE_STEPS, |rig| rig.connections(session) == 0)
            .context("the connections of an older epoch do not end")?;
        Ok(epoch)
    }

    /// An I/O queue of a session for one of its volumes, connected.
    ///
    /// # Errors
    /// Memory is short, or the sizes do not fit.
    pub fn add_queue(
        &mut self,
        session: SessionSlot,
        volume: VolumeIndex,
        options: QueueOptions,
    ) -> Result<QueueId> {
        let depth = QueueDepth::new(options.depth).context("queue depth")?;
        let stride = options.io_max_bytes as usize;
        let buffers = Region::allocate(stride * usize::from(options.depth), PageKind::Normal)?;
        let stats = Arc::new(QueueStats::default());
        let number = self.queues.iter().filter(|q| q.session == session).count();
        let queue = Queue {
            engine: Engine::new(depth, stride, Arc::clone(&stats)),
            stats,
            buffers,
            options,
            session,
            number: u16::try_from(number)?,
            volume: VolumeHandle(u32::from(volume.0) + 1),
            wire: None,
            ended: Vec::new(),
        };
        self.queues.push(queue);
        let id = QueueId(self.queues.len() - 1);
        self.reconnect(id)?;
        Ok(id)
    }

    /// Gives a queue a new path in its session's epoch. A path it still has ends.
    ///
    /// # Errors
    /// Connections of an older epoch are not gone, or memory is short.
    pub fn reconnect(&mut self, id: QueueId) -> Result<()> {
        let queue = &self.queues[id.0];
        let (session, options) = (queue.session, queue.options);
        let kind = ConnectionKind::Io { queue: queue.number };
        let (volume, buffers) = (queue.volume, Arc::clone(&queue.buffers));
        let layout = PathLayout { depth: QueueDepth::new(options.depth).context("queue depth")? };
        let memory = PathMemory::register(&self.initiator_pd, &buffers, layout)?;
        let caps = self.initiator_pd_caps();
        let sizes = layout.qp_limits(caps.inline_bytes, options.reads_out);
        let (poller, handle) = self.initiator_pd.poller(sizes.send_wrs + sizes.recv_wrs)?;
        let (connection, wire, accept) = self.connect(session, kind, options, &handle, sizes)?;
        let epoch = self.epoch(session);
        let path = Path { poller, connection, memory, accept, epoch, volume };
        let now = self.now;
        let queue = &mut self.queues[id.0];
        queue.wire = Some(wire);
        queue.engine.connect(path, now);
        Ok(())
    }

    fn initiator_pd_caps(&self) -> DeviceCaps {
        Device::Soft(self.network.device()).caps().clone()
    }

    /// A connection of the session's present epoch whose initiator's end is driven by hand.
    ///
    /// # Errors
    /// As [`Self::reconnect`].
    pub fn raw_connection(
        &mut self,
        session: SessionSlot,
        kind: ConnectionKind,
        options: QueueOptions,
        sizes: QpLimits,
    ) -> Result<RawEnd> {
        let pd = Device::Soft(self.network.device()).alloc_pd()?;
        let (mut poller, handle) = pd.poller(sizes.send_wrs + sizes.recv_wrs)?;
        let (connection, wire, _) = self.connect(session, kind, options, &handle, sizes)?;
        let qp = poller.attach(connection)?;
        Ok(RawEnd { pd, poller, qp, wire })
    }

    /// Connects a QP made of these sizes to the target, as control's admission does.
    fn connect(
        &mut self,
        session: SessionSlot,
        kind: ConnectionKind,
        options: QueueOptions,
        initiator: &PollerHandle,
        sizes: QpLimits,
    ) -> Result<(Connection, Wire, rblk_protocol::HelloAccept)> {
        let state = &self.sessions[usize::from(session.0)];
        let epoch = state.epoch;
        ensure!(
            state.connections.iter().all(|of| *of == epoch),
            "connections of an older epoch are not gone"
        );
        let asked = HelloRequest {
            kind,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(options.depth).context("queue depth")?,
            features: options.features,
            in_capsule_bytes: options.in_capsule_bytes,
            io_max_bytes: options.io_max_bytes,
            epoch,
            session: SessionId([1; 16]),
        };
        let offer = Offer {
            depth: QueueDepth::new(limits::QUEUE_DEPTH_MAX).context("queue depth")?,
            features: Features::WRITE_WITH_IMM,
            in_capsule_bytes: limits::IN_CAPSULE_MAX_BYTES,
            io_max_bytes: self.io_max_bytes,
            instance: InstanceId([2; 16]),
        };
        let Ok(accept) = negotiate(&asked, &offer) else { bail!("nothing in common") };
        let admin = kind == ConnectionKind::Admin;
        let layout = Layout::new(accept.depth, accept.in_capsule_bytes, admin);
        let reads_out = options.reads_out;
        let target_sizes = QpLimits {
            send_wrs: layout.send_wrs() + 1,
            recv_wrs: layout.recv_wrs(),
            send_sges: SEND_SGES,
            inline_bytes: u32::try_from(limits::RESPONSE_BYTES)?,
            reads_out,
            reads_in: 0,
        };
        let region = Region::allocate(layout.bytes(), PageKind::Normal)?;
        let memory = self.target_pd.register(&region, Access::LOCAL_WRITE)?;
        let group = self.next_group % self.groups.len();
        if !admin {
            self.next_group += 1;
        }
        let (near, far, wire) = self.network.pair(
            (soft_handle(initiator)?, sizes),
            (soft_handle(&self.groups[group].poller)?, target_sizes),
        )?;
        let params = ConnectionParams {
            kind,
            session,
            epoch,
            layout,
            in_capsule_bytes: accept.in_capsule_bytes,
            io_max_bytes: accept.io_max_bytes,
            write_with_imm: accept.features.has(Features::WRITE_WITH_IMM),
            reads_out,
            send_sges: SEND_SGES,
            memory,
            peer: format!("session {} {kind:?}", session.0),
        };
        self.sessions[usize::from(session.0)].connections.push(epoch);
        let add = ToGroup::AddConnection {
            poller: 0,
            connection: Connection::Soft(far),
            params: Box::new(params),
            accept: AcceptParams {
                hello: ConnectionHello(accept.to_wire().to_vec()),
                reads_out,
                reads_in: 0,
            },
        };
        self.mail_to(group, add);
        Ok((Connection::Soft(near), wire, accept))
    }

    /// The link of a queue's newest path, to break it.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn wire(&self, queue: QueueId) -> Option<&Wire> {
        self.queues[queue.0].wire.as_ref()
    }

    /// Ends a queue's path from the initiator's side.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn disconnect(&mut self, queue: QueueId) {
        self.queues[queue.0].engine.disconnect();
    }

    /// A queue's engine.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn engine_mut(&mut self, queue: QueueId) -> &mut Engine {
        &mut self.queues[queue.0].engine
    }

    /// Whether a queue's path has passed its self-test.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn is_connected(&self, queue: QueueId) -> bool {
        self.queues[queue.0].engine.is_connected()
    }

    /// Requests of a queue that are not answered.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn outstanding(&self, queue: QueueId) -> usize {
        self.queues[queue.0].engine.outstanding()
    }

    /// Why the paths of a queue ended, oldest first, since the last call.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn take_path_ends(&mut self, queue: QueueId) -> Vec<PathEnd> {
        std::mem::take(&mut self.queues[queue.0].ended)
    }

    /// Puts bytes into a tag's buffer.
    ///
    /// # Panics
    /// They do not fit, or there is no such queue.
    pub fn fill_buffer(&self, queue: QueueId, tag: Tag, bytes: &[u8]) {
        let queue = &self.queues[queue.0];
        let stride = queue.options.io_max_bytes as usize;
        assert!(bytes.len() <= stride, "longer than the buffer");
        queue.buffers.write(tag.index() * stride, bytes);
    }

    /// Takes bytes out of a tag's buffer.
    ///
    /// # Panics
    /// It is not so long, or there is no such queue.
    #[must_use]
    pub fn buffer(&self, queue: QueueId, tag: Tag, len: usize) -> Vec<u8> {
        let queue = &self.queues[queue.0];
        let stride = queue.options.io_max_bytes as usize;
        assert!(len <= stride, "longer than the buffer");
        let mut bytes = vec![0; len];
        queue.buffers.read(tag.index() * stride, &mut bytes);
        bytes
    }

    /// Gives a queue a request; its data, if any, is in the tag's buffer.
    ///
    /// # Errors
    /// The tag is in use or out of bounds.
    ///
    /// # Panics
    /// There is no such queue.
    pub fn submit(&mut self, queue: QueueId, tag: Tag, io: Io) -> Result<(), WrongState> {
        self.note(&[1, queue.0 as u64, u64::from(tag.0), io.lba.0, io.count.0]);
        self.queues[queue.0].engine.submit(tag, io)
    }

    /// A request over a range in bytes of the queue's volume.
    ///
    /// # Panics
    /// There is no such queue or volume, or the range is not whole blocks.
    #[must_use]
    pub fn request(&self, queue: QueueId, op: IoOp, offset: u64, len: u64) -> Io {
        let handle = self.queues[queue.0].volume;
        let volume = Volume::index_of(handle).and_then(|i| self.volumes.get(usize::from(i.0)));
        let size = volume.expect("a volume of the rig").block_size;
        Io::new(op, offset, len, size).expect("whole blocks")
    }

    /// One tick, and one turn of each end. Returns whether anything happened.
    pub fn step(&mut self) -> bool {
        self.steps += 1;
        self.now += self.tick;
        self.network.advance(1);
        let mut busy = false;
        let mut messages: Vec<FromGroup> = Vec::new();
        let listens = self.now - self.listened > LISTEN;
        if listens {
            self.listened = self.now;
        }
        for group in &mut self.groups {
            if listens {
                group.engine.check_silence(self.now);
            }
            if self.skips.chance(self.skipped_turns_per_mille) {
                busy = true;
                continue;
            }
            busy |= group.engine.turn(self.now) || group.engine.has_outbox();
            messages.extend(group.engine.take_outbox());
        }
        for message in messages {
            self.on_message(message);
        }
        for at in 0..self.queues.len() {
            let (outcomes, queue) = (&mut self.outcomes, &mut self.queues[at]);
            let from = outcomes.len();
            busy |= queue.engine.turn(self.now, |tag, result| {
                outcomes.push(Outcome { queue: QueueId(at), tag, result });
            });
            if let Some((end, dead)) = queue.engine.take_ended() {
                busy = true;
                queue.ended.push(end);
                drop(dead);
                self.note(&[2, at as u64]);
            }
            for at in from..self.outcomes.len() {
                let Outcome { queue, tag, result } = self.outcomes[at];
                let result = u64::from(result.cast_unsigned());
                self.note(&[3, queue.0 as u64, u64::from(tag.0), result]);
            }
        }
        busy
    }

    fn on_message(&mut self, message: FromGroup) {
        match message {
            FromGroup::Admin { group, connection, session, command, body } => {
                self.admin.push(AdminCommand { connection, session, command, body, group });
            }
            FromGroup::ConnectionGone {
                session,
                kind,
                epoch,
                connection,
                memory,
                undrained,
                ..
            } => {
                if let Some((group, id)) = undrained {
                    self.jammed.push((group, id, connection, memory));
                    if !self.jams.load(Ordering::Relaxed) {
                        self.destroy_jammed();
                    }
                } else {
                    drop(connection);
                    drop(memory);
                }
                self.note(&[4, u64::from(session.0), u64::from(epoch.0)]);
                self.gone.push(Gone { session, kind, epoch });
                let Some(state) = self.sessions.get_mut(usize::from(session.0)) else { return };
                if let Some(at) = state.connections.iter().position(|of| *of == epoch) {
                    state.connections.swap_remove(at);
                }
            }
            FromGroup::Stopped { .. } | FromGroup::LostWrites { .. } => {}
        }
    }

    /// Steps until something is so. Returns how many steps it took.
    ///
    /// # Errors
    /// It is not so after `most` steps.
    pub fn run(
        &mut self,
        most: u64,
        mut until: impl FnMut(&mut Self) -> bool,
    ) -> Result<u64, Stuck> {
        for steps in 0..=most {
            if until(self) {
                return Ok(steps);
            }
            if steps < most {
                self.step();
            }
        }
        Err(Stuck { steps: most })
    }

    /// Steps until every queue has its path and no request is outstanding.
    ///
    /// # Errors
    /// It does not come to that in `most` steps.
    pub fn settle(&mut self, most: u64) -> Result<u64, Stuck> {
        self.run(most, |rig| {
            rig.queues.iter().all(|q| q.engine.is_connected() && q.engine.outstanding() == 0)
        })
    }

    /// What ended since the last call, in order.
    pub fn take_outcomes(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// Connections the target reported gone since the last call.
    pub fn take_gone(&mut self) -> Vec<Gone> {
        std::mem::take(&mut self.gone)
    }

    /// Admin commands that came in since the last call.
    pub fn take_admin(&mut self) -> Vec<AdminCommand> {
        std::mem::take(&mut self.admin)
    }

    /// Answers an admin command.
    pub fn reply(&mut self, of: &AdminCommand, status: Status, value: u32, payload: Vec<u8>) {
        let (connection, tag) = (of.connection, of.command.tag);
        self.mail_to(of.group, ToGroup::Reply { connection, tag, status, value, payload });
    }

    /// The target's counters.
    #[must_use]
    pub fn target_counts(&self) -> StatsSnapshot {
        let mut sum = StatsSnapshot::default();
        for group in &self.groups {
            group.engine.publish_stats();
            sum.add(&group.stats.snapshot());
        }
        sum
    }

    /// What the target knows of a volume, all poll groups together.
    ///
    /// # Panics
    /// There is no such volume.
    #[must_use]
    pub fn volume_counts(&self, volume: VolumeIndex) -> (VolumeCounts, LastError) {
        self.groups.iter().for_each(|group| group.engine.publish_stats());
        self.published(volume)
    }

    /// What the target has told of a volume so far, all poll groups together.
    ///
    /// # Panics
    /// There is no such volume.
    #[must_use]
    pub fn published(&self, volume: VolumeIndex) -> (VolumeCounts, LastError) {
        let (mut sum, mut last) = (VolumeCounts::default(), LastError::default());
        for group in &self.groups {
            let stats = &group.volumes[usize::from(volume.0)];
            sum.add(&stats.snapshot());
            last = last.max(stats.last_error());
        }
        (sum, last)
    }

    /// A queue's counters.
    ///
    /// # Panics
    /// There is no such queue.
    #[must_use]
    pub fn queue_counts(&self, queue: QueueId) -> QueueCounts {
        self.queues[queue.0].stats.snapshot()
    }
}

fn volume(index: usize, spec: &VolumeSpec) -> Result<Arc<Volume>> {
    let block_size = BlockSize::new(spec.block_size).context("block size")?;
    let blocks = BlockCount(spec.blocks);
    let bytes = blocks.bytes(block_size).filter(|b| *b > 0).context("capacity")?;
    let placement = match spec.kind {
        VolumeKind::Memory => {
            Placement::Memory(Region::allocate(usize::try_from(bytes)?, PageKind::Normal)?)
        }
        VolumeKind::Null => Placement::Null,
        VolumeKind::Store => Placement::Store,
    };
    Ok(Arc::new(Volume {
        index: VolumeIndex(u16::try_from(index)?),
        name: Name::new(&format!("v{index}"))?,
        uuid: [0; 16],
        block_size,
        blocks,
        read_only: spec.read_only,
        cache: match &placement {
            Placement::Store => spec.cache,
            _ => CacheMode::None,
        },
        placement,
        read_ahead_bytes: spec.read_ahead_bytes,
        discard: spec.discard,
        discard_granularity_bytes: spec.block_size,
    }))
}
