//! [`Outbound`]: frames on their way to the peer: requests, READ responses, acknowledgements.
//!
//! Frames are built in batches and gathered into as few calls as possible. Bytes that the link does
//! not take stay in the batch. Short payloads are copied again for the next call, so the bytes of a
//! payload are kept nowhere but in their region.

use std::collections::VecDeque;

use rblk_protocol::width::{narrow, wide};

use super::acks::Acks;
use super::send_queue::SendQueue;
use crate::soft::keys::{KeyTable, Right};
use crate::soft::wire::frame::{FrameHeader, FrameKind, HEADER, MAX_MESSAGE, NakReason, low32};
use crate::soft::wire::gathered::Gathered;
use crate::soft::wire::pieces::{NO_PIECE, local_pieces};
use crate::work::{MAX_SGE, Rkey, SendOp, SendWr, WcStatus};

/// Frames in one batch.
const BATCH: usize = 64;

/// A READ of the peer that waits for its response.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerRead {
    pub(super) seq: usize,
    pub(super) key: Rkey,
    pub(super) addr: u64,
    pub(super) len: u32,
}

/// The source of a frame.
#[derive(Clone, Copy, Debug)]
pub(super) enum FrameOrigin {
    /// The WR at this position. The payload is in its SGEs.
    Request(usize),
    /// The READ of the peer that it answers.
    Response(PeerRead),
    /// The refusal of a request.
    Nak,
    /// An acknowledgement, or a question for one.
    Control,
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    header: [u8; HEADER],
    /// Bytes of payload.
    len: u32,
    origin: FrameOrigin,
}

impl Frame {
    #[inline]
    fn bytes(&self) -> usize {
        HEADER + wide(self.len)
    }

    /// Pieces of the payload from `skip` on. `None` when the memory was deregistered or never was
    /// registered.
    #[inline]
    fn payload(
        &self,
        sends: &SendQueue,
        keys: &KeyTable,
        skip: u32,
        out: &mut [libc::iovec; MAX_SGE],
    ) -> Option<usize> {
        let len = self.len - skip;
        match self.origin {
            FrameOrigin::Request(position) if len > 0 => {
                local_pieces(keys, &sends.get(position)?.sges, skip, len, false, out)
            }
            FrameOrigin::Response(response) => {
                let addr = response.addr + u64::from(skip);
                let from = keys.remote(response.key, addr, len, Right::Read)?;
                out[0] = libc::iovec { iov_base: from.as_ptr().cast(), iov_len: wide(len) };
                Some(1)
            }
            FrameOrigin::Request(_) | FrameOrigin::Nak | FrameOrigin::Control => Some(0),
        }
    }
}

/// The frames on their way to the peer.
#[derive(Debug)]
pub(super) struct Outbound {
    // Frames that were built and are not wholly sent.
    batch: VecDeque<Frame>,
    // Bytes of the first frame that are sent.
    offset: usize,
    // Bytes of the batch that are not sent.
    waiting: usize,
    responses: VecDeque<PeerRead>,
    // The next frame is a response, if there is one.
    response_next: bool,
    acks: Acks,
    // Ask the peer for an acknowledgement.
    probe: bool,
    nak_built: bool,
    // The link took less than was offered.
    blocked: bool,
    // Sending failed. Bytes that the peer has sent are still read.
    broken: bool,
}

impl Outbound {
    /// For a QP that serves `reads_in` READs at once.
    pub(super) fn new(reads_in: u8) -> Self {
        Self {
            batch: VecDeque::with_capacity(BATCH),
            offset: 0,
            waiting: 0,
            responses: VecDeque::with_capacity(usize::from(reads_in).max(1)),
            response_next: false,
            acks: Acks::default(),
            probe: false,
            nak_built: false,
            blocked: false,
            broken: false,
        }
    }

    /// The QP is in the error state: nothing more is sent.
    pub(super) fn clear(&mut self) {
        self.batch.clear();
        self.responses.clear();
        self.offset = 0;
        self.waiting = 0;
        self.acks.told();
        self.probe = false;
        self.blocked = false;
    }

    /// The answer to the peer's requests.
    pub(super) fn acks(&mut self) -> &mut Acks {
        &mut self.acks
    }

