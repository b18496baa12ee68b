//! The receiving side of a queue pair: headers are collected, payload goes straight to its place.
//!
//! One call fills first what is missing of the current payload, in place, then a staging buffer
//! with whatever follows. Small messages thus cost one call for many and a short copy each. Where
//! large ones come, little of the staging buffer is offered: just enough for the headers between
//! them, so that their payload is not copied either.

use std::io;

use super::completions::CompletionQueue;
use super::domain::{KeyTable, Right};
use super::frame::{HEADER, Header, Kind, Refusal};
use super::queue_pair::{QueuePair, State};
use super::transmit::{NO_PIECE, Response, local_pieces, low32};
use crate::region::copy_apart;
use crate::work::{MAX_SGE, Rkey, SgeList, WcStatus};

/// Size of a poller's staging buffer: what a deep queue of small messages has in its socket, in one
/// call. Pages that were never filled are not there.
pub(super) const STAGING: usize = 128 << 10;
/// A payload from this size on is worth a call of its own.
const LARGE: u32 = 16 << 10;
/// Staged behind a large payload, and where the next one is expected: some headers and small
/// messages, and little of a large payload.
const GLIMPSE: usize = 512;
#[derive(Clone, Copy, Debug)]
pub(super) enum Sink {
    /// The first waiting RECV.
    Recv,
    Write {
        key: Rkey,
        addr: u64,
    },
    WriteWithImm {
        key: Rkey,
        addr: u64,
        imm: u32,
    },
    /// The READ at this position of our send queue.
    Read {
        position: usize,
    },
}

/// A payload on its way in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Body {
    pub(super) sink: Sink,
    pub(super) len: u32,
    pub(super) done: u32,
    ack_wanted: bool,
}

/// What is on its way in.
#[derive(Default, Debug)]
pub(super) struct Inbound {
    header: [u8; HEADER],
    header_len: usize,
    body: Option<Body>,
    /// The last payload that began was a large one.
    large: bool,
    reads_requested: u32,
    reads_received_by_peer: u32,
}

impl Inbound {
    /// The payload that has begun.
    pub(super) fn body(&self) -> Option<Body> {
        self.body
    }

    /// The header that has begun, and how much of it is there.
    pub(super) fn partial_header(&self) -> ([u8; HEADER], usize) {
        (self.header, self.header_len)
    }

    pub(super) fn clear(&mut self) {
        self.body = None;
        self.header_len = 0;
        self.large = false;
    }
}

impl QueuePair {
    /// One receive call, and all that follows from it. Whether another may find more.
    pub(super) fn receive(
        &mut self,
        keys: &KeyTable,
        cq: &mut CompletionQueue,
        staging: &mut [u8],
    ) -> bool {
        if self.state == State::Dead {
            return false;
        }
        let mut pieces = [NO_PIECE; MAX_SGE + 1];
        let mut count = 0;
        let mut direct = 0;
        if let Some(body) = self.inbound.body {
            let mut sink = [NO_PIECE; MAX_SGE];
            let Some(parts) = self.sink_pieces(keys, &body, body.len - body.done, &mut sink) else {
                self.sink_died(&body, cq);
                return self.state != State::Dead;
            };
            pieces[..parts].copy_from_slice(&sink[..parts]);
            count = parts;
            direct = (body.len - body.done) as usize;
        }
        let room = if self.inbound.large { GLIMPSE } else { staging.len() };
        let staging = &mut staging[..room];
        pieces[count] =
            libc::iovec { iov_base: staging.as_mut_ptr().cast(), iov_len: staging.len() };
        self.calls += 1;
        self.quiet = self.quiet.saturating_add(1);
        // SAFETY: the pieces are ranges that `keys` just found inside live regions with the right
        // to write, which stay alive while it is borrowed, and the staging buffer, borrowed
        // exclusively.
        match unsafe { self.link.receive(&pieces[..=count]) } {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => true,
            Err(error) => {
                self.lost(cq, &error.to_string());
                false
            }
            Ok(moved) if moved.bytes == 0 => {
                self.parted(cq);
                false
            }
            Ok(moved) => {
                self.quiet = 0;
                let placed = moved.bytes.min(direct);
                if let Some(body) = &mut self.inbound.body {
                    body.done += u32::try_from(placed).unwrap_or(0);
                    let body = *body;
                    if body.done == body.len {
                        self.body_arrived(&body, cq);
                    }
                }
                let staged = (moved.bytes - placed).min(staging.len());
                self.parse(&staging[..staged], keys, cq);
                moved.more && self.state != State::Dead
            }
        }
    }

