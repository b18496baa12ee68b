//! `rblk-bench`: measures rblk.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rblk_bench::cost::{self, Plan};
use rblk_bench::inprocess::VolumeKind;
use rblk_config::{ByteSize, Exit};
use rblk_initiator::io::IoOp;

/// Measures rblk.
#[derive(Debug, Parser)]
#[command(name = "rblk-bench", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Count what one I/O costs: messages, completions, doorbells and copied bytes at each end.
    ///
    /// Runs the real engines of initiator and target in this process over the in-memory fabric and divides
    /// their own counters by the number of I/Os. Nothing is timed: the numbers are the same on every host.
    Cost(CostArgs),
}

#[derive(Debug, Args)]
struct CostArgs {
    /// Operations to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "read,write")]
    ops: Vec<Op>,
    /// Bytes per I/O, whole blocks of 512.
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4KiB,128KiB")]
    sizes: Vec<ByteSize>,
    /// I/Os outstanding.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,32")]
    depths: Vec<u16>,
    /// Depth of the queue; deeper where more are outstanding.
    #[arg(long, value_name = "N", default_value_t = rblk_protocol::limits::QUEUE_DEPTH_DEFAULT)]
    queue_depth: u16,
    /// I/Os of each case.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    ios: u64,
    /// Where the volume's bytes are.
    #[arg(long, value_enum, default_value = "store")]
    volume: Volume,
    /// Write data up to this size travels inside the command.
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(rblk_protocol::limits::IN_CAPSULE_DEFAULT_BYTES.into()))]
    inline: ByteSize,
    /// Answer READs with WRITE and SEND, as over devices without WRITE_WITH_IMM.
    #[arg(long)]
    no_immediates: bool,
    /// READs the target may have outstanding.
    #[arg(long, value_name = "N", default_value_t = 16)]
    reads_out: u8,
    /// Seed of the in-memory fabric.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Form of the answer.
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Op {
    /// Volume to initiator.
    Read,
    /// Initiator to volume.
    Write,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Volume {
    /// In registered memory of the target.
    Memory,
    /// Nowhere.
    Null,
    /// In a store behind the arena, as files are.
    Store,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Output {
    /// For people.
    Table,
    /// For programs: one JSON document.
    Json,
}

impl CostArgs {
    fn plan(&self) -> anyhow::Result<Plan> {
        let bytes = |size: &ByteSize| u32::try_from(size.0);
        Ok(Plan {
            ops: self
                .ops
                .iter()
                .map(|op| match op {
                    Op::Read => IoOp::Read,
                    Op::Write => IoOp::Write,
                })
                .collect(),
            sizes: self.sizes.iter().map(bytes).collect::<Result<_, _>>()?,
            depths: self.depths.clone(),
            queue_depth: self.queue_depth,
            ios: self.ios,
            volume: match self.volume {
                Volume::Memory => VolumeKind::Memory,
                Volume::Null => VolumeKind::Null,
                Volume::Store => VolumeKind::Store,
            },
            in_capsule_bytes: bytes(&self.inline)?,
            immediates: !self.no_immediates,
            reads_out: self.reads_out,
            seed: self.seed,
        })
    }
}

fn main() -> ExitCode {
    let Command::Cost(args) = Cli::parse().command;
    let result = args.plan().and_then(|plan| cost::measure(&plan)).and_then(|report| {
        let text = match args.output {
            Output::Table => cost::table(&report),
            Output::Json => serde_json::to_string_pretty(&report)? + "\n",
        };
        match std::io::stdout().write_all(text.as_bytes()) {
            // Who reads it has seen enough.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            written => Ok(written?),
        }
    });
    match result {
        Ok(()) => Exit::Ok.into(),
        Err(error) => {
            eprintln!("rblk-bench: {error:#}");
            Exit::Failure.into()
        }
    }
}
