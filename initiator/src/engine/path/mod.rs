//! [`Path`]: one connected I/O queue: its QPs, its registered memory and the agreed values.
//!
//! A path has one QP or several, its lanes: to the target they are ordinary queues. Small requests
//! use the first lane, so that they share messages; large ones use the lane with the least data
//! under way, so that several QPs of the device move the data of one queue. All lanes are on one
//! CQ, and the path ends when one of them does.
//!
//! Keys live as long as the path: a reconnect registers anew, so a late RDMA of a dead path meets
//! dead keys. They are made for one path, a little before it ([`memory_registration`]). Each key
//! has one direction: the target may write to the buffers of READs, and read from those of WRITEs,
//! and nothing else.

pub(crate) mod memory_registration;
#[cfg(test)]
pub(crate) mod sample;

use std::sync::Arc;

use super::ways::WayIndex;
use super::ways::choice::WayTerms;
use memory_registration::{MemoryRegistration, QueueData};
use rblk_fabric::{
    Access, Connection, FabricError, MemoryRegion, PageKind, Poller, ProtectionDomain, QpIndex,
    QpLimits, Region, SendCredits,
};
use rblk_protocol::auth::{PROOF_BYTES, QueueProof, TargetProof};
use rblk_protocol::limits::{
    COMMAND_BYTES, COMMAND_LIST_BYTES, LIST_DATA_MAX, RESPONSE_LIST_BYTES,
};
use rblk_protocol::width::{const_u32, narrow};
use rblk_protocol::{
    Epoch, Features, HelloAccept, QueueDepth, SELF_TEST_BYTES, Sequence, VolumeHandle,
};

/// Limit of the pieces in a SEND with several commands that may have data: the capsules, and the
/// data of each.
pub(crate) const DATA_LIST_SGES: u32 = const_u32(LIST_DATA_MAX) + 1;
/// Receive slots beyond depth + 1.
const SPARE_RECVS: usize = 2;
/// Bytes of a tag's command slot: a list that begins with its command, or ends with it if data
/// comes first. The slot has one line more, so that the first lines of all slots do not fall into a
/// few sets of the cache.
pub(crate) const COMMAND_STRIDE: usize = COMMAND_LIST_BYTES + COMMAND_BYTES;
const _: () = assert!(COMMAND_BYTES + PROOF_BYTES <= COMMAND_STRIDE, "the self-test fits");
/// Bytes of a receive slot: a list of responses.
const RECV_STRIDE: usize = RESPONSE_LIST_BYTES;

/// Sizes of the memory of one lane of a path: `| command slots, depth + 1 | receive slots |`.
///
/// Commands are sent from the slot of their message's first tag. It is written again for the next
/// command of that tag: the answer to the last one proves that the target has it, and so all of the
/// message that it began. The data of a command is sent from its own buffer, which is not written
/// to before that command is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathLayout {
    /// Agreed depth.
    pub depth: QueueDepth,
}

impl PathLayout {
    /// Bytes of memory.
    #[must_use]
    pub(crate) fn bytes(self) -> usize {
        self.recv_offset(self.recv_slots())
    }

    /// Offset of the command slot of a tag.
    #[must_use]
    pub(crate) fn capsule_offset(self, index: usize) -> usize {
        index * COMMAND_STRIDE
    }

    /// Receive slots.
    #[must_use]
    pub(crate) fn recv_slots(self) -> u16 {
        narrow(self.depth.tags() + SPARE_RECVS)
    }

    /// Offset of a receive slot.
    #[must_use]
    pub(crate) fn recv_offset(self, slot: u16) -> usize {
        self.depth.tags() * COMMAND_STRIDE + usize::from(slot) * RECV_STRIDE
    }

    /// The limits to request for the QP, with these features. `reads_in` is the number of the
    /// target's RDMA READs that the device serves at once.
    #[must_use]
    pub fn qp_limits(self, inline_bytes: u32, reads_in: u8, features: Features) -> QpLimits {
        QpLimits {
            send_wrs: self.send_wrs() + 1,
            recv_wrs: u32::from(self.recv_slots()) + 1,
            send_sges: if features.has(Features::DATA_LISTS) { DATA_LIST_SGES } else { 2 },
            recv_sges: 1,
            inline_bytes: inline_bytes.min(64),
            reads_out: 0,
            reads_in,
        }
    }

