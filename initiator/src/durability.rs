//! [`Durability`]: which acknowledged writes of a mount a completed FLUSH covered; [`Ledger`]: the part of one queue
//! in it. No I/O, no clock; a lock only where a loss came or was told.
//!
//! Every acknowledged WRITE, DISCARD and WRITE_ZEROES gets a number, in the order of the acknowledgements of all
//! queues. A FLUSH covers what was numbered when it was sent, whichever queue sent it: the target had done those
//! writes before it could see the FLUSH. So two numbers say it all: how many were acknowledged, and below which all
//! are durable. A write with FUA is durable by itself.
//!
//! When what is between the two may be lost, it is written again from the [`RetainRing`]s of the queues, or the loss
//! is told: the next FLUSH, and every one that waited for an answer then, fails with EIO. Once: what they covered
//! counts as settled, as after a failed `fsync` of a file.
//!
//! A mount that goes on where a dead process left a device does not know what that one acknowledged. It [inherits a
//! doubt](Durability::inheriting): number 0 stands for all of it, and nobody retains it. Any FLUSH closes the doubt;
//! while it is open, a target that lost its memory is a loss to be told, whatever the queues retain. It may also
//! [inherit a loss](Durability::inheriting_loss) that no FLUSH told. Until it has [arrived](Durability::arrived) at the
//! target, a FLUSH may be one that the driver gave to the dead process before: it fails of a loss, and tells none.
//!
//! A queue that retains always has a place for what it sends. A write that finds none sends a FLUSH first, under its
//! own tag, and so does the one that makes the ring more than half full, so that the others need not wait. Only a
//! write longer than the whole ring goes out with FUA instead.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rblk_protocol::{QueueDepth, Tag};
use tokio::sync::Notify;

use crate::io::{Io, IoOp};
use crate::retain::{EntryId, RetainRing, Retained, what_of};

/// The state of a mount, shared by its queues and control.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Durability {
    // Writes acknowledged so far: the number of the next one.
    acknowledged: AtomicU64,
    // Those numbered below are durable, or told to be lost.
    durable: AtomicU64,
    // Those numbered below are a predecessor's and in doubt: 1, or 0 if there are none.
    inherited_below: u64,
    // What is submitted may have been submitted to a predecessor first.
    given_again: AtomicBool,
    losses: AtomicU64,
    // Of all losses: what is lost is numbered below.
    lost_below: AtomicU64,
    // Losses that some FLUSH was failed for which covered all of what is lost.
    told: AtomicU64,
    // Rung when one of the two rises.
    changed: Notify,
    rewritten: AtomicU64,
}

impl Durability {
    /// Nothing was written yet.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A predecessor may have acknowledged writes that no FLUSH covered, and kept nothing of them for us: they count
    /// as one.
    #[must_use]
    pub fn inheriting() -> Arc<Self> {
        Arc::new(Self {
            acknowledged: AtomicU64::new(1),
            inherited_below: 1,
            given_again: AtomicBool::new(true),
            ..Self::default()
        })
    }

    /// A predecessor knew of a loss that no FLUSH had told yet. With `doubt`, what it acknowledged since may not be
    /// durable either.
    #[must_use]
    pub fn inheriting_loss(doubt: bool) -> Arc<Self> {
        Arc::new(Self {
            acknowledged: AtomicU64::new(1),
            durable: AtomicU64::new(u64::from(!doubt)),
            inherited_below: u64::from(doubt),
            given_again: AtomicBool::new(true),
            losses: AtomicU64::new(1),
            lost_below: AtomicU64::new(1),
            ..Self::default()
        })
    }

    /// The target is there, for the first time since a predecessor died: what is submitted from now on was never
    /// submitted before. Told before any queue has its path.
    pub fn arrived(&self) {
        self.given_again.store(false, Ordering::Release);
    }

    /// Whether no FLUSH has covered yet what a predecessor may have left: no queue retains it.
    #[must_use]
    pub fn inherits_doubt(&self) -> bool {
        self.durable() < self.inherited_below
    }

