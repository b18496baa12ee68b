//! [`Run`]: everything that one run measured, as it is kept in `run.json`.
//!
//! The data model is all there is between those who measure (`compare`, `fabric`, `cost`, `scale`) and those who
//! tell (`report`): a run can be drawn again, added to, or read by other programs years later. Fields are added,
//! never changed; what a run does not have is absent or empty, and everybody who reads one copes with that.
//!
//! Units are in the names. Ratios are never stored: they are of samples of the same round ([`Run::ratio`]), because
//! a machine changes more between two rounds than two systems differ.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::cost::Report;

/// The version of the data model.
pub const SCHEMA: u32 = 1;

/// The keys of the systems that a report knows, in the order in which it shows them. Others come after.
pub mod system {
    /// rblk over verbs.
    pub const RBLK_VERBS: &str = "rblk-verbs";
    /// rblk over verbs with both ends spinning all the time.
    pub const RBLK_VERBS_SPIN: &str = "rblk-verbs-spin";
    /// rblk over TCP by the software provider.
    pub const RBLK_TCP: &str = "rblk-tcp";
    /// The kernel's NVMe over RDMA.
    pub const NVME_RDMA: &str = "nvme-rdma";
    /// The kernel's NVMe over TCP.
    pub const NVME_TCP: &str = "nvme-tcp";
    /// The kernel's NBD client and nbdkit.
    pub const NBD: &str = "nbd";
    /// A ublk device that does nothing.
    pub const UBLK_NULL: &str = "ublk-null";
    /// A ublk device that does nothing, with the kernel's batch commands.
    pub const UBLK_NULL_BATCH: &str = "ublk-null-batch";
    /// A RAM disk of this machine.
    pub const LOCAL: &str = "local";

    /// All of them, in order.
    pub const ORDER: [&str; 9] = [
        RBLK_VERBS,
        RBLK_VERBS_SPIN,
        RBLK_TCP,
        NVME_RDMA,
        NVME_TCP,
        NBD,
        UBLK_NULL,
        UBLK_NULL_BATCH,
        LOCAL,
    ];
}

/// Everything that one run measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Run {
    /// [`SCHEMA`] of whoever wrote it.
    pub schema: u32,
    /// A name for people: when it began and what it was.
    pub id: String,
    /// Seconds of the Unix clock at the beginning.
    pub began_unix: u64,
    /// The commands that made it, each with its arguments.
    pub commands: Vec<Vec<String>>,
    /// Where it ran.
    pub place: Place,
    /// What was measured, and what could not be and why.
    pub systems: Vec<SystemInfo>,
    /// The workloads.
    pub cells: Vec<Cell>,
    /// One for each system, cell and round.
    pub samples: Vec<Sample>,
    /// perftest in the same run, on the same device.
    pub perftest: Vec<Perf>,
    /// What the transports cost by themselves.
    pub fabric: Option<Fabric>,
    /// What one I/O costs.
    pub cost: Option<Report>,
    /// How cost grows with the work.
    pub scale: Option<Scale>,
}

/// Where a run ran.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Place {
    /// Name of the host.
    pub host: String,
    /// `uname -r`.
    pub kernel: String,
    /// The processor's name.
    pub cpu: String,
    /// Processors online.
    pub cpus: u32,
    /// The commit of the sources, with `+` where they had been changed.
    pub commit: String,
    /// Whether it ran in the emulated guest of `cargo xtask lab`.
    pub lab: bool,
    /// Everything else worth knowing, in the order in which it is to be read: command line of the kernel, clock
    /// source, governor, RDMA devices with firmware, link and MTU, versions of tools.
    pub facts: Vec<Fact>,
}

/// One thing worth knowing of a place.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fact {
    /// What it is.
    pub name: String,
    /// Its value.
    pub value: String,
}

/// Whose a system is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// Ours.
    #[default]
    Rblk,
    /// A peer: does the same work.
    Kernel,
    /// Does less than the work: nothing that does all of it can be faster.
    Floor,
}

