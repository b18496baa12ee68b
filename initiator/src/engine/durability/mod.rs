//! [`Durability`]: tracks which acknowledged writes of a mount a completed FLUSH covered, and
//! whether any of them may be lost. [`Ledger`]: the part of one queue in it. No I/O, no clock;
//! takes a lock only after a new or reported loss.
//!
//! Every acknowledged WRITE, DISCARD and WRITE_ZEROES gets a number, in the order of the
//! acknowledgements of all queues. A FLUSH covers the writes numbered before it was sent, of every
//! queue: the target had done those writes before it could see the FLUSH. So two numbers are
//! enough: the number of acknowledged writes, and the number below which all are durable. A write
//! with FUA is durable by itself.
//!
//! When the target lost the writes between the two numbers, they are written again from the
//! [`RetainRing`]s of the queues, or they are a loss. [`OnLoss`] selects the FLUSHes that report a
//! loss:
//!
//! - [`OnLoss::UntilRemount`]: every FLUSH that is answered after the loss, as long as the mount
//!   lives. A loss never counts as reported: the note of the mount carries it to the next process.
//!   A FLUSH is still sent, so that new writes become as durable as they can. The user gets EIO
//!   after a FLUSH that the target has done, else the target's error.
//! - [`OnLoss::Once`]: the next FLUSH, and every FLUSH that waited for an answer then. The writes
//!   that they covered count as settled, as after a failed `fsync` of a file.
//!
//! A FLUSH that the target answers with an error may mean that acknowledged writes are gone. The
//! block layer reports that only to the user that waited for this FLUSH. So with `UntilRemount`
//! that FLUSH is a loss, too: the other users of the disk learn of it even when the target restarts
//! and forgets. With `Once` the FLUSH has reported it.
//!
//! Such a FLUSH drops no retained copy. The target may start again without its memory, and then the
//! copies bring the writes back. The loss stays: some user already got the error. Copies are
//! dropped when a write needs their room and the FLUSH for that room does not give it: else the
//! write would wait indefinitely. With `Once` every FLUSH for room that fails drops the copies.
//!
//! A target may refuse some copies when they are written again, for example while its volume is
//! read-only. That is a loss. With `UntilRemount` the mount [holds](Durability::hold_copies) all
//! copies then: a FLUSH makes no write durable that the target does not have, so copies stay over
//! FLUSHes that succeed, and the next connection tries again. Meanwhile every FLUSH fails, so no
//! user takes the disk for sound. With `Once` the copies are dropped: the user got the error and
//! goes on with the older data, which must not change later.
//!
//! A mount that recovers the device of a dead process does not know which writes that process
//! acknowledged. It [inherits a doubt](Durability::inheriting): number 0 stands for all of them,
//! and no queue retains them. Any FLUSH closes the doubt. While the doubt is open, a target that
//! lost its memory is a loss, even if the queues retain every newer write. The mount may also
//! [inherit a loss](Durability::inheriting_loss) that the dead process had to report. With `Once`,
//! until the mount has [arrived](Durability::arrived) at the target, a FLUSH may be one that the
//! driver gave to the dead process before: it fails because of a loss, but does not report it.
//!
//! A queue with a retain ring keeps a place for each write that it sends. A write without a free
//! place first sends a FLUSH under its own tag. So does the write that makes the ring more than
//! half full, so that the others need not wait. No user asked for these FLUSHes, so they do not
//! fail after a loss. Only a write longer than the whole ring goes out with FUA instead. A process
//! that leaves a guest sends an unasked FLUSH, too: a loss that it finds is reported by the FLUSHes
//! of the guest.

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
pub(crate) use ledger::{Answered, SendPlan};

#[cfg(doc)]
use self::retain::RetainRing;

/// The state of a mount, shared by its queues and control.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Durability {
    on_loss: OnLoss,
    // The number of acknowledged writes, which is also the number of the next one.
    acknowledged: AtomicU64,
    // Writes numbered below this are durable, or reported lost.
    durable: AtomicU64,
    // Writes numbered below this are a predecessor's and in doubt: 1, or 0 if there are none.
    inherited_below: u64,
    // New requests may have been submitted to a predecessor first.
    given_again: AtomicBool,
    losses: AtomicU64,
    // Lost writes of all losses are numbered below this.
    lost_below: AtomicU64,
    // Losses that were reported by a FLUSH that covered all lost writes. Stays 0 with
    // `UntilRemount`.
    told: AtomicU64,
    // Notified when `losses` or `told` rises.
    changed: Notify,
    rewritten: AtomicU64,
    // The target refused copies, and they are held. Set only while no queue has a path.
    holds_copies: AtomicBool,
}

impl Durability {
    /// An account without writes.
    #[must_use]
    pub fn new(on_loss: OnLoss) -> Arc<Self> {
        Arc::new(Self { on_loss, ..Self::default() })
    }

    /// A predecessor may have acknowledged writes that no FLUSH covered, and left no copies to us:
    /// they count as one.
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

