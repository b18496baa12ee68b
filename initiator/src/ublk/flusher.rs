//! PR_SET_IO_FLUSHER: our own allocations must not wait for writeback to our own device (prctl(2)).

/// `include/uapi/linux/prctl.h`
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Tells the kernel that this process is part of the path of block I/O. Best effort: the kernel may
/// refuse it (no CAP_SYS_RESOURCE), and the cost is a deadlock under extreme memory pressure only.
pub fn become_io_flusher() {
    // SAFETY: PR_SET_IO_FLUSHER takes numbers only and changes a flag of this process.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "PR_SET_IO_FLUSHER");
    }
}
