//! The command line of `rblk-bench`.
//!
//! The comments here are the help that people read. Each command's work is in the module of its
//! name.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rblk_config::ByteSize;

use crate::cost::CostArgs;
use crate::hw_check::args::HwCheckArgs;
pub use crate::output::Output;

/// Measures rblk beside its peers, and says where the time goes.
///
/// A run is a folder: run.json with every number, raw/ with the output of fio, and report.html.
/// Commands with the same --out add to the same run, so one report can hold all of them.
#[derive(Debug, Parser)]
// Who calls this for others gives words of his own first, and theirs after.
#[command(args_override_self = true)]
#[command(name = "rblk-bench", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure rblk and the kernel's own remote disks with fio, in the same run on the same
    /// machine.
    ///
    /// Sets every system up beside the others (rblk over verbs and TCP, nvme-rdma, nvme-tcp, NBD, a
    /// local RAM disk, an empty ublk disk), measures them in turn, round by round, and takes away
    /// what it set up, also after it was killed: see `clean-up`. What cannot be set up here is a
    /// row that says why. Needs root and fio.
    ///
    /// On a pair of hosts, where both ends are set up already, name the devices: --rblk /dev/ublkb0
    /// --peer nvme-rdma=/dev/nvme1n1. What is on them is OVERWRITTEN.
    Compare(CompareArgs),
    /// Measure what the transports cost by themselves: registration, ping-pong, bandwidth.
    ///
    /// Both ends run in this process unless one host says --serve and the other names it. perftest
    /// is run beside, where it is installed, as the measure of what the device can do.
    Fabric(FabricArgs),
    /// Check a network card that nobody has tried with rblk: limits, registration, connects, data,
    /// the end of QPs, wake-ups, bandwidth.
    ///
    /// Both ends are in this process. Each line has a verdict, a value, and for what is wrong the
    /// mend; the exit code is 1 if something fails. No disk is used and no target is needed. Other
    /// programs on the card lose bandwidth while it runs.
    HwCheck(HwCheckArgs),
    /// Count what one I/O costs: messages, completions, doorbells, copies, allocations and
    /// instructions at each end.
    ///
    /// Runs the real engines of initiator and target in this process over the in-memory fabric and
    /// divides their own counters by the number of I/Os. Nothing is timed: the numbers are the same
    /// on every host.
    Cost(CostCommand),
    /// Measure how cost grows with queues, volumes, sessions, file size and cache size, and what
    /// idle mounts cost.
    ///
    /// Each thing grows by itself, the rest held fixed; the exponent of growth is printed, and what
    /// is worse than linear is flagged.
    Scale(ScaleArgs),
    /// Draw the report of a run again, from its run.json.
    Report(ReportArgs),
    /// Write the index of a directory of runs: how the figures that decide changed from run to run.
    ///
    /// The figures of each run go into trend.json beside the runs, so they stay when a run is
    /// deleted. index.html shows them, and links to the reports that are there.
    Trend(TrendArgs),
    /// Take away what runs that were killed have left: devices, targets, subsystems, modules.
    ///
    /// Only what a run wrote into its journal is touched. Every run does this at its beginning,
    /// too.
    CleanUp(CleanUpArgs),
}

/// Where a run goes and how it is told.
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
    /// ublk-null; rblk-engine, rblk-engine-tcp, nbdkit-tcp, nbdkit-unix, qemu-nbd-tcp,
    /// qemu-nbd-unix, tgt; `none` for variants alone [default: all that this machine can set up].
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
    /// Where rblk's volume is; peers always have RAM.
    #[arg(long, value_enum, default_value = "memory")]
    pub volume: CompareVolume,
    /// Bytes of each device.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub size: ByteSize,
    /// Directory of rblk-target, rblk-initiator and their daemons [default: this program's own].
    #[arg(long, value_name = "DIR")]
    pub programs: Option<PathBuf>,
    /// Targets let everybody in, and nobody proves a key.
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

/// Where rblk's volume is in `compare`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum CompareVolume {
    /// In registered memory of the target.
    Memory,
    /// On a RAM disk, behind the cache.
    RamDisk,
    /// In a file, behind the cache.
    File,
}