    fn acknowledge(&self) -> u64 {
        self.acknowledged.fetch_add(1, Ordering::AcqRel)
    }

    /// One more than the newest number: what a FLUSH that is sent now will cover, when it is read before.
    #[must_use]
    pub fn horizon(&self) -> u64 {
        self.acknowledged.load(Ordering::Acquire)
    }

    /// Those numbered below are durable.
    #[must_use]
    pub fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// Acknowledged writes that no FLUSH covered.
    #[must_use]
    pub fn unflushed(&self) -> u64 {
        // In this order: the smaller one can only have grown meanwhile.
        let durable = self.durable();
        self.horizon().saturating_sub(durable)
    }

    /// What is numbered below `horizon` is durable now.
    pub fn made_durable(&self, horizon: u64) {
        self.durable.fetch_max(horizon, Ordering::AcqRel);
    }

    /// What is numbered below `horizon` and was not durable may be lost.
    pub fn lose(&self, horizon: u64) {
        // The loss first: who sees the writes settled sees it too, and who sees it sees how far it reaches.
        self.lost_below.fetch_max(horizon, Ordering::AcqRel);
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.made_durable(horizon);
        self.changed.notify_one();
    }

    /// What is numbered below `horizon` is durable now, after that many writes were written again.
    pub fn rewritten(&self, horizon: u64, writes: u64) {
        self.rewritten.fetch_add(writes, Ordering::Relaxed);
        self.made_durable(horizon);
    }

    /// Writes that were written again so far.
    #[must_use]
    pub fn writes_rewritten(&self) -> u64 {
        self.rewritten.load(Ordering::Relaxed)
    }

    /// Losses so far.
    #[must_use]
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    /// Whether a loss waits for a FLUSH to tell it by.
    #[must_use]
    pub fn has_untold_loss(&self) -> bool {
        self.told.load(Ordering::Acquire) < self.losses()
    }

    /// Waits until [`Self::has_untold_loss`] may have changed since the last time. For one who waits. Cancel safe.
    pub async fn loss_changed(&self) {
        self.changed.notified().await;
    }

    /// What a FLUSH that is submitted now is sure to have been meant for: those numbered below. What a predecessor left
    /// is not, as long as that may be a request of its time which is given to us again.
    fn submission(&self) -> u64 {
        if self.given_again.load(Ordering::Acquire) { 0 } else { self.horizon() }
    }

    /// Whether a FLUSH that was submitted after `seen` losses and is meant for those numbered below `meant` must fail.
    /// Whoever gets a yes tells the losses, if they are among them: the next FLUSH has to tell what was acknowledged
    /// after this one had been submitted.
    fn must_tell(&self, seen: u64, meant: u64) -> bool {
        let losses = self.losses();
        let told = if meant >= self.lost_below.load(Ordering::Acquire) {
            self.told.fetch_max(losses, Ordering::AcqRel)
        } else {
            self.told.load(Ordering::Acquire)
        };
        if told < losses {
            self.changed.notify_one();
        }
        told < losses || seen < losses
    }
}

/// How to send a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plan {
    /// As it is.
    Send {
        /// It must be durable when it is answered.
        fua: bool,
    },
    /// A FLUSH under its tag; the answer is not the request's.
    FlushAhead,
    /// Not now: ask again after an answer.
    Wait,
}

/// What an answer means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answered {
    /// The request is done.
    Done,
    /// It was that of a FLUSH ahead of the request, which is to be planned again.
    Again,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Ahead {
    #[default]
    No,
    Sent,
    Done,
}

/// What is known of a request by its tag.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    // Its place in the ring.
    entry: Option<EntryId>,
    // It was sent to be durable when answered.
    durable: bool,
    // What the FLUSH sent under the tag covers.
    horizon: u64,
    // Losses when it was submitted.
    losses: u64,
    // What it is meant for, if it is a FLUSH.
    meant: u64,
    ahead: Ahead,
}

