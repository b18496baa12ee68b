//! Writes back the data above a disk: the file system on it (BLKFLSBUF), and its page cache without
//! a FLUSH afterwards (sync_file_range(2)).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `include/uapi/linux/fs.h`: `_IO(0x12, 97)`
const BLKFLSBUF: libc::Ioctl = 0x1261;

/// Syncs the file system that is mounted on a block device, in any mount namespace, as sync(1)
/// would. Without a file system, writes the page cache of the device back. Blocks as long as the
/// disk does.
///
/// # Errors
/// The file is no block device, or this process lacks CAP_SYS_ADMIN. A failed write is no error
/// here.
pub(crate) fn sync_file_system(device: &File) -> io::Result<()> {
    // SAFETY: this command takes no argument. The descriptor is open: `device` is borrowed until
    // the return.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), BLKFLSBUF, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Writes the dirty pages of a disk or a file, and waits for them. Sends no FLUSH: an error is one
/// of a write. Blocks as long as the disk does.
///
/// # Errors
/// A write failed, perhaps an earlier one with an error that no program has seen; or the file is
/// neither a disk nor a regular file.
pub(crate) fn write_pages(file: &File) -> io::Result<()> {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the call takes numbers only. The descriptor is open: `file` is borrowed until the
    // return.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, all) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
