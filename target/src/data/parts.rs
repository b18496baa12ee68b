//! [`Part`]: the bytes of a command that belong to one shard, and their progress.
//!
//! A part owns the memory that was lent for it: the memory of its shard, the shard's reservation,
//! and an extent of its connection's memory to land in (iWARP). A caller that takes one of them out
//! must pass it on or give it back.

use std::ops::{Index, IndexMut};

use rblk_protocol::width::{narrow, wide};

use crate::cache::{JobId, Segments};
use crate::memory::arena::Extent;

/// The index of a part of a command.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct PartIndex(pub(crate) u8);

impl PartIndex {
    /// The first part, and the index for a command without parts.
    pub(crate) const FIRST: Self = Self(0);
}

/// The step that a part waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum PartState {
    /// None: the part is done.
    #[default]
    Done,
    /// Its shard lends the bytes (READ) or reserves memory (WRITE).
    AwaitsMemory,
    /// Its data comes, out of the capsule or by RDMA READ.
    AwaitsData,
    /// Its shard writes the data.
    AwaitsStore,
    /// Its bytes are here, to be sent when credits allow.
    AwaitsSend,
}

/// The bytes of a command that belong to one shard.
#[derive(Debug, Default)]
pub(crate) struct Part {
    offset: u64,
    at: u32,
    len: u32,
    shard: u16,
    state: PartState,
    // RDMA READs posted and not completed.
    reads: u16,
    // Bytes for which WRs were posted.
    posted: u32,
    // CRC of its bytes, once the first of them were sent with digests.
    crc: u32,
    memory: Segments,
    reservation: Option<JobId>,
    landing: Option<Extent>,
}

impl Part {
    /// A part that needs memory: `len` bytes from `offset` in the volume, which begin at byte `at`
    /// of the command's data.
    #[inline]
    pub(crate) fn new(shard: usize, offset: u64, at: u32, len: u32) -> Self {
        let (shard, state) = (narrow(shard), PartState::AwaitsMemory);
        Self { offset, at, len, shard, state, ..Self::default() }
    }

