//! A process that serves a disk must not wait for that disk itself: its allocations for writeback
//! (PR_SET_IO_FLUSHER, prctl(2)), its pages for swap (mlockall(2)).

use nix::sys::mman::{MlockAllFlags, mlockall};
use rblk_operate::doctor::{can_lock_memory, hard_memlock};

/// `include/uapi/linux/prctl.h`
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Marks this process for the kernel as a part of the path of block I/O. Best effort: the kernel
/// may refuse it (no CAP_SYS_RESOURCE), and the cost is a deadlock under extreme memory pressure
/// only.
pub fn become_io_flusher() {
    // SAFETY: PR_SET_IO_FLUSHER takes numbers only and changes a flag of this process.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "PR_SET_IO_FLUSHER");
    }
}

/// Keeps the pages of this process in memory, from the first use of each. The swap of the host may
/// be on the disk that this process serves, and it would wait for itself to read a page from there.
/// Nothing is locked if the memlock limit applies: a later mapping would fail because of it.
pub fn stay_in_memory() {
    if !can_lock_memory(std::path::Path::new("/")) && hard_memlock() != Some(libc::RLIM_INFINITY) {
        tracing::debug!("memory is not locked: there is a memlock limit and no CAP_IPC_LOCK");
        return;
    }
    // Without ONFAULT the kernel would fill every mapping: all stacks, all buffers.
    let on_fault = MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT);
    if let Err(error) = mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE | on_fault)
    {
        tracing::debug!(%error, "mlockall");
    }
}
