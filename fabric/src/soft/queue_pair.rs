//! A queue pair: its queues, its states, and how it dies.
//!
//! Positions in the queues only grow (`usize`); a ring index is a position under a mask. The
//! position of a send WR is its sequence number on the wire.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::completions::{CompletionQueue, Returns};
use super::domain::{KeyCopy, ProtectionDomain};
use super::frame::Refusal;
use super::handshake::{self, Verdict};
use super::link::Link;
use super::receive::Inbound;
use super::transmit::Outbound;
use crate::device::{AcceptParams, ConnectionHello, PollerCounters, QpLimits};
use crate::error::{FabricError, PostError, Result};
use crate::work::{Completion, QpIndex, RecvWr, SendOp, SendWr, WcOpcode, WcStatus, WrId};

/// Bytes thrown away at the drop of a QP that refused something, so that closing the socket does
/// not overtake the refusal (TCP resets when unread bytes are left).
const DRAIN_AT_DROP: usize = 1 << 20;

/// Where a QP is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Made by [`super::Incoming::prepare`]; the peer waits for the answer.
    Prepared { peer_reads_in: u8, peer_reads_out: u8 },
    /// Moving messages.
    Ready,
    /// The peer's request was refused: what it asked before is answered, then comes the NAK, then
    /// the error state. Nothing of the peer gets in any more.
    Refusing { seq: usize, refusal: Refusal, recv: Option<WcStatus> },
    /// Error state after a NAK: the link is read to its end so that the NAK arrives.
    Draining,
    /// Error state, link closed.
    Dead,
}

/// What wakes epoll of a QP's link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Interest {
    /// Nothing: it has no descriptor, is dead, or is watched by whoever sleeps.
    None,
    /// Data.
    Readable,
    /// Data, and room to send.
    Both,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SendSlot {
    pub(super) wr: SendWr,
    pub(super) read_done: bool,
}

/// A QP in software, on its way between control and a data thread or on a [`super::Poller`].
#[derive(Debug)]
pub struct Connection(pub(super) Box<QueuePair>);

#[derive(Debug)]
pub(super) struct QueuePair {
    pub(super) link: Box<dyn Link>,
    pub(super) state: State,
    pub(super) index: QpIndex,
    pub(super) limits: QpLimits,
    /// The poller it was made for.
    pub(super) poller: u64,
    /// What a peer that waits for the answer is told when this is dropped.
    pub(super) refusal: ConnectionHello,
    /// Send queue: slots from `send_free` are in use, from `send_done` incomplete, from `send_sent`
    /// not wholly on the link, from `send_built` not framed; `send_head` is the next to be posted.
    sends: Box<[Option<SendSlot>]>,
    pub(super) send_free: usize,
    pub(super) send_done: usize,
    pub(super) send_sent: usize,
    pub(super) send_built: usize,
    pub(super) send_head: usize,
    /// Requests that the peer says it executed.
    pub(super) acknowledged: usize,
    /// A WR that cannot be sent; it completes so once all before it have completed.
    pub(super) poison: Option<(usize, WcStatus)>,
    unreaped_sends: usize,
    /// READs on the wire without their response.
    pub(super) reads_pending: VecDeque<usize>,
    pub(super) reads_answered: u32,
    /// Receive queue: from `recv_free` in use, from `recv_next` waiting for messages.
    recvs: Box<[Option<RecvWr>]>,
    recv_free: usize,
    recv_next: usize,
    recv_head: usize,
    /// READs of the peer we serve at once, as negotiated.
    pub(super) serves: u32,
    pub(super) outbound: Outbound,
    pub(super) inbound: Inbound,
    /// What the poller's epoll has of it.
    pub(super) interest: Cell<Interest>,
    /// How often it was asked since it had something.
    pub(super) quiet: u8,
    /// In the poller's list of those whose peer may wait for an acknowledgement.
    pub(super) is_owing: bool,
    /// Calls into the link that the poller has not counted.
    pub(super) calls: u64,
    /// The poller's keys, where the device goes on with what it is amid when the QP ends.
    pub(super) late_keys: Option<Arc<KeyCopy>>,
}

