//! [`LeaveGate`]: the queues of a disk leave it together, once each of them holds every request
//! that its disk can have. Pure.

use std::sync::atomic::{AtomicU16, Ordering};

/// Keeps the queues of a disk from leaving while a request may be on its way to one of them.
///
/// Drivers before 6.16 lose a request that is on its way to a thread which ends: see
/// [`UblkQueue::leave`](super::UblkQueue::leave). The disk is limited to a few requests for each
/// queue, fewer than the queue has tags. A queue that holds that many requests has them all: none
/// is on its way. Its other fetches are idle, and show the driver the end of the server at once.
#[derive(Debug)]
pub(crate) struct LeaveGate {
    device: u32,
    // The requests that the disk can have for each queue. 0: the gate is open.
    limit: AtomicU16,
    // By queue: the requests that it has.
    held: Box<[AtomicU16]>,
}

impl LeaveGate {
    /// The gate of a device. Open.
    pub(super) fn new(device: u32, queues: u16) -> Self {
        let held = (0..queues).map(|_| AtomicU16::new(0)).collect();
        Self { device, limit: AtomicU16::new(0), held }
    }

    /// The device.
    pub(super) fn device(&self) -> u32 {
        self.device
    }

    /// Closes the gate of a disk that can have `limit` requests for each queue. It opens when every
    /// queue holds that many.
    pub(super) fn close(&self, limit: u16) {
        self.limit.store(limit, Ordering::Release);
    }

    /// Opens the gate: the queues leave with what they hold.
    pub(super) fn open(&self) {
        self.limit.store(0, Ordering::Release);
    }

    /// The requests that the disk can have for each queue. `None`: the gate is open.
    pub(super) fn limit(&self) -> Option<u16> {
        Some(self.limit.load(Ordering::Acquire)).filter(|limit| *limit > 0)
    }

    /// A queue, which holds so many requests and answers none of them, asks whether it may leave.
    pub(super) fn may_leave(&self, queue: u16, held: u16) -> bool {
        if let Some(of_queue) = self.held.get(usize::from(queue)) {
            of_queue.store(held, Ordering::Release);
        }
        self.is_full()
    }

    /// By queue: the requests that it has.
    pub(super) fn held(&self) -> Vec<u16> {
        self.held.iter().map(|held| held.load(Ordering::Acquire)).collect()
    }

    /// Whether a queue needs more requests before all can leave.
    pub(super) fn wants_more(&self, queue: usize) -> bool {
        let limit = self.limit().unwrap_or(0);
        self.held.get(queue).is_some_and(|held| held.load(Ordering::Acquire) < limit)
    }

    /// Whether every queue has every request, or the gate is open.
    pub(super) fn is_full(&self) -> bool {
        let limit = self.limit().unwrap_or(0);
        self.held.iter().all(|held| held.load(Ordering::Acquire) >= limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_leave_together_when_each_has_every_request() {
        let gate = LeaveGate::new(7, 2);
        assert!(gate.may_leave(0, 0), "open");
        gate.close(4);
        assert!(!gate.may_leave(0, 4), "the other queue has not all");
        assert!(!gate.wants_more(0) && gate.wants_more(1));
        assert!(!gate.may_leave(1, 3));
        assert!(!gate.may_leave(0, 3), "it answered one");
        assert!(!gate.may_leave(1, 4));
        assert!(gate.may_leave(0, 4) && gate.may_leave(1, 4));
    }

    #[test]
    fn an_open_gate_stops_nobody() {
        let gate = LeaveGate::new(7, 2);
        gate.close(4);
        assert!(!gate.may_leave(0, 1));
        gate.open();
        assert!(gate.may_leave(0, 1) && !gate.wants_more(0));
    }
}
