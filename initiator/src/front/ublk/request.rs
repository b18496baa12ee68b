//! [`BlockRequest`]: a request of the block layer, parsed from the driver's descriptor.

use super::abi::{self, IoDesc};

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockOp {
    /// Fill the tag's buffer from the disk. Completes with bytes read.
    Read,
    /// Put the tag's buffer (already filled by the driver) on the disk. Completes with bytes
    /// written.
    Write,
    /// Make every write completed before durable. No range. Completes with 0.
    Flush,
    /// Discard the range. Completes with 0.
    Discard,
    /// Zero the range. Completes with 0.
    WriteZeroes,
}

impl BlockOp {
    /// The request's data is in, or goes to, the tag's buffer.
    #[inline]
    #[must_use]
    pub(crate) fn has_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

/// The flags of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct BlockFlags(u32);

impl BlockFlags {
    /// Durable when completed.
    #[inline]
    #[must_use]
    pub(crate) fn fua(self) -> bool {
        self.0 & abi::REQ_FUA != 0
    }

    /// Write-zeroes must keep the range allocated.
    #[inline]
    #[must_use]
    pub(crate) fn no_unmap(self) -> bool {
        self.0 & abi::REQ_NOUNMAP != 0
    }
}

/// The place of a request's data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DataAt {
    /// In the tag's buffer.
    Buffer,
    /// In memory that was [registered](super::Device::share), without a copy.
    Shared {
        /// The index of the memory.
        index: u16,
        /// The offset of the first byte.
        offset: u32,
    },
}

/// One request. A request with data is at least a sector and fits the tag's buffer; a range does
/// not wrap. Whether it lies on the disk is for the volume to check.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockRequest {
    /// The operation.
    pub op: BlockOp,
    /// The flags.
    pub flags: BlockFlags,
    /// First sector of 512 bytes.
    pub start_sector: u64,
    /// Sectors of 512 bytes; 0 for a flush.
    pub sectors: u32,
    /// The place of its data, if it has any.
    pub data: DataAt,
}

/// The reason why a descriptor is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum BadRequest {
    /// An operation that this server never offered.
    #[error("unknown operation {0}")]
    UnknownOp(u8),
    /// Data that does not fit the tag's buffer, or none at all.
    #[error("{sectors} sectors of data do not fit the buffer")]
    DataLength {
        /// Length in the descriptor.
        sectors: u32,
    },
    /// Data in memory that is not registered, or behind its end.
    #[error("data at {address:#x} of shared memory")]
    SharedMemory {
        /// Index and offset in the descriptor.
        address: u64,
    },
    /// A range that ends beyond 64 bits of bytes.
    #[error("sectors {start}+{sectors} are no range")]
    Range {
        /// First sector.
        start: u64,
        /// Length.
        sectors: u32,
    },
}

impl BadRequest {
    /// The (positive) errno the request is completed with.
    #[must_use]
    pub(crate) fn errno(self) -> i32 {
        match self {
            Self::UnknownOp(_) => libc::EOPNOTSUPP,
            Self::DataLength { .. } | Self::Range { .. } => libc::EINVAL,
            Self::SharedMemory { .. } => libc::EIO,
        }
    }
}

impl BlockRequest {
    /// Parses a descriptor for a tag with a buffer of `max_io_bytes`. `shared` has the bytes of
    /// each registered memory.
    ///
    /// # Errors
    /// The descriptor breaks a rule of [`BlockRequest`].
    #[inline]
    pub(crate) fn parse(
        desc: &IoDesc,
        max_io_bytes: u32,
        shared: &[u64],
    ) -> Result<Self, BadRequest> {
        let sectors = desc.nr_sectors;
        let op = match desc.op_flags.to_le_bytes()[0] {
            abi::OP_READ => BlockOp::Read,
            abi::OP_WRITE => BlockOp::Write,
            abi::OP_FLUSH => {
                let flags = BlockFlags(desc.op_flags);
                let (op, data) = (BlockOp::Flush, DataAt::Buffer);
                return Ok(Self { op, flags, start_sector: 0, sectors: 0, data });
            }
            abi::OP_DISCARD => BlockOp::Discard,
            abi::OP_WRITE_ZEROES => BlockOp::WriteZeroes,
            other => return Err(BadRequest::UnknownOp(other)),
        };
        if sectors == 0 || (op.has_data() && sectors > max_io_bytes >> abi::SECTOR_SHIFT) {
            return Err(BadRequest::DataLength { sectors });
        }
        match desc.start_sector.checked_add(sectors.into()) {
            Some(end) if end <= u64::MAX >> abi::SECTOR_SHIFT => {}
            _ => return Err(BadRequest::Range { start: desc.start_sector, sectors }),
        }
        let data = match op.has_data() && desc.op_flags & abi::IO_SHMEM_ZC != 0 {
            true => shared_data(desc.addr, sectors, shared)?,
            false => DataAt::Buffer,
        };
        let (flags, start_sector) = (BlockFlags(desc.op_flags), desc.start_sector);
        Ok(Self { op, flags, start_sector, sectors, data })
    }

    /// Length of the data in the tag's buffer; 0 when there is none.
    #[inline]
    #[must_use]
    pub fn data_len(&self) -> u32 {
        // At most the buffer's size, by `parse`, which is far below the range of the shift.
        if self.op.has_data() { self.sectors << abi::SECTOR_SHIFT } else { 0 }
    }
}

