//! The construction of a ring: [`UringOptions`], the flags of the two kinds of rings, and
//! [`Warning`], a missing optional feature.

use std::io;
use std::ops::Range;

use io_uring::IoUring;
use nix::errno::Errno;

/// Limit of a store's ops; the ring then has 32768 entries, the kernel's limit.
pub const MAX_CAPACITY: u32 = 16384;

/// Settings of a [`UringStore`](super::UringStore).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UringOptions {
    /// Ops that can be in flight, at most [`MAX_CAPACITY`].
    pub capacity: u32,
    /// Places for volumes. Each place costs one of the descriptors that `RLIMIT_NOFILE` allows.
    pub volumes: u16,
    /// Bytes of the region to register as fixed buffers; all of it when `None`. I/O elsewhere in
    /// the region works, a little slower.
    pub registered: Option<Range<usize>>,
}

impl Default for UringOptions {
    /// 1024 ops, 64 volumes, all of the region.
    fn default() -> Self {
        Self { capacity: 1024, volumes: 64, registered: None }
    }
}

/// A missing feature that the store can do without.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// The kernel refused to register the region.
    #[error(
        "cannot register {bytes} bytes of memory with io_uring ({errno}); I/O works, but maps its memory every time; \
         raise LimitMEMLOCK (ulimit -l)"
    )]
    PlainBuffers {
        /// Bytes to register.
        bytes: usize,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel is older than 6.1.
    #[error(
        "the kernel has no IORING_SETUP_DEFER_TASKRUN (Linux 6.1); completions may interrupt the data thread"
    )]
    NoDeferredCompletions,
}

/// Completions wait until this thread asks for them: Linux 6.1.
pub(super) fn deferred(entries: u32) -> io::Result<IoUring> {
    IoUring::builder()
        .setup_r_disabled()
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(entries)
}

/// Completions wait until this thread enters the kernel for any reason: Linux 5.19.
pub(in crate::store) fn cooperative(entries: u32) -> io::Result<IoUring> {
    IoUring::builder()
        .setup_r_disabled()
        .setup_submit_all()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .build(entries)
}

/// Registers an empty table for `volumes` files.
pub(super) fn register_file_table(ring: &IoUring, volumes: u16) -> io::Result<()> {
    if volumes == 0 {
        return Ok(());
    }
    ring.submitter().register_files_sparse(volumes.into())
}
