//! [`LeaveGate`]: the queues of a disk leave it together, once none of them can get another
//! request. Pure.

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

/// After so many refused rounds with the same number of requests, a queue gets no other.
const REFUSED_ROUNDS: u16 = 20;

/// Keeps the queues of a disk from leaving while a request may be on its way to one of them.
///
/// Drivers before 6.16 lose a request that is on its way to a thread which ends: see
/// [`UblkQueue::leave`](super::UblkQueue::leave). The disk is limited to a few requests for each
/// queue, fewer than the queue has tags. No request is on its way to a queue that is full:
///
/// - it holds as many requests as it can have; or
/// - the kernel refuses every read for it, while the queue looks at its ring and holds the same
///   number. The other requests wait in the kernel: it sends one FLUSH of a disk after the other
///   (block/blk-flush.c), and those that wait have a place, too; or
/// - no CPU submits to it.
///
/// The other fetches of the queue are idle, and show the driver the end of the server at once.
#[derive(Debug)]
pub(crate) struct LeaveGate {
    device: u32,
    // The requests that the disk can have for each queue. 0: the gate is open.
    limit: AtomicU16,
    queues: Box<[QueueAtGate]>,
}

/// A queue since the gate was closed.
#[derive(Default, Debug)]
struct QueueAtGate {
    has_asked: AtomicBool,
    // The requests that it had when it asked last.
    held: AtomicU16,
    // It has asked since the last round that counts.
    asked_again: AtomicBool,
    // Refused rounds in which it had the same number of requests, and that number.
    refused: AtomicU16,
    held_then: AtomicU16,
    no_cpu: AtomicBool,
}

impl QueueAtGate {
    fn is_full(&self, limit: u16) -> bool {
        let held = self.held.load(Ordering::Acquire);
        let gets_none = || {
            self.refused.load(Ordering::Acquire) >= REFUSED_ROUNDS
                && self.held_then.load(Ordering::Acquire) == held
        };
        self.has_asked.load(Ordering::Acquire)
            && (held >= limit || self.no_cpu.load(Ordering::Acquire) || gets_none())
    }
}

impl LeaveGate {
    /// The gate of a device. Open.
    pub(super) fn new(device: u32, queues: u16) -> Self {
        let queues = (0..queues).map(|_| QueueAtGate::default()).collect();
        Self { device, limit: AtomicU16::new(0), queues }
    }

    /// The device.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    /// The number of its queues.
    pub(crate) fn queues(&self) -> u16 {
        u16::try_from(self.queues.len()).unwrap_or(u16::MAX)
    }

    /// Closes the gate of a disk that can have `limit` requests for each queue. The queues do not
    /// ask yet.
    pub(crate) fn close(&self, limit: u16) {
        for queue in &self.queues {
            queue.has_asked.store(false, Ordering::Relaxed);
            queue.asked_again.store(false, Ordering::Relaxed);
            queue.refused.store(0, Ordering::Relaxed);
            queue.no_cpu.store(false, Ordering::Relaxed);
        }
        self.limit.store(limit, Ordering::Release);
    }

    /// Opens the gate: the queues leave with what they hold.
    pub(crate) fn open(&self) {
        self.limit.store(0, Ordering::Release);
    }

    /// A queue asks whether it may leave. It has taken every request from its ring, holds so many,
    /// and answers none of them.
    pub(super) fn may_leave(&self, queue: u16, held: u16) -> bool {
        if let Some(at_gate) = self.queues.get(usize::from(queue)) {
            at_gate.held.store(held, Ordering::Release);
            at_gate.asked_again.store(true, Ordering::Release);
            at_gate.has_asked.store(true, Ordering::Release);
        }
        self.is_full()
    }

    /// Whether every queue has asked since the gate was closed.
    pub(crate) fn have_all_asked(&self) -> bool {
        self.queues.iter().all(|queue| queue.has_asked.load(Ordering::Acquire))
    }

