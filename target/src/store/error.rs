//! [`StoreError`]: the reasons why a backing cannot be opened or a store cannot be made. Each text
//! names the thing, the value and the fix.

use std::io;
use std::path::{Path, PathBuf};

use super::rbd::ImageError;

/// Kinds of [`StoreError`], stable, to map to exit codes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The file does not exist.
    NotFound,
    /// Another process holds the file or device.
    Locked,
    /// The size does not fit a volume.
    BadSize,
    /// This process may not access it.
    Permission,
    /// Direct I/O is impossible with this block size.
    Misaligned,
    /// Any other error of the system.
    Io,
}

fn kind_of_image(error: &ImageError) -> StoreErrorKind {
    match error {
        ImageError::NoPool { .. } | ImageError::NoImage { .. } => StoreErrorKind::NotFound,
        ImageError::Locked { .. } => StoreErrorKind::Locked,
        ImageError::Empty { .. } | ImageError::NotWholeBlocks { .. } | ImageError::Short { .. } => {
            StoreErrorKind::BadSize
        }
        ImageError::Key { .. } | ImageError::NoKey { .. } | ImageError::Capability { .. } => {
            StoreErrorKind::Permission
        }
        _ => StoreErrorKind::Io,
    }
}

/// The way to make the size a whole number of blocks.
fn whole_blocks(path: &Path, size: u64, block_size: u32, is_file: bool) -> String {
    let smaller = block_size > 512 && size.is_multiple_of(512);
    match (is_file, smaller) {
        (true, _) => format!(
            "fix it with `truncate -s {} {}`{}",
            size.next_multiple_of(block_size.into()),
            path.display(),
            if smaller { " or set block_size = 512" } else { "" }
        ),
        (false, true) => {
            "set block_size = 512, or serve a partition or logical volume of whole blocks"
                .to_owned()
        }
        (false, false) => "serve a partition or logical volume of whole blocks".to_owned(),
    }
}

