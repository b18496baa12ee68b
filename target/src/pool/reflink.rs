//! [`CloneFile`]: a new file that shares the blocks of a backing, on a file system that supports
//! this.
//!
//! The file has no name until it is complete and durable, so neither a crash nor a failure leaves a
//! partial file, and no existing file is ever replaced. Every call may block.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags};

use crate::store::Backing;

/// Bytes cloned to test whether the file system supports it: whole blocks of every file system.
const PROBE_BYTES: u64 = 1 << 20;

/// The reason why a clone failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CloneError {
    /// The file system does not support clones.
    #[error(
        "the file system of {path} cannot clone files ({errno:?}): use XFS with reflink=1 or btrfs, or copy the file \
         while no host writes", path = path.display()
    )]
    Unable {
        /// The new file.
        path: PathBuf,
        /// The file system's error.
        errno: Errno,
    },
    /// The source and the new file are in different file systems.
    #[error(
        "{path} is not in the file system of {source_path}, and a clone has to be: name a file there (--path)",
        path = path.display(), source_path = source_path.display()
    )]
    Elsewhere {
        /// The new file.
        path: PathBuf,
        /// The source.
        source_path: PathBuf,
    },
    /// The new file's path exists.
    #[error("{path} exists, and is not replaced: name another file (--path)", path = path.display())]
    Exists {
        /// The new file.
        path: PathBuf,
    },
    /// The clone was withdrawn meanwhile.
    #[error("{path} is not made: the command that asked for it has ended", path = path.display())]
    Unwanted {
        /// The new file.
        path: PathBuf,
    },
    /// Any other error.
    #[error("{path}: cannot {what}: {error}", path = path.display())]
    Io {
        /// The new file.
        path: PathBuf,
        /// The failed step.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct CloneFile {
    path: PathBuf,
    directory: PathBuf,
    file: File,
    // The file has its name.
    has_name: AtomicBool,
    // The clone was withdrawn.
    is_unwanted: AtomicBool,
}

