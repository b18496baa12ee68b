//! [`QueueLatency`]: the times of one queue's requests. [`RequestTimes`]: the arrival of each tag,
//! and its wait before it was sent. The queue's thread writes them; every thread may read the
//! first.
//!
//! The clock is read once in a turn, so a time is as exact as a turn is long. A request counts from
//! the turn that takes it from the driver to the turn that answers it.

use rblk_operate::mount::mount_times::{MountOpTimes, MountTimes};
use rblk_protocol::{QueueDepth, Tag};
use rblk_runtime::{Latency, Micros};

use super::io::IoOp;

/// The times of one kind of request. Each published number is a counter or a sum of counters, so it
/// never falls between two reads.
#[derive(Debug, Default)]
struct QueueOpLatency {
    // Requests sent in the turn that took them: all of the time is `target`.
    at_once: Latency,
    later: Latency,
    // The wait of the other requests.
    queue: Latency,
    target: Latency,
}

/// The times of a queue's requests: READs, WRITEs and FLUSHes.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueLatency {
    kinds: [QueueOpLatency; 3],
}

impl QueueLatency {
    /// A copy of the present values.
    #[must_use]
    pub fn snapshot(&self) -> MountTimes {
        let [read, write, flush] = &self.kinds;
        MountTimes { read: read.snapshot(), write: write.snapshot(), flush: flush.snapshot() }
    }
}

impl QueueOpLatency {
    fn snapshot(&self) -> MountOpTimes {
        let at_once = self.at_once.snapshot();
        let (mut total, mut target) = (self.later.snapshot(), self.target.snapshot());
        total.add(&at_once);
        target.add(&at_once);
        let mut queue = self.queue.snapshot();
        queue.record_zeros(at_once.count());
        MountOpTimes { total, queue, target }
    }
}

/// The arrival of each tag's request, and its wait before it was sent.
#[derive(Debug)]
pub(super) struct RequestTimes {
    tags: Box<[Times]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Times {
    came: Micros,
    queued_us: u64,
}

impl RequestTimes {
    /// The table of a queue.
    pub(super) fn new(depth: QueueDepth) -> Self {
        Self { tags: vec![Times::default(); usize::from(depth.get())].into_boxed_slice() }
    }

    /// A request arrived.
    #[inline(always)]
    pub(super) fn came(&mut self, tag: Tag, now: Micros) {
        if let Some(times) = self.tags.get_mut(tag.index()) {
            *times = Times { came: now, queued_us: 0 };
        }
    }

    /// A request that waited is sent, for the first time or again.
    #[inline(never)]
    pub(super) fn sent_later(&mut self, tag: Tag, now: Micros) {
        if let Some(times) = self.tags.get_mut(tag.index()) {
            times.queued_us = now.since(times.came);
        }
    }

    /// Records the answer to a request.
    #[inline(always)]
    pub(super) fn answered(&self, tag: Tag, op: IoOp, now: Micros, latency: &QueueLatency) {
        let Some(times) = self.tags.get(tag.index()) else { return };
        // Operations without times are the last ones of the enum.
        let Some(op) = latency.kinds.get(op as usize) else { return };
        let us = now.since(times.came);
        if times.queued_us == 0 { op.at_once.record(us) } else { op.record(us, times.queued_us) }
    }
}

impl QueueOpLatency {
    #[inline(never)]
    fn record(&self, us: u64, queued_us: u64) {
        self.later.record(us);
        self.queue.record(queued_us);
        self.target.record(us.saturating_sub(queued_us));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stages_add_up() {
        let at = Micros::new;
        let (tag, latency) = (Tag(1), QueueLatency::default());
        let mut times = RequestTimes::new(QueueDepth::new(2).unwrap());
        times.came(tag, at(100));
        times.answered(tag, IoOp::Read, at(150), &latency);
        // The request is sent again.
        times.came(tag, at(200));
        times.sent_later(tag, at(250));
        times.sent_later(tag, at(310));
        times.answered(tag, IoOp::Read, at(330), &latency);
        times.answered(tag, IoOp::Discard, at(330), &latency);
        times.answered(Tag(9), IoOp::Read, at(330), &latency);
        // An earlier wait does not count for the tag's next request.
        times.came(tag, at(400));
        times.answered(tag, IoOp::Write, at(404), &latency);
        let mut all = latency.snapshot();
        all.add(&MountTimes::default());
        let read = &all.read;
        assert_eq!((read.total.count(), read.total.sum_us()), (2, 50 + 130));
        assert_eq!((read.queue.count(), read.queue.sum_us()), (2, 110));
        assert_eq!((read.target.count(), read.target.sum_us()), (2, 50 + 20));
        assert_eq!((all.write.queue.sum_us(), all.write.target.sum_us()), (0, 4));
        assert_eq!(all.flush, MountOpTimes::default());
    }
}