/// A system that was to be measured.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SystemInfo {
    /// One of [`system`], or a name that the caller gave.
    pub key: String,
    /// Its name for people.
    pub title: String,
    /// Whose it is.
    pub family: Family,
    /// What carries its messages: `rdma`, `tcp`, or nothing.
    pub transport: String,
    /// What was set up, in a line: backing, queues, options.
    pub detail: String,
    /// Why it was not measured.
    pub error: Option<String>,
}

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

/// One run of a perftest program.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Perf {
    /// `ib_send_lat`, `ib_write_bw`, ...
    pub tool: String,
    /// Bytes per message.
    pub bytes: u64,
    /// The round it belongs to, from 1.
    pub round: u32,
    /// Whether it waited for events instead of polling.
    pub events: bool,
    /// Mean latency as the program says it: half a round trip, or a whole one for reads.
    pub mean_us: Option<f64>,
    /// Mean bandwidth.
    pub mib_per_s: Option<f64>,
    /// Why there is no number.
    pub error: Option<String>,
}

/// What the transports cost by themselves.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fabric {
    /// One for each address that was asked for.
    pub devices: Vec<FabricDevice>,
}

/// One provider on one device.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FabricDevice {
    /// The address, as `rdma://10.9.0.1`.
    pub address: String,
    /// The device's name for people.
    pub title: String,
    /// Why it was not measured.
    pub error: Option<String>,
    /// What registering memory costs.
    pub registration: Vec<Registration>,
    /// Ping-pong.
    pub pingpong: Vec<PingPong>,
    /// Bandwidth.
    pub bandwidth: Vec<Bandwidth>,
    /// perftest on the same device.
    pub perftest: Vec<Perf>,
}

/// Pages under memory that is registered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pages {
    /// 4 KiB.
    #[default]
    Normal,
    /// 2 MiB where the kernel pleases.
    Transparent,
    /// 2 MiB, reserved.
    Huge,
}

/// Registering memory of one size.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Registration {
    /// Bytes of the region.
    pub bytes: u64,
    /// Pages under it.
    pub pages: Pages,
    /// Median time to register memory that is there, in nanoseconds.
    pub register_ns: f64,
    /// The same of memory that was never touched: its pages are found and zeroed meanwhile.
    pub fresh_ns: f64,
    /// Median time to deregister, in nanoseconds.
    pub deregister_ns: f64,
}

/// How an end waits for what comes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wait {
    /// It looks again and again.
    #[default]
    Polling,
    /// It sleeps until an event.
    Events,
}

/// Ping-pong of one kind, size and way to wait.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PingPong {
    /// `UDP`, `TCP`, `SEND`, `WRITE`, `READ` or `COMMAND`: a SEND of 64 bytes that a WRITE_WITH_IMM answers.
    pub what: String,
    /// Bytes per message.
    pub bytes: u64,
    /// How both ends wait.
    pub wait: Wait,
    /// Half of a round trip; a whole one for `READ`, as perftest has it, and for `COMMAND`.
    pub latency: Latency,
    /// Why there is no number.
    pub error: Option<String>,
}

/// Bandwidth of one kind and size.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Bandwidth {
    /// `SEND`, `WRITE` or `READ`.
    pub what: String,
    /// Bytes per message.
    pub bytes: u64,
    /// Messages outstanding.
    pub depth: u32,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Messages per second.
    pub messages_per_s: f64,
}

/// How cost grows with the work.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Scale {
    /// One for each thing that grows.
    pub plots: Vec<ScalePlot>,
    /// Daemons that have nothing to do.
    pub idle: Option<Idle>,
}

/// One thing that grows, and what grows with it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ScalePlot {
    /// Its name in files: `iops-by-queues`.
    pub key: String,
    /// Its name for people.
    pub title: String,
    /// What grows, and its unit.
    pub x: Axis,
    /// What grows with it, and its unit.
    pub y: Axis,
    /// One for each system or variant.
    pub lines: Vec<ScaleLine>,
    /// What a reader should know: what was held fixed, what the machine limits.
    pub note: String,
    /// Why there is nothing in it.
    pub error: Option<String>,
}

/// An axis.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Axis {
    /// What is on it.
    pub label: String,
    /// Its unit.
    pub unit: Unit,
    /// Whether equal steps are equal factors.
    pub log: bool,
}

