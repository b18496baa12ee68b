//! [`Job`] and [`Offer`]: what both ends of one measurement agree on, carried by the connection's
//! hellos.
//!
//! One connection is one measurement: the request says what is to be done and where the client's
//! memory is, the reply where the server's is. So one server serves any client, in the same process
//! or on another host, without a channel of its own. Integers are little-endian. Everything a peer
//! says is checked against the bounds here.

use std::time::Duration;

use rblk_fabric::{ConnectionHello, RemoteBuffer, Rkey};

use crate::result::Wait;

/// Largest message in bytes.
pub const BYTES_MAX: u32 = 4 << 20;
/// Most messages outstanding.
pub const DEPTH_MAX: u16 = 256;
/// Longest measurement.
pub const TIME_MAX: Duration = Duration::from_secs(60);
/// Most memory of one end for messages in flight.
pub const WINDOW_MAX: u32 = 16 << 20;
/// Bytes of the messages that say that others arrived, and of a command.
pub const SMALL: u32 = 64;

/// Memory that is not there yet.
pub const NOWHERE: RemoteBuffer = RemoteBuffer { addr: 0, rkey: Rkey(0) };

/// "rfb1": the form of both hellos.
const MAGIC: u32 = 0x3162_6672;
const JOB_BYTES: usize = 32;
const OFFER_BYTES: usize = 24;

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// Each SEND is answered by one.
    SendPing,
    /// Each WRITE is answered by one; both ends look at the memory.
    WritePing,
    /// READs, one after the other; the peer's processor has no part in it.
    ReadPing,
    /// A SEND of 64 bytes is answered by a WRITE_WITH_IMM, as rblk answers a read.
    CommandPing,
    /// SENDs, many at once.
    SendStream,
    /// WRITEs, many at once.
    WriteStream,
    /// READs, many at once.
    ReadStream,
    /// Nothing: tells the ports of the echo over UDP and TCP.
    Echo,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::SendPing,
        Self::WritePing,
        Self::ReadPing,
        Self::CommandPing,
        Self::SendStream,
        Self::WriteStream,
        Self::ReadStream,
        Self::Echo,
    ];

    /// The word for it in reports.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::SendPing | Self::SendStream => "SEND",
            Self::WritePing | Self::WriteStream => "WRITE",
            Self::ReadPing | Self::ReadStream => "READ",
            Self::CommandPing => "COMMAND",
            Self::Echo => "ECHO",
        }
    }

    /// Whether the peer's processor has a part in each message.
    #[must_use]
    pub fn is_two_sided(self) -> bool {
        matches!(self, Self::SendPing | Self::WritePing | Self::CommandPing | Self::SendStream)
    }

    fn code(self) -> u8 {
        Self::ALL.iter().position(|kind| *kind == self).map_or(0, |at| at.to_le_bytes()[0])
    }
}

/// One measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Job {
    /// What is done.
    pub kind: Kind,
    /// How both ends wait.
    pub wait: Wait,
    /// Bytes per message.
    pub bytes: u32,
    /// Messages outstanding; 1 for pings.
    pub depth: u16,
    /// How long the client measures, whole milliseconds.
    pub time: Duration,
    /// The client's memory for what comes.
    pub buffer: RemoteBuffer,
}

/// The server's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The server's memory: for what comes, and to READ from.
    pub buffer: RemoteBuffer,
    /// Port of the echo over UDP; 0 for none.
    pub udp_port: u16,
    /// Port of the echo over TCP; 0 for none.
    pub tcp_port: u16,
}

impl Job {
    /// Messages of one window: what is outstanding at once has memory of its own as far as there is
    /// room.
    #[must_use]
    pub fn slots(&self) -> u32 {
        (WINDOW_MAX / self.bytes).clamp(1, u32::from(self.depth))
    }

    /// Bytes of memory for what comes, and again for what goes.
    #[must_use]
    pub fn window(&self) -> u32 {
        self.slots() * self.bytes.next_multiple_of(SMALL)
    }

    /// Offset of a slot in its window.
    #[must_use]
    pub fn slot(&self, index: u64) -> usize {
        let index = index % u64::from(self.slots());
        usize::try_from(index).unwrap_or(0) * self.bytes.next_multiple_of(SMALL) as usize
    }

    /// As the request of a connection.
    #[must_use]
    pub fn to_hello(&self) -> ConnectionHello {
        let mut wire = Vec::with_capacity(JOB_BYTES);
        wire.extend(MAGIC.to_le_bytes());
        wire.push(self.kind.code());
        wire.push(u8::from(self.wait == Wait::Events));
        wire.extend(self.depth.to_le_bytes());
        wire.extend(self.bytes.to_le_bytes());
        let millis = u32::try_from(self.time.as_millis()).unwrap_or(u32::MAX);
        wire.extend(millis.to_le_bytes());
        wire.extend(self.buffer.addr.to_le_bytes());
        wire.extend(self.buffer.rkey.0.to_le_bytes());
        wire.resize(JOB_BYTES, 0);
        ConnectionHello(wire)
    }

