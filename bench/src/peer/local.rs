//! RAM disks of the kernel (brd): one as the floor under all remote disks, the others behind
//! targets.
//!
//! The disks are bio-based: a request is a copy in the caller, without a queue. Their contents are
//! overwritten, so a RAM disk that is in use is refused.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::loaded::Loaded;

/// RAM disks that are made when the kernel has none.
const DISKS: u32 = 4;

#[derive(Debug)]
pub(crate) struct RamDisks {
    bytes: u64,
}

impl RamDisks {
    /// Makes four of `bytes` each, or takes those that are there.
    pub(crate) fn make(modules: &Loaded, bytes: u64) -> Result<Self> {
        let (count, size) = (format!("rd_nr={DISKS}"), format!("rd_size={}", bytes >> 10));
        modules.ensure("brd", &[&count, &size])?;
        Ok(Self { bytes })
    }

    pub(crate) fn disk(&self, number: u32) -> Result<PathBuf> {
        let path = PathBuf::from(format!("/dev/ram{number}"));
        let is_disk = fs::metadata(&path).is_ok_and(|meta| meta.file_type().is_block_device());
        if !is_disk {
            bail!("there is no RAM disk {}", path.display());
        }
        must_be_unused(&path)?;
        let sectors = Path::new("/sys/block").join(format!("ram{number}/size"));
        let sectors: u64 = fs::read_to_string(sectors)?.trim().parse()?;
        if sectors * 512 < self.bytes {
            bail!("{} has {} bytes, not {}", path.display(), sectors * 512, self.bytes);
        }
        Ok(path)
    }
}

/// Fails if a disk is mounted, a part of another device, or swapped to.
pub(crate) fn must_be_unused(disk: &Path) -> Result<()> {
    // O_EXCL on a block device fails while it is in use.
    let opened = OpenOptions::new().write(true).custom_flags(nix::libc::O_EXCL).open(disk);
    opened.map(drop).with_context(|| format!("{} is in use, or is none", disk.display()))
}
