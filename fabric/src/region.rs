//! [`Region`]: page-aligned memory at a fixed address, for MRs and io_uring fixed buffers.
//!
//! Contract: the bytes may change at any time, because a device, a peer or the kernel writes them.
//! So no reference to them leaves this file. Access is by copies through raw pointers, and by
//! [`Region::sum`], which reduces bytes to a number. The code that lends the bytes out decides
//! which access is allowed at which time.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Which pages back a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PageKind {
    /// Ordinary pages. Transparent huge pages are requested, which is a hint.
    #[default]
    Normal,
    /// Reserved huge pages of 2 MiB (`vm.nr_hugepages`).
    Huge2MiB,
}

/// Why memory could not be allocated.
#[derive(Debug, thiserror::Error)]
#[error("cannot allocate {bytes} bytes of {kind:?} pages: {source}")]
pub struct RegionError {
    bytes: usize,
    kind: PageKind,
    source: io::Error,
}

/// Zeroed, page-aligned memory, unmapped on drop.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    mapped: NonZeroUsize,
    kind: PageKind,
}

// SAFETY: the mapping is owned by this value and is reached only by raw copies, which carry no
// aliasing claim; concurrent access races on bytes exactly as with a device, never on references.
unsafe impl Send for Region {}
// SAFETY: as for Send; no method hands out a reference into the mapping that outlives a call.
unsafe impl Sync for Region {}

