//! [`Run`]: the numbers of one run, as they are kept in `run.json`.
//!
//! Measurements (`compare`, `cost`, `scale`) write a run, and `report` draws it; later programs can
//! read it or add to it. Fields are added, never changed; a missing part is absent or empty.
//!
//! Units are in the names. Ratios are never stored: they are of samples of the same round
//! ([`Run::ratio`]), because a machine changes more between two rounds than two systems differ.

mod profile;
mod sample;
mod scale;
mod summary;

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::cost::Report;

pub(crate) use self::profile::{CpuProfile, FunctionShare, ThreadShare};
pub(crate) use self::sample::Cpu;
pub use self::sample::{Cell, Latency, PerIo, Sample};
pub(crate) use self::scale::{Axis, Idle, IdleEnd, Point, Scale, ScaleLine, ScalePlot, Unit};
pub(crate) use self::summary::{Summary, paired};

/// The version of the data model.
pub(crate) const SCHEMA: u32 = 1;

/// Keys of the known systems.
pub(crate) mod system {
    pub(crate) const RBLK_VERBS: &str = "rblk-verbs";
    /// Both ends spin all the time.
    pub(crate) const RBLK_VERBS_SPIN: &str = "rblk-verbs-spin";
    pub(crate) const RBLK_TCP: &str = "rblk-tcp";
    pub(crate) const NVME_RDMA: &str = "nvme-rdma";
    pub(crate) const NVME_TCP: &str = "nvme-tcp";
    pub(crate) const NBD: &str = "nbd";
    pub(crate) const UBLK_NULL: &str = "ublk-null";
    /// A file on this host, where rblk's volume is one.
    pub(crate) const LOCAL_FILE: &str = "local-file";

    /// Disks, in the order of a report.
    pub(crate) const DISKS: [&str; 9] = [
        RBLK_VERBS,
        RBLK_VERBS_SPIN,
        RBLK_TCP,
        NVME_RDMA,
        NVME_TCP,
        NBD,
        UBLK_NULL,
        "local",
        LOCAL_FILE,
    ];
    /// Systems without a disk, in order.
    pub(crate) const ENGINES: [&str; 8] = [
        "rblk-engine",
        "rblk-engine-tcp",
        "nbdkit-tcp",
        "nbdkit-unix",
        "qemu-nbd-tcp",
        "qemu-nbd-unix",
        "tgt",
        "socket",
    ];

    pub(crate) fn all() -> impl Iterator<Item = &'static str> {
        DISKS.into_iter().chain(ENGINES)
    }
}

/// One run.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Run {
    /// [`SCHEMA`] of the program that wrote the run.
    pub(crate) schema: u32,
    /// The name of its folder.
    pub id: String,
    /// Seconds of the Unix clock at the beginning.
    pub(crate) began_unix: u64,
    /// The commands that made it, each with its arguments.
    pub commands: Vec<Vec<String>>,
    pub(crate) place: Place,
    /// The systems, also those that could not be measured.
    pub systems: Vec<SystemInfo>,
    /// The workloads.
    pub cells: Vec<Cell>,
    /// One for each system, cell and round.
    pub samples: Vec<Sample>,
    pub(crate) perftest: Vec<Perf>,
    /// Where the processors' time went, at most one for each system and cell.
    pub(crate) profiles: Vec<CpuProfile>,
    /// The cost of one I/O.
    pub cost: Option<Report>,
    pub(crate) scale: Option<Scale>,
}

/// One run of a perftest program.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Perf {
    pub(crate) tool: String,
    pub(crate) bytes: u64,
    pub(crate) round: u32,
    /// Mean latency: half of a round trip.
    pub(crate) mean_us: Option<f64>,
    pub(crate) mib_per_s: Option<f64>,
    /// QPs at once; 0 in runs from before the field, which had one QP.
    pub(crate) qps: u32,
    /// Why there is no number.
    pub error: Option<String>,
}

