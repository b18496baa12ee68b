//! [`FrontEndSocket`]: a socket of a front end, with its messages and their descriptors.
//!
//! A message has one deadline, even if it comes in pieces. The flags and time-outs of the socket
//! are not relied on: the socket for messages of this end comes from the front end, which can
//! change them.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, UnixAddr, getsockname, send};

use super::guest_memory::is_memory;
use super::put_away::put_away;
use super::received::{Received, receive};
use super::vhost_user::{Broken, FrontEndRequest, HEADER_BYTES, MessageHeader, REGIONS_MAX};

/// Time limit of a message from its first byte to its last, in either direction.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a wait for a message checks whether the disk ends.
const LOOK: Duration = Duration::from_millis(100);

/// A socket of a front end.
#[derive(Debug)]
pub(super) struct FrontEndSocket {
    // Closed by `put_away`.
    stream: ManuallyDrop<UnixStream>,
    ends: Arc<AtomicBool>,
}

/// A message.
#[derive(Debug)]
pub(super) struct FrontEndMessage {
    pub(super) header: MessageHeader,
    pub(super) request: FrontEndRequest,
    pub(super) files: Vec<File>,
}

impl FrontEndSocket {
    /// Takes a socket over. Waits for messages stop when the disk `ends`.
    pub(super) fn new(stream: UnixStream, ends: Arc<AtomicBool>) -> Self {
        Self { stream: ManuallyDrop::new(stream), ends }
    }

    /// Receives the next message, which must have begun; `None` at the end of the connection.
    ///
    /// # Errors
    /// The connection broke, the front end broke a rule, or the message is late.
    pub(super) fn receive(&mut self) -> io::Result<Option<FrontEndMessage>> {
        let mut files = Vec::new();
        match self.receive_with(&mut files) {
            Ok(Some((header, request))) => Ok(Some(FrontEndMessage { header, request, files })),
            other => {
                self.put_away(files);
                other.map(|_| None)
            }
        }
    }

    fn receive_with(
        &self,
        files: &mut Vec<File>,
    ) -> io::Result<Option<(MessageHeader, FrontEndRequest)>> {
        let by = Instant::now() + PATIENCE;
        let mut header = [0; HEADER_BYTES];
        let received = self.receive_some(&mut header, by, files)?;
        if received == 0 {
            return Ok(None);
        }
        // Descriptors belong to the first byte. Later ones are not used.
        let mut late = Vec::new();
        let received = self
            .receive_all(&mut header[received..], by, &mut late)
            .and_then(|()| self.receive_rest(header, by, &mut late));
        self.put_away(late);
        received.map(Some)
    }

    /// Receives the rest of a message with that header.
    fn receive_rest(
        &self,
        header: [u8; HEADER_BYTES],
        by: Instant,
        late: &mut Vec<File>,
    ) -> io::Result<(MessageHeader, FrontEndRequest)> {
        let header = MessageHeader::parse(header).map_err(broken)?;
        let mut body = vec![0; header.len];
        self.receive_all(&mut body, by, late)?;
        Ok((header, header.request(&body).map_err(broken)?))
    }

    /// Receives the bytes that have arrived: at least one, unless the connection ended.
    fn receive_some(
        &self,
        bytes: &mut [u8],
        by: Instant,
        files: &mut Vec<File>,
    ) -> io::Result<usize> {
        let Received { bytes, cut } = loop {
            match receive(self.stream.as_fd(), bytes, files) {
                Ok(received) => break received,
                Err(error) => self.try_again(error, PollFlags::POLLIN, by)?,
            }
        };
        if cut {
            return Err(io::Error::other(
                "this process has no room for the descriptors of a message",
            ));
        }
        if files.len() > REGIONS_MAX {
            return Err(broken(Broken("a message with more than 8 descriptors")));
        }
        Ok(bytes)
    }

