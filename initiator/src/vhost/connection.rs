//! [`Connection`]: the socket of one front end: messages and the descriptors that come with them.

use std::fs::File;
use std::io::{self, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use super::message::{Broken, HEADER_BYTES, Header, REGIONS_MAX, Request};

/// How long the rest of a message that has begun, and the sending of an answer, may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The socket of one front end.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
}

/// A message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) request: Request,
    pub(super) files: Vec<File>,
}

impl Connection {
    /// Takes a socket over.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream })
    }

    /// The next message, which is to be there; `None` at the end of the connection.
    ///
    /// # Errors
    /// The connection broke, the front end broke a rule, or it does not go on.
    pub(super) fn receive(&mut self) -> io::Result<Option<Message>> {
        let mut header = [0; HEADER_BYTES];
        let (received, files) = self.receive_files(&mut header)?;
        if received == 0 {
            return Ok(None);
        }
        self.stream.read_exact(&mut header[received..])?;
        let header = Header::parse(header).map_err(broken)?;
        let mut body = vec![0; header.len];
        self.stream.read_exact(&mut body)?;
        let request = header.request(&body).map_err(broken)?;
        Ok(Some(Message { header, request, files }))
    }

    fn receive_files(&self, bytes: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
        let mut space = nix::cmsg_space!([std::os::fd::RawFd; REGIONS_MAX]);
        let mut into = [IoSliceMut::new(bytes)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = recvmsg::<()>(self.stream.as_raw_fd(), &mut into, Some(&mut space), flags)?;
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

    /// Sends a message.
    ///
    /// # Errors
    /// The connection broke, or the front end takes nothing.
    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
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
