//! Developer commands, run as `cargo xtask COMMAND`.
//!
//! This file only declares the command line; each command lives in a module of its own.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

mod artifacts;
mod bench;
mod demo;
mod dist;
mod fio_engine;
mod lab;
mod library;
mod packages;
mod process;
mod test;
mod workspace;

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Developer commands of rblk",
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
// What the arguments' types say is shown as help: a comment here would hide it.
enum Command {
    Lab(LabArgs),
    #[command(hide = true)]
    GuestFiles(GuestFilesArgs),
    Demo(demo::DemoArgs),
    #[command(hide = true)]
    DemoInside(demo::InsideArgs),
    Check(test::CheckArgs),
    House(test::HouseArgs),
    Test(test::TestArgs),
    Bench(bench::BenchArgs),
    Library(library::LibraryArgs),
    FioEngine(fio_engine::FioEngineArgs),
    Dist(dist::DistArgs),
}

/// Run a command as root inside a stock Debian kernel that has RDMA and ublk
///
/// Boots that kernel in a virtual machine, with this machine's files as its root, and runs CMD
/// there in the current directory.
///
/// Soft-RoCE (`rxe0`, $RBLK_LAB_RDMA_ADDR), ublk and a scratch ext4 disk ($RBLK_LAB_SCRATCH) are
/// ready when CMD starts; `modprobe` works. /tmp, /run and /dev/shm are the guest's own, all else
/// that CMD writes stays on this machine. There is no network to the outside.
///
/// Exit status: CMD's own; 124 when the time limit ended it; 125 when the lab itself failed.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
struct LabArgs {
    /// Kernel version prefix; the newest package that matches is fetched once and kept
    #[arg(long, default_value = lab::DEFAULT_KERNEL, value_name = "VERSION")]
    kernel: String,

    /// Memory of the guest
    #[arg(long, default_value = "4G", value_name = "SIZE")]
    mem: lab::Size,

    /// Virtual CPUs of the guest
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,

    /// Seconds until the guest is killed, its boot included
    #[arg(long, default_value_t = 600, value_name = "SECS")]
    timeout: u64,

    /// Size of the sparse ext4 scratch disk, deleted at the end (0: none)
    #[arg(long, default_value = "4G", value_name = "SIZE")]
    scratch: lab::Size,

    /// Do not load the RDMA modules or create rxe0
    #[arg(long)]
    no_rdma: bool,

    /// How the guest's CPUs are run; `auto` takes KVM when a trial boot under it succeeds
    #[arg(long, value_enum, default_value_t = lab::Accel::Auto)]
    accel: lab::Accel,

    /// Keep a copy of the guest's console here
    #[arg(long, value_name = "FILE")]
    keep_log: Option<PathBuf>,

    /// The command and its arguments, after `--`
    #[arg(required = true, last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Make what a test needs to boot a guest of its own: the lab's kernel, and an initramfs with
/// busybox and that kernel's modules for a virtio disk with ext4
#[derive(Debug, Args)]
struct GuestFilesArgs {
    /// Kernel version prefix
    #[arg(long, default_value = lab::DEFAULT_KERNEL, value_name = "VERSION")]
    kernel: String,

    /// The first process of the guest: a script of /bin/busybox
    #[arg(long, value_name = "FILE")]
    init: PathBuf,

    /// Where `vmlinux` and `initramfs.cpio` go
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl LabArgs {
    fn run(self) -> Result<i32> {
        let lab = lab::Lab {
            kernel: self.kernel,
            mem: self.mem,
            cpus: self.cpus,
            timeout: Duration::from_secs(self.timeout),
            scratch: self.scratch,
            rdma: !self.no_rdma,
            accel: self.accel,
            keep_log: self.keep_log,
            shares: Vec::new(),
        };
        lab.run(&self.command)
    }
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    // What this status means when the command itself cannot be carried out.
    let (outcome, failed) = match command {
        Command::Lab(args) => (args.run(), lab::FAILED),
        Command::GuestFiles(args) => {
            let GuestFilesArgs { kernel, init, out } = args;
            (lab::guest_files(&kernel, &init, &out).map(|()| 0), 1)
        }
        Command::Demo(args) => (args.run(), 1),
        Command::DemoInside(args) => (args.run(), 1),
        Command::Check(args) => (args.run(), 1),
        Command::House(args) => (args.run(), 1),
        Command::Test(args) => (args.run(), 1),
        Command::Bench(args) => (args.run(), 1),
        Command::Library(args) => (args.run(), 1),
        Command::FioEngine(args) => (args.run(), 1),
        Command::Dist(args) => (args.run(), 1),
    };
    match outcome {
        // A status is one byte; anything else would be a bug in the guest's script.
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(failed)),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(failed)
        }
    }
}
