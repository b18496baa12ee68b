//! [`Attachment`]: distinguishes the attachments of one disk within a boot of the machine.
//!
//! When a disk is detached, such as by a logout of iSCSI, the kernel drops the pages that it had
//! not written, and tells nobody who opens the disk later. The kernel counts attachments
//! (`diskseq`, Documentation/ABI/testing/sysfs-block, since Linux 5.15).

use std::fs;
use std::path::Path;

use nix::sys::stat::{major, minor};

/// One attachment of the disk below a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attachment(pub u64);

impl Attachment {
    /// The attachment of the disk with this device number now; `None` if the kernel does not count
    /// it, as for a file system without a disk of its own.
    pub(super) fn of(device: u64) -> Option<Self> {
        let directory = format!("/sys/dev/block/{}:{}", major(device), minor(device));
        Self::of_sysfs(Path::new(&directory))
    }

    // A partition has the number of its disk.
    fn of_sysfs(directory: &Path) -> Option<Self> {
        let directory = fs::canonicalize(directory).ok()?;
        let read = |of: &Path| fs::read_to_string(of.join("diskseq")).ok()?.trim().parse().ok();
        read(&directory).or_else(|| read(directory.parent()?)).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_is_attached_with_its_disk() {
        let sysfs = tempfile::tempdir().unwrap();
        let (disk, other) = (sysfs.path().join("sda"), sysfs.path().join("other/sdb"));
        fs::create_dir_all(disk.join("sda1")).unwrap();
        fs::create_dir_all(&other).unwrap();
        fs::write(disk.join("diskseq"), "17\n").unwrap();
        assert_eq!(Attachment::of_sysfs(&disk), Some(Attachment(17)));
        assert_eq!(Attachment::of_sysfs(&disk.join("sda1")), Some(Attachment(17)));
        for none in [other, sysfs.path().join("away")] {
            assert_eq!(Attachment::of_sysfs(&none), None);
        }
    }
}
