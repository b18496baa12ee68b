//! [`Inbound`]: the frame that is on its way in.

use super::frame::{FrameHeader, HEADER};
use rblk_protocol::width::{narrow, wide};

use crate::work::Rkey;

/// A payload from this size on is worth a call of its own.
pub(in crate::soft) const LARGE: u32 = 16 << 10;

/// Where a payload goes.
#[derive(Clone, Copy, Debug)]
pub(in crate::soft) enum Sink {
    /// The first waiting RECV.
    Recv,
    /// Memory that the peer names.
    Write { key: Rkey, addr: u64 },
    /// Memory that the peer names; it takes a RECV too.
    WriteWithImm { key: Rkey, addr: u64, imm: u32 },
    /// The READ at this position of our send queue.
    Read { position: usize },
}

/// A payload that has begun to arrive.
#[derive(Clone, Copy, Debug)]
pub(in crate::soft) struct Body {
    pub(in crate::soft) sink: Sink,
    pub(in crate::soft) len: u32,
    /// Bytes that are in their place.
    pub(in crate::soft) done: u32,
    /// The peer wants an acknowledgement of the request.
    pub(in crate::soft) ack_wanted: bool,
}

impl Body {
    /// Bytes that are to come.
    pub(in crate::soft) fn left(&self) -> u32 {
        self.len - self.done
    }
}

/// The incoming frame: a part of a header, or the payload behind a parsed header.
#[derive(Default, Debug)]
pub(in crate::soft) struct Inbound {
    header: [u8; HEADER],
    header_len: usize,
    body: Option<Body>,
    // The last payload that began was a large one.
    large: bool,
}

impl Inbound {
    /// The payload that has begun.
    #[inline]
    pub(in crate::soft) fn body(&self) -> Option<Body> {
        self.body
    }

    /// Whether the last payload that began was a large one, so that another is likely.
    pub(in crate::soft) fn expects_large(&self) -> bool {
        self.large
    }

    /// Whether the next byte is of a payload, or the first of a header.
    #[inline]
    pub(in crate::soft) fn is_between_headers(&self) -> bool {
        self.header_len == 0
    }

    /// The header that has begun, and how many bytes of it are there.
    pub(super) fn partial_header(&self) -> ([u8; HEADER], usize) {
        (self.header, self.header_len)
    }

    /// Forgets all that has begun.
    pub(in crate::soft) fn clear(&mut self) {
        self.body = None;
        self.header_len = 0;
        self.large = false;
    }

    /// Begins the payload of a header.
    #[inline]
    pub(in crate::soft) fn begin(&mut self, sink: Sink, header: &FrameHeader) {
        self.large = header.len >= LARGE;
        self.body = Some(Body { sink, len: header.len, done: 0, ack_wanted: header.ack_wanted });
    }

    /// Counts further bytes of the payload in their place. Returns the payload when it is whole.
    #[inline]
    pub(in crate::soft) fn progress(&mut self, bytes: usize) -> Option<Body> {
        let body = self.body.as_mut()?;
        debug_assert!(bytes <= wide(body.left()), "{bytes} bytes of {}", body.left());
        body.done += narrow::<u32, _>(bytes);
        if body.done < body.len { None } else { self.body.take() }
    }

    /// Takes bytes of a header from the front of `bytes`. Returns the header when it is whole.
    #[inline]
    pub(in crate::soft) fn header(
        &mut self,
        bytes: &mut &[u8],
    ) -> Option<Result<FrameHeader, &'static str>> {
        if self.header_len == 0
            && let Some((header, rest)) = bytes.split_first_chunk::<HEADER>()
        {
            *bytes = rest;
            return Some(FrameHeader::decode(header));
        }
        let have = self.header_len;
        let take = bytes.len().min(HEADER - have);
        let (now, rest) = bytes.split_at(take);
        *bytes = rest;
        self.header[have..have + take].copy_from_slice(now);
        self.header_len += take;
        if self.header_len < HEADER {
            return None;
        }
        self.header_len = 0;
        Some(FrameHeader::decode(&self.header))
    }
}
