//! The command line of `rblk-bench`. The comments here are the help that people read.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rblk_config::ByteSize;

use crate::cost::CostArgs;
use crate::hw_check::args::HwCheckArgs;
use crate::output::Output;
use crate::peer::compare_volume::CompareVolume;

/// Measures rblk beside its peers, and says where the time goes.
///
/// A run is a folder: run.json with every number, raw/ with the output of fio, and report.html.
/// Commands with the same --out add to the same run, so one report can hold all of them.
#[derive(Debug, Parser)]
// A caller may put defaults before the words of its user.
#[command(args_override_self = true)]
#[command(name = "rblk-bench", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure rblk and the kernel's own remote disks with fio, in the same run on the same
    /// machine.
    ///
    /// Sets every system up beside the others (rblk over verbs and TCP, nvme-rdma, nvme-tcp, NBD, a
    /// local RAM disk, an empty ublk disk), measures them in turn, round by round, and takes them
    /// away again, also after it was killed: see `clean-up`. A system that cannot be set up here is
    /// a row with the reason. Needs root and fio.
    ///
    /// On a pair of hosts, where both ends are set up already, name the devices: --rblk /dev/ublkb0
    /// --peer nvme-rdma=/dev/nvme1n1. Their contents are OVERWRITTEN.
    Compare(CompareArgs),
    /// Check a network card that was never used with rblk: limits, registration, connects, data,
    /// the end of QPs, wake-ups, bandwidth.
    ///
    /// Both ends are in this process. Each line has a verdict, a value and, for a problem, the
    /// remedy; the exit code is 1 if something fails. No disk is used and no target is needed.
    /// Other programs on the card lose bandwidth while it runs.
    HwCheck(HwCheckArgs),
    /// Count the cost of one I/O: messages, completions, doorbells, copies, allocations and
    /// instructions at each end.
    ///
    /// Runs the real engines of initiator and target in this process over the in-memory fabric and
    /// divides their own counters by the number of I/Os. Nothing is timed: the numbers are the same
    /// on every host.
    Cost(CostCommand),
    /// Measure many hosts and mounts of one target: connecting at once, a quiet host beside a busy
    /// one, idle mounts.
    Scale(ScaleArgs),
    /// Draw the report of a run again, from its run.json.
    Report(ReportArgs),
    /// Take away the remains of runs that were killed: devices, targets, subsystems, modules.
    ///
    /// Only the steps in the journal of a run are undone. Every run begins with this, too.
    CleanUp(CleanUpArgs),
    /// Sleep again and again: a process that `scale` measures idle mounts by.
    #[command(hide = true)]
    Sleeper(SleeperArgs),
}

