//! The seam between rblk and a provider: devices, memory, connections, and the [`Poller`] of a data
//! thread.
//!
//! Control objects are enums over the providers; the data side is one object-safe trait, called
//! once per batch, so the indirect call is paid per turn and not per I/O.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::address::{Address, Scheme};
use crate::error::{FabricError, PostError, Result};
use crate::region::Region;
use crate::soft;
#[cfg(feature = "verbs")]
use crate::verbs;
use crate::work::{
    Access, Completion, Lkey, QpIndex, RecvWr, RemoteBuffer, Rkey, SendOp, SendWr, Sge,
};

/// What carries the messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Transport {
    /// InfiniBand.
    InfiniBand,
    /// RoCE, v1 or v2.
    Roce,
    /// iWARP: no immediates, and READ sinks need remote write access.
    Iwarp,
    /// The software provider over TCP.
    SoftTcp,
    /// The software provider over an in-memory link.
    SoftMemory,
    /// Something verbs knows and we do not.
    Unknown,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Roce => "RoCE",
            Self::Iwarp => "iWARP",
            Self::SoftTcp => "soft/TCP",
            Self::SoftMemory => "soft/memory",
            Self::Unknown => "unknown",
        })
    }
}

/// What a device says it can do. Optional verbs are claims: they are tested on each new connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceCaps {
    /// Device name, such as `mlx5_0`, `rxe0`, or `soft`.
    pub name: String,
    /// What it speaks.
    pub transport: Transport,
    /// Most WRs on one send or receive queue.
    pub max_wrs: u32,
    /// Most SGEs per WR, at most [`crate::MAX_SGE`].
    pub max_sges: u32,
    /// Most entries of one CQ.
    pub max_cq_entries: u32,
    /// READs a QP can have outstanding as requester.
    pub max_reads_out: u8,
    /// READs a QP can serve at once as responder.
    pub max_reads_in: u8,
    /// Largest MR in bytes.
    pub max_region_bytes: u64,
    /// Payload that can ride inside a WR; 0 where unsupported.
    pub inline_bytes: u32,
    /// Claims WRITE_WITH_IMM.
    pub write_with_imm: bool,
    /// The sink of an RDMA READ must be registered with `remote_write` (iWARP).
    pub read_sink_needs_remote_write: bool,
    /// A kernel driver plays the device (rxe, siw): each QP is served by threads of its own.
    pub kernel_software: bool,
    /// What a QP was lent may be written to, read and sent from until the QP is destroyed, also in
    /// the error state: all devices but the software provider, whose QPs are served by the thread
    /// that ends them.
    pub touches_until_destroyed: bool,
}

/// Sizes of one QP, both queues, asked of the provider.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpLimits {
    /// Send-queue WRs outstanding at most, unsignaled ones included until a later signaled one
    /// completes.
    pub send_wrs: u32,
    /// RECVs posted at most.
    pub recv_wrs: u32,
    /// SGEs per send WR.
    pub send_sges: u32,
    /// Inline payload wanted, in bytes; lowered silently to what the device has.
    pub inline_bytes: u32,
    /// READs we will have outstanding.
    pub reads_out: u8,
    /// READs of the peer we serve at once.
    pub reads_in: u8,
}

/// How to reach a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectOptions {
    /// Deadline of each step: resolve, connect.
    pub timeout: Duration,
    /// Local address to bind to, where the host has several.
    pub bind: Option<std::net::IpAddr>,
    /// How soon a silent path should count as dead; QP timeouts and retry counts follow from it.
    pub detect: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(5), bind: None, detect: Duration::from_secs(5) }
    }
}

/// Bytes that travel with connect, accept and reject. CMs pad them: the length inside is what
/// counts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ConnectionHello(pub Vec<u8>);

impl ConnectionHello {
    /// Most bytes of a request (rdma_cm over IB: 92 of the MAD less 36 of its own header).
    pub const REQUEST_MAX: usize = 56;
    /// Most bytes of a reply or a rejection that every CM carries (a reject has 148 on IB).
    pub const REPLY_MAX: usize = 148;
}

/// An opened device.
#[derive(Clone, Debug)]
pub enum Device {
    /// Software provider.
    Soft(soft::Device),
    /// Verbs device.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Device),
}

impl Device {
    /// What it can do.
    #[must_use]
    pub fn caps(&self) -> &DeviceCaps {
        match self {
            Self::Soft(d) => d.caps(),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => d.caps(),
        }
    }