    /// Whether the link has no room.
    pub(super) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// The link has room again.
    pub(super) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// The link took less than it was offered.
    pub(super) fn block(&mut self) {
        self.blocked = true;
    }

    /// The link takes nothing any more.
    pub(super) fn set_broken(&mut self) {
        self.broken = true;
    }

    /// Whether the link still takes something.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether there is something to send besides requests and a NAK.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        !self.batch.is_empty() || !self.responses.is_empty() || self.probe || self.acks.is_due_now()
    }

    /// Whether frames wait to be sent.
    pub(super) fn has_frames(&self) -> bool {
        !self.batch.is_empty()
    }

    /// Bytes of the frames that wait to be sent.
    #[inline]
    pub(super) fn waiting_bytes(&self) -> usize {
        self.waiting
    }

    /// A READ of the peer is to be answered.
    pub(super) fn respond(&mut self, response: PeerRead) {
        self.responses.push_back(response);
    }

    /// Builds frames until the batch is full: `requests` from the send queue, if the QP may send
    /// them; responses; and `refusing`, the request that the QP refuses.
    #[inline]
    pub(super) fn build(
        &mut self,
        requests: Option<(&mut SendQueue, u32)>,
        refusing: Option<(usize, NakReason)>,
        keys: &KeyTable,
    ) {
        let mut requests = requests;
        while self.batch.len() < BATCH {
            // Requests and responses take turns, so that neither waits without end.
            let response = self.response_next;
            self.response_next = !response;
            let built = (response && self.build_response())
                || requests.as_mut().is_some_and(|(sends, reads_answered)| {
                    self.build_request(sends, *reads_answered, keys)
                })
                || self.build_response();
            if !built {
                break;
            }
        }
        if self.batch.len() >= BATCH {
            return;
        }
        if let Some((seq, refusal)) = refusing
            && !self.nak_built
        {
            let header = FrameHeader {
                seq: low32(seq),
                imm: refusal.code(),
                ..FrameHeader::new(FrameKind::Nak)
            };
            self.push(header, 0, FrameOrigin::Nak);
            self.nak_built = true;
        } else if self.probe {
            self.probe = false;
            let header = FrameHeader { ack_wanted: true, ..FrameHeader::new(FrameKind::Probe) };
            self.push(header, 0, FrameOrigin::Control);
        } else if self.acks.is_due_now() {
            self.push(FrameHeader::new(FrameKind::Ack), 0, FrameOrigin::Control);
        }
    }

    #[inline]
    fn push(&mut self, mut header: FrameHeader, len: u32, origin: FrameOrigin) {
        header.executed = low32(self.acks.executed());
        self.acks.told();
        let frame = Frame { header: header.encode(), len, origin };
        self.waiting += frame.bytes();
        self.batch.push_back(frame);
    }

    #[inline]
    fn build_response(&mut self) -> bool {
        let Some(response) = self.responses.pop_front() else { return false };
        let header = FrameHeader {
            len: response.len,
            seq: low32(response.seq),
            ..FrameHeader::new(FrameKind::ReadResponse)
        };
        self.push(header, response.len, FrameOrigin::Response(response));
        true
    }

    #[inline]
    fn build_request(
        &mut self,
        sends: &mut SendQueue,
        reads_answered: u32,
        keys: &KeyTable,
    ) -> bool {
        let Some((position, wr)) = sends.unbuilt() else { return false };
        match request_header(position, &wr, reads_answered, keys) {
            Ok(header) => {
                let len = if header.kind == FrameKind::ReadRequest { 0 } else { header.len };
                sends.built();
                self.push(header, len, FrameOrigin::Request(position));
                true
            }
            Err(status) => {
                self.probe = sends.poison(position, status);
                false
            }
        }
    }

    /// Adds the frames of the batch to a call. Returns whether the memory of the last frame looked
    /// at was deregistered.
    #[inline]
    pub(super) fn gather(
        &self,
        sends: &SendQueue,
        keys: &KeyTable,
        gathered: &mut Gathered<'_>,
    ) -> bool {
        let mut skip = self.offset;
        for frame in &self.batch {
            let mut parts = [NO_PIECE; MAX_SGE];
            let past_header = skip.saturating_sub(HEADER).min(wide(frame.len));
            let Some(count) = frame.payload(sends, keys, narrow(past_header), &mut parts) else {
                return true;
            };
            if !gathered.has_room(count) {
                break;
            }
            gathered.header(frame.header.get(skip..).unwrap_or_default());
            // SAFETY: `keys` has just found the parts inside live regions, which stay alive and
            // mapped while it is borrowed; the caller holds it over the call.
            unsafe { gathered.payload(&parts[..count]) };
            skip = 0;
        }
        false
    }

    /// The link took `bytes` bytes.
    #[inline]
    pub(super) fn took(&mut self, bytes: usize) {
        self.offset += bytes;
        self.waiting -= bytes;
    }

    /// Removes the first frame if all of it is sent.
    #[inline]
    pub(super) fn pop_sent(&mut self) -> Option<FrameOrigin> {
        let front = self.batch.front()?;
        if self.offset < front.bytes() {
            return None;
        }
        self.offset -= front.bytes();
        self.batch.pop_front().map(|frame| frame.origin)
    }

    /// The first frame, and whether a part of it is sent.
    pub(super) fn first(&self) -> Option<(FrameOrigin, bool)> {
        self.batch.front().map(|frame| (frame.origin, self.offset > 0))
    }

    // Drops the frames of the other origins. Nothing of them is sent.
    fn retain(&mut self, stays: impl Fn(FrameOrigin) -> bool) {
        self.batch.retain(|frame| stays(frame.origin));
        self.waiting = self.batch.iter().map(Frame::bytes).sum::<usize>() - self.offset;
    }

    /// The memory of a request of which nothing is sent was deregistered: drops this request and
    /// those behind it. They stay in the send queue.
    pub(super) fn drop_requests(
        &mut self,
        position: usize,
        status: WcStatus,
        sends: &mut SendQueue,
    ) {
        self.retain(|origin| !matches!(origin, FrameOrigin::Request(_)));
        sends.unbuild(position);
        self.probe = sends.poison(position, status);
    }

    /// The memory of a response of which nothing is sent was deregistered: drops all responses. A
    /// NAK is to be sent instead.
    pub(super) fn drop_responses(&mut self) {
        self.responses.clear();
        self.retain(|origin| matches!(origin, FrameOrigin::Request(_) | FrameOrigin::Control));
        self.nak_built = false;
    }
}

