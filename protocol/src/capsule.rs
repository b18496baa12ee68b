//! [`CommandCapsule`] (64 B) and [`ResponseCapsule`] (16 B): encode and parse.

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::descriptor::KeyedDescriptor;
use crate::digest::{DataDigests, of_capsule, of_two_words};
use crate::identifiers::{Epoch, Sequence, VolumeHandle};
use crate::lba::{BlockCount, Lba};
use crate::limits::{COMMAND_BYTES, DESCRIPTOR_BYTES, IN_CAPSULE_MAX_BYTES, RESPONSE_BYTES};
use crate::opcode::Opcode;
use crate::status_code::Status;
use crate::tag::{QueueDepth, Tag};
use crate::width::wide;

/// Modifiers of a command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct CommandFlags {
    /// WRITE: the data is durable when the command is answered (force unit access).
    pub fua: bool,
    /// WRITE_ZEROES: the store may deallocate the range instead of writing it.
    pub may_unmap: bool,
    /// The capsule has a digest, which is made and checked with its bytes. A WRITE has those of its
    /// data, too.
    pub digest: bool,
}

impl CommandFlags {
    const FUA: u8 = 1;
    const MAY_UNMAP: u8 = 2;
    const DIGEST: u8 = 4;

    fn to_bits(self) -> u8 {
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        bit(self.fua, Self::FUA)
            | bit(self.may_unmap, Self::MAY_UNMAP)
            | bit(self.digest, Self::DIGEST)
    }

    #[inline]
    fn from_bits(bits: u8) -> Option<Self> {
        (bits & !(Self::FUA | Self::MAY_UNMAP | Self::DIGEST) == 0).then_some(Self {
            fua: bits & Self::FUA != 0,
            may_unmap: bits & Self::MAY_UNMAP != 0,
            digest: bits & Self::DIGEST != 0,
        })
    }
}

/// A parsed command. The target checks it against the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommandCapsule {
    /// The operation.
    pub opcode: Opcode,
    /// Modifiers.
    pub flags: CommandFlags,
    /// Names the command until it is answered.
    pub tag: Tag,
    /// The volume. 0 if the opcode needs none.
    pub volume: VolumeHandle,
    /// First block. For LIST the first index.
    pub lba: Lba,
    /// Number of blocks.
    pub count: BlockCount,
    /// The epoch of the connection.
    pub epoch: Epoch,
    /// The number of the command on its queue.
    pub sequence: Sequence,
    /// CRCs of the data of a WRITE, if the flag is set; else zero.
    pub data_digests: DataDigests,
    /// Bytes of data behind the capsule in the same message. 0 for none.
    pub in_capsule_bytes: u32,
    /// The buffer of the initiator that data goes to or comes from.
    pub buffer: Option<KeyedDescriptor>,
}

/// Why bytes are not a capsule. A peer that sends such bytes has a bug: the connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CapsuleError {
    /// Fewer bytes than the fixed part, or too few or too many bytes of data.
    #[error("message of {got} bytes, expected {expected}")]
    Length {
        /// Bytes received.
        got: usize,
        /// Bytes that the capsule says it needs.
        expected: usize,
    },
    /// The opcode is not known.
    #[error("unknown opcode {0:#04x}")]
    Opcode(u8),
    /// The tag is above the depth of the queue.
    #[error("tag {tag} on a queue of depth {depth}")]
    Tag {
        /// The value received.
        tag: u16,
        /// The depth of the queue.
        depth: u16,
    },
    /// The bytes are not those that the peer sent.
    #[error("the digest of the capsule does not fit")]
    Digest,
    /// A field breaks a rule.
    #[error("{0}")]
    Field(&'static str),
    /// The status is not known.
    #[error("unknown status {0}")]
    Status(u16),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireCommand {
    opcode: u8,
    flags: u8,
    tag: U16,
    volume: U32,
    lba: U64,
    count: U64,
    epoch: U32,
    sequence: U32,
    digest: U32,
    in_capsule_bytes: U32,
    data_digests: [U32; 2],
    descriptor: [u8; DESCRIPTOR_BYTES],
}

#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireResponse {
    tag: U16,
    status: U16,
    digest: U32,
    value: U32,
    check: U16,
    reserved: U16,
}

