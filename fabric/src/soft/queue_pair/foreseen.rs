//! [`Foreseen`]: the READ responses that the next bytes of a link should be, and the pieces of the
//! call that receives them.
//!
//! Responses come in the order of their READs, so the place of each is known before its header has
//! arrived. One call puts the headers into an array and every payload where it belongs, without a
//! copy. Other frames may come in between: then the bytes from there on are copied out of the
//! places that they reached, and parsed as any others. A READ that has no response yet has no
//! defined bytes in its sink, so nothing is lost. The response to a READ into live memory is never
//! foreseen: nobody may see other bytes there ([`Access::live`](crate::Access::live)).

use std::cell::UnsafeCell;

use rblk_protocol::width::wide;

use super::read_depth::ReadsOut;
use super::send_queue::SendQueue;
use crate::region::copy_apart;
use crate::soft::keys::KeyTable;
use crate::soft::wire::frame::{FrameHeader, FrameKind, HEADER, low32};
use crate::soft::wire::inbound::LARGE;
use crate::soft::wire::pieces::{NO_PIECE, local_pieces};
use crate::work::{MAX_SGE, SgeList};

/// Responses of one call.
const MOST: usize = 32;
/// Fewer responses are copied: the larger call costs as much.
pub(super) const LEAST: usize = 3;
/// Pieces of one call: those of a payload that has begun, header and payload of each response, and
/// the staging buffer.
pub(super) const PIECES: usize = MAX_SGE + MOST * (1 + MAX_SGE) + 1;

/// Whether the response to a READ with this sink may be foreseen: it is short, and nobody looks at
/// the sink.
pub(super) fn is_foreseeable(sink: &SgeList, keys: &KeyTable) -> bool {
    sink.total_bytes() <= u64::from(LARGE) && !sink.as_slice().iter().any(|sge| keys.is_live(*sge))
}

/// A READ whose response is foreseen.
#[derive(Clone, Copy, Debug)]
struct ForeseenRead {
    position: usize,
    len: u32,
    // The piece of its header; those of its payload follow.
    at: usize,
}

/// READ responses that one call foresees.
#[derive(Debug)]
pub(super) struct Foreseen {
    reads: [ForeseenRead; MOST],
    count: usize,
    // Bytes of all of them, with their headers.
    bytes: usize,
    // Written by the call.
    headers: UnsafeCell<[u8; MOST * HEADER]>,
}

impl Foreseen {
    /// None.
    pub(super) fn new() -> Self {
        let none = ForeseenRead { position: 0, len: 0, at: 0 };
        Self {
            reads: [none; MOST],
            count: 0,
            bytes: 0,
            headers: UnsafeCell::new([0; MOST * HEADER]),
        }
    }

    /// Foresees the responses to the READs without a response, but for the first `skip`, as far as
    /// they are short and fit into `room` bytes. Adds their pieces behind the first `count` ones,
    /// and returns how many pieces there are then. The pieces are valid while `keys` is borrowed
    /// and until `self` is moved.
    pub(super) fn add(
        &mut self,
        (reads_out, sends): (&ReadsOut, &SendQueue),
        keys: &KeyTable,
        (skip, room): (usize, usize),
        pieces: &mut [libc::iovec; PIECES],
        mut count: usize,
    ) -> usize {
        let headers = self.headers.get().cast::<u8>();
        for position in reads_out.pending().skip(skip).take(MOST) {
            let Some(wr) = sends.get(position) else { break };
            let len = u32::try_from(wr.sges.total_bytes()).unwrap_or(u32::MAX);
            if !is_foreseeable(&wr.sges, keys) || self.bytes + HEADER + wide(len) > room {
                break;
            }
            let mut sink = [NO_PIECE; MAX_SGE];
            // A sink that is gone ends the QP when its response comes.
            let Some(parts) = local_pieces(keys, &wr.sges, 0, len, true, &mut sink) else { break };
            // SAFETY: `self.count < MOST` headers are in front of it in an array of `MOST`.
            let header = unsafe { headers.add(self.count * HEADER) };
            self.reads[self.count] = ForeseenRead { position, len, at: count };
            pieces[count] = libc::iovec { iov_base: header.cast(), iov_len: HEADER };
            pieces[count + 1..=count + parts].copy_from_slice(&sink[..parts]);
            count += 1 + parts;
            self.bytes += HEADER + wide(len);
            self.count += 1;
        }
        count
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Bytes of all of them, with their headers.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes of the header of the response at `at`.
    pub(super) fn header_bytes(&self, at: usize) -> &[u8] {
        // SAFETY: only the call writes the headers, and it is over.
        let headers = unsafe { &*self.headers.get() };
        &headers[at * HEADER..][..HEADER]
    }

    /// The header of the response at `at` and the bytes behind it, if that response arrived.
    pub(super) fn header(&self, at: usize) -> Option<(FrameHeader, usize)> {
        let read = &self.reads[at];
        let header = FrameHeader::decode(self.header_bytes(at).first_chunk()?).ok()?;
        let is_foreseen = header.kind == FrameKind::ReadResponse
            && header.seq == low32(read.position)
            && header.len == read.len;
        is_foreseen.then_some((header, wide(read.len)))
    }

    /// Copies the bytes of the responses from `at` on out of the places that they reached, to the
    /// end of the first [`Self::bytes`] bytes of `staging`. Returns where they begin.
    ///
    /// # Safety
    /// The pieces are those of [`Self::add`], and still valid; `staging` is none of them, and no
    /// region contains it.
    pub(super) unsafe fn take_back(
        &self,
        at: usize,
        pieces: &[libc::iovec],
        staging: &mut [u8],
    ) -> usize {
        let reads = &self.reads[at..self.count];
        let bytes: usize = reads.iter().map(|read| HEADER + wide(read.len)).sum();
        let begin = self.bytes - bytes;
        let first = reads.first().map_or(pieces.len(), |read| read.at);
        let mut to = &mut staging[begin..self.bytes];
        for piece in &pieces[first..] {
            let (now, rest) = to.split_at_mut(piece.iov_len.min(to.len()));
            // SAFETY: the piece is readable for its length, by the caller's promise, and shares no
            // byte with `now`, which is as long at most.
            unsafe { copy_apart(piece.iov_base.cast_const().cast(), now.as_mut_ptr(), now.len()) };
            to = rest;
        }
        begin
    }
}
