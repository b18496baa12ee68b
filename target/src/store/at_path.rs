//! [`AtPath`]: the comparison of an open store with the file or device at its path.
//!
//! A target keeps its files and devices open, so it does not notice when an administrator deletes,
//! replaces, truncates or write-protects them. The next process opens the path, and finds another
//! file or none. [`AtPath::look`] reports this while it can still be repaired.
//!
//! A look may block as long as the file system does, so neither a data thread nor control calls it.
//! A look does not read again the facts that stay constant while the store is open.

use std::fs;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use rblk_operate::target::store_fault::{StoreFault, StoreFaultKind};

use super::backing::Backing;
use super::protection::Protection;

/// Time between two looks at a size that differs from the served one.
const SETTLE: Duration = Duration::from_millis(20);

/// The result of the comparison. If there are several faults, this is the worst one, in the order
/// of the variants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AtPath {
    /// The path leads to the open store, and the store has no fault.
    Same,
    /// The file has no name any more. Its bytes are lost when the last process closes it.
    Deleted {
        /// Another file or device is at the path.
        replaced: bool,
    },
    /// The file or device exists, but its path leads nowhere or to another file or device.
    Away {
        /// Another file or device is at the path.
        replaced: bool,
    },
    /// The store is shorter than its volume, or no whole number of blocks. In bytes.
    Resized {
        /// The volume's size.
        served: u64,
        /// The store's size.
        has: u64,
    },
    /// The store takes no writes, but its volume is served for writing.
    ReadOnly(Protection),
    /// The open file or its path cannot be examined.
    CannotSee(Errno),
}

impl AtPath {
    /// Compares an open store with its path. May block as long as the file system does.
    pub(crate) fn look(backing: &Backing) -> Self {
        Self::compare(backing).unwrap_or_else(Self::CannotSee)
    }

    fn compare(backing: &Backing) -> Result<Self, Errno> {
        let open = backing.file().metadata().map_err(errno)?;
        let there = match fs::metadata(backing.path()) {
            Ok(there) => Ok(Some(there)),
            Err(error) => match errno(error) {
                Errno::ENOENT | Errno::ENOTDIR => Ok(None),
                // A circle of links leads nowhere.
                Errno::ELOOP => Ok(None),
                error => Err(error),
            },
        };
        // The open file tells more than a path that cannot be looked up.
        let is_same = match &there {
            Ok(Some(there)) if backing.is_file() => {
                (there.dev(), there.ino()) == (open.dev(), open.ino())
                    // In such a file system an inode may get another number while it is open.
                    || (there.is_file() && backing.has_passing_inode())
            }
            Ok(Some(there)) => there.rdev() == open.rdev() && there.rdev() != 0,
            Ok(None) => false,
            Err(_) => true,
        };
        let replaced = matches!(there, Ok(Some(_))) && !is_same;
        if backing.is_file() && open.nlink() == 0 {
            return Ok(Self::Deleted { replaced });
        }
        if !is_same {
            return Ok(Self::Away { replaced });
        }
        if resized(backing)?.is_some() {
            // A resize of the volume may be running at this moment.
            thread::sleep(SETTLE);
            if let Some(resized) = resized(backing)? {
                return Ok(resized);
            }
        }
        match (backing.read_only(), backing.protection(), there) {
            (false, Some(protection), _) => Ok(Self::ReadOnly(protection)),
            (_, _, Err(error)) => Err(error),
            _ => Ok(Self::Same),
        }
    }

    /// The kind of fault; `None`: no fault.
    pub(crate) fn fault(self) -> Option<StoreFaultKind> {
        Some(match self {
            Self::Same => return None,
            Self::Deleted { replaced: true } | Self::Away { replaced: true } => {
                StoreFaultKind::Replaced
            }
            Self::Deleted { .. } => StoreFaultKind::Deleted,
            Self::Away { .. } => StoreFaultKind::Away,
            Self::Resized { .. } => StoreFaultKind::Resized,
            Self::ReadOnly(_) => StoreFaultKind::ReadOnly,
            Self::CannotSee(_) => StoreFaultKind::CannotSee,
        })
    }

