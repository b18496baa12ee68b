//! The target's counters of block commands: [`IoStats`] by connection and by volume, and
//! [`VolumeLatency`] by volume, split by [`Stages`]. Each has one writer, the thread of a poll
//! group; every thread may read it.
//!
//! Times are those of turns: a data thread reads the clock once in a turn, so a time is as exact as
//! a turn is long. The time of a command starts, at the earliest, at the CQ check before the one
//! that found it, and ends at the turn that queued its answer. So a long turn is part of the times.

use rblk_protocol::Opcode;
use rblk_runtime::{BinnedUs, Counter, Latency, LatencyCounts};
use serde::{Deserialize, Serialize};

/// Counters of one connection, or of one volume in one poll group, by [`IoKind`].
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoStats {
    operations: [Counter; IoKind::COUNT],
    bytes: [Counter; IoKind::COUNT],
    errors: Counter,
    // Commands that had to wait, and the number of them that ended. A command that is answered at
    // once is in neither.
    begun: Counter,
    ended: Counter,
    // Commands that ended without an answer, started or not.
    abandoned: Counter,
}

/// The kind of a block command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoKind {
    /// READ.
    Read,
    /// WRITE.
    Write,
    /// FLUSH.
    Flush,
    /// DISCARD.
    Discard,
    /// WRITE_ZEROES.
    WriteZeroes,
}

impl IoKind {
    const COUNT: usize = 5;

    /// The kind of a block command; `None` for other commands.
    #[inline(always)]
    pub fn of(opcode: Opcode) -> Option<Self> {
        Some(match opcode {
            Opcode::Read => Self::Read,
            Opcode::Write => Self::Write,
            Opcode::Flush => Self::Flush,
            Opcode::Discard => Self::Discard,
            Opcode::WriteZeroes => Self::WriteZeroes,
            _ => return None,
        })
    }

    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}

impl IoStats {
    /// A command starts to wait.
    #[inline(always)]
    pub fn begin(&self) {
        self.begun.add(1);
    }

    /// A started command was answered, or will not be.
    #[inline(always)]
    pub fn end(&self) {
        self.ended.add(1);
    }

    /// A command is answered.
    #[inline(always)]
    pub fn answered(&self, kind: IoKind, bytes: u64, failed: bool) {
        self.operations[kind.index()].add(1);
        self.bytes[kind.index()].add(bytes);
        if failed {
            self.errors.add(1);
        }
    }

    /// A command will not be answered. It had started, or (false) waited for a limit or a snapshot.
    pub fn abandon(&self, had_begun: bool) {
        if had_begun {
            self.end();
        }
        self.abandoned.add(1);
    }

    /// Number of commands that will not be answered.
    pub fn never_answered(&self) -> u64 {
        self.abandoned.get()
    }

    /// The current counts. The numbers are read one after the other, so they are not of exactly one
    /// moment.
    #[must_use]
    pub fn snapshot(&self) -> IoCounts {
        // Read before `begun`, so that no end lacks its beginning.
        let ended = self.ended.get();
        let [reads, writes, flushes, discards, write_zeroes] =
            [0, 1, 2, 3, 4].map(|kind| self.operations[kind].get());
        let [read_bytes, written_bytes] = [0, 1].map(|kind| self.bytes[kind].get());
        IoCounts {
            reads,
            writes,
            flushes,
            discards,
            write_zeroes,
            read_bytes,
            written_bytes,
            errors: self.errors.get(),
            in_flight: self.begun.get().saturating_sub(ended),
        }
    }
}

rblk_runtime::counters! {
    /// The counters of an [`IoStats`] at one moment; also a sum of several. The subject of their
    /// metrics is a volume, a session or a device.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct IoCounts;

    /// READs answered.
    reads: Counter Number => "rblk_target_{subject}_commands_total" { op = "read" }
        "Block commands of the {subject} that were answered, by kind.",
    /// WRITEs answered.
    writes: Counter Number => "rblk_target_{subject}_commands_total" { op = "write" },
    /// FLUSHes answered.
    flushes: Counter Number => "rblk_target_{subject}_commands_total" { op = "flush" },
    /// DISCARDs answered.
    discards: Counter Number => "rblk_target_{subject}_commands_total" { op = "discard" },
    /// WRITE_ZEROES answered.
    write_zeroes: Counter Number => "rblk_target_{subject}_commands_total" { op = "write_zeroes" },
    /// Bytes read from the {subject}.
    read_bytes: Counter Bytes => "rblk_target_{subject}_read_bytes_total",
    /// Bytes written to the {subject}.
    written_bytes: Counter Bytes => "rblk_target_{subject}_written_bytes_total",
    /// Block commands answered with an error, of the {subject}.
    errors: Counter Number => "rblk_target_{subject}_command_errors_total",
    /// Block commands that are not answered, of the {subject}.
    in_flight: Gauge Number => "rblk_target_{subject}_commands_in_flight",
}