/// What a number is, and so how it is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// A count, or a plain number.
    #[default]
    Count,
    /// I/Os per second.
    Iops,
    /// Bytes.
    Bytes,
    /// Bytes per second.
    BytesPerSecond,
    /// Nanoseconds.
    Nanoseconds,
    /// A part of a hundred.
    Percent,
}

/// One line of a [`ScalePlot`].
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ScaleLine {
    /// Its name.
    pub label: String,
    /// Its points, by ascending `x`.
    pub points: Vec<Point>,
    /// Exponent of growth: 1 where twice the work costs twice as much. `None`: not meant to be fitted.
    pub slope: Option<f64>,
    /// Whether it is worse than it has to be.
    pub flagged: bool,
}

/// A measured point with its spread.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Point {
    /// What was set.
    pub x: f64,
    /// The median of what was measured.
    pub y: f64,
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
}

/// Daemons that have nothing to do.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Idle {
    /// Volumes mounted.
    pub volumes: u32,
    /// How long they were watched.
    pub seconds: f64,
    /// Percent of one processor that all initiator daemons together used.
    pub initiator_percent: f64,
    /// Percent of one processor that the target used.
    pub target_percent: f64,
    /// Where, in a line.
    pub place: String,
}

/// Several rounds of one thing.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Summary {
    /// The median.
    pub median: f64,
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
    /// Rounds.
    pub count: usize,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            schema: SCHEMA,
            id: String::new(),
            began_unix: 0,
            commands: Vec::new(),
            place: Place::default(),
            systems: Vec::new(),
            cells: Vec::new(),
            samples: Vec::new(),
            perftest: Vec::new(),
            fabric: None,
            cost: None,
            scale: None,
        }
    }
}

impl Run {
    /// An empty run that begins now.
    #[must_use]
    pub fn begin(id: &str) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { id: id.to_owned(), began_unix: now, ..Self::default() }
    }

    /// Takes a system in; one with the same key is replaced, so that a run can be taken up again.
    pub fn set_system(&mut self, info: SystemInfo) {
        match self.systems.iter_mut().find(|system| system.key == info.key) {
            Some(system) => *system = info,
            None => self.systems.push(info),
        }
    }

    /// Takes a cell in, once.
    pub fn add_cell(&mut self, cell: Cell) {
        if !self.cells.contains(&cell) {
            self.cells.push(cell);
        }
    }

    /// The sample of a system, a cell and a round.
    #[must_use]
    pub fn sample(&self, system: &str, cell: &str, round: u32) -> Option<&Sample> {
        self.samples
            .iter()
            .find(|sample| sample.system == system && sample.cell == cell && sample.round == round)
    }

    /// Takes a sample in, instead of an earlier one of the same system, cell and round.
    pub fn set_sample(&mut self, sample: Sample) {
        let same = |s: &Sample| {
            s.system == sample.system && s.cell == sample.cell && s.round == sample.round
        };
        match self.samples.iter().position(same) {
            Some(at) => self.samples[at] = sample,
            None => self.samples.push(sample),
        }
    }

    /// All rounds of a system in a cell, by round.
    #[must_use]
    pub fn rounds(&self, system: &str, cell: &str) -> Vec<&Sample> {
        let mut rounds: Vec<&Sample> =
            self.samples.iter().filter(|s| s.system == system && s.cell == cell).collect();
        rounds.sort_by_key(|sample| sample.round);
        rounds
    }

    /// What `value` is in the rounds of a system in a cell; `None` if it was not measured.
    #[must_use]
    pub fn summary(
        &self,
        system: &str,
        cell: &str,
        value: impl Fn(&Sample) -> f64,
    ) -> Option<Summary> {
        Summary::of(self.rounds(system, cell).into_iter().map(value))
    }

    /// How many times as much as `theirs` a system has of `value` in a cell, each round by itself.
    #[must_use]
    pub fn ratio(
        &self,
        ours: &str,
        theirs: &str,
        cell: &str,
        value: impl Fn(&Sample) -> f64,
    ) -> Option<Summary> {
        let by_round = |system| -> BTreeMap<u32, f64> {
            self.rounds(system, cell).into_iter().map(|s| (s.round, value(s))).collect()
        };
        paired(&by_round(ours), &by_round(theirs))
    }

    /// What `value` is in all rounds of a perftest program with messages of `bytes`, by round.
    #[must_use]
    pub fn perf_rounds(
        &self,
        tool: &str,
        bytes: u64,
        value: impl Fn(&Perf) -> Option<f64>,
    ) -> BTreeMap<u32, f64> {
        self.perftest
            .iter()
            .filter(|perf| perf.tool == tool && perf.bytes == bytes && !perf.events)
            .filter_map(|perf| Some((perf.round, value(perf)?)))
            .collect()
    }
}

