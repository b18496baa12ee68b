//! [`Bounce`]: memory of one I/O connection through which all its data passes, on devices where the
//! sink of an RDMA READ needs remote-write access (iWARP).
//!
//! There the key of the sink travels with each READ request, and every holder of the key may write
//! to the sink. So a QP, its sink and the memory it sends from are in a protection domain (PD) of
//! their own, and the device refuses the key to every other QP. The arena is in no PD of such a
//! device: a card has no room to register the arena once for each connection.
//!
//! ```text
//! write:  peer --READ--> landing --copy--> slots of the arena, or a volume in memory
//! read:   slots, or a volume in memory --copy--> outgoing --WRITE--> peer
//! ```
//!
//! Contract: only a copy of landed data is used. The peer can change its own landing, and so its
//! own data, at any time until the READ has completed and the data is copied; after that, no code
//! reads the landing. No peer can write to the outgoing memory.
//!
//! Each direction is served in order: the first request without room makes all later ones wait
//! until an extent comes back.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use rblk_fabric::{Access, MemoryRegion, PageKind, ProtectionDomain, Region, Sge};
use rblk_protocol::width::wide;

use crate::data::connection::SCRATCH_BYTES;
use crate::data::connection::connection_memory::NoMemory;
use crate::memory::arena::{Arena, ArenaError, Extent, MAX_EXTENT_BYTES, MIN_EXTENT_BYTES};

/// Number of commands of maximal length that fit in one direction at a time.
const LONGEST: usize = 4;

/// The memory of a [`Bounce`], which control registers in the PD of the QP.
#[derive(Debug)]
pub struct BounceMemory {
    // The landing of READs: `LONGEST` extents, and a page for barriers.
    landing: MemoryRegion,
    // The source of WRITEs: `LONGEST` extents.
    outgoing: MemoryRegion,
    // Bytes of the longest extent.
    extent_bytes: u32,
}

impl BounceMemory {
    /// Size of this memory for a connection with commands of at most `io_max_bytes`.
    #[must_use]
    pub fn bytes(io_max_bytes: u32) -> usize {
        2 * LONGEST * wide(extent_bytes(io_max_bytes)) + wide(MIN_EXTENT_BYTES)
    }

    /// Allocates and registers memory for a connection with commands of at most `io_max_bytes`. The
    /// PD `pd` must belong to that connection alone.
    ///
    /// # Errors
    /// The system has no memory, or the device refuses to register it.
    pub fn register(pd: &ProtectionDomain, io_max_bytes: u32) -> Result<Self, NoMemory> {
        let extent_bytes = extent_bytes(io_max_bytes);
        let bytes = LONGEST * wide(extent_bytes);
        let page = wide(MIN_EXTENT_BYTES);
        let landing = Region::allocate(bytes + page, PageKind::Normal)?;
        let outgoing = Region::allocate(bytes, PageKind::Normal)?;
        let sink = Access { remote_write: true, ..Access::LOCAL_WRITE };
        Ok(Self {
            landing: pd.register(&landing, sink)?,
            outgoing: pd.register(&outgoing, Access::LOCAL_READ)?,
            extent_bytes,
        })
    }

    /// The landing of READs, which the peer of this connection may write.
    #[must_use]
    pub fn landing(&self) -> &MemoryRegion {
        &self.landing
    }

    fn extents(&self) -> Range<usize> {
        0..LONGEST * wide(self.extent_bytes)
    }
}

/// Bytes of the longest extent, for commands of at most `io_max_bytes`.
fn extent_bytes(io_max_bytes: u32) -> u32 {
    io_max_bytes.clamp(MIN_EXTENT_BYTES, MAX_EXTENT_BYTES).next_power_of_two()
}

