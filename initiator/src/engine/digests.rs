//! [`Digests`]: the digests of the requests of a queue by tag. After a mismatch the request is sent
//! once again, and after a second one it fails.
//!
//! The digests of a WRITE are made before its first command, and kept: a repeated WRITE has the
//! user's original data, or the target refuses it. The buffer of a READ gets an invalid trailer
//! before the command is sent, so that missing data is detected.

use rblk_fabric::Region;
use rblk_protocol::digest::crc32c;
use rblk_protocol::limits::READ_TRAILER_BYTES;
use rblk_protocol::width::{const_u32, wide};
use rblk_protocol::{
    CommandCapsule, DataDigests, Opcode, QueueDepth, ReadTrailer, Sequence, Status, Tag,
};

use super::io::{Io, IoOp};

/// Bytes of the trailer after the data of a READ.
pub(super) const TRAILER_LEN: u32 = const_u32(READ_TRAILER_BYTES);

/// A request that failed because its data was damaged twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DigestFailure {
    /// The last failed request.
    pub io: Io,
    /// The number of failed requests since the last report, at least 1.
    pub count: u64,
}

/// The fate of an answered request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AnswerVerdict {
    /// The request is done, with this status.
    Done(Status),
    /// The data was damaged: send the request once again.
    Again,
}

#[derive(Clone, Copy, Default)]
struct OfTag {
    // The digests of a WRITE, since its first command with digests.
    data: Option<DataDigests>,
    // The command was the WRITE itself, not a FLUSH ahead of it.
    moves_data: bool,
    tried_again: bool,
}

/// The digests of a queue.
pub(super) struct Digests {
    of_tag: Box<[OfTag]>,
    failure: Option<DigestFailure>,
}

impl Digests {
    pub(super) fn new(depth: QueueDepth) -> Self {
        Self { of_tag: vec![OfTag::default(); usize::from(depth.get())].into(), failure: None }
    }

    /// Forgets the digests: the next path does not use them.
    pub(super) fn clear(&mut self) {
        self.of_tag.fill(OfTag::default());
    }

    /// A request was failed without an answer.
    pub(super) fn cancelled(&mut self, tag: Tag) {
        if let Some(of_tag) = self.of_tag.get_mut(tag.index()) {
            *of_tag = OfTag::default();
        }
    }

    /// Puts the digests of a request other than READ into its command. Its data is at `offset` of
    /// `buffers`.
    #[inline(never)]
    pub(super) fn seal(
        &mut self,
        command: &mut CommandCapsule,
        io: &Io,
        buffers: &Region,
        offset: usize,
    ) {
        let Some(of_tag) = self.of_tag.get_mut(command.tag.index()) else { return };
        command.flags.digest = true;
        of_tag.moves_data = command.opcode == Opcode::Write;
        if of_tag.moves_data {
            command.data_digests = *of_tag.data.get_or_insert_with(|| {
                DataDigests::of(first_byte(io), io.data_bytes, |from, len| {
                    buffers.sum(offset + wide(from), wide(len), crc32c)
                })
            });
        }
    }

    /// The data of a READ arrived whole.
    #[inline(always)]
    pub(super) fn came(&mut self, tag: Tag) {
        if let Some(of_tag) = self.of_tag.get_mut(tag.index()) {
            of_tag.tried_again = false;
        }
    }

    /// The command of a write succeeded: the WRITE, or the FLUSH ahead of it. After the FLUSH, the
    /// digests stay for the WRITE.
    #[inline(always)]
    pub(super) fn written(&mut self, tag: Tag) {
        if let Some(of_tag) = self.of_tag.get_mut(tag.index())
            && of_tag.moves_data
        {
            *of_tag = OfTag::default();
        }
    }

    /// Handles the answer to any other read or write, and returns the fate of the request. A READ
    /// with the status [`Status::Ok`] did not get all its data.
    pub(super) fn answered(&mut self, tag: Tag, io: &Io, status: Status) -> AnswerVerdict {
        let Some(of_tag) = self.of_tag.get_mut(tag.index()) else {
            return AnswerVerdict::Done(status);
        };
        let is_read = io.op == IoOp::Read;
        let lost = match status {
            Status::Ok => is_read,
            Status::DigestMismatch => is_read || of_tag.moves_data,
            _ => false,
        };
        if lost && !of_tag.tried_again {
            of_tag.tried_again = true;
            return AnswerVerdict::Again;
        }
        if is_read || of_tag.moves_data {
            *of_tag = OfTag::default();
        }
        if !lost {
            return AnswerVerdict::Done(status);
        }
        let count = self.failure.map_or(0, |failure| failure.count) + 1;
        self.failure = Some(DigestFailure { io: *io, count });
        AnswerVerdict::Done(Status::DigestMismatch)
    }

    /// Whether [`Self::take_failure`] returns a failure.
    pub(super) fn has_failure(&self) -> bool {
        self.failure.is_some()
    }

    /// The requests that failed since the last call, with the last of them.
    pub(super) fn take_failure(&mut self) -> Option<DigestFailure> {
        self.failure.take()
    }
}

/// Makes the command of a READ ask for a trailer, and puts an invalid one behind its data. The data
/// goes to `offset` of `buffers`.
#[inline(never)]
pub(super) fn expect(command: &mut CommandCapsule, len: u32, buffers: &Region, offset: usize) {
    command.flags.digest = true;
    if let Some(buffer) = &mut command.buffer {
        buffer.length += TRAILER_LEN;
        let nothing = ReadTrailer { crc: 0, sequence: Sequence(!command.sequence.0) };
        buffers.write(offset + wide(len), &nothing.to_wire());
    }
}

/// Whether the trailer behind the data of a READ, at `offset` of `buffers`, is that of the command
/// with this sequence, and matches the data.
#[inline]
pub(super) fn is_whole(len: u32, sequence: Sequence, buffers: &Region, offset: usize) -> bool {
    let differs = buffers.sum(offset, wide(len + TRAILER_LEN), |bytes| {
        let Some((data, trailer)) = bytes.split_last_chunk() else { return 1 };
        let trailer = ReadTrailer::from_wire(*trailer);
        (trailer.sequence.0 ^ sequence.0) | (trailer.crc ^ crc32c(data))
    });
    differs == 0
}

/// First byte of a request in the volume. The range came from bytes, so this does not overflow.
fn first_byte(io: &Io) -> u64 {
    let block = u64::from(io.data_bytes).checked_div(io.count.0).unwrap_or(0);
    io.lba.0.wrapping_mul(block)
}
