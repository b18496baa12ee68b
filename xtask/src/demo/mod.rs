//! `cargo xtask demo`: the whole path on real verbs and a real block device, in minutes.
//!
//! A demo is a child of this program, `demo-inside`. The child runs on this machine if it has the
//! devices, else in the lab. Either way the child shows its progress, writes its
//! [`Report`] to a file, and cleans up even when its parent process is gone.

mod counters;
mod filesystem;
mod fio;
mod keys;
mod place;
mod progress;
mod report;
mod scenario;
mod target;
mod tree;
mod volume;

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use crate::artifacts::{Artifacts, MEASURED};
use crate::lab::{self, Lab, host};
use crate::packages;
use crate::process;
use crate::workspace::Workspace;
use place::Place;
use report::Report;
use scenario::Scenario;

/// How long a demo may take, a boot of the lab included.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// What is built for a demo. This program, too: hashing takes an optimised one.
const SELECTION: &[&str] = &[
    "--bins",
    "-p",
    "rblk-cli",
    "-p",
    "rblk-target",
    "-p",
    "rblk-initiator",
    "-p",
    "xtask",
    "--features",
    "verbs",
];

/// What is used inside, besides what the lab itself needs.
const PACKAGES: &[host::Package] = &[
    host::Package { name: "e2fsprogs", why: "mkfs.ext4 and fsck.ext4 for the volume" },
    host::Package { name: "util-linux", why: "setpriv and mount" },
    host::Package { name: "iproute2", why: "ip: the RDMA device's address" },
    host::Package { name: "fio", why: "verifies and measures the block device" },
];

/// What carries the messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Verbs: InfiniBand, RoCE or iWARP; Soft-RoCE in the lab
    Rdma,
    /// The software provider over TCP
    Tcp,
}

impl Transport {
    fn name(self) -> &'static str {
        match self {
            Transport::Rdma => "rdma",
            Transport::Tcp => "tcp",
        }
    }
}

/// Form of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people
    Table,
    /// For programs: one JSON document
    Json,
}

/// Mount a volume for real, prove that data survives, and measure it
///
/// Copies at least 100 MiB of real files onto ext4 on the volume, checks the file system and every
/// file's SHA-256 after mounting again, verifies and measures a second volume with fio, and prints
/// one table. Runs on this machine when it has an RDMA device and ublk and the user is root, else
/// in the lab. Progress is on stderr.
///
/// Exit status: 0 when everything was right, 1 when anything was not, 124 at the time limit.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct DemoArgs {
    /// What carries the messages
    #[arg(long, value_enum, default_value_t = Transport::Rdma)]
    transport: Transport,

    /// Kernel version prefix; means the lab even where this machine has the devices
    #[arg(long, value_name = "VERSION")]
    kernel: Option<String>,

    /// How the lab's CPUs are run
    #[arg(long, value_enum, default_value_t = lab::Accel::Auto)]
    accel: lab::Accel,

    /// Directory to copy files from; by default one of this machine's own
    #[arg(long, value_name = "DIR")]
    tree: Option<PathBuf>,

    /// Form of the answer
    #[arg(long, value_enum, default_value_t = Output::Table)]
    output: Output,

    /// Keep the programs, the logs and the report, and say where
    #[arg(long)]
    keep: bool,
}

/// The demo itself, where the devices are.
#[derive(Debug, Args)]
pub(crate) struct InsideArgs {
    #[arg(long, value_enum)]
    transport: Transport,
    /// Address to listen on; the lab's own without it.
    #[arg(long)]
    address: Option<String>,
    #[arg(long)]
    tree: Option<PathBuf>,
    /// Where the report goes.
    #[arg(long)]
    report: PathBuf,
    /// The end of stdin means that the starter is gone.
    #[arg(long)]
    watch_stdin: bool,
}

