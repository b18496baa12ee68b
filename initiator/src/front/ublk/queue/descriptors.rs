//! [`Descriptors`]: the driver's requests for each tag, in memory that it shares with us.

use std::io;
use std::ptr::NonNull;

use crate::front::ublk::abi::{self, IoDesc};
use crate::front::ublk::device::CharNode;
use crate::front::ublk::error::{Result, UblkError};

/// The queue's descriptor array, mapped read-only from the char node.
pub(super) struct Descriptors {
    base: NonNull<IoDesc>,
    len: usize,
    depth: u16,
}

impl Descriptors {
    pub(super) fn map(node: &CharNode, queue_id: u16, depth: u16) -> Result<Self> {
        let action = "mapping the ublk request descriptors";
        // SAFETY: sysconf reads a constant.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page = usize::try_from(page).map_err(|_| {
            UblkError::system("asking for the page size", io::Error::last_os_error())
        })?;
        let len = abi::descriptors_len(depth, page);
        let offset = libc::off_t::try_from(abi::descriptors_offset(queue_id, page))
            .map_err(|_| UblkError::system(action, io::ErrorKind::InvalidInput.into()))?;
        // SAFETY: a new shared read-only mapping at an address the kernel chooses; it aliases
        // nothing.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                node.raw_fd(),
                offset,
            )
        };
        match NonNull::new(base.cast::<IoDesc>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { base, len, depth }),
            _ => Err(UblkError::system(action, io::Error::last_os_error())),
        }
    }

    /// Number of tags.
    pub(super) fn depth(&self) -> u16 {
        self.depth
    }

    /// A copy of a tag's descriptor.
    #[inline]
    pub(super) fn read(&self, tag: u16) -> IoDesc {
        assert!(tag < self.depth, "tag of this queue");
        // SAFETY: the mapping holds `depth` descriptors (its length was made from the depth) and
        // the tag is below it. The driver wrote it before the completion that brought us here and
        // writes it again only after the tag is completed; the read is volatile because the writer
        // is outside the program.
        unsafe { self.base.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, of that length, unmapped once; no reference into it
        // exists.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