    /// A new protection domain.
    ///
    /// # Errors
    /// The verbs call's errno.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        match self {
            Self::Soft(d) => Ok(ProtectionDomain::Soft(soft::ProtectionDomain::new(d))),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => verbs::ProtectionDomain::alloc(d).map(ProtectionDomain::Verbs),
        }
    }

    /// Whether both are the same device, so that one PD serves both.
    #[must_use]
    pub fn same_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Soft(a), Self::Soft(b)) => a.same_as(b),
            #[cfg(feature = "verbs")]
            (Self::Verbs(a), Self::Verbs(b)) => a.same_as(b),
            #[cfg(feature = "verbs")]
            _ => false,
        }
    }
}

/// A protection domain: MRs and QPs of one domain go together.
#[derive(Clone, Debug)]
pub enum ProtectionDomain {
    /// Software provider.
    Soft(soft::ProtectionDomain),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::ProtectionDomain),
}

impl ProtectionDomain {
    /// Registers the whole region. The MR keeps the region alive and is deregistered on drop.
    ///
    /// # Errors
    /// [`FabricError::MemlockTooSmall`] with limit and fix where that is the cause; else the errno.
    pub fn register(&self, region: &Arc<Region>, access: Access) -> Result<MemoryRegion> {
        let inner = match self {
            Self::Soft(pd) => MrInner::Soft(pd.register(region, access)?),
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => MrInner::Verbs(verbs::MemoryRegion::register(pd, region, access)?),
        };
        Ok(MemoryRegion { inner, region: Arc::clone(region) })
    }

    /// A CQ of at least `cq_entries`, with room for QPs. The box goes to the data thread, the
    /// handle stays with control, which needs it to make QPs.
    ///
    /// # Errors
    /// [`FabricError::Limit`] when the device has fewer entries; else the errno.
    pub fn poller(&self, cq_entries: u32) -> Result<(Box<dyn Poller>, PollerHandle)> {
        match self {
            Self::Soft(pd) => {
                let (poller, handle) = soft::Poller::create(pd, cq_entries)?;
                Ok((Box::new(poller), PollerHandle::Soft(handle)))
            }
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => {
                let (poller, handle) = verbs::Poller::create(pd, cq_entries)?;
                Ok((Box::new(poller), PollerHandle::Verbs(handle)))
            }
        }
    }
}

#[derive(Debug)]
enum MrInner {
    Soft(soft::MemoryRegion),
    #[cfg(feature = "verbs")]
    Verbs(verbs::MemoryRegion),
}

/// A registered [`Region`]. Dropping it deregisters, after which its keys are dead.
#[derive(Debug)]
pub struct MemoryRegion {
    // Declared before `region`: deregistered before the memory can go.
    inner: MrInner,
    region: Arc<Region>,
}

impl MemoryRegion {
    /// The memory.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Key for our own WRs.
    #[must_use]
    pub fn lkey(&self) -> Lkey {
        match &self.inner {
            MrInner::Soft(mr) => mr.lkey(),
            #[cfg(feature = "verbs")]
            MrInner::Verbs(mr) => mr.lkey(),
        }
    }

    /// Key to give to a peer.
    #[must_use]
    pub fn rkey(&self) -> Rkey {
        match &self.inner {
            MrInner::Soft(mr) => mr.rkey(),
            #[cfg(feature = "verbs")]
            MrInner::Verbs(mr) => mr.rkey(),
        }
    }

    /// An SGE over `len` bytes from `offset`, or `None` when that is not inside the region.
    #[must_use]
    pub fn sge(&self, offset: usize, len: u32) -> Option<Sge> {
        let end = offset.checked_add(usize::try_from(len).ok()?)?;
        (end <= self.region.len()).then(|| Sge {
            addr: self.region.address() + offset as u64,
            len,
            lkey: self.lkey(),
        })
    }

    /// What to tell a peer so that it reaches `offset` of the region.
    #[must_use]
    pub fn remote(&self, offset: usize) -> RemoteBuffer {
        RemoteBuffer { addr: self.region.address() + offset as u64, rkey: self.rkey() }
    }
}

/// Control's end of a [`Poller`]: needed to make QPs that complete on its CQ.
#[derive(Clone, Debug)]
pub enum PollerHandle {
    /// Software provider.
    Soft(soft::PollerHandle),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::PollerHandle),
}

