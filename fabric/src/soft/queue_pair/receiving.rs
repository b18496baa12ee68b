//! The receiving side of a queue pair: collects headers, and puts payload straight into its place.
//!
//! One call first fills the rest of the current payload, in place, and then a staging buffer with
//! the bytes behind it. So one call serves many small messages, each with a short copy. Where large
//! messages come, only a small part of the staging buffer is offered: enough for the headers
//! between them, so that their payload is not copied. The responses to several short READs are
//! foreseen ([`Foreseen`]), and not copied either.

use std::io;
use std::ops::ControlFlow;

use rblk_protocol::width::{narrow, wide};

use super::foreseen::{self, Foreseen};
use super::{QpState, QueuePair};
use crate::region::copy_apart;
use crate::soft::keys::{KeyTable, Right};
use crate::soft::queue_pair::completions::SoftCq;
use crate::soft::queue_pair::outbound::PeerRead;
use crate::soft::wire::frame::{FrameHeader, FrameKind, HEADER, NakReason, low32};
use crate::soft::wire::inbound::{Body, Sink};
use crate::soft::wire::pieces::{NO_PIECE, local_pieces};
use crate::soft::wire::tcp_link::Moved;
use crate::work::{MAX_SGE, Rkey, Sge, SgeList, WcStatus};

/// Offered of the staging buffer behind a large payload, and where the next large payload is
/// expected: room for some headers and small messages, and for little of a large payload.
const SMALL_STAGING: usize = 512;

impl QueuePair {
    /// One receive call of at most about `share` bytes, which it takes off, and all that follows
    /// from it. Returns whether another call may find more.
    pub(in crate::soft) fn receive(
        &mut self,
        keys: &KeyTable,
        cq: &mut SoftCq,
        staging: &mut [u8],
        share: &mut usize,
    ) -> bool {
        if self.state == QpState::Dead {
            return false;
        }
        if self.foresees(keys) {
            return self.receive_foreseen(keys, cq, staging, share);
        }
        let mut pieces = [NO_PIECE; MAX_SGE + 1];
        let Some((count, direct)) = self.body_pieces(keys, cq, &mut pieces, *share) else {
            return self.state != QpState::Dead;
        };
        let room = if self.inbound.expects_large() { SMALL_STAGING } else { staging.len() };
        let staging = &mut staging[..room.min(share.saturating_sub(direct))];
        pieces[count] =
            libc::iovec { iov_base: staging.as_mut_ptr().cast(), iov_len: staging.len() };
        // SAFETY: the pieces are ranges that `keys` just found inside live regions with the right
        // to write, which stay alive while it is borrowed, and the staging buffer, borrowed
        // exclusively.
        let got = unsafe { self.link.receive(&pieces[..=count]) };
        let moved = match self.moved(got, cq) {
            ControlFlow::Continue(moved) => moved,
            ControlFlow::Break(more) => return more,
        };
        *share = share.saturating_sub(moved.bytes);
        let staged = self.body_moved(moved, direct, cq).min(staging.len());
        self.parse(&staging[..staged], keys, cq);
        moved.more && self.state != QpState::Dead
    }

    /// The first pieces of a receive call: the places of the rest of the payload that has begun,
    /// at most `share` bytes. Returns how many pieces and bytes they are. `None`: their memory was
    /// deregistered.
    #[inline(always)]
    fn body_pieces(
        &mut self,
        keys: &KeyTable,
        cq: &mut SoftCq,
        pieces: &mut [libc::iovec],
        share: usize,
    ) -> Option<(usize, usize)> {
        let Some(body) = self.inbound.body() else { return Some((0, 0)) };
        let mut sink = [NO_PIECE; MAX_SGE];
        let left = body.left().min(u32::try_from(share).unwrap_or(u32::MAX));
        let Some(parts) = self.sink_pieces(keys, &body, left, &mut sink) else {
            self.sink_died(&body, cq);
            return None;
        };
        pieces[..parts].copy_from_slice(&sink[..parts]);
        Some((parts, wide(left)))
    }

    /// A receive call moved bytes, of which up to the first `direct` ones are payload at its place.
    /// Returns how many bytes follow them.
    #[inline(always)]
    fn body_moved(&mut self, moved: Moved, direct: usize, cq: &mut SoftCq) -> usize {
        let placed = moved.bytes.min(direct);
        if let Some(body) = self.inbound.progress(placed) {
            self.body_arrived(&body, cq);
        }
        moved.bytes - placed
    }

