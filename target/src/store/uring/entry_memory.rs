//! The memory that entries name: [`EntryMemory`], all of it; [`IoVecs`], the list of one op; and
//! [`Pieces`], the memory registered with the kernel.
//!
//! Invariants: every [`IoVec`] is a part of the region its list was set for; a list holds no empty
//! part and no two parts of which the second begins where the first ends; a list that has reached
//! its greatest length allocates nothing.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use io_uring::IoUring;
use nix::errno::Errno;
use rblk_fabric::Region;

use crate::memory::arena::MAX_EXTENT_BYTES;
use crate::store::{MAX_SEGMENTS, Segment};

// The kernel takes at most 1 GiB as one registered buffer. Extents are aligned to their own length,
// which divides this, so no extent crosses from one piece into the next.
const PIECE: usize = 1 << 30;
const _: () = assert!(PIECE.is_multiple_of(MAX_EXTENT_BYTES as usize));

// One entry takes the longest list: UIO_MAXIOV of linux/uio.h.
const _: () = assert!(MAX_SEGMENTS <= 1024);

/// The memory that entries may point into, held until the kernel has completed them all.
#[derive(Debug)]
pub(super) struct EntryMemory {
    /// The data.
    pub(super) region: Arc<Region>,
    /// The part of the region that is registered with the ring.
    pub(super) pieces: Pieces,
    /// Zeroes to write where a backing has no better way to zero a range.
    pub(super) zeroes: Arc<Region>,
}

impl EntryMemory {
    /// Leaks all of this memory: the kernel may still write to it.
    pub(super) fn leak(&self) {
        std::mem::forget(Arc::clone(&self.region));
        std::mem::forget(Arc::clone(&self.zeroes));
    }
}

/// A part of a region, in the kernel's format.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(in crate::store) struct IoVec(libc::iovec);

// SAFETY: an address and a length, which no code here dereferences; the region they come from is
// Send and Sync.
unsafe impl Send for IoVec {}

impl IoVec {
    fn new(base: NonNull<u8>, len: usize) -> Self {
        Self(libc::iovec { iov_base: base.as_ptr().cast(), iov_len: len })
    }

    /// First byte.
    pub(super) fn base(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Bytes.
    pub(super) fn len(&self) -> usize {
        self.0.iov_len
    }

    fn end(&self) -> *mut u8 {
        self.base().wrapping_add(self.len())
    }
}

/// The remaining memory of a read or write, in order.
#[derive(Debug, Default)]
pub(in crate::store) struct IoVecs {
    list: Vec<IoVec>,
    // Parts before this one are done.
    first: usize,
}

impl IoVecs {
    /// Takes segments of `region`; neighbours become one. False when a segment is not inside.
    pub(in crate::store) fn set(&mut self, region: &Region, memory: &[Segment]) -> bool {
        self.clear();
        for segment in memory.iter().filter(|segment| segment.len > 0) {
            let len = segment.len as usize;
            let Some(base) = region.pointer(segment.offset, len) else { return false };
            match self.list.last_mut() {
                Some(last) if last.end() == base.as_ptr() => last.0.iov_len += len,
                _ => self.list.push(IoVec::new(base, len)),
            }
        }
        true
    }

    /// Empties the list.
    pub(in crate::store) fn clear(&mut self) {
        self.list.clear();
        self.first = 0;
    }

    /// Removes transferred bytes from the front.
    pub(super) fn advance(&mut self, mut bytes: u64) {
        while let Some(part) = self.list.get_mut(self.first) {
            match usize::try_from(bytes) {
                Ok(bytes) if bytes < part.len() => {
                    part.0.iov_base = part.base().wrapping_add(bytes).cast();
                    part.0.iov_len -= bytes;
                    return;
                }
                _ => {
                    bytes -= part.len() as u64;
                    self.first += 1;
                }
            }
        }
    }

    /// The remaining parts.
    pub(super) fn rest(&self) -> &[IoVec] {
        self.list.get(self.first..).unwrap_or(&[])
    }

    /// The remaining parts in the format of `readv` and `writev`: first element and number. `None`
    /// when no part remains.
    pub(in crate::store) fn as_kernel_list(&self) -> Option<(*const libc::iovec, u32)> {
        let rest = self.rest();
        let parts = u32::try_from(rest.len()).ok().filter(|&parts| parts > 0)?;
        // `IoVec` is transparent.
        Some((rest.as_ptr().cast(), parts))
    }
}

/// The part of the region that is registered with a ring, in pieces.
#[derive(Debug)]
pub(super) struct Pieces {
    // Addresses.
    registered: Range<usize>,
}

impl Pieces {
    /// No registered memory.
    pub(super) fn none() -> Self {
        Self { registered: 0..0 }
    }

