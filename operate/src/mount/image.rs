//! Reads the first bytes of a new disk and looks for content that contradicts its block size.
//!
//! A process of its own reads them: if the target is lost meanwhile, that process waits, and the
//! command goes on.

use std::fs::File;
use std::io::{self, Read};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::{CannotPrint, Output};
use rblk_config::image::{HEAD_BYTES, contradiction};

use super::child::ended;
use super::mount_status::MountStatus;

/// Time limit of the process.
const WITHIN: Duration = Duration::from_secs(3);

/// A contradiction of the block size of a mount's disk, in words. `None`: there is none, the mount
/// has no disk, or the disk does not answer in time. Blocks for that time at most.
#[must_use]
pub fn elsewhere(mount: &MountStatus) -> Option<String> {
    if mount.is_of_guest() {
        return None;
    }
    let mut process = Command::new("/proc/self/exe");
    process.args(["look-at", &mount.device, &mount.size_bytes.to_string()]);
    process.arg(mount.block_size.to_string());
    process.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let (_, text) = ended(process.spawn().ok()?, WITHIN).ok()??;
    (!text.is_empty()).then_some(text)
}

/// Looks in this process, and prints the contradiction.
///
/// # Errors
/// Writing to the standard output failed.
pub fn here(disk: &str, size_bytes: u64, block_size: u32) -> Result<(), CannotPrint> {
    let found = head(disk).ok().and_then(|head| contradiction(&head, size_bytes, block_size));
    found.map_or(Ok(()), |found| Output::Table.text(found))
}

fn head(disk: &str) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    File::open(disk)?.take(HEAD_BYTES as u64).read_to_end(&mut head)?;
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_without_a_disk_is_not_looked_at() {
        let mount = MountStatus { device: "/run/vm1.sock".to_owned(), ..MountStatus::default() };
        assert_eq!(elsewhere(&mount), None);
    }
}
