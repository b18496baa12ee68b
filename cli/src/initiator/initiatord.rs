//! The daemon of `rblk-initiator`.

use std::path::PathBuf;

use crate::program::daemon::{self, LentDescriptors};

/// The daemon beside this program.
pub(super) fn initiatord() -> anyhow::Result<PathBuf> {
    daemon::beside("rblk-initiatord")
}

/// Replaces this process by `rblk-initiatord` with the same arguments. Returns only the failure.
pub(super) fn become_daemon(descriptors: LentDescriptors) -> anyhow::Error {
    daemon::become_daemon("rblk-initiator", "rblk-initiatord", descriptors)
}
