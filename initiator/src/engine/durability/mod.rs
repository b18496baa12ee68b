//! [`Durability`]: which acknowledged writes of a mount a completed FLUSH covered, and whether any
//! of them may be lost. [`Ledger`]: the part of one queue in it. No I/O, no clock; a lock only
//! where a loss came or was told.
//!
//! Every acknowledged WRITE, DISCARD and WRITE_ZEROES gets a number, in the order of the
//! acknowledgements of all queues. A FLUSH covers what was numbered when it was sent, whichever
//! queue sent it: the target had done those writes before it could see the FLUSH. So two numbers
//! say it all: how many were acknowledged, and below which all are durable. A write with FUA is
//! durable by itself.
//!
//! When the target lost what is between the two, it is written again from the [`RetainRing`]s of
//! the queues, or that is a loss. [`OnLoss`] says which FLUSHes tell of a loss:
//!
//! - [`OnLoss::UntilRemount`]: every FLUSH that is answered after the loss, as long as the mount
//!   lives. A loss never counts as told: the note of the mount carries it to the next process. A
//!   FLUSH is still sent, so that new writes become as durable as they can. The user gets EIO
//!   where the target has done it, else the target's error.
//! - [`OnLoss::Once`]: the next FLUSH, and every FLUSH that waited for an answer then. What they
//!   covered counts as settled, as after a failed `fsync` of a file.
//!
//! A FLUSH that the target answers with an error says that acknowledged writes may be gone. The
//! block layer tells that only to the user that waited for this FLUSH. So with `UntilRemount` that
//! FLUSH is a loss, too: the other users of the disk hear of it even when the target restarts and
//! forgets. With `Once` the FLUSH has told it.
//!
//! Such a FLUSH drops no retained copy. The target may start again without its memory, and then the
//! copies bring the writes back. The loss stays: some user was already told. Copies are dropped
//! when a write needs their room and the FLUSH for that room does not give it: else the write would
//! wait indefinitely. With `Once` every FLUSH for room that fails drops the copies.
//!
//! A target may refuse some copies when they are written again, as when its volume is read-only for
//! a time. That is a loss. With `UntilRemount` the mount [holds](Durability::hold_copies) all
//! copies then: a FLUSH makes no write durable that the target does not have, so copies stay over
//! FLUSHes that succeed, and the next connection tries again. Nobody takes the disk for sound
//! meanwhile. With `Once` they are dropped: the user was told and goes on with the older data,
//! which must not change behind its back.
//!
//! A mount that recovers the device of a dead process does not know what that process acknowledged.
//! It [inherits a doubt](Durability::inheriting): number 0 stands for all of it, and no queue
//! retains it. Any FLUSH closes the doubt. While the doubt is open, a target that lost its memory
//! is a loss, whatever the queues retain. It may also [inherit a loss](Durability::inheriting_loss)
//! that the dead process had to tell. With `Once`, until the mount has
//! [arrived](Durability::arrived) at the target, a FLUSH may be one that the driver gave to the
//! dead process before: it fails of a loss, and tells none.
//!
//! A queue that retains always has a place for what it sends. A write that finds none sends a FLUSH
//! first, under its own tag, and so does the one that makes the ring more than half full, so that
//! the others need not wait. No user asked for these FLUSHes, so they do not fail after a loss.
//! Only a write longer than the whole ring goes out with FUA instead. A process that leaves a guest
//! sends such a FLUSH, too: what it finds is for the FLUSHes of the guest to tell.

mod ledger;
pub mod retain;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rblk_config::OnLoss;
use rblk_protocol::Mutation;
use tokio::sync::Notify;

pub use ledger::Ledger;
pub(crate) use ledger::{Answered, Plan};

#[cfg(doc)]
use self::retain::RetainRing;

/// The state of a mount, shared by its queues and control.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Durability {
    on_loss: OnLoss,
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
    // Losses that some FLUSH was failed for which covered all of what is lost. With `UntilRemount`
    // none ever counts.
    told: AtomicU64,
    // Notified when `losses` or `told` rises.
    changed: Notify,
    rewritten: AtomicU64,
    // The target refused copies, and they are held. Set while no queue has a path.
    holds_copies: AtomicBool,
}

impl Durability {
    /// An account in which nothing was written yet.
    #[must_use]
    pub fn new(on_loss: OnLoss) -> Arc<Self> {
        Arc::new(Self { on_loss, ..Self::default() })
    }

    /// A predecessor may have acknowledged writes that no FLUSH covered, and kept nothing of them
    /// for us: they count as one.
    #[must_use]
    pub fn inheriting(on_loss: OnLoss) -> Arc<Self> {
        Arc::new(Self {
            on_loss,
            acknowledged: AtomicU64::new(1),
            inherited_below: 1,
            given_again: AtomicBool::new(true),
            ..Self::default()
        })
    }

    /// A predecessor knew of a loss that was still to be told. With `doubt`, what it acknowledged
    /// since may not be durable either.
    #[must_use]
    pub fn inheriting_loss(on_loss: OnLoss, doubt: bool) -> Arc<Self> {
        Arc::new(Self {
            on_loss,
            acknowledged: AtomicU64::new(1),
            durable: AtomicU64::new(u64::from(!doubt)),
            inherited_below: u64::from(doubt),
            given_again: AtomicBool::new(true),
            losses: AtomicU64::new(u64::from(!Mutation::LossNotInherited.is_on())),
            lost_below: AtomicU64::new(1),
            ..Self::default()
        })
    }