/// Where data in shared memory is. All of it is inside the memory.
fn shared_data(address: u64, sectors: u32, shared: &[u64]) -> Result<DataAt, BadRequest> {
    let [low @ .., _, _, _, _] = address.to_le_bytes();
    let offset = u32::from_le_bytes(low);
    let inside = u16::try_from(address >> abi::SHMEM_INDEX_SHIFT).ok().filter(|index| {
        let end = u64::from(offset) + (u64::from(sectors) << abi::SECTOR_SHIFT);
        shared.get(usize::from(*index)).is_some_and(|len| end <= *len)
    });
    let index = inside.ok_or(BadRequest::SharedMemory { address })?;
    Ok(DataAt::Shared { index, offset })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u32 = 1 << 20;

    fn desc(op_flags: u32, start_sector: u64, nr_sectors: u32) -> IoDesc {
        IoDesc { op_flags, nr_sectors, start_sector, addr: 0 }
    }

    #[test]
    fn operations_and_flags() {
        let write = BlockRequest::parse(&desc(1 | 1 << 13, 8, 2048), MIB, &[]).unwrap();
        assert_eq!((write.op, write.start_sector, write.sectors), (BlockOp::Write, 8, 2048));
        assert_eq!(write.data_len(), MIB);
        assert!(write.flags.fua() && !write.flags.no_unmap());

        let zeroes = BlockRequest::parse(&desc(5 | 1 << 15, 0, u32::MAX), MIB, &[]).unwrap();
        assert!(zeroes.flags.no_unmap() && !zeroes.flags.fua());
        assert_eq!((zeroes.sectors, zeroes.data_len()), (u32::MAX, 0));

        // A flush has no range, even if its descriptor has one.
        let flush = BlockRequest::parse(&desc(2, u64::MAX, 99), MIB, &[]).unwrap();
        assert_eq!((flush.op, flush.start_sector, flush.sectors), (BlockOp::Flush, 0, 0));
        // An irrelevant flag: fail fast.
        let read = BlockRequest::parse(&desc(1 << 9, 1, 1), MIB, &[]).unwrap();
        assert!(read.op == BlockOp::Read && !read.flags.fua() && !read.flags.no_unmap());
    }

    #[test]
    fn garbage_is_an_error_with_an_errno() {
        for op in [4, 6, 10, 15, 18, 36, 255] {
            let error = BlockRequest::parse(&desc(op, 0, 8), MIB, &[]).unwrap_err();
            assert_eq!(error.errno(), libc::EOPNOTSUPP, "{error}");
        }
        for (start, sectors) in [(0, 0), (0, 2049), (0, u32::MAX)] {
            let error = BlockRequest::parse(&desc(0, start, sectors), MIB, &[]).unwrap_err();
            assert_eq!(error, BadRequest::DataLength { sectors });
        }
        for start in [u64::MAX, u64::MAX >> 9, (u64::MAX >> 9) - 7] {
            let error = BlockRequest::parse(&desc(3, start, 8), MIB, &[]).unwrap_err();
            assert_eq!(error.errno(), libc::EINVAL, "{error}");
        }
        assert!(BlockRequest::parse(&desc(3, (u64::MAX >> 9) - 8, 8), MIB, &[]).is_ok());
    }

    #[test]
    fn data_in_shared_memory_is_inside_of_it() {
        let parse = |op_flags, addr, sectors, shared: &[u64]| {
            let desc = IoDesc { op_flags, nr_sectors: sectors, start_sector: 0, addr };
            BlockRequest::parse(&desc, MIB, shared).map(|request| request.data)
        };
        let (shared, write) = ([8192, 4 << 30], 1 | 1 << 19);
        assert_eq!(parse(write, 4096, 8, &shared), Ok(DataAt::Shared { index: 0, offset: 4096 }));
        let last = (1 << 32) | ((4 << 30) - 512);
        let offset = u32::MAX - 511;
        assert_eq!(parse(1 << 19, last, 1, &shared), Ok(DataAt::Shared { index: 1, offset }));
        // Without the flag, and without data, the address is ignored.
        assert_eq!(parse(1, 4096, 8, &shared), Ok(DataAt::Buffer));
        assert_eq!(parse(3 | 1 << 19, u64::MAX, 8, &shared), Ok(DataAt::Buffer));
        let bad = [(4096, 9), (8192, 1), (last, 2), (2 << 32, 1), (1 << 48, 1), (u64::MAX, 1)];
        for (address, sectors) in bad {
            let error = parse(write, address, sectors, &shared).unwrap_err();
            assert_eq!(error, BadRequest::SharedMemory { address });
            assert_eq!(error.errno(), libc::EIO);
        }
        assert!(parse(write, 0, 1, &[]).is_err());
        // An earlier process registered this memory, and this one cannot use it.
        assert!(parse(write, 0, 1, &[0]).is_err());
    }

    proptest! {
        #[test]
        fn any_descriptor_parses_or_is_refused(op: u32, start: u64, sectors: u32, max in 4096_u32..=1 << 25) {
            if let Ok(request) = BlockRequest::parse(&desc(op, start, sectors), max, &[]) {
                prop_assert!(request.data_len() <= max);
                let end = request.start_sector.checked_add(request.sectors.into());
                prop_assert!(end.is_some_and(|end| end.checked_mul(512).is_some()));
            }
        }
    }
}