    /// Limit of the outstanding send WRs: one for every tag, and as many again that wait for a
    /// signaled one.
    #[must_use]
    pub(crate) fn send_wrs(self) -> u32 {
        narrow::<u32, _>(2 * self.depth.tags()) + 8
    }

    /// The interval of signaled SENDs.
    #[must_use]
    pub(crate) fn signal_interval(self) -> u32 {
        (u32::from(self.depth.get()) / 2).clamp(2, 64)
    }
}

/// The memories for the data of a queue's requests.
#[derive(Clone, Debug)]
pub struct QueueMemory {
    /// The queue's own buffers.
    pub buffers: Arc<Region>,
    /// Memory of other programs, by [`MemoryIndex`] from 1 on. It has no room behind the data of a
    /// request: a path with digests cannot use it.
    pub shared: Arc<[Arc<Region>]>,
}

impl From<Arc<Region>> for QueueMemory {
    fn from(buffers: Arc<Region>) -> Self {
        Self { buffers, shared: Arc::default() }
    }
}

/// The index of a queue's memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MemoryIndex(u16);

impl MemoryIndex {
    /// The queue's own buffers.
    pub const OWN: Self = Self(0);

    /// Whether a queue with so many shared memories has this one.
    #[inline]
    pub(crate) fn is_of(self, shared: usize) -> bool {
        usize::from(self.0) <= shared
    }

    /// The index of a shared memory, in the order of [`QueueMemory::shared`]. `None` if no queue
    /// has so many.
    #[must_use]
    pub fn shared(index: u16) -> Option<Self> {
        index.checked_add(1).map(Self)
    }
}

/// The place of a request's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataPlace {
    /// The memory.
    pub memory: MemoryIndex,
    /// The offset of the first byte.
    pub offset: usize,
}

impl DataPlace {
    /// A place in the queue's own buffers.
    #[must_use]
    pub fn own(offset: usize) -> Self {
        Self { memory: MemoryIndex::OWN, offset }
    }
}

/// Memory for data, with its keys on a path.
#[derive(Debug)]
pub struct DataMemory {
    /// The registration for writes by the target.
    pub sinks: MemoryRegion,
    /// The registration of that memory for reads by the target.
    pub sources: MemoryRegion,
}

/// Registered memory of a path.
#[derive(Debug)]
pub struct PathMemory {
    /// The queue's own buffers.
    pub buffers: DataMemory,
    /// The memory of other programs.
    pub shared: Box<[DataMemory]>,
    /// Capsules and receive slots, one [`PathLayout`] after the other for each lane; never remote.
    pub slots: MemoryRegion,
    /// Memory for the self-test's writes, [`SELF_TEST_BYTES`] for each lane. The target may read it
    /// later to learn that its WRs are done.
    pub scratch: MemoryRegion,
}

impl PathMemory {
    /// Registers the memory of a queue and its own slots, for so many lanes, with a domain.
    ///
    /// # Errors
    /// There is not enough memory, or the device refuses.
    pub fn register(
        pd: &ProtectionDomain,
        memory: &QueueMemory,
        layout: PathLayout,
        lanes: usize,
    ) -> Result<Self, FabricError> {
        Self::with(pd, QueueData::register(pd, memory)?, layout, lanes)
    }

    /// Like [`Self::register`], for memory of the queue that is being registered already.
    ///
    /// # Errors
    /// As of [`Self::register`].
    pub(crate) async fn finish(
        pd: &ProtectionDomain,
        registering: MemoryRegistration,
        layout: PathLayout,
        lanes: usize,
    ) -> Result<Self, FabricError> {
        Self::with(pd, registering.end().await?, layout, lanes)
    }

    fn with(
        pd: &ProtectionDomain,
        QueueData(data): QueueData,
        layout: PathLayout,
        lanes: usize,
    ) -> Result<Self, FabricError> {
        let mmap = |e| FabricError::Call { call: "mmap", source: std::io::Error::other(e) };
        let own = |bytes: usize| Region::allocate(lanes * bytes, PageKind::Normal).map_err(mmap);
        let mut data = data.into_iter();
        let Some(buffers) = data.next() else {
            return Err(FabricError::Mixed("a queue without buffers"));
        };
        Ok(Self {
            buffers,
            shared: data.collect(),
            slots: pd.register(&own(layout.bytes())?, Access::LOCAL_WRITE)?,
            scratch: pd.register(&own(SELF_TEST_BYTES)?, Access::REMOTE)?,
        })
    }

