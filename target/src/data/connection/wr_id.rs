//! [`WrKind`]: the purpose of a WR, packed into its [`WrId`].

use rblk_fabric::WrId;
use rblk_protocol::Tag;

use crate::data::parts::PartIndex;

/// The purpose of a WR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WrKind {
    /// RECV of a message, with its receive buffer.
    Recv(u16),
    /// RDMA READ of write data, for a part of the command.
    ReadData(Tag, PartIndex),
    /// SEND of responses.
    Answer(Tag),
    /// RDMA WRITE of an answer's data, with or without the answer.
    WriteData(Tag),
    /// RDMA READ of the peer's scratch, which completes only when all earlier WRs are done.
    Barrier,
}

impl WrKind {
    /// Packs the kind into an id.
    #[inline]
    pub(crate) fn id(self) -> WrId {
        let (kind, part, index) = match self {
            Self::Recv(buffer) => (0u64, 0, buffer),
            Self::ReadData(tag, part) => (1, part.0, tag.0),
            Self::Answer(tag) => (2, 0, tag.0),
            Self::Barrier => (3, 0, 0),
            Self::WriteData(tag) => (4, 0, tag.0),
        };
        WrId(kind << 24 | u64::from(part) << 16 | u64::from(index))
    }

    /// Unpacks an id. `None` for an id from elsewhere.
    #[inline]
    pub(crate) fn from_id(id: WrId) -> Option<Self> {
        let (index, part) = ((id.0 & 0xffff) as u16, PartIndex((id.0 >> 16 & 0xff) as u8));
        Some(match id.0 >> 24 {
            0 => Self::Recv(index),
            1 => Self::ReadData(Tag(index), part),
            2 => Self::Answer(Tag(index)),
            3 => Self::Barrier,
            4 => Self::WriteData(Tag(index)),
            _ => return None,
        })
    }

    /// The receive buffer of a RECV's id. `None`: the WR has another kind.
    #[inline]
    pub(crate) fn recv_of(id: WrId) -> Option<u16> {
        (id.0 >> 24 == 0).then_some((id.0 & 0xffff) as u16)
    }

    /// Whether the WR is an RDMA WRITE or READ, which needs a key of the peer's memory.
    pub(crate) fn is_one_sided(self) -> bool {
        matches!(self, Self::ReadData(..) | Self::WriteData(_) | Self::Barrier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wr_kinds_round_trip() {
        for kind in [
            WrKind::Recv(700),
            WrKind::ReadData(Tag(1024), PartIndex(7)),
            WrKind::Answer(Tag(0)),
            WrKind::WriteData(Tag(1024)),
            WrKind::Barrier,
        ] {
            assert_eq!(WrKind::from_id(kind.id()), Some(kind));
            assert!(kind.id().0 <= WrId::MASK);
        }
        assert_eq!(WrKind::from_id(WrId(WrId::MASK)), None);
    }
}