/// A QP on its way between control and a data thread. Dropping it destroys the QP and its CM id
/// (which may block shortly, so data threads hand it back to control).
#[derive(Debug)]
pub enum Connection {
    /// Software provider.
    Soft(soft::Connection),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Connection),
}

/// What the acceptor answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AcceptParams {
    /// Reply that the peer gets with ESTABLISHED.
    pub hello: ConnectionHello,
    /// READs we will have outstanding, at most what the peer serves.
    pub reads_out: u8,
    /// READs of the peer that we serve.
    pub reads_in: u8,
}

/// One data thread's CQ and the QPs on it.
///
/// Not `Sync`: one thread at a time. The caller drives it in turns: poll until empty, act, post one
/// batch per QP; to sleep, [`arm`](Self::arm), poll once more, and only if that was empty wait for
/// one of [`event_fds`](Self::event_fds) to be readable, then [`clear_event`](Self::clear_event).
pub trait Poller: Send + fmt::Debug {
    /// The device's abilities.
    fn caps(&self) -> &DeviceCaps;

    /// Takes over a QP made for this poller's handle. On error the QP is destroyed.
    ///
    /// # Errors
    /// [`FabricError::Mixed`] for a QP of another poller, [`FabricError::Limit`] when there is no
    /// room.
    fn attach(&mut self, connection: Connection) -> Result<QpIndex>;

    /// Completes an incoming connection ([`Incoming::prepare`]) after its RECVs were posted.
    ///
    /// # Errors
    /// The CM call's errno; the QP is then dead and its WRs flush.
    fn accept(&mut self, qp: QpIndex, params: &AcceptParams) -> Result<()>;

    /// Posts RECVs, in order.
    ///
    /// # Errors
    /// [`PostError`]; an unknown `qp` gives EINVAL.
    fn post_recv(&mut self, qp: QpIndex, wrs: &[RecvWr]) -> std::result::Result<(), PostError>;

    /// Posts a list with one doorbell, in order. An empty list does nothing.
    ///
    /// # Errors
    /// [`PostError`]; an unknown `qp` gives EINVAL.
    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> std::result::Result<(), PostError>;

    /// Takes up to `out.len()` completions. 0 means none now.
    ///
    /// # Errors
    /// The CQ itself is broken (overrun, device gone): nothing on it will complete any more.
    fn poll(&mut self, out: &mut [Completion]) -> Result<usize>;

    /// Asks for an event at the next completion. Call it before every sleep: a CQ that was asked
    /// and gave no event is still armed, so that costs nothing then.
    ///
    /// # Errors
    /// The CQ itself is broken.
    fn arm(&mut self) -> Result<()>;

    /// One of them is readable when an armed CQ has something, until [`Self::clear_event`]. They
    /// may change with [`Self::attach`] and [`Self::detach`]: who watches them asks again after
    /// those.
    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2];

    /// Takes the event that was waited for, after which the CQ is not armed. Call it after each
    /// wake by a descriptor, and after a sleep that took its whole time: should the device have
    /// lost the event, the next [`Self::arm`] asks again.
    fn clear_event(&mut self);

    /// Moves the QP to the error state: everything outstanding completes sooner or later, and
    /// nothing new of the peer gets in. What the device is amid may go on until the QP is
    /// destroyed: only then its memory is free ([`DeviceCaps::touches_until_destroyed`]).
    /// Idempotent.
    fn fail(&mut self, qp: QpIndex);

    /// Removes a QP, to be destroyed by dropping or [retiring](Connection::retire) it. What is left
    /// unfinished completes never. Its room in the CQ is free when it is destroyed and the CQ was
    /// found empty after that. `None` for an unknown index.
    fn detach(&mut self, qp: QpIndex) -> Option<Connection>;

    /// Doorbells, WRs and completions so far.
    fn counters(&self) -> PollerCounters;
}

/// What one poller did, since it was made. Messages are WRs that were posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PollerCounters {
    /// post_send calls with at least one WR.
    pub send_doorbells: u64,
    /// post_recv calls with at least one WR.
    pub recv_doorbells: u64,
    /// SENDs posted.
    pub sends: u64,
    /// RDMA WRITEs posted, without immediate.
    pub writes: u64,
    /// WRITE_WITH_IMMs posted.
    pub writes_with_imm: u64,
    /// RDMA READs posted.
    pub reads: u64,
    /// Send WRs that asked for a completion.
    pub signaled: u64,
    /// RECVs posted.
    pub recvs: u64,
    /// Completions reaped.
    pub completions: u64,
    /// Times the CQ was asked for an event. One that is asked already is not asked again.
    pub arms: u64,
    /// Events taken.
    pub events: u64,
    /// Calls into links and epoll (software provider); over TCP each is a system call.
    pub link_calls: u64,
}

