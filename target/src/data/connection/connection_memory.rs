//! [`ConnectionMemory`]: the registered memory of a connection, with its layout.
//!
//! Invariant: the memory is at least as long as its layout, so every place of the layout is inside.
//! A response buffer is rewritten only for a new command with its tag. That command proves that the
//! peer has the old response, and so the whole message that carried it.

use std::sync::Arc;

use rblk_fabric::{
    Access, FabricError, MemoryRegion, PageKind, ProtectionDomain, Region, RegionError, Sge,
};
use rblk_protocol::limits::{READ_TRAILER_BYTES, RESPONSE_BYTES};
use rblk_protocol::width::{const_u32, narrow};
use rblk_protocol::{CommandCapsule, ReadTrailer, ResponseCapsule, Tag};

use super::layout::Layout;
use super::spare_memory::SpareMemory;

/// The reason why a connection gets no memory.
#[derive(Debug, thiserror::Error)]
pub enum NoMemory {
    /// The system has no memory.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The device refuses to register it.
    #[error(transparent)]
    Register(#[from] FabricError),
}

/// The memory of a connection, registered in the domain of its QP.
#[derive(Debug)]
pub struct ConnectionMemory {
    memory: MemoryRegion,
    layout: Layout,
}

impl ConnectionMemory {
    /// Allocates memory and registers it in this domain.
    ///
    /// # Errors
    /// The system has no memory, or the device refuses to register it.
    pub fn allocate(pd: &ProtectionDomain, layout: Layout) -> Result<Self, NoMemory> {
        let region = Region::allocate(layout.bytes(), PageKind::Normal)?;
        Ok(Self { memory: pd.register(&region, Access::LOCAL_WRITE)?, layout })
    }

    /// Takes long enough memory that another connection left, if there is any.
    #[must_use]
    pub fn of_spares(spares: &SpareMemory, layout: Layout) -> Option<Self> {
        Some(Self { memory: spares.take(layout.bytes())?, layout })
    }

    /// Returns the memory, for reuse.
    #[must_use]
    pub(super) fn into_registered(self) -> MemoryRegion {
        self.memory
    }

    /// The layout.
    #[must_use]
    #[inline]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The memory itself.
    #[must_use]
    #[inline]
    pub fn region(&self) -> &Arc<Region> {
        self.memory.region()
    }

    #[inline]
    fn sge(&self, offset: usize, len: u32) -> Sge {
        let sge = self.memory.sge(offset, len);
        sge.unwrap_or_else(|| unreachable!("inside the connection's memory"))
    }

    /// The whole receive buffer.
    pub(super) fn recv_sge(&self, buffer: u16) -> Sge {
        self.sge(self.layout.recv_offset(buffer), narrow(self.layout.recv_bytes()))
    }

    /// The place of a byte of a receive buffer.
    #[inline(always)]
    pub(super) fn recv_place(&self, buffer: u16, at: usize) -> (&Region, usize) {
        (self.memory.region(), self.layout.recv_offset(buffer) + at)
    }

    /// Writes a response into the response buffer of the tag `first`, behind `before` others. With
    /// a digest, if `sealed`.
    #[inline(always)]
    pub(super) fn write_response(
        &self,
        first: Tag,
        before: usize,
        response: &ResponseCapsule,
        sealed: bool,
    ) {
        let offset = self.layout.response_offset(first) + before * RESPONSE_BYTES;
        if sealed {
            self.write_sealed(offset, *response);
        } else {
            self.region().write(offset, &response.to_wire());
        }
    }

    #[inline(never)]
    fn write_sealed(&self, offset: usize, response: ResponseCapsule) {
        self.region().write(offset, &response.to_wire_sealed());
    }

    /// The first `count` responses in the response buffer of a tag.
    #[inline(always)]
    pub(super) fn responses_sge(&self, first: Tag, count: usize) -> Sge {
        self.sge(self.layout.response_offset(first), narrow(count * RESPONSE_BYTES))
    }

    /// Writes control's reply into the reply area of the tag. The reply must fit.
    pub(super) fn write_reply(&self, tag: Tag, words: &[u8]) {
        self.region().write(self.layout.reply_offset(tag), words);
    }

    /// The first bytes of the tag's reply area.
    pub(crate) fn reply_sge(&self, tag: Tag, len: u32) -> Sge {
        self.sge(self.layout.reply_offset(tag), len)
    }

    /// Writes the trailer of a READ's data, with the data's CRC, to gather behind the data.
    #[inline(always)]
    pub(crate) fn write_trailer(&self, command: &CommandCapsule, crc: u32) -> Sge {
        let at = self.layout.trailer_offset(command.tag);
        let trailer = ReadTrailer { crc, sequence: command.sequence };
        self.region().write(at, &trailer.to_wire());
        self.sge(at, const_u32(READ_TRAILER_BYTES))
    }

    /// Writes the pattern of a self-test into the scratch.
    pub(crate) fn write_scratch(&self, pattern: &[u8]) -> Sge {
        self.region().write(self.layout.scratch_offset(), pattern);
        self.scratch_sge(narrow(pattern.len()))
    }

    /// The first bytes of the scratch.
    pub(super) fn scratch_sge(&self, len: u32) -> Sge {
        self.sge(self.layout.scratch_offset(), len)
    }
}

#[cfg(test)]
mod tests {
    use rblk_fabric::Device;
    use rblk_fabric::soft::network::Network;
    use rblk_protocol::width::wide;
    use rblk_protocol::{Epoch, Opcode, QueueDepth, Sequence};

    use super::*;

    #[test]
    fn every_place_is_inside_the_memory() {
        let pd = Device::Soft(Network::new(1).device()).alloc_pd().unwrap();
        for (depth, admin) in [(16, true), (128, false)] {
            let depth = QueueDepth::new(depth).unwrap();
            let layout = Layout::new(depth, 4096, admin).with_digests(true);
            let memory = ConnectionMemory::allocate(&pd, layout).unwrap();
            let begin = memory.recv_sge(0).addr;
            let end = |sge: Sge| wide(sge.addr - begin) + wide(sge.len);
            let last = depth.connection_tag();
            let command = CommandCapsule::new(Opcode::Read, last, Epoch(1), Sequence(0));
            assert!(end(memory.recv_sge(layout.recv_buffers() - 1)) <= layout.bytes());
            assert_eq!(end(memory.write_trailer(&command, 7)), layout.bytes(), "the last place");
            assert!(layout.bytes() <= memory.region().len());
        }
    }
}
