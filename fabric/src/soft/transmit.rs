//! The sending side of a queue pair: frames of requests, READ responses and acknowledgements,
//! gathered into as few calls as possible.
//!
//! One call takes headers and short payloads from one buffer, where they lie one behind the other,
//! and long payloads from their regions. What a socket does not take waits in the batch, until
//! there is room again: short payloads are then copied anew, so nothing of a frame is kept anywhere
//! but in its region.

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;

use super::completions::CompletionQueue;
use super::domain::{KeyTable, Right};
use super::frame::{HEADER, Header, Kind, MAX_MESSAGE, Refusal};
use super::queue_pair::{QueuePair, State};
use crate::work::{MAX_SGE, Rkey, SendOp, Sge, SgeList, WcStatus};

/// Frames gathered at once.
const BATCH: usize = 64;
/// Pieces in one call.
const PIECES: usize = 64;
/// Bytes of headers and short payloads in one call.
pub(super) const LINES: usize = 16 << 10;
/// A payload up to this size is copied behind its header: a piece of its own costs the kernel more.
const SHORT: usize = 1 << 10;

pub(super) const NO_PIECE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// The low half of a position, as it goes over the wire.
pub(super) fn low32(position: usize) -> u32 {
    u32::try_from(position & 0xffff_ffff).unwrap_or_default()
}

/// A READ of the peer that waits for its response.
#[derive(Clone, Copy, Debug)]
pub(super) struct Response {
    pub(super) seq: usize,
    pub(super) key: Rkey,
    pub(super) addr: u64,
    pub(super) len: u32,
}

#[derive(Clone, Copy, Debug)]
enum Origin {
    /// The WR at this position; the payload is what its SGEs name.
    Request(usize),
    /// The response to a READ of the peer.
    Response(Response),
    Nak,
    Control,
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    header: [u8; HEADER],
    /// Bytes of payload.
    len: u32,
    origin: Origin,
}

impl Frame {
    fn bytes(&self) -> usize {
        HEADER + self.len as usize
    }
}

/// The pieces of a call, and the buffer of its headers and short payloads.
struct Gathered<'a> {
    // Raw, because pieces point into it while more is added behind them.
    lines: *mut u8,
    room: usize,
    used: usize,
    pieces: [libc::iovec; PIECES],
    count: usize,
    // The last piece ends where the next line begins.
    open: bool,
    _lines: PhantomData<&'a mut [u8]>,
}

impl<'a> Gathered<'a> {
    fn new(lines: &'a mut [u8]) -> Self {
        Self {
            lines: lines.as_mut_ptr(),
            room: lines.len(),
            used: 0,
            pieces: [NO_PIECE; PIECES],
            count: 0,
            open: false,
            _lines: PhantomData,
        }
    }

    /// Whether a frame of so many parts fits in any case.
    fn has_room(&self, parts: usize) -> bool {
        self.count + 1 + parts <= PIECES && self.room - self.used >= HEADER + SHORT
    }

    /// Adds bytes to the buffer. The caller has seen to the room.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes.
    unsafe fn line(&mut self, from: *const u8, len: usize) {
        assert!(len <= self.room - self.used, "has_room");
        // SAFETY: `used <= room`, the length of the buffer.
        let to = unsafe { self.lines.add(self.used) };
        // SAFETY: `from` by the caller's promise; `to` has so much room in a buffer that `self`
        // borrows exclusively, and which no region contains.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        if self.open {
            self.pieces[self.count - 1].iov_len += len;
        } else {
            self.pieces[self.count] = libc::iovec { iov_base: to.cast(), iov_len: len };
            self.count += 1;
            self.open = true;
        }
        self.used += len;
    }

    fn header(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            // SAFETY: a slice is readable for its length.
            unsafe { self.line(bytes.as_ptr(), bytes.len()) };
        }
    }

    /// Adds a payload, after its header.
    ///
    /// # Safety
    /// Every part is readable for its length, until the call is over.
    unsafe fn payload(&mut self, parts: &[libc::iovec]) {
        let bytes: usize = parts.iter().map(|part| part.iov_len).sum();
        for part in parts {
            if bytes <= SHORT {
                // SAFETY: by the caller's promise.
                unsafe { self.line(part.iov_base.cast(), part.iov_len) };
            } else {
                self.pieces[self.count] = *part;
                self.count += 1;
                self.open = false;
            }
        }
    }
}