/// Bits in front of the digest of a response, in its first word.
const RESPONSE_DIGEST_SHIFT: usize = 8 * offset_of!(WireResponse, digest);

const _: () = {
    assert!(size_of::<WireCommand>() == COMMAND_BYTES);
    assert!(size_of::<WireResponse>() == RESPONSE_BYTES);
};

impl CommandCapsule {
    /// A command without data, flags or range. Set the needed fields.
    #[must_use]
    pub fn new(opcode: Opcode, tag: Tag, epoch: Epoch, sequence: Sequence) -> Self {
        Self {
            opcode,
            flags: CommandFlags::default(),
            tag,
            volume: VolumeHandle(0),
            lba: Lba(0),
            count: BlockCount(0),
            epoch,
            sequence,
            data_digests: DataDigests::default(),
            in_capsule_bytes: 0,
            buffer: None,
        }
    }

    /// Offset of the digest, four bytes, in the capsule.
    pub const DIGEST_AT: usize = offset_of!(WireCommand, digest);

    /// The 64 bytes. In-capsule data is behind them in the message.
    #[must_use]
    pub fn to_wire(&self) -> [u8; COMMAND_BYTES] {
        let mut bytes = self.to_wire_unsealed();
        if self.flags.digest {
            let digest = Self::digest_of(&bytes).to_le_bytes();
            bytes[Self::DIGEST_AT..][..digest.len()].copy_from_slice(&digest);
        }
        bytes
    }

    /// The digest of a capsule, computed without its digest field.
    #[must_use]
    #[inline(always)]
    pub fn digest_of(bytes: &[u8; COMMAND_BYTES]) -> u32 {
        of_capsule::<COMMAND_BYTES, { Self::DIGEST_AT }>(bytes)
    }

    /// The 64 bytes, with zeros for the digest: it can be made where they are then.
    #[must_use]
    #[inline(always)]
    pub fn to_wire_unsealed(&self) -> [u8; COMMAND_BYTES] {
        zerocopy::transmute!(WireCommand {
            opcode: self.opcode as u8,
            flags: self.flags.to_bits(),
            tag: self.tag.0.into(),
            volume: self.volume.0.into(),
            lba: self.lba.0.into(),
            count: self.count.0.into(),
            epoch: self.epoch.0.into(),
            sequence: self.sequence.0.into(),
            digest: 0.into(),
            in_capsule_bytes: self.in_capsule_bytes.into(),
            data_digests: [self.data_digests.first.into(), self.data_digests.second.into()],
            descriptor: self.buffer.map_or([0; DESCRIPTOR_BYTES], KeyedDescriptor::to_wire),
        })
    }

    /// Parses the fixed part of a message that has `message_bytes` bytes in all and holds one
    /// command.
    ///
    /// # Errors
    /// [`CapsuleError`]: the first rule that is broken.
    pub fn from_wire(
        bytes: &[u8; COMMAND_BYTES],
        message_bytes: usize,
        depth: QueueDepth,
    ) -> Result<Self, CapsuleError> {
        let command = Self::parse(bytes, depth)?;
        let expected = command.message_bytes();
        if message_bytes != expected {
            return Err(CapsuleError::Length { got: message_bytes, expected });
        }
        Ok(command)
    }

    /// Bytes that the command takes in a message: the capsule and its data.
    #[inline]
    pub(crate) fn message_bytes(&self) -> usize {
        COMMAND_BYTES + wide(self.in_capsule_bytes)
    }