/// The bounce memory of a connection, and its allocations. See the module.
#[derive(Debug)]
pub(crate) struct Bounce {
    memory: BounceMemory,
    landing: Arena,
    // A part waits for room to land.
    landing_short: bool,
    outgoing: Arena,
    // An answer waits for room to send from.
    outgoing_short: bool,
    // The extent of the WRITE that is queued next.
    prepared: Option<Extent>,
    // Sent extents, by position of their WRITE: free when a later READ has completed.
    sent: VecDeque<(u64, Extent)>,
    // Positions of the READs on their way. READs complete in order; but siw may complete a later
    // SEND or WRITE earlier, so a count of completions does not give positions.
    reads: VecDeque<u64>,
}

impl Bounce {
    /// Bounce state with room for `send_wrs` sent WRITEs.
    ///
    /// # Errors
    /// Never, for memory of [`BounceMemory::register`].
    pub(super) fn new(memory: BounceMemory, send_wrs: usize) -> Result<Self, ArenaError> {
        let (extents, longest) = (memory.extents(), memory.extent_bytes);
        let arena =
            |of: &MemoryRegion| Arena::over(Arc::clone(of.region()), extents.clone(), longest);
        Ok(Self {
            landing: arena(&memory.landing)?,
            landing_short: false,
            outgoing: arena(&memory.outgoing)?,
            outgoing_short: false,
            prepared: None,
            sent: VecDeque::with_capacity(send_wrs),
            reads: VecDeque::with_capacity(usize::from(u8::MAX)),
            memory,
        })
    }

    /// Returns the registrations.
    pub(super) fn into_memory(self) -> BounceMemory {
        self.memory
    }

    // ---- Landing -------------------------------------------------------------------------------

    /// Whether a part waits for room to land its data.
    pub(super) fn is_landing_short(&self) -> bool {
        self.landing_short
    }

    /// Allocates room for a READ of `bytes`. `None`: no room, or others wait for it.
    pub(super) fn land(&mut self, bytes: u32) -> Option<Extent> {
        if self.landing_short {
            return None;
        }
        let extent = self.landing.allocate(wide(bytes));
        self.landing_short = extent.is_none();
        extent
    }

    /// SGE of the first bytes of an extent to land in.
    pub(crate) fn landing_sge(&self, extent: &Extent, bytes: u32) -> Option<Sge> {
        self.memory.landing.sge(extent.offset(), bytes)
    }

    /// The region where READs land, as the source of copies.
    pub(crate) fn landing_region(&self) -> &Region {
        self.landing.region()
    }

    /// Frees an extent after its data was copied, or when no data will land there.
    pub(crate) fn landed(&mut self, extent: Extent) {
        self.landing.release(extent);
        self.landing_short = false;
    }

    /// The landing of barriers: a page of their own, so that a barrier never waits.
    pub(super) fn barrier_sge(&self) -> Option<Sge> {
        self.memory.landing.sge(self.memory.extents().end, SCRATCH_BYTES)
    }

    // ---- Outgoing ------------------------------------------------------------------------------

    /// Whether an answer waits for room to send from.
    pub(super) fn is_outgoing_short(&self) -> bool {
        self.outgoing_short
    }

    /// Allocates room for the data of the next WRITE. False: there is no room until a barrier shows
    /// that earlier WRITEs have left.
    pub(super) fn prepare(&mut self, bytes: u32) -> bool {
        debug_assert!(self.prepared.is_none(), "prepared and not sent");
        self.prepared = self.outgoing.allocate(wide(bytes));
        self.outgoing_short = self.prepared.is_none();
        self.prepared.is_some()
    }

    /// The destination for the data of the next WRITE: the region and the offset in it.
    pub(crate) fn prepared(&self) -> Option<(&Region, usize)> {
        let extent = self.prepared.as_ref()?;
        Some((self.outgoing.region(), extent.offset()))
    }

    /// SGE of the data copied there.
    pub(crate) fn prepared_sge(&self, bytes: u32) -> Option<Sge> {
        self.memory.outgoing.sge(self.prepared.as_ref()?.offset(), bytes)
    }

    /// The WRITE of the prepared extent is queued at this position.
    pub(crate) fn sent(&mut self, position: u64) {
        let extent = self.prepared.take();
        debug_assert!(extent.is_some(), "sent and not prepared");
        self.sent.extend(extent.map(|extent| (position, extent)));
    }