    /// From the request of a connection; why not, if it is none or out of bounds.
    ///
    /// # Errors
    /// A few words.
    pub fn from_hello(hello: &ConnectionHello) -> Result<Self, &'static str> {
        let wire: &[u8; JOB_BYTES] =
            hello.0.first_chunk().filter(|w| u32_at(&w[..], 0) == MAGIC).ok_or("not a job")?;
        let kind = *Kind::ALL.get(usize::from(wire[4])).ok_or("an unknown kind")?;
        let wait = match wire[5] {
            0 => Wait::Polling,
            1 => Wait::Events,
            _ => return Err("an unknown way to wait"),
        };
        let job = Self {
            kind,
            wait,
            bytes: u32_at(wire, 8),
            depth: u16::from_le_bytes([wire[6], wire[7]]),
            time: Duration::from_millis(u32_at(wire, 12).into()),
            buffer: buffer_at(wire, 16),
        };
        if job.bytes == 0 || job.bytes > BYTES_MAX {
            return Err("messages of that size");
        }
        if job.depth == 0 || job.depth > DEPTH_MAX {
            return Err("that many messages at once");
        }
        if job.time > TIME_MAX {
            return Err("that long");
        }
        Ok(job)
    }
}

impl Offer {
    /// As the reply of a connection.
    #[must_use]
    pub fn to_hello(&self) -> ConnectionHello {
        let mut wire = Vec::with_capacity(OFFER_BYTES);
        wire.extend(MAGIC.to_le_bytes());
        wire.extend(self.udp_port.to_le_bytes());
        wire.extend(self.tcp_port.to_le_bytes());
        wire.extend(self.buffer.addr.to_le_bytes());
        wire.extend(self.buffer.rkey.0.to_le_bytes());
        wire.resize(OFFER_BYTES, 0);
        ConnectionHello(wire)
    }

    /// From the reply of a connection; `None` if it is none.
    #[must_use]
    pub fn from_hello(hello: &ConnectionHello) -> Option<Self> {
        let wire: &[u8; OFFER_BYTES] = hello.0.first_chunk()?;
        (u32_at(wire, 0) == MAGIC).then(|| Self {
            buffer: buffer_at(wire, 8),
            udp_port: u16::from_le_bytes([wire[4], wire[5]]),
            tcp_port: u16::from_le_bytes([wire[6], wire[7]]),
        })
    }
}

fn u32_at(wire: &[u8], at: usize) -> u32 {
    wire[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn buffer_at(wire: &[u8], at: usize) -> RemoteBuffer {
    let addr = wire[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    RemoteBuffer { addr, rkey: Rkey(u32_at(wire, at + 8)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Job {
        Job {
            kind: Kind::CommandPing,
            wait: Wait::Events,
            bytes: 4096,
            depth: 64,
            time: Duration::from_millis(1500),
            buffer: RemoteBuffer { addr: 0x1234_5678_9abc_d000, rkey: Rkey(0xfeed_beef) },
        }
    }

    #[test]
    fn hellos_are_read_back_padded_or_not() {
        for kind in Kind::ALL {
            let job = Job { kind, ..job() };
            let mut hello = job.to_hello();
            assert!(hello.0.len() <= ConnectionHello::REQUEST_MAX);
            assert_eq!(Job::from_hello(&hello), Ok(job));
            hello.0.resize(ConnectionHello::REQUEST_MAX, 0xee);
            assert_eq!(Job::from_hello(&hello), Ok(job));
        }
        let offer = Offer { buffer: job().buffer, udp_port: 7, tcp_port: 65535 };
        let mut hello = offer.to_hello();
        hello.0.resize(ConnectionHello::REPLY_MAX, 0xee);
        assert_eq!(Offer::from_hello(&hello), Some(offer));
    }

    #[test]
    fn what_is_no_job_is_refused() {
        let whole = job().to_hello();
        for len in 0..whole.0.len() {
            assert!(Job::from_hello(&ConnectionHello(whole.0[..len].to_vec())).is_err(), "{len}");
        }
        for bad in [
            Job { bytes: 0, ..job() },
            Job { bytes: BYTES_MAX + 1, ..job() },
            Job { depth: 0, ..job() },
            Job { depth: DEPTH_MAX + 1, ..job() },
            Job { time: TIME_MAX + Duration::from_millis(1), ..job() },
        ] {
            assert!(Job::from_hello(&bad.to_hello()).is_err(), "{bad:?}");
        }
        for (at, byte) in [(0, 0), (4, 8), (5, 2)] {
            let mut hello = whole.clone();
            hello.0[at] = byte;
            assert!(Job::from_hello(&hello).is_err(), "{at}");
        }
        assert_eq!(Offer::from_hello(&ConnectionHello(vec![0; 100])), None);
        assert_eq!(Offer::from_hello(&ConnectionHello::default()), None);
    }

    #[test]
    fn windows_are_bounded() {
        for bytes in [1, 64, 100, 4096, 1 << 20, BYTES_MAX] {
            for depth in [1, 3, 64, DEPTH_MAX] {
                let job = Job { bytes, depth, ..job() };
                assert!(job.window() <= WINDOW_MAX + job.slots() * SMALL, "{bytes} x {depth}");
                for index in 0..1000 {
                    assert!(job.slot(index) + bytes as usize <= job.window() as usize);
                }
            }
        }
    }
}
