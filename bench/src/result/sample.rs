//! [`Sample`]: one system in one [`Cell`] and one round: rates, latencies, processor time and work
//! per I/O.

use serde::{Deserialize, Serialize};

/// One workload.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Cell {
    /// Its name, from all the rest: see [`Cell::new`].
    pub key: String,
    /// fio's word: `randread`, `randwrite`, `read`, `write`, `randrw`.
    pub(crate) rw: String,
    pub(crate) block_bytes: u64,
    pub(crate) depth: u32,
    pub(crate) jobs: u32,
    pub(crate) queues: u32,
    /// Reads in a hundred, for `randrw`.
    pub(crate) read_percent: u32,
}

/// One system, one cell, one round.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    pub(crate) system: String,
    pub(crate) cell: String,
    pub(crate) round: u32,
    pub(crate) seconds: f64,
    /// I/Os per second.
    pub iops: f64,
    pub(crate) bytes_per_s: f64,
    /// From submission to completion, by fio.
    pub latency: Latency,
    /// I/Os that failed.
    pub errors: u64,
    pub(crate) cpu: Cpu,
    /// Cost of an I/O at the initiator.
    pub initiator: Option<PerIo>,
    pub(crate) target: Option<PerIo>,
    /// Load of the machine before the sample: processors busy with something else.
    pub(crate) load_before: f64,
    /// fio's own JSON, relative to the run's folder.
    pub raw: String,
}

/// A distribution of latencies.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Latency {
    pub(crate) mean_ns: f64,
    /// Nanoseconds that half of the I/Os did not exceed.
    pub p50: u64,
    pub(crate) p90: u64,
    pub(crate) p95: u64,
    pub(crate) p99: u64,
    pub(crate) p999: u64,
    pub(crate) p9999: u64,
    pub(crate) max: u64,
    /// Nanoseconds of each bin, ascending, and how many fell into it.
    pub bins: Vec<(u64, u64)>,
}

/// Processors kept busy: 1.0 is one of them all the time.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Cpu {
    /// By anything.
    pub(crate) busy: f64,
    pub(crate) fio: f64,
    pub(crate) daemons: f64,
}

/// Cost of an I/O at one end; a quantity that was not counted is absent.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PerIo {
    /// Work requests posted on the send queue.
    pub messages: Option<f64>,
    pub(crate) completions: Option<f64>,
    pub(crate) doorbells: Option<f64>,
    /// System calls of its data threads.
    pub syscalls: Option<f64>,
    /// Context switches of its data threads.
    pub(crate) switches: Option<f64>,
    pub(crate) copied_bytes: Option<f64>,
    pub(crate) cpu_ns: Option<f64>,
}

impl Cell {
    /// A cell with its key: `randread-4k-qd32-j1-q1`, and `randrw70-...` for a mix of 70 reads and
    /// 30 writes.
    pub(crate) fn new(
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
    pub(crate) fn title(&self) -> String {
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
mod tests;
