//! [`close_lent_on_exec`]: descriptors that a caller lent to a command, and that a daemon must not
//! keep.
//!
//! A script that holds a lock, a session of ssh or a shell with a process substitution has
//! descriptors open that each of its commands inherits. A daemon that kept them would hold the
//! lock, the pipe or the file system for as long as the daemon lives.

use std::io;

/// The first that is not standard input, output or error.
const FIRST: libc::c_uint = 3;

/// No program that this process starts or becomes gets another descriptor of its own than the
/// standard three, but those that are passed on from here on purpose. Descriptors stay open in this
/// process.
///
/// # Errors
/// The kernel is older than 5.11, or does not allow it.
pub fn close_lent_on_exec() -> io::Result<()> {
    let (first, last, flags) = (FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
    // SAFETY: the call takes numbers only, and sets a flag of descriptors without closing one.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
