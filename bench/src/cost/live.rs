//! The cost of one I/O in running daemons, by their own counters and the kernel's.
//!
//! fio keeps a mounted device busy. The differences of the counters of the mount and of its target
//! are divided by the I/Os that the mount answered. A target on another host has no column.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::{Op, Plan};
use crate::child::{self, OnInterrupt};
use crate::compare::probe::{self, Counts, Usage};
use crate::interrupt;
use crate::peer::daemon::{mount_of, target_status};
use crate::peer::undo::{self, Journal};

const FIO_MARGIN: Duration = Duration::from_secs(60);

/// Which daemons to watch.
#[derive(Clone, Debug, Args)]
pub struct LiveArgs {
    /// Count in the daemons behind these mounted devices instead, while fio keeps them busy. Writes
    /// OVERWRITE the devices.
    #[arg(long, value_name = "DEVICE", value_delimiter = ',')]
    pub live: Vec<PathBuf>,
    /// Seconds of each case.
    #[arg(long, value_name = "SECS", requires = "live", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Control socket of the target, if it runs here.
    #[arg(long, value_name = "PATH", requires = "live", default_value = rblk_operate::target::flags::CONTROL_SOCKET)]
    pub target_socket: PathBuf,
}

impl LiveArgs {
    pub(super) fn is_wanted(&self) -> bool {
        !self.live.is_empty()
    }
}

#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LiveEnd {
    pub(crate) messages: f64,
    pub(crate) signaled: f64,
    pub(crate) completions: f64,
    /// Posts of a list of send work requests; a system call each with most software RDMA devices.
    pub(crate) send_doorbells: f64,
    pub(crate) copied_bytes: f64,
    pub(crate) ring_enters: f64,
    /// Times the data threads gave their CPU up while they looked for work.
    pub(crate) yields: f64,
    pub(crate) arms: f64,
    pub(crate) sleeps: f64,
    pub(crate) switches: Option<f64>,
    pub(crate) syscalls: Option<f64>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct LiveCost {
    pub(crate) device: PathBuf,
    pub(crate) transport: String,
    /// Reads or writes, in random order.
    pub(crate) op: Op,
    pub(crate) bytes: u32,
    pub(crate) depth: u16,
    pub(crate) ios: u64,
    pub(crate) initiator: LiveEnd,
    pub(crate) target: Option<LiveEnd>,
}

struct Look {
    transport: String,
    initiator: End,
    target: Option<End>,
}

struct End {
    pid: u32,
    counts: Counts,
    switches: Option<u64>,
}

impl End {
    fn of(pid: u32, counters: &impl Serialize) -> Self {
        let switches = Usage::of(pid).map(|usage| usage.switches);
        Self { pid, counts: probe::counts(counters), switches }
    }

    /// Reads and writes that the end answered.
    fn answered(&self) -> u64 {
        ["reads", "writes"].iter().filter_map(|name| self.counts.get(*name)).sum()
    }

    fn since(&self, before: &Self, ios: u64) -> LiveEnd {
        let counts = probe::difference(&self.counts, &before.counts);
        #[expect(clippy::cast_precision_loss, reason = "counts of a run are far below 2^53")]
        let per_io = |count: u64| count as f64 / ios as f64;
        let of = |name: &str| per_io(counts.get(name).copied().unwrap_or(0));
        let switches = self.switches.zip(before.switches);
        LiveEnd {
            messages: probe::MESSAGES.into_iter().map(of).sum(),
            signaled: of("signaled"),
            completions: of("completions"),
            send_doorbells: of("send_doorbells"),
            copied_bytes: of("copied_bytes"),
            ring_enters: of("ring_enters"),
            yields: of("yields"),
            arms: of("arms"),
            sleeps: of("sleeps"),
            switches: switches.map(|(after, before)| per_io(after.saturating_sub(before))),
            syscalls: None,
        }
    }
}

