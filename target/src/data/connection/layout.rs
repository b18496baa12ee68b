//! [`Layout`]: the places in the memory of a connection. Pure arithmetic: control allocates by it,
//! and the data thread addresses by it.
//!
//! ```text
//! | receive buffers, depth + 1 + spare | responses, depth + 1 | reply areas (admin) | scratch |
//! | trailers of READs, depth + 1 (digests) |
//! ```
//!
//! A receive buffer holds a list of commands and the data behind it. A response buffer holds a list
//! of responses; it is the buffer of the first response's tag. The trailer of a READ belongs to its
//! tag, and is rewritten when a response buffer may be: for a new command with its tag.

use rblk_protocol::limits::{
    COMMAND_BYTES, COMMAND_LIST_BYTES, READ_TRAILER_BYTES, RESPONSE_BYTES, RESPONSE_LIST_BYTES,
};
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{QueueDepth, Tag};

use super::queued_sends::SIGNAL_INTERVAL;

/// Receive buffers beyond depth + 1: a margin.
const SPARE_RECVS: usize = 1;
/// Bytes of a reply area of an admin connection.
pub const REPLY_AREA_BYTES: usize = 4096;
/// Bytes that a barrier moves.
pub const SCRATCH_BYTES: u32 = 64;

/// Sizes of a connection's memory and queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    depth: QueueDepth,
    recv_stride: usize,
    recv_buffers: u16,
    responses_at: usize,
    response_stride: usize,
    replies_at: usize,
    scratch_at: usize,
    trailers: usize,
    send_wrs: u32,
}

impl Layout {
    /// The layout of a connection with this depth and this much in-capsule data in one message.
    /// Admin connections have reply areas, others have room for lists.
    #[must_use]
    pub(crate) fn new(depth: QueueDepth, message_data_bytes: u32, admin: bool) -> Self {
        let (commands, response_stride) = if admin {
            (COMMAND_BYTES, RESPONSE_BYTES)
        } else {
            (COMMAND_LIST_BYTES, RESPONSE_LIST_BYTES)
        };
        let recv_stride = (commands + wide(message_data_bytes)).next_multiple_of(64);
        let recv_buffers = depth.tags() + SPARE_RECVS;
        let responses_at = recv_stride * recv_buffers;
        let replies_at = (responses_at + depth.tags() * response_stride).next_multiple_of(64);
        let scratch_at = replies_at + if admin { depth.tags() * REPLY_AREA_BYTES } else { 0 };
        Self {
            depth,
            recv_stride,
            recv_buffers: narrow(recv_buffers),
            responses_at,
            response_stride,
            replies_at,
            scratch_at,
            trailers: 0,
            send_wrs: send_wrs(depth, admin),
        }
    }

    /// Adds room for the trailers of READs, if `digests`.
    #[must_use]
    pub(crate) fn with_digests(self, digests: bool) -> Self {
        Self { trailers: if digests { self.depth.tags() } else { 0 }, ..self }
    }

    /// Commands that the peer may have outstanding, without the connection's own.
    #[must_use]
    #[inline]
    pub(crate) fn depth(&self) -> QueueDepth {
        self.depth
    }

    /// Size of the memory in bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        self.trailers_at() + self.trailers * READ_TRAILER_BYTES
    }

    #[inline]
    fn trailers_at(&self) -> usize {
        self.scratch_at + wide(SCRATCH_BYTES)
    }

    /// Bytes of a receive buffer: the longest message.
    #[must_use]
    #[inline]
    pub(crate) fn recv_bytes(&self) -> usize {
        self.recv_stride
    }

    /// Number of receive buffers.
    #[must_use]
    #[inline]
    pub(crate) fn recv_buffers(&self) -> u16 {
        self.recv_buffers
    }

    /// RECVs that may be posted: one for each receive buffer.
    #[must_use]
    pub fn recv_wrs(&self) -> u32 {
        self.recv_buffers.into()
    }

    /// Send WRs that may be outstanding.
    #[must_use]
    pub fn send_wrs(&self) -> u32 {
        self.send_wrs
    }

    /// Offset of a receive buffer.
    #[inline]
    pub(crate) fn recv_offset(&self, buffer: u16) -> usize {
        wide(buffer) * self.recv_stride
    }

    /// Offset of a response buffer.
    #[inline]
    pub(crate) fn response_offset(&self, tag: Tag) -> usize {
        self.responses_at + tag.index() * self.response_stride
    }

    /// Offset of an admin reply area.
    pub(crate) fn reply_offset(&self, tag: Tag) -> usize {
        self.replies_at + tag.index() * REPLY_AREA_BYTES
    }

    /// Offset of the trailer of a READ, if digests are agreed.
    #[inline]
    pub(crate) fn trailer_offset(&self, tag: Tag) -> usize {
        debug_assert!(tag.index() < self.trailers, "no digests were agreed");
        self.trailers_at() + tag.index() * READ_TRAILER_BYTES
    }

    /// Offset of the scratch.
    pub(crate) fn scratch_offset(&self) -> usize {
        self.scratch_at
    }
}

/// WRs for each command: a WRITE, a SEND and, for a volume, a READ; and the tail of unsignaled WRs.
fn send_wrs(depth: QueueDepth, admin: bool) -> u32 {
    let commands = narrow::<u32, _>(depth.tags());
    // Many mounts connect at once after a restart, and a small send queue is created faster.
    if admin { 2 * commands + SIGNAL_INTERVAL } else { 3 * commands + 2 * SIGNAL_INTERVAL }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_pieces_do_not_overlap() {
        for (depth, in_capsule, admin) in
            [(1, 0, false), (128, 3 * 4096, false), (1024, 16384, false), (16, 4096, true)]
        {
            let layout = Layout::new(QueueDepth::new(depth).unwrap(), in_capsule, admin);
            let (commands, responses) =
                if admin { (64, 16) } else { (COMMAND_LIST_BYTES, RESPONSE_LIST_BYTES) };
            assert!(layout.recv_stride >= commands + in_capsule as usize);
            assert!(layout.response_stride >= responses);
            assert_eq!(layout.responses_at, layout.recv_stride * wide(layout.recv_buffers));
            assert!(layout.replies_at >= layout.responses_at + layout.depth.tags() * responses);
            let replies = if admin { layout.depth.tags() * REPLY_AREA_BYTES } else { 0 };
            assert_eq!(layout.scratch_at, layout.replies_at + replies);
            assert_eq!(layout.bytes(), layout.scratch_at + SCRATCH_BYTES as usize);
            assert!(u32::from(layout.recv_buffers) > u32::from(depth) + 1);
            let (bytes, layout) = (layout.bytes(), layout.with_digests(true));
            assert_eq!(layout.trailer_offset(Tag(0)), bytes);
            assert_eq!(layout.trailer_offset(Tag(depth)) + READ_TRAILER_BYTES, layout.bytes());
        }
    }
}
