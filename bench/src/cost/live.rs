//! What one I/O costs running daemons, by their own counters and the kernel's.
//!
//! fio keeps a mounted device busy. The counters of the mount and of its target are read before and
//! after, and the differences are divided by the I/Os that the mount answered in between. A target
//! on another host has no column.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use rblk_initiator::engine::QueueCounts;
use rblk_target::data::group_stats::StatsSnapshot;
use serde::{Deserialize, Serialize};

use super::{Op, Plan};
use crate::child::{self, OnInterrupt};
use crate::compare::probe;
use crate::interrupt;
use crate::peer::daemon::{mount_of, target_status};
use crate::peer::undo::{self, Journal};

/// How long fio may take beyond what it was told to run.
const FIO_MARGIN: Duration = Duration::from_secs(60);

/// Which daemons to watch.
#[derive(Clone, Debug, Args)]
pub struct LiveArgs {
    /// Count what the daemons behind these mounted devices do instead, while fio keeps them busy.
    /// Writes OVERWRITE what is on them.
    #[arg(long, value_name = "DEVICE", value_delimiter = ',')]
    pub live: Vec<PathBuf>,
    /// Seconds of each case.
    #[arg(long, value_name = "SECS", requires = "live", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Control socket of the target, if it runs here.
    #[arg(long, value_name = "PATH", requires = "live", default_value = rblk_target::commands::args::CONTROL_SOCKET)]
    pub target_socket: PathBuf,
}

impl LiveArgs {
    pub(super) fn is_wanted(&self) -> bool {
        !self.live.is_empty()
    }
}

/// One end's cost of one I/O, on average.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveEnd {
    /// Work requests posted on the send queue.
    pub messages: f64,
    /// Of them, those that asked for a completion.
    pub signaled: f64,
    /// Completions reaped.
    pub completions: f64,
    /// Posts of a list of send work requests; a system call each with most software RDMA devices.
    pub send_doorbells: f64,
    /// Bytes the CPU copied between buffers.
    pub copied_bytes: f64,
    /// Calls of io_uring_enter.
    pub ring_enters: f64,
    /// Times the data threads gave their CPU up while they looked for work.
    pub yields: f64,
    /// Times a CQ was asked for an event.
    pub arms: f64,
    /// Times the data threads slept.
    pub sleeps: f64,
    /// Context switches of the whole process, wanted or not.
    pub switches: Option<f64>,
    /// System calls of the data threads, of whatever kind.
    pub syscalls: Option<f64>,
}

/// The cost of one case.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LiveCost {
    /// The device.
    pub device: PathBuf,
    /// What carries its messages.
    pub transport: String,
    /// Reads or writes, in random order.
    pub op: Op,
    /// Bytes per I/O.
    pub bytes: u32,
    /// I/Os outstanding.
    pub depth: u16,
    /// I/Os that the mount answered.
    pub ios: u64,
    /// The mount.
    pub initiator: LiveEnd,
    /// The target, if it runs here.
    pub target: Option<LiveEnd>,
}

// Everything that counts, at one moment.
struct Counts {
    transport: String,
    pid: u32,
    initiator: QueueCounts,
    initiator_switches: Option<u64>,
    target: Option<TargetCounts>,
}

struct TargetCounts {
    pid: u32,
    total: StatsSnapshot,
    switches: Option<u64>,
}

