//! [`Request`] and its result: [`Completion`], or [`Refused`] for an invalid request.

use std::io;

use rblk_protocol::{BlockSize, Status};

use super::Buffer;
use crate::engine::io::{Io, IoOp};

/// A request. It owns its buffer until its [`Completion`] gives it back.
#[derive(Debug)]
pub struct Request {
    op: IoOp,
    offset: u64,
    len: u64,
    buffer: Option<Buffer>,
    durable: bool,
    may_unmap: bool,
    token: u64,
}

impl Request {
    fn new(op: IoOp, offset: u64, len: u64, buffer: Option<Buffer>) -> Self {
        Self { op, offset, len, buffer, durable: false, may_unmap: true, token: 0 }
    }

    /// Reads `len` bytes from byte `offset` of the volume to the start of a buffer.
    #[must_use]
    pub fn read(buffer: Buffer, offset: u64, len: usize) -> Self {
        Self::new(IoOp::Read, offset, len as u64, Some(buffer))
    }

    /// Writes `len` bytes at the start of a buffer to byte `offset` of the volume.
    #[must_use]
    pub fn write(buffer: Buffer, offset: u64, len: usize) -> Self {
        Self::new(IoOp::Write, offset, len as u64, Some(buffer))
    }

    /// Makes durable every write, of any queue of the volume, that was completed before this is
    /// submitted.
    #[must_use]
    pub fn flush() -> Self {
        Self::new(IoOp::Flush, 0, 0, None)
    }

    /// Discards a range: its data is not needed any more.
    #[must_use]
    pub fn discard(offset: u64, len: u64) -> Self {
        Self::new(IoOp::Discard, offset, len, None)
    }

    /// Zeroes a range. The store may give its space back.
    #[must_use]
    pub fn write_zeroes(offset: u64, len: u64) -> Self {
        Self::new(IoOp::WriteZeroes, offset, len, None)
    }

    /// A write that is durable when it is completed. Without effect on other requests.
    #[must_use]
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// Keeps the space of a zeroed range allocated. Without effect on other requests.
    #[must_use]
    pub fn keep_allocated(mut self) -> Self {
        self.may_unmap = false;
        self
    }

    /// A number that the [`Completion`] repeats.
    #[must_use]
    pub fn with_token(mut self, token: u64) -> Self {
        self.token = token;
        self
    }

    /// Returns the buffer, if the request has one.
    #[must_use]
    pub fn into_buffer(self) -> Option<Buffer> {
        self.buffer
    }

    /// The number that the completion repeats.
    #[must_use]
    pub fn token(&self) -> u64 {
        self.token
    }

    /// The buffer.
    pub(super) fn buffer(&self) -> Option<&Buffer> {
        self.buffer.as_ref()
    }

    /// The request in the engine's form.
    pub(super) fn to_io(&self, block_size: BlockSize, data_max: usize) -> Result<Io, Reason> {
        let (offset, len) = (self.offset, self.len);
        if self.buffer.is_some() && len > data_max as u64 {
            return Err(Reason::TooLong { len, most: data_max });
        }
        let not_whole = Reason::NotWholeBlocks { offset, len, block: block_size.bytes() };
        let mut io = Io::new(self.op, offset, len, block_size).ok_or(not_whole)?;
        if len == 0 && self.op != IoOp::Flush {
            return Err(Reason::Empty);
        }
        io.fua = self.durable;
        io.may_unmap = self.may_unmap;
        Ok(io)
    }
}

/// The end of a request.
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion {
    /// The number of the request.
    pub token: u64,
    /// Bytes read or written, 0 for requests without data; or the error.
    pub result: Result<usize, IoError>,
    /// The buffer of a read or a write. No device touches it any more.
    pub buffer: Option<Buffer>,
}

impl Completion {
    /// The completion of a request: bytes moved, or a negative errno.
    pub(super) fn of(token: u64, buffer: Option<Buffer>, result: i32) -> Self {
        let result = usize::try_from(result).map_err(|_| IoError(result.saturating_neg()));
        Self { token, result, buffer }
    }
}

/// The error of a request, as the errno that a disk would give.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{}", io::Error::from_raw_os_error(*.0))]
pub struct IoError(i32);

impl IoError {
    /// The errno.
    #[must_use]
    pub fn errno(self) -> i32 {
        self.0
    }

    /// Whether another host has the volume now: every request fails, permanently.
    #[must_use]
    pub fn is_fenced(self) -> bool {
        self.0 == Status::Fenced.errno()
    }
}

impl From<IoError> for io::Error {
    fn from(error: IoError) -> Self {
        Self::from_raw_os_error(error.0)
    }
}

/// A request that was not submitted. It comes back whole.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
#[non_exhaustive]
pub struct Refused {
    /// The request.
    pub request: Request,
    /// The reason.
    pub reason: Reason,
}

/// The reason why a request was not submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The queue is full.
    #[error(
        "the queue has {depth} requests under way, its depth: take completions by poll or wait first"
    )]
    Full {
        /// The depth of the queue.
        depth: u16,
    },
    /// The range is not whole blocks of the volume, or exceeds the largest volume.
    #[error("{len} bytes from byte {offset} are not whole blocks of {block} bytes")]
    NotWholeBlocks {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of a block.
        block: u32,
    },
    /// The data does not fit a buffer.
    #[error(
        "{len} bytes are more than a request moves, which is {most}: split it, or raise max_io"
    )]
    TooLong {
        /// Bytes.
        len: u64,
        /// The limit.
        most: usize,
    },
    /// The range has no bytes.
    #[error("a range of 0 bytes: only a flush has no range")]
    Empty,
    /// The buffer is another queue's.
    #[error(
        "the buffer belongs to another queue: take buffers from the queue that gets the request"
    )]
    ForeignBuffer,
}