    fn receive_all(
        &self,
        mut bytes: &mut [u8],
        by: Instant,
        late: &mut Vec<File>,
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.receive_some(bytes, by, late)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                received => bytes = &mut bytes[received..],
            }
        }
        Ok(())
    }

    /// Closes unneeded files of the front end, without a wait for them.
    pub(super) fn put_away(&self, files: Vec<File>) {
        // The close of memory never waits.
        let others = files.into_iter().filter(|file| !is_memory(file.as_fd()));
        put_away(others.map(OwnedFd::from).collect(), &self.ends);
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

    /// After an error that may pass: waits for `until`, at most to the deadline.
    ///
    /// # Errors
    /// The error is a different one, or the time is over.
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

impl Drop for FrontEndSocket {
    fn drop(&mut self) {
        // The front end notices this now, even if the socket is closed later.
        let _ = self.stream.shutdown(Shutdown::Both);
        // SAFETY: nothing uses the socket after this.
        let stream = unsafe { ManuallyDrop::take(&mut self.stream) };
        put_away(vec![stream.into()], &self.ends);
    }
}

impl AsFd for FrontEndSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Checks that a file is a socket of this host: neither its messages nor its close leaves the host.
///
/// # Errors
/// The file is no such socket.
pub(super) fn must_be_unix_socket(file: &File) -> io::Result<()> {
    getsockname::<UnixAddr>(file.as_raw_fd()).map(drop).map_err(|error| {
        io::Error::other(format!("a channel that is no Unix socket: {}", error.desc()))
    })
}

pub(super) fn broken(broken: Broken) -> io::Error {
    io::Error::other(broken)
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::os::fd::RawFd;

    use nix::sys::socket::{ControlMessage, sendmsg};

    use super::super::lingering::lingering;
    use super::*;

    fn send_with(front_end: &UnixStream, bytes: &[u8], files: &[RawFd]) {
        let rights = [ControlMessage::ScmRights(files)];
        let bytes = [IoSlice::new(bytes)];
        sendmsg::<()>(front_end.as_raw_fd(), &bytes, &rights, MsgFlags::empty(), None).unwrap();
    }

    /// The number of descriptors of this process for a file.
    fn descriptors_of(path: &std::path::Path) -> usize {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        open.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path)).count()
    }

    #[test]
    fn descriptors_that_are_too_many_or_late_are_refused_and_closed() {
        // No other test of this process has it open.
        let file = tempfile::NamedTempFile::new().unwrap();
        let header = [1u32, 1, 0].map(u32::to_le_bytes).concat();
        let before = descriptors_of(file.path());
        for (count, is_taken) in [(8, true), (9, false), (16, false), (253, false)] {
            let (mut connection, front_end) = pair();
            send_with(&front_end, &header, &vec![file.as_raw_fd(); count]);
            let received = connection.receive();
            match received {
                Ok(Some(message)) => {
                    assert!(is_taken, "{count}");
                    assert_eq!(message.files.len(), count);
                }
                Ok(None) => panic!("{count}: the end"),
                Err(error) => {
                    assert!(!is_taken, "{count}: {error}");
                    assert!(error.to_string().contains("more than 8 descriptors"), "{error}");
                }
            }
        }
        let (mut connection, mut front_end) = pair();
        front_end.write_all(&[16u32, 1, 8].map(u32::to_le_bytes).concat()).unwrap();
        send_with(&front_end, &[0; 8], &[file.as_raw_fd(); 3]);
        assert!(connection.receive().unwrap().unwrap().files.is_empty(), "they came late");
        // Threads of their own close the files.
        let until = Instant::now() + PATIENCE;
        while descriptors_of(file.path()) > before {
            assert!(Instant::now() < until, "{} are open", descriptors_of(file.path()));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_waiting_close_blocks_no_thread() {
        let (file, _peer) = lingering();
        let (late, _late_peer) = lingering();
        let (unread, _unread_peer) = lingering();
        let (mut connection, mut front_end) = pair();
        let header = [5u32, 1, 8].map(u32::to_le_bytes).concat();
        send_with(&front_end, &header, &[file.as_raw_fd()]);
        send_with(&front_end, &[9; 8], &[late.as_raw_fd()]);
        send_with(&front_end, &header, &[unread.as_raw_fd()]);
        front_end.flush().unwrap();
        // Now only the messages hold the files open.
        let begun = Instant::now();
        std::thread::spawn(move || drop((file, late, unread))).join().unwrap();
        assert!(connection.receive().is_err(), "a table of memory that is none");
        drop(connection);
        assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    }

    fn pair() -> (FrontEndSocket, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        (FrontEndSocket::new(here, Arc::default()), there)
    }

    #[test]
    fn a_message_in_pieces_has_one_deadline() {
        let (mut connection, mut front_end) = pair();
        // A body of 4096 bytes, a byte at a time: each byte comes soon, and the whole body never.
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
    fn a_front_end_that_reads_nothing_blocks_only_until_the_deadline() {
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
        assert_eq!(request, FrontEndRequest::SetProtocolFeatures(0x0707_0707_0707_0707));
        later.join().unwrap();
        assert!(connection.receive().unwrap().is_none(), "the end");
        assert!(must_be_unix_socket(&File::open("/").unwrap()).is_err());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(must_be_unix_socket(&File::from(OwnedFd::from(tcp))).is_err());
        assert!(must_be_unix_socket(&File::from(OwnedFd::from(pair().1))).is_ok());
    }

    #[test]
    fn the_end_of_the_disk_ends_the_wait_for_a_message() {
        let (mut connection, mut front_end) = pair();
        front_end.write_all(&[1]).unwrap();
        connection.ends.store(true, Ordering::Release);
        let begun = Instant::now();
        assert!(connection.receive().is_err());
        assert!(begun.elapsed() < PATIENCE);
    }
}