    fn parse(&mut self, mut bytes: &[u8], keys: &KeyTable, cq: &mut CompletionQueue) {
        while !bytes.is_empty() && self.state == State::Ready {
            if let Some(body) = self.inbound.body {
                let take = bytes.len().min((body.len - body.done) as usize);
                let (now, rest) = bytes.split_at(take);
                bytes = rest;
                let take = u32::try_from(take).unwrap_or(0);
                let mut sink = [NO_PIECE; MAX_SGE];
                let Some(parts) = self.sink_pieces(keys, &body, take, &mut sink) else {
                    self.sink_died(&body, cq);
                    return;
                };
                let mut from = now;
                for part in &sink[..parts] {
                    let (head, tail) = from.split_at(part.iov_len.min(from.len()));
                    // SAFETY: the part is writable for its length (`sink_pieces` found it in a live
                    // region, `keys` is still borrowed), `head` is no longer than it and is staging
                    // memory, which no region contains.
                    unsafe { copy_apart(head.as_ptr(), part.iov_base.cast(), head.len()) };
                    from = tail;
                }
                let body = Body { done: body.done + take, ..body };
                self.inbound.body = Some(body);
                if body.done == body.len {
                    self.body_arrived(&body, cq);
                }
                continue;
            }
            let have = self.inbound.header_len;
            let header = if have == 0
                && let Some((header, rest)) = bytes.split_first_chunk::<HEADER>()
            {
                bytes = rest;
                Header::decode(header)
            } else {
                let take = bytes.len().min(HEADER - have);
                let (now, rest) = bytes.split_at(take);
                bytes = rest;
                self.inbound.header[have..have + take].copy_from_slice(now);
                self.inbound.header_len += take;
                if self.inbound.header_len < HEADER {
                    return;
                }
                self.inbound.header_len = 0;
                Header::decode(&self.inbound.header)
            };
            if let Err(reason) = header.and_then(|header| self.header_arrived(&header, keys, cq)) {
                self.lost(cq, reason);
            }
        }
        if matches!(self.state, State::Prepared { .. }) && !bytes.is_empty() {
            self.lost(cq, "the peer spoke before it was accepted");
        }
    }