impl Look {
    fn now(args: &LiveArgs, device: &Path) -> Result<Self> {
        let mount = mount_of(device)
            .with_context(|| format!("{} is not a mounted rblk device", device.display()))?;
        let target = target_status(&args.target_socket);
        Ok(Self {
            transport: mount.transport,
            initiator: End::of(mount.pid, &mount.total),
            target: target.map(|status| End::of(status.pid, &status.total)),
        })
    }
}

pub(super) fn measure(args: &LiveArgs, plan: &Plan) -> Result<Vec<LiveCost>> {
    let mut costs = Vec::new();
    for device in &args.live {
        for op in plan.ops.iter().copied() {
            for bytes in plan.sizes.iter().copied() {
                for depth in plan.depths.iter().copied() {
                    costs.push(measure_one(args, device, op, bytes, depth)?);
                }
            }
        }
    }
    Ok(costs)
}

fn measure_one(args: &LiveArgs, device: &Path, op: Op, bytes: u32, depth: u16) -> Result<LiveCost> {
    let before = Look::now(args, device)?;
    let limit = Duration::from_secs(args.seconds.into()) + FIO_MARGIN;
    let mut fio = fio(device, op, bytes, depth, args.seconds);
    child::output(&mut fio, limit).context("fio is a package of that name")?;
    let after = Look::now(args, device)?;
    let ios = after.initiator.answered().saturating_sub(before.initiator.answered());
    ensure!(ios > 0, "{} answered nothing", device.display());
    let mut initiator = after.initiator.since(&before.initiator, ios);
    // Another target's counters would show no work.
    let ends = before.target.as_ref().zip(after.target.as_ref());
    let served = ends.filter(|(before, after)| after.answered() > before.answered());
    let mut target = served.map(|(before, after)| after.since(before, ios));
    // Counting system calls costs time, so it has a load of its own.
    if let Some([near, far]) = syscalls(args, device, op, bytes, depth)? {
        initiator.syscalls = near;
        if let Some(target) = &mut target {
            target.syscalls = far;
        }
    }
    let (device, transport) = (device.to_owned(), after.transport);
    Ok(LiveCost { device, transport, op, bytes, depth, ios, initiator, target })
}

fn fio(device: &Path, op: Op, bytes: u32, depth: u16, seconds: u32) -> Command {
    let mut fio = Command::new("fio");
    fio.args(["--name=cost", "--direct=1", "--ioengine=io_uring", "--time_based"]);
    fio.args(["--norandommap", "--randrepeat=0", "--output-format=terse"]);
    fio.arg(format!("--filename={}", device.display()));
    fio.arg(match op {
        Op::Read => "--rw=randread",
        Op::Write => "--rw=randwrite",
    });
    fio.arg(format!("--bs={bytes}")).arg(format!("--iodepth={depth}"));
    fio.arg(format!("--runtime={seconds}"));
    fio
}

/// System calls per I/O of the data threads of both ends, if the kernel counts them.
fn syscalls(
    args: &LiveArgs,
    device: &Path,
    op: Op,
    bytes: u32,
    depth: u16,
) -> Result<Option<[Option<f64>; 2]>> {
    let journal = Journal::create(Path::new(undo::DIR))?;
    if !probe::counts_syscalls(&journal)? {
        return Ok(None);
    }
    let seconds = args.seconds.saturating_add(2);
    let mut fio = fio(device, op, bytes, depth, seconds);
    let mut load = child::spawn(fio.stdout(Stdio::null()).stderr(Stdio::null()))?;
    let counted = interrupt::sleep(Duration::from_secs(1)).and_then(|()| {
        let now = Look::now(args, device)?;
        let pids = [Some(now.initiator.pid), now.target.map(|target| target.pid)];
        let time = Duration::from_secs(args.seconds.into());
        let called = probe::syscalls(&journal, pids, time, || Look::now(args, device))?;
        let ios = |before: &Look, after: &Look| {
            Some(after.initiator.answered().saturating_sub(before.initiator.answered()))
        };
        Ok([0, 1].map(|end| probe::calls_per_io(&called, end, ios)))
    });
    let limit = Duration::from_secs(seconds.into()) + FIO_MARGIN;
    child::wait(&mut load, limit, OnInterrupt::End)?;
    counted.map(Some)
}