impl QueuePair {
    pub(super) fn new(
        link: Box<dyn Link>,
        state: State,
        limits: QpLimits,
        poller: u64,
        serves: u8,
    ) -> Box<Self> {
        let sends = vec![None; (limits.send_wrs.max(1) as usize).next_power_of_two()];
        let recvs = vec![None; (limits.recv_wrs.max(1) as usize).next_power_of_two()];
        Box::new(Self {
            link,
            state,
            index: QpIndex(0),
            limits,
            poller,
            refusal: ConnectionHello::default(),
            sends: sends.into_boxed_slice(),
            send_free: 0,
            send_done: 0,
            send_sent: 0,
            send_built: 0,
            send_head: 0,
            acknowledged: 0,
            poison: None,
            unreaped_sends: 0,
            reads_pending: VecDeque::with_capacity(limits.send_wrs as usize),
            reads_answered: 0,
            recvs: recvs.into_boxed_slice(),
            recv_free: 0,
            recv_next: 0,
            recv_head: 0,
            serves: u32::from(serves),
            outbound: Outbound::new(limits.reads_in),
            inbound: Inbound::default(),
            interest: Cell::new(Interest::None),
            quiet: 0,
            is_owing: false,
            calls: 0,
            late_keys: None,
        })
    }

    /// In the error state: whatever is posted flushes.
    pub(super) fn is_broken(&self) -> bool {
        matches!(self.state, State::Draining | State::Dead)
    }

    pub(super) fn slot(&self, position: usize) -> Option<&SendSlot> {
        self.sends.get(position & (self.sends.len() - 1))?.as_ref()
    }

    /// The RECV that the next message takes.
    pub(super) fn waiting_recv(&self) -> Option<&RecvWr> {
        if self.recv_next == self.recv_head {
            return None;
        }
        self.recvs.get(self.recv_next & (self.recvs.len() - 1))?.as_ref()
    }

    /// Takes WRs for the send queue; how many, and why not the next.
    pub(super) fn take_sends(
        &mut self,
        wrs: &[SendWr],
        counters: &mut PollerCounters,
    ) -> std::result::Result<(), PostError> {
        let mut taken = Ok(());
        for (posted, wr) in wrs.iter().enumerate() {
            let error = if matches!(self.state, State::Prepared { .. })
                || wr.sges.as_slice().len() > self.limits.send_sges as usize
            {
                libc::EINVAL
            } else if self.send_head - self.send_free >= self.limits.send_wrs as usize {
                libc::ENOMEM
            } else {
                let at = self.send_head & (self.sends.len() - 1);
                self.sends[at] = Some(SendSlot { wr: *wr, read_done: false });
                self.send_head += 1;
                match wr.op {
                    SendOp::Send => counters.sends += 1,
                    SendOp::Write(_) => counters.writes += 1,
                    SendOp::WriteWithImm(..) => counters.writes_with_imm += 1,
                    SendOp::Read(_) => counters.reads += 1,
                }
                counters.signaled += u64::from(wr.signaled);
                continue;
            };
            taken = Err(PostError { posted, source: io::Error::from_raw_os_error(error) });
            break;
        }
        counters.send_doorbells += u64::from(!matches!(taken, Err(PostError { posted: 0, .. })));
        taken
    }

    /// Takes RECVs.
    pub(super) fn take_recvs(
        &mut self,
        wrs: &[RecvWr],
        counters: &mut PollerCounters,
    ) -> std::result::Result<(), PostError> {
        let room = self.limits.recv_wrs as usize - (self.recv_head - self.recv_free);
        let taken = room.min(wrs.len());
        for wr in &wrs[..taken] {
            let at = self.recv_head & (self.recvs.len() - 1);
            self.recvs[at] = Some(*wr);
            self.recv_head += 1;
        }
        counters.recvs += taken as u64;
        counters.recv_doorbells += u64::from(taken > 0);
        if taken == wrs.len() {
            return Ok(());
        }
        Err(PostError { posted: taken, source: io::Error::from_raw_os_error(libc::ENOMEM) })
    }

