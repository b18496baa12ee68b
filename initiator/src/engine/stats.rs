//! Counters of one I/O queue.

use std::ops::Deref;

use rblk_operate::mount::path_status::PathWork;
use rblk_operate::mount::queue_counts::QueueCounters;
use rblk_protocol::Status;
use rblk_protocol::width::narrow;

use super::io::{Io, IoOp};
use super::latency::QueueLatency;
use super::ways::{PLACES, WayIndex};
use rblk_operate::mount::mount_times::MountTimes;
use rblk_runtime::Counter;

/// The counters of one queue: numbers, which this derefs to, and times.
#[derive(Debug, Default)]
pub struct QueueStats {
    counters: QueueCounters,
    pub(super) latency: QueueLatency,
    // Of a queue with several ways.
    by_way: [SentByWay; PLACES],
}

/// Reads and writes sent by one way.
#[derive(Debug, Default)]
struct SentByWay {
    reads: Counter,
    writes: Counter,
    read_bytes: Counter,
    written_bytes: Counter,
}

impl Deref for QueueStats {
    type Target = QueueCounters;

    #[inline(always)]
    fn deref(&self) -> &QueueCounters {
        &self.counters
    }
}

impl QueueStats {
    /// The times of the queue's requests.
    #[must_use]
    pub fn times(&self) -> MountTimes {
        self.latency.snapshot()
    }

    /// Counts a request that is sent by a way.
    pub(super) fn sent_by(&self, way: WayIndex, io: &Io) {
        let Some(sent) = self.by_way.get(way.get()) else { return };
        let (requests, bytes) = match io.op {
            IoOp::Read => (&sent.reads, &sent.read_bytes),
            IoOp::Write => (&sent.writes, &sent.written_bytes),
            IoOp::Flush | IoOp::Discard | IoOp::WriteZeroes => return,
        };
        requests.add(1);
        bytes.add(io.data_bytes.into());
    }

    /// What a queue with several ways has sent by one.
    #[must_use]
    pub fn by_way(&self, way: WayIndex) -> PathWork {
        let Some(sent) = self.by_way.get(way.get()) else { return PathWork::default() };
        PathWork {
            reads: sent.reads.get(),
            writes: sent.writes.get(),
            read_bytes: sent.read_bytes.get(),
            written_bytes: sent.written_bytes.get(),
        }
    }

    /// Counts a request with its status. `inside`: a command has room for its data. Returns the
    /// outcome of the request: bytes moved, or a negative errno.
    #[inline(always)]
    pub(super) fn count(&self, io: &Io, status: Status, inside: bool) -> i32 {
        let bytes = u64::from(io.data_bytes);
        match io.op {
            IoOp::Read => {
                self.reads.add(1);
                self.read_bytes.add(bytes);
            }
            IoOp::Write => {
                self.writes.add(1);
                self.written_bytes.add(bytes);
                self.in_capsule_writes.add(u64::from(inside));
            }
            other => self.count_other(other),
        }
        if status == Status::Ok { narrow(io.data_bytes) } else { self.count_error(io, status) }
    }

    #[inline(never)]
    fn count_other(&self, op: IoOp) {
        match op {
            IoOp::Read | IoOp::Write => debug_assert!(false, "counted elsewhere"),
            IoOp::Flush => self.flushes.add(1),
            IoOp::Discard => self.discards.add(1),
            IoOp::WriteZeroes => self.write_zeroes.add(1),
        }
    }

    /// Counts a request that failed here before it was sent.
    #[cold]
    pub(super) fn count_unsent(&self, op: IoOp) {
        match op {
            IoOp::Read => self.reads.add(1),
            IoOp::Write => self.writes.add(1),
            other => self.count_other(other),
        }
        self.errors.add(1);
    }

    #[cold]
    #[inline(never)]
    fn count_error(&self, io: &Io, status: Status) -> i32 {
        self.errors.add(1);
        tracing::debug!(?io, %status, "a request failed");
        -status.errno()
    }

    /// Requests answered, errors included.
    #[must_use]
    pub(crate) fn answered(&self) -> u64 {
        let of_kinds =
            [&self.reads, &self.writes, &self.flushes, &self.discards, &self.write_zeroes];
        of_kinds.iter().map(|counter| counter.get()).sum()
    }
}
