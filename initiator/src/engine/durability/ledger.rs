//! [`Ledger`]: one queue's part of the account: how each request is sent, and the meaning of its
//! answer. [`Durability`] states the guarantees of a ledger. Pure.

use std::sync::Arc;

use rblk_config::OnLoss;
use rblk_protocol::width::wide;
use rblk_protocol::{Mutation, QueueDepth, Status, Tag};

use super::Durability;
use super::retain::{EntryId, RetainRing, Retained, what_of};
use crate::engine::io::{Io, IoOp};

/// How to send a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SendPlan {
    /// The request itself.
    Send {
        /// The write must be durable when it is answered.
        fua: bool,
    },
    /// A FLUSH under its tag; the answer is not the request's.
    FlushAhead,
    /// Wait: ask again after an answer.
    Wait,
}

/// The meaning of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answered {
    /// The request is done.
    Done,
    /// The answer to a FLUSH ahead of the request: plan the request again.
    Again,
    /// The request is done, and fails with EIO although the target did it: a FLUSH after a loss.
    Lost,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Ahead {
    #[default]
    No,
    Sent,
    Done,
}

/// The facts about a request, by its tag.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    // The place in the ring.
    entry: Option<EntryId>,
    // The request was sent to be durable when answered.
    durable: bool,
    // The horizon that a FLUSH under the tag covers.
    horizon: u64,
    // The number of losses at its submission.
    losses: u64,
    // For a FLUSH: it was submitted for the writes numbered below this.
    meant: u64,
    ahead: Ahead,
    // A FLUSH of this end, for which no user waits.
    unasked: bool,
}

/// One queue's part of the account: it decides about each request when it is sent and answered.
/// Allocates nothing after its creation.
#[derive(Debug)]
pub struct Ledger {
    shared: Arc<Durability>,
    ring: Option<RetainRing>,
    marks: Box<[Mark]>,
    // A FLUSH ahead of a write is under way: one at a time.
    flushing: bool,
    // The first write without room. Later writes wait, so that it gets the next room.
    starving: Option<Tag>,
}

impl Ledger {
    /// A queue's ledger; with a ring it retains copies.
    #[must_use]
    pub fn new(shared: Arc<Durability>, depth: QueueDepth, ring: Option<RetainRing>) -> Self {
        let marks = vec![Mark::default(); usize::from(depth.get())].into_boxed_slice();
        Self { shared, ring, marks, flushing: false, starving: None }
    }

    fn mark(&mut self, tag: Tag) -> Option<&mut Mark> {
        self.marks.get_mut(tag.index())
    }

    /// Records a new request.
    pub(crate) fn submitted(&mut self, tag: Tag) {
        let (losses, meant) = (self.shared.losses(), self.shared.submission());
        if let Some(mark) = self.mark(tag) {
            *mark = Mark { losses, meant, ..Mark::default() };
        }
    }

    /// Marks the FLUSH under this tag as one of this end: no user waits for it, so it reports no
    /// loss. A loss that it finds is reported by other FLUSHes.
    pub(crate) fn unasked(&mut self, tag: Tag) {
        if let Some(mark) = self.mark(tag) {
            mark.unasked = true;
        }
    }

    /// Whether a FLUSH must fail instead of being sent, to report a loss once. Call it once, and
    /// obey. A FLUSH that fails because of a loss until the remount is sent nevertheless, and fails
    /// when it is [answered](Self::answered).
    #[must_use]
    pub(crate) fn must_fail(&mut self, tag: Tag, io: &Io) -> bool {
        if io.op != IoOp::Flush || self.shared.on_loss() != OnLoss::Once {
            return false;
        }
        let mark = self.marks.get(tag.index()).copied().unwrap_or_default();
        if mark.unasked {
            return false;
        }
        let must_tell = self.shared.must_tell(mark.losses, mark.meant);
        must_tell && !Mutation::ReplaySilentLoss.is_on()
    }

    /// The way to send a waiting request. [`SendPlan::Send`] and [`SendPlan::FlushAhead`] must be
    /// carried out.
    pub(crate) fn plan(&mut self, tag: Tag, io: &Io) -> SendPlan {
        let Some(mark) = self.marks.get_mut(tag.index()) else {
            return SendPlan::Send { fua: io.fua };
        };
        match io.op {
            IoOp::Read => return SendPlan::Send { fua: false },
            IoOp::Flush => {
                mark.horizon = self.shared.horizon();
                return SendPlan::Send { fua: false };
            }
            IoOp::Write | IoOp::Discard | IoOp::WriteZeroes => {}
        }
        let Some(ring) = &mut self.ring else {
            mark.durable = io.fua && io.op == IoOp::Write;
            return SendPlan::Send { fua: mark.durable };
        };
        if mark.entry.is_some() {
            // Sent before, on a path that died.
            return SendPlan::Send { fua: mark.durable };
        }
        if self.starving.is_some_and(|first| first != tag) {
            return SendPlan::Wait;
        }
        let durable = self.shared.durable();
        ring.release(durable);
        let helps = !self.flushing && ring.has_unflushed(durable);
        let mut plan = SendPlan::Wait;
        if !(helps && mark.ahead == Ahead::No && ring.is_crowded()) {
            let too_long = wide(io.data_bytes) > ring.capacity_bytes();
            mark.durable = io.op == IoOp::Write && (io.fua || too_long);
            match ring.reserve(what_of(io, mark.durable), io) {
                Ok(entry) => {
                    mark.entry = Some(entry);
                    self.starving = None;
                    return SendPlan::Send { fua: mark.durable };
                }
                Err(_) => self.starving = Some(tag),
            }
        }
        if helps {
            mark.ahead = Ahead::Sent;
            mark.horizon = self.shared.horizon();
            self.flushing = true;
            plan = SendPlan::FlushAhead;
        }
        plan
    }