/// Arguments of `fabric`.
#[derive(Clone, Debug, Args)]
pub struct FabricArgs {
    /// rdma://IP or tcp://IP; several are measured one after the other [default: every RDMA device
    /// here, and tcp://127.0.0.1].
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub address: Vec<String>,
    /// RDMA device, where an address has several.
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Seconds of each measurement.
    #[arg(long, value_name = "SECS", default_value_t = 1.0)]
    pub seconds: f64,
    /// Largest region to register.
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub region: ByteSize,
    /// Be the far end for another host's `fabric --peer`, until it is interrupted.
    #[arg(long, conflicts_with = "peer")]
    pub serve: bool,
    /// The far end is `fabric --serve` at this host instead of this process.
    #[arg(long, value_name = "HOST")]
    pub peer: Option<String>,
    /// Do not run perftest beside.
    #[arg(long)]
    pub no_perftest: bool,
    /// Where the run goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `cost`.
#[derive(Clone, Debug, Args)]
pub struct CostCommand {
    /// What to count.
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
    /// What grows [default: all that this machine can measure].
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
    /// Most sessions.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub sessions: u32,
    /// Largest file.
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    pub file_size: ByteSize,
    /// Largest arena.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub arena: ByteSize,
    /// Seconds that idle mounts are watched.
    #[arg(long, value_name = "SECS", default_value_t = 60)]
    pub idle_seconds: u32,
    /// Address that targets listen on here, for queues over verbs [default: that of the first RDMA
    /// device].
    #[arg(long, value_name = "IP")]
    pub address: Option<IpAddr>,
    /// Directory of rblk-target, rblk-initiator and their daemons [default: this program's own].
    #[arg(long, value_name = "DIR")]
    pub programs: Option<PathBuf>,
    /// Targets let everybody in, and nobody proves a key.
    #[arg(long)]
    pub insecure: bool,
    /// Where the run goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// What grows in `scale`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Growth {
    /// Queues of one mount: IOPS.
    Queues,
    /// Mounted volumes: IOPS.
    Volumes,
    /// Sessions of one target: memory and time to connect.
    Sessions,
    /// The backing file: latency.
    FileSize,
    /// The target's cache: latency of hits and of misses.
    Arena,
    /// Mounts that are made at once, with keys and without: time until they are there.
    Connect,
    /// Queues of another volume that are never idle: p99 of a quiet volume beside them.
    Neighbour,
    /// Nothing: processor time of mounts that have nothing to do.
    Idle,
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
    /// Also write the chart of a run of `compare --engine direct` to this file, as SVG.
    #[arg(long, value_name = "FILE")]
    pub chart: Option<PathBuf>,
    /// Form of the answer on stdout.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// Arguments of `trend`.
#[derive(Clone, Debug, Args)]
pub struct TrendArgs {
    /// Directory of the runs.
    #[arg(value_name = "DIR", default_value = "bench/results")]
    pub results: PathBuf,
}

/// Arguments of `clean-up`.
#[derive(Clone, Debug, Args)]
pub struct CleanUpArgs {
    /// Say what would be done, and do nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// A command line as it is kept with a run: without the directories of this machine.
#[must_use]
pub fn to_record(mut words: impl Iterator<Item = String>) -> Vec<String> {
    let program = words.next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    let mut kept = vec![program];
    while let Some(word) = words.next() {
        match word.as_str() {
            "--out" | "--programs" => drop(words.next()),
            other if other.starts_with("--out=") || other.starts_with("--programs=") => {}
            _ => kept.push(word),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_holds_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_was_accepted_is_accepted() {
        let cli = ["rblk-bench", "cost", "--ops", "read", "--sizes", "4KiB", "--seed", "7"];
        assert!(matches!(Cli::try_parse_from(cli).unwrap().command, Command::Cost(_)));
    }

    #[test]
    fn later_words_count() {
        let cli = [
            "rblk-bench",
            "compare",
            "--rounds",
            "1",
            "--rounds",
            "5",
            "--peer",
            "a=/a",
            "--peer",
            "b=/b",
        ];
        let Command::Compare(args) = Cli::try_parse_from(cli).unwrap().command else { panic!() };
        assert_eq!((args.rounds, args.peer.len()), (5, 2));
    }

    #[test]
    fn directories_of_this_machine_are_not_kept() {
        let words = "/opt/x/rblk-bench compare --out /home/me/run --cells gate --programs=/opt/x";
        let kept = to_record(words.split(' ').map(str::to_owned));
        assert_eq!(kept, ["rblk-bench", "compare", "--cells", "gate"]);
        assert!(to_record(std::iter::empty()).len() == 1);
    }
}
