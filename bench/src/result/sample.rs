//! [`Sample`]: one system in one [`Cell`] and one round: rates, latencies, and what they cost in
//! processor time and in work per I/O.
//!
//! Of the work per I/O, what was not counted is absent.

use serde::{Deserialize, Serialize};

/// One workload.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Cell {
    /// Its name, from all the rest: see [`Cell::new`].
    pub key: String,
    /// fio's word: `randread`, `randwrite`, `read`, `write`, `randrw`.
    pub rw: String,
    /// Bytes per I/O.
    pub block_bytes: u64,
    /// I/Os outstanding per job.
    pub depth: u32,
    /// Jobs.
    pub jobs: u32,
    /// Queues of the device.
    pub queues: u32,
    /// Reads in a hundred, for `randrw`.
    pub read_percent: u32,
}

/// One system, one cell, one round.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Key of the system.
    pub system: String,
    /// Key of the cell.
    pub cell: String,
    /// The round, from 1.
    pub round: u32,
    /// How long it was measured.
    pub seconds: f64,
    /// I/Os per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// From submission to completion, by fio.
    pub latency: Latency,
    /// I/Os that failed.
    pub errors: u64,
    /// Processor time meanwhile.
    pub cpu: Cpu,
    /// What the initiator spent per I/O.
    pub initiator: Option<PerIo>,
    /// What the target spent per I/O.
    pub target: Option<PerIo>,
    /// Load of the machine before the sample: processors busy with something else.
    pub load_before: f64,
    /// fio's own JSON, relative to the run's folder.
    pub raw: String,
}

/// A distribution of latencies.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Latency {
    /// The mean, in nanoseconds.
    pub mean_ns: f64,
    /// Nanoseconds that half of the I/Os did not exceed.
    pub p50: u64,
    /// Nanoseconds that 90 % did not exceed.
    pub p90: u64,
    /// Nanoseconds that 95 % did not exceed.
    pub p95: u64,
    /// Nanoseconds that 99 % did not exceed.
    pub p99: u64,
    /// Nanoseconds that 99.9 % did not exceed.
    pub p999: u64,
    /// Nanoseconds that 99.99 % did not exceed.
    pub p9999: u64,
    /// The longest, in nanoseconds.
    pub max: u64,
    /// Nanoseconds of each bin, ascending, and how many fell into it.
    pub bins: Vec<(u64, u64)>,
}

/// Processors kept busy: 1.0 is one of them all the time.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Cpu {
    /// By anything.
    pub busy: f64,
    /// By fio.
    pub fio: f64,
    /// By our daemons or the peer's.
    pub daemons: f64,
}

/// What one end spent per I/O; what was not counted is absent.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PerIo {
    /// Work requests posted on the send queue.
    pub messages: Option<f64>,
    /// Completions reaped.
    pub completions: Option<f64>,
    /// Posts of send work requests.
    pub doorbells: Option<f64>,
    /// System calls of its data threads.
    pub syscalls: Option<f64>,
    /// Context switches of its data threads.
    pub switches: Option<f64>,
    /// Bytes that its processor copied between buffers.
    pub copied_bytes: Option<f64>,
    /// Processor time of its process, in nanoseconds.
    pub cpu_ns: Option<f64>,
}

impl Cell {
    /// A cell with its key: `randread-4k-qd32-j1-q1`, and `randrw70-...` for a mix of 70 reads and
    /// 30 writes.
    #[must_use]
    pub fn new(
        rw: &str,
        block_bytes: u64,
        depth: u32,
        jobs: u32,
        queues: u32,
        read_percent: u32,
    ) -> Self {
        let mix = if rw == "randrw" { read_percent.to_string() } else { String::new() };
        let size = size_word(block_bytes);
        Self {
            key: format!("{rw}{mix}-{size}-qd{depth}-j{jobs}-q{queues}"),
            rw: rw.to_owned(),
            block_bytes,
            depth,
            jobs,
            queues,
            read_percent,
        }
    }

    /// Its name for people: `4k randread QD32`, with jobs and queues where there are several.
    #[must_use]
    pub fn title(&self) -> String {
        let size = size_word(self.block_bytes);
        let rw = match self.rw.as_str() {
            "randrw" => {
                format!("{}:{} mix", self.read_percent, 100_u32.saturating_sub(self.read_percent))
            }
            other => other.to_owned(),
        };
        let many = |count: u32, word: &str| {
            if count > 1 { format!(", {count} {word}") } else { String::new() }
        };
        format!(
            "{size} {rw} QD{}{}{}",
            self.depth,
            many(self.jobs, "jobs"),
            many(self.queues, "queues")
        )
    }
}

/// `4k`, `128k`, `1m`, or plain bytes.
fn size_word(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{}m", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{}k", b >> 10),
        b => b.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_have_names() {
        let cell = Cell::new("randread", 4096, 32, 1, 1, 100);
        assert_eq!(
            (cell.key.as_str(), cell.title().as_str()),
            ("randread-4k-qd32-j1-q1", "4k randread QD32")
        );
        let cell = Cell::new("randrw", 4096, 32, 4, 2, 70);
        assert_eq!(cell.key, "randrw70-4k-qd32-j4-q2");
        assert_eq!(cell.title(), "4k 70:30 mix QD32, 4 jobs, 2 queues");
        assert_eq!(Cell::new("read", 1 << 20, 8, 1, 1, 100).key, "read-1m-qd8-j1-q1");
        assert_eq!(Cell::new("read", 512, 8, 1, 1, 100).key, "read-512-qd8-j1-q1");
    }
}
