//! A queue pair: its states, how it completes WRs, and how it ends.
//!
//! The queues, the frames on their way and the link are types of their own. This file moves a QP
//! from state to state. Its children move bytes: `transmit` sends, `receive` receives.

pub(super) mod acks;
pub(super) mod completions;
mod foreseen;
pub(super) mod outbound;
pub(super) mod read_depth;
mod receiving;
pub(super) mod recv_queue;
pub(super) mod send_queue;
mod sending;
mod state;

use std::io;
use std::sync::Arc;

use nix::sys::eventfd::EventFd;
use rblk_protocol::width::wide64;

pub(super) use self::state::QpState;
use super::domain::{PollerHandle, ProtectionDomain};
use super::keys::KeyCopy;
use super::wire::frame::NakReason;
use super::wire::inbound::Inbound;
use super::wire::late::landings;
use super::wire::metered_link::MeteredLink;
use super::wire::tcp_handshake::{self, Acceptance};
use super::wire::tcp_link::PeerStream;
use super::wire::tls::{BadRecord, NoTls};
use crate::connect::cipher_keys::{CipherKey, CipherKeys};
use crate::connect::{AcceptParams, ConnectionHello, QpLimits};
use crate::error::{FabricError, PostError, Result};
use crate::work::poller_counters::PollerCounters;
use crate::work::{QpIndex, Recvs, SendWr, WcStatus};
use acks::Acks;
use completions::{Returns, SoftCq};
use outbound::Outbound;
use read_depth::{ReadsIn, ReadsOut};
use recv_queue::RecvQueue;
use send_queue::SendQueue;

/// Bytes to discard when a QP that refused a request is dropped. TCP resets a connection that is
/// closed with unread bytes, and the reset could overtake the refusal.
const DISCARD_AT_DROP: usize = 1 << 20;

/// A QP in software that moves between control and a data thread. Dropping it ends the QP.
#[derive(Debug)]
pub struct Connection {
    pair: Box<QueuePair>,
    // The poller it was made for.
    poller: u64,
}

impl Connection {
    /// A QP for a poller, which uses the poller's keys unless it has its own. The peer waits for an
    /// answer. If this value is dropped without one, the peer is told `refusal`.
    pub(super) fn prepared(
        link: Box<dyn PeerStream>,
        poller: &PollerHandle,
        limits: &QpLimits,
        keys: Option<Arc<KeyCopy>>,
        peer_reads: (u8, u8),
        refusal: ConnectionHello,
    ) -> Self {
        let (serves, wants) = peer_reads;
        let most_reads_in = wants.min(limits.reads_in);
        let state = QpState::Prepared { most_reads_out: serves, most_reads_in };
        let mut pair = QueuePair::new(link, state, limits, most_reads_in);
        (pair.refusal, pair.keys) = (refusal, keys);
        Self { pair, poller: poller.id() }
    }

    /// A QP in `pd` that is connected already, and serves `reads_in` READs of the peer at once.
    ///
    /// # Errors
    /// [`FabricError::Limit`], [`FabricError::Mixed`].
    pub(super) fn established(
        link: Box<dyn PeerStream>,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: &QpLimits,
        reads_in: u8,
    ) -> Result<Self> {
        let keys = pd.check(poller, limits)?;
        let mut pair = QueuePair::new(link, QpState::Ready, limits, reads_in);
        pair.keys = keys;
        Ok(Self { pair, poller: poller.id() })
    }

    /// Encrypts both streams behind the handshake.
    ///
    /// # Errors
    /// [`FabricError::Encrypt`]; EINVAL for a QP that ended.
    pub(crate) fn secure(&mut self, keys: CipherKeys) -> Result<()> {
        if self.pair.state.is_error() {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(FabricError::Call { call: "secure", source });
        }
        self.pair.secure(keys).map_err(|lack| self.pair.not_encrypted(lack))
    }

    /// A QP that was on the poller of that number.
    pub(super) fn detached(pair: Box<QueuePair>, poller: u64) -> Self {
        Self { pair, poller }
    }

