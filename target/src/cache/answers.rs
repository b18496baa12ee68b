//! [`Answers`]: the output of a shard: replies, and block writes that succeeded.

use std::collections::VecDeque;

use nix::errno::Errno;

use super::shard_messages::{PartToken, ShardReply};
use crate::volume::ids::VolumeIndex;
use crate::volume::timing::Spent;

/// Answers of a shard that its poll group has not taken yet.
#[derive(Debug)]
pub(super) struct Answers {
    replies: VecDeque<ShardReply>,
    // Successful block writes, asked by this shard's own poll group.
    written: Vec<PartToken>,
    own: Vec<OwnEnded>,
}

/// The end of a job that the shard started itself while it stops: a flush or a sync.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OwnEnded {
    /// The job's volume.
    pub volume: VolumeIndex,
    /// The store's result.
    pub result: Result<(), Errno>,
}

impl Answers {
    /// Memory for `capacity` answers. Longer lists allocate.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            replies: VecDeque::with_capacity(capacity),
            written: Vec::with_capacity(capacity),
            own: Vec::new(),
        }
    }

    /// Queues a reply.
    pub(super) fn reply(&mut self, reply: ShardReply) {
        self.replies.push_back(reply);
    }

    /// Queues the reply to a finished request.
    #[inline]
    pub(super) fn done(&mut self, to: PartToken, result: Result<(), Errno>, spent: Spent) {
        self.replies.push_back(ShardReply::Done { to, result, spent });
    }

    /// A job of a volume ended. A job without an asker belongs to the shard itself.
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

    /// The store completed a block write without an error.
    #[inline]
    pub(super) fn written(&mut self, to: PartToken) {
        self.written.push(to);
    }

    /// Whether a reply is queued.
    #[inline]
    pub(super) fn has_reply(&self) -> bool {
        !self.replies.is_empty()
    }

    /// The next reply.
    #[inline]
    pub(super) fn take_reply(&mut self) -> Option<ShardReply> {
        self.replies.pop_front()
    }

    /// The successful block write with this number; number 0 is the oldest. A number past the end
    /// empties the list and returns `None`.
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