impl IoCounts {
    /// Commands answered.
    #[must_use]
    pub fn operations(&self) -> u64 {
        [self.reads, self.writes, self.flushes, self.discards, self.write_zeroes]
            .iter()
            .fold(0, |sum, count| sum.wrapping_add(*count))
    }

    /// The counts without current values: the part that remains of an ended connection.
    #[must_use]
    pub fn ended(self) -> Self {
        Self { in_flight: 0, ..self }
    }
}

/// The time that a command took, in microseconds, split into stages that add up to the whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stages {
    /// In the CQ.
    pub queue: u64,
    /// For its data, by RDMA READ.
    pub data: u64,
    /// For memory, for commands on the same blocks, and for other poll groups.
    pub cache: u64,
    /// For the store.
    pub store: u64,
    /// For send credits.
    pub answer: u64,
}

impl Stages {
    /// The whole.
    pub fn total(&self) -> u64 {
        self.queue + self.data + self.cache + self.store + self.answer
    }
}

/// The times of one kind of command.
///
/// No number of a [snapshot](Self::snapshot) ever falls, whenever it is read: each is a counter or
/// a sum of counters, never a difference.
#[derive(Debug, Default)]
pub struct OpLatency {
    // Commands that were answered in the turn that found them: their whole time is `queue`.
    one_turn: Latency,
    longer: Latency,
    // Stages of the other commands.
    queue: Latency,
    data: Latency,
    cache: Latency,
    store: Latency,
    answer: Latency,
}

impl OpLatency {
    /// Records a command that waited only in the CQ.
    #[inline(always)]
    fn record_one_turn(&self, queue: BinnedUs) {
        self.one_turn.record_binned(queue);
    }

    /// Records any other command.
    #[inline(never)]
    fn record(&self, stages: &Stages) {
        let Self { queue, data, cache, store, answer, .. } = self;
        self.longer.record(stages.total());
        let each = [
            (queue, stages.queue),
            (data, stages.data),
            (cache, stages.cache),
            (store, stages.store),
            (answer, stages.answer),
        ];
        for (stage, us) in each {
            if us > 0 {
                stage.record(us);
            } else {
                stage.record_zero();
            }
        }
    }

    /// The whole times, without stages.
    fn total(&self) -> LatencyCounts {
        let (one_turn, mut total) = (self.one_turn.snapshot(), self.longer.snapshot());
        total.add(&one_turn);
        total
    }

    /// The current times. A stage in which a command did not wait counts as 0.
    #[must_use]
    pub fn snapshot(&self) -> OpTimes {
        let (one_turn, mut total) = (self.one_turn.snapshot(), self.longer.snapshot());
        total.add(&one_turn);
        let mut queue = self.queue.snapshot();
        queue.add(&one_turn);
        let in_one_turn = one_turn.count();
        let stage = |stage: &Latency| {
            let mut counts = stage.snapshot();
            counts.record_zeros(in_one_turn);
            counts
        };
        OpTimes {
            total,
            queue,
            data: stage(&self.data),
            cache: stage(&self.cache),
            store: stage(&self.store),
            answer: stage(&self.answer),
        }
    }
}

/// The times of one kind of command: the total, and the stages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpTimes {
    /// From arrival to answer.
    pub total: LatencyCounts,
    /// In the CQ, while the data thread was busy.
    pub queue: LatencyCounts,
    /// For the data of a write, by RDMA READ, and for READ credits.
    pub data: LatencyCounts,
    /// For memory, for commands on the same blocks, and for other poll groups.
    pub cache: LatencyCounts,
    /// For the store.
    pub store: LatencyCounts,
    /// From the outcome to the answer: for send credits.
    pub answer: LatencyCounts,
}

impl OpTimes {
    /// Adds the times of another.
    pub fn add(&mut self, other: &Self) {
        self.total.add(&other.total);
        self.queue.add(&other.queue);
        self.data.add(&other.data);
        self.cache.add(&other.cache);
        self.store.add(&other.store);
        self.answer.add(&other.answer);
    }

    /// The stages, with their names.
    #[must_use]
    pub fn stages(&self) -> [(&'static str, &LatencyCounts); 5] {
        [
            ("queue", &self.queue),
            ("data", &self.data),
            ("cache", &self.cache),
            ("store", &self.store),
            ("answer", &self.answer),
        ]
    }
}

/// The times of the READs, WRITEs and FLUSHes for one volume in one poll group.
#[derive(Debug, Default)]
pub struct VolumeLatency {
    kinds: [OpLatency; 3],
}

impl VolumeLatency {
    /// Records a command that was answered in the turn that found it. DISCARDs and WRITE_ZEROES
    /// have no times.
    #[inline(always)]
    pub fn record_one_turn(&self, kind: IoKind, queue: BinnedUs) {
        if let Some(op) = self.kinds.get(kind.index()) {
            op.record_one_turn(queue);
        }
    }

