//! [`Answers`]: what a shard has to say: replies, and writes that went well.

use std::collections::VecDeque;

use nix::errno::Errno;

use super::message::{PartToken, ShardReply};
use crate::timing::Spent;

/// The answers of a shard that its poll group has not taken.
#[derive(Debug)]
pub(super) struct Answers {
    replies: VecDeque<ShardReply>,
    // Block writes that went well, of this shard's own poll group.
    written: Vec<PartToken>,
    own: OwnEnded,
}

/// How jobs ended that the shard began by itself, to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct OwnEnded {
    /// Jobs.
    pub jobs: usize,
    /// Of these, jobs that failed.
    pub failed: usize,
}

impl Answers {
    /// Memory for `capacity` answers. More of them allocate.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            replies: VecDeque::with_capacity(capacity),
            written: Vec::with_capacity(capacity),
            own: OwnEnded::default(),
        }
    }

    /// One more answer.
    pub(super) fn reply(&mut self, reply: ShardReply) {
        self.replies.push_back(reply);
    }

    /// A request is done. Without an asker it is a job of the shard itself.
    #[inline]
    pub(super) fn done(
        &mut self,
        from: Option<PartToken>,
        result: Result<(), Errno>,
        spent: Spent,
    ) {
        match from {
            Some(to) => self.replies.push_back(ShardReply::Done { to, result, spent }),
            None => {
                self.own.jobs += 1;
                self.own.failed += usize::from(result.is_err());
            }
        }
    }

    /// The store has done a block write well.
    #[inline]
    pub(super) fn written(&mut self, to: PartToken) {
        self.written.push(to);
    }

    /// Whether there is a reply.
    #[inline]
    pub(super) fn has_reply(&self) -> bool {
        !self.replies.is_empty()
    }

    /// The next reply.
    #[inline]
    pub(super) fn take_reply(&mut self) -> Option<ShardReply> {
        self.replies.pop_front()
    }

    /// The next block write that went well; the oldest has number 0. Behind the last of them the
    /// list is empty.
    #[inline(always)]
    pub(super) fn next_written(&mut self, number: usize) -> Option<PartToken> {
        let next = self.written.get(number).copied();
        if next.is_none() {
            self.written.clear();
        }
        next
    }

    /// The shard's own jobs that ended since the last call.
    pub(super) fn take_own(&mut self) -> OwnEnded {
        std::mem::take(&mut self.own)
    }
}
