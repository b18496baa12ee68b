//! Descriptors of libibverbs and librdmacm, made nonblocking.

use std::os::fd::{BorrowedFd, RawFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::error::{FabricError, Result};

/// Lets a read on the descriptor end with EAGAIN when there is nothing to read.
pub(super) fn set_nonblocking(fd: RawFd) -> Result<()> {
    // SAFETY: the caller owns the object the descriptor belongs to, so it stays open during the
    // call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let fail = |e: nix::Error| FabricError::Call { call: "fcntl", source: e.into() };
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL).map_err(fail)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).map_err(fail)?;
    Ok(())
}
