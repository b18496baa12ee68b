//! The command line of `rblk-bench hw-check`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::output::Output;

/// Arguments of `hw-check`.
#[derive(Clone, Debug, Args)]
pub struct HwCheckArgs {
    /// An address of an RDMA device of this host, as 192.0.2.1 or rdma://192.0.2.1: both ends are
    /// then in this process, over the loopback of the device. With an address of another host, the
    /// parts that need no second end are checked on the device that leads there. tcp://127.0.0.1
    /// checks the software provider.
    #[arg(value_name = "ADDRESS")]
    pub address: String,
    /// Parts to check [default: all].
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Parts not to check.
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',')]
    pub skip: Vec<Part>,
    /// Small and short: a minute. Says whether things work, and little about speed.
    #[arg(long, conflicts_with = "long")]
    pub quick: bool,
    /// Ten million wake-ups instead of a hundred thousand, and more rounds of everything.
    #[arg(long)]
    pub long: bool,
    /// A running rblk-target to try as well, by `rblk-initiator doctor`, with the keys of this
    /// host.
    #[arg(long, value_name = "URL")]
    pub target: Option<String>,
    /// Directory of rblk-initiator, for --target [default: this program's own].
    #[arg(long, value_name = "DIR")]
    pub programs: Option<PathBuf>,
    /// Write everything as JSON to a file, for a bug report. It has addresses, GIDs and names of
    /// this host, and no keys.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Form of the answer on stdout; progress is on stderr.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// A part of the check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// Device, port, firmware, limits, PCIe, NUMA, locked memory.
    Device,
    /// QPs and CQs: the sizes that are granted.
    Queues,
    /// Time to register memory.
    Registration,
    /// Time to connect and to destroy, and the stall of a neighbour.
    Connects,
    /// The verbs that rblk uses, and the data that they move.
    Verbs,
    /// Completions and data after a QP is in the error state.
    Drain,
    /// Sleeping until a completion.
    Wakes,
    /// Bandwidth and latency, and the counters after that.
    Streams,
    /// Random reads of a large region, by page size.
    Random,
    /// Checks for hands: listed, not run.
    Hands,
}

impl Part {
    pub(super) fn word(self) -> String {
        crate::cost::word(&self)
    }
}

impl HwCheckArgs {
    /// Whether a part was asked for.
    pub fn wants(&self, part: Part) -> bool {
        (self.only.is_empty() || self.only.contains(&part)) && !self.skip.contains(&part)
    }
}
