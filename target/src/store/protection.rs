//! [`Protection`]: the reason why a file or device takes no writes, although it was opened for
//! writing.
//!
//! The kernel lets a process open a read-only block device for writing, and then refuses each
//! write. A file system or device may also become read-only while it is open.

use std::fs::File;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::statvfs::{FsFlags, fstatvfs};

use super::BackingKind;

mod ioctl {
    nix::ioctl_read_bad!(blk_ro_get, nix::request_code_none!(0x12, 94), libc::c_int);
}

/// The reason why writes are refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protection {
    /// The block device is read-only.
    Device,
    /// The file system is read-only.
    FileSystem,
    /// The file has the attribute `i` (immutable).
    Immutable,
}

impl Protection {
    /// The reason why an open file or device refuses writes now. `None` if it takes them, or if the
    /// system does not report it. May block as long as the file system does.
    #[allow(unsafe_code)]
    pub(super) fn of(file: &File, kind: BackingKind) -> Option<Self> {
        if kind == BackingKind::BlockDevice {
            let mut read_only = 0;
            // SAFETY: BLKROGET writes one int, to which the pointer leads; the descriptor is open
            // as long as `file` is borrowed.
            let result = unsafe { ioctl::blk_ro_get(file.as_raw_fd(), &raw mut read_only) };
            return (result.is_ok() && read_only != 0).then_some(Self::Device);
        }
        if fstatvfs(file).is_ok_and(|system| system.flags().contains(FsFlags::ST_RDONLY)) {
            return Some(Self::FileSystem);
        }
        is_immutable(file).unwrap_or(false).then_some(Self::Immutable)
    }
}

#[allow(unsafe_code)]
fn is_immutable(file: &File) -> Result<bool, Errno> {
    // SAFETY: statx is a C struct of integers, for which all zeroes is a value.
    let mut out: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string, allowed by AT_EMPTY_PATH; `out` is a statx for the
    // kernel to fill; the descriptor is open as long as `file` is borrowed.
    let result = unsafe {
        let flags = libc::AT_EMPTY_PATH;
        libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_TYPE, &raw mut out)
    };
    Errno::result(result)?;
    let immutable = u64::try_from(libc::STATX_ATTR_IMMUTABLE).unwrap_or(0);
    Ok(out.stx_attributes & immutable != 0)
}