    /// The QP, for the poller of that number.
    ///
    /// # Errors
    /// [`FabricError::Mixed`]: it was made for another poller.
    pub(super) fn into_pair(self, poller: u64) -> Result<Box<QueuePair>> {
        if self.poller == poller {
            Ok(self.pair)
        } else {
            Err(FabricError::Mixed("connection and poller"))
        }
    }
}

/// A QP in software.
#[derive(Debug)]
pub(super) struct QueuePair {
    link: MeteredLink,
    state: QpState,
    index: QpIndex,
    // The reply to a waiting peer when this value is dropped.
    refusal: ConnectionHello,
    sends: SendQueue,
    recvs: RecvQueue,
    reads_out: ReadsOut,
    reads_in: ReadsIn,
    outbound: Outbound,
    inbound: Inbound,
    // The keys of the QP's domain, where that is not the poller's.
    keys: Option<Arc<KeyCopy>>,
    // The keys of the QP, if the device touches memory after the end of the QP.
    late_keys: Option<Arc<KeyCopy>>,
    // The key for all bytes sent behind the reply.
    send_key: Option<CipherKey>,
}

impl QueuePair {
    fn new(
        link: Box<dyn PeerStream>,
        state: QpState,
        limits: &QpLimits,
        reads_in: u8,
    ) -> Box<Self> {
        let sends = SendQueue::new(limits);
        Box::new(Self {
            link: MeteredLink::new(link),
            state,
            index: QpIndex(0),
            refusal: ConnectionHello::default(),
            reads_out: ReadsOut::new(sends.limit()),
            reads_in: ReadsIn::new(reads_in),
            sends,
            recvs: RecvQueue::new(limits),
            outbound: Outbound::new(limits.reads_in),
            inbound: Inbound::default(),
            keys: None,
            late_keys: None,
            send_key: None,
        })
    }

    /// Encrypts both streams behind the handshake. A peer that waits for the reply sends nothing
    /// before it, so its first byte is encrypted.
    fn secure(&mut self, keys: CipherKeys) -> std::result::Result<(), NoTls> {
        let CipherKeys { send, receive } = keys;
        self.link.encrypt_receive(&receive)?;
        if matches!(self.state, QpState::Prepared { .. }) {
            self.send_key = Some(send);
            return Ok(());
        }
        self.link.encrypt_send(&send)
    }

    fn not_encrypted(&self, lack: NoTls) -> FabricError {
        FabricError::Encrypt { peer: self.link.peer(), reason: lack.to_string() }
    }

    /// The QP comes to a poller, which is woken by `event` if the link has no descriptor.
    pub(super) fn attach(
        &mut self,
        index: QpIndex,
        event: &Arc<EventFd>,
        late_keys: Option<Arc<KeyCopy>>,
    ) {
        self.index = index;
        self.link.restart();
        self.link.wake_by(event);
        if late_keys.is_some() {
            self.late_keys = self.keys.clone().or(late_keys);
        }
    }

    /// The keys of the QP's domain, where that is not the poller's.
    #[inline]
    pub(super) fn own_keys(&self) -> Option<&Arc<KeyCopy>> {
        self.keys.as_ref()
    }

    pub(super) fn state(&self) -> QpState {
        self.state
    }

    pub(super) fn index(&self) -> QpIndex {
        self.index
    }

    pub(super) fn link(&self) -> &MeteredLink {
        &self.link
    }

    /// Calls into the link since they were last taken.
    pub(super) fn take_calls(&mut self) -> u64 {
        self.link.take_calls()
    }

    /// Completions that the QP may have in the CQ at once.
    pub(super) fn cq_entries(&self) -> u64 {
        wide64(self.sends.limit()) + wide64(self.recvs.limit())
    }

    /// Whether the link took less than it was offered, and epoll is to say when it has room.
    pub(super) fn is_blocked(&self) -> bool {
        self.outbound.is_blocked()
    }

    /// The link has room again.
    pub(super) fn unblock(&mut self) {
        self.outbound.unblock();
    }

    /// Acknowledgements that this QP owes its peer.
    pub(super) fn acks(&mut self) -> &mut Acks {
        self.outbound.acks()
    }

