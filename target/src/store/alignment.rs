//! [`Alignment`]: the alignment of offsets, lengths and memory that direct I/O on a file or device
//! needs.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;

use super::BackingKind;

/// Alignment of I/O, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alignment {
    /// Addresses.
    pub(super) memory: u32,
    /// Offsets and lengths.
    pub(super) offset: u32,
}

/// The alignment for direct I/O, where the kernel reports it: statx since Linux 6.1, the logical
/// block size of devices before that. Zeroes mean that this file cannot do direct I/O.
#[allow(unsafe_code)]
pub(super) fn direct_alignment(file: &File, kind: BackingKind) -> Option<Alignment> {
    // SAFETY: statx is a C struct of integers, for which all zeroes is a value.
    let mut out: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string, allowed by AT_EMPTY_PATH; `out` is a statx for the
    // kernel to fill; the descriptor is open as long as `file` is borrowed.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut out,
        )
    };
    if result == 0 && out.stx_mask & libc::STATX_DIOALIGN != 0 {
        return Some(Alignment { memory: out.stx_dio_mem_align, offset: out.stx_dio_offset_align });
    }
    if kind == BackingKind::File {
        return None;
    }
    let mut logical: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes one int, to which the pointer leads.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::BLKSSZGET as _, &raw mut logical) };
    let offset = u32::try_from(logical).ok().filter(|&bytes| result == 0 && bytes > 0)?;
    // A kernel that does not report it wants memory aligned like offsets.
    Some(Alignment { memory: offset, offset })
}

/// Finds the alignment by reading. The file must be at least one block long, with O_DIRECT on. The
/// test reads into memory aligned to 4096, so this is the only known memory alignment.
pub(super) fn probe_alignment(file: &File) -> io::Result<Alignment> {
    let mut memory = vec![0_u8; 3 * 4096];
    let start = memory.as_ptr().align_offset(4096).min(4096);
    for bytes in [512_u16, 4096] {
        match file.read_at(&mut memory[start..start + usize::from(bytes)], 0) {
            Ok(_) => return Ok(Alignment { memory: 4096, offset: bytes.into() }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::EINVAL.into())
}