impl CloneFile {
    /// Makes a file without a name in the directory of `path`. The path must not exist.
    ///
    /// # Errors
    /// [`CloneError`].
    pub(crate) fn begin(path: &Path) -> Result<Self, CloneError> {
        let path = path.to_owned();
        if path.symlink_metadata().is_ok() {
            return Err(CloneError::Exists { path });
        }
        let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
        let mut options = File::options();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC);
        match options.open(&directory) {
            Ok(file) => {
                let (has_name, is_unwanted) = <(AtomicBool, AtomicBool)>::default();
                Ok(Self { path, directory, file, has_name, is_unwanted })
            }
            Err(error) => match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
                errno @ (Errno::EOPNOTSUPP | Errno::EISDIR) => {
                    Err(CloneError::Unable { path, errno })
                }
                _ => Err(CloneError::Io { path, what: "make a file in its directory", error }),
            },
        }
    }

    /// Whether the backing can be cloned. The cost does not depend on its size.
    ///
    /// # Errors
    /// [`CloneError`].
    pub(crate) fn probe(&self, backing: &Backing) -> Result<(), CloneError> {
        let bytes = backing.measured().unwrap_or(0).min(PROBE_BYTES);
        self.share(backing, bytes)
    }

    /// Shares the current bytes of the backing, and its mode, with the new file.
    ///
    /// # Errors
    /// [`CloneError`].
    pub(crate) fn share_all(&self, backing: &Backing) -> Result<(), CloneError> {
        // A length of 0 means: to the end.
        self.share(backing, 0)
    }

    #[allow(unsafe_code)]
    fn share(&self, backing: &Backing, bytes: u64) -> Result<(), CloneError> {
        let range = libc::file_clone_range {
            src_fd: backing.file().as_raw_fd().into(),
            src_offset: 0,
            src_length: bytes,
            dest_offset: 0,
        };
        // SAFETY: FICLONERANGE reads one `file_clone_range`, to which the pointer leads. Both
        // descriptors are open as long as `self` and `backing` are borrowed.
        let result = unsafe {
            libc::ioctl(self.file.as_raw_fd(), libc::FICLONERANGE as _, &raw const range)
        };
        let path = self.path.clone();
        match Errno::result(result) {
            Ok(_) => Ok(()),
            Err(Errno::EXDEV) => {
                Err(CloneError::Elsewhere { path, source_path: backing.path().to_owned() })
            }
            Err(errno @ (Errno::EOPNOTSUPP | Errno::ENOTTY | Errno::EINVAL)) => {
                Err(CloneError::Unable { path, errno })
            }
            Err(errno) => Err(CloneError::Io { path, what: "clone", error: errno.into() }),
        }
    }

    /// Stands for a clone of this many bytes in tests, where the file system has no clones.
    #[cfg(test)]
    pub(crate) fn share_zeroes(&self, bytes: u64) {
        self.file.set_len(bytes).unwrap();
    }

    /// Makes the new file durable, with owner and mode of the file at the backing's path, and gives
    /// it its name, unless [`Self::give_up`] is called before. If no file is at that path any more,
    /// the new file stays accessible to its owner only.
    ///
    /// # Errors
    /// [`CloneError`]. No file is left.
    pub(crate) fn keep(&self, backing: &Path) -> Result<(), CloneError> {
        let failed =
            |what| move |error: io::Error| CloneError::Io { path: self.path.clone(), what, error };
        match fs::metadata(backing) {
            // A clone may save a file that was deleted.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("see the mode of its source")(error)),
            Ok(meta) => {
                // Only root may give a file away. Any other user keeps it.
                let _ = std::os::unix::fs::fchown(&self.file, Some(meta.uid()), Some(meta.gid()));
                let mode = fs::Permissions::from_mode(meta.mode() & 0o777);
                self.file.set_permissions(mode).map_err(failed("set its mode"))?;
            }
        }
        // Not `sync_all`, which goes on after EINTR, and then may miss the one report of an error.
        nix::unistd::fsync(&self.file).map_err(|errno| failed("make it durable")(errno.into()))?;
        self.is_wanted()?;
        let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let follow = AtFlags::AT_SYMLINK_FOLLOW;
        match nix::unistd::linkat(AT_FDCWD, open.as_str(), AT_FDCWD, &self.path, follow) {
            Ok(()) => self.has_name.store(true, Ordering::SeqCst),
            Err(Errno::EEXIST) => return Err(CloneError::Exists { path: self.path.clone() }),
            Err(errno) => return Err(failed("give it its name")(errno.into())),
        }
        let directory = File::open(&self.directory).and_then(|directory| directory.sync_all());
        let durable = directory.map_err(failed("make its name durable"));
        durable.and_then(|()| self.is_wanted()).inspect_err(|_| self.discard())
    }

    fn is_wanted(&self) -> Result<(), CloneError> {
        match self.is_unwanted.load(Ordering::SeqCst) {
            true => Err(CloneError::Unwanted { path: self.path.clone() }),
            false => Ok(()),
        }
    }

    /// Withdraws the clone: a running [`Self::keep`] leaves no file. Does not block.
    pub(crate) fn give_up(&self) {
        self.is_unwanted.store(true, Ordering::SeqCst);
    }

    /// Removes the name that [`Self::keep`] gave, if it did.
    pub(crate) fn discard(&self) {
        if !self.has_name.swap(false, Ordering::SeqCst) {
            return;
        }
        if let Err(error) = fs::remove_file(&self.path) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "cannot remove a snapshot that is not served");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::store::{Direct, Losses, OpenOptions};

    fn backing(path: &Path) -> Backing {
        let options = OpenOptions {
            read_only: false,
            direct: Direct::Off,
            block_size: 4096,
            lock_wait: Duration::ZERO,
            losses: Losses::ToldAtOnce,
        };
        Backing::open(path, &options).unwrap()
    }

    /// The file names in a directory.
    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_has_no_name_before_it_is_kept_and_then_the_mode_of_its_source() {
        let directory = tempfile::tempdir().unwrap();
        let (source, to) = (directory.path().join("a.img"), directory.path().join("b.img"));
        fs::write(&source, vec![7; 8192]).unwrap();
        fs::set_permissions(&source, fs::Permissions::from_mode(0o640)).unwrap();
        let clone = CloneFile::begin(&to).unwrap();
        clone.file.set_len(8192).unwrap();
        assert_eq!(names(directory.path()), ["a.img"]);
        drop(clone);
        assert_eq!(names(directory.path()), ["a.img"], "nothing is left");
        let clone = CloneFile::begin(&to).unwrap();
        clone.keep(&source).unwrap();
        assert_eq!(names(directory.path()), ["a.img", "b.img"]);
        assert_eq!(fs::metadata(&to).unwrap().mode() & 0o7777, 0o640);
        clone.discard();
        assert_eq!(names(directory.path()), ["a.img"]);
        // The source is deleted while it is open.
        fs::remove_file(&source).unwrap();
        CloneFile::begin(&to).unwrap().keep(&source).unwrap();
        assert_eq!(names(directory.path()), ["b.img"]);
        assert_eq!(fs::metadata(&to).unwrap().mode() & 0o7777, 0o600);
    }

    #[test]
    fn a_withdrawn_clone_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let (source, to) = (directory.path().join("a.img"), directory.path().join("b.img"));
        fs::write(&source, vec![7; 8192]).unwrap();
        let clone = CloneFile::begin(&to).unwrap();
        clone.give_up();
        assert!(matches!(clone.keep(&source), Err(CloneError::Unwanted { .. })));
        assert_eq!(names(directory.path()), ["a.img"]);
        // A file of another owner at this path stays.
        fs::write(&to, "mine").unwrap();
        clone.discard();
        assert_eq!(names(directory.path()), ["a.img", "b.img"]);
    }

    #[test]
    fn no_file_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (source, to) = (directory.path().join("a.img"), directory.path().join("b.img"));
        fs::write(&source, vec![7; 8192]).unwrap();
        let clone = CloneFile::begin(&to).unwrap();
        // Another file appears during the clone.
        fs::write(&to, "mine").unwrap();
        assert!(matches!(clone.keep(&source), Err(CloneError::Exists { .. })));
        assert!(matches!(CloneFile::begin(&to), Err(CloneError::Exists { .. })));
        assert_eq!(fs::read_to_string(&to).unwrap(), "mine");
        // A link that leads nowhere also occupies its name.
        let dangling = directory.path().join("c.img");
        std::os::unix::fs::symlink("nowhere", &dangling).unwrap();
        assert!(matches!(CloneFile::begin(&dangling), Err(CloneError::Exists { .. })));
    }

    #[test]
    fn a_clone_has_the_bytes_or_the_error_says_why() {
        let directory = tempfile::tempdir().unwrap();
        let (source, to) = (directory.path().join("a.img"), directory.path().join("b.img"));
        let bytes: Vec<u8> = (0..3_u32 << 20).map(|at| (at / 4096).to_le_bytes()[0]).collect();
        fs::write(&source, &bytes).unwrap();
        let (clone, backing) = (CloneFile::begin(&to).unwrap(), backing(&source));
        let probed = clone.probe(&backing).map_err(|error| error.to_string());
        match clone.share_all(&backing) {
            Ok(()) => {
                assert_eq!(probed, Ok(()));
                clone.keep(&source).unwrap();
                assert!(fs::read(&to).unwrap() == bytes);
            }
            Err(error) => {
                let text = error.to_string();
                assert_eq!(probed, Err(text.clone()), "it is known before a write is held");
                let expected = format!("the file system of {} cannot clone files", to.display());
                assert!(text.starts_with(&expected) && text.contains("EOPNOTSUPP"), "{text}");
            }
        }
    }

    #[test]
    fn another_file_system_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("a.img");
        fs::write(&source, vec![7; 8192]).unwrap();
        let to = Path::new("/dev/shm").join(format!("rblk-clone-{}", std::process::id()));
        let Ok(clone) = CloneFile::begin(&to) else {
            panic!("/dev/shm is no tmpfs here");
        };
        let text = clone.probe(&backing(&source)).unwrap_err().to_string();
        assert!(
            text.contains("is not in the file system of") || text.contains("EOPNOTSUPP"),
            "{text}"
        );
        assert!(!to.exists());
    }
}