impl Region {
    /// Maps at least `len` bytes (rounded up to whole pages of the kind).
    ///
    /// # Errors
    /// The size is zero, or the system has no such memory.
    pub fn allocate(len: usize, kind: PageKind) -> Result<Arc<Self>, RegionError> {
        let fail = |source| RegionError { bytes: len, kind, source };
        let page = match kind {
            PageKind::Normal => 4096,
            PageKind::Huge2MiB => 2 << 20,
        };
        let mapped = len
            .checked_next_multiple_of(page)
            .and_then(NonZeroUsize::new)
            .ok_or_else(|| fail(io::ErrorKind::InvalidInput.into()))?;
        let mut flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        if kind == PageKind::Huge2MiB {
            flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_HUGETLB | MapFlags::MAP_HUGE_2MB;
        }
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            mmap_anonymous(None, mapped, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags)
        }
        .map_err(|e| fail(e.into()))?;
        if kind == PageKind::Normal && mapped.get() >= 2 << 20 {
            // Fewer pages to pin, and fewer entries in the table of the card. It is a hint, so an
            // error is ignored. SAFETY: the range is the mapping just made.
            let _ = unsafe { madvise(base, mapped.get(), MmapAdvise::MADV_HUGEPAGE) };
        }
        // After a fork, the device and the parent must not have different pages.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(base, mapped.get(), MmapAdvise::MADV_DONTFORK) };
        Ok(Arc::new(Self { base: base.cast(), len: mapped.get(), mapped, kind }))
    }

    /// Maps a file of whole pages that other processes map as well, such as one of tmpfs or of
    /// hugetlbfs. A copy from or to a page that was cut off the file since then ends the process
    /// with SIGBUS: trust every process that may write the file.
    ///
    /// # Errors
    /// The file is empty or not whole pages, or the system cannot map it.
    pub fn map_file(file: &File) -> io::Result<Arc<Self>> {
        let region = Self::map(file, MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE)?;
        // MAP_POPULATE does nothing in a process that locks its memory on fault (mlockall(2)).
        // Before Linux 5.14 the advice is refused, and pages come when they are used.
        // SAFETY: the range is the mapping just made, which may be written.
        let _ = unsafe {
            libc::madvise(region.base.as_ptr().cast(), region.len, libc::MADV_POPULATE_WRITE)
        };
        Ok(region)
    }

    /// Maps a file without populating it: untouched pages of the file take no memory.
    ///
    /// # Errors
    /// As of [`Self::map_file`].
    pub fn map_file_lazily(file: &File) -> io::Result<Arc<Self>> {
        Self::map(file, MapFlags::MAP_SHARED)
    }

    fn map(file: &File, flags: MapFlags) -> io::Result<Arc<Self>> {
        let len = file.metadata()?.len();
        let mapped = usize::try_from(len).ok().and_then(NonZeroUsize::new);
        let mapped = mapped.filter(|len| len.get().is_multiple_of(4096)).ok_or_else(|| {
            io::Error::other(format!("it has {len} bytes, which is not one page of 4096 or more"))
        })?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a mapping at an address of the kernel's choice aliases nothing of this process;
        // other processes change its bytes as a device would.
        let base = unsafe { mmap(None, mapped, protection, flags, file, 0) }?;
        // As in `allocate`. SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(base, mapped.get(), MmapAdvise::MADV_DONTFORK) };
        Ok(Arc::new(Self { base: base.cast(), len: mapped.get(), mapped, kind: PageKind::Normal }))
    }

    /// Length in bytes, whole pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a region has at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The kind of pages.
    #[must_use]
    pub fn kind(&self) -> PageKind {
        self.kind
    }

    /// Address of the first byte, as peers and devices use it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Pointer to `len` bytes from `offset`. `None` if they are not all inside the region. The
    /// pointer is valid while the region lives. The bytes may change at any time.
    #[must_use]
    #[inline]
    pub fn pointer(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        // Two comparisons, and no sum that may overflow.
        if len > self.len || offset > self.len - len {
            return None;
        }
        // SAFETY: offset <= len of the mapping, so the result is inside it or one past its end.
        Some(unsafe { self.base.add(offset) })
    }

    /// Copies out.
    ///
    /// # Panics
    /// The range is not inside the region: a bug of the caller.
    #[inline]
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.pointer(offset, out.len()).expect("range inside the region");
        // SAFETY: `from` is valid for out.len() bytes (checked), `out` is exclusive and cannot
        // overlap the mapping, of which no reference exists.
        unsafe { copy_apart(from.as_ptr(), out.as_mut_ptr(), out.len()) }
        // The copy must stay as it is: the compiler must not read the source a second time after
        // this.
        compiler_fence(Ordering::Acquire);
    }

    /// The bytes from there on, copied out. For a few bytes.
    ///
    /// # Panics
    /// The range is not inside the region: a bug of the caller.
    #[must_use]
    #[inline]
    pub fn read_array<const N: usize>(&self, offset: usize) -> [u8; N] {
        let from = self.pointer(offset, N).expect("range inside the region");
        // SAFETY: `from` is valid for N bytes (checked), and bytes need no alignment.
        let bytes = unsafe { from.cast::<[u8; N]>().read() };
        // As in `read`.
        compiler_fence(Ordering::Acquire);
        bytes
    }

    /// Copies in.
    ///
    /// # Panics
    /// The range is not inside the region: a bug of the caller.
    #[inline]
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.pointer(offset, bytes.len()).expect("range inside the region");
        // SAFETY: `to` is valid for bytes.len() bytes (checked) and `bytes` cannot overlap the
        // mapping.
        unsafe { copy_apart(bytes.as_ptr(), to.as_ptr(), bytes.len()) }
    }

    /// A number that depends on `len` bytes, such as a checksum, computed in place. The caller sees
    /// to it that nothing writes the bytes meanwhile; if a peer breaks a rule and does, the number
    /// is that of no bytes in particular. So `number` must use the bytes only as numbers: it must
    /// not branch on one of them or index by one of them and rely on reading the same byte again.
    ///
    /// # Panics
    /// The range is not inside the region: a bug of the caller.
    #[inline]
    pub fn sum(&self, offset: usize, len: usize, number: impl FnOnce(&[u8]) -> u32) -> u32 {
        let from = self.pointer(offset, len).expect("range inside the region");
        // The fence keeps reads of the device's data behind the read of its completion.
        compiler_fence(Ordering::Acquire);
        // SAFETY: `from` is valid for `len` bytes (checked), which are initialised: the mapping
        // began as zeros. No code of this program writes them during the call (the caller's
        // promise); a device that does changes the number that comes out, and nothing else. The
        // reference ends with the call: `u32` cannot carry it out.
        let sum = number(unsafe { std::slice::from_raw_parts(from.as_ptr(), len) });
        compiler_fence(Ordering::Acquire);
        sum
    }

    /// Zeroes a range.
    ///
    /// # Panics
    /// The range is not inside the region: a bug of the caller.
    pub fn zero(&self, offset: usize, len: usize) {
        let to = self.pointer(offset, len).expect("range inside the region");
        // SAFETY: `to` is valid for `len` bytes (checked).
        unsafe { std::ptr::write_bytes(to.as_ptr(), 0, len) }
    }

    /// Copies `len` bytes to another region, or within this one. The ranges may overlap.
    ///
    /// # Panics
    /// A range is not inside its region: a bug of the caller.
    pub fn copy_to(&self, offset: usize, to: &Self, to_offset: usize, len: usize) {
        let source = self.pointer(offset, len).expect("source inside the region");
        let target = to.pointer(to_offset, len).expect("target inside the region");
        if source.as_ptr().addr().abs_diff(target.as_ptr().addr()) >= len {
            // SAFETY: both are valid for `len` bytes (checked), and so far apart that they share
            // none.
            unsafe { copy_apart(source.as_ptr(), target.as_ptr(), len) }
        } else {
            // SAFETY: both are valid for `len` bytes (checked); `copy` allows overlap.
            unsafe { std::ptr::copy(source.as_ptr(), target.as_ptr(), len) }
        }
    }
}