    /// The caller has seen a completion: its slots are free.
    pub(super) fn reaped(&mut self, returns: Returns) {
        match returns {
            Returns::Sends(before) => {
                self.send_free = before;
                self.unreaped_sends -= 1;
            }
            Returns::Recv => self.recv_free += 1,
        }
    }

    fn complete_send(&mut self, cq: &mut CompletionQueue, status: WcStatus) {
        let Some(wr) = self.slot(self.send_done).map(|s| s.wr) else { return };
        self.send_done += 1;
        if status == WcStatus::Success && !wr.signaled {
            return;
        }
        let (opcode, bytes) = match wr.op {
            SendOp::Send => (WcOpcode::Send, 0),
            SendOp::Write(_) | SendOp::WriteWithImm(..) => (WcOpcode::Write, 0),
            SendOp::Read(_) => (WcOpcode::Read, wr.sges.total_bytes()),
        };
        self.unreaped_sends += 1;
        cq.push(
            Completion {
                qp: self.index,
                id: WrId(wr.id.0 & WrId::MASK),
                status,
                opcode,
                byte_len: u32::try_from(bytes).unwrap_or(0),
                imm: 0,
            },
            Returns::Sends(self.send_done),
        );
    }

    /// Completes the first waiting RECV.
    pub(super) fn complete_recv(
        &mut self,
        cq: &mut CompletionQueue,
        status: WcStatus,
        byte_len: u32,
        imm: Option<u32>,
    ) {
        let Some(wr) = self.waiting_recv() else { return };
        let completion = Completion {
            qp: self.index,
            id: WrId(wr.id.0 & WrId::MASK),
            status,
            opcode: if imm.is_some() { WcOpcode::RecvWithImm } else { WcOpcode::Recv },
            byte_len,
            imm: imm.unwrap_or(0),
        };
        self.recv_next += 1;
        cq.push(completion, Returns::Recv);
    }

    /// Completes what is done, in posting order; and a poisoned WR once it is the oldest.
    pub(super) fn advance(&mut self, cq: &mut CompletionQueue) {
        if self.is_broken() {
            return;
        }
        while self.send_done < self.send_sent {
            let Some(slot) = self.slot(self.send_done) else { return };
            let done = match slot.wr.op {
                SendOp::Read(_) => slot.read_done,
                _ => self.send_done < self.acknowledged,
            };
            if !done {
                return;
            }
            self.complete_send(cq, WcStatus::Success);
        }
        if let Some((position, status)) = self.poison
            && position == self.send_done
        {
            self.break_down(cq, Some((position, status)), None, State::Dead);
        }
    }

    pub(super) fn read_finished(&mut self, position: usize) {
        let at = position & (self.sends.len() - 1);
        if let Some(slot) = self.sends.get_mut(at).and_then(Option::as_mut) {
            slot.read_done = true;
        }
    }

    /// Enters the error state: everything outstanding completes, and the link ends.
    pub(super) fn break_down(
        &mut self,
        cq: &mut CompletionQueue,
        send: Option<(usize, WcStatus)>,
        recv: Option<WcStatus>,
        into: State,
    ) {
        if self.is_broken() {
            return;
        }
        self.leave_behind();
        self.state = into;
        if into == State::Draining {
            self.link.finish();
        } else {
            self.link.close();
        }
        self.outbound.clear();
        self.inbound.clear();
        self.reads_pending.clear();
        while self.send_done < self.send_head {
            let status =
                send.filter(|(at, _)| *at == self.send_done).map_or(WcStatus::Flushed, |s| s.1);
            self.complete_send(cq, status);
        }
        if self.unreaped_sends == 0 {
            // Nothing is left that would return the slots of unsignaled WRs.
            self.send_free = self.send_done;
        }
        if let Some(status) = recv {
            self.complete_recv(cq, status, 0, None);
        }
        self.flush_posted(cq);
    }

    /// Completes everything outstanding of a QP in the error state.
    pub(super) fn flush_posted(&mut self, cq: &mut CompletionQueue) {
        while self.send_done < self.send_head {
            self.complete_send(cq, WcStatus::Flushed);
        }
        while self.waiting_recv().is_some() {
            self.complete_recv(cq, WcStatus::Flushed, 0, None);
        }
    }

