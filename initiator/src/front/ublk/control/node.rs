//! The nodes of a device in `/dev`, and the wait for them. A node of the right name is the device's
//! own only if it has its number.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::POLL_STEP;
use crate::front::ublk::error::{Result, UblkError};

/// `/dev/ublkcN`.
#[must_use]
pub(crate) fn char_path(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkc{id}"))
}

/// `/dev/ublkbN`.
#[must_use]
pub fn disk_path(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// The kernel's sequence number of the disk of a device: no other disk gets it until the next boot.
/// `None` if there is no disk.
pub(crate) fn disk_sequence(id: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/sys/block/ublkb{id}/diskseq")).ok()?;
    text.trim().parse().ok()
}

/// Polls for a device node with the right number: the stale node of an earlier device does not
/// count.
pub(super) fn wait_node(path: &Path, (major, minor): (u32, u32), deadline: Duration) -> Result<()> {
    let begin = Instant::now();
    loop {
        if let Ok(meta) = std::fs::metadata(path) {
            let kind = meta.file_type();
            let device = kind.is_char_device() || kind.is_block_device();
            if device && meta.rdev() == libc::makedev(major, minor) {
                return Ok(());
            }
        }
        if begin.elapsed() >= deadline {
            let path = path.to_owned();
            return Err(UblkError::NoNode { path, major, minor, waited: deadline });
        }
        std::thread::sleep(POLL_STEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_never_comes_is_reported() {
        let error =
            wait_node(Path::new("/dev/null"), (7, 7), Duration::from_millis(1)).unwrap_err();
        assert!(error.to_string().contains("7:7"), "{error}");
        wait_node(Path::new("/dev/null"), (1, 3), Duration::ZERO).unwrap();
    }
}