/// Pieces of the bytes `skip..skip + limit` of an SGE list; `None` when a key, bound or right is
/// bad.
pub(super) fn local_pieces(
    keys: &KeyTable,
    sges: &SgeList,
    mut skip: u32,
    mut limit: u32,
    write: bool,
    out: &mut [libc::iovec; MAX_SGE],
) -> Option<usize> {
    let mut count = 0;
    for sge in sges.as_slice() {
        if skip >= sge.len {
            skip -= sge.len;
            continue;
        }
        let len = (sge.len - skip).min(limit);
        if len == 0 {
            break;
        }
        let part = Sge { addr: sge.addr.checked_add(u64::from(skip))?, len, lkey: sge.lkey };
        let at = keys.local(part, write)?;
        out[count] = libc::iovec { iov_base: at.as_ptr().cast(), iov_len: len as usize };
        count += 1;
        limit -= len;
        skip = 0;
    }
    Some(count)
}

/// What is on its way out.
#[derive(Debug)]
pub(super) struct Outbound {
    /// Frames built and not wholly sent.
    batch: VecDeque<Frame>,
    /// Bytes of the first frame that are sent.
    offset: usize,
    pub(super) responses: VecDeque<Response>,
    /// READ responses wholly sent.
    pub(super) responses_sent: u32,
    /// Requests of the peer executed.
    pub(super) executed: usize,
    /// The peer waits for an acknowledgement; how many empty polls ago it asked.
    pub(super) ack_due: Option<u8>,
    /// Send it now even in a frame of its own.
    pub(super) ack_now: bool,
    probe: bool,
    nak_built: bool,
    /// The link took less than was offered.
    pub(super) blocked: bool,
    /// Sending failed; what the peer had to say is still read.
    pub(super) broken: bool,
    response_next: bool,
}

impl Outbound {
    pub(super) fn new(reads_in: u8) -> Self {
        Self {
            batch: VecDeque::with_capacity(BATCH),
            offset: 0,
            responses: VecDeque::with_capacity(usize::from(reads_in).max(1)),
            responses_sent: 0,
            executed: 0,
            ack_due: None,
            ack_now: false,
            probe: false,
            nak_built: false,
            blocked: false,
            broken: false,
            response_next: false,
        }
    }

    pub(super) fn clear(&mut self) {
        self.batch.clear();
        self.responses.clear();
        self.offset = 0;
        self.ack_due = None;
        self.ack_now = false;
        self.probe = false;
        self.blocked = false;
    }
}

impl QueuePair {
    /// Whether pumping could put something on the link.
    pub(super) fn wants_to_send(&self) -> bool {
        let out = &self.outbound;
        let request = self.send_built < self.send_head && self.poison.is_none();
        let refusing = matches!(self.state, State::Refusing { .. });
        !out.broken
            && (self.state == State::Ready || refusing)
            && (!out.batch.is_empty()
                || !out.responses.is_empty()
                || request
                || out.probe
                || (out.ack_due.is_some() && out.ack_now)
                || refusing)
    }

    fn frame(&mut self, mut header: Header, len: u32, origin: Origin) {
        header.executed = low32(self.outbound.executed);
        self.outbound.ack_due = None;
        self.outbound.ack_now = false;
        self.outbound.batch.push_back(Frame { header: header.encode(), len, origin });
    }

    /// Pieces of a frame's payload from `skip` on; `None` when a key died or was never good.
    fn payload(
        &self,
        frame: &Frame,
        keys: &KeyTable,
        skip: u32,
        out: &mut [libc::iovec; MAX_SGE],
    ) -> Option<usize> {
        let len = frame.len - skip;
        match frame.origin {
            Origin::Request(position) if len > 0 => {
                let sges = &self.slot(position)?.wr.sges;
                local_pieces(keys, sges, skip, len, false, out)
            }
            Origin::Response(response) => {
                let addr = response.addr + u64::from(skip);
                let from = keys.remote(response.key, addr, len, Right::Read)?;
                out[0] = libc::iovec { iov_base: from.as_ptr().cast(), iov_len: len as usize };
                Some(1)
            }
            Origin::Request(_) | Origin::Nak | Origin::Control => Some(0),
        }
    }

