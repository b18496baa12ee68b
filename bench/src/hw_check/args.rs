//! The command line of `rblk-bench hw-check`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::output::Output;

/// Arguments of `hw-check`.
#[derive(Clone, Debug, Args)]
pub struct HwCheckArgs {
    /// An address of an RDMA device of this host, as 192.0.2.1 or rdma://192.0.2.1: both ends are
    /// then in this process, over the loopback of the device. With an address of another host, what
    /// needs no second end is checked on the device that leads there. tcp://127.0.0.1 checks the
    /// software provider.
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
    /// QPs and CQs: what is granted.
    Queues,
    /// Time to register memory.
    Registration,
    /// Time to connect and to destroy, and who stands still meanwhile.
    Connects,
    /// The verbs that rblk uses, and the data that they move.
    Verbs,
    /// What a device still does after a QP is in the error state.
    Drain,
    /// Sleeping until a completion.
    Wakes,
    /// Bandwidth and latency, and what the counters say after it.
    Streams,
    /// Random reads of a large region, by page size.
    Random,
    /// What only hands can try. Listed, not run.
    Hands,
}

impl Part {
    /// All of them, in order.
    pub const ALL: [Self; 10] = [
        Self::Device,
        Self::Queues,
        Self::Registration,
        Self::Connects,
        Self::Verbs,
        Self::Drain,
        Self::Wakes,
        Self::Streams,
        Self::Random,
        Self::Hands,
    ];

    /// The word for it on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Queues => "queues",
            Self::Registration => "registration",
            Self::Connects => "connects",
            Self::Verbs => "verbs",
            Self::Drain => "drain",
            Self::Wakes => "wakes",
            Self::Streams => "streams",
            Self::Random => "random",
            Self::Hands => "hands",
        }
    }
}

impl HwCheckArgs {
    /// Whether a part was asked for.
    #[must_use]
    pub fn wants(&self, part: Part) -> bool {
        (self.only.is_empty() || self.only.contains(&part)) && !self.skip.contains(&part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_those_of_the_command_line() {
        for part in Part::ALL {
            let possible = part.to_possible_value().unwrap();
            assert_eq!(possible.get_name(), part.word());
            assert_eq!(serde_json::to_value(part).unwrap(), part.word());
        }
        assert_eq!(Part::value_variants().len(), Part::ALL.len());
    }
}
