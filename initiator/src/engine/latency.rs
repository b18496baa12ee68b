//! [`QueueLatency`]: the times of one queue's requests, and [`RequestTimes`]: when each tag came and
//! was sent. The queue's thread writes them; every thread may read the first.
//!
//! Times are those of turns: the thread reads the clock once in a turn. A request counts from the
//! look at the driver's ring before the one that found it, at the earliest, and to the turn that
//! answers it.

use rblk_fabric::turn_clock::TurnTimes;
use rblk_fabric::{Latency, LatencyCounts};
use rblk_protocol::{QueueDepth, Tag};
use serde::{Deserialize, Serialize};

use crate::io::IoOp;

/// Where the times of one kind of request are counted.
#[derive(Debug, Default)]
struct OpLatency {
    total: Latency,
    // Only what is not 0.
    queue: Latency,
    target: Latency,
}

/// Where the times of a queue's requests are counted.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueLatency {
    read: OpLatency,
    write: OpLatency,
    flush: OpLatency,
}

impl QueueLatency {
    /// What it holds now.
    #[must_use]
    pub fn snapshot(&self) -> MountTimes {
        let Self { read, write, flush } = self;
        MountTimes { read: read.snapshot(), write: write.snapshot(), flush: flush.snapshot() }
    }
}

impl OpLatency {
    fn snapshot(&self) -> MountOpTimes {
        let (total, mut queue) = (self.total.snapshot(), self.queue.snapshot());
        queue.record_zeros(total.count().saturating_sub(queue.count()));
        MountOpTimes { total, queue, target: self.target.snapshot() }
    }
}

/// The times of one kind of request: in all, and by what it waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountOpTimes {
    /// From the driver and back to it.
    pub total: LatencyCounts,
    /// At this end: until its command was posted. If it was sent again, until the last time.
    pub queue: LatencyCounts,
    /// From there to the answer: the wire and the target.
    pub target: LatencyCounts,
}

impl MountOpTimes {
    /// The stages, with their names.
    #[must_use]
    pub fn stages(&self) -> [(&'static str, &LatencyCounts); 2] {
        [("queue", &self.queue), ("target", &self.target)]
    }
}

/// The times of a mount's requests, or of one queue's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountTimes {
    /// READs.
    pub read: MountOpTimes,
    /// WRITEs.
    pub write: MountOpTimes,
    /// FLUSHes.
    pub flush: MountOpTimes,
}

impl MountTimes {
    /// Takes all times of another in.
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.read, &other.read),
            (&mut self.write, &other.write),
            (&mut self.flush, &other.flush),
        ];
        for (mine, other) in pairs {
            mine.total.add(&other.total);
            mine.queue.add(&other.queue);
            mine.target.add(&other.target);
        }
    }

    /// The kinds of requests, with their names.
    #[must_use]
    pub fn kinds(&self) -> [(&'static str, &MountOpTimes); 3] {
        [("read", &self.read), ("write", &self.write), ("flush", &self.flush)]
    }
}

/// When the request of each tag came, and when it was sent last.
#[derive(Debug)]
pub(super) struct RequestTimes {
    tags: Box<[Times]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Times {
    came: u64,
    sent: u64,
}

impl RequestTimes {
    /// A table for a queue.
    pub(super) fn new(depth: QueueDepth) -> Self {
        Self { tags: vec![Times::default(); usize::from(depth.get())].into_boxed_slice() }
    }

    /// A request came.
    #[inline(always)]
    pub(super) fn came(&mut self, tag: Tag, turn: TurnTimes) {
        if let Some(times) = self.tags.get_mut(tag.index()) {
            times.came = turn.looked;
        }
    }

    /// It was sent.
    #[inline(always)]
    pub(super) fn sent(&mut self, tag: Tag, turn: TurnTimes) {
        if let Some(times) = self.tags.get_mut(tag.index()) {
            times.sent = turn.now;
        }
    }

    /// It was answered.
    #[inline(always)]
    pub(super) fn answered(&self, tag: Tag, op: IoOp, turn: TurnTimes, latency: &QueueLatency) {
        let Some(times) = self.tags.get(tag.index()) else { return };
        let op = match op {
            IoOp::Read => &latency.read,
            IoOp::Write => &latency.write,
            IoOp::Flush => &latency.flush,
            IoOp::Discard | IoOp::WriteZeroes => return,
        };
        op.total.record(turn.now.saturating_sub(times.came));
        op.target.record(turn.now.saturating_sub(times.sent));
        let queued = times.sent.saturating_sub(times.came);
        if queued > 0 {
            op.queue.record(queued);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stages_add_up() {
        let (tag, latency) = (Tag(1), QueueLatency::default());
        let mut times = RequestTimes::new(QueueDepth::new(2).unwrap());
        let turn = |looked, now| TurnTimes { looked, now };
        times.came(tag, turn(90, 100));
        times.sent(tag, turn(90, 100));
        times.answered(tag, IoOp::Read, turn(140, 150), &latency);
        // Sent again.
        times.came(tag, turn(200, 200));
        times.sent(tag, turn(200, 200));
        times.sent(tag, turn(300, 310));
        times.answered(tag, IoOp::Read, turn(310, 330), &latency);
        times.answered(tag, IoOp::Discard, turn(310, 330), &latency);
        times.answered(Tag(9), IoOp::Read, turn(310, 330), &latency);
        let mut all = latency.snapshot();
        all.add(&MountTimes::default());
        let read = &all.read;
        assert_eq!((read.total.count(), read.total.sum_us()), (2, 60 + 130));
        assert_eq!((read.queue.count(), read.queue.sum_us()), (2, 10 + 110));
        assert_eq!((read.target.count(), read.target.sum_us()), (2, 50 + 20));
        assert_eq!(all.write, MountOpTimes::default());
    }
}
