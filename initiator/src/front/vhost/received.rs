//! [`receive`]: bytes of a socket, and the descriptors sent with them.
//!
//! The descriptors that the kernel has made get an owner, even if it could not make all that were
//! sent (`EMFILE`). `cmsgs` of nix refuses a message that was cut like this, and leaks the
//! descriptors.

use std::fs::File;
use std::mem::{size_of_val, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

/// Words of memory for the control message: a header, and descriptors, of which the kernel sends at
/// most 253 (`SCM_MAX_FD`) at once.
const CONTROL_WORDS: usize = 2 + 127;

/// The result of a receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    pub(super) bytes: usize,
    /// The message had more descriptors than this process can have.
    pub(super) cut: bool,
}

/// Receives the available bytes without waiting. Descriptors are added to `files`, even after an
/// error.
///
/// # Errors
/// The system's.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    files: &mut Vec<File>,
) -> nix::Result<Received> {
    let mut control = [0u64; CONTROL_WORDS];
    let mut bytes = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: numbers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut bytes, 1);
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes within `into` and `control`, which outlive the call.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let received = Errno::result(received)?;
    // SAFETY: the kernel has filled `message`, and `control` lives.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: a header inside of `control` that the kernel has written, or null.
    while let Some(header) = unsafe { next.as_ref() } {
        if (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: its data follow a header.
            let data = unsafe { libc::CMSG_DATA(next) }.cast::<RawFd>();
            let len = header.cmsg_len.saturating_sub(data as usize - next as usize);
            for at in 0..len / size_of::<RawFd>() {
                // SAFETY: the kernel has written `len` bytes of numbers there, and made these
                // descriptors for this message, so they have no other owner.
                files.push(File::from(unsafe {
                    OwnedFd::from_raw_fd(data.add(at).read_unaligned())
                }));
            }
        }
        // SAFETY: as for the first.
        next = unsafe { libc::CMSG_NXTHDR(&raw const message, next) };
    }
    let cut = message.msg_flags & libc::MSG_CTRUNC != 0;
    Ok(Received { bytes: usize::try_from(received).unwrap_or_default(), cut })
}