    fn build_response(&mut self) -> bool {
        let Some(response) = self.outbound.responses.pop_front() else { return false };
        let header = Header {
            len: response.len,
            seq: low32(response.seq),
            ..Header::new(Kind::ReadResponse)
        };
        self.frame(header, response.len, Origin::Response(response));
        true
    }

    fn build_request(&mut self, keys: &KeyTable) -> bool {
        if self.send_built == self.send_head || self.poison.is_some() || self.state != State::Ready
        {
            return false;
        }
        let position = self.send_built;
        let Some(wr) = self.slot(position).map(|s| s.wr) else { return false };
        let len = match u32::try_from(wr.sges.total_bytes()) {
            Ok(len) if (1..=MAX_MESSAGE).contains(&len) => len,
            _ => return self.poisoned(position, WcStatus::LocalLength),
        };
        let (kind, remote, imm) = match wr.op {
            SendOp::Send => (Kind::Send, None, 0),
            SendOp::Write(remote) => (Kind::Write, Some(remote), 0),
            SendOp::WriteWithImm(remote, imm) => (Kind::WriteWithImm, Some(remote), imm),
            // Tells the responder how many are outstanding, whatever is in flight.
            SendOp::Read(remote) => (Kind::ReadRequest, Some(remote), self.reads_answered),
        };
        let is_read = kind == Kind::ReadRequest;
        if is_read {
            // What is to be sent is looked at when it is gathered, which is soon; a sink would be
            // much later.
            let mut pieces = [NO_PIECE; MAX_SGE];
            if local_pieces(keys, &wr.sges, 0, len, true, &mut pieces).is_none() {
                return self.poisoned(position, WcStatus::LocalProtection);
            }
        }
        let header = Header {
            kind,
            // A READ is acknowledged by its response.
            ack_wanted: wr.signaled && !is_read,
            len,
            executed: 0,
            seq: low32(position),
            key: remote.map_or(0, |r| r.rkey.0),
            imm,
            addr: remote.map_or(0, |r| r.addr),
        };
        self.send_built += 1;
        self.frame(header, if is_read { 0 } else { len }, Origin::Request(position));
        true
    }

    /// The WR at `position` cannot be sent, nor any after it. Those before it still complete, so
    /// the peer must say how far it got.
    fn poisoned(&mut self, position: usize, status: WcStatus) -> bool {
        self.poison = Some((position, status));
        self.outbound.probe = self.send_done < position;
        false
    }

    fn build(&mut self, keys: &KeyTable) {
        while self.outbound.batch.len() < BATCH {
            // Alternates, so that neither our requests nor the peer's READs starve.
            let response = self.outbound.response_next;
            self.outbound.response_next = !response;
            let built = (response && self.build_response())
                || self.build_request(keys)
                || self.build_response();
            if !built {
                break;
            }
        }
        if self.outbound.batch.len() >= BATCH {
            return;
        }
        if let State::Refusing { seq, refusal, .. } = self.state
            && !self.outbound.nak_built
        {
            let header = Header { seq: low32(seq), imm: refusal.code(), ..Header::new(Kind::Nak) };
            self.frame(header, 0, Origin::Nak);
            self.outbound.nak_built = true;
        } else if self.outbound.probe {
            self.outbound.probe = false;
            let header = Header { ack_wanted: true, ..Header::new(Kind::Probe) };
            self.frame(header, 0, Origin::Control);
        } else if self.outbound.ack_due.is_some() && self.outbound.ack_now {
            self.frame(Header::new(Kind::Ack), 0, Origin::Control);
        }
    }