    /// Which FLUSHes fail after a loss.
    #[must_use]
    pub fn on_loss(&self) -> OnLoss {
        self.on_loss
    }

    /// The target is there, for the first time since a predecessor died: what is submitted from now
    /// on was never submitted before. Told before any queue has its path.
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

    /// One more than the newest number: what a FLUSH that is sent now will cover, when it is read
    /// before.
    #[must_use]
    pub(crate) fn horizon(&self) -> u64 {
        self.acknowledged.load(Ordering::Acquire)
    }

    /// Those numbered below are durable.
    #[must_use]
    pub(crate) fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// Acknowledged writes that no FLUSH covered.
    #[must_use]
    pub fn unflushed(&self) -> u64 {
        // In this order: the smaller one can only have grown meanwhile.
        let durable = self.durable();
        self.horizon().saturating_sub(durable)
    }

    /// A FLUSH that covers what is numbered below `horizon` succeeded.
    pub(crate) fn made_durable(&self, horizon: u64) {
        if !self.holds_copies() {
            self.settle_below(horizon);
        }
    }

    /// Nothing that is numbered below `horizon` has to be kept any more.
    fn settle_below(&self, horizon: u64) {
        self.holds_copies.store(false, Ordering::Release);
        self.durable.fetch_max(horizon, Ordering::AcqRel);
    }

    /// What is numbered below `horizon` and was not durable may be lost, and copies of it are of no
    /// use any more.
    pub(crate) fn lose(&self, horizon: u64) {
        // The loss first: a thread that sees the writes settled also sees the loss, and a thread
        // that sees the loss sees how far it reaches.
        self.lost_below.fetch_max(horizon, Ordering::AcqRel);
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.settle_below(horizon);
        self.changed.notify_one();
    }

    /// What is numbered below `horizon` and was not durable may be lost: a FLUSH that covered it
    /// failed. Copies of it stay, for a target that starts again. Returns false where nothing was
    /// acknowledged since the last loss, which has told it already.
    pub(crate) fn lose_but_keep_copies(&self, horizon: u64) -> bool {
        let before = self.lost_below.fetch_max(horizon, Ordering::AcqRel);
        if before >= horizon && self.losses() > 0 {
            return false;
        }
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_one();
        true
    }

    /// The target refused some of what is numbered below `horizon` when it was written again: that
    /// is a loss. Until a try succeeds, or a write needs the room, FLUSHes free no copies. With
    /// [`OnLoss::Once`] the copies are dropped. No queue has a path.
    pub(crate) fn hold_copies(&self, horizon: u64) {
        match self.on_loss {
            OnLoss::Once => self.lose(horizon),
            OnLoss::UntilRemount => {
                self.lose_but_keep_copies(horizon);
                self.holds_copies.store(true, Ordering::Release);
            }
        }
    }

    /// The target has everything now, and nothing is durable yet: a FLUSH that succeeds frees the
    /// copies. No queue has a path.
    pub(crate) fn wrote_copies(&self) {
        self.holds_copies.store(false, Ordering::Release);
    }

    /// Whether there are copies that the target refused. They are to be written again as soon as
    /// the mount connects again, whatever the verifier says.
    #[must_use]
    pub(crate) fn holds_copies(&self) -> bool {
        self.holds_copies.load(Ordering::Acquire)
    }

    /// A write needs the room of what is numbered below `horizon`, and a FLUSH of that succeeded.
    /// Copies that are held go: they were told to be lost.
    pub(crate) fn make_room(&self, horizon: u64) {
        self.settle_below(horizon);
    }

    /// What is numbered below `horizon` is durable now, after that many writes were written again.
    pub(crate) fn rewritten(&self, horizon: u64, writes: u64) {
        self.rewritten.fetch_add(writes, Ordering::Relaxed);
        self.settle_below(horizon);
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

    /// Whether a loss is still to be told: with `Once`, until a FLUSH told it; with `UntilRemount`,
    /// from the first loss to the end of the mount.
    #[must_use]
    pub fn has_untold_loss(&self) -> bool {
        self.told.load(Ordering::Acquire) < self.losses()
    }

    /// Whether every FLUSH fails from now on, as long as the mount lives.
    #[must_use]
    pub fn fails_every_flush(&self) -> bool {
        self.on_loss == OnLoss::UntilRemount && self.losses() > 0
    }

    /// Waits until [`Self::has_untold_loss`] may have changed since the last time. For one
    /// task that waits. Cancel safe.
    pub(crate) async fn loss_changed(&self) {
        self.changed.notified().await;
    }

    /// A FLUSH that is submitted now is surely meant for the writes numbered below this. It may not
    /// be meant for what a predecessor left, as long as it may be a request from before that the
    /// driver gives to this process again.
    fn submission(&self) -> u64 {
        if self.given_again.load(Ordering::Acquire) { 0 } else { self.horizon() }
    }

    /// Whether a FLUSH that was submitted after `seen` losses and is meant for those numbered below
    /// `meant` must fail. A FLUSH that fails tells the losses, if it covers them: the next FLUSH
    /// has to tell what was acknowledged after this one had been submitted. With [`OnLoss::Once`]
    /// only.
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