/// The reason why a backing cannot be opened or a store cannot be made. Sizes are bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file does not exist.
    #[error("{path}: no such file; make one with `truncate -s 64G {path}` (thin) or `fallocate -l 64G {path}`", path = path.display())]
    NotFound {
        /// The path to open.
        path: PathBuf,
    },
    /// The path is a directory, socket, pipe or character device.
    #[error("{path}: is a {what}; a volume needs a regular file or a block device", path = path.display())]
    WrongType {
        /// The path to open.
        path: PathBuf,
        /// The type of the file.
        what: &'static str,
    },
    /// Another open description holds the lock.
    #[error("{path}: in use by {by}; stop it, or open the volume read-only on both sides", path = path.display(), by = Holder(*pid, comm.as_deref()))]
    Locked {
        /// The path to open.
        path: PathBuf,
        /// The process that holds the lock, where the system reports it.
        pid: Option<u32>,
        /// The process's command name, where the system reports it.
        comm: Option<String>,
    },
    /// The block device is mounted, or claimed by another driver.
    #[error("{path}: the device is mounted or claimed (device mapper, RAID, swap); unmount or release it, see `lsblk {path}`", path = path.display())]
    Claimed {
        /// The path to open.
        path: PathBuf,
    },
    /// The size is 0.
    #[error("{path}: size is 0; set it with `truncate -s 64G {path}`", path = path.display())]
    Empty {
        /// The path to open.
        path: PathBuf,
    },
    /// The size is no whole number of blocks.
    #[error(
        "{path}: size {size} is not a multiple of the block size {block_size}; {fix}",
        path = path.display(), fix = whole_blocks(path, *size, *block_size, *is_file)
    )]
    NotWholeBlocks {
        /// The path to open.
        path: PathBuf,
        /// The size in bytes.
        size: u64,
        /// Block size of the volume in bytes.
        block_size: u32,
        /// True for a file, which can be resized.
        is_file: bool,
    },
    /// The file or device became smaller.
    #[error("{path}: shrank from {was} to {size} bytes under a volume in use; restore it with `truncate -s {was} {path}`", path = path.display())]
    Shrank {
        /// The path that was opened.
        path: PathBuf,
        /// Size at open, in bytes.
        was: u64,
        /// Current size in bytes.
        size: u64,
    },
    /// The process lacks permission.
    #[error("{path}: permission denied ({access}); give the user of this process {access} access to it and search access to its directories", path = path.display())]
    Permission {
        /// The path to open.
        path: PathBuf,
        /// `read` or `read and write`.
        access: &'static str,
    },
    /// The file system or device is read-only.
    #[error("{path}: is read-only (file system or device, or a path outside ReadWritePaths= of the unit); export the volume read-only or make it writable", path = path.display())]
    ReadOnly {
        /// The path to open.
        path: PathBuf,
    },
    /// A block size that no volume may have.
    #[error("block_size {block_size}: must be a power of two between 512 and 65536")]
    BlockSize {
        /// The requested block size.
        block_size: u32,
    },
    /// Direct I/O needs larger blocks.
    #[error(
        "{path}: direct I/O here needs blocks of {required} bytes, the volume has block_size {block_size}; \
         set block_size = {required} or direct = \"off\"", path = path.display()
    )]
    Misaligned {
        /// The path to open.
        path: PathBuf,
        /// Block size of the volume in bytes.
        block_size: u32,
        /// The block size that the file system or device needs, in bytes.
        required: u32,
    },
    /// Direct I/O is impossible.
    #[error("{path}: the file system cannot do direct I/O; set direct = \"preferred\" or move the file", path = path.display())]
    NoDirect {
        /// The path to open.
        path: PathBuf,
    },
    /// Any other error of a file.
    #[error("{path}: cannot {what}: {source}", path = path.display())]
    Io {
        /// The path to open.
        path: PathBuf,
        /// The failed step.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The kernel refuses to make an io_uring.
    #[error("cannot set up io_uring with {entries} entries: {source}; {fix}", fix = ring_fix(source))]
    Ring {
        /// The requested number of submission entries.
        entries: u32,
        /// The system's error.
        source: io::Error,
    },
    /// The index is beyond the store's table.
    #[error("volume index {index}: the store was made for {volumes} volumes; raise that number")]
    TableFull {
        /// The requested index.
        index: u16,
        /// Size of the table.
        volumes: u16,
    },
    /// The index is taken.
    #[error("volume index {index}: already in use by {path}; remove that volume first", path = path.display())]
    Taken {
        /// The requested index.
        index: u16,
        /// The backing at this index.
        path: PathBuf,
    },
    /// The volume has ops in flight.
    #[error("volume index {index}: {ops} ops in flight; reap them before removing the volume")]
    Busy {
        /// The requested index.
        index: u16,
        /// Ops not yet reaped.
        ops: usize,
    },
    /// The store has no volume with this index.
    #[error("volume index {index}: no such volume in this store")]
    NoVolume {
        /// The requested index.
        index: u16,
    },
    /// An image cannot be served.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The kernel refuses the file.
    #[error("{path}: io_uring refuses the file: {source}", path = path.display())]
    Register {
        /// The backing.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl StoreError {
    /// The stable kind.
    #[must_use]
    pub(crate) fn kind(&self) -> StoreErrorKind {
        match self {
            Self::NotFound { .. } => StoreErrorKind::NotFound,
            Self::Locked { .. } | Self::Claimed { .. } => StoreErrorKind::Locked,
            Self::Empty { .. } | Self::NotWholeBlocks { .. } | Self::Shrank { .. } => {
                StoreErrorKind::BadSize
            }
            Self::Permission { .. } | Self::ReadOnly { .. } => StoreErrorKind::Permission,
            Self::Misaligned { .. } | Self::BlockSize { .. } | Self::NoDirect { .. } => {
                StoreErrorKind::Misaligned
            }
            Self::Image(error) => kind_of_image(error),
            Self::WrongType { .. }
            | Self::Io { .. }
            | Self::Ring { .. }
            | Self::TableFull { .. }
            | Self::Taken { .. }
            | Self::Busy { .. }
            | Self::NoVolume { .. }
            | Self::Register { .. } => StoreErrorKind::Io,
        }
    }
}

struct Holder<'a>(Option<u32>, Option<&'a str>);

impl std::fmt::Display for Holder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self(Some(pid), Some(comm)) => write!(f, "process {pid} ({comm})"),
            Self(Some(pid), None) => write!(f, "process {pid} (gone, its I/O is still ending)"),
            Self(None, _) => f.write_str("another process (see `lslocks`)"),
        }
    }
}

fn ring_fix(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EPERM) => {
            "set kernel.io_uring_disabled = 0 with sysctl, or allow it in the container's seccomp profile"
        }
        Some(libc::ENOSYS) => "the kernel or the sandbox has no io_uring",
        Some(libc::ENOMEM) => "raise LimitMEMLOCK (ulimit -l)",
        Some(libc::EMFILE | libc::ENFILE) => "raise LimitNOFILE (ulimit -n)",
        _ => "Linux 5.19 or later is needed",
    }
}