    /// Registers the part of `range` inside `region`. The ring must not outlive the region's
    /// memory.
    pub(super) fn register(
        ring: &IoUring,
        region: &Region,
        range: Range<usize>,
    ) -> Result<Self, Errno> {
        let pieces: Vec<libc::iovec> = range
            .clone()
            .step_by(PIECE)
            .filter_map(|start| {
                let len = PIECE.min(range.end - start);
                Some(IoVec::new(region.pointer(start, len)?, len).0)
            })
            .collect();
        let Some(start) = pieces.first().map(|piece| piece.iov_base.addr()) else {
            return Ok(Self::none());
        };
        // SAFETY: every piece is inside the region (`pointer` checked), which the store holds until
        // the ring is gone; the kernel pins the pages, so even then they are not reused.
        unsafe { ring.submitter().register_buffers(&pieces) }
            .map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))?;
        Ok(Self { registered: start..start + range.len() })
    }

    /// The registered buffer that contains all of `part`, if any.
    pub(super) fn holding(&self, part: &IoVec) -> Option<u16> {
        let (start, end) = (part.base().addr(), part.end().addr());
        if start < self.registered.start || end > self.registered.end || start == end {
            return None;
        }
        let first = (start - self.registered.start) / PIECE;
        let last = (end - 1 - self.registered.start) / PIECE;
        u16::try_from(first).ok().filter(|_| first == last)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rblk_fabric::PageKind;

    use super::*;

    const BYTES: usize = 64 << 10;

    // Every byte of a list, as offsets in the region.
    fn places(region: &Region, parts: &[IoVec]) -> Vec<usize> {
        let start = usize::try_from(region.address()).unwrap();
        let places = parts.iter().flat_map(|part| {
            let at = part.base().addr() - start;
            at..at + part.len()
        });
        places.collect()
    }

    proptest! {
        // Compares with a list of single bytes.
        #[test]
        fn the_rest_is_the_list_without_the_transferred_bytes(
            cuts in prop::collection::vec((0..BYTES - 600, 0..600_u32, any::<bool>()), 0..12),
            steps in prop::collection::vec(0..900_u64, 0..20),
        ) {
            let region = Region::allocate(BYTES, PageKind::Normal).unwrap();
            let mut memory: Vec<Segment> = Vec::new();
            for (offset, len, adjacent) in cuts {
                let after = memory.last().map(|last| last.offset + last.len as usize);
                let offset = after.filter(|_| adjacent).unwrap_or(offset);
                // Skips a segment that leaves the region.
                if offset + len as usize <= BYTES {
                    memory.push(Segment { offset, len });
                }
            }
            let mut left: Vec<usize> = memory
                .iter()
                .flat_map(|segment| segment.offset..segment.offset + segment.len as usize)
                .collect();
            let mut vecs = IoVecs::default();
            // Earlier contents leave no trace.
            let before = [Segment { offset: 1, len: 5 }, Segment { offset: 0, len: 9 }];
            prop_assert!(vecs.set(&region, &before));
            vecs.advance(7);
            prop_assert!(vecs.set(&region, &memory));
            prop_assert!(vecs.rest().windows(2).all(|pair| pair[0].end() != pair[1].base()));
            prop_assert!(vecs.rest().iter().all(|part| part.len() > 0));
            prop_assert_eq!(places(&region, vecs.rest()), &left[..]);
            for bytes in steps {
                vecs.advance(bytes);
                left.drain(..left.len().min(usize::try_from(bytes).unwrap()));
                prop_assert!(vecs.rest().iter().all(|part| part.len() > 0));
                prop_assert_eq!(places(&region, vecs.rest()), &left[..]);
            }
        }
    }

    #[test]
    fn a_list_does_not_move_until_it_grows() {
        let region = Region::allocate(BYTES, PageKind::Normal).unwrap();
        let memory: Vec<_> =
            (0..128).rev().map(|at| Segment { offset: at * 512, len: 512 }).collect();
        let mut vecs = IoVecs::default();
        assert!(vecs.set(&region, &memory));
        let warm = (vecs.list.as_ptr(), vecs.list.capacity());
        for parts in [1, 128, 64] {
            vecs.clear();
            assert!(vecs.set(&region, &memory[..parts]));
            vecs.advance(700);
            assert_eq!((vecs.list.as_ptr(), vecs.list.capacity()), warm);
        }
    }

    #[test]
    fn a_segment_outside_is_refused() {
        let region = Region::allocate(BYTES, PageKind::Normal).unwrap();
        let inside = Segment { offset: BYTES - 512, len: 512 };
        for offset in [BYTES - 511, BYTES, usize::MAX - 100] {
            let mut vecs = IoVecs::default();
            assert!(!vecs.set(&region, &[inside, Segment { offset, len: 512 }]), "{offset}");
        }
    }
}