    /// Records any other command.
    #[inline(always)]
    pub fn record(&self, kind: IoKind, stages: &Stages) {
        if let Some(op) = self.kinds.get(kind.index()) {
            op.record(stages);
        }
    }

    /// The whole times of READs, WRITEs and FLUSHes, without stages.
    #[must_use]
    pub fn totals(&self) -> [LatencyCounts; 3] {
        self.kinds.each_ref().map(OpLatency::total)
    }

    /// The current times.
    #[must_use]
    pub fn snapshot(&self) -> VolumeTimes {
        let [read, write, flush] = &self.kinds;
        VolumeTimes { read: read.snapshot(), write: write.snapshot(), flush: flush.snapshot() }
    }
}

/// The times of the commands for one volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VolumeTimes {
    /// READs.
    pub read: OpTimes,
    /// WRITEs.
    pub write: OpTimes,
    /// FLUSHes.
    pub flush: OpTimes,
}

impl VolumeTimes {
    /// Adds the times of another.
    pub fn add(&mut self, other: &Self) {
        self.read.add(&other.read);
        self.write.add(&other.write);
        self.flush.add(&other.flush);
    }

    /// The kinds of commands, with their names.
    #[must_use]
    pub fn kinds(&self) -> [(&'static str, &OpTimes); 3] {
        [("read", &self.read), ("write", &self.write), ("flush", &self.flush)]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn every_stage_has_a_time_for_every_command() {
        let live = OpLatency::default();
        live.record_one_turn(BinnedUs::new(0));
        live.record_one_turn(BinnedUs::new(7));
        live.record(&Stages { queue: 10, cache: 20, store: 70, ..Stages::default() });
        let times = live.snapshot();
        assert_eq!((times.total.count(), times.total.sum_us()), (3, 107));
        for (name, stage) in times.stages() {
            assert_eq!(stage.count(), 3, "{name}");
        }
        let sums: Vec<u64> = times.stages().iter().map(|(_, stage)| stage.sum_us()).collect();
        assert_eq!(sums, [17, 0, 20, 70, 0]);
    }

    #[test]
    fn snapshots_never_fall_while_commands_end() {
        let (live, done) = (OpLatency::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let stages = [
                    Stages { queue: 1, store: 70, ..Stages::default() },
                    Stages { data: 3, ..Stages::default() },
                ];
                while !done.load(Ordering::Relaxed) {
                    live.record_one_turn(BinnedUs::new(0));
                    stages.iter().for_each(|stages| live.record(stages));
                }
            });
            let falls = |was: &LatencyCounts, is: &LatencyCounts| {
                let now = |upper| is.buckets().find(|(at, _)| *at == upper).map_or(0, |(_, n)| n);
                was.buckets().any(|(upper, count)| now(upper) < count)
            };
            let mut before = live.snapshot();
            let mut fell = Vec::new();
            for _ in 0..20_000 {
                let now = live.snapshot();
                let stages = before.stages().into_iter().zip(now.stages());
                fell.extend(stages.filter(|(was, is)| falls(was.1, is.1)).map(|(was, _)| was.0));
                fell.extend(falls(&before.total, &now.total).then_some("total"));
                before = now;
            }
            done.store(true, Ordering::Relaxed);
            assert_eq!(fell, [""; 0]);
        });
    }

    #[test]
    fn every_kind_is_counted_and_nothing_stays_in_flight() {
        let io = IoStats::default();
        let kind = |opcode| IoKind::of(opcode).unwrap();
        (0..3).for_each(|_| io.begin());
        assert_eq!(io.snapshot().in_flight, 3);
        io.answered(kind(Opcode::Read), 4096, false);
        assert_eq!(io.snapshot().in_flight, 3, "it was answered at once");
        io.answered(kind(Opcode::Write), 512, true);
        io.answered(kind(Opcode::WriteZeroes), 0, false);
        io.answered(kind(Opcode::Flush), 0, true);
        (0..3).for_each(|_| io.end());
        let expected = IoCounts {
            reads: 1,
            writes: 1,
            flushes: 1,
            write_zeroes: 1,
            read_bytes: 4096,
            written_bytes: 512,
            errors: 2,
            ..IoCounts::default()
        };
        assert_eq!(io.snapshot(), expected);
        assert_eq!(io.snapshot().operations(), 4);
        let blocks = Opcode::ALL.iter().filter(|opcode| IoKind::of(**opcode).is_some());
        assert!(blocks.eq(Opcode::ALL.iter().filter(|opcode| opcode.is_block())));
    }
}