/// One queue's part: asked about each request when it is sent and answered. Allocates nothing after it was made.
#[derive(Debug)]
pub struct Ledger {
    shared: Arc<Durability>,
    ring: Option<RetainRing>,
    marks: Box<[Mark]>,
    // A FLUSH ahead of a write is under way: one at a time.
    flushing: bool,
    // The first that found no room: the writes behind it wait, so that it gets the next.
    starving: Option<Tag>,
}

impl Ledger {
    /// A queue's ledger; with a ring it retains.
    #[must_use]
    pub fn new(shared: Arc<Durability>, depth: QueueDepth, ring: Option<RetainRing>) -> Self {
        let marks = vec![Mark::default(); usize::from(depth.get())].into_boxed_slice();
        Self { shared, ring, marks, flushing: false, starving: None }
    }

    fn mark(&mut self, tag: Tag) -> Option<&mut Mark> {
        self.marks.get_mut(tag.index())
    }

    /// A request came.
    pub fn submitted(&mut self, tag: Tag) {
        let (losses, meant) = (self.shared.losses(), self.shared.submission());
        if let Some(mark) = self.mark(tag) {
            *mark = Mark { losses, meant, ..Mark::default() };
        }
    }

    /// Whether a FLUSH must fail instead of being sent, to tell a loss. Ask once, and do as it says.
    #[must_use]
    pub fn must_fail(&mut self, tag: Tag, io: &Io) -> bool {
        let mark = self.marks.get(tag.index()).copied().unwrap_or_default();
        io.op == IoOp::Flush && self.shared.must_tell(mark.losses, mark.meant)
    }

    /// How to send a request that waits. [`Plan::Send`] and [`Plan::FlushAhead`] have to be carried out.
    pub fn plan(&mut self, tag: Tag, io: &Io) -> Plan {
        let Some(mark) = self.marks.get_mut(tag.index()) else { return Plan::Send { fua: io.fua } };
        match io.op {
            IoOp::Read => return Plan::Send { fua: false },
            IoOp::Flush => {
                mark.horizon = self.shared.horizon();
                return Plan::Send { fua: false };
            }
            IoOp::Write | IoOp::Discard | IoOp::WriteZeroes => {}
        }
        let Some(ring) = &mut self.ring else {
            mark.durable = io.fua && io.op == IoOp::Write;
            return Plan::Send { fua: mark.durable };
        };
        if mark.entry.is_some() {
            // Sent before, by a path that died.
            return Plan::Send { fua: mark.durable };
        }
        if self.starving.is_some_and(|first| first != tag) {
            return Plan::Wait;
        }
        let durable = self.shared.durable();
        ring.release(durable);
        let helps = !self.flushing && ring.has_unflushed(durable);
        let mut plan = Plan::Wait;
        if !(helps && mark.ahead == Ahead::No && ring.is_crowded()) {
            let too_long = io.data_bytes as usize > ring.capacity_bytes();
            mark.durable = io.op == IoOp::Write && (io.fua || too_long);
            match ring.reserve(what_of(io, mark.durable), io) {
                Ok(entry) => {
                    mark.entry = Some(entry);
                    self.starving = None;
                    return Plan::Send { fua: mark.durable };
                }
                Err(_) => self.starving = Some(tag),
            }
        }
        if helps {
            mark.ahead = Ahead::Sent;
            mark.horizon = self.shared.horizon();
            self.flushing = true;
            plan = Plan::FlushAhead;
        }
        plan
    }

