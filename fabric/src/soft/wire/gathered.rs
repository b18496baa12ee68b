//! [`Gathered`]: the pieces of one call that sends.
//!
//! Headers and short payloads are copied into one buffer, one behind the other, and are one piece
//! there. Long payloads are pieces of their own, at their place in a region.

use std::marker::PhantomData;

use super::frame::HEADER;
use super::pieces::NO_PIECE;

/// Pieces in one call.
const PIECES: usize = 64;
/// Bytes of headers and short payloads in one call.
pub(in crate::soft) const LINES: usize = 16 << 10;
/// A payload up to this size is copied behind its header: a piece of its own costs the kernel more.
const SHORT: usize = 1 << 10;

/// The pieces of a call, and the buffer of its headers and short payloads.
pub(in crate::soft) struct Gathered<'a> {
    // Raw, because pieces point into the buffer while more is added behind them.
    lines: *mut u8,
    room: usize,
    used: usize,
    pieces: [libc::iovec; PIECES],
    count: usize,
    // Bytes that may still be added.
    share: usize,
    // The last piece ends where the next bytes of the buffer begin.
    open: bool,
    _lines: PhantomData<&'a mut [u8]>,
}

impl<'a> Gathered<'a> {
    /// No pieces yet; `lines` is the buffer. `share` bounds the bytes; the last header and short
    /// payload may exceed it.
    #[inline]
    pub(in crate::soft) fn new(lines: &'a mut [u8], share: usize) -> Self {
        Self {
            lines: lines.as_mut_ptr(),
            room: lines.len(),
            used: 0,
            pieces: [NO_PIECE; PIECES],
            count: 0,
            share,
            open: false,
            _lines: PhantomData,
        }
    }

    /// The pieces so far. They are valid as long as the payloads that were added.
    pub(in crate::soft) fn pieces(&self) -> &[libc::iovec] {
        &self.pieces[..self.count]
    }

    /// Whether there is room for a frame with a payload of `parts` parts of any length.
    #[inline]
    pub(in crate::soft) fn has_room(&self, parts: usize) -> bool {
        self.count + 1 + parts <= PIECES
            && self.room - self.used >= HEADER + SHORT
            && self.share > 0
    }

    /// Adds a header, or the rest of one.
    #[inline]
    pub(in crate::soft) fn header(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            // SAFETY: a slice is readable for its length.
            unsafe { self.copy(bytes.as_ptr(), bytes.len()) };
        }
    }

    /// Adds a payload, behind its header.
    ///
    /// # Safety
    /// Every part is readable for its length until the call is over.
    #[inline]
    pub(in crate::soft) unsafe fn payload(&mut self, parts: &[libc::iovec]) {
        let bytes: usize = parts.iter().map(|part| part.iov_len).sum();
        for part in parts {
            if bytes <= SHORT {
                // SAFETY: by the caller's promise.
                unsafe { self.copy(part.iov_base.cast(), part.iov_len) };
            } else {
                let iov_len = part.iov_len.min(self.share);
                self.share -= iov_len;
                self.pieces[self.count] = libc::iovec { iov_len, ..*part };
                self.count += 1;
                self.open = false;
            }
        }
    }

    /// Copies bytes into the buffer. The caller has checked the room.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes.
    #[inline]
    unsafe fn copy(&mut self, from: *const u8, len: usize) {
        assert!(len <= self.room - self.used, "has_room");
        // SAFETY: `used <= room`, the length of the buffer.
        let to = unsafe { self.lines.add(self.used) };
        // SAFETY: `from` by the caller's promise; `to` has so much room in a buffer that `self`
        // borrows exclusively, and which no region contains.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        if self.open {
            self.pieces[self.count - 1].iov_len += len;
        } else {
            self.pieces[self.count] = libc::iovec { iov_base: to.cast(), iov_len: len };
            self.count += 1;
            self.open = true;
        }
        self.used += len;
        self.share = self.share.saturating_sub(len);
    }
}