    /// The memory with that index.
    ///
    /// # Panics
    /// The path has no such memory: a bug of the engine. The engine takes no request with an
    /// invalid place, and no path with less memory.
    #[inline]
    pub(crate) fn data(&self, index: MemoryIndex) -> &DataMemory {
        match index.0.checked_sub(1) {
            None => &self.buffers,
            Some(shared) => &self.shared[usize::from(shared)],
        }
    }
}

/// The proof that the self-test of a lane carries, and the proof that the target must answer.
#[derive(Clone, Copy, Debug)]
pub struct LaneProof {
    /// Proves that this end belongs to the session.
    pub ours: QueueProof,
    /// Proves that the target belongs to it.
    pub theirs: TargetProof,
}

/// The lanes of a path that control has tested: the poller of the path has their QPs. Every RECV is
/// posted, and every command is answered.
#[derive(Debug)]
pub struct Tested {
    pub(crate) lanes: Vec<TestedLane>,
    /// The number of the last command.
    pub(crate) sequence: Sequence,
}

/// A tested lane.
#[derive(Debug)]
pub(crate) struct TestedLane {
    pub(crate) qp: QpIndex,
    /// The credits of its send queue.
    pub(crate) credits: SendCredits,
}

/// A connected I/O queue on its way to the data thread.
#[derive(Debug)]
pub struct Path {
    /// The CQ, made for this path.
    pub poller: Box<dyn Poller>,
    /// The QPs, one for each lane, not attached yet.
    pub connections: Vec<Connection>,
    /// The proof of each lane, in the order of `connections`; empty unless [`Features::AUTH`] was
    /// agreed.
    pub proofs: Vec<LaneProof>,
    /// The lanes, if control [tested](Self::test) them: then the poller has the QPs, and no proof
    /// is left to exchange.
    pub tested: Option<Tested>,
    /// The registered memory.
    pub memory: PathMemory,
    /// The agreed values.
    pub accept: HelloAccept,
    /// The epoch of every command.
    pub epoch: Epoch,
    /// The handle of the volume in this session.
    pub volume: VolumeHandle,
    /// Data of at least this size goes by the lane with the least data under way.
    pub lane_bytes: u32,
    /// Its way: the first of a mount that uses one at a time.
    pub way: WayIndex,
    /// What is known of its way.
    pub way_terms: WayTerms,
}

impl Path {
    /// Destroys a path that was never used, without waiting for the kernel.
    pub(crate) fn retire(self) {
        self.into_dead().retire(());
    }

    /// The remains of a path that was never used.
    pub(crate) fn into_dead(self) -> DeadPath {
        let Self { mut poller, mut connections, memory, tested, way, .. } = self;
        let qps = || tested.iter().flat_map(|tested| &tested.lanes).map(|lane| lane.qp);
        qps().for_each(|qp| poller.fail(qp));
        connections.extend(qps().filter_map(|qp| poller.detach(qp)));
        DeadPath { connections, poller, memory, way }
    }

    /// The number of lanes.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.connections.len() + self.tested.as_ref().map_or(0, |tested| tested.lanes.len())
    }
}

/// The remains of a path, for control to [retire](Self::retire).
#[derive(Debug)]
pub struct DeadPath {
    /// The QPs are destroyed first.
    pub connections: Vec<Connection>,
    /// Then the CQ.
    pub poller: Box<dyn Poller>,
    /// Then the registrations.
    pub memory: PathMemory,
    /// Its way.
    pub way: WayIndex,
}

impl DeadPath {
    /// Whether its device may touch the buffers until its QPs are destroyed.
    pub(crate) fn is_touched(&self) -> bool {
        !self.connections.is_empty() && self.poller.caps().touches_until_destroyed
    }

    /// Destroys the path, without waiting for the kernel, and then drops `rest`. A new path has its
    /// own keys; it may use these buffers once the
    /// [`UndestroyedPath`](crate::queue::undestroyed::UndestroyedPath) is dropped.
    pub(crate) fn retire<T: Send + 'static>(self, rest: T) {
        let Self { connections, poller, memory, .. } = self;
        retire(connections, (poller, memory, rest));
    }
}

/// Destroys the QPs of a path, and then drops `rest`, which has their CQ. No thread of ours waits
/// for it: see [`Connection::retire`].
pub(crate) fn retire<T: Send + 'static>(mut connections: Vec<Connection>, rest: T) {
    match connections.pop() {
        Some(last) => last.retire((connections, rest)),
        None => drop(rest),
    }
}
