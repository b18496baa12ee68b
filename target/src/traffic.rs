//! What a target counts of block commands: [`IoStats`] by connection and by volume, and
//! [`VolumeLatency`] by volume, split by [`Stages`]. Of each there is one writer, the thread of a
//! poll group; every thread may read them.
//!
//! Times are those of turns: a data thread reads the clock once in a turn, so a time is as exact as
//! a turn is long. A command counts from the look at the CQ before the one that found it, at the
//! earliest, and to the turn that queued its answer. So a long turn is part of the times.

use rblk_fabric::{Latency, LatencyCounts};
use serde::{Deserialize, Serialize};

rblk_fabric::counters! {
    /// Counters of one connection, or of one volume in one poll group.
    #[derive(Debug, Default)]
    #[repr(align(128))]
    pub struct IoStats;

    /// The counters at one moment; also a sum of several.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct IoCounts;

    /// READs answered.
    reads,
    /// WRITEs answered.
    writes,
    /// FLUSHes answered.
    flushes,
    /// DISCARDs answered.
    discards,
    /// WRITE_ZEROES answered.
    write_zeroes,
    /// Bytes of the READs.
    read_bytes,
    /// Bytes of the WRITEs.
    written_bytes,
    /// Commands of these that were answered with an error.
    errors,
    /// Commands that are not answered, now.
    in_flight,
}

impl IoCounts {
    /// Commands answered.
    #[must_use]
    pub fn operations(&self) -> u64 {
        [self.reads, self.writes, self.flushes, self.discards, self.write_zeroes]
            .iter()
            .fold(0, |sum, count| sum.wrapping_add(*count))
    }

    /// Without what is so now: what stays of a connection that ended.
    #[must_use]
    pub(crate) fn ended(self) -> Self {
        Self { in_flight: 0, ..self }
    }
}

/// How long a command took, in microseconds, by what it waited for. The stages add up to the whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stages {
    /// In the CQ.
    pub queue: u64,
    /// For its data, which an RDMA READ brings.
    pub data: u64,
    /// For memory, for others on the same blocks, and for other poll groups.
    pub cache: u64,
    /// For the store.
    pub store: u64,
    /// For send credits.
    pub answer: u64,
}

/// Where the times of one kind of command are counted. Of a stage only what is not 0 is recorded.
#[derive(Debug, Default)]
pub(crate) struct OpLatency {
    total: Latency,
    queue: Latency,
    data: Latency,
    cache: Latency,
    store: Latency,
    answer: Latency,
}

impl OpLatency {
    /// Takes in a command that waited only in the CQ.
    #[inline(always)]
    pub(crate) fn record_queued(&self, us: u64) {
        self.total.record(us);
        if us > 0 {
            self.queue.record(us);
        }
    }

    /// Takes in a command.
    #[inline(never)]
    pub(crate) fn record(&self, total: u64, stages: &Stages) {
        let Self { queue, data, cache, store, answer, .. } = self;
        self.total.record(total);
        let each = [
            (queue, stages.queue),
            (data, stages.data),
            (cache, stages.cache),
            (store, stages.store),
            (answer, stages.answer),
        ];
        each.iter().filter(|(_, us)| *us > 0).for_each(|(stage, us)| stage.record(*us));
    }

    /// What it holds now. A stage that a command did not wait in has a time of 0 for it.
    #[must_use]
    pub(crate) fn snapshot(&self) -> OpTimes {
        let total = self.total.snapshot();
        let stage = |stage: &Latency| {
            let mut counts = stage.snapshot();
            counts.record_zeros(total.count().saturating_sub(counts.count()));
            counts
        };
        OpTimes {
            queue: stage(&self.queue),
            data: stage(&self.data),
            cache: stage(&self.cache),
            store: stage(&self.store),
            answer: stage(&self.answer),
            total,
        }
    }
}

/// The times of one kind of command: in all, and by what it waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpTimes {
    /// From its arrival to its answer.
    pub total: LatencyCounts,
    /// In the CQ, while the data thread was busy.
    pub queue: LatencyCounts,
    /// For the data of a write, which an RDMA READ brings, and for READ credits.
    pub data: LatencyCounts,
    /// For memory, for others on the same blocks, and for other poll groups.
    pub cache: LatencyCounts,
    /// For the store.
    pub store: LatencyCounts,
    /// From the outcome to the answer: for send credits.
    pub answer: LatencyCounts,
}

impl OpTimes {
    /// Takes all times of another in.
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

/// Where the times of the commands for one volume are counted, in one poll group.
#[derive(Debug, Default)]
pub(crate) struct VolumeLatency {
    pub(crate) read: OpLatency,
    pub(crate) write: OpLatency,
    pub(crate) flush: OpLatency,
}

impl VolumeLatency {
    /// What it holds now.
    #[must_use]
    pub(crate) fn snapshot(&self) -> VolumeTimes {
        VolumeTimes {
            read: self.read.snapshot(),
            write: self.write.snapshot(),
            flush: self.flush.snapshot(),
        }
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
    /// Takes all times of another in.
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
    use super::*;

    #[test]
    fn every_stage_has_a_time_for_every_command() {
        let live = OpLatency::default();
        live.record_queued(0);
        live.record_queued(7);
        live.record(100, &Stages { queue: 10, cache: 20, store: 70, ..Stages::default() });
        let times = live.snapshot();
        assert_eq!((times.total.count(), times.total.sum_us()), (3, 107));
        for (name, stage) in times.stages() {
            assert_eq!(stage.count(), 3, "{name}");
        }
        let sums: Vec<u64> = times.stages().iter().map(|(_, stage)| stage.sum_us()).collect();
        assert_eq!(sums, [17, 0, 20, 70, 0]);
    }
}