impl Counts {
    fn now(args: &LiveArgs, device: &Path) -> Result<Self> {
        let mount = mount_of(device)
            .with_context(|| format!("{} is not a mounted rblk device", device.display()))?;
        let target = target_status(&args.target_socket);
        Ok(Self {
            transport: mount.transport,
            pid: mount.pid,
            initiator: mount.total,
            initiator_switches: switches(mount.pid),
            target: target.map(|status| TargetCounts {
                pid: status.pid,
                total: status.total,
                switches: switches(status.pid),
            }),
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
    let before = Counts::now(args, device)?;
    let limit = Duration::from_secs(args.seconds.into()) + FIO_MARGIN;
    let mut fio = fio(device, op, bytes, depth, args.seconds);
    child::output(&mut fio, limit).context("fio is a package of that name")?;
    let after = Counts::now(args, device)?;
    let ios = answered(&before, &after);
    ensure!(ios > 0, "{} answered nothing", device.display());
    let per_io = PerIo(ios);
    let target = match (&before.target, &after.target) {
        (Some(before), Some(after)) => {
            // Another target's counters would say that it did nothing.
            let did = |of: &TargetCounts| of.total.reads + of.total.writes;
            let did = did(after) > did(before);
            did.then(|| target_end(per_io, before, after))
        }
        _ => None,
    };
    let mut initiator = initiator_end(per_io, &before, &after);
    let mut target = target;
    // Counting them costs time, so it is done apart.
    if let Some([near, far]) = syscalls(args, device, op, bytes, depth)? {
        initiator.syscalls = near;
        if let Some(target) = &mut target {
            target.syscalls = far;
        }
    }
    Ok(LiveCost {
        device: device.to_owned(),
        op,
        bytes,
        depth,
        ios,
        initiator,
        target,
        transport: after.transport,
    })
}

fn answered(before: &Counts, after: &Counts) -> u64 {
    let answered = |counts: &Counts| counts.initiator.reads + counts.initiator.writes;
    answered(after).saturating_sub(answered(before))
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

/// System calls per I/O of the data threads of both ends; `None` where the kernel does not count
/// them.
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
        let now = Counts::now(args, device)?;
        let pids = [Some(now.pid), now.target.as_ref().map(|target| target.pid)];
        let time = Duration::from_secs(args.seconds.into());
        let called = probe::syscalls(&journal, pids, time, || Counts::now(args, device))?;
        let ios = |before: &Counts, after: &Counts| Some(answered(before, after));
        Ok([0, 1].map(|end| probe::calls_per_io(&called, end, ios)))
    });
    let limit = Duration::from_secs(seconds.into()) + FIO_MARGIN;
    child::wait(&mut load, limit, OnInterrupt::End)?;
    counted.map(Some)
}

#[derive(Clone, Copy)]
struct PerIo(u64);

impl PerIo {
    #[expect(clippy::cast_precision_loss, reason = "counts of a run are far below 2^53")]
    fn of(self, before: u64, after: u64) -> f64 {
        after.saturating_sub(before) as f64 / self.0 as f64
    }

    fn of_both(self, before: Option<u64>, after: Option<u64>) -> Option<f64> {
        Some(self.of(before?, after?))
    }
}

fn initiator_end(per_io: PerIo, before: &Counts, after: &Counts) -> LiveEnd {
    let switches = per_io.of_both(before.initiator_switches, after.initiator_switches);
    let (before, after) = (&before.initiator, &after.initiator);
    LiveEnd {
        messages: per_io.of(before.sends, after.sends),
        signaled: per_io.of(before.signaled, after.signaled),
        completions: per_io.of(before.completions, after.completions),
        send_doorbells: per_io.of(before.send_doorbells, after.send_doorbells),
        copied_bytes: per_io.of(before.copied_bytes, after.copied_bytes),
        ring_enters: per_io.of(before.ring_enters, after.ring_enters),
        yields: per_io.of(before.yields, after.yields),
        arms: per_io.of(before.arms, after.arms),
        sleeps: per_io.of(before.sleeps, after.sleeps),
        switches,
        syscalls: None,
    }
}

fn target_end(per_io: PerIo, before: &TargetCounts, after: &TargetCounts) -> LiveEnd {
    let switches = per_io.of_both(before.switches, after.switches);
    let (before, after) = (&before.total, &after.total);
    let messages =
        |s: &StatsSnapshot| s.sends + s.rdma_writes + s.rdma_writes_with_imm + s.rdma_reads;
    LiveEnd {
        messages: per_io.of(messages(before), messages(after)),
        signaled: per_io.of(before.signaled, after.signaled),
        completions: per_io.of(before.completions, after.completions),
        send_doorbells: per_io.of(before.send_doorbells, after.send_doorbells),
        copied_bytes: per_io.of(before.copied_bytes, after.copied_bytes),
        ring_enters: per_io.of(before.ring_enters, after.ring_enters),
        yields: per_io.of(before.yields, after.yields),
        arms: per_io.of(before.arms, after.arms),
        sleeps: per_io.of(before.sleeps, after.sleeps),
        switches,
        syscalls: None,
    }
}

/// Context switches of all threads of a process so far; `None` where that cannot be read.
fn switches(pid: u32) -> Option<u64> {
    let mut sum = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let status = std::fs::read_to_string(thread.ok()?.path().join("status")).ok()?;
        sum += switches_in(&status);
    }
    Some(sum)
}

fn switches_in(status: &str) -> u64 {
    let line = |line: &str| {
        let (name, value) = line.split_once(':')?;
        name.ends_with("voluntary_ctxt_switches").then(|| value.trim().parse::<u64>().ok())?
    };
    status.lines().filter_map(line).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_switches_count() {
        let status = "Name:\tx\nThreads:\t3\nvoluntary_ctxt_switches:\t15\n\
            nonvoluntary_ctxt_switches:\t27\n";
        assert_eq!(switches_in(status), 42);
        assert_eq!(switches_in("Name:\tvoluntary"), 0);
    }

    #[test]
    fn this_process_has_switches() {
        assert!(switches(std::process::id()).is_some_and(|count| count > 0));
        assert_eq!(switches(u32::MAX), None);
    }
}
