//! [`Digests`]: the digests of the requests of a queue by tag, and what is done when one does not
//! fit: the request is sent once again, and then it fails.
//!
//! The digests of a WRITE are made when it is sent for the first time, and kept: what is sent again
//! is what the user wrote, or it is refused. The buffer of a READ gets a trailer that fits nothing
//! before the command is sent, so that data that never came is found.

use rblk_fabric::Region;
use rblk_protocol::digest::crc32c;
use rblk_protocol::limits::READ_TRAILER_BYTES;
use rblk_protocol::width::{const_u32, wide};
use rblk_protocol::{
    CommandCapsule, DataDigests, Opcode, QueueDepth, ReadTrailer, Sequence, Status, Tag,
};

use super::io::{Io, IoOp};

/// Bytes that follow the data of a READ.
pub(super) const TRAILER_LEN: u32 = const_u32(READ_TRAILER_BYTES);

/// A request that failed because its data did not come through twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DigestFailure {
    /// The last one that failed so.
    pub io: Io,
    /// How many failed since the last report, at least this one.
    pub count: u64,
}

/// What becomes of an answered request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// It has this status.
    Done(Status),
    /// Its data did not come through: it is to be sent once again.
    Again,
}

#[derive(Clone, Copy, Default)]
struct OfTag {
    // Of a WRITE, since it was first sent with digests.
    data: Option<DataDigests>,
    // Its command was a WRITE, not a FLUSH ahead of it.
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

    /// Forgets what was sent: the next path has no digests.
    pub(super) fn clear(&mut self) {
        self.of_tag.fill(OfTag::default());
    }

    /// A request was failed without an answer.
    pub(super) fn cancelled(&mut self, tag: Tag) {
        if let Some(of_tag) = self.of_tag.get_mut(tag.index()) {
            *of_tag = OfTag::default();
        }
    }

    /// Puts the digests of a request that is no READ into its command. Its data is at `offset` of
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

    /// The data of a READ came whole.
    #[inline(always)]
    pub(super) fn came(&mut self, tag: Tag) {
        if let Some(of_tag) = self.of_tag.get_mut(tag.index()) {
            of_tag.tried_again = false;
        }
    }

    /// The command of a write was answered well: the WRITE, or the FLUSH ahead of it, which leaves
    /// the digests of the WRITE to be sent.
    #[inline(always)]
    pub(super) fn written(&mut self, tag: Tag) {
        if let Some(of_tag) = self.of_tag.get_mut(tag.index())
            && of_tag.moves_data
        {
            *of_tag = OfTag::default();
        }
    }

    /// Any other read or write was answered. Says what becomes of it. The data of a READ with the
    /// status [`Status::Ok`] did not come whole.
    pub(super) fn answered(&mut self, tag: Tag, io: &Io, status: Status) -> Verdict {
        let Some(of_tag) = self.of_tag.get_mut(tag.index()) else { return Verdict::Done(status) };
        let is_read = io.op == IoOp::Read;
        let lost = match status {
            Status::Ok => is_read,
            Status::DigestMismatch => is_read || of_tag.moves_data,
            _ => false,
        };
        if lost && !of_tag.tried_again {
            of_tag.tried_again = true;
            return Verdict::Again;
        }
        if is_read || of_tag.moves_data {
            *of_tag = OfTag::default();
        }
        if !lost {
            return Verdict::Done(status);
        }
        let count = self.failure.map_or(0, |failure| failure.count) + 1;
        self.failure = Some(DigestFailure { io: *io, count });
        Verdict::Done(Status::DigestMismatch)
    }

    /// Whether [`Self::take_failure`] has one.
    pub(super) fn has_failure(&self) -> bool {
        self.failure.is_some()
    }

    /// Requests that failed since the last call, told by the last of them.
    pub(super) fn take_failure(&mut self) -> Option<DigestFailure> {
        self.failure.take()
    }
}

/// Makes the command of a READ ask for a trailer, and puts one behind its data that fits nothing.
/// The data goes to `offset` of `buffers`.
#[inline(never)]
pub(super) fn expect(command: &mut CommandCapsule, len: u32, buffers: &Region, offset: usize) {
    command.flags.digest = true;
    if let Some(buffer) = &mut command.buffer {
        buffer.length += TRAILER_LEN;
        let nothing = ReadTrailer { crc: 0, sequence: Sequence(!command.sequence.0) };
        buffers.write(offset + wide(len), &nothing.to_wire());
    }
}

/// Whether the trailer behind the data of a READ, which is at `offset` of `buffers`, is that of the
/// command with this sequence, and fits the data.
#[inline]
pub(super) fn is_whole(len: u32, sequence: Sequence, buffers: &Region, offset: usize) -> bool {
    let differs = buffers.sum(offset, wide(len + TRAILER_LEN), |bytes| {
        let Some((data, trailer)) = bytes.split_last_chunk() else { return 1 };
        let trailer = ReadTrailer::from_wire(*trailer);
        (trailer.sequence.0 ^ sequence.0) | (trailer.crc ^ crc32c(data))
    });
    differs == 0
}

/// First byte of a request in the volume. The range was made of bytes, so this does not overflow.
fn first_byte(io: &Io) -> u64 {
    let block = u64::from(io.data_bytes).checked_div(io.count.0).unwrap_or(0);
    io.lba.0.wrapping_mul(block)
}