    /// The fault and its remedy, for people. Starts with "its file" or "its device".
    pub(crate) fn describe(self, backing: &Backing) -> String {
        match self.advice(backing) {
            None => self.what(backing),
            Some(advice) => format!("{}: {advice}", self.what(backing)),
        }
    }

    /// The fault, for people and for programs; `None`: no fault.
    pub(crate) fn told(self, backing: &Backing) -> Option<StoreFault> {
        Some(StoreFault {
            kind: self.fault()?,
            text: self.what(backing),
            advice: self.advice(backing),
            ends_with_target: matches!(self, Self::Deleted { .. }),
        })
    }

    fn what(self, backing: &Backing) -> String {
        let path = backing.path().display();
        let noun = if backing.is_file() { "file" } else { "device" };
        match self {
            Self::Same => format!("its {noun} is at {path}"),
            Self::Deleted { replaced: false } => {
                format!("its file {path} is deleted, and the data is gone when this target ends")
            }
            Self::Deleted { replaced: true } => format!(
                "its file is deleted and a different one is at {path}, and the data is gone when this target ends"
            ),
            Self::Away { replaced: true } => {
                format!("its {noun} is elsewhere, and another file or device is at {path}")
            }
            Self::Away { replaced: false } => format!(
                "its {noun} is not at {path} any more (renamed, or its file system unmounted)"
            ),
            Self::Resized { has: 0, .. } if !backing.is_file() => {
                format!("its device {path} is gone")
            }
            Self::Resized { served, has } if has < served => {
                format!("its {noun} {path} has {has} of {served} bytes, and reads behind them fail")
            }
            Self::Resized { has, .. } => {
                format!("its {noun} {path} has {has} bytes, which are not whole blocks")
            }
            Self::ReadOnly(Protection::Device) => {
                format!("its device {path} is read-only, and writes fail")
            }
            Self::ReadOnly(Protection::FileSystem) => {
                format!("the file system of {path} is read-only, and writes fail")
            }
            Self::ReadOnly(Protection::Immutable) => {
                format!("its file {path} is immutable, and writes fail")
            }
            Self::CannotSee(Errno::ETIMEDOUT) => {
                format!("its {noun} {path} cannot be looked at, as its file system does not answer")
            }
            Self::CannotSee(error) => {
                format!("its {noun} {path} cannot be looked at: {}", error.desc())
            }
        }
    }

    fn advice(self, backing: &Backing) -> Option<String> {
        let path = backing.path().display();
        let (pid, fd) = (std::process::id(), backing.fd());
        Some(match self {
            Self::Same | Self::CannotSee(_) => return None,
            Self::Deleted { .. } => format!(
                "unmount it on its hosts, then `cp --sparse=always /proc/{pid}/fd/{fd} FILE` before the target ends"
            ),
            Self::Away { replaced: true } => {
                "put it back before the target ends: the next start serves the file at the path"
                    .to_owned()
            }
            Self::Away { replaced: false } => "put it back before the target ends".to_owned(),
            Self::Resized { has: 0, .. } if !backing.is_file() => {
                "bring it back, and restart the target".to_owned()
            }
            Self::Resized { served, has } if backing.is_file() && has < served => {
                format!(
                    "restore the bytes; `truncate -s {served} {path}` makes it as long as before"
                )
            }
            Self::Resized { served, .. } if backing.is_file() => {
                format!("`truncate -s {served} {path}`, or the target does not start with it")
            }
            Self::Resized { .. } => {
                "give the device its size again, and restore the bytes".to_owned()
            }
            Self::ReadOnly(Protection::Device) => format!("`blockdev --setrw {path}`"),
            Self::ReadOnly(Protection::FileSystem) => {
                "repair it, and mount it for writing".to_owned()
            }
            Self::ReadOnly(Protection::Immutable) => format!("`chattr -i {path}`"),
        })
    }
}