impl PollerCounters {
    /// Counts one send WR that was posted.
    #[inline]
    pub(crate) fn count_send(&mut self, wr: &SendWr) {
        match wr.op {
            SendOp::Send => self.sends += 1,
            SendOp::Write(_) => self.writes += 1,
            SendOp::WriteWithImm(..) => self.writes_with_imm += 1,
            SendOp::Read(_) => self.reads += 1,
        }
        self.signaled += u64::from(wr.signaled);
    }

    /// Adds another's, field by field.
    pub fn add(&mut self, other: &Self) {
        self.send_doorbells += other.send_doorbells;
        self.recv_doorbells += other.recv_doorbells;
        self.sends += other.sends;
        self.writes += other.writes;
        self.writes_with_imm += other.writes_with_imm;
        self.reads += other.reads;
        self.signaled += other.signaled;
        self.recvs += other.recvs;
        self.completions += other.completions;
        self.arms += other.arms;
        self.events += other.events;
        self.link_calls += other.link_calls;
    }
}

/// A way to a peer: the device is known, nothing is connected yet.
#[derive(Debug)]
pub enum Route {
    /// Software provider.
    Soft(soft::Route),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Route),
}

/// A connection as the connecting side gets it.
#[derive(Debug)]
pub struct Established {
    /// The QP, for [`Poller::attach`].
    pub connection: Connection,
    /// The peer's reply, maybe padded.
    pub hello: ConnectionHello,
    /// READs we may have outstanding.
    pub reads_out: u8,
    /// READs of the peer we serve.
    pub reads_in: u8,
}

impl Route {
    /// Resolves name, route and device.
    ///
    /// # Errors
    /// [`FabricError::Unreachable`], [`FabricError::NoDevice`], [`FabricError::NoVerbs`],
    /// [`FabricError::TimedOut`].
    pub async fn resolve(address: &Address, options: &ConnectOptions) -> Result<Self> {
        match address.scheme {
            Scheme::Tcp => soft::Route::resolve(address, options).await.map(Self::Soft),
            #[cfg(feature = "verbs")]
            Scheme::Rdma => verbs::Route::resolve(address, options).await.map(Self::Verbs),
            #[cfg(not(feature = "verbs"))]
            Scheme::Rdma => Err(FabricError::NoVerbs(address.to_string())),
        }
    }

    /// The device the route leaves by.
    #[must_use]
    pub fn device(&self) -> Device {
        match self {
            Self::Soft(r) => Device::Soft(r.device()),
            #[cfg(feature = "verbs")]
            Self::Verbs(r) => Device::Verbs(r.device()),
        }
    }

    /// Makes a QP and connects it, with `hello` in the request (at most
    /// [`ConnectionHello::REQUEST_MAX`] bytes).
    ///
    /// # Errors
    /// [`FabricError::Rejected`] with the peer's words, [`FabricError::TimedOut`],
    /// [`FabricError::NotRblk`], or a failed call.
    pub async fn connect(
        self,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
        hello: &ConnectionHello,
    ) -> Result<Established> {
        match (self, pd, poller) {
            (Self::Soft(r), ProtectionDomain::Soft(pd), PollerHandle::Soft(p)) => {
                r.connect(pd, p, limits, hello).await
            }
            #[cfg(feature = "verbs")]
            (Self::Verbs(r), ProtectionDomain::Verbs(pd), PollerHandle::Verbs(p)) => {
                r.connect(pd, p, limits, hello).await
            }
            #[cfg(feature = "verbs")]
            _ => Err(FabricError::Mixed("route, protection domain and poller")),
        }
    }
}

/// Waits for peers on one address.
#[derive(Debug)]
pub enum Listener {
    /// Software provider.
    Soft(soft::Listener),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Listener),
}

