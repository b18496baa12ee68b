//! [`BlockRequest`]: a request of the block layer, parsed from the driver's descriptor.

use super::abi::{self, IoDesc};

/// What to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockOp {
    /// Fill the tag's buffer from the disk. Completes with bytes read.
    Read,
    /// Put the tag's buffer (already filled by the driver) on the disk. Completes with bytes
    /// written.
    Write,
    /// Make every write completed before durable. No range. Completes with 0.
    Flush,
    /// The range is not needed any more. Completes with 0.
    Discard,
    /// The range reads as zeroes from now on. Completes with 0.
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

/// How to do it.
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

/// One request. A request with data is at least a sector and fits the tag's buffer; a range does
/// not wrap. Whether it lies on the disk is for the volume to check.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockRequest {
    /// What to do.
    pub op: BlockOp,
    /// How.
    pub flags: BlockFlags,
    /// First sector of 512 bytes.
    pub start_sector: u64,
    /// Sectors of 512 bytes; 0 for a flush.
    pub sectors: u32,
}

/// Why a descriptor is not a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum BadRequest {
    /// An operation this server never offered.
    #[error("unknown operation {0}")]
    UnknownOp(u8),
    /// Data that does not fit the tag's buffer, or none at all.
    #[error("{sectors} sectors of data do not fit the buffer")]
    DataLength {
        /// Length in the descriptor.
        sectors: u32,
    },
    /// A range whose end is beyond 64 bits of bytes.
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
        }
    }
}

impl BlockRequest {
    /// Parses a descriptor for a tag with a buffer of `max_io_bytes`.
    ///
    /// # Errors
    /// The descriptor breaks a rule of [`BlockRequest`].
    #[inline]
    pub(crate) fn parse(desc: &IoDesc, max_io_bytes: u32) -> Result<Self, BadRequest> {
        let sectors = desc.nr_sectors;
        let op = match desc.op_flags.to_le_bytes()[0] {
            abi::OP_READ => BlockOp::Read,
            abi::OP_WRITE => BlockOp::Write,
            abi::OP_FLUSH => {
                let flags = BlockFlags(desc.op_flags);
                return Ok(Self { op: BlockOp::Flush, flags, start_sector: 0, sectors: 0 });
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
        Ok(Self { op, flags: BlockFlags(desc.op_flags), start_sector: desc.start_sector, sectors })
    }

    /// Length of the data in the tag's buffer; 0 when there is none.
    #[inline]
    #[must_use]
    pub fn data_len(&self) -> u32 {
        // At most the buffer's size, by `parse`, which is far below the range of the shift.
        if self.op.has_data() { self.sectors << abi::SECTOR_SHIFT } else { 0 }
    }
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
        let write = BlockRequest::parse(&desc(1 | 1 << 13, 8, 2048), MIB).unwrap();
        assert_eq!((write.op, write.start_sector, write.sectors), (BlockOp::Write, 8, 2048));
        assert_eq!(write.data_len(), MIB);
        assert!(write.flags.fua() && !write.flags.no_unmap());

        let zeroes = BlockRequest::parse(&desc(5 | 1 << 15, 0, u32::MAX), MIB).unwrap();
        assert!(zeroes.flags.no_unmap() && !zeroes.flags.fua());
        assert_eq!((zeroes.sectors, zeroes.data_len()), (u32::MAX, 0));

        // A flush has no range, whatever the descriptor says.
        let flush = BlockRequest::parse(&desc(2, u64::MAX, 99), MIB).unwrap();
        assert_eq!((flush.op, flush.start_sector, flush.sectors), (BlockOp::Flush, 0, 0));
        // A flag that says nothing here: fail fast.
        let read = BlockRequest::parse(&desc(1 << 9, 1, 1), MIB).unwrap();
        assert!(read.op == BlockOp::Read && !read.flags.fua() && !read.flags.no_unmap());
    }

    #[test]
    fn garbage_is_an_error_with_an_errno() {
        for op in [4, 6, 10, 15, 18, 36, 255] {
            let error = BlockRequest::parse(&desc(op, 0, 8), MIB).unwrap_err();
            assert_eq!(error.errno(), libc::EOPNOTSUPP, "{error}");
        }
        for (start, sectors) in [(0, 0), (0, 2049), (0, u32::MAX)] {
            let error = BlockRequest::parse(&desc(0, start, sectors), MIB).unwrap_err();
            assert_eq!(error, BadRequest::DataLength { sectors });
        }
        for start in [u64::MAX, u64::MAX >> 9, (u64::MAX >> 9) - 7] {
            let error = BlockRequest::parse(&desc(3, start, 8), MIB).unwrap_err();
            assert_eq!(error.errno(), libc::EINVAL, "{error}");
        }
        assert!(BlockRequest::parse(&desc(3, (u64::MAX >> 9) - 8, 8), MIB).is_ok());
    }

    proptest! {
        #[test]
        fn any_descriptor_parses_or_is_refused(op: u32, start: u64, sectors: u32, max in 4096_u32..=1 << 25) {
            if let Ok(request) = BlockRequest::parse(&desc(op, start, sectors), max) {
                prop_assert!(request.data_len() <= max);
                let end = request.start_sector.checked_add(request.sectors.into());
                prop_assert!(end.is_some_and(|end| end.checked_mul(512).is_some()));
            }
        }
    }
}
