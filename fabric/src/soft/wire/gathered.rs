//! [`Gathered`]: the pieces of one call that sends.
//!
//! Headers and short payloads are copied into one buffer, one behind the other, and are one piece
//! there. Long payloads are pieces of their own, at their place in a region.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::frame::HEADER;

/// Pieces in one call: the answers to 32 reads, with some messages between them, are one call.
const PIECES: usize = 128;
/// Bytes of headers and short payloads in one call.
pub(in crate::soft) const SEND_BYTES: usize = 16 << 10;
/// A payload up to this size is copied behind its header: a piece of its own costs the kernel more.
const SHORT: usize = 1 << 10;

/// The pieces of a call, and the buffer of its headers and short payloads.
pub(in crate::soft) struct Gathered<'a> {
    // Raw, because pieces point into the buffer while more is added behind them.
    send_bytes: *mut u8,
    room: usize,
    used: usize,
    // Those before `count` are written.
    pieces: [MaybeUninit<libc::iovec>; PIECES],
    count: usize,
    // Bytes that may still be added.
    share: usize,
    // The last piece ends where the next bytes of the buffer begin.
    open: bool,
    _send_bytes: PhantomData<&'a mut [u8]>,
}

impl<'a> Gathered<'a> {
    /// No pieces yet; `send_bytes` is the buffer. `share` bounds the bytes; the last header and
    /// short payload may exceed it.
    #[inline]
    pub(in crate::soft) fn new(send_bytes: &'a mut [u8], share: usize) -> Self {
        Self {
            send_bytes: send_bytes.as_mut_ptr(),
            room: send_bytes.len(),
            used: 0,
            pieces: [const { MaybeUninit::uninit() }; PIECES],
            count: 0,
            share,
            open: false,
            _send_bytes: PhantomData,
        }
    }

    /// The pieces so far. They are valid as long as the payloads that were added.
    pub(in crate::soft) fn pieces(&self) -> &[libc::iovec] {
        let written = &self.pieces[..self.count];
        // SAFETY: the pieces before `count` are written, and a `MaybeUninit` is laid out as its
        // content.
        unsafe { std::slice::from_raw_parts(written.as_ptr().cast(), written.len()) }
    }

    #[inline]
    fn push(&mut self, piece: libc::iovec) {
        self.pieces[self.count].write(piece);
        self.count += 1;
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
                self.push(libc::iovec { iov_len, ..*part });
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
        let to = unsafe { self.send_bytes.add(self.used) };
        // SAFETY: `from` by the caller's promise; `to` has so much room in a buffer that `self`
        // borrows exclusively, and which no region contains.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        if self.open {
            // SAFETY: the last piece is open, so there is one, and it is written.
            unsafe { self.pieces[self.count - 1].assume_init_mut() }.iov_len += len;
        } else {
            self.push(libc::iovec { iov_base: to.cast(), iov_len: len });
            self.open = true;
        }
        self.used += len;
        self.share = self.share.saturating_sub(len);
    }
}
