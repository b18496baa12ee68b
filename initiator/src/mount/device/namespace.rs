//! A process that serves a block device must not hold mounts of file systems on that device, or on
//! the devices of other mounts. Its mount namespace is a copy of the first one, with copies of
//! these mounts. The copies would keep a file system busy after all other processes have unmounted
//! it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, umount2};

/// Limit of the depth of stacked block devices.
const STACKED_MAX: u32 = 8;

/// Detaches every mount of a file system that rests on a ublk disk from the mount namespace of this
/// process, which must be its own. A mount that cannot be detached is logged and stays.
pub fn detach_ublk() {
    let Ok(text) = std::fs::read("/proc/self/mountinfo") else { return };
    // The last mounted first: it may be on top of another.
    for (device, at) in mounts(&text).into_iter().rev() {
        if at == Path::new("/") || !rests_on_ublk(Path::new("/sys/dev/block"), &device, STACKED_MAX)
        {
            continue;
        }
        if let Err(error) = umount2(&at, MntFlags::MNT_DETACH) {
            tracing::warn!(at = %at.display(), %error, "cannot detach a file system on a ublk disk");
        }
    }
}

/// Device numbers (`MAJOR:MINOR`) and mount points, from the text of `mountinfo`.
fn mounts(text: &[u8]) -> Vec<(String, PathBuf)> {
    let lines = text.split(|byte| *byte == b'\n');
    lines
        .filter_map(|line| {
            let mut fields = line.split(|byte| *byte == b' ');
            let device = std::str::from_utf8(fields.nth(2)?).ok()?;
            let number = device.bytes().all(|byte| byte.is_ascii_digit() || byte == b':');
            let at = fields.nth(1)?;
            number.then(|| (device.to_owned(), PathBuf::from(OsString::from_vec(unescape(at)))))
        })
        .collect()
}

/// Decodes spaces and other characters, which are `\` and three octal digits.
pub(super) fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let digits = after.first_chunk::<3>().filter(|_| *first == b'\\');
        let octal = digits
            .filter(|digits| digits.iter().all(|digit| (b'0'..=b'7').contains(digit)))
            .map(|digits| digits.iter().fold(0u8, |sum, digit| (sum << 3) | (digit - b'0')));
        plain.push(octal.unwrap_or(*first));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    plain
}

/// Whether a block device is a ublk disk or a partition of one, or rests on one. `numbers` is
/// `/sys/dev/block`.
fn rests_on_ublk(numbers: &Path, device: &str, depth: u32) -> bool {
    let Ok(path) = numbers.join(device).canonicalize() else { return false };
    let names = |part: &Path| part.to_str().is_some_and(|name| name.starts_with("ublkb"));
    if path.iter().any(|part| names(Path::new(part))) {
        return true;
    }
    let Ok(slaves) = std::fs::read_dir(path.join("slaves")) else { return false };
    depth > 0
        && slaves.flatten().any(|slave| {
            let number = std::fs::read_to_string(slave.path().join("dev")).unwrap_or_default();
            rests_on_ublk(numbers, number.trim(), depth - 1)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_from_any_text() {
        let text = b"22 1 259:3 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
            30 22 259:7 /sub /mnt/a\\040b rw - ext4 /dev/ublkb0p1 rw\n\
            31 22 0:5 / /dev rw - devtmpfs none rw\nnonsense\n\n1 2 x:y / /z\n1 2 3:4 /\n";
        let found = mounts(text);
        let wanted = [("259:3", "/"), ("259:7", "/mnt/a b"), ("0:5", "/dev")];
        assert_eq!(found.len(), wanted.len(), "{found:?}");
        for ((device, at), (number, place)) in found.iter().zip(wanted) {
            assert_eq!((device.as_str(), at.to_str()), (number, Some(place)));
        }
        assert_eq!(unescape(b"\\\\0401\\12\\777\\"), b"\\ 1\\12\xff\\");
    }

    #[test]
    fn stacked_devices_rest_on_their_ublk_disk() {
        let root = tempfile::tempdir().unwrap();
        let numbers = root.path().join("dev/block");
        std::fs::create_dir_all(&numbers).unwrap();
        let device = |name: &str, number: &str, slaves: &[&str]| {
            let at = root.path().join("block").join(name);
            std::fs::create_dir_all(at.join("slaves")).unwrap();
            std::fs::write(at.join("dev"), format!("{number}\n")).unwrap();
            for slave in slaves {
                let slave = Path::new(slave);
                let link = at.join("slaves").join(slave.file_name().unwrap());
                std::os::unix::fs::symlink(root.path().join("block").join(slave), link).unwrap();
            }
            std::os::unix::fs::symlink(&at, numbers.join(number)).unwrap();
        };
        device("ublkb0", "259:1", &[]);
        device("ublkb0/ublkb0p1", "259:2", &[]);
        device("sda", "8:0", &[]);
        device("dm-0", "252:0", &["sda", "ublkb0/ublkb0p1"]);
        device("dm-1", "252:1", &["dm-0"]);
        device("dm-2", "252:2", &["sda"]);
        let rests = |number: &str, depth| rests_on_ublk(&numbers, number, depth);
        assert!(rests("259:1", 0) && rests("259:2", 0));
        assert!(rests("252:0", STACKED_MAX) && rests("252:1", STACKED_MAX));
        assert!(!rests("8:0", STACKED_MAX) && !rests("252:2", STACKED_MAX));
        assert!(!rests("0:5", STACKED_MAX) && !rests("", 0));
    }
}
