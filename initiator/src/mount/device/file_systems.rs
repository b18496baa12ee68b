//! The file systems on a disk, its partitions, and the devices stacked on them: LUKS, LVM, RAID,
//! loop devices. Finds their mount points and syncs them.
//!
//! Two calls sync a file system. BLKFLSBUF of the device reaches it in any mount namespace, but
//! does not report a failed write. On kernels where btrfs or bcachefs do not register with the
//! block layer, BLKFLSBUF syncs nothing. syncfs(2) reports errors, but needs a mount point, and a
//! process with few rights cannot reach one in another namespace.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::unistd::syncfs;

use super::block_device::BlockDevice;
use super::holder::{DeviceMount, OWN_NUMBER, mounted, mountinfo, other_namespaces, stack};
use crate::front::ublk::sync_file_system;

/// Mount points in this mount namespace of the file systems on a disk, its partitions and stacked
/// devices; the last first: it may be on top of another.
#[must_use]
pub fn mounts_on(device: &str) -> Vec<String> {
    let text = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let parts = stack(Path::new("/"), device);
    let found = mounts_of(&parts, &String::from_utf8_lossy(&text));
    found.into_iter().rev().map(|mount| mount.at).collect()
}

/// The mounts of some devices, in the order of the text of `mountinfo`.
fn mounts_of(parts: &[BlockDevice], mountinfo: &str) -> Vec<DeviceMount> {
    let of_line = |line| parts.iter().find_map(|part| mounted(line, part));
    mountinfo.lines().filter_map(of_line).collect()
}

/// A file system, and an open file at its mount point.
struct FileSystem {
    number: String,
    kind: String,
    at: String,
    opened: io::Result<File>,
}

/// Syncs the file systems on a disk and on the devices stacked on it. Returns the first failure in
/// words, if any. Blocks as long as the disk does.
pub(super) fn sync(device: &str) -> Option<String> {
    let root = Path::new("/");
    let parts = stack(root, device);
    // A file opened before the sync gets the errors of writes that fail during it.
    let file_systems = found(root, &parts);
    let of_device = |part: &BlockDevice| {
        let synced = File::open(part.node()).and_then(|device| sync_file_system(&device));
        synced.err().map(|error| format!("{}: {error}", part.node()))
    };
    let of_file_system = |FileSystem { kind, at, opened, .. }: &FileSystem| match opened {
        Ok(place) => syncfs(place).err().map(|error| format!("{kind} at {at}: {error}")),
        Err(error) if OWN_NUMBER.contains(&kind.as_str()) => {
            Some(format!("{kind} at {at}: opening its place: {error}"))
        }
        Err(_) => None,
    };
    // Sync each, even after a failure.
    let failed: Vec<String> = parts
        .iter()
        .filter_map(of_device)
        .chain(file_systems.iter().filter_map(of_file_system))
        .collect();
    failed.into_iter().next()
}

/// The file systems of some devices in each mount namespace, once each.
fn found(root: &Path, parts: &[BlockDevice]) -> Vec<FileSystem> {
    let own = fs::read(root.join("proc/self/mountinfo")).unwrap_or_default();
    let own = ("self".to_owned(), String::from_utf8_lossy(&own).into_owned());
    let spaces = [own, ("1".to_owned(), mountinfo(root))];
    let mut found: Vec<FileSystem> = Vec::new();
    for (pid, text) in spaces.into_iter().chain(other_namespaces(root)) {
        for DeviceMount { id, number, at, kind } in mounts_of(parts, &text) {
            let known = found.iter_mut().find(|known| known.number == number);
            match known {
                Some(known) if known.opened.is_ok() => {}
                Some(known) => {
                    if let Ok(place) = open(root, &pid, &id, &at) {
                        known.opened = Ok(place);
                    }
                }
                None => {
                    let opened = open(root, &pid, &id, &at);
                    found.push(FileSystem { number, kind, at, opened });
                }
            }
        }
    }
    found
}

/// Opens a mount point in the mount namespace of a process. Another mount may hide it.
fn open(root: &Path, pid: &str, id: &str, at: &str) -> io::Result<File> {
    let path = format!("proc/{pid}/root/{}", at.trim_start_matches('/'));
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let place = OpenOptions::new().read(true).custom_flags(flags).open(root.join(path))?;
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", place.as_raw_fd()))?;
    let opened = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    match opened.map(str::trim) == Some(id) {
        true => Ok(place),
        false => Err(io::Error::other("another mount hides it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_stacked_devices_are_found() {
        let kernel = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = kernel.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("sys/block/ublkb0/dev", "259:0\n");
        write("sys/block/ublkb0/holders/dm-0", "");
        write("sys/block/dm-0/dev", "253:0\n");
        write("sys/block/loop4/dev", "7:4\n");
        write("sys/block/loop4/loop/backing_file", "/dev/ublkb0\n");
        let parts = stack(kernel.path(), "/dev/ublkb0");
        let text = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
            30 22 253:0 / /luks rw shared:1 - ext4 /dev/mapper/x rw\n\
            31 30 7:4 / /luks/loop rw - xfs /dev/loop4 rw\n\
            32 22 253:1 / /other rw - ext4 /dev/mapper/y rw\n\
            33 22 0:44 / /b rw - btrfs /dev/dm-0 rw\n";
        let at: Vec<(String, String)> =
            mounts_of(&parts, text).into_iter().map(|mount| (mount.id, mount.at)).collect();
        let wanted = [("30", "/luks"), ("31", "/luks/loop"), ("33", "/b")];
        assert_eq!(at, wanted.map(|(id, at)| (id.to_owned(), at.to_owned())));
    }

    /// The root of this process, and a mount under another mount.
    #[test]
    fn a_place_is_opened_only_where_the_mount_is_seen() {
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = text.lines().rfind(|line| line.split(' ').nth(4) == Some("/")).unwrap();
        let id = line.split(' ').next().unwrap();
        let root = Path::new("/");
        let place = open(root, "self", id, "/").unwrap();
        assert!(place.metadata().unwrap().is_dir());
        assert!(open(root, "self", "0", "/").is_err(), "another mount");
    }
}