/// The header of a request, or why it cannot be sent.
#[inline]
fn request_header(
    position: usize,
    wr: &SendWr,
    reads_answered: u32,
    keys: &KeyTable,
) -> Result<FrameHeader, WcStatus> {
    let len = match u32::try_from(wr.sges.total_bytes()) {
        Ok(len) if (1..=MAX_MESSAGE).contains(&len) => len,
        _ => return Err(WcStatus::LocalLength),
    };
    let (kind, remote, imm) = match wr.op {
        SendOp::Send => (FrameKind::Send, None, 0),
        SendOp::Write(remote) => (FrameKind::Write, Some(remote), 0),
        SendOp::WriteWithImm(remote, imm) => (FrameKind::WriteWithImm, Some(remote), imm),
        SendOp::Read(remote) => (FrameKind::ReadRequest, Some(remote), reads_answered),
    };
    let is_read = kind == FrameKind::ReadRequest;
    if is_read {
        // The keys of a payload are checked when it is gathered, which is soon. The sink of a READ
        // would be checked much later.
        let mut pieces = [NO_PIECE; MAX_SGE];
        let is_sink = wr.sges.as_slice().iter().all(|sge| keys.is_sink(*sge));
        if !is_sink || local_pieces(keys, &wr.sges, 0, len, true, &mut pieces).is_none() {
            return Err(WcStatus::LocalProtection);
        }
    }
    Ok(FrameHeader {
        kind,
        // A READ is acknowledged by its response.
        ack_wanted: wr.signaled && !is_read,
        len,
        executed: 0,
        seq: low32(position),
        key: remote.map_or(0, |r| r.rkey.0),
        imm,
        addr: remote.map_or(0, |r| r.addr),
    })
}