    /// A READ is queued at this position.
    pub(super) fn read_queued(&mut self, position: u64) {
        self.reads.push_back(position);
    }

    /// The oldest READ on its way completed: every WRITE before it has left our memory.
    pub(super) fn read_completed(&mut self) {
        let position = self.reads.pop_front();
        debug_assert!(position.is_some(), "a READ completed that was not queued");
        let position = position.unwrap_or(0);
        while self.sent.front().is_some_and(|(at, _)| *at <= position) {
            let Some((_, extent)) = self.sent.pop_front() else { return };
            self.outgoing.release(extent);
            self.outgoing_short = false;
        }
    }

    /// Whether enough was sent to justify a barrier.
    pub(super) fn wants_barrier(&self) -> bool {
        let bytes = self.memory.extents().len();
        !self.sent.is_empty() && (self.outgoing_short || self.outgoing.free_bytes() < bytes / 2)
    }
}

#[cfg(test)]
mod tests {
    use rblk_fabric::Device;
    use rblk_fabric::soft::network::Network;

    use super::*;

    const LONG: u32 = 64 << 10;

    fn bounce() -> Bounce {
        let pd = Device::Soft(Network::with_iwarp_rules(1).device()).alloc_pd().unwrap();
        Bounce::new(BounceMemory::register(&pd, LONG).unwrap(), 8).unwrap()
    }

    #[test]
    fn memory_is_bounded_and_holds_the_longest_commands() {
        for (io_max, extent) in [(512, 4096), (4096, 4096), (5000, 8192), (1 << 20, 1 << 20)] {
            let pd = Device::Soft(Network::with_iwarp_rules(1).device()).alloc_pd().unwrap();
            let memory = BounceMemory::register(&pd, io_max).unwrap();
            assert_eq!(memory.landing.region().len(), 4 * extent + 4096);
            assert_eq!(memory.outgoing.region().len(), 4 * extent);
            assert_eq!(BounceMemory::bytes(io_max), 8 * extent + 4096);
            let mut bounce = Bounce::new(memory, 8).unwrap();
            assert!(bounce.land(io_max).is_some() && bounce.prepare(io_max));
        }
    }

    #[test]
    fn the_first_to_wait_for_room_is_not_overtaken() {
        let mut bounce = bounce();
        let mut extents: Vec<_> = (0..4).map(|_| bounce.land(LONG).unwrap()).collect();
        assert_eq!(bounce.land(LONG), None);
        bounce.landed(extents.pop().unwrap());
        assert!(bounce.land(4096).is_some());
        assert_eq!(bounce.land(LONG), None);
        assert!(bounce.is_landing_short());
        assert_eq!(bounce.land(4096), None, "there is room, and it is for the first");
        assert!(bounce.barrier_sge().is_some(), "a barrier needs no room");
        bounce.landed(extents.pop().unwrap());
        assert!(!bounce.is_landing_short() && bounce.land(LONG).is_some());
    }

    #[test]
    fn sent_extents_return_only_by_barrier_and_in_order() {
        let mut bounce = bounce();
        for position in 1..=4 {
            assert!(bounce.prepare(LONG));
            assert!(bounce.prepared_sge(LONG).is_some());
            bounce.sent(position * 10);
        }
        assert!(!bounce.prepare(4096) && bounce.is_outgoing_short() && bounce.wants_barrier());
        for position in [5, 11, 51] {
            bounce.read_queued(position);
        }
        bounce.read_completed();
        assert!(bounce.is_outgoing_short(), "nothing was sent before that READ");
        bounce.read_completed();
        assert!(!bounce.is_outgoing_short() && bounce.wants_barrier(), "three of four are out");
        assert!(bounce.prepare(LONG));
        bounce.sent(50);
        bounce.read_completed();
        assert!(!bounce.wants_barrier());
        assert_eq!(bounce.outgoing.free_bytes(), 4 * wide(LONG));
    }
}