    fn header_arrived(
        &mut self,
        header: &Header,
        keys: &KeyTable,
        cq: &mut CompletionQueue,
    ) -> Result<(), &'static str> {
        let news = header.executed.wrapping_sub(low32(self.acknowledged));
        if news as usize > self.send_sent - self.acknowledged {
            return Err("acknowledges what was never sent");
        }
        if news > 0 {
            self.acknowledged += news as usize;
            self.advance(cq);
            if self.state != State::Ready {
                return Ok(());
            }
        }
        match header.kind {
            Kind::Ack => Ok(()),
            Kind::Probe => {
                self.outbound.ack_due = Some(0);
                self.outbound.ack_now = true;
                Ok(())
            }
            Kind::Nak => self.nak_arrived(header, cq),
            Kind::ReadResponse => self.response_arrived(header),
            Kind::Send | Kind::Write | Kind::WriteWithImm | Kind::ReadRequest => {
                if header.seq != low32(self.outbound.executed) {
                    return Err("request out of sequence");
                }
                self.request_arrived(header, keys)
            }
        }
    }

    fn nak_arrived(
        &mut self,
        header: &Header,
        cq: &mut CompletionQueue,
    ) -> Result<(), &'static str> {
        let refusal = Refusal::of(header.imm).ok_or("unknown refusal")?;
        // A request may be refused while its payload is still being sent.
        if header.seq != low32(self.send_done) || self.send_done >= self.send_built {
            return Err("refuses what was not asked");
        }
        self.break_down(cq, Some((self.send_done, refusal.status())), None, State::Dead);
        Ok(())
    }

    fn response_arrived(&mut self, header: &Header) -> Result<(), &'static str> {
        let position = *self.reads_pending.front().ok_or("answers no READ")?;
        let wanted = self.slot(position).map_or(0, |s| s.wr.sges.total_bytes());
        if header.seq != low32(position) || u64::from(header.len) != wanted {
            return Err("answers another READ");
        }
        self.begin_body(Sink::Read { position }, header);
        Ok(())
    }

    fn begin_body(&mut self, sink: Sink, header: &Header) {
        self.inbound.large = header.len >= LARGE;
        self.inbound.body =
            Some(Body { sink, len: header.len, done: 0, ack_wanted: header.ack_wanted });
    }

    fn request_arrived(&mut self, header: &Header, keys: &KeyTable) -> Result<(), &'static str> {
        let seq = self.outbound.executed;
        let key = Rkey(header.key);
        let sink = match header.kind {
            Kind::ReadRequest => return self.read_arrived(header, keys),
            Kind::Send => {
                let Some(recv) = self.waiting_recv() else {
                    self.refuse(seq, Refusal::NotReady, None);
                    return Ok(());
                };
                let mut sge = recv.sge;
                if sge.len < header.len {
                    self.refuse(seq, Refusal::Invalid, Some(WcStatus::LocalLength));
                    return Ok(());
                }
                sge.len = header.len;
                if keys.local(sge, true).is_none() {
                    self.refuse(seq, Refusal::Operation, Some(WcStatus::LocalProtection));
                    return Ok(());
                }
                Sink::Recv
            }
            Kind::WriteWithImm => Sink::WriteWithImm { key, addr: header.addr, imm: header.imm },
            _ => Sink::Write { key, addr: header.addr },
        };
        if !matches!(sink, Sink::Recv)
            && keys.remote(key, header.addr, header.len, Right::Write).is_none()
        {
            self.refuse(seq, Refusal::Access, None);
            return Ok(());
        }
        if matches!(sink, Sink::WriteWithImm { .. }) && self.waiting_recv().is_none() {
            self.refuse(seq, Refusal::NotReady, None);
            return Ok(());
        }
        self.begin_body(sink, header);
        Ok(())
    }

    fn read_arrived(&mut self, header: &Header, keys: &KeyTable) -> Result<(), &'static str> {
        let seq = self.outbound.executed;
        let inbound = &mut self.inbound;
        let received = header.imm.wrapping_sub(inbound.reads_received_by_peer);
        if received > self.outbound.responses_sent.wrapping_sub(inbound.reads_received_by_peer) {
            return Err("counts READ responses that were never sent");
        }
        inbound.reads_received_by_peer = header.imm;
        inbound.reads_requested = inbound.reads_requested.wrapping_add(1);
        if inbound.reads_requested.wrapping_sub(header.imm) > self.serves {
            self.refuse(seq, Refusal::Invalid, None);
            return Ok(());
        }
        let key = Rkey(header.key);
        if keys.remote(key, header.addr, header.len, Right::Read).is_none() {
            self.refuse(seq, Refusal::Access, None);
            return Ok(());
        }
        self.outbound.responses.push_back(Response {
            seq,
            key,
            addr: header.addr,
            len: header.len,
        });
        self.outbound.executed += 1;
        Ok(())
    }

    /// Pieces of the next `limit` bytes of the body's place; `None` when the memory is gone.
    fn sink_pieces(
        &self,
        keys: &KeyTable,
        body: &Body,
        limit: u32,
        out: &mut [libc::iovec; MAX_SGE],
    ) -> Option<usize> {
        match body.sink {
            Sink::Recv => {
                let sge = self.waiting_recv()?.sge;
                local_pieces(keys, &SgeList::one(sge), body.done, limit, true, out)
            }
            Sink::Read { position } => {
                let sges = self.slot(position)?.wr.sges;
                local_pieces(keys, &sges, body.done, limit, true, out)
            }
            Sink::Write { key, addr } | Sink::WriteWithImm { key, addr, .. } => {
                let at = keys.remote(key, addr + u64::from(body.done), limit, Right::Write)?;
                out[0] = libc::iovec { iov_base: at.as_ptr().cast(), iov_len: limit as usize };
                Some(1)
            }
        }
    }

    fn body_arrived(&mut self, body: &Body, cq: &mut CompletionQueue) {
        self.inbound.body = None;
        match body.sink {
            Sink::Read { position } => {
                self.reads_pending.pop_front();
                self.reads_answered = self.reads_answered.wrapping_add(1);
                self.read_finished(position);
                self.advance(cq);
                return;
            }
            Sink::Recv => self.complete_recv(cq, WcStatus::Success, body.len, None),
            Sink::Write { .. } => {}
            Sink::WriteWithImm { imm, .. } => {
                self.complete_recv(cq, WcStatus::Success, body.len, Some(imm));
            }
        }
        self.outbound.executed += 1;
        if body.ack_wanted {
            self.outbound.ack_due.get_or_insert(0);
        }
    }

    /// The memory of a half-received message was deregistered.
    fn sink_died(&mut self, body: &Body, cq: &mut CompletionQueue) {
        let seq = self.outbound.executed;
        match body.sink {
            Sink::Read { position } => {
                self.break_down(cq, Some((position, WcStatus::LocalProtection)), None, State::Dead);
            }
            Sink::Recv => self.refuse(seq, Refusal::Operation, Some(WcStatus::LocalProtection)),
            Sink::Write { .. } | Sink::WriteWithImm { .. } => {
                self.refuse(seq, Refusal::Access, None);
            }
        }
    }
}