    /// First byte in the volume.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// First byte in the command's data.
    pub(crate) fn at(&self) -> u32 {
        self.at
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The shard that the bytes belong to.
    #[inline]
    pub(crate) fn shard(&self) -> usize {
        wide(self.shard)
    }

    /// The step that it waits for.
    #[inline]
    pub(crate) fn state(&self) -> PartState {
        self.state
    }

    /// Bytes for which WRs were posted, or that were copied.
    #[inline]
    pub(crate) fn posted(&self) -> u32 {
        self.posted
    }

    /// Whether WRs were posted for all its bytes, or all were copied.
    #[inline]
    pub(crate) fn is_posted(&self) -> bool {
        self.posted == self.len
    }

    /// The CRC of its bytes, if data is sent with digests.
    pub(crate) fn crc(&self) -> u32 {
        self.crc
    }

    /// Sets the CRC of its bytes, which are sent now.
    pub(crate) fn set_crc(&mut self, crc: u32) {
        self.crc = crc;
    }

    /// The memory that its shard lent.
    #[inline]
    pub(crate) fn memory(&self) -> &Segments {
        &self.memory
    }

    /// The extent that its data lands in before it is copied.
    pub(crate) fn landing(&self) -> Option<&Extent> {
        self.landing.as_ref()
    }

    /// Sets the extent that its data lands in before it is copied.
    pub(crate) fn set_landing(&mut self, extent: Extent) {
        debug_assert!(self.landing.is_none());
        self.landing = Some(extent);
    }

    /// Takes the extent that its data landed in, for return to the connection.
    pub(crate) fn take_landing(&mut self) -> Option<Extent> {
        self.landing.take()
    }

    /// Takes the memory and the reservation of its shard, to be passed on or given back.
    #[inline]
    pub(crate) fn take_memory(&mut self) -> (Option<JobId>, Segments) {
        (self.reservation.take(), std::mem::take(&mut self.memory))
    }

    /// Whether it owns nothing.
    fn is_empty(&self) -> bool {
        self.memory.is_empty() && self.reservation.is_none() && self.landing.is_none()
    }

    #[inline]
    pub(crate) fn set_state(&mut self, state: PartState) {
        self.state = state;
    }

    /// Its shard lent the bytes, which are to be sent.
    #[inline]
    pub(crate) fn lend(&mut self, memory: Segments) {
        self.memory = memory;
        self.state = PartState::AwaitsSend;
    }

    /// Its shard reserved memory, so its data may come.
    #[inline]
    pub(crate) fn reserve(&mut self, job: JobId, memory: Segments) {
        self.memory = memory;
        self.reservation = Some(job);
        self.state = PartState::AwaitsData;
    }

    /// A RDMA READ of this many bytes was posted.
    #[inline]
    pub(crate) fn read_posted(&mut self, bytes: u32) {
        self.posted += bytes;
        self.reads += 1;
    }

    /// Bytes of posted RDMA READs, unless all of them have completed.
    pub(crate) fn awaited_bytes(&self) -> u64 {
        if self.reads == 0 { 0 } else { self.posted.into() }
    }

    /// A RDMA READ completed. True: the data is all here.
    ///
    /// # Errors
    /// No READ was posted.
    #[inline]
    pub(crate) fn read_done(&mut self) -> Result<bool, ()> {
        if self.state != PartState::AwaitsData || self.reads == 0 {
            return Err(());
        }
        self.reads -= 1;
        Ok(self.reads == 0 && self.is_posted())
    }

    /// Its data was copied out of the capsule.
    #[inline]
    pub(crate) fn copied(&mut self) {
        self.posted = self.len;
    }

    /// A WRITE of this many bytes was queued. True: it was the last one, and the memory is to be
    /// taken and pinned.
    #[inline]
    pub(crate) fn sent(&mut self, bytes: u32) -> bool {
        self.posted += bytes;
        let is_last = self.is_posted();
        if is_last {
            self.state = PartState::Done;
        }
        is_last
    }
}

/// The parts of a command. The list keeps its memory from command to command.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    list: Vec<Part>,
    count: usize,
}

impl Parts {
    /// The parts.
    #[inline]
    pub(crate) fn as_slice(&self) -> &[Part] {
        &self.list[..self.count]
    }

    /// The parts.
    #[inline]
    pub(crate) fn as_mut_slice(&mut self) -> &mut [Part] {
        &mut self.list[..self.count]
    }

    /// One part, if there is such a part.
    #[inline]
    pub(crate) fn get_mut(&mut self, part: PartIndex) -> Option<&mut Part> {
        self.as_mut_slice().get_mut(wide(part.0))
    }

    /// Adds a part.
    #[inline(always)]
    pub(crate) fn push(&mut self, part: Part) {
        match self.list.get_mut(self.count) {
            Some(place) => *place = part,
            None => self.list.push(part),
        }
        self.count += 1;
    }

    /// Clears the list for a new command. Every part has given back its memory.
    #[inline]
    pub(crate) fn clear(&mut self) {
        debug_assert!(self.as_slice().iter().all(Part::is_empty), "a part still owns memory");
        self.count = 0;
    }

    /// Whether every part is done.
    #[inline]
    pub(crate) fn are_done(&self) -> bool {
        self.as_slice().iter().all(|part| part.state == PartState::Done)
    }

    /// The first part in that state, and whether it is the only one.
    #[inline]
    pub(crate) fn first_in(&self, state: PartState) -> Option<(PartIndex, bool)> {
        let parts = self.as_slice();
        let first = parts.iter().position(|part| part.state == state)?;
        let is_only = !parts[first + 1..].iter().any(|part| part.state == state);
        Some((PartIndex(narrow(first)), is_only))
    }
}

impl Index<PartIndex> for Parts {
    type Output = Part;

    #[inline]
    fn index(&self, part: PartIndex) -> &Part {
        &self.as_slice()[wide(part.0)]
    }
}

impl IndexMut<PartIndex> for Parts {
    #[inline]
    fn index_mut(&mut self, part: PartIndex) -> &mut Part {
        &mut self.as_mut_slice()[wide(part.0)]
    }
}
