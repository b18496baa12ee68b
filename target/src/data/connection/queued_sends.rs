//! [`QueuedSends`]: the send WRs of this turn, the credits for them, and the commands that wait for
//! credits.
//!
//! Responses are collected and sent at the end of the turn, several in one message if the peers
//! agreed on lists: behind every WR queued so far, so the data of each response arrives first. The
//! first response of a message reserves a credit for them.

use std::collections::VecDeque;

use rblk_fabric::{RemoteBuffer, SendCredits, SendOp, SendWr, SgeList};
use rblk_protocol::limits::{IO_MAX_BYTES, LIST_MAX};
use rblk_protocol::width::wide;
use rblk_protocol::{Immediate, Tag};

use super::wr_id::WrKind;

/// Of this many send WRs, at least one is signaled.
pub(super) const SIGNAL_INTERVAL: u32 = 16;

/// A longer WRITE is signaled. So a slow peer that takes 1 MiB in a second, the required minimum
/// (`liveness.rs`), completes a WR every 4 s: 16 WRITEs of this length, or one of 4 MiB.
const SIGNAL_BYTES: u32 = 256 << 10;
const _: () = assert!(SIGNAL_INTERVAL * SIGNAL_BYTES <= IO_MAX_BYTES, "4 MiB");

/// Bytes of payload that a connection asks its device to take inside a WR: a few responses, or a
/// small reply. If the device grants less, it gathers them.
pub(crate) const INLINE_BYTES: u32 = 64;

/// Responses sent together, in the response buffer of the first one's tag.
#[derive(Clone, Copy, Debug)]
pub(super) struct Responses {
    pub(super) first: Tag,
    pub(super) count: usize,
}

/// The send queue of a connection.
#[derive(Debug)]
pub(crate) struct QueuedSends {
    credits: SendCredits,
    queued: Vec<SendWr>,
    responses: Option<Responses>,
    // Most responses in one message.
    list_max: usize,
    waiting: VecDeque<Tag>,
}

impl QueuedSends {
    /// A queue with room for `send_wrs` WRs and `tags` commands. `lists`: one message may have
    /// several responses.
    pub(super) fn new(send_wrs: u32, tags: usize, lists: bool) -> Self {
        Self {
            credits: SendCredits::new(send_wrs, SIGNAL_INTERVAL),
            queued: Vec::with_capacity(wide(send_wrs) + 1),
            responses: None,
            list_max: if lists { LIST_MAX } else { 1 },
            waiting: VecDeque::with_capacity(tags),
        }
    }

    /// Credits that may be taken.
    #[inline]
    pub(crate) fn free(&self) -> u64 {
        self.credits.available() - u64::from(self.responses.is_some())
    }

    /// Credits that one more response takes.
    #[inline]
    pub(crate) fn response_needs(&self) -> u64 {
        u64::from(self.responses.is_none())
    }

    /// Whether this many credits are free, and no command waits for credits.
    #[inline]
    pub(crate) fn may_take(&self, credits: u64) -> bool {
        self.free() >= credits && self.waiting.is_empty()
    }

    /// Whether commands wait for credits.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Lets a command wait for credits, behind waiting ones.
    pub(crate) fn wait(&mut self, tag: Tag) {
        self.waiting.push_back(tag);
    }

    /// Lets a command wait on for credits, before all others.
    pub(crate) fn keep_waiting_first(&mut self, tag: Tag) {
        self.waiting.push_front(tag);
    }