    /// The bytes that a receive call moved; if it moved none, whether another call may find more.
    #[inline]
    fn moved(&mut self, got: io::Result<Moved>, cq: &mut SoftCq) -> ControlFlow<bool, Moved> {
        match got {
            Ok(moved) if moved.bytes > 0 => return ControlFlow::Continue(moved),
            Ok(_) => self.parted(cq),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                return ControlFlow::Break(true);
            }
            Err(error) => self.link_failed(&error, cq),
        }
        ControlFlow::Break(false)
    }

    /// Whether the next bytes are likely to be responses to several short READs.
    #[inline]
    fn foresees(&self, keys: &KeyTable) -> bool {
        self.reads_out.count() >= foreseen::LEAST
            && self.state == QpState::Ready
            && self.inbound.is_between_headers()
            && self.link.scatters()
            && self.may_foresee_oldest(keys)
    }

    fn may_foresee_oldest(&self, keys: &KeyTable) -> bool {
        let oldest = self.reads_out.oldest().and_then(|position| self.sends.get(position));
        oldest.is_some_and(|wr| foreseen::is_foreseeable(&wr.sges, keys))
    }

    /// As [`Self::receive`], where the next bytes are likely to be READ responses: short ones go
    /// straight to their places.
    #[inline(never)]
    fn receive_foreseen(
        &mut self,
        keys: &KeyTable,
        cq: &mut SoftCq,
        staging: &mut [u8],
        share: &mut usize,
    ) -> bool {
        let mut pieces = [NO_PIECE; foreseen::PIECES];
        let is_read = |body: Body| matches!(body.sink, Sink::Read { .. });
        let reads_behind = usize::from(self.inbound.body().is_some_and(is_read));
        let Some((count, direct)) = self.body_pieces(keys, cq, &mut pieces, *share) else {
            return self.state != QpState::Dead;
        };
        let room = staging.len().min(share.saturating_sub(direct));
        let mut foreseen = Foreseen::new();
        let reads = (&self.reads_out, &self.sends);
        let count = foreseen.add(reads, keys, (reads_behind, room), &mut pieces, count);
        let few = self.inbound.expects_large() && foreseen.count() == 0;
        let rest = if few { SMALL_STAGING.min(room) } else { room - foreseen.bytes() };
        pieces[count] = libc::iovec {
            // SAFETY: `bytes <= room`, which is within the buffer.
            iov_base: unsafe { staging.as_mut_ptr().add(foreseen.bytes()) }.cast(),
            iov_len: rest,
        };
        // SAFETY: the pieces are ranges that `keys` just found inside live regions with the right
        // to write, which stay alive while it is borrowed, the headers of `foreseen`, and the
        // staging buffer, borrowed exclusively.
        let got = unsafe { self.link.receive(&pieces[..=count]) };
        let moved = match self.moved(got, cq) {
            ControlFlow::Continue(moved) => moved,
            ControlFlow::Break(more) => return more,
        };
        *share = share.saturating_sub(moved.bytes);
        let left = self.body_moved(moved, direct, cq);
        self.foreseen_arrived(&foreseen, (&pieces[..count], staging), left, keys, cq);
        moved.more && self.state != QpState::Dead
    }

    /// Takes the bytes of a call that foresaw READ responses: `left` in all, first in `pieces` and
    /// then in the staging buffer.
    fn foreseen_arrived(
        &mut self,
        foreseen: &Foreseen,
        (pieces, staging): (&[libc::iovec], &mut [u8]),
        mut left: usize,
        keys: &KeyTable,
        cq: &mut SoftCq,
    ) {
        for at in 0..foreseen.count() {
            if self.state != QpState::Ready {
                return;
            }
            if left < HEADER {
                self.parse(&foreseen.header_bytes(at)[..left], keys, cq);
                return;
            }
            let Some((header, len)) = foreseen.header(at) else {
                // SAFETY: the pieces are those of `foreseen`, and `keys` is still borrowed. The
                // staging buffer is memory of the poller.
                let begin = unsafe { foreseen.take_back(at, pieces, staging) };
                self.parse(&staging[begin..begin + left], keys, cq);
                return;
            };
            if let Err(reason) = self.header_arrived(&header, keys, cq) {
                self.lost(reason, cq);
            }
            let now = len.min(left - HEADER);
            left -= HEADER + now;
            if let Some(body) = self.inbound.progress(now) {
                self.body_arrived(&body, cq);
            }
        }
        let rest = &staging[foreseen.bytes()..];
        self.parse(&rest[..left.min(rest.len())], keys, cq);
    }

    #[inline]
    fn parse(&mut self, mut bytes: &[u8], keys: &KeyTable, cq: &mut SoftCq) {
        while !bytes.is_empty() && self.state == QpState::Ready {
            if let Some(body) = self.inbound.body() {
                let take = bytes.len().min(wide(body.left()));
                let (now, rest) = bytes.split_at(take);
                bytes = rest;
                if !self.place(&body, now, keys) {
                    self.sink_died(&body, cq);
                    return;
                }
                if let Some(body) = self.inbound.progress(take) {
                    self.body_arrived(&body, cq);
                }
                continue;
            }
            let Some(header) = self.inbound.header(&mut bytes) else { return };
            if let Err(reason) = header.and_then(|header| self.header_arrived(&header, keys, cq)) {
                self.lost(reason, cq);
            }
        }
        if matches!(self.state, QpState::Prepared { .. }) && !bytes.is_empty() {
            self.lost("the peer spoke before it was accepted", cq);
        }
    }

    /// Copies the next bytes of a payload to their place. False when its memory was deregistered.
    #[inline]
    fn place(&mut self, body: &Body, bytes: &[u8], keys: &KeyTable) -> bool {
        let mut sink = [NO_PIECE; MAX_SGE];
        let Some(parts) = self.sink_pieces(keys, body, narrow(bytes.len()), &mut sink) else {
            return false;
        };
        let mut from = bytes;
        for part in &sink[..parts] {
            let (head, tail) = from.split_at(part.iov_len.min(from.len()));
            // SAFETY: the part is writable for its length (`sink_pieces` found it in a live region,
            // `keys` is still borrowed), `head` is no longer than it and is staging memory, which
            // no region contains.
            unsafe { copy_apart(head.as_ptr(), part.iov_base.cast(), head.len()) };
            from = tail;
        }
        true
    }

    #[inline]
    fn header_arrived(
        &mut self,
        header: &FrameHeader,
        keys: &KeyTable,
        cq: &mut SoftCq,
    ) -> Result<(), &'static str> {
        if self.sends.acknowledge(header.executed)? {
            self.advance(cq);
            if self.state != QpState::Ready {
                return Ok(());
            }
        }
        match header.kind {
            FrameKind::Ack => Ok(()),
            FrameKind::Probe => {
                self.outbound.acks().want_now();
                Ok(())
            }
            FrameKind::Nak => self.nak_arrived(header, cq),
            FrameKind::ReadResponse => self.response_arrived(header),
            FrameKind::Send
            | FrameKind::Write
            | FrameKind::WriteWithImm
            | FrameKind::ReadRequest => {
                if header.seq != low32(self.outbound.acks().executed()) {
                    return Err("request out of sequence");
                }
                self.request_arrived(header, keys)
            }
        }
    }

    fn nak_arrived(&mut self, header: &FrameHeader, cq: &mut SoftCq) -> Result<(), &'static str> {
        let refusal = NakReason::of(header.imm).ok_or("unknown refusal")?;
        if !self.sends.may_be_refused(header.seq) {
            return Err("refuses a request that was never sent");
        }
        let refused = (self.sends.oldest(), refusal.status());
        self.break_down(Some(refused), None, QpState::Dead, cq);
        Ok(())
    }

    fn response_arrived(&mut self, header: &FrameHeader) -> Result<(), &'static str> {
        let position = self.reads_out.oldest().ok_or("answers no READ")?;
        let wanted = self.sends.get(position).map_or(0, |wr| wr.sges.total_bytes());
        if header.seq != low32(position) || u64::from(header.len) != wanted {
            return Err("answers another READ");
        }
        self.inbound.begin(Sink::Read { position }, header);
        Ok(())
    }

    fn request_arrived(
        &mut self,
        header: &FrameHeader,
        keys: &KeyTable,
    ) -> Result<(), &'static str> {
        let seq = self.outbound.acks().executed();
        let key = Rkey(header.key);
        let sink = match header.kind {
            FrameKind::ReadRequest => return self.read_arrived(header, keys),
            FrameKind::Send => {
                let Some(recv) = self.recvs.waiting() else {
                    self.refuse(seq, NakReason::NotReady, None);
                    return Ok(());
                };
                if recv.sges.total_bytes() < u64::from(header.len) {
                    self.refuse(seq, NakReason::Invalid, Some(WcStatus::LocalLength));
                    return Ok(());
                }
                if !may_land(keys, &recv.sges, header.len) {
                    self.refuse(seq, NakReason::Operation, Some(WcStatus::LocalProtection));
                    return Ok(());
                }
                Sink::Recv
            }
            FrameKind::WriteWithImm => {
                Sink::WriteWithImm { key, addr: header.addr, imm: header.imm }
            }
            _ => Sink::Write { key, addr: header.addr },
        };
        if !matches!(sink, Sink::Recv)
            && keys.remote(key, header.addr, header.len, Right::Write).is_none()
        {
            self.refuse(seq, NakReason::Access, None);
            return Ok(());
        }
        if matches!(sink, Sink::WriteWithImm { .. }) && self.recvs.waiting().is_none() {
            self.refuse(seq, NakReason::NotReady, None);
            return Ok(());
        }
        self.inbound.begin(sink, header);
        Ok(())
    }

    fn read_arrived(&mut self, header: &FrameHeader, keys: &KeyTable) -> Result<(), &'static str> {
        let seq = self.outbound.acks().executed();
        if !self.reads_in.request(header.imm)? {
            self.refuse(seq, NakReason::Invalid, None);
            return Ok(());
        }
        let key = Rkey(header.key);
        if keys.remote(key, header.addr, header.len, Right::Read).is_none() {
            self.refuse(seq, NakReason::Access, None);
            return Ok(());
        }
        self.outbound.respond(PeerRead { seq, key, addr: header.addr, len: header.len });
        self.outbound.acks().execute();
        Ok(())
    }

    /// Pieces of the next `limit` bytes of a payload's place. `None` when its memory was
    /// deregistered.
    fn sink_pieces(
        &self,
        keys: &KeyTable,
        body: &Body,
        limit: u32,
        out: &mut [libc::iovec; MAX_SGE],
    ) -> Option<usize> {
        match body.sink {
            Sink::Recv => {
                let sges = &self.recvs.waiting()?.sges;
                local_pieces(keys, sges, body.done, limit, true, out)
            }
            Sink::Read { position } => {
                let sges = &self.sends.get(position)?.sges;
                local_pieces(keys, sges, body.done, limit, true, out)
            }
            Sink::Write { key, addr } | Sink::WriteWithImm { key, addr, .. } => {
                let at = keys.remote(key, addr + u64::from(body.done), limit, Right::Write)?;
                out[0] = libc::iovec { iov_base: at.as_ptr().cast(), iov_len: wide(limit) };
                Some(1)
            }
        }
    }

    /// All bytes of a payload are in their place.
    fn body_arrived(&mut self, body: &Body, cq: &mut SoftCq) {
        match body.sink {
            Sink::Read { position } => {
                self.reads_out.finished();
                self.sends.read_finished(position);
                self.advance(cq);
                return;
            }
            Sink::Recv => self.complete_recv(WcStatus::Success, body.len, None, cq),
            Sink::Write { .. } => {}
            Sink::WriteWithImm { imm, .. } => {
                self.complete_recv(WcStatus::Success, body.len, Some(imm), cq);
            }
        }
        self.outbound.acks().execute();
        if body.ack_wanted {
            self.outbound.acks().want();
        }
    }

    /// The memory of a message was deregistered while the message arrived.
    fn sink_died(&mut self, body: &Body, cq: &mut SoftCq) {
        let seq = self.outbound.acks().executed();
        match body.sink {
            Sink::Read { position } => {
                let status = WcStatus::LocalProtection;
                self.break_down(Some((position, status)), None, QpState::Dead, cq);
            }
            Sink::Recv => self.refuse(seq, NakReason::Operation, Some(WcStatus::LocalProtection)),
            Sink::Write { .. } | Sink::WriteWithImm { .. } => {
                self.refuse(seq, NakReason::Access, None);
            }
        }
    }
}

/// Whether a message of `bytes` bytes may be written to the entries of its RECV. Entries that it
/// does not reach are not looked at.
fn may_land(keys: &KeyTable, sges: &SgeList, bytes: u32) -> bool {
    let mut left = bytes;
    for sge in sges.as_slice() {
        let len = sge.len.min(left);
        if len > 0 && keys.local(Sge { len, ..*sge }, true).is_none() {
            return false;
        }
        left -= len;
    }
    true
}