/// The ratios of rounds that both have.
#[must_use]
pub fn paired(ours: &BTreeMap<u32, f64>, theirs: &BTreeMap<u32, f64>) -> Option<Summary> {
    Summary::of(ours.iter().filter_map(|(round, ours)| {
        let theirs = theirs.get(round)?;
        (*theirs > 0.0).then(|| ours / theirs)
    }))
}

impl Cell {
    /// A cell with its key: `randread-4k-qd32-j1-q1`, and `randrw70-...` for a mix of 70 reads and 30 writes.
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

impl Summary {
    /// The median and the spread of what is a number; `None` if nothing is.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(values[middle - 1], values[middle])
        };
        Some(Self { median, low, high, count: values.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(system: &str, round: u32, iops: f64) -> Sample {
        Sample { system: system.into(), cell: "c".into(), round, iops, ..Sample::default() }
    }

    #[test]
    fn a_summary_is_of_numbers_only() {
        assert_eq!(Summary::of([]), None);
        assert_eq!(Summary::of([f64::NAN, f64::INFINITY]), None);
        let three = Summary::of([3.0, 1.0, f64::NAN, 2.0]).unwrap();
        assert_eq!(three, Summary { median: 2.0, low: 1.0, high: 3.0, count: 3 });
        assert!((Summary::of([1.0, 4.0]).unwrap().median - 2.5).abs() < 1e-9);
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let mut run = Run::begin("r");
        // The machine became twice as fast after round 1: both ratios are 1.5 all the same.
        for (round, ours, theirs) in [(1, 150.0, 100.0), (2, 300.0, 200.0)] {
            run.set_sample(sample("a", round, ours));
            run.set_sample(sample("b", round, theirs));
        }
        // A round that one of them does not have, or that measured nothing, has no ratio.
        run.set_sample(sample("a", 3, 900.0));
        run.set_sample(sample("a", 4, 900.0));
        run.set_sample(sample("b", 4, 0.0));
        let ratio = run.ratio("a", "b", "c", |s| s.iops).unwrap();
        assert_eq!(ratio, Summary { median: 1.5, low: 1.5, high: 1.5, count: 2 });
        assert_eq!(run.ratio("a", "nobody", "c", |s| s.iops), None);
    }

    #[test]
    fn what_is_measured_again_replaces_what_was() {
        let mut run = Run::begin("r");
        run.set_sample(sample("a", 1, 1.0));
        run.set_sample(sample("a", 1, 2.0));
        assert_eq!(run.samples.len(), 1);
        assert!((run.sample("a", "c", 1).unwrap().iops - 2.0).abs() < 1e-9);
        run.set_system(SystemInfo {
            key: "a".into(),
            error: Some("no".into()),
            ..SystemInfo::default()
        });
        run.set_system(SystemInfo { key: "a".into(), ..SystemInfo::default() });
        assert_eq!(run.systems.len(), 1);
        assert_eq!(run.systems[0].error, None);
    }

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

    #[test]
    fn a_run_is_read_back_and_an_older_one_too() {
        let mut run = Run::begin("r");
        run.set_sample(sample("a", 1, 1.0));
        run.cost = Some(Report::default());
        let text = serde_json::to_string(&run).unwrap();
        assert_eq!(serde_json::from_str::<Run>(&text).unwrap(), run);
        let old: Run = serde_json::from_str(r#"{"schema":1,"samples":[{"system":"x"}]}"#).unwrap();
        assert_eq!(old.samples[0].system, "x");
        assert_eq!(old.scale, None);
    }
}
