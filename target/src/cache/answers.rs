//! [`Answers`]: what a shard has to say: replies, and writes that went well.

use std::collections::VecDeque;

use nix::errno::Errno;

use super::message::{PartToken, ShardReply};
use crate::volume::ids::VolumeIndex;
use crate::volume::timing::Spent;

/// The answers of a shard that its poll group has not taken.
#[derive(Debug)]
pub(super) struct Answers {
    replies: VecDeque<ShardReply>,
    // Block writes that went well, of this shard's own poll group.
    written: Vec<PartToken>,
    own: Vec<OwnEnded>,
}

/// How a job ended that the shard began by itself, to stop: a flush or a sync.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OwnEnded {
    /// Its volume.
    pub volume: VolumeIndex,
    /// What the store said.
    pub result: Result<(), Errno>,
}

impl Answers {
    /// Memory for `capacity` answers. More of them allocate.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            replies: VecDeque::with_capacity(capacity),
            written: Vec::with_capacity(capacity),
            own: Vec::new(),
        }
    }

    /// One more answer.
    pub(super) fn reply(&mut self, reply: ShardReply) {
        self.replies.push_back(reply);
    }

    /// A request is done.
    #[inline]
    pub(super) fn done(&mut self, to: PartToken, result: Result<(), Errno>, spent: Spent) {
        self.replies.push_back(ShardReply::Done { to, result, spent });
    }

    /// A job of a volume is done. Without an asker it is a job of the shard itself.
    #[inline]
    pub(super) fn ended(
        &mut self,
        from: Option<PartToken>,
        volume: VolumeIndex,
        result: Result<(), Errno>,
        spent: Spent,
    ) {
        match from {
            Some(to) => self.done(to, result, spent),
            None => self.own.push(OwnEnded { volume, result }),
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
    pub(super) fn take_own(&mut self) -> Vec<OwnEnded> {
        std::mem::take(&mut self.own)
    }
}
