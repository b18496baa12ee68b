//! The io_uring of a queue: how it is made, and what the kernel made of it.

use std::io;

use io_uring::IoUring;

use super::MAX_WATCHES;
use crate::ublk::error::{Result, UblkError};

/// How the kernel runs this ring's completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RingMode {
    /// In this thread's turns only (DEFER_TASKRUN): the normal way, from 6.1 on.
    Deferred,
    /// In any of this thread's system calls (COOP_TASKRUN): where the other is refused.
    Cooperative,
}

/// Builds the ring: completions only in this thread's turns where the kernel can, and a flag in
/// shared memory when there are some. Without that flag a turn that does not wait would see none,
/// ever.
///
/// `commands` are those queued at a time besides the watches', `outstanding` those that may
/// complete.
pub(super) fn build(commands: u16, outstanding: u16) -> Result<(IoUring, RingMode)> {
    let watches = 2 * u32::from(MAX_WATCHES);
    let entries = u32::from(commands) + watches;
    // Every command completes once, a watch any number of times: room for several rounds of
    // watches, and the kernel keeps what does not fit (NODROP).
    let completions = (2 * (u32::from(outstanding) + watches)).next_power_of_two().max(256);
    let refused = |source: io::Error| match source.raw_os_error() {
        Some(libc::EPERM | libc::ENOSYS) => UblkError::NoIoUring { source },
        _ => UblkError::system("making an io_uring for a ublk queue", source),
    };
    let deferred = IoUring::builder()
        .setup_cqsize(completions)
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(entries);
    let (ring, mode) = match deferred {
        Ok(ring) => (ring, RingMode::Deferred),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let ring = IoUring::builder()
                .setup_cqsize(completions)
                .setup_submit_all()
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .build(entries)
                .map_err(refused)?;
            (ring, RingMode::Cooperative)
        }
        Err(e) => return Err(refused(e)),
    };
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        let source = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        return Err(UblkError::system("io_uring without EXT_ARG and NODROP", source));
    }
    Ok((ring, mode))
}