    /// The link ended or carried nonsense.
    pub(super) fn lost(&mut self, cq: &mut CompletionQueue, reason: &str) {
        self.end(cq, reason, WcStatus::RetryExceeded);
    }

    /// The peer closed the link. Verbs hear of that by rdma_cm, and flush what is outstanding:
    /// nothing failed.
    pub(super) fn parted(&mut self, cq: &mut CompletionQueue) {
        self.end(cq, "the peer closed the connection", WcStatus::Flushed);
    }

    fn end(&mut self, cq: &mut CompletionQueue, reason: &str, first: WcStatus) {
        match self.state {
            State::Draining => {
                self.state = State::Dead;
                self.link.close();
            }
            State::Dead => {}
            State::Refusing { recv, .. } => self.break_down(cq, None, recv, State::Dead),
            State::Prepared { .. } | State::Ready => {
                tracing::debug!(qp = self.index.0, reason, "soft QP lost its link");
                self.break_down(cq, Some((self.send_done, first)), None, State::Dead);
            }
        }
    }

    /// The owner gives up the QP.
    pub(super) fn fail(&mut self, cq: &mut CompletionQueue) {
        self.break_down(cq, None, None, State::Dead);
        if self.state == State::Draining {
            self.state = State::Dead;
            self.link.close();
        }
    }

    /// Answers the peer that waits.
    pub(super) fn accept(&mut self, params: &AcceptParams, cq: &mut CompletionQueue) -> Result<()> {
        let call = |errno| FabricError::Call {
            call: "accept",
            source: io::Error::from_raw_os_error(errno),
        };
        let State::Prepared { peer_reads_in, peer_reads_out } = self.state else {
            return Err(call(if self.is_broken() { libc::ECONNRESET } else { libc::EINVAL }));
        };
        let reads_out = params.reads_out.min(peer_reads_in);
        let reads_in = params.reads_in.min(peer_reads_out).min(self.limits.reads_in);
        let reply = handshake::encode_reply(Verdict::Accepted, reads_out, reads_in, &params.hello);
        // An empty socket buffer has room for the whole reply; if not, the connection is of no use.
        if reply.is_none_or(|reply| !self.say(&reply)) {
            self.lost(cq, "the reply could not be sent");
            return Err(call(libc::EPIPE));
        }
        self.serves = u32::from(reads_in);
        self.state = State::Ready;
        Ok(())
    }

    /// Sends bytes outside frames, whole or not at all.
    fn say(&mut self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        while !rest.is_empty() {
            let piece =
                libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: the piece is a slice borrowed here.
            match unsafe { self.link.send(&[piece]) } {
                Ok(moved) => rest = &rest[moved.bytes.min(rest.len())..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    pub(super) fn check_made_for(&self, poller: u64) -> Result<()> {
        if self.poller == poller {
            Ok(())
        } else {
            Err(FabricError::Mixed("connection and poller"))
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if matches!(self.state, State::Prepared { .. })
            && let Some(reply) = handshake::encode_reply(Verdict::Rejected, 0, 0, &self.refusal)
        {
            self.say(&reply);
        }
        if self.state == State::Draining {
            let mut sink = [0u8; 16 << 10];
            let mut left = DRAIN_AT_DROP;
            while left > 0 {
                let piece = libc::iovec { iov_base: sink.as_mut_ptr().cast(), iov_len: sink.len() };
                // SAFETY: the piece is an exclusive local array.
                match unsafe { self.link.receive(&[piece]) } {
                    Ok(moved) if moved.bytes > 0 && moved.more => {
                        left = left.saturating_sub(moved.bytes);
                    }
                    _ => break,
                }
            }
        }
        self.link.close();
    }
}

/// A QP pair that is connected already.
pub(super) fn established(
    link: Box<dyn Link>,
    pd: &ProtectionDomain,
    poller: &super::PollerHandle,
    limits: QpLimits,
    reads_in: u8,
) -> Result<Connection> {
    pd.check(poller, &limits)?;
    Ok(Connection(QueuePair::new(link, State::Ready, limits, poller.id(), reads_in)))
}