    /// Parses a capsule. Its data may be anywhere.
    #[inline]
    pub(crate) fn parse(
        bytes: &[u8; COMMAND_BYTES],
        depth: QueueDepth,
    ) -> Result<Self, CapsuleError> {
        let wire = WireCommand::ref_from_bytes(bytes)
            .map_err(|_| CapsuleError::Length { got: bytes.len(), expected: COMMAND_BYTES })?;
        let opcode = Opcode::from_wire(wire.opcode).ok_or(CapsuleError::Opcode(wire.opcode))?;
        let flags =
            CommandFlags::from_bits(wire.flags).ok_or(CapsuleError::Field("unknown flag"))?;
        let tag = depth
            .check(wire.tag.get())
            .ok_or(CapsuleError::Tag { tag: wire.tag.get(), depth: depth.get() })?;
        let [first, second] = wire.data_digests;
        let data_digests = DataDigests { first: first.get(), second: second.get() };
        if flags.digest {
            if wire.digest.get() != Self::digest_of(bytes) {
                return Err(CapsuleError::Digest);
            }
        } else if wire.digest.get() | data_digests.first | data_digests.second != 0 {
            return Err(CapsuleError::Field("digest without its flag"));
        }
        let in_capsule_bytes = wire.in_capsule_bytes.get();
        if in_capsule_bytes > IN_CAPSULE_MAX_BYTES {
            return Err(CapsuleError::Field("in-capsule data above the limit"));
        }
        let buffer = KeyedDescriptor::from_wire(&wire.descriptor).map_err(CapsuleError::Field)?;
        if opcode == Opcode::Write && (in_capsule_bytes != 0) == buffer.is_some() {
            return Err(CapsuleError::Field("a write has either in-capsule data or a descriptor"));
        }
        Ok(Self {
            opcode,
            flags,
            tag,
            volume: VolumeHandle(wire.volume.get()),
            lba: Lba(wire.lba.get()),
            count: BlockCount(wire.count.get()),
            epoch: Epoch(wire.epoch.get()),
            sequence: Sequence(wire.sequence.get()),
            data_digests,
            in_capsule_bytes,
            buffer,
        })
    }
}

/// The bytes of a response.
#[inline(always)]
fn wire_of_words(words: [u64; 2]) -> [u8; RESPONSE_BYTES] {
    zerocopy::transmute!(words.map(u64::to_le))
}

/// A response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponseCapsule {
    /// The command that is answered.
    pub tag: Tag,
    /// Outcome. A number of a later version arrives as [`Status::Internal`].
    pub status: Status,
    /// CRC-32C of the other bytes where digests were agreed: see [`Self::to_wire_sealed`]. Else 0.
    pub digest: u32,
    /// Depends on the opcode: the bytes of an admin reply, the event of an ASYNC_EVENT.
    pub value: u32,
    /// [`Sequence::check`] of the command: a response to an earlier command with this tag does not
    /// match.
    pub check: u16,
}

impl ResponseCapsule {
    /// An answer without value.
    #[must_use]
    pub fn new(tag: Tag, sequence: Sequence, status: Status) -> Self {
        Self { tag, status, digest: 0, value: 0, check: sequence.check() }
    }

    /// The 16 bytes, with their digest. The digest of the capsule itself must be 0.
    #[inline]
    #[must_use]
    pub fn to_wire_sealed(&self) -> [u8; RESPONSE_BYTES] {
        debug_assert!(self.digest == 0, "a digest in a response that is still to get it");
        let [first, second] = self.words();
        let digest = u64::from(of_two_words([first, second]));
        wire_of_words([first | digest << RESPONSE_DIGEST_SHIFT, second])
    }

    /// Whether the bytes of a response have their digest.
    #[inline]
    #[must_use]
    pub fn has_its_digest(bytes: &[u8; RESPONSE_BYTES]) -> bool {
        let words: [u64; 2] = zerocopy::transmute!(*bytes);
        let [first, second] = words.map(u64::from_le);
        let found = first >> RESPONSE_DIGEST_SHIFT;
        let others = first & ((1 << RESPONSE_DIGEST_SHIFT) - 1);
        found == u64::from(of_two_words([others, second]))
    }

    /// Whether it answers the command with that sequence.
    #[must_use]
    pub fn answers(&self, sequence: Sequence) -> bool {
        self.check == sequence.check()
    }