    /// Takes WRs for the send queue.
    ///
    /// # Errors
    /// EINVAL before the peer was accepted and for too many SGEs, ENOMEM when the queue is full.
    pub(super) fn post_sends(
        &mut self,
        wrs: &[SendWr],
        counters: &mut PollerCounters,
    ) -> std::result::Result<(), PostError> {
        if matches!(self.state, QpState::Prepared { .. }) {
            return Err(PostError::invalid(0));
        }
        for (posted, wr) in wrs.iter().enumerate() {
            if let Err(errno) = self.sends.post(wr) {
                counters.send_doorbells += u64::from(posted > 0);
                return Err(PostError { posted, source: io::Error::from_raw_os_error(errno) });
            }
            counters.count_send(wr);
        }
        counters.send_doorbells += 1;
        Ok(())
    }

    /// Takes RECVs.
    ///
    /// # Errors
    /// ENOMEM when the queue is full.
    pub(super) fn post_recvs(
        &mut self,
        recvs: Recvs<'_>,
        counters: &mut PollerCounters,
    ) -> std::result::Result<(), PostError> {
        let taken = self.recvs.post(recvs);
        counters.recvs += wide64(taken);
        counters.recv_doorbells += u64::from(taken > 0);
        if taken == recvs.rows.len() { Ok(()) } else { Err(PostError::full(taken)) }
    }

    /// The caller polled a completion: its entries are free.
    pub(super) fn reaped(&mut self, returns: Returns) {
        match returns {
            Returns::Sends(before) => self.sends.reaped(before),
            Returns::Recv => self.recvs.reaped(),
        }
    }

    /// Completes the RECV that waits first.
    fn complete_recv(
        &mut self,
        status: WcStatus,
        byte_len: u32,
        imm: Option<u32>,
        cq: &mut SoftCq,
    ) {
        debug_assert!(self.recvs.waiting().is_some(), "a message without a RECV");
        self.recvs.complete(self.index, status, byte_len, imm, cq);
    }

    /// Completes finished WRs, in the order of posting, and a WR that cannot be sent once it is the
    /// oldest.
    fn advance(&mut self, cq: &mut SoftCq) {
        if self.state.is_error() {
            return;
        }
        if let Some(poisoned) = self.sends.complete_done(self.index, cq) {
            self.break_down(Some(poisoned), None, QpState::Dead, cq);
        }
    }

    /// Starts to end because of a request that cannot be done.
    fn refuse(&mut self, seq: usize, refusal: NakReason, recv: Option<WcStatus>) {
        // A READ that cannot be answered any more is older than a request that was refused since.
        let recv = if let QpState::Refusing { recv, .. } = self.state { recv } else { recv };
        self.inbound.clear();
        self.state = QpState::Refusing { seq, refusal, recv };
    }

    /// Enters the error state: everything outstanding completes, and the link ends. The oldest send
    /// WR completes with `send` if that names it, the first waiting RECV with `recv`.
    fn break_down(
        &mut self,
        send: Option<(usize, WcStatus)>,
        recv: Option<WcStatus>,
        into: QpState,
        cq: &mut SoftCq,
    ) {
        if self.state.is_error() {
            return;
        }
        self.leave_landings();
        self.state = into;
        if into == QpState::Draining {
            self.link.finish();
        } else {
            self.link.close();
        }
        self.outbound.clear();
        self.inbound.clear();
        self.reads_out.clear();
        self.sends.flush(self.index, send, cq);
        self.sends.free_unsignaled();
        if let Some(status) = recv {
            self.recvs.complete(self.index, status, 0, None, cq);
        }
        self.flush(cq);
    }

    /// Completes everything outstanding of a QP in the error state.
    pub(super) fn flush(&mut self, cq: &mut SoftCq) {
        self.sends.flush(self.index, None, cq);
        self.recvs.flush(self.index, cq);
    }

    /// Hands over the RDMA that lands after the end of the QP. Nothing, where the device touches no
    /// memory after the end of a QP.
    fn leave_landings(&mut self) {
        let Some(keys) = self.late_keys.clone() else { return };
        let unread = self.link.unread();
        // The turn that calls may hold the lock already. The lock is refused only while keys
        // change, which cannot be in a test of one thread.
        let Some(keys) = keys.try_read() else { return };
        let reads = self.reads_out.pending().filter_map(|at| self.sends.get(at)).map(|wr| &wr.sges);
        let recvs = self.recvs.waiting().map(|wr| &wr.sges);
        let landings = landings(&keys, reads.chain(recvs), &self.inbound, &unread);
        self.link.land_late(landings);
    }