fn resized(backing: &Backing) -> Result<Option<AtPath>, Errno> {
    let has = match backing.is_file() {
        true => backing.file().metadata().map(|open| open.len()),
        // The end of a block device is its size, as from BLKGETSIZE64, but without the ioctl. No
        // code reads or writes at the position of the open description.
        false => backing.file().seek(SeekFrom::End(0)),
    };
    let (served, has) = (backing.size_bytes(), has.map_err(errno)?);
    let is_whole = has.is_multiple_of(backing.block_size().into());
    Ok((has < served || !is_whole).then_some(AtPath::Resized { served, has }))
}

fn errno(error: io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::store::OpenOptions;

    fn served(directory: &Path) -> (PathBuf, Backing) {
        let path = directory.join("disk");
        fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
        let backing = Backing::open(&path, &OpenOptions::default()).unwrap();
        (path, backing)
    }

    #[test]
    fn a_file_that_fits_its_volume_has_no_fault() {
        let directory = tempfile::tempdir().unwrap();
        let (path, backing) = served(directory.path());
        assert_eq!(AtPath::look(&backing), AtPath::Same);
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(16 << 20).unwrap();
        assert_eq!(AtPath::look(&backing), AtPath::Same, "it may have grown, for a resize");
        // A second name of this file, as of a volume reached by a link.
        fs::rename(&path, directory.path().join("real")).unwrap();
        std::os::unix::fs::symlink("real", &path).unwrap();
        assert_eq!(AtPath::look(&backing), AtPath::Same);
    }

    #[test]
    fn a_file_that_is_deleted_replaced_or_away() {
        let directory = tempfile::tempdir().unwrap();
        let (path, backing) = served(directory.path());
        let other = directory.path().join("other");
        fs::rename(&path, &other).unwrap();
        assert_eq!(AtPath::look(&backing), AtPath::Away { replaced: false });
        fs::write(&path, vec![0; 8 << 20]).unwrap();
        let look = AtPath::look(&backing);
        assert_eq!(look, AtPath::Away { replaced: true });
        assert_eq!(look.fault(), Some(StoreFaultKind::Replaced));
        fs::rename(&other, &path).unwrap();
        assert_eq!(AtPath::look(&backing), AtPath::Same, "it is back");
        fs::remove_file(&path).unwrap();
        let look = AtPath::look(&backing);
        assert_eq!(look, AtPath::Deleted { replaced: false });
        let text = look.describe(&backing);
        let copy = format!("/proc/{}/fd/{}", std::process::id(), backing.fd());
        assert!(text.contains("is deleted") && text.contains(&copy), "{text}");
        assert_eq!(fs::metadata(copy).unwrap().len(), 8 << 20, "that is the file");
        fs::create_dir(&path).unwrap();
        assert_eq!(AtPath::look(&backing), AtPath::Deleted { replaced: true });
    }

    #[test]
    fn a_file_of_another_size() {
        let directory = tempfile::tempdir().unwrap();
        let (path, backing) = served(directory.path());
        let set = |len| fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len);
        set(4 << 20).unwrap();
        let look = AtPath::look(&backing);
        assert_eq!(look, AtPath::Resized { served: 8 << 20, has: 4 << 20 });
        let text = look.describe(&backing);
        assert!(text.contains("has 4194304 of 8388608 bytes"), "{text}");
        set((8 << 20) + 1).unwrap();
        let look = AtPath::look(&backing);
        assert_eq!(look, AtPath::Resized { served: 8 << 20, has: (8 << 20) + 1 });
        let text = look.describe(&backing);
        assert!(text.contains("which are not whole blocks"), "{text}");
    }

    #[test]
    fn a_deleted_file_is_seen_where_its_path_cannot_be_looked_up() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("inner");
        fs::create_dir(&inner).unwrap();
        let (_, backing) = served(&inner);
        // A name that is too long stands for every path that cannot be looked up, since root may
        // search all directories.
        let long = directory.path().join("x".repeat(300));
        assert_eq!(fs::metadata(&long).map_err(errno).unwrap_err(), Errno::ENAMETOOLONG);
        fs::remove_dir_all(&inner).unwrap();
        std::os::unix::fs::symlink(&long, &inner).unwrap();
        assert_eq!(AtPath::look(&backing), AtPath::Deleted { replaced: false });
    }
}
