//! [`StoreIdentity`]: distinguishes a file or device from others of the same path and size.
//!
//! A target keeps the identity from run to run. When a path leads to another store after a stop,
//! the mounts that waited must not resume: their page caches and journals belong to other data.
//!
//! | store | identity |
//! | --- | --- |
//! | file | inode number and time of birth |
//! | block device | its world-wide name, or the UUID that device-mapper gave it |
//! | partition | the identity of its disk, and the start of the partition |
//! | loop device | the identity of the file below |
//!
//! Some stores have no lasting identity: files of network and user-space file systems, where inode
//! numbers change from mount to mount, and devices without a name. rblk cannot distinguish these.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use nix::sys::stat::{major, minor};
use nix::sys::statfs::{FsType, fstatfs};

/// Longest stored identity, in bytes.
const LEN_MAX: usize = 256;
/// Magic numbers of file systems without lasting inode numbers, from linux/magic.h: 9p, FUSE, SMB,
/// CIFS.
const PASSING_INODES: [u32; 4] = [0x0102_1997, 0x6573_5546, 0xfe53_4d42, 0xff53_4d42];

/// Distinguishes one store from another. See the module.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct StoreIdentity(String);

impl StoreIdentity {
    /// Parses a stored identity; `None` for any other text.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let good = (1..=LEN_MAX).contains(&text.len()) && !text.contains(char::is_control);
        good.then(|| Self(text.to_owned()))
    }

    /// The identity of an open file, if it has one.
    pub(super) fn of_file(file: &File, metadata: &Metadata) -> Option<Self> {
        if has_passing_inode(file) {
            return None;
        }
        Self::of_inode(metadata)
    }

    fn of_inode(metadata: &Metadata) -> Option<Self> {
        let born = metadata.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Self::parse(&format!("inode:{}:{}", metadata.ino(), born.as_nanos()))
    }

    /// The identity of an open block device, if it has one.
    pub(super) fn of_device(metadata: &Metadata) -> Option<Self> {
        let device = metadata.rdev();
        let directory = format!("/sys/dev/block/{}:{}", major(device), minor(device));
        of_sysfs(Path::new(&directory))
    }
}

impl fmt::Display for StoreIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// Whether the inode number of a file may change, because its file system gives no lasting numbers.
pub(super) fn has_passing_inode(file: &File) -> bool {
    fstatfs(file).is_ok_and(|system| is_passing(system.filesystem_type()))
}

fn is_passing(system: FsType) -> bool {
    // The type of the number differs between C libraries; the magic numbers have 32 bits.
    u32::try_from(system.0 & 0xffff_ffff).is_ok_and(|magic| PASSING_INODES.contains(&magic))
}

// The identity of a block device, from its directory in sysfs.
fn of_sysfs(directory: &Path) -> Option<StoreIdentity> {
    let read = |name: &str| {
        let text = fs::read_to_string(directory.join(name)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    };
    if let Some(start) = read("partition").and_then(|_| read("start")) {
        let disk: PathBuf = fs::canonicalize(directory).ok()?.parent()?.to_owned();
        return StoreIdentity::parse(&format!("{}+{start}", of_sysfs(&disk)?));
    }
    if let Some(file) = read("loop/backing_file") {
        let below = StoreIdentity::of_inode(&fs::metadata(file).ok()?)?;
        return StoreIdentity::parse(&format!("loop:{below}"));
    }
    let names =
        [("dm/uuid", "dm"), ("wwid", "wwid"), ("device/wwid", "wwid"), ("serial", "serial")];
    names.iter().find_map(|(name, kind)| StoreIdentity::parse(&format!("{kind}:{}", read(name)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &Path) -> Option<StoreIdentity> {
        let file = File::open(path).unwrap();
        StoreIdentity::of_file(&file, &file.metadata().unwrap())
    }

    #[test]
    fn another_file_of_the_same_path_is_another_store() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("disk"), directory.path().join("other"));
        fs::write(&path, "one").unwrap();
        let first = of(&path);
        assert!(first.is_some(), "this file system has no times of birth");
        fs::write(&path, "two").unwrap();
        assert_eq!(of(&path), first, "new content is no other file");
        fs::rename(&path, &other).unwrap();
        assert_eq!(of(&other), first, "nor is a new name");
        fs::write(&path, "two").unwrap();
        assert_ne!(of(&path), first);
        // The new inode may have the old one's number.
        fs::remove_file(&other).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "one").unwrap();
        assert_ne!(of(&path), first);
    }

    #[test]
    fn devices_are_identified_by_sysfs() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("sda");
        let part = disk.join("sda1");
        fs::create_dir_all(disk.join("device")).unwrap();
        fs::create_dir_all(&part).unwrap();
        assert_eq!(of_sysfs(&disk), None);
        fs::write(disk.join("device/wwid"), "naa.5000c500\n").unwrap();
        assert_eq!(of_sysfs(&disk).unwrap().to_string(), "wwid:naa.5000c500");
        fs::write(part.join("partition"), "1\n").unwrap();
        fs::write(part.join("start"), "2048\n").unwrap();
        assert_eq!(of_sysfs(&part).unwrap().to_string(), "wwid:naa.5000c500+2048");
        fs::create_dir_all(disk.join("dm")).unwrap();
        fs::write(disk.join("dm/uuid"), "LVM-abc\n").unwrap();
        assert_eq!(of_sysfs(&disk).unwrap().to_string(), "dm:LVM-abc");
    }

    #[test]
    fn a_stored_identity_is_checked() {
        let good = StoreIdentity::parse("inode:12:34").unwrap();
        assert_eq!(StoreIdentity::parse(&good.to_string()), Some(good));
        for bad in ["", "a\nb", &"x".repeat(LEN_MAX + 1)] {
            assert_eq!(StoreIdentity::parse(bad), None, "{bad:?}");
        }
    }
}