    /// A receive call failed.
    #[cold]
    fn link_failed(&mut self, error: &io::Error, cq: &mut SoftCq) {
        if BadRecord::is(error) && !self.state.is_error() {
            cq.count_bad_record();
            if cq.may_log_bad_record() {
                let (qp, peer) = (self.index.0, self.link.peer());
                tracing::warn!(qp, peer, reason = %error, "ends an encrypted connection");
            }
        }
        self.lost(&error.to_string(), cq);
    }

    /// The link ended, or carried bytes that no peer of this version sends.
    fn lost(&mut self, reason: &str, cq: &mut SoftCq) {
        self.end(reason, WcStatus::RetryExceeded, cq);
    }

    /// The peer closed the link. Verbs learn of that by rdma_cm and flush the outstanding WRs:
    /// nothing failed.
    fn parted(&mut self, cq: &mut SoftCq) {
        self.end("the peer closed the connection", WcStatus::Flushed, cq);
    }

    fn end(&mut self, reason: &str, first: WcStatus, cq: &mut SoftCq) {
        match self.state {
            QpState::Draining => {
                self.state = QpState::Dead;
                self.link.close();
            }
            QpState::Dead => {}
            QpState::Refusing { recv, .. } => self.break_down(None, recv, QpState::Dead, cq),
            QpState::Prepared { .. } | QpState::Ready => {
                tracing::debug!(qp = self.index.0, reason, "soft QP lost its link");
                self.break_down(Some((self.sends.oldest(), first)), None, QpState::Dead, cq);
            }
        }
    }

    /// The owner gives up the QP.
    pub(super) fn fail(&mut self, cq: &mut SoftCq) {
        self.break_down(None, None, QpState::Dead, cq);
        if self.state == QpState::Draining {
            self.state = QpState::Dead;
            self.link.close();
        }
    }

    /// Answers the peer that waits.
    ///
    /// # Errors
    /// EINVAL when no peer waits, ECONNRESET when the peer is gone, EPIPE when it takes no answer,
    /// [`FabricError::Encrypt`].
    pub(super) fn accept(&mut self, params: &AcceptParams, cq: &mut SoftCq) -> Result<()> {
        let call = |errno| FabricError::Call {
            call: "accept",
            source: io::Error::from_raw_os_error(errno),
        };
        let QpState::Prepared { most_reads_out, most_reads_in } = self.state else {
            return Err(call(if self.state.is_error() { libc::ECONNRESET } else { libc::EINVAL }));
        };
        let reads_out = params.reads_out.min(most_reads_out);
        let reads_in = params.reads_in.min(most_reads_in);
        let reply =
            tcp_handshake::encode_reply(Acceptance::Accepted, reads_out, reads_in, &params.hello);
        // The empty buffer of a socket has room for the whole reply. If it does not take the reply,
        // the connection cannot be used.
        if reply.is_none_or(|reply| !self.link.send_all(&reply)) {
            self.lost("the reply could not be sent", cq);
            return Err(call(libc::EPIPE));
        }
        if let Some(key) = self.send_key.take()
            && let Err(lack) = self.link.encrypt_send(&key)
        {
            let error = self.not_encrypted(lack);
            self.lost(&error.to_string(), cq);
            return Err(error);
        }
        self.reads_in = ReadsIn::new(reads_in);
        self.state = QpState::Ready;
        Ok(())
    }

    /// Whether a detached QP is to end. A QP that refuses a request still tells the peer until it
    /// is dropped, and so does a QP that was never accepted.
    pub(super) fn ends_at_detach(&self) -> bool {
        !matches!(self.state, QpState::Prepared { .. } | QpState::Draining)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if matches!(self.state, QpState::Prepared { .. })
            && let Some(reply) =
                tcp_handshake::encode_reply(Acceptance::Rejected, 0, 0, &self.refusal)
        {
            self.link.send_all(&reply);
        }
        if self.state == QpState::Draining {
            self.link.discard(DISCARD_AT_DROP);
        }
        self.link.close();
    }
}