/// Most bytes for one call of `memcpy`: a page, so that most copies are one call. For longer copies
/// glibc may use string instructions (from 8 KiB on with AVX). They are slow to start, and slow
/// throughout on an emulated processor. For shorter copies glibc uses them only on a processor that
/// says that it starts them fast, or on one without AVX.
const STRIDE: usize = 4 << 10;

/// Copies between ranges that share no byte.
///
/// # Safety
/// As of [`std::ptr::copy_nonoverlapping`].
#[inline]
pub(crate) unsafe fn copy_apart(from: *const u8, to: *mut u8, len: usize) {
    if len <= STRIDE {
        // SAFETY: the caller's promise.
        return unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { copy_in_strides(from, to, len) }
}

/// As [`copy_apart`], for any length. A function of its own, because most copies are short.
///
/// # Safety
/// As of [`std::ptr::copy_nonoverlapping`].
#[inline(never)]
unsafe fn copy_in_strides(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    while at < len {
        let part = STRIDE.min(len - at);
        // SAFETY: `at + part <= len`, and the caller promises both for `len` bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), part) };
        at += part;
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: base and mapped are of the mapping made in `allocate`, which is unmapped only
        // here. MRs and rings that use it hold an Arc of it and are gone.
        let _ = unsafe { munmap(self.base.cast(), self.mapped.get()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_bounds() {
        let region = Region::allocate(5000, PageKind::Normal).unwrap();
        assert_eq!(region.len(), 8192);
        region.write(8190, &[1, 2]);
        let mut out = [9; 3];
        region.read(8189, &mut out);
        assert_eq!(out, [0, 1, 2]);
        assert!(region.pointer(8192, 0).is_some());
        assert!(region.pointer(8192, 1).is_none());
        assert!(region.pointer(usize::MAX, 2).is_none());
        let sum = || region.sum(8188, 4, |bytes| bytes.iter().map(|byte| u32::from(*byte)).sum());
        assert_eq!(sum(), 3, "of 0, 0, 1 and 2");
        region.copy_to(8189, &region, 0, 3);
        region.zero(8189, 3);
        assert_eq!(sum(), 0);
        region.read(0, &mut out);
        assert_eq!(out, [0, 1, 2]);
        // Longer than a stride, apart and overlapping.
        let region = Region::allocate(8 * STRIDE, PageKind::Normal).unwrap();
        let bytes: Vec<u8> = (0..251u8).cycle().take(2 * STRIDE + 900).collect();
        region.write(5, &bytes);
        region.copy_to(5, &region, 4 * STRIDE, bytes.len());
        region.copy_to(4 * STRIDE, &region, 4 * STRIDE + 100, bytes.len());
        let mut copy = vec![0; bytes.len()];
        region.read(4 * STRIDE + 100, &mut copy);
        assert!(copy == bytes);
        assert!(Region::allocate(0, PageKind::Normal).is_err());
    }
}