/// Where a run ran.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Place {
    pub(crate) host: String,
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) cpus: u32,
    /// The commit of the sources, with `+` where they had been changed.
    pub(crate) commit: String,
    pub(crate) lab: bool,
    /// Other facts: command line of the kernel, clock source, governor, RDMA devices, versions of
    /// tools.
    pub(crate) facts: Vec<Fact>,
}

/// A fact about a place.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Fact {
    pub(crate) name: String,
    pub(crate) value: String,
}

/// The family of a system.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Family {
    #[default]
    Rblk,
    /// A peer: does the same work.
    Kernel,
    /// A floor: does less work, so no system can be faster.
    Floor,
}

/// A system that was to be measured.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SystemInfo {
    /// A known key, or a name from the command line.
    pub key: String,
    pub(crate) title: String,
    pub(crate) family: Family,
    /// Transport: `rdma`, `tcp`, `unix`, or nothing.
    pub(crate) transport: String,
    pub(crate) detail: String,
    /// QPs that carry one queue of it. 0: not noted.
    pub(crate) qps: u32,
    /// Why it was not measured.
    pub error: Option<String>,
}

impl Run {
    /// An empty run that begins now.
    pub(crate) fn begin(id: &str) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { schema: SCHEMA, id: id.to_owned(), began_unix: now, ..Self::default() }
    }

    /// Takes a system in; one with the same key is replaced, so that a run can be taken up again.
    pub(crate) fn set_system(&mut self, info: SystemInfo) {
        match self.systems.iter_mut().find(|system| system.key == info.key) {
            Some(system) => *system = info,
            None => self.systems.push(info),
        }
    }

    /// Takes a cell in, once.
    pub(crate) fn add_cell(&mut self, cell: Cell) {
        if !self.cells.contains(&cell) {
            self.cells.push(cell);
        }
    }

    /// The sample of a system, a cell and a round.
    pub fn sample(&self, system: &str, cell: &str, round: u32) -> Option<&Sample> {
        self.samples
            .iter()
            .find(|sample| sample.system == system && sample.cell == cell && sample.round == round)
    }

    /// Takes a sample in, instead of an earlier one of the same system, cell and round.
    pub(crate) fn set_sample(&mut self, sample: Sample) {
        let same = |s: &Sample| {
            s.system == sample.system && s.cell == sample.cell && s.round == sample.round
        };
        match self.samples.iter().position(same) {
            Some(at) => self.samples[at] = sample,
            None => self.samples.push(sample),
        }
    }

    /// All rounds of a system in a cell, by round.
    pub(crate) fn rounds(&self, system: &str, cell: &str) -> Vec<&Sample> {
        let mut rounds: Vec<&Sample> =
            self.samples.iter().filter(|s| s.system == system && s.cell == cell).collect();
        rounds.sort_by_key(|sample| sample.round);
        rounds
    }

    /// `value` in the rounds of a system in a cell; `None` if it was not measured.
    pub(crate) fn summary(
        &self,
        system: &str,
        cell: &str,
        value: impl Fn(&Sample) -> f64,
    ) -> Option<Summary> {
        Summary::of(self.rounds(system, cell).into_iter().map(value))
    }

    /// The ratio of `value` of two systems in a cell, each round by itself.
    pub(crate) fn ratio(
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

    /// `value` of a perftest program with messages of `bytes` over `qps` QPs, by round.
    pub(crate) fn perf_rounds(
        &self,
        qps: u32,
        tool: &str,
        bytes: u64,
        value: impl Fn(&Perf) -> Option<f64>,
    ) -> BTreeMap<u32, f64> {
        let same =
            |perf: &&Perf| (perf.tool.as_str(), perf.bytes, perf.qps.max(1)) == (tool, bytes, qps);
        let rounds = self.perftest.iter().filter(same);
        rounds.filter_map(|perf| Some((perf.round, value(perf)?))).collect()
    }
}

#[cfg(test)]
mod tests;
