//! The scratch disk: a sparse ext4 image that no one has to delete.
//!
//! The file has no name from the start, so it is gone with this process however that ends. QEMU and
//! mkfs open it through this process's entry in /proc.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::apt;
use super::cache::Cache;

/// A formatted disk image.
#[derive(Debug)]
pub(crate) struct Disk {
    file: File,
}

impl Disk {
    /// A disk of `bytes`; none when that is zero.
    pub(crate) fn create(cache: &Cache, bytes: u64) -> Result<Option<Self>> {
        if bytes == 0 {
            return Ok(None);
        }
        let dir = cache.path("tmp");
        let file = tempfile::tempfile_in(&dir)
            .with_context(|| format!("cannot make a file in {}", dir.display()))?;
        file.set_len(bytes).with_context(|| {
            format!("cannot make a scratch disk of {bytes} bytes in {}", dir.display())
        })?;
        let disk = Disk { file };
        apt::run(
            Command::new("mkfs.ext4")
                .args([
                    "-q",
                    "-F",
                    "-L",
                    "scratch",
                    "-E",
                    "nodiscard,lazy_itable_init=1,lazy_journal_init=1",
                ])
                .arg(disk.path()),
        )
        .with_context(|| {
            format!(
                "cannot format a scratch disk of {bytes} bytes (--scratch); 16M is enough for ext4"
            )
        })?;
        Ok(Some(disk))
    }

    /// A path by which another process of this user can open the disk while this one lives.
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }
}
