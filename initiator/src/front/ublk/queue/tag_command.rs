//! The commands of a tag: a fetch waits in the kernel for a request of its tag, and the answer to
//! the request is the tag's next fetch. Every kernel has these commands.

use io_uring::{opcode, squeue};

use super::NODE;
use crate::front::ublk::abi::{self, IoCmd};

/// The meaning of the completion of a tag's command.
pub(super) enum TagCompletion {
    /// The tag's descriptor has a request.
    Request,
    /// No more requests will come.
    Abort,
    /// The driver refused the command (errno).
    Refused(i32),
}

impl TagCompletion {
    #[inline]
    pub(super) fn from_result(result: i32) -> Self {
        match result {
            abi::IO_RES_OK => Self::Request,
            abi::IO_RES_ABORT => Self::Abort,
            other => Self::Refused(-other),
        }
    }
}

/// The first fetch of a tag. Its buffer is at `addr`.
pub(super) fn fetch(q_id: u16, tag: u16, addr: u64) -> squeue::Entry {
    command(abi::IO_FETCH_REQ, IoCmd { q_id, tag, result: 0, addr })
}

/// The answer to a tag's request, and its next fetch.
#[inline]
pub(super) fn commit(q_id: u16, tag: u16, result: i32, addr: u64) -> squeue::Entry {
    command(abi::IO_COMMIT_AND_FETCH_REQ, IoCmd { q_id, tag, result, addr })
}

#[inline]
fn command(command: u32, body: IoCmd) -> squeue::Entry {
    opcode::UringCmd16::new(NODE, command)
        .cmd(body.to_sqe_bytes())
        .build()
        .user_data(body.tag.into())
}