/// The folder of a run, and the form of the answer.
#[derive(Clone, Debug, Args)]
pub struct OutputArgs {
    /// Folder of the run; one that holds a run already is added to [default: rblk-bench-TIME].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Form of the answer on stdout; progress is on stderr.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// Arguments of `compare`.
#[derive(Clone, Debug, Args)]
pub struct CompareArgs {
    /// How fio reaches the systems, if --systems does not name them.
    #[arg(long, value_enum, default_value = "disk")]
    pub engine: CompareEngine,
    /// Systems to measure, by key: rblk-verbs, rblk-tcp, nvme-rdma, nvme-tcp, nbd, local,
    /// local-file, ublk-null; rblk-engine, rblk-engine-tcp, nbdkit-tcp, nbdkit-unix, qemu-nbd-tcp,
    /// qemu-nbd-unix, tgt, socket; `none` for variants alone [default: all that this machine can
    /// set up].
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    pub systems: Vec<String>,
    /// librblk_fio.so, which `cargo xtask fio-engine` makes [default: beside the programs, or in
    /// the directory above].
    #[arg(long, value_name = "FILE")]
    pub fio_engine: Option<PathBuf>,
    /// Workloads: `gate` (6 cells: 4k random at depth 1 and 32, 128k at depth 16), `full`, `smoke`
    /// (2), or keys as randread-4k-qd8-j1-q1, comma between.
    #[arg(long, value_name = "SET", default_value = "gate")]
    pub cells: String,
    /// Rounds; systems take turns within each, so that a ratio is of neighbours in time.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: u32,
    /// Seconds of each sample, after one second to get going.
    #[arg(long, value_name = "SECS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Queues of the devices; the gate's cells are measured with each.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    pub queues: Vec<u16>,
    /// Address that targets listen on here [default: that of the first RDMA device].
    #[arg(long, value_name = "IP")]
    pub address: Option<IpAddr>,
    /// Where rblk's volume is; peers always have RAM. With a file, fio also measures a file of this
    /// host (local-file).
    #[arg(long, value_enum, default_value = "memory")]
    pub volume: CompareVolume,
    /// Where files are, for a volume in a file and for local-file [default: /run/rblk-bench, which
    /// is often memory].
    #[arg(long, value_name = "DIR")]
    pub directory: Option<PathBuf>,
    /// Bytes of each device.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub size: ByteSize,
    /// Directory of rblk-target, rblk-initiator and their daemons [default: this program's own].
    #[arg(long, value_name = "DIR")]
    pub programs: Option<PathBuf>,
    /// Targets let every host in, without keys.
    #[arg(long)]
    pub insecure: bool,
    /// A mounted rblk device that is there already, as PATH or NAME=PATH. OVERWRITTEN.
    #[arg(long, value_name = "DEV")]
    pub rblk: Vec<String>,
    /// A peer's device that is there already, as NAME=PATH. OVERWRITTEN.
    #[arg(long, value_name = "NAME=DEV")]
    pub peer: Vec<String>,
    /// One more rblk beside the others, as NAME=WORDS, to compare it with itself: `tcp`,
    /// `VARIABLE=value` and `--flag=value` for both ends, `target:--flag=value`,
    /// `mount:--flag=value`, `programs=DIR`; `engine` for fio's engine without a mount, and
    /// `engine:KEY=value` for a line of its file. Repeat for several.
    #[arg(long, value_name = "NAME=WORDS")]
    pub variant: Vec<String>,
    /// Do not count system calls and context switches in extra samples.
    #[arg(long)]
    pub no_probe: bool,
    /// Sample with perf where the processors' time goes, in one more sample of each cell and
    /// system.
    #[arg(long)]
    pub profile: bool,
    /// Do not run perftest in every round.
    #[arg(long)]
    pub no_perftest: bool,
    /// Where the run goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// How fio reaches the systems of `compare`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum CompareEngine {
    /// As block devices, by the kernel.
    Disk,
    /// By an engine of fio's that speaks to the server itself. Over TCP no RDMA and no ublk is
    /// needed.
    Direct,
}

/// Arguments of `cost`.
#[derive(Clone, Debug, Args)]
pub struct CostCommand {
    /// The cases to count.
    #[command(flatten)]
    pub cost: CostArgs,
    /// Folder of a run to add this to; without it nothing is written.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Form of the answer on stdout.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// Arguments of `scale`.
#[derive(Clone, Debug, Args)]
pub struct ScaleArgs {
    /// Measurements [default: all that this machine can do].
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',')]
    pub what: Vec<Growth>,
    /// Seconds of each sample.
    #[arg(long, value_name = "SECS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Rounds; the median is drawn, with the spread.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: u32,
    /// Most volumes.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub volumes: u32,
    /// Seconds that idle mounts are watched.
    #[arg(long, value_name = "SECS", default_value_t = 60)]
    pub idle_seconds: u32,
    /// Address of an RDMA device of this host [default: that of the first one].
    #[arg(long, value_name = "IP")]
    pub address: Option<IpAddr>,
    /// Directory of rblk-target, rblk-initiator and their daemons [default: this program's own].
    #[arg(long, value_name = "DIR")]
    pub programs: Option<PathBuf>,
    /// Targets let every host in, without keys.
    #[arg(long)]
    pub insecure: bool,
    /// The folder of the run.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// A measurement of `scale`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Growth {
    /// Sessions and mounts that connect at once, with keys and without: time until they are there.
    Connect,
    /// Queues of another volume that are never idle: p99 of a quiet volume beside them.
    Neighbour,
    /// Processor time of mounts without I/O.
    Idle,
}

/// Arguments of `sleeper`, in milliseconds.
#[derive(Clone, Copy, Debug, Args)]
pub struct SleeperArgs {
    /// Time until the first wake-up.
    pub first: u64,
    /// Time between wake-ups.
    pub period: u64,
    /// Time until it ends.
    pub time: u64,
}

/// Arguments of `report`.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Folder of the run, or its run.json.
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Folder that the report goes to [default: the run's].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Form of the answer on stdout.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// Arguments of `clean-up`.
#[derive(Clone, Debug, Args)]
pub struct CleanUpArgs {
    /// Print the steps, and do nothing.
    #[arg(long)]
    pub dry_run: bool,
}

#[cfg(test)]
mod tests;
