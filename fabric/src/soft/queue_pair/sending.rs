//! The sending side of a queue pair: hands frames to the link, and books the bytes that the link
//! took.

use std::io;

use super::{QpState, QueuePair};
use crate::soft::keys::KeyTable;
use crate::soft::queue_pair::completions::SoftCq;
use crate::soft::queue_pair::outbound::{FrameOrigin, PeerRead};
use crate::soft::wire::frame::NakReason;
use crate::soft::wire::gathered::Gathered;
use crate::work::WcStatus;

impl QueuePair {
    /// Whether [`Self::pump`] could put something on the link.
    #[inline]
    pub(in crate::soft) fn wants_to_send(&self) -> bool {
        if self.outbound.is_broken() {
            return false;
        }
        match self.state {
            QpState::Ready => self.outbound.has_work() || self.sends.has_unbuilt(),
            QpState::Refusing { .. } => true,
            _ => false,
        }
    }

    #[inline]
    fn build(&mut self, keys: &KeyTable) {
        let Self { state, outbound, sends, reads_out, .. } = self;
        match *state {
            QpState::Ready => outbound.build(Some((sends, reads_out.answered())), None, keys),
            QpState::Refusing { seq, refusal, .. } => {
                outbound.build(None, Some((seq, refusal)), keys);
            }
            _ => {}
        }
    }

    /// Sends frames until the link is full or the bytes of `share` are used up, and reduces
    /// `share`. `send_bytes` is the buffer for headers and short payloads.
    pub(in crate::soft) fn pump(
        &mut self,
        keys: &KeyTable,
        cq: &mut SoftCq,
        send_bytes: &mut [u8],
        share: &mut usize,
    ) {
        while self.wants_to_send() && !self.outbound.is_blocked() && *share > 0 {
            self.build(keys);
            if !self.outbound.has_frames() {
                break;
            }
            let most = self.link.most_per_send(self.outbound.waiting_bytes());
            let mut gathered = Gathered::new(send_bytes, most.min(*share));
            let dead = self.outbound.gather(&self.sends, keys, &mut gathered);
            if gathered.pieces().is_empty() {
                if dead {
                    self.source_died(cq);
                }
                continue;
            }
            // SAFETY: the pieces are in `send_bytes`, which is not touched during the call, and
            // ranges that `keys` just found inside live regions, which stay alive and mapped while
            // it is borrowed.
            match unsafe { self.link.send(gathered.pieces()) } {
                Ok(moved) => {
                    *share = share.saturating_sub(moved.bytes);
                    self.outbound.took(moved.bytes);
                    self.book_sent(cq);
                    if !moved.more && self.outbound.has_frames() {
                        // The socket is full. Memory that was deregistered is handled in the next
                        // round.
                        self.outbound.block();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.outbound.block(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The peer may have said why before it closed. The receiving side finds out.
                Err(_) => self.outbound.set_broken(),
            }
        }
        if self.sends.is_poisoned() {
            self.advance(cq);
        }
    }

    /// Books the frames that are wholly sent.
    #[inline]
    fn book_sent(&mut self, cq: &mut SoftCq) {
        while let Some(origin) = self.outbound.pop_sent() {
            match origin {
                FrameOrigin::Request(position) => {
                    if self.sends.sent(position) {
                        self.reads_out.sent(position);
                    }
                }
                FrameOrigin::Response(_) => self.reads_in.responded(),
                FrameOrigin::Nak => {
                    let recv =
                        if let QpState::Refusing { recv, .. } = self.state { recv } else { None };
                    self.break_down(None, recv, QpState::Draining, cq);
                    return;
                }
                FrameOrigin::Control => {}
            }
        }
    }

    /// The memory of the first frame was deregistered.
    fn source_died(&mut self, cq: &mut SoftCq) {
        let Some((origin, begun)) = self.outbound.first() else {
            debug_assert!(false, "no frame, so none without memory");
            return;
        };
        match origin {
            FrameOrigin::Request(position) if begun => {
                // The peer waits for bytes that may not be sent. Only the end of the link is left.
                let status = WcStatus::LocalProtection;
                self.break_down(Some((position, status)), None, QpState::Dead, cq);
            }
            FrameOrigin::Request(position) => {
                let status = WcStatus::LocalProtection;
                self.outbound.drop_requests(position, status, &mut self.sends);
            }
            FrameOrigin::Response(PeerRead { seq, .. }) if !begun => {
                self.outbound.drop_responses();
                self.refuse(seq, NakReason::Access, None);
            }
            FrameOrigin::Response(_) | FrameOrigin::Nak | FrameOrigin::Control => {
                self.lost("the source of a READ response was deregistered", cq);
            }
        }
    }
}
