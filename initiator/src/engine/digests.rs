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

use crate::io::{Io, IoOp};

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
    // Its command was a READ or a WRITE, not a FLUSH ahead of it.
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

    /// Puts the digests of a request into its command. Its data is at `offset` of `buffers`.
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
        of_tag.moves_data = true;
        match (command.opcode, &mut command.buffer) {
            (Opcode::Write, _) => {
                command.data_digests = *of_tag.data.get_or_insert_with(|| {
                    DataDigests::of(first_byte(io), io.data_bytes, |from, len| {
                        buffers.sum(offset + wide(from), wide(len), crc32c)
                    })
                });
            }
            (Opcode::Read, Some(buffer)) => {
                buffer.length += TRAILER_LEN;
                let nothing = ReadTrailer { crc: 0, sequence: Sequence(!command.sequence.0) };
                buffers.write(offset + wide(io.data_bytes), &nothing.to_wire());
            }
            _ => of_tag.moves_data = false,
        }
    }

    /// A request was answered. Says what becomes of it, once the data of a READ is found to be the
    /// answer to this command and whole.
    pub(super) fn answered(
        &mut self,
        tag: Tag,
        io: &Io,
        (status, sequence): (Status, Sequence),
        buffers: &Region,
        offset: usize,
    ) -> Verdict {
        let Some(of_tag) = self.of_tag.get_mut(tag.index()) else { return Verdict::Done(status) };
        let lost = match (io.op, status) {
            (IoOp::Read, Status::Ok) => !is_whole(io, sequence, buffers, offset),
            (IoOp::Read | IoOp::Write, Status::DigestMismatch) => of_tag.moves_data,
            _ => false,
        };
        if lost && !of_tag.tried_again {
            of_tag.tried_again = true;
            return Verdict::Again;
        }
        if of_tag.moves_data || io.op != IoOp::Write {
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

/// Whether the trailer of a READ's data is that of this command, and fits the data.
fn is_whole(io: &Io, sequence: Sequence, buffers: &Region, offset: usize) -> bool {
    let mut trailer = [0; READ_TRAILER_BYTES];
    let len = wide(io.data_bytes);
    buffers.read(offset + len, &mut trailer);
    let trailer = ReadTrailer::from_wire(trailer);
    trailer.sequence == sequence && trailer.crc == buffers.sum(offset, len, crc32c)
}

/// First byte of a request in the volume. The range was made of bytes, so this does not overflow.
fn first_byte(io: &Io) -> u64 {
    let block = u64::from(io.data_bytes).checked_div(io.count.0).unwrap_or(0);
    io.lba.0.wrapping_mul(block)
}
