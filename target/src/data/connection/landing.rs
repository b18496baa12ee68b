//! [`Landing`]: slots of the cache where the data of small writes lands.
//!
//! The RECV of a receive buffer names slots that the shard has set apart, followed by the buffer's
//! own memory. The data of a message comes first ([`Features::DATA_FIRST`]), so the data of each
//! write of one block fills a slot. The shard takes this slot, and another slot takes its place
//! ([`ReceiveBuffers::exchange`]): the data is not copied.
//!
//! ```text
//! the message:     | data of a | data of b | WRITE b, WRITE a |
//! where it lands:  | slot      | slot      | slot             | memory of the buffer
//! ```
//!
//! Data of other lengths is read, or copied, from its landing place. Data that the end of a slot
//! cuts is first joined in the memory of the buffer, at its offset in the message.
//!
//! Invariants: each slot is in one place of one RECV; the slots have no other user until the QP is
//! destroyed; the place of a slot changes only while the RECV of its buffer is not posted.
//!
//! [`ReceiveBuffers::exchange`]: super::receive::ReceiveBuffers::exchange

use std::sync::Arc;

use rblk_fabric::{MAX_SGE, MemoryRegion, Region, Sge, SgeList};
use rblk_protocol::width::{const_u32, narrow, wide, wide64};
use rblk_protocol::{Features, HelloAccept};

use crate::cache::SLOT_BYTES;

const SLOT_LEN: u32 = const_u32(SLOT_BYTES);

/// Number of slots that a RECV may name: one for each write of one block that a message can have. 0
/// if data in front is not agreed, if data is never a block, or if the slots would need more pieces
/// than a RECV of the device has.
#[must_use]
pub fn slots_of_recv(accept: &HelloAccept, device_sges: u32) -> u32 {
    let is_block = accept.in_capsule_bytes == SLOT_LEN;
    let slots = accept.message_data_bytes() / SLOT_LEN;
    // One more piece for the memory behind the slots.
    let pieces = device_sges.min(narrow(MAX_SGE));
    if accept.features.has(Features::DATA_FIRST) && is_block && slots < pieces { slots } else { 0 }
}

/// The slots of a connection, which its RECVs name. See the module.
#[derive(Debug)]
pub(crate) struct Landing {
    arena: Arc<MemoryRegion>,
    // The arena's region, and the address of its first byte.
    region: Arc<Region>,
    base: u64,
    // Bytes of a message that land in slots.
    bytes: usize,
    // The slots, until they are in the RECVs.
    slots: Box<[usize]>,
}

impl Landing {
    /// Slots of an arena, given by their offsets: `each` for every receive buffer, one buffer after
    /// the other.
    pub(crate) fn new(arena: Arc<MemoryRegion>, slots: Box<[usize]>, each: u32) -> Self {
        let first = arena.sge(0, 0).unwrap_or_else(|| unreachable!("no bytes fit any region"));
        let region = Arc::clone(arena.region());
        Self { arena, region, base: first.addr, bytes: wide(each) * SLOT_BYTES, slots }
    }

    /// The SGEs of a buffer's RECV: its slots, and behind them the rest of its own memory. `None`:
    /// too few slots, or the memory is too short.
    pub(super) fn places(&self, buffer: u16, own: Sge) -> Option<SgeList> {
        let each = self.bytes / SLOT_BYTES;
        let mut list = SgeList::default();
        for offset in self.slots.get(wide(buffer) * each..)?.get(..each)? {
            if !list.push(self.arena.sge(*offset, SLOT_LEN)?) {
                return None;
            }
        }
        let (addr, len) = (own.addr + wide64(self.bytes), own.len.checked_sub(narrow(self.bytes))?);
        list.push(Sge { addr, len, ..own }).then_some(list)
    }

    /// The region of the slots.
    #[inline(always)]
    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// Bytes of a message that land in slots.
    #[inline(always)]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Offset in the arena of a byte of a message. `None`: the byte is behind the slots.
    #[inline(always)]
    pub(super) fn offset(&self, recv: &SgeList, at: usize) -> Option<usize> {
        if at >= self.bytes {
            return None;
        }
        let slot = recv.entry(at / SLOT_BYTES)?;
        Some(self.of(slot) + at % SLOT_BYTES)
    }

    /// Puts the slot with this offset into a place of a RECV.
    #[inline(always)]
    pub(super) fn put(&self, place: &mut Sge, offset: usize) {
        place.addr = self.base + wide64(offset);
    }

    /// The slots of a RECV, by their offsets in the arena.
    pub(super) fn slots_of<'a>(&'a self, recv: &'a SgeList) -> impl Iterator<Item = usize> + 'a {
        recv.as_slice().iter().take(self.bytes / SLOT_BYTES).map(|slot| self.of(slot))
    }

    #[inline(always)]
    fn of(&self, slot: &Sge) -> usize {
        wide(slot.addr - self.base)
    }
}