    /// The 16 bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; RESPONSE_BYTES] {
        wire_of_words(self.words())
    }

    /// The fields of [`WireResponse`], the lowest byte of each word first.
    #[inline(always)]
    fn words(&self) -> [u64; 2] {
        let [tag, status] = [self.tag.0, self.status as u16].map(u64::from);
        let digest = u64::from(self.digest) << RESPONSE_DIGEST_SHIFT;
        [tag | status << 16 | digest, u64::from(self.value) | u64::from(self.check) << 32]
    }

    /// Parses a message of `message_bytes` bytes.
    ///
    /// # Errors
    /// [`CapsuleError`]: the first rule that is broken.
    pub fn from_wire(
        bytes: &[u8; RESPONSE_BYTES],
        message_bytes: usize,
        depth: QueueDepth,
    ) -> Result<Self, CapsuleError> {
        if message_bytes != RESPONSE_BYTES {
            return Err(CapsuleError::Length { got: message_bytes, expected: RESPONSE_BYTES });
        }
        let wire = WireResponse::ref_from_bytes(bytes)
            .map_err(|_| CapsuleError::Length { got: bytes.len(), expected: RESPONSE_BYTES })?;
        if wire.reserved.get() != 0 {
            return Err(CapsuleError::Field("reserved bytes are not zero"));
        }
        Ok(Self {
            tag: depth
                .check(wire.tag.get())
                .ok_or(CapsuleError::Tag { tag: wire.tag.get(), depth: depth.get() })?,
            status: Status::from_wire(wire.status.get()).unwrap_or(Status::Internal),
            digest: wire.digest.get(),
            value: wire.value.get(),
            check: wire.check.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn depth() -> QueueDepth {
        QueueDepth::new(128).unwrap()
    }

    fn sample() -> CommandCapsule {
        CommandCapsule {
            opcode: Opcode::Write,
            flags: CommandFlags { fua: true, may_unmap: false, digest: true },
            tag: Tag(0x0011),
            volume: VolumeHandle(0x2233_4455),
            lba: Lba(0x0102_0304_0506_0708),
            count: BlockCount(0x1112_1314_1516_1718),
            epoch: Epoch(0x2122_2324),
            sequence: Sequence(0x3132_3334),
            data_digests: DataDigests { first: 0x4142_4344, second: 0x4546_4748 },
            in_capsule_bytes: 0,
            buffer: Some(KeyedDescriptor {
                address: 0x5152_5354_5556_5758,
                length: 0x6162_6364,
                rkey: 0x7172_7374,
            }),
        }
    }

    #[test]
    fn command_golden_bytes() {
        #[rustfmt::skip]
        let golden: [u8; 64] = [
            0x02, 0x05, 0x11, 0x00, 0x55, 0x44, 0x33, 0x22,
            0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01,
            0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
            0x24, 0x23, 0x22, 0x21, 0x34, 0x33, 0x32, 0x31,
            0x6e, 0x5c, 0x5b, 0xf8, 0x00, 0x00, 0x00, 0x00,
            0x44, 0x43, 0x42, 0x41, 0x48, 0x47, 0x46, 0x45,
            0x58, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51,
            0x64, 0x63, 0x62, 0x61, 0x74, 0x73, 0x72, 0x71,
        ];
        assert_eq!(sample().to_wire(), golden);
        assert_eq!(CommandCapsule::from_wire(&golden, 64, depth()), Ok(sample()));
    }

    #[test]
    fn response_golden_bytes() {
        let response = ResponseCapsule {
            tag: Tag(0x7f),
            status: Status::NoSpace,
            digest: 0x0102_0304,
            value: 9,
            check: 0xbeef,
        };
        let golden = [0x7f, 0, 11, 0, 4, 3, 2, 1, 9, 0, 0, 0, 0xef, 0xbe, 0, 0];
        assert_eq!(response.to_wire(), golden);
        assert_eq!(ResponseCapsule::from_wire(&golden, 16, depth()), Ok(response));
        assert!(response.answers(Sequence(0x1_beef)));
        let mut later = golden;
        later[2] = 200;
        assert_eq!(
            ResponseCapsule::from_wire(&later, 16, depth()).unwrap().status,
            Status::Internal
        );
        let mut reserved = golden;
        reserved[15] = 1;
        assert!(ResponseCapsule::from_wire(&reserved, 16, depth()).is_err());
        assert!(ResponseCapsule::from_wire(&golden, 15, depth()).is_err());
    }

    #[test]
    fn each_rule_is_checked() {
        let good = sample().to_wire();
        let plain = CommandCapsule {
            flags: CommandFlags { fua: true, ..CommandFlags::default() },
            data_digests: DataDigests::default(),
            ..sample()
        };
        let plain_good = plain.to_wire();
        let broken = |at: usize, byte: u8| {
            let mut bytes = plain_good;
            bytes[at] = byte;
            CommandCapsule::from_wire(&bytes, 64, depth())
        };
        assert_eq!(broken(0, 0x77), Err(CapsuleError::Opcode(0x77)));
        assert_eq!(broken(1, 0x08), Err(CapsuleError::Field("unknown flag")));
        assert_eq!(broken(2, 129), Err(CapsuleError::Tag { tag: 129, depth: 128 }));
        let bare = Err(CapsuleError::Field("digest without its flag"));
        for at in [32, 35, 40, 44, 47] {
            assert_eq!(broken(at, 1), bare);
        }
        assert_eq!(broken(1, 0x05), Err(CapsuleError::Digest), "a flag without its digest");
        assert_eq!(broken(39, 1), Err(CapsuleError::Field("in-capsule data above the limit")));
        let both = "a write has either in-capsule data or a descriptor";
        assert_eq!(broken(37, 16), Err(CapsuleError::Field(both)));
        let inside = CommandCapsule { in_capsule_bytes: 4096, buffer: None, ..sample() };
        assert_eq!(
            CommandCapsule::from_wire(&inside.to_wire(), 64, depth()),
            Err(CapsuleError::Length { got: 64, expected: 64 + 4096 })
        );
        assert_eq!(
            CommandCapsule::from_wire(&good, 65, depth()),
            Err(CapsuleError::Length { got: 65, expected: 64 })
        );
        let mut no_data = plain_good;
        no_data[48..].fill(0);
        assert_eq!(
            CommandCapsule::from_wire(&no_data, 64, depth()),
            Err(CapsuleError::Field("a write has either in-capsule data or a descriptor"))
        );
    }

    #[test]
    fn each_flipped_bit_of_a_capsule_is_found() {
        let good = sample().to_wire();
        for bit in 0..512 {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(CommandCapsule::from_wire(&bytes, 64, depth()).is_err(), "bit {bit}");
        }
        let response = ResponseCapsule::new(Tag(5), Sequence(0x1_2345), Status::NoSpace);
        let good = response.to_wire_sealed();
        assert!(ResponseCapsule::has_its_digest(&good));
        for bit in 0..128 {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!ResponseCapsule::has_its_digest(&bytes), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_fail_and_round_trip(bytes: [u8; 32], tail: [u8; 32], len in 0usize..20000, op in 0u8..6) {
            let mut wire = [0; 64];
            wire[..32].copy_from_slice(&bytes);
            wire[32..].copy_from_slice(&tail);
            // Mostly near-valid input: a known opcode, small tag, no reserved bytes.
            wire[0] = op;
            wire[1] &= 3;
            wire[3] = 0;
            wire[32..36].fill(0);
            wire[38..48].fill(0);
            if let Ok(command) = CommandCapsule::from_wire(&wire, len, depth()) {
                prop_assert_eq!(command.to_wire(), wire);
            }
            let data = usize::from(wire[37]) << 8 | usize::from(wire[36]);
            if let Ok(command) = CommandCapsule::from_wire(&wire, 64 + data, depth()) {
                prop_assert_eq!(command.to_wire(), wire);
            }
        }

        #[test]
        fn any_response_parses_or_fails(bytes: [u8; 16]) {
            let _ = ResponseCapsule::from_wire(&bytes, 16, depth());
        }
    }
}
