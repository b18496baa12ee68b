//! [`Reservation`] and [`CqRoom`]: which QPs may fill how much of a CQ.
//!
//! A QP holds room for all its WRs until it is destroyed and the CQ was found empty after that. The
//! flushes of a QP may come as long as the QP lives. Some drivers (rxe) leave completions of a
//! destroyed QP in the CQ. If that room were given to another QP earlier, the CQ could overrun.

use std::sync::Arc;

use super::CompletionQueue;

/// The room of a QP in its CQ. Drop it after the QP is destroyed.
#[derive(Debug)]
pub(in crate::verbs) struct Reservation {
    queue: Arc<CompletionQueue>,
    entries: u64,
    // The poller counts the entries as reserved.
    taken: bool,
}

impl Reservation {
    /// A reservation of `entries`, which are not taken yet.
    pub(in crate::verbs) fn new(queue: &Arc<CompletionQueue>, entries: u64) -> Self {
        Self { queue: Arc::clone(queue), entries, taken: false }
    }

    /// The CQ.
    pub(in crate::verbs) fn queue(&self) -> &Arc<CompletionQueue> {
        &self.queue
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.taken {
            self.queue.release(self.entries);
        }
    }
}

/// The room of a CQ, as its poller gives it out. Never more than the CQ has.
#[derive(Debug)]
pub(in crate::verbs) struct CqRoom {
    entries: u64,
    // Entries of QPs that are not destroyed, or were destroyed after the CQ was last found empty.
    reserved: u64,
    // The part of `CompletionQueue::released` that is taken off `reserved`.
    returned: u64,
}

impl CqRoom {
    /// The room of a CQ with `entries` entries.
    pub(in crate::verbs) fn new(entries: u64) -> Self {
        Self { entries, reserved: 0, returned: 0 }
    }

    /// Entries in all.
    pub(in crate::verbs) fn entries(&self) -> u64 {
        self.entries
    }

    /// Takes the room of a QP, unless it was taken before.
    ///
    /// # Errors
    /// The entries that would be reserved in all, which is more than there are.
    pub(in crate::verbs) fn take(&mut self, reservation: &mut Reservation) -> Result<(), u64> {
        if reservation.taken {
            return Ok(());
        }
        let reserved = self.reserved + reservation.entries;
        if reserved > self.entries {
            return Err(reserved);
        }
        self.reserved = reserved;
        reservation.taken = true;
        Ok(())
    }

    /// Records that the CQ was found empty. `released`: the value of [`CompletionQueue::released`]
    /// before that.
    #[inline]
    pub(in crate::verbs) fn found_empty(&mut self, released: u64) {
        self.reserved -= released - self.returned;
        self.returned = released;
    }
}
