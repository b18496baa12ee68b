//! [`Stream`]: an iWARP connection driven by hand, over a plain TCP socket: MPA (RFC 5044), DDP
//! (RFC 5041) and RDMAP (RFC 5040). A test can see the sinks of the peer's READs, which a card
//! hides, and can send frames that no card sends.
//!
//! Without markers and CRC, which Soft-iWARP does not demand.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// The longest payload of a segment that this end sends.
const SEGMENT_MAX: usize = 4096;
/// A silence after which the peer is nudged.
const SILENCE: Duration = Duration::from_millis(500);
/// Nudges after which a silent peer is given up.
const NUDGES: u32 = 60;

const TAGGED: u16 = 0x8000;
const LAST: u16 = 0x4000;
/// DDP version 1, RDMAP version 1.
const VERSIONS: u16 = 0x0140;
const OPCODE: u16 = 0x000f;

const WRITE: u16 = 0;
const READ_REQUEST: u16 = 1;
const READ_RESPONSE: u16 = 2;
const SEND: u16 = 3;
const TERMINATE: u16 = 7;

/// A place in the memory of one end, as the other names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// The steering tag.
    pub(crate) stag: u32,
    /// The tagged offset.
    pub(crate) offset: u64,
}

/// A READ that the peer requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReadRequest {
    /// The sink.
    pub(crate) sink: Place,
    /// Bytes.
    pub(crate) bytes: u32,
    /// The source.
    pub(crate) source: Place,
}

/// A message of the peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Arrival {
    /// A message.
    Message(Vec<u8>),
    /// A part of an RDMA WRITE.
    Write(Place, Vec<u8>),
    /// A READ to serve.
    Read(ReadRequest),
    /// The connection is over.
    End,
}

/// An iWARP connection driven by hand.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: TcpStream,
    // The number of the next message to send.
    next_message: u32,
    // The incoming message, collected from its segments.
    message: Vec<u8>,
}

impl Stream {
    /// Connects. Returns the private data of the answer, too.
    ///
    /// # Panics
    /// There is no such listener, or it refuses.
    pub(crate) fn connect(address: &str, private: &[u8]) -> (Self, Vec<u8>) {
        let mut socket = TcpStream::connect(address).expect("a connection");
        socket.set_read_timeout(Some(SILENCE * NUDGES)).expect("a timeout");
        socket.set_nodelay(true).expect("no delay");
        // Enhanced (RFC 6581), revision 2, with the numbers of READs served and wanted.
        let mut request = b"MPA ID Req Frame".to_vec();
        request.extend(0x1002u16.to_be_bytes());
        request.extend(u16::try_from(private.len() + 4).expect("short").to_be_bytes());
        request.extend(16u16.to_be_bytes());
        request.extend(16u16.to_be_bytes());
        request.extend(private);
        socket.write_all(&request).expect("a request");
        let mut header = [0; 20];
        socket.read_exact(&mut header).expect("an answer");
        assert_eq!(&header[..16], b"MPA ID Rep Frame");
        let (flags, len) = (u16_at(&header, 16), u16_at(&header, 18));
        let mut data = vec![0; usize::from(len)];
        socket.read_exact(&mut data).expect("private data");
        socket.set_read_timeout(Some(SILENCE)).expect("a timeout");
        assert_eq!(flags & 0xe000, 0, "no markers, no CRC, no refusal: {flags:#x}");
        assert_eq!(flags & 0x1000, 0x1000, "enhanced");
        (Self { socket, next_message: 1, message: Vec::new() }, data.split_off(4))
    }

    /// Sends one frame. An error means that the connection is over, and a later [`Self::next`]
    /// returns its end.
    fn frame(&mut self, control: u16, rest: &[&[u8]]) {
        let len = 2 + rest.iter().map(|bytes| bytes.len()).sum::<usize>();
        let mut frame = u16::try_from(len).expect("short").to_be_bytes().to_vec();
        frame.extend((control | VERSIONS).to_be_bytes());
        rest.iter().for_each(|bytes| frame.extend(*bytes));
        // Padding, and a CRC that is not checked.
        frame.resize(frame.len().next_multiple_of(4) + 4, 0);
        let _ = self.socket.write_all(&frame);
    }