    /// Handles the answer under a tag. `copy` copies data out of the tag's buffer, from that offset
    /// on.
    pub(crate) fn answered(
        &mut self,
        tag: Tag,
        io: &Io,
        status: Status,
        copy: impl FnMut(usize, &mut [u8]),
    ) -> Answered {
        let Some(mark) = self.marks.get_mut(tag.index()) else { return Answered::Done };
        let (fine, horizon) = (status == Status::Ok, mark.horizon);
        if mark.ahead == Ahead::Sent {
            mark.ahead = Ahead::Done;
            self.flushing = false;
            self.flushed_unasked(tag, horizon, fine);
            return Answered::Again;
        }
        match io.op {
            IoOp::Read => {}
            // `Fenced` does not concern the store.
            IoOp::Flush if mark.unasked && status == Status::Fenced => {}
            IoOp::Flush if mark.unasked => self.flushed_unasked(tag, horizon, fine),
            IoOp::Flush => return self.flushed(horizon, status),
            IoOp::Write | IoOp::Discard | IoOp::WriteZeroes => {
                match (mark.entry.take(), &mut self.ring) {
                    (Some(entry), Some(ring)) if fine => {
                        ring.commit(entry, self.shared.acknowledge(), copy);
                    }
                    (Some(entry), Some(ring)) => ring.cancel(entry),
                    _ if fine && !mark.durable => {
                        self.shared.acknowledge();
                    }
                    _ => {}
                }
            }
        }
        Answered::Done
    }

    /// Handles the answer to a FLUSH of this end, ahead of a write or not. No user waits for it, so
    /// after a failure other FLUSHes must report the loss.
    fn flushed_unasked(&self, tag: Tag, horizon: u64, fine: bool) {
        let mode = self.shared.on_loss();
        let needs_room = self.starving == Some(tag);
        if fine && needs_room {
            self.shared.make_room(horizon);
        } else if fine {
            self.shared.made_durable(horizon);
        } else if mode == OnLoss::UntilRemount && !needs_room {
            self.lose_but_keep_copies(horizon);
        } else {
            if mode == OnLoss::Once || !self.shared.fails_every_flush() {
                tell_failed(mode);
            }
            self.shared.lose(horizon);
        }
    }

    /// Handles the answer to a FLUSH of a user of the disk.
    fn flushed(&self, horizon: u64, status: Status) -> Answered {
        let tells_all = self.shared.on_loss() == OnLoss::UntilRemount;
        match status {
            Status::Ok => {
                let horizon = match Mutation::FlushScopeAnswer.is_on() {
                    true => self.shared.horizon(),
                    false => horizon,
                };
                self.shared.made_durable(horizon);
                // Also a FLUSH that was sent before the loss: its user has not heard of the loss
                // yet.
                if self.tells_loss_on_success() {
                    return Answered::Lost;
                }
            }
            // Another host has the volume, and the mount is over: `Fenced` does not concern the
            // store.
            Status::Fenced => {}
            _ if tells_all && !Mutation::LossOfFlush.is_on() => self.lose_but_keep_copies(horizon),
            // Only the user that waits for this FLUSH gets the error.
            _ => {}
        }
        Answered::Done
    }

    /// Whether a FLUSH that the target did must fail to report a loss.
    fn tells_loss_on_success(&self) -> bool {
        if Mutation::LossToldOnce.is_on() {
            return self.shared.must_tell(self.shared.losses(), u64::MAX);
        }
        self.shared.fails_every_flush() && !Mutation::ReplaySilentLoss.is_on()
    }

    fn lose_but_keep_copies(&self, horizon: u64) {
        let is_first = !self.shared.fails_every_flush();
        // A target with a broken store may fail every FLUSH: one line is enough.
        if self.shared.lose_but_keep_copies(horizon) && is_first {
            tell_failed(self.shared.on_loss());
        }
    }

    /// Records that a waiting request failed here.
    pub(crate) fn cancelled(&mut self, tag: Tag) {
        if self.starving == Some(tag) {
            self.starving = None;
        }
        let entry = self.mark(tag).and_then(|mark| mark.entry.take());
        if let (Some(entry), Some(ring)) = (entry, &mut self.ring) {
            ring.cancel(entry);
        }
    }

    /// The path of a sent command died: it will not be answered. Its place in the ring is kept for
    /// the next path. Returns whether the command was a FLUSH ahead of the request.
    pub(crate) fn command_lost(&mut self, tag: Tag) -> bool {
        let Some(mark) = self.marks.get_mut(tag.index()) else { return false };
        let was_flush = mark.ahead == Ahead::Sent;
        if was_flush {
            mark.ahead = Ahead::No;
            self.flushing = false;
        }
        was_flush
    }

    /// Whether a write waits for room.
    #[must_use]
    pub(crate) fn has_waiting(&self) -> bool {
        self.starving.is_some()
    }

    /// Copies of the queue's acknowledged writes that no FLUSH covered; `None` when it keeps none.
    #[must_use]
    pub(crate) fn unflushed(&self) -> Option<Vec<Retained>> {
        let durable = self.shared.durable();
        self.ring.as_ref().map(|ring| ring.unflushed(durable))
    }
}

fn tell_failed(mode: OnLoss) {
    tracing::error!(
        rblk_event = "lost-writes",
        on_loss = mode.word(),
        "lost: the target failed a FLUSH, so acknowledged writes may be lost; {}",
        mode.consequence()
    );
}
