//! The header in front of every frame: 32 bytes, little-endian.
//!
//! | at | field |
//! |---|---|
//! | 0 | kind |
//! | 1 | flags: bit 0 asks for an acknowledgement |
//! | 2 | reserved, zero |
//! | 4 | length of the payload; of the data wanted in a READ request |
//! | 8 | count of requests the sender has executed |
//! | 12 | sequence number of the request, or of the one answered |
//! | 16 | rkey |
//! | 20 | immediate; NAK code; in a READ request the count of READ responses received |
//! | 24 | remote address |

use rblk_protocol::width::narrow;

use crate::work::WcStatus;

/// Bytes of a header.
pub(in crate::soft) const HEADER: usize = 32;
/// Longest message.
pub(in crate::soft) const MAX_MESSAGE: u32 = 16 << 20;

const ACK_WANTED: u8 = 1;

/// The low half of a position in a queue, as it goes over the wire.
pub(in crate::soft) fn low32(position: usize) -> u32 {
    narrow(position & 0xffff_ffff)
}

/// The kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::soft) enum FrameKind {
    Send,
    Write,
    WriteWithImm,
    ReadRequest,
    ReadResponse,
    /// Only the count of executed requests.
    Ack,
    /// The request could not be done; the sender's QP dies.
    Nak,
    /// Only asks for an acknowledgement.
    Probe,
}

impl FrameKind {
    fn number(self) -> u8 {
        match self {
            Self::Send => 1,
            Self::Write => 2,
            Self::WriteWithImm => 3,
            Self::ReadRequest => 4,
            Self::ReadResponse => 5,
            Self::Ack => 6,
            Self::Nak => 7,
            Self::Probe => 8,
        }
    }

    fn of(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Send,
            2 => Self::Write,
            3 => Self::WriteWithImm,
            4 => Self::ReadRequest,
            5 => Self::ReadResponse,
            6 => Self::Ack,
            7 => Self::Nak,
            8 => Self::Probe,
            _ => return None,
        })
    }

    fn has_length(self) -> bool {
        !matches!(self, Self::Ack | Self::Nak | Self::Probe)
    }
}

/// Why a request was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::soft) enum NakReason {
    Access,
    Invalid,
    Operation,
    NotReady,
}

impl NakReason {
    pub(in crate::soft) fn code(self) -> u32 {
        match self {
            Self::Access => 1,
            Self::Invalid => 2,
            Self::Operation => 3,
            Self::NotReady => 4,
        }
    }

    pub(in crate::soft) fn of(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::Access,
            2 => Self::Invalid,
            3 => Self::Operation,
            4 => Self::NotReady,
            _ => return None,
        })
    }

    /// The status that the requester sees.
    pub(in crate::soft) fn status(self) -> WcStatus {
        match self {
            Self::Access => WcStatus::RemoteAccess,
            Self::Invalid => WcStatus::RemoteInvalidRequest,
            Self::Operation => WcStatus::RemoteOperation,
            Self::NotReady => WcStatus::RnrRetryExceeded,
        }
    }
}

/// A parsed header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::soft) struct FrameHeader {
    pub(in crate::soft) kind: FrameKind,
    pub(in crate::soft) ack_wanted: bool,
    pub(in crate::soft) len: u32,
    pub(in crate::soft) executed: u32,
    pub(in crate::soft) seq: u32,
    pub(in crate::soft) key: u32,
    pub(in crate::soft) imm: u32,
    pub(in crate::soft) addr: u64,
}

impl FrameHeader {
    /// A header of that kind with the rest zero.
    pub(in crate::soft) fn new(kind: FrameKind) -> Self {
        Self { kind, ack_wanted: false, len: 0, executed: 0, seq: 0, key: 0, imm: 0, addr: 0 }
    }

    pub(in crate::soft) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = self.kind.number();
        bytes[1] = if self.ack_wanted { ACK_WANTED } else { 0 };
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.executed.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.seq.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.key.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.imm.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.addr.to_le_bytes());
        bytes
    }

    /// Parses a header from a peer, or returns the reason for the refusal.
    pub(in crate::soft) fn decode(bytes: &[u8; HEADER]) -> Result<Self, &'static str> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let kind = FrameKind::of(bytes[0]).ok_or("unknown kind of frame")?;
        if bytes[1] & !ACK_WANTED != 0 {
            return Err("unknown flags");
        }
        if bytes[2] != 0 || bytes[3] != 0 {
            return Err("reserved bytes are not zero");
        }
        let len = word(4);
        if kind.has_length() != (len != 0) || len > MAX_MESSAGE {
            return Err("bad length");
        }
        Ok(Self {
            kind,
            ack_wanted: bytes[1] & ACK_WANTED != 0,
            len,
            executed: word(8),
            seq: word(12),
            key: word(16),
            imm: word(20),
            addr: u64::from(word(24)) | u64::from(word(28)) << 32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes_and_refusals() {
        let header = FrameHeader {
            kind: FrameKind::WriteWithImm,
            ack_wanted: true,
            len: 0x1000,
            executed: 7,
            seq: 9,
            key: 0xaabb_ccdd,
            imm: 0x0102_0304,
            addr: 0x1122_3344_5566_7788,
        };
        let bytes = header.encode();
        assert_eq!(
            bytes,
            [
                3, 1, 0, 0, 0, 0x10, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0, 0xdd, 0xcc, 0xbb, 0xaa, 4, 3, 2,
                1, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11
            ]
        );
        assert_eq!(FrameHeader::decode(&bytes), Ok(header));
        for (at, value) in [(0, 0), (0, 9), (1, 2), (2, 1), (3, 1), (7, 1), (0, 6)] {
            let mut bad = bytes;
            bad[at] = value;
            assert!(FrameHeader::decode(&bad).is_err(), "byte {at} = {value}");
        }
    }
}
