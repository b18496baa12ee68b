//! Byte streams that carry frames.

use std::fmt;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use nix::sys::eventfd::EventFd;

use super::call_bytes::{self, CallBytes};
use super::late::LateBytes;
use super::tls::{self, BadRecord, NoTls};
use crate::address::end_name;
use crate::connect::cipher_keys::CipherKey;

/// The bytes that a call moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::soft) struct Moved {
    /// Bytes; 0 from a receive is the end of the stream.
    pub(in crate::soft) bytes: usize,
    /// Another call now may move more.
    pub(in crate::soft) more: bool,
}

/// A reliable, ordered, nonblocking byte stream.
pub(in crate::soft) trait PeerStream: Send + fmt::Debug {
    /// Sends a prefix of the pieces; `WouldBlock` when there is no room.
    ///
    /// # Safety
    /// Every piece is readable for its length during the call.
    unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Moved>;

    /// Bytes that the next [`send`](Self::send) should have at most, where `waiting` bytes wait.
    fn most_per_send(&self, _waiting: usize) -> usize {
        call_bytes::LEAST
    }

    /// Fills a prefix of the pieces; `WouldBlock` when nothing is there.
    ///
    /// # Safety
    /// Every piece is writable for its length during the call.
    unsafe fn receive(&mut self, pieces: &[libc::iovec]) -> io::Result<Moved>;

    /// Whether [`receive`](Self::receive) fills many small pieces as fast as a few large ones.
    fn scatters(&self) -> bool {
        true
    }

    /// Ends the outgoing stream. Bytes sent before still arrive.
    fn finish(&mut self);

    /// Ends both directions.
    fn close(&mut self);

    /// A descriptor for epoll, if the link has one.
    fn fd(&self) -> Option<RawFd>;

    /// A link without a descriptor writes to `event` when something changes.
    fn wake_by(&mut self, event: &Arc<EventFd>);

    /// All further incoming bytes must be encrypted with this key. A failed
    /// [`receive`](Self::receive) may then be a [`BadRecord`]. Nothing may have been received that
    /// the peer encrypted. Call it before [`encrypt_send`](Self::encrypt_send).
    fn encrypt_receive(&mut self, key: &CipherKey) -> Result<(), NoTls> {
        let _ = key;
        Err(NoTls::no_socket())
    }

    /// Encrypts all further outgoing bytes with this key.
    fn encrypt_send(&mut self, key: &CipherKey) -> Result<(), NoTls> {
        let _ = key;
        Err(NoTls::no_socket())
    }

    /// The other end, for messages.
    fn peer(&self) -> String;

    /// Bytes of the peer that were not received, if the device may still place them.
    fn unread(&mut self) -> Vec<u8> {
        Vec::new()
    }

    /// Makes these land at some time before the link is dropped, and once more when it is dropped.
    fn land_late(&mut self, landings: Vec<LateBytes>) {
        drop(landings);
    }
}

/// A connected TCP socket, nonblocking.
#[derive(Debug)]
pub(in crate::soft) struct TcpLink {
    stream: TcpStream,
    // The incoming bytes are TLS records.
    encrypted: bool,
    call: CallBytes,
}

impl TcpLink {
    pub(in crate::soft) fn new(stream: TcpStream) -> Self {
        Self { stream, encrypted: false, call: CallBytes::new() }
    }

    /// Tells a bad record from a connection that failed.
    fn explain(&self, error: io::Error) -> io::Error {
        let bad = error.raw_os_error().filter(|_| self.encrypted).and_then(BadRecord::of);
        bad.map_or(error, Into::into)
    }
}

fn message(pieces: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: msghdr is plain data for which all zeroes is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // Neither call writes to the array. The field is mutable for historical reasons.
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len() as _;
    message
}

fn moved(result: isize, pieces: &[libc::iovec]) -> io::Result<Moved> {
    let Ok(bytes) = usize::try_from(result) else {
        return Err(io::Error::last_os_error());
    };
    // A short count means that the buffer of the socket is full or empty. The next call would only
    // return EAGAIN.
    let wanted: usize = pieces.iter().map(|p| p.iov_len).sum();
    Ok(Moved { bytes, more: bytes == wanted })
}

impl PeerStream for TcpLink {
    unsafe fn send(&mut self, pieces: &[libc::iovec]) -> io::Result<Moved> {
        let (fd, flags) = (self.stream.as_raw_fd(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
        let sent = if let [only] = pieces {
            // SAFETY: the fd is open; the piece is readable by the caller's promise.
            unsafe { libc::send(fd, only.iov_base, only.iov_len, flags) }
        } else {
            let message = message(pieces);
            // SAFETY: the fd is open; `message` names `pieces`, readable by the caller's promise.
            unsafe { libc::sendmsg(fd, &raw const message, flags) }
        };
        let moved = moved(sent, pieces);
        if let Ok(moved) = moved {
            self.call.sent(moved.bytes);
        }
        moved
    }

    fn most_per_send(&self, waiting: usize) -> usize {
        // The time of a call is that of the cipher.
        if self.encrypted { call_bytes::LEAST } else { self.call.most(waiting) }
    }

    unsafe fn receive(&mut self, pieces: &[libc::iovec]) -> io::Result<Moved> {
        let fd = self.stream.as_raw_fd();
        let got = if let [only] = pieces {
            // SAFETY: the fd is open; the piece is writable by the caller's promise.
            unsafe { libc::recv(fd, only.iov_base, only.iov_len, libc::MSG_DONTWAIT) }
        } else {
            let mut message = message(pieces);
            // SAFETY: the fd is open; `message` names `pieces`, writable by the caller's promise.
            unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) }
        };
        moved(got, pieces).map_err(|error| self.explain(error))
    }

    fn scatters(&self) -> bool {
        // A piece that a record crosses is decrypted elsewhere, and copied.
        !self.encrypted
    }

    fn finish(&mut self) {
        // shutdown(2) fails only when the connection is gone already.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    fn close(&mut self) {
        // As above.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.stream.as_raw_fd())
    }

    fn wake_by(&mut self, _event: &Arc<EventFd>) {}

    fn encrypt_receive(&mut self, key: &CipherKey) -> Result<(), NoTls> {
        tls::attach(&self.stream)?;
        tls::encrypt_receive(&self.stream, key)?;
        self.encrypted = true;
        Ok(())
    }

    fn encrypt_send(&mut self, key: &CipherKey) -> Result<(), NoTls> {
        tls::encrypt_send(&self.stream, key)
    }

    fn peer(&self) -> String {
        // getpeername(2) fails when the peer is gone.
        self.stream.peer_addr().map_or_else(|_| "a tcp:// peer".to_owned(), end_name)
    }
}