impl Listener {
    /// Starts listening. Port 0 picks a free one ([`Self::address`] tells).
    ///
    /// # Errors
    /// [`FabricError::Listen`], [`FabricError::NoDevice`], [`FabricError::NoVerbs`].
    pub async fn bind(address: &Address) -> Result<Self> {
        match address.scheme {
            Scheme::Tcp => soft::Listener::bind(address).await.map(Self::Soft),
            #[cfg(feature = "verbs")]
            Scheme::Rdma => verbs::Listener::bind(address).await.map(Self::Verbs),
            #[cfg(not(feature = "verbs"))]
            Scheme::Rdma => Err(FabricError::NoVerbs(address.to_string())),
        }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> &Address {
        match self {
            Self::Soft(l) => l.address(),
            #[cfg(feature = "verbs")]
            Self::Verbs(l) => l.address(),
        }
    }

    /// The devices that peers can come in by, so that memory can be registered before they do.
    /// Others may be plugged in later when the address is unspecified.
    ///
    /// # Errors
    /// A device cannot be queried.
    pub fn devices(&self) -> Result<Vec<Device>> {
        match self {
            Self::Soft(_) => Ok(vec![Device::Soft(soft::Device::tcp())]),
            #[cfg(feature = "verbs")]
            Self::Verbs(l) => Ok(l.devices()?.into_iter().map(Device::Verbs).collect()),
        }
    }

    /// The next peer that asked properly. Peers that send garbage or stall are dropped inside, with
    /// a log line each (rate limited), and never delay others. Cancel safe.
    ///
    /// # Errors
    /// The listener itself is broken.
    pub async fn accept(&mut self) -> Result<Incoming> {
        match self {
            Self::Soft(l) => l.accept().await.map(Incoming::Soft),
            #[cfg(feature = "verbs")]
            Self::Verbs(l) => l.accept().await.map(Incoming::Verbs),
        }
    }
}

/// A peer that asks to connect. Dropping it without an answer rejects it.
#[derive(Debug)]
pub enum Incoming {
    /// Software provider.
    Soft(soft::Incoming),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Incoming),
}

impl Incoming {
    /// The device it came in by.
    #[must_use]
    pub fn device(&self) -> Device {
        match self {
            Self::Soft(i) => Device::Soft(i.device()),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => Device::Verbs(i.device()),
        }
    }

    /// What it said, maybe padded.
    #[must_use]
    pub fn hello(&self) -> &ConnectionHello {
        match self {
            Self::Soft(i) => i.hello(),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.hello(),
        }
    }

    /// Who it is, for logs.
    #[must_use]
    pub fn peer(&self) -> String {
        match self {
            Self::Soft(i) => i.peer(),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.peer(),
        }
    }

    /// (READs the peer serves, READs the peer wants to have outstanding).
    #[must_use]
    pub fn peer_reads(&self) -> (u8, u8) {
        match self {
            Self::Soft(i) => i.peer_reads(),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.peer_reads(),
        }
    }

    /// What the peer is told should this, or the [`Connection`] made of it, be dropped without an
    /// answer: nothing, unless it is said here. Cut to [`ConnectionHello::REPLY_MAX`] bytes.
    pub fn refuse_with(&mut self, mut hello: ConnectionHello) {
        hello.0.truncate(ConnectionHello::REPLY_MAX);
        match self {
            Self::Soft(i) => i.refuse_with(hello),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.refuse_with(hello),
        }
    }

    /// Makes the QP. It is accepted by the data thread, after its RECVs are posted:
    /// [`Poller::attach`], [`Poller::post_recv`], [`Poller::accept`].
    ///
    /// # Errors
    /// [`FabricError::Mixed`], [`FabricError::Limit`], or a failed call; the peer is then rejected.
    pub fn prepare(
        self,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
    ) -> Result<Connection> {
        match (self, pd, poller) {
            (Self::Soft(i), ProtectionDomain::Soft(pd), PollerHandle::Soft(p)) => {
                i.prepare(pd, p, limits).map(Connection::Soft)
            }
            #[cfg(feature = "verbs")]
            (Self::Verbs(i), ProtectionDomain::Verbs(pd), PollerHandle::Verbs(p)) => {
                i.prepare(pd, p, limits).map(Connection::Verbs)
            }
            #[cfg(feature = "verbs")]
            _ => Err(FabricError::Mixed("incoming connection, protection domain and poller")),
        }
    }

    /// Refuses, with at most [`ConnectionHello::REPLY_MAX`] bytes of reason.
    pub fn reject(self, hello: &ConnectionHello) {
        match self {
            Self::Soft(i) => i.reject(hello),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.reject(hello),
        }
    }
}
