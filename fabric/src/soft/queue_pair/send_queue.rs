//! [`SendQueue`]: the send queue of a QP, and how far each WR in it is.
//!
//! Positions in the queue only grow; the index in the ring is the position under a mask. The
//! position of a WR is its sequence number on the wire. These are in order:
//!
//! ```text
//! free <= done <= sent <= built <= head, and head - free <= limit
//! ```

use rblk_protocol::width::{narrow, wide};

use super::completions::{Returns, SoftCq};
use crate::connect::QpLimits;
use crate::soft::wire::frame::low32;
use crate::work::{Completion, QpIndex, SendOp, SendWr, WcOpcode, WcStatus, WrId};

#[derive(Clone, Copy, Debug)]
struct SendEntry {
    wr: SendWr,
    read_done: bool,
}

/// The send queue of a QP.
#[derive(Debug)]
pub(in crate::soft) struct SendQueue {
    ring: Box<[Option<SendEntry>]>,
    limit: usize,
    // SGEs that a WR may have.
    sges: usize,
    // Entries before it may be posted to again.
    free: usize,
    // The oldest WR that has not completed.
    done: usize,
    // The oldest WR that is not wholly on the link.
    sent: usize,
    // The oldest WR of which no frame was built.
    built: usize,
    // Where the next WR goes.
    head: usize,
    // Requests that the peer says it executed.
    acknowledged: usize,
    // Completions that the caller has not polled.
    unreaped: usize,
    // A WR that cannot be sent. It completes so when all WRs before it have completed.
    poison: Option<(usize, WcStatus)>,
}

impl SendQueue {
    pub(super) fn new(limits: &QpLimits) -> Self {
        let limit = wide(limits.send_wrs);
        Self {
            ring: vec![None; limit.max(1).next_power_of_two()].into_boxed_slice(),
            limit,
            sges: wide(limits.send_sges),
            free: 0,
            done: 0,
            sent: 0,
            built: 0,
            head: 0,
            acknowledged: 0,
            unreaped: 0,
            poison: None,
        }
    }

    #[inline]
    fn posted(&self, position: usize) -> Option<&SendEntry> {
        self.ring.get(position & (self.ring.len() - 1))?.as_ref()
    }

    /// The WR at a position.
    #[inline]
    pub(super) fn get(&self, position: usize) -> Option<&SendWr> {
        self.posted(position).map(|posted| &posted.wr)
    }

    /// The oldest WR that has not completed.
    pub(super) fn oldest(&self) -> usize {
        self.done
    }

    /// Adds a WR.
    ///
    /// # Errors
    /// EINVAL for too many SGEs, ENOMEM when the queue is full.
    #[inline]
    pub(super) fn post(&mut self, wr: &SendWr) -> Result<(), i32> {
        if wr.sges.as_slice().len() > self.sges {
            return Err(libc::EINVAL);
        }
        if self.head - self.free >= self.limit {
            return Err(libc::ENOMEM);
        }
        let at = self.head & (self.ring.len() - 1);
        self.ring[at] = Some(SendEntry { wr: *wr, read_done: false });
        self.head += 1;
        Ok(())
    }

    /// WRs that may be in the queue at once.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether there is a WR to build a frame of.
    #[inline]
    pub(super) fn has_unbuilt(&self) -> bool {
        self.built < self.head && self.poison.is_none()
    }

    /// The next WR to build a frame of, with its position.
    #[inline]
    pub(super) fn unbuilt(&self) -> Option<(usize, SendWr)> {
        if !self.has_unbuilt() {
            return None;
        }
        Some((self.built, *self.get(self.built)?))
    }

    /// A frame was built of [`Self::unbuilt`].
    pub(super) fn built(&mut self) {
        self.built += 1;
    }

    /// The frames of this WR and of those behind it were dropped before they were sent.
    pub(super) fn unbuild(&mut self, position: usize) {
        self.built = position;
    }

    /// The WR at `position` cannot be sent, and so no WR behind it. Returns whether older WRs have
    /// not completed: they still can, so the peer must say how far it got.
    pub(super) fn poison(&mut self, position: usize, status: WcStatus) -> bool {
        self.poison = Some((position, status));
        self.done < position
    }

