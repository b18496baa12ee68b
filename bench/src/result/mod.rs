//! [`Run`]: everything that one run measured, as it is kept in `run.json`.
//!
//! The data model is all there is between those who measure (`compare`, `fabric`, `cost`, `scale`)
//! and those who tell (`report`): a run can be drawn again, added to, or read by other programs
//! years later. Fields are added, never changed; what a run does not have is absent or empty, and
//! everybody who reads one copes with that.
//!
//! Units are in the names. Ratios are never stored: they are of samples of the same round
//! ([`Run::ratio`]), because a machine changes more between two rounds than two systems differ.

mod fabric;
mod profile;
mod sample;
mod scale;
mod summary;

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::cost::Report;

pub use self::fabric::{
    Bandwidth, Fabric, FabricDevice, Pages, Perf, PingPong, Registration, Wait,
};
pub use self::profile::{CpuProfile, FunctionShare, ThreadShare};
pub use self::sample::{Cell, Cpu, Latency, PerIo, Sample};
pub use self::scale::{Axis, Idle, Point, Scale, ScaleLine, ScalePlot, Unit};
pub use self::summary::{Summary, paired};

/// The version of the data model.
pub const SCHEMA: u32 = 1;

/// The keys of the systems that a report knows, in the order in which it shows them. Others come
/// after.
pub mod system {
    /// rblk over verbs.
    pub const RBLK_VERBS: &str = "rblk-verbs";
    /// rblk over verbs with both ends spinning all the time.
    pub const RBLK_VERBS_SPIN: &str = "rblk-verbs-spin";
    /// rblk over TCP by the software provider.
    pub const RBLK_TCP: &str = "rblk-tcp";
    /// rblk over verbs by fio's engine, without a block device.
    pub const RBLK_ENGINE: &str = "rblk-engine";
    /// The same over TCP.
    pub const RBLK_ENGINE_TCP: &str = "rblk-engine-tcp";
    /// nbdkit by fio's engine, over TCP.
    pub const NBDKIT_TCP: &str = "nbdkit-tcp";
    /// The same over a Unix socket.
    pub const NBDKIT_UNIX: &str = "nbdkit-unix";
    /// qemu-nbd by fio's engine, over TCP.
    pub const QEMU_NBD_TCP: &str = "qemu-nbd-tcp";
    /// The same over a Unix socket.
    pub const QEMU_NBD_UNIX: &str = "qemu-nbd-unix";
    /// tgt by iscsi-perf of libiscsi, over TCP.
    pub const TGT: &str = "tgt";
    /// The kernel's NVMe over RDMA.
    pub const NVME_RDMA: &str = "nvme-rdma";
    /// The kernel's NVMe over TCP.
    pub const NVME_TCP: &str = "nvme-tcp";
    /// The kernel's NBD client and nbdkit.
    pub const NBD: &str = "nbd";
    /// A ublk device that does nothing.
    pub const UBLK_NULL: &str = "ublk-null";
    /// A RAM disk of this machine.
    pub const LOCAL: &str = "local";

    /// Those that are disks, in order.
    pub const ORDER: [&str; 8] =
        [RBLK_VERBS, RBLK_VERBS_SPIN, RBLK_TCP, NVME_RDMA, NVME_TCP, NBD, UBLK_NULL, LOCAL];
    /// Those that are reached without a disk, in order.
    pub const ENGINES: [&str; 7] =
        [RBLK_ENGINE, RBLK_ENGINE_TCP, NBDKIT_TCP, NBDKIT_UNIX, QEMU_NBD_TCP, QEMU_NBD_UNIX, TGT];

    /// All of them, in order.
    pub fn all() -> impl Iterator<Item = &'static str> {
        ORDER.into_iter().chain(ENGINES)
    }
}

/// Everything that one run measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Run {
    /// [`SCHEMA`] of the program that wrote the run.
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
    /// Where the processors' time went, at most one for each system and cell.
    pub profiles: Vec<CpuProfile>,
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
    /// Everything else worth knowing, in the order in which it is to be read: command line of the
    /// kernel, clock source, governor, RDMA devices with firmware, link and MTU, versions of tools.
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
    /// QPs that carry one queue of it. 0: not noted.
    pub qps: u32,
    /// Why it was not measured.
    pub error: Option<String>,
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
            profiles: Vec::new(),
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
        self.perf_rounds_by(1, tool, bytes, value)
    }

    /// The same with so many QPs.
    #[must_use]
    pub fn perf_rounds_by(
        &self,
        qps: u32,
        tool: &str,
        bytes: u64,
        value: impl Fn(&Perf) -> Option<f64>,
    ) -> BTreeMap<u32, f64> {
        self.perftest
            .iter()
            .filter(|perf| perf.tool == tool && perf.bytes == bytes && !perf.events)
            .filter(|perf| perf.qps.max(1) == qps)
            .filter_map(|perf| Some((perf.round, value(perf)?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(system: &str, round: u32, iops: f64) -> Sample {
        Sample { system: system.into(), cell: "c".into(), round, iops, ..Sample::default() }
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
