//! [`Burials`]: QPs of dead connections, destroyed where nothing waits for it.
//!
//! Some drivers destroy the QP of a silent peer only when that has timed out, and a host that was
//! cut off has one for every queue: control, which every other host's LOGIN and OPEN needs, does
//! not wait for them. The order stays: first the QP, then its poll group gives back what was lent
//! to its device, then its memory is freed, and only then comes the news on which control gives the
//! volume to somebody else.

use rblk_fabric::{Connection, MemoryRegion};
use rblk_protocol::{ConnectionKind, Epoch};
use tokio::sync::mpsc;

use crate::connection::{ConnectionId, SessionSlot};

/// What is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Buried {
    /// Nothing of a connection is in use any more.
    Gone {
        /// Its session's place.
        session: SessionSlot,
        /// What it was.
        kind: ConnectionKind,
        /// Its epoch.
        epoch: Epoch,
    },
    /// The QP of a connection that ended is destroyed, for which its poll group waits.
    Destroyed {
        /// The poll group.
        group: usize,
        /// The connection.
        connection: ConnectionId,
    },
}

/// Where burials are begun.
#[derive(Debug)]
pub(super) struct Burials {
    over: mpsc::UnboundedSender<Buried>,
}

/// Tells of a burial when it is dropped.
#[derive(Debug)]
pub(super) struct Bell {
    over: mpsc::UnboundedSender<Buried>,
    buried: Buried,
}

impl Drop for Bell {
    fn drop(&mut self) {
        // Control is gone: nobody waits.
        let _ = self.over.send(self.buried);
    }
}

impl Burials {
    /// Burials, and where is told what is over.
    pub(super) fn new() -> (Self, mpsc::UnboundedReceiver<Buried>) {
        let (over, buried) = mpsc::unbounded_channel();
        (Self { over }, buried)
    }

    /// Destroys a QP, if there still is one, and frees its memory; `buried` is told when both are
    /// done.
    pub(super) fn bury(
        &self,
        qp: Option<Connection>,
        memory: Option<MemoryRegion>,
        buried: Buried,
    ) {
        self.begin(memory, buried, |rest| match qp {
            Some(qp) => qp.retire(rest),
            None => drop(rest),
        });
    }

    /// `retire` destroys, and drops what it is given afterwards, now or later.
    fn begin<M>(&self, memory: M, buried: Buried, retire: impl FnOnce((M, Bell))) {
        // Dropped in this order.
        retire((memory, Bell { over: self.over.clone(), buried }));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use super::*;

    type Told = Arc<Mutex<mpsc::UnboundedReceiver<Buried>>>;

    fn next(told: &Told) -> Option<Buried> {
        told.lock().unwrap().try_recv().ok()
    }

    /// Notes that it is freed, if nothing was told before.
    struct Memory(Told, Arc<AtomicBool>);

    impl Drop for Memory {
        fn drop(&mut self) {
            self.1.store(next(&self.0).is_none(), Ordering::Relaxed);
        }
    }

    #[test]
    fn what_takes_long_is_told_when_it_is_over() {
        let (burials, told) = Burials::new();
        let told = Arc::new(Mutex::new(told));
        let freed = Arc::new(AtomicBool::new(false));
        let gone = |epoch| Buried::Gone {
            session: SessionSlot(3),
            kind: ConnectionKind::Io { queue: 1 },
            epoch: Epoch(epoch),
        };
        // A kernel that takes its time.
        let mut slow = None;
        let memory = Memory(Arc::clone(&told), Arc::clone(&freed));
        burials.begin(memory, gone(1), |rest| slow = Some(rest));
        assert_eq!(next(&told), None);
        // Another is not held up.
        burials.bury(None, None, gone(2));
        assert_eq!(next(&told), Some(gone(2)));
        assert_eq!(next(&told), None);
        assert!(!freed.load(Ordering::Relaxed));
        drop(slow);
        assert!(freed.load(Ordering::Relaxed), "the memory first");
        assert_eq!(next(&told), Some(gone(1)));
    }
}
