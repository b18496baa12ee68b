//! [`Connection`]: a socket of a front end: messages and the descriptors that come with them.
//!
//! A message has one deadline, however it comes. The flags and time-outs of the socket are not
//! relied on: the socket for messages of this end comes from the front end, which can change them.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, getsockopt, recv, recvmsg, send, sockopt};

use super::message::{Broken, HEADER_BYTES, Header, REGIONS_MAX, Request};

/// How long a message may take from its first byte to its last, in either direction.
const PATIENCE: Duration = Duration::from_secs(5);
/// How soon whoever waits for a message sees that the disk is to go.
const LOOK: Duration = Duration::from_millis(100);

/// A socket of a front end.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    ends: Arc<AtomicBool>,
}

/// A message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) request: Request,
    pub(super) files: Vec<File>,
}

impl Connection {
    /// Takes a socket over. Nobody waits for a message when the disk `ends`.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn new(stream: UnixStream, ends: Arc<AtomicBool>) -> io::Result<Self> {
        getsockopt(&stream, sockopt::SockType)?;
        Ok(Self { stream, ends })
    }

    /// The next message, which has to have begun; `None` at the end of the connection.
    ///
    /// # Errors
    /// The connection broke, the front end broke a rule, or the message is not there in time.
    pub(super) fn receive(&mut self) -> io::Result<Option<Message>> {
        let by = Instant::now() + PATIENCE;
        let mut header = [0; HEADER_BYTES];
        let (received, files) = self.receive_files(&mut header, by)?;
        if received == 0 {
            return Ok(None);
        }
        self.receive_all(&mut header[received..], by)?;
        let header = Header::parse(header).map_err(broken)?;
        let mut body = vec![0; header.len];
        self.receive_all(&mut body, by)?;
        let request = header.request(&body).map_err(broken)?;
        Ok(Some(Message { header, request, files }))
    }

    fn receive_files(&self, bytes: &mut [u8], by: Instant) -> io::Result<(usize, Vec<File>)> {
        let mut space = nix::cmsg_space!([RawFd; REGIONS_MAX]);
        let mut into = [IoSliceMut::new(bytes)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
        let message = loop {
            match recvmsg::<()>(self.stream.as_raw_fd(), &mut into, Some(&mut space), flags) {
                Ok(message) => break message,
                Err(error) => self.try_again(error, PollFlags::POLLIN, by)?,
            }
        };
        let mut files = Vec::new();
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(descriptors) = control {
                files.extend(descriptors.into_iter().map(|descriptor| {
                    // SAFETY: the kernel made this descriptor for this message, and nobody else
                    // has its number.
                    File::from(unsafe { OwnedFd::from_raw_fd(descriptor) })
                }));
            }
        }
        Ok((message.bytes, files))
    }

    fn receive_all(&self, mut bytes: &mut [u8], by: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            match recv(self.stream.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => bytes = &mut bytes[received..],
                Err(error) => self.try_again(error, PollFlags::POLLIN, by)?,
            }
        }
        Ok(())
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection broke, or the front end does not take the message in time.
    pub(super) fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let by = Instant::now() + PATIENCE;
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while !bytes.is_empty() {
            match send(self.stream.as_raw_fd(), bytes, flags) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) => self.try_again(error, PollFlags::POLLOUT, by)?,
            }
        }
        Ok(())
    }

    /// After an error that another try may not have: waits until then, but not too long.
    ///
    /// # Errors
    /// It is another error, or too late.
    fn try_again(&self, error: Errno, until: PollFlags, by: Instant) -> io::Result<()> {
        if !matches!(error, Errno::EAGAIN | Errno::EINTR) {
            return Err(error.into());
        }
        if self.ends.load(Ordering::Acquire) {
            return Err(io::Error::other("the disk is to go, and a message is not whole"));
        }
        let left = by.saturating_duration_since(Instant::now()).min(LOOK);
        // Rounded up, so that the last try is not before the deadline.
        let ms = u16::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(u16::MAX);
        if ms == 0 {
            let text = format!("a message is not there, or not taken, within {PATIENCE:?}");
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        let mut polled = [PollFd::new(self.stream.as_fd(), until)];
        match poll(&mut polled, PollTimeout::from(ms)) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

pub(super) fn broken(broken: Broken) -> io::Error {
    io::Error::other(broken)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn pair() -> (Connection, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        (Connection::new(here, Arc::default()).unwrap(), there)
    }

    #[test]
    fn a_message_has_one_deadline_however_it_comes() {
        let (mut connection, mut front_end) = pair();
        // A body of 4096 bytes, a byte at a time: each comes soon, and all of them never.
        let dripping = std::thread::spawn(move || {
            let _ = front_end.write_all(&[[1u32, 1, 4096].map(u32::to_le_bytes).concat()].concat());
            while front_end.write_all(&[0]).is_ok() {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let begun = Instant::now();
        let error = connection.receive().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        let took = begun.elapsed();
        assert!((PATIENCE..PATIENCE * 3).contains(&took), "{took:?}");
        drop(connection);
        dripping.join().unwrap();
    }

    #[test]
    fn a_front_end_that_takes_nothing_keeps_nobody_longer_than_its_deadline() {
        let (mut connection, _front_end) = pair();
        let begun = Instant::now();
        let error = loop {
            if let Err(error) = connection.send(&[0; 4096]) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        assert!(begun.elapsed() < PATIENCE * 3);
    }

    #[test]
    fn a_message_in_two_parts_is_one() {
        let (mut connection, mut front_end) = pair();
        let message = [[16u32, 1, 8].map(u32::to_le_bytes).concat(), vec![7; 8]].concat();
        front_end.write_all(&message[..5]).unwrap();
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            front_end.write_all(&message[5..]).unwrap();
        });
        let request = connection.receive().unwrap().unwrap().request;
        assert_eq!(request, Request::SetProtocolFeatures(0x0707_0707_0707_0707));
        later.join().unwrap();
        assert!(connection.receive().unwrap().is_none(), "the end");
        let no_socket = UnixStream::from(OwnedFd::from(File::open("/").unwrap()));
        assert!(Connection::new(no_socket, Arc::default()).is_err());
    }

    #[test]
    fn nobody_waits_for_the_rest_of_a_message_when_the_disk_is_to_go() {
        let (mut connection, mut front_end) = pair();
        front_end.write_all(&[1]).unwrap();
        connection.ends.store(true, Ordering::Release);
        let begun = Instant::now();
        assert!(connection.receive().is_err());
        assert!(begun.elapsed() < PATIENCE);
    }
}