    /// A predecessor had a loss to report. With `doubt`, its later writes may not be durable
    /// either.
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

    /// The target is connected, for the first time since a predecessor died: requests submitted
    /// after this were never submitted before. Call it before any queue has its path.
    pub fn arrived(&self) {
        self.given_again.store(false, Ordering::Release);
    }

    /// Whether no FLUSH has covered the predecessor's writes yet: no queue retains them.
    #[must_use]
    pub fn inherits_doubt(&self) -> bool {
        self.durable() < self.inherited_below
    }

    fn acknowledge(&self) -> u64 {
        self.acknowledged.fetch_add(1, Ordering::AcqRel)
    }

    /// The number of the next write. A FLUSH that is sent after this was read covers the writes
    /// numbered below it.
    #[must_use]
    pub(crate) fn horizon(&self) -> u64 {
        self.acknowledged.load(Ordering::Acquire)
    }

    /// Writes numbered below this are durable.
    #[must_use]
    pub(crate) fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// Acknowledged writes that no FLUSH covered.
    #[must_use]
    pub fn unflushed(&self) -> u64 {
        // In this order: `durable` can only have been smaller.
        let durable = self.durable();
        self.horizon().saturating_sub(durable)
    }

    /// Records a FLUSH that covered the writes numbered below `horizon` and succeeded.
    pub(crate) fn made_durable(&self, horizon: u64) {
        if !self.holds_copies() {
            self.settle_below(horizon);
        }
    }

    /// Writes numbered below `horizon` need no copies any more.
    fn settle_below(&self, horizon: u64) {
        self.holds_copies.store(false, Ordering::Release);
        self.durable.fetch_max(horizon, Ordering::AcqRel);
    }

    /// Writes numbered below `horizon` that were not durable may be lost, and their copies are
    /// useless.
    pub(crate) fn lose(&self, horizon: u64) {
        // The loss first: a thread that sees the writes settled also sees the loss, and a thread
        // that sees the loss sees its full extent.
        self.lost_below.fetch_max(horizon, Ordering::AcqRel);
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.settle_below(horizon);
        self.changed.notify_one();
    }

    /// Writes numbered below `horizon` that were not durable may be lost: a FLUSH that covered them
    /// failed. Their copies stay, for a target that starts again. Returns false if no write was
    /// acknowledged since the last loss, which was reported already.
    pub(crate) fn lose_but_keep_copies(&self, horizon: u64) -> bool {
        let before = self.lost_below.fetch_max(horizon, Ordering::AcqRel);
        if before >= horizon && self.losses() > 0 {
            return false;
        }
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_one();
        true
    }

    /// The target refused some writes numbered below `horizon` when they were written again: that
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

    /// The target has all writes now, and none is durable yet: a FLUSH that succeeds frees the
    /// copies. No queue has a path.
    pub(crate) fn wrote_copies(&self) {
        self.holds_copies.store(false, Ordering::Release);
    }

    /// Whether there are copies that the target refused. They are written again at the next
    /// connection, even with an unchanged verifier.
    #[must_use]
    pub(crate) fn holds_copies(&self) -> bool {
        self.holds_copies.load(Ordering::Acquire)
    }

    /// A write needs the room of copies numbered below `horizon`, and a FLUSH for that room
    /// succeeded. Held copies are dropped: they were reported lost.
    pub(crate) fn make_room(&self, horizon: u64) {
        self.settle_below(horizon);
    }

    /// Records that writes numbered below `horizon` are durable, after so many writes were written
    /// again.
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

    /// Whether a loss is still to be reported: with `Once`, until a FLUSH reported it; with
    /// `UntilRemount`, from the first loss to the end of the mount.
    #[must_use]
    pub fn has_untold_loss(&self) -> bool {
        self.told.load(Ordering::Acquire) < self.losses()
    }

    /// Whether every FLUSH fails until the end of the mount.
    #[must_use]
    pub fn fails_every_flush(&self) -> bool {
        self.on_loss == OnLoss::UntilRemount && self.losses() > 0
    }

    /// Waits until [`Self::has_untold_loss`] may have changed. For one waiting task only. Cancel
    /// safe.
    pub(crate) async fn loss_changed(&self) {
        self.changed.notified().await;
    }

    /// The writes numbered below this are surely those that a FLUSH submitted now is for. Returns 0
    /// while the driver may give requests from before to this process again: their FLUSHes may be
    /// older than the predecessor's writes.
    fn submission(&self) -> u64 {
        if self.given_again.load(Ordering::Acquire) { 0 } else { self.horizon() }
    }

    /// Whether a FLUSH that was submitted after `seen` losses, for the writes numbered below
    /// `meant`, must fail. A FLUSH that fails reports the losses, if it covers them: the next FLUSH
    /// has to report the loss of writes acknowledged after this one was submitted. With
    /// [`OnLoss::Once`] only.
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