impl DemoArgs {
    /// Builds, runs and reports.
    pub(crate) fn run(&self) -> Result<i32> {
        let workspace = Workspace::find()?;
        let place = match &self.kernel {
            Some(kernel) => Place::Lab(format!("--kernel {kernel}")),
            None => Place::choose(self.transport),
        };
        host::ensure_installed(packages::BUILD)?;
        match &place {
            Place::Here(address) => {
                host::ensure_installed(PACKAGES)?;
                eprintln!("demo: on this machine, at {address}");
            }
            Place::Lab(why) => eprintln!("demo: in the lab: {why}"),
        }
        let artifacts = Artifacts::build(&workspace, MEASURED, SELECTION)?;
        let file = artifacts.dir().join("report.json");
        let status = match &place {
            Place::Here(address) => self.here(&artifacts, address, &file),
            Place::Lab(_) => self.in_lab(&workspace, &artifacts, &file),
        };
        let report = read(&file);
        if self.keep {
            eprintln!("demo: kept {}", artifacts.keep().display());
        }
        let status = status?;
        let report = match report {
            Ok(report) => report,
            Err(error) if status == 0 => return Err(error),
            // The process that ended it has said why.
            Err(_) => bail!("the demo ended with status {status} before it could report"),
        };
        match self.output {
            Output::Table => print!("{}", report.table()),
            Output::Json => println!("{}", serde_json::to_string_pretty(&report)?),
        }
        Ok(if report.passed { status } else { status.max(1) })
    }

    fn inside(&self, artifacts: &Artifacts, report: &Path) -> Result<Vec<OsString>> {
        let mut words: Vec<OsString> =
            vec![artifacts.program("xtask").into(), "demo-inside".into()];
        words.extend(["--transport".into(), self.transport.name().into()]);
        words.extend(["--report".into(), report.into()]);
        if let Some(tree) = &self.tree {
            words.extend(["--tree".into(), std::path::absolute(tree)?.into()]);
        }
        Ok(words)
    }

    fn here(&self, artifacts: &Artifacts, address: &str, report: &Path) -> Result<i32> {
        let words = self.inside(artifacts, report)?;
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(["--address", address, "--watch-stdin"]);
        // A group of its own: Ctrl-C ends this process, whose pipe then closes, and the child
        // cleans up.
        let mut child = command
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", process::words(&command)))?;
        let stdin = child.stdin.take();
        let status = process::wait(&mut child, LIMIT, false);
        drop(stdin);
        Ok(process::exit_code(status?))
    }

    fn in_lab(&self, workspace: &Workspace, artifacts: &Artifacts, report: &Path) -> Result<i32> {
        let mut lab = Lab { accel: self.accel, timeout: LIMIT, ..Lab::default() };
        if let Some(kernel) = &self.kernel {
            lab.kernel.clone_from(kernel);
        }
        lab.shares = vec![workspace.root.clone(), artifacts.dir().to_owned()];
        lab.shares.extend(self.tree.as_ref().map(std::path::absolute).transpose()?);
        // Its stdout is this program's progress.
        lab.run_into(&self.inside(artifacts, report)?, std::io::stderr()).map(|end| end.status())
    }
}

impl InsideArgs {
    /// Runs the demo here and writes the report.
    pub(crate) fn run(&self) -> Result<i32> {
        if self.watch_stdin {
            process::watch_stdin();
        }
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let programs = std::env::current_exe()?;
        let programs = programs.parent().context("this program has no directory")?.to_owned();
        let scratch = variable("RBLK_LAB_SCRATCH").map(PathBuf::from);
        let in_lab = variable("RBLK_LAB").is_some();
        let work = scratch.unwrap_or_else(|| programs.clone()).join("demo");
        fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
        let host = match (&self.address, self.transport) {
            (Some(address), _) => address.clone(),
            (None, Transport::Tcp) => "127.0.0.1".to_owned(),
            (None, Transport::Rdma) => variable("RBLK_LAB_RDMA_ADDR")
                .context("no --address, and no RBLK_LAB_RDMA_ADDR as in the lab")?,
        };
        let mut report = Report {
            kernel: scenario::kernel(),
            place: if in_lab { "lab" } else { "this machine" }.to_owned(),
            ..Report::default()
        };
        let scenario = Scenario {
            programs: programs.clone(),
            work: work.clone(),
            scheme: self.transport.name(),
            host,
            tree: self.tree.clone(),
        };
        scenario.play(&mut report);
        // Beside the report, where they outlive the lab.
        let _ = fs::copy(work.join("target.log"), programs.join("target.log"));
        scenario::clean(&work);
        fs::write(&self.report, serde_json::to_vec_pretty(&report)?)
            .with_context(|| format!("cannot write {}", self.report.display()))?;
        Ok(i32::from(!report.passed))
    }
}

fn read(file: &Path) -> Result<Report> {
    let text = fs::read_to_string(file)
        .with_context(|| format!("the demo left no report in {}", file.display()))?;
    serde_json::from_str(&text).context("the demo's report is not understood")
}
