//! [`RecvQueue`]: the receive queue of a QP.

use rblk_protocol::width::wide;

use super::completions::{Returns, SoftCq};
use crate::connect::QpLimits;
use crate::work::{Completion, QpIndex, RecvWr, Recvs, WcOpcode, WcStatus, WrId};

/// The RECVs of a QP. Positions only grow; the index in the ring is the position under a mask.
/// `free <= next <= head`, and `head - free <= limit`.
#[derive(Debug)]
pub(in crate::soft) struct RecvQueue {
    ring: Box<[Option<RecvWr>]>,
    limit: usize,
    // Entries before it may be posted to again.
    free: usize,
    // The RECV that the next message takes.
    next: usize,
    // Where the next RECV goes.
    head: usize,
}

impl RecvQueue {
    pub(super) fn new(limits: &QpLimits) -> Self {
        let limit = wide(limits.recv_wrs);
        let ring = vec![None; limit.max(1).next_power_of_two()].into_boxed_slice();
        Self { ring, limit, free: 0, next: 0, head: 0 }
    }

    /// RECVs that may be in the queue at once.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Adds RECVs while there is room. Returns how many.
    #[must_use]
    #[inline]
    pub(super) fn post(&mut self, recvs: Recvs<'_>) -> usize {
        let room = self.limit - (self.head - self.free);
        let taken = room.min(recvs.rows.len());
        for wr in recvs.first(taken).iter() {
            let at = self.head & (self.ring.len() - 1);
            self.ring[at] = Some(*wr);
            self.head += 1;
        }
        taken
    }

    /// The RECV that the next message takes.
    #[inline]
    pub(super) fn waiting(&self) -> Option<&RecvWr> {
        if self.next == self.head {
            return None;
        }
        self.ring.get(self.next & (self.ring.len() - 1))?.as_ref()
    }

    /// Completes the RECV that waits first, if there is one.
    #[inline]
    pub(super) fn complete(
        &mut self,
        qp: QpIndex,
        status: WcStatus,
        byte_len: u32,
        imm: Option<u32>,
        cq: &mut SoftCq,
    ) {
        let Some(wr) = self.waiting() else { return };
        let completion = Completion {
            qp,
            id: WrId(wr.id.0 & WrId::MASK),
            status,
            opcode: if imm.is_some() { WcOpcode::RecvWithImm } else { WcOpcode::Recv },
            byte_len,
            imm: imm.unwrap_or(0),
        };
        self.next += 1;
        cq.push(completion, Returns::Recv);
    }

    /// Completes everything with a flush.
    pub(super) fn flush(&mut self, qp: QpIndex, cq: &mut SoftCq) {
        while self.waiting().is_some() {
            self.complete(qp, WcStatus::Flushed, 0, None, cq);
        }
    }

    /// The caller polled a completion of this queue.
    #[inline]
    pub(super) fn reaped(&mut self) {
        self.free += 1;
    }
}