    /// The kernel refused every read of a round for a queue. A round counts if the queue has asked
    /// since the last one: its number of requests is new.
    pub(crate) fn refused(&self, queue: u16) {
        let Some(queue) = self.queues.get(usize::from(queue)) else { return };
        if !queue.asked_again.swap(false, Ordering::AcqRel) {
            return;
        }
        let held = queue.held.load(Ordering::Acquire);
        let rounds = queue.refused.load(Ordering::Acquire);
        let is_same = rounds == 0 || queue.held_then.load(Ordering::Acquire) == held;
        queue.held_then.store(held, Ordering::Release);
        queue.refused.store(if is_same { rounds.saturating_add(1) } else { 1 }, Ordering::Release);
    }

    /// No CPU of this host submits to a queue.
    pub(crate) fn has_no_cpu(&self, queue: u16) {
        if let Some(queue) = self.queues.get(usize::from(queue)) {
            queue.no_cpu.store(true, Ordering::Release);
        }
    }

    /// By queue: the requests that it had when it asked last.
    pub(crate) fn held(&self) -> Vec<u16> {
        self.queues.iter().map(|queue| queue.held.load(Ordering::Acquire)).collect()
    }

    /// Whether every queue is full, or the gate is open.
    pub(crate) fn is_full(&self) -> bool {
        let limit = self.limit.load(Ordering::Acquire);
        limit == 0 || self.queues.iter().all(|queue| queue.is_full(limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed() -> LeaveGate {
        let gate = LeaveGate::new(7, 2);
        gate.close(4);
        gate
    }

    #[test]
    fn queues_leave_together_when_each_has_every_request() {
        let gate = LeaveGate::new(7, 2);
        assert!(gate.may_leave(0, 0), "open");
        gate.close(4);
        assert!(!gate.have_all_asked(), "a question of before");
        assert!(!gate.may_leave(0, 4), "the other queue has not all");
        assert!(!gate.may_leave(1, 3));
        assert!(gate.have_all_asked());
        assert!(gate.may_leave(1, 4) && gate.may_leave(0, 4));
        assert_eq!(gate.held(), [4, 4]);
    }

    #[test]
    fn a_queue_that_answers_once_more_keeps_the_others() {
        let gate = closed();
        assert!(!gate.may_leave(0, 4));
        assert!(gate.may_leave(1, 4));
        assert!(!gate.may_leave(0, 3) && !gate.may_leave(1, 4), "a request may be on its way");
        assert!(gate.may_leave(0, 4));
    }

    #[test]
    fn a_queue_that_gets_no_request_is_full() {
        let gate = closed();
        gate.may_leave(1, 4);
        for round in 0..REFUSED_ROUNDS {
            assert!(!gate.may_leave(0, 1), "{round}");
            gate.refused(0);
        }
        assert!(gate.is_full() && gate.may_leave(0, 1));
        assert!(!gate.may_leave(0, 2), "one came");
        gate.refused(0);
        assert!(!gate.may_leave(0, 2), "the rounds of the other number do not count");
        for _ in 1..REFUSED_ROUNDS {
            gate.refused(0);
            gate.may_leave(0, 2);
        }
        assert!(gate.is_full());
    }

    #[test]
    fn a_round_counts_when_the_queue_has_asked() {
        let gate = closed();
        gate.may_leave(1, 4);
        gate.may_leave(0, 1);
        (0..2 * REFUSED_ROUNDS).for_each(|_| gate.refused(0));
        assert!(!gate.is_full(), "one question");
        gate.refused(9);
        gate.has_no_cpu(9);
        assert!(!gate.is_full(), "no such queue");
    }

    #[test]
    fn a_queue_without_a_cpu_is_full_once_it_asks() {
        let gate = closed();
        gate.has_no_cpu(0);
        assert!(!gate.may_leave(1, 4), "it has answers to wait for");
        assert!(gate.may_leave(0, 0));
        gate.close(4);
        assert!(!gate.may_leave(0, 0) && !gate.may_leave(1, 4), "another hand-over");
    }

    #[test]
    fn an_open_gate_stops_nobody() {
        let gate = closed();
        assert!(!gate.may_leave(0, 1));
        gate.open();
        assert!(gate.may_leave(0, 1) && gate.is_full());
    }
}