    /// Makes a READ wait for credits if other commands wait: no command overtakes them. A tag waits
    /// once.
    #[inline]
    pub(crate) fn waits_behind_others(&mut self, tag: Tag) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        if !self.waiting.contains(&tag) {
            self.waiting.push_back(tag);
        }
        true
    }

    /// The command that has waited longest for credits.
    #[inline]
    pub(super) fn next_waiting(&mut self) -> Option<Tag> {
        self.waiting.pop_front()
    }

    /// The credits, for predictions about completions.
    #[inline]
    pub(super) fn credits(&self) -> &SendCredits {
        &self.credits
    }

    /// A signaled WR completed. Returns the position up to which all WRs are done.
    #[inline]
    pub(super) fn completed(&mut self) -> u64 {
        self.credits.completed()
    }

    /// Queues a WR, which takes a credit. Returns its position.
    #[inline(always)]
    pub(super) fn queue(
        &mut self,
        kind: WrKind,
        op: SendOp,
        sges: &SgeList,
        must_signal: bool,
        inline: bool,
    ) -> u64 {
        let signaled = must_signal || self.credits.wants_signal();
        self.queued.push(SendWr { id: kind.id(), op, sges: *sges, signaled, inline });
        self.credits.take(signaled)
    }

    /// Queues the WRITE of an answer's data, which also carries the answer if there is an
    /// `immediate`. Returns its position. All WRITEs are made here.
    #[inline(always)]
    pub(crate) fn queue_write(
        &mut self,
        tag: Tag,
        sges: &SgeList,
        remote: RemoteBuffer,
        immediate: Option<Immediate>,
        must_signal: bool,
    ) -> u64 {
        let op = match immediate {
            Some(immediate) => SendOp::WriteWithImm(remote, immediate.to_bits()),
            None => SendOp::Write(remote),
        };
        // Replies and digests. This saves a card one read of memory. Soft-iWARP (siw) requires it:
        // see `docs/internals/kernel-facts.md`.
        let inline = sges.is_one_within(INLINE_BYTES);
        let must_signal = must_signal || sges.total_bytes() > u64::from(SIGNAL_BYTES);
        self.queue(WrKind::WriteData(tag), op, sges, must_signal, inline)
    }

    /// Takes a place among the responses of this message. Returns the tag of their buffer, and the
    /// number of responses before.
    #[inline]
    pub(super) fn add_response(&mut self, tag: Tag) -> Responses {
        let list = self.responses.get_or_insert(Responses { first: tag, count: 0 });
        let place = *list;
        list.count += 1;
        place
    }

    /// Whether the responses of this message have reached their maximum.
    #[inline]
    pub(super) fn responses_are_full(&self) -> bool {
        self.responses.is_some_and(|list| list.count >= self.list_max)
    }

    /// Takes the responses of this message, which must be queued now.
    #[inline]
    pub(super) fn take_responses(&mut self) -> Option<Responses> {
        self.responses.take()
    }

    /// The WRs of this turn.
    #[inline]
    pub(super) fn queued(&self) -> &[SendWr] {
        &self.queued
    }

    /// Whether there are WRs or responses to post.
    #[inline]
    pub(super) fn has_queued(&self) -> bool {
        self.responses.is_some() || !self.queued.is_empty()
    }

    /// The WRs of this turn were posted.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.queued.clear();
    }

    /// The connection ended: drops its WRs, responses and waiting commands.
    pub(super) fn end(&mut self) {
        self.queued.clear();
        self.responses = None;
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use rblk_fabric::{Lkey, Rkey, Sge};

    use super::*;

    /// Lengths that siw must not gather (`docs/internals/kernel-facts.md`): up to 32 bytes.
    #[test]
    fn short_writes_go_inside_their_wrs() {
        let mut queue = QueuedSends::new(16, 4, true);
        let sge = |len| Sge { addr: 4096, len, lkey: Lkey(1) };
        let remote = RemoteBuffer { addr: 8192, rkey: Rkey(2) };
        for len in [8, 24, 32, 64, 65, 512, 4096] {
            queue.queue_write(Tag(0), &SgeList::one(sge(len)), remote, None, false);
        }
        queue.queue_write(Tag(0), &SgeList::two(sge(4096), sge(8)), remote, None, false);
        let inline: Vec<bool> = queue.queued.iter().map(|wr| wr.inline).collect();
        assert_eq!(inline, [true, true, true, true, false, false, false, false]);
    }
}