    /// Sends what can be sent.
    pub(super) fn pump(&mut self, keys: &KeyTable, cq: &mut CompletionQueue, lines: &mut [u8]) {
        while self.wants_to_send() && !self.outbound.blocked {
            self.build(keys);
            if self.outbound.batch.is_empty() {
                break;
            }
            let mut gathered = Gathered::new(lines);
            let dead = self.gather(keys, &mut gathered);
            if gathered.count == 0 {
                if dead {
                    self.source_died(cq);
                }
                continue;
            }
            self.calls += 1;
            // SAFETY: the pieces are in `lines`, which is not touched during the call, and ranges
            // that `keys` just found inside live regions, which stay alive and mapped while it is
            // borrowed.
            match unsafe { self.link.send(&gathered.pieces[..gathered.count]) } {
                Ok(moved) => {
                    self.sent(moved.bytes, cq);
                    // Blocked by a full socket; a dead source is dealt with in the next round.
                    self.outbound.blocked = !moved.more && !self.outbound.batch.is_empty();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.outbound.blocked = true;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The peer may have said why before it closed: the receiving side finds out.
                Err(_) => self.outbound.broken = true,
            }
        }
        if self.poison.is_some() {
            self.advance(cq);
        }
    }

    /// Gathers what is in the batch. Whether the last frame looked at has lost its memory.
    fn gather(&self, keys: &KeyTable, gathered: &mut Gathered<'_>) -> bool {
        let mut skip = self.outbound.offset;
        for frame in &self.outbound.batch {
            let mut parts = [NO_PIECE; MAX_SGE];
            let past_header = u32::try_from(skip.saturating_sub(HEADER)).unwrap_or(u32::MAX);
            let Some(count) = self.payload(frame, keys, past_header.min(frame.len), &mut parts)
            else {
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

    /// The link took so many bytes.
    fn sent(&mut self, bytes: usize, cq: &mut CompletionQueue) {
        self.outbound.offset += bytes;
        while let Some(front) = self.outbound.batch.front().copied() {
            if self.outbound.offset < front.bytes() {
                return;
            }
            self.outbound.offset -= front.bytes();
            self.outbound.batch.pop_front();
            match front.origin {
                Origin::Request(position) => {
                    self.send_sent = position + 1;
                    if self.slot(position).is_some_and(|s| matches!(s.wr.op, SendOp::Read(_))) {
                        self.reads_pending.push_back(position);
                    }
                }
                Origin::Response(_) => {
                    self.outbound.responses_sent = self.outbound.responses_sent.wrapping_add(1);
                }
                Origin::Nak => {
                    let recv =
                        if let State::Refusing { recv, .. } = self.state { recv } else { None };
                    self.break_down(cq, None, recv, State::Draining);
                    return;
                }
                Origin::Control => {}
            }
        }
    }

    /// The first frame of the batch has lost its memory.
    fn source_died(&mut self, cq: &mut CompletionQueue) {
        let Some(front) = self.outbound.batch.front().copied() else { return };
        let begun = self.outbound.offset > 0;
        match front.origin {
            Origin::Request(position) if begun => {
                // The peer waits for bytes that may not be sent: only ending the link is left.
                self.break_down(cq, Some((position, WcStatus::LocalProtection)), None, State::Dead);
            }
            Origin::Request(position) => {
                self.outbound.batch.retain(|f| !matches!(f.origin, Origin::Request(_)));
                self.send_built = position;
                self.poisoned(position, WcStatus::LocalProtection);
            }
            Origin::Response(Response { seq, .. }) if !begun => {
                self.outbound.responses.clear();
                self.outbound
                    .batch
                    .retain(|f| matches!(f.origin, Origin::Request(_) | Origin::Control));
                self.outbound.nak_built = false;
                self.refuse(seq, Refusal::Access, None);
            }
            Origin::Response(_) | Origin::Nak | Origin::Control => {
                self.lost(cq, "the source of a READ response was deregistered");
            }
        }
    }

    /// Starts to die of a request that cannot be done.
    pub(super) fn refuse(&mut self, seq: usize, refusal: Refusal, recv: Option<WcStatus>) {
        // A READ that cannot be answered any more is older than what was refused meanwhile.
        let recv = if let State::Refusing { recv, .. } = self.state { recv } else { recv };
        self.inbound.clear();
        self.state = State::Refusing { seq, refusal, recv };
    }
}
