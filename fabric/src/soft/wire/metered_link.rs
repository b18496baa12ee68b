//! [`MeteredLink`]: a link that counts the calls into it, and how long it has brought nothing.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use nix::sys::eventfd::EventFd;

use super::late::LateBytes;
use super::tcp_link::{Moved, PeerStream};
use super::tls::NoTls;
use crate::connect::cipher_keys::CipherKey;

/// The link of a QP.
#[derive(Debug)]
pub(in crate::soft) struct MeteredLink {
    link: Box<dyn PeerStream>,
    // Calls that moved bytes or tried to, since they were last taken.
    calls: u64,
    // Receive calls since one brought something.
    quiet: u8,
}

impl MeteredLink {
    pub(in crate::soft) fn new(link: Box<dyn PeerStream>) -> Self {
        Self { link, calls: 0, quiet: 0 }
    }

    /// As [`PeerStream::send`].
    ///
    /// # Safety
    /// Every piece is readable for its length during the call.
    #[inline]
    pub(in crate::soft) unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Moved> {
        self.calls += 1;
        // SAFETY: by the caller's promise.
        unsafe { self.link.send(pieces) }
    }

    /// As [`PeerStream::most_per_send`].
    #[inline]
    pub(in crate::soft) fn most_per_send(&self, waiting: usize) -> usize {
        self.link.most_per_send(waiting)
    }

    /// As [`PeerStream::scatters`].
    #[inline]
    pub(in crate::soft) fn scatters(&self) -> bool {
        self.link.scatters()
    }

    /// As [`PeerStream::receive`].
    ///
    /// # Safety
    /// Every piece is writable for its length during the call.
    #[inline]
    pub(in crate::soft) unsafe fn receive(&mut self, pieces: &[libc::iovec]) -> io::Result<Moved> {
        self.calls += 1;
        self.quiet = self.quiet.saturating_add(1);
        // SAFETY: by the caller's promise.
        let result = unsafe { self.link.receive(pieces) };
        if matches!(result, Ok(moved) if moved.bytes > 0) {
            self.quiet = 0;
        }
        result
    }

    /// Sends bytes outside of frames, all or nothing. False when the link did not take all.
    pub(in crate::soft) fn send_all(&mut self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        while !rest.is_empty() {
            let piece =
                libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: the piece is a slice borrowed here.
            match unsafe { self.link.send(&[piece]) } {
                Ok(moved) => rest = &rest[moved.bytes.min(rest.len())..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Receives and drops the waiting bytes, at most about `bytes`.
    pub(in crate::soft) fn discard(&mut self, bytes: usize) {
        let mut sink = [0u8; 16 << 10];
        let mut left = bytes;
        while left > 0 {
            let piece = libc::iovec { iov_base: sink.as_mut_ptr().cast(), iov_len: sink.len() };
            // SAFETY: the piece is an exclusive local array.
            match unsafe { self.link.receive(&[piece]) } {
                Ok(moved) if moved.bytes > 0 && moved.more => {
                    left = left.saturating_sub(moved.bytes);
                }
                _ => break,
            }
        }
    }

    /// Calls since they were last taken.
    pub(in crate::soft) fn take_calls(&mut self) -> u64 {
        std::mem::take(&mut self.calls)
    }

    /// Receive calls since one brought something. Does not grow beyond its type.
    pub(in crate::soft) fn quiet(&self) -> u8 {
        self.quiet
    }

    /// Restarts the counts for a new poller of the link.
    pub(in crate::soft) fn restart(&mut self) {
        self.quiet = 0;
    }

    /// As [`PeerStream::finish`].
    pub(in crate::soft) fn finish(&mut self) {
        self.link.finish();
    }

    /// As [`PeerStream::close`].
    pub(in crate::soft) fn close(&mut self) {
        self.link.close();
    }

    /// As [`PeerStream::fd`].
    pub(in crate::soft) fn fd(&self) -> Option<RawFd> {
        self.link.fd()
    }

    /// As [`PeerStream::wake_by`].
    pub(in crate::soft) fn wake_by(&mut self, event: &Arc<EventFd>) {
        self.link.wake_by(event);
    }

    /// As [`PeerStream::encrypt_receive`].
    pub(in crate::soft) fn encrypt_receive(&mut self, key: &CipherKey) -> Result<(), NoTls> {
        self.link.encrypt_receive(key)
    }

    /// As [`PeerStream::encrypt_send`].
    pub(in crate::soft) fn encrypt_send(&mut self, key: &CipherKey) -> Result<(), NoTls> {
        self.link.encrypt_send(key)
    }

    /// As [`PeerStream::peer`].
    pub(in crate::soft) fn peer(&self) -> String {
        self.link.peer()
    }

    /// As [`PeerStream::unread`].
    pub(in crate::soft) fn unread(&mut self) -> Vec<u8> {
        self.link.unread()
    }

    /// As [`PeerStream::land_late`].
    pub(in crate::soft) fn land_late(&mut self, landings: Vec<LateBytes>) {
        self.link.land_late(landings);
    }
}