    /// Whether a WR that cannot be sent waits for those before it.
    pub(super) fn is_poisoned(&self) -> bool {
        self.poison.is_some()
    }

    /// All bytes of the WR at `position` are on the link. Returns whether it is a READ.
    #[inline]
    pub(super) fn sent(&mut self, position: usize) -> bool {
        self.sent = position + 1;
        self.get(position).is_some_and(|wr| matches!(wr.op, SendOp::Read(_)))
    }

    /// The peer says how many requests it has executed: the low half of that count. Returns whether
    /// that is news.
    ///
    /// # Errors
    /// The peer cannot have executed that many.
    #[inline]
    pub(super) fn acknowledge(&mut self, executed: u32) -> Result<bool, &'static str> {
        let news = wide(executed.wrapping_sub(low32(self.acknowledged)));
        if news > self.sent - self.acknowledged {
            return Err("acknowledges a request that was never sent");
        }
        self.acknowledged += news;
        Ok(news > 0)
    }

    /// Whether the peer may refuse the request of this sequence number now: the oldest one, also
    /// while its payload is still being sent.
    pub(super) fn may_be_refused(&self, seq: u32) -> bool {
        seq == low32(self.done) && self.done < self.built
    }

    /// The data of the READ at `position` is in its place.
    pub(super) fn read_finished(&mut self, position: usize) {
        let at = position & (self.ring.len() - 1);
        let posted = self.ring.get_mut(at).and_then(Option::as_mut);
        debug_assert!(posted.is_some(), "a READ finished at {position}, where no WR is");
        if let Some(posted) = posted {
            posted.read_done = true;
        }
    }

    /// Completes finished WRs, in the order of posting. Returns the WR that cannot be sent when it
    /// is the oldest.
    #[inline]
    pub(super) fn complete_done(
        &mut self,
        qp: QpIndex,
        cq: &mut SoftCq,
    ) -> Option<(usize, WcStatus)> {
        while self.done < self.sent {
            let posted = self.posted(self.done)?;
            let done = match posted.wr.op {
                SendOp::Read(_) => posted.read_done,
                _ => self.done < self.acknowledged,
            };
            if !done {
                return None;
            }
            self.complete(qp, WcStatus::Success, cq);
        }
        self.poison.filter(|(position, _)| *position == self.done)
    }

    /// Completes everything with a flush, except `first` if it is the oldest.
    pub(super) fn flush(&mut self, qp: QpIndex, first: Option<(usize, WcStatus)>, cq: &mut SoftCq) {
        while self.done < self.head {
            let status =
                first.filter(|(at, _)| *at == self.done).map_or(WcStatus::Flushed, |s| s.1);
            self.complete(qp, status, cq);
        }
    }

    /// Completes the oldest WR.
    #[inline]
    fn complete(&mut self, qp: QpIndex, status: WcStatus, cq: &mut SoftCq) {
        let Some(wr) = self.posted(self.done).map(|posted| posted.wr) else {
            debug_assert!(false, "no WR at {}, before {}", self.done, self.head);
            // A caller that completes all must still come to an end.
            self.done += 1;
            return;
        };
        self.done += 1;
        if status == WcStatus::Success && !wr.signaled {
            return;
        }
        let (opcode, bytes) = match wr.op {
            SendOp::Send => (WcOpcode::Send, 0),
            SendOp::Write(_) | SendOp::WriteWithImm(..) => (WcOpcode::Write, 0),
            // More than 32 bits can only be of a READ that was never sent.
            SendOp::Read(_) => {
                (WcOpcode::Read, narrow(wr.sges.total_bytes().min(u64::from(u32::MAX))))
            }
        };
        self.unreaped += 1;
        cq.push(
            Completion {
                qp,
                id: WrId(wr.id.0 & WrId::MASK),
                status,
                opcode,
                byte_len: bytes,
                imm: 0,
            },
            Returns::Sends(self.done),
        );
    }

    /// The caller polled a completion of this queue: every entry before `free` is free.
    #[inline]
    pub(super) fn reaped(&mut self, free: usize) {
        self.free = free;
        self.unreaped -= 1;
    }

    /// Frees everything that completed, unless a completion is left that does so when it is polled.
    pub(super) fn free_unsignaled(&mut self) {
        if self.unreaped == 0 {
            self.free = self.done;
        }
    }
}