    /// What was sent under a tag was answered. `copy` copies data out of the tag's buffer, from that offset on.
    pub fn answered(
        &mut self,
        tag: Tag,
        io: &Io,
        fine: bool,
        copy: impl FnMut(usize, &mut [u8]),
    ) -> Answered {
        let Some(mark) = self.marks.get_mut(tag.index()) else { return Answered::Done };
        if mark.ahead == Ahead::Sent {
            mark.ahead = Ahead::Done;
            self.flushing = false;
            if fine {
                self.shared.made_durable(mark.horizon);
            } else {
                // Nobody waits for this FLUSH, so the next one has to say it.
                tracing::error!("the target failed to make writes durable: the next FLUSH fails");
                self.shared.lose(mark.horizon);
            }
            return Answered::Again;
        }
        match io.op {
            IoOp::Read => {}
            IoOp::Flush if fine => self.shared.made_durable(mark.horizon),
            IoOp::Flush => {}
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

    /// A request that waited was failed here.
    pub fn cancelled(&mut self, tag: Tag) {
        if self.starving == Some(tag) {
            self.starving = None;
        }
        let entry = self.mark(tag).and_then(|mark| mark.entry.take());
        if let (Some(entry), Some(ring)) = (entry, &mut self.ring) {
            ring.cancel(entry);
        }
    }

    /// The path died: nothing that was sent will be answered. Places in the ring are kept for the next path.
    pub fn path_lost(&mut self) {
        self.flushing = false;
        for mark in &mut self.marks {
            if mark.ahead == Ahead::Sent {
                mark.ahead = Ahead::No;
            }
        }
    }

    /// Whether a write waits for room.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        self.starving.is_some()
    }

    /// Copies of the queue's acknowledged writes that no FLUSH covered; `None` when it keeps none.
    #[must_use]
    pub fn unflushed(&self) -> Option<Vec<Retained>> {
        let durable = self.shared.durable();
        self.ring.as_ref().map(|ring| ring.unflushed(durable))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rblk_protocol::BlockSize;

    fn io(op: IoOp, block: u64, blocks: u64) -> Io {
        Io::new(op, block * 512, blocks * 512, BlockSize::new(512).unwrap()).unwrap()
    }

    fn flush() -> Io {
        io(IoOp::Flush, 0, 0)
    }

    fn ledger(shared: &Arc<Durability>, ring: Option<RetainRing>) -> Ledger {
        Ledger::new(Arc::clone(shared), QueueDepth::new(8).unwrap(), ring)
    }

    fn send(ledger: &mut Ledger, tag: u16, io: &Io) -> Plan {
        ledger.submitted(Tag(tag));
        ledger.plan(Tag(tag), io)
    }

    fn answer(ledger: &mut Ledger, tag: u16, io: &Io, fine: bool) -> Answered {
        ledger.answered(Tag(tag), io, fine, |_, piece| piece.fill(7))
    }

    const AS_IT_IS: Plan = Plan::Send { fua: false };

    #[test]
    fn a_flush_covers_what_was_acknowledged_before_it_on_any_queue() {
        let shared = Durability::new();
        let (mut a, mut b) = (ledger(&shared, None), ledger(&shared, None));
        let write = io(IoOp::Write, 0, 1);
        assert_eq!(send(&mut a, 0, &write), AS_IT_IS);
        assert_eq!(send(&mut a, 1, &write), AS_IT_IS);
        assert_eq!(shared.unflushed(), 0, "nothing is acknowledged");
        answer(&mut a, 0, &write, true);
        assert_eq!(send(&mut b, 0, &flush()), AS_IT_IS);
        answer(&mut a, 1, &write, true);
        assert_eq!(shared.unflushed(), 2);
        answer(&mut b, 0, &flush(), true);
        assert_eq!(shared.unflushed(), 1, "the one answered after the FLUSH was sent");
        for (op, fine) in [(IoOp::Discard, true), (IoOp::WriteZeroes, true), (IoOp::Write, false)] {
            let io = io(op, 0, 1);
            send(&mut a, 0, &io);
            answer(&mut a, 0, &io, fine);
        }
        let fua = Io { fua: true, ..write };
        assert_eq!(send(&mut a, 0, &fua), Plan::Send { fua: true });
        answer(&mut a, 0, &fua, true);
        assert_eq!(shared.unflushed(), 3);
        send(&mut b, 0, &flush());
        answer(&mut b, 0, &flush(), false);
        assert_eq!(shared.unflushed(), 3, "a FLUSH that failed");
    }

    #[test]
    fn a_flush_is_planned_anew_on_a_new_path() {
        let shared = Durability::new();
        let mut a = ledger(&shared, None);
        let write = io(IoOp::Write, 0, 1);
        send(&mut a, 0, &flush());
        send(&mut a, 1, &write);
        answer(&mut a, 1, &write, true);
        a.path_lost();
        a.plan(Tag(0), &flush());
        answer(&mut a, 0, &flush(), true);
        assert_eq!(shared.unflushed(), 0);
    }

    #[test]
    fn a_loss_is_told_once_and_to_all_who_waited() {
        let shared = Durability::new();
        let (mut a, mut b) = (ledger(&shared, None), ledger(&shared, None));
        for tag in 0..2 {
            a.submitted(Tag(tag));
        }
        assert!(!a.must_fail(Tag(0), &flush()));
        shared.lose(shared.horizon());
        assert!(shared.has_untold_loss());
        assert!(!a.must_fail(Tag(0), &io(IoOp::Write, 0, 1)));
        assert!(a.must_fail(Tag(0), &flush()));
        assert!(!shared.has_untold_loss());
        assert!(a.must_fail(Tag(1), &flush()), "it covered what is lost, too");
        b.submitted(Tag(0));
        assert!(!b.must_fail(Tag(0), &flush()), "it came after the loss was told");
        // With nobody waiting, the next one.
        shared.lose(shared.horizon());
        b.submitted(Tag(0));
        assert!(b.must_fail(Tag(0), &flush()));
        b.submitted(Tag(0));
        assert!(!b.must_fail(Tag(0), &flush()));
        assert_eq!(shared.losses(), 2);
    }

    #[test]
    fn what_a_predecessor_left_is_in_doubt_until_a_flush() {
        assert!(!Durability::new().inherits_doubt());
        let shared = Durability::inheriting();
        let mut a = ledger(&shared, Some(RetainRing::new(4096, 64)));
        assert!(shared.inherits_doubt());
        assert_eq!((shared.unflushed(), shared.losses()), (1, 0), "nothing is lost yet");
        // Our own write is retained; what is in doubt is not.
        let write = io(IoOp::Write, 0, 1);
        send(&mut a, 0, &write);
        answer(&mut a, 0, &write, true);
        assert_eq!((shared.unflushed(), a.unflushed().unwrap().len()), (2, 1));
        assert!(shared.inherits_doubt());
        // A FLUSH that fails covers nothing.
        send(&mut a, 1, &flush());
        answer(&mut a, 1, &flush(), false);
        assert!(shared.inherits_doubt());
        send(&mut a, 1, &flush());
        answer(&mut a, 1, &flush(), true);
        assert!(!shared.inherits_doubt());
        assert_eq!((shared.unflushed(), shared.losses()), (0, 0));
    }

    #[test]
    fn a_doubt_that_became_a_loss_is_told_once() {
        let shared = Durability::inheriting();
        let mut a = ledger(&shared, None);
        shared.lose(shared.horizon());
        assert!(!shared.inherits_doubt(), "it is settled");
        shared.arrived();
        a.submitted(Tag(0));
        assert!(a.must_fail(Tag(0), &flush()));
        a.submitted(Tag(0));
        assert!(!a.must_fail(Tag(0), &flush()));
    }

    #[test]
    fn a_flush_from_before_the_lost_write_does_not_tell_it_to_the_next() {
        let shared = Durability::new();
        let mut a = ledger(&shared, None);
        let write = io(IoOp::Write, 0, 1);
        a.submitted(Tag(0));
        send(&mut a, 1, &write);
        answer(&mut a, 1, &write, true);
        a.submitted(Tag(2));
        shared.lose(shared.horizon());
        assert!(a.must_fail(Tag(0), &flush()), "it waited");
        assert!(shared.has_untold_loss(), "whoever wrote may not know of that FLUSH");
        assert!(a.must_fail(Tag(2), &flush()));
        assert!(!shared.has_untold_loss());
        a.submitted(Tag(0));
        assert!(!a.must_fail(Tag(0), &flush()));
        // Those that are given to a successor again are from before, too.
        let shared = Durability::inheriting();
        let mut a = ledger(&shared, None);
        a.submitted(Tag(0));
        shared.lose(shared.horizon());
        assert!(a.must_fail(Tag(0), &flush()));
        shared.arrived();
        a.submitted(Tag(0));
        assert!(a.must_fail(Tag(0), &flush()));
        a.submitted(Tag(0));
        assert!(!a.must_fail(Tag(0), &flush()));
    }

    #[test]
    fn an_inherited_loss_is_told_to_whoever_came_after_the_dead_process() {
        for doubt in [false, true] {
            let shared = Durability::inheriting_loss(doubt);
            assert!(shared.has_untold_loss());
            assert_eq!((shared.inherits_doubt(), shared.unflushed()), (doubt, u64::from(doubt)));
            let mut a = ledger(&shared, None);
            // The driver gives these again: whoever wrote what is lost may have sent neither.
            a.submitted(Tag(0));
            a.submitted(Tag(1));
            shared.arrived();
            assert!(a.must_fail(Tag(0), &flush()) && a.must_fail(Tag(1), &flush()));
            assert!(shared.has_untold_loss());
            a.submitted(Tag(0));
            assert!(a.must_fail(Tag(0), &flush()));
            assert!(!shared.has_untold_loss());
            // It ends: the next one is sent, and settles what is in doubt.
            assert_eq!(send(&mut a, 0, &flush()), AS_IT_IS);
            assert!(!a.must_fail(Tag(0), &flush()));
            answer(&mut a, 0, &flush(), true);
            assert_eq!((shared.unflushed(), shared.inherits_doubt()), (0, false));
        }
        // With nobody waiting, it is told at once and once.
        let shared = Durability::inheriting_loss(true);
        let mut a = ledger(&shared, None);
        shared.arrived();
        a.submitted(Tag(0));
        assert!(a.must_fail(Tag(0), &flush()));
        a.submitted(Tag(0));
        assert!(!a.must_fail(Tag(0), &flush()));
    }

    #[test]
    fn a_full_ring_is_flushed() {
        let shared = Durability::new();
        let mut a = ledger(&shared, Some(RetainRing::new(2048, 64)));
        let write = io(IoOp::Write, 0, 1);
        for tag in 0..3 {
            assert_eq!(send(&mut a, tag, &write), AS_IT_IS);
        }
        // More than half is used, but there is nothing that a FLUSH would cover.
        assert_eq!(send(&mut a, 3, &write), AS_IT_IS);
        assert_eq!(send(&mut a, 4, &write), Plan::Wait, "no room");
        assert!(a.has_waiting());
        answer(&mut a, 0, &write, true);
        assert_eq!(send(&mut a, 5, &write), Plan::Wait, "behind the one that waits");
        assert_eq!(a.plan(Tag(4), &write), Plan::FlushAhead);
        assert_eq!(a.plan(Tag(5), &write), Plan::Wait);
        // Reads and FLUSHes do not wait.
        assert_eq!(send(&mut a, 6, &io(IoOp::Read, 0, 1)), AS_IT_IS);
        assert_eq!(answer(&mut a, 4, &write, true), Answered::Again);
        assert_eq!(shared.unflushed(), 0);
        assert_eq!(a.plan(Tag(4), &write), AS_IT_IS);
        assert!(!a.has_waiting());
        assert_eq!(answer(&mut a, 4, &write, true), Answered::Done);
        let kept = a.unflushed().unwrap();
        assert_eq!((kept.len(), kept[0].number, kept[0].data.len()), (1, 1, 512));
        // One of those that wait for an answer is failed instead: its place comes back.
        a.cancelled(Tag(5));
        a.path_lost();
        assert_eq!(a.plan(Tag(1), &write), AS_IT_IS, "its place was kept");
    }

    #[test]
    fn half_a_ring_is_flushed_ahead_without_making_others_wait() {
        let shared = Durability::new();
        let mut a = ledger(&shared, Some(RetainRing::new(2048, 64)));
        let write = io(IoOp::Write, 0, 1);
        for tag in 0..3 {
            assert_eq!(send(&mut a, tag, &write), AS_IT_IS);
            answer(&mut a, tag, &write, true);
        }
        assert_eq!(send(&mut a, 0, &write), Plan::FlushAhead);
        assert_eq!(send(&mut a, 1, &write), AS_IT_IS, "half a ring is left");
        // The path dies: the FLUSH goes out again.
        a.path_lost();
        assert_eq!(a.plan(Tag(0), &write), Plan::FlushAhead);
        assert_eq!(answer(&mut a, 0, &write, false), Answered::Again);
        assert!(shared.has_untold_loss(), "nobody else would say that it failed");
        assert_eq!(a.plan(Tag(0), &write), AS_IT_IS);
    }

    #[test]
    fn what_is_longer_than_the_ring_is_durable_at_once() {
        let shared = Durability::new();
        let mut a = ledger(&shared, Some(RetainRing::new(1024, 64)));
        let long = io(IoOp::Write, 0, 3);
        assert_eq!(send(&mut a, 0, &long), Plan::Send { fua: true });
        answer(&mut a, 0, &long, true);
        let kept = a.unflushed().unwrap();
        assert_eq!(kept[0].what, crate::retain::What::Durable);
        assert!(kept[0].data.is_empty());
    }

    proptest! {
        /// Whatever the sizes: while answers come, every write is sent and answered in the end, and each
        /// acknowledged one is durable or retained at every moment.
        #[test]
        fn no_write_is_forgotten_or_stuck(
            steps in prop::collection::vec((0u16..8, 0u8..12, 1u64..7), 1..300),
            blocks in 1usize..16,
            entries in 1usize..12,
        ) {
            #[derive(Clone, Copy, PartialEq, Debug)]
            enum State { Idle, Queued(Io), Sent(Io) }
            let shared = Durability::new();
            let mut a = ledger(&shared, Some(RetainRing::new(blocks * 512, entries)));
            let mut states = [State::Idle; 8];
            let mut acknowledged = 0;
            let mut turn = |a: &mut Ledger, states: &mut [State; 8], tag: u16, answered: bool| {
                let at = usize::from(tag);
                if let (State::Sent(io), true) = (states[at], answered) {
                    states[at] = match answer(a, tag, &io, true) {
                        Answered::Again => State::Queued(io),
                        Answered::Done => {
                            acknowledged += u64::from(!matches!(io.op, IoOp::Read | IoOp::Flush));
                            State::Idle
                        }
                    };
                }
                for at in 0..8u16 {
                    if let State::Queued(io) = states[usize::from(at)]
                        && a.plan(Tag(at), &io) != Plan::Wait
                    {
                        states[usize::from(at)] = State::Sent(io);
                    }
                }
                let kept = a.unflushed().unwrap().len() as u64;
                prop_assert_eq!(shared.horizon(), acknowledged);
                prop_assert_eq!(shared.unflushed(), kept, "durable or retained");
                Ok(())
            };
            for (tag, kind, blocks) in steps {
                if states[usize::from(tag)] == State::Idle {
                    let op = match kind {
                        0 => IoOp::Flush,
                        1 => IoOp::Discard,
                        2 => IoOp::WriteZeroes,
                        3 => IoOp::Read,
                        _ => IoOp::Write,
                    };
                    let mut io = if op == IoOp::Flush { flush() } else { io(op, 0, blocks) };
                    io.fua = kind == 4;
                    a.submitted(Tag(tag));
                    states[usize::from(tag)] = State::Queued(io);
                } else if kind == 11 {
                    a.path_lost();
                    for state in &mut states {
                        if let State::Sent(io) = *state {
                            *state = State::Queued(io);
                        }
                    }
                }
                turn(&mut a, &mut states, tag, kind % 2 == 0)?;
            }
            for _ in 0..100 {
                for tag in 0..8 {
                    turn(&mut a, &mut states, tag, true)?;
                }
            }
            prop_assert_eq!(states, [State::Idle; 8]);
        }
    }
}
