//! [`Io`]: a block request as the engine takes it, independent of its source.

use rblk_protocol::{BlockCount, BlockSize, CommandFlags, Lba, Opcode};

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IoOp {
    /// Volume to buffer.
    Read,
    /// Buffer to volume.
    Write,
    /// Make acknowledged writes durable.
    Flush,
    /// Forget a range.
    Discard,
    /// Zero a range.
    WriteZeroes,
}

/// One request. The data, if any, is in the tag's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Io {
    /// The operation.
    pub op: IoOp,
    /// First block; 0 for FLUSH.
    pub lba: Lba,
    /// Blocks; 0 for FLUSH.
    pub count: BlockCount,
    /// Bytes of data: those of the range for READ and WRITE, else 0.
    pub data_bytes: u32,
    /// WRITE: durable when answered.
    pub fua: bool,
    /// WRITE_ZEROES: the range may be given back.
    pub may_unmap: bool,
}

impl Io {
    /// Converts a range in bytes. `None` when it is not whole blocks, or its data does not fit 32
    /// bits.
    #[must_use]
    pub fn new(op: IoOp, offset_bytes: u64, len_bytes: u64, block_size: BlockSize) -> Option<Self> {
        let has_data = matches!(op, IoOp::Read | IoOp::Write);
        Some(Self {
            op,
            lba: Lba(block_size.blocks_in(offset_bytes)?.0),
            count: block_size.blocks_in(len_bytes)?,
            data_bytes: if has_data { u32::try_from(len_bytes).ok()? } else { 0 },
            fua: false,
            may_unmap: false,
        })
    }

    /// The command's opcode.
    #[must_use]
    pub(crate) fn opcode(&self) -> Opcode {
        match self.op {
            IoOp::Read => Opcode::Read,
            IoOp::Write => Opcode::Write,
            IoOp::Flush => Opcode::Flush,
            IoOp::Discard => Opcode::Discard,
            IoOp::WriteZeroes => Opcode::WriteZeroes,
        }
    }

    /// The command's flags.
    #[must_use]
    pub(crate) fn flags(&self) -> CommandFlags {
        CommandFlags {
            fua: self.fua && self.op == IoOp::Write,
            may_unmap: self.may_unmap && self.op == IoOp::WriteZeroes,
            digest: false,
        }
    }
}