    fn tagged(&mut self, opcode: u16, to: Place, bytes: &[u8], ends: bool) {
        let mut at = to.offset;
        let count = bytes.len().div_ceil(SEGMENT_MAX);
        for (index, segment) in bytes.chunks(SEGMENT_MAX).enumerate() {
            let last = if ends && index + 1 == count { LAST } else { 0 };
            let header = [&to.stag.to_be_bytes()[..], &at.to_be_bytes()].concat();
            self.frame(TAGGED | last | opcode, &[&header, segment]);
            at += segment.len() as u64;
        }
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, message: &[u8]) {
        let mut header = [0; 16];
        header[8..12].copy_from_slice(&self.next_message.to_be_bytes());
        self.next_message += 1;
        self.frame(LAST | SEND, &[&header, message]);
    }

    /// Writes into memory of the peer, if the peer permits that.
    pub(crate) fn write(&mut self, to: Place, bytes: &[u8]) {
        self.tagged(WRITE, to, bytes, true);
    }

    /// Serves a READ, or a part of it that begins at byte `from`.
    pub(crate) fn answer(&mut self, read: &ReadRequest, from: usize, bytes: &[u8]) {
        let to = Place { offset: read.sink.offset + from as u64, ..read.sink };
        self.tagged(READ_RESPONSE, to, bytes, from + bytes.len() == read.bytes as usize);
    }

    /// Fills `bytes`. False: the connection is over.
    ///
    /// siw does not look at a frame that came while siw took the socket over, until the next one
    /// comes. So this end answers silence with an empty WRITE, which touches no memory.
    fn receive(&mut self, bytes: &mut [u8]) -> bool {
        let (mut filled, mut nudges) = (0, 0);
        while filled < bytes.len() {
            match self.socket.read(&mut bytes[filled..]) {
                Ok(0) => return false,
                Ok(count) => filled += count,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    assert!(nudges < NUDGES, "nothing came for {NUDGES} times {SILENCE:?}");
                    nudges += 1;
                    self.frame(TAGGED | LAST | WRITE, &[&[0; 12]]);
                }
                Err(_) => return false,
            }
        }
        true
    }

    /// The next message of the peer.
    ///
    /// # Panics
    /// No message, or none of a target.
    pub(crate) fn next(&mut self) -> Arrival {
        loop {
            let mut len = [0; 2];
            if !self.receive(&mut len) {
                return Arrival::End;
            }
            let len = usize::from(u16::from_be_bytes(len));
            let mut frame = vec![0; (2 + len).next_multiple_of(4) - 2 + 4];
            if !self.receive(&mut frame) {
                return Arrival::End;
            }
            frame.truncate(len);
            let control = u16_at(&frame, 0);
            match control & OPCODE {
                SEND => {
                    self.message.extend(&frame[18..]);
                    if control & LAST != 0 {
                        return Arrival::Message(std::mem::take(&mut self.message));
                    }
                }
                WRITE => return Arrival::Write(place_at(&frame, 2), frame[14..].to_vec()),
                READ_REQUEST => {
                    return Arrival::Read(ReadRequest {
                        sink: place_at(&frame, 18),
                        bytes: u32_at(&frame, 30),
                        source: place_at(&frame, 34),
                    });
                }
                TERMINATE => {}
                other => panic!("RDMAP opcode {other}"),
            }
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn place_at(bytes: &[u8], at: usize) -> Place {
    let offset = bytes[at + 4..at + 12].try_into().expect("eight bytes");
    Place { stag: u32_at(bytes, at), offset: u64::from_be_bytes(offset) }
}
