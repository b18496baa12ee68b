//! [`Apart`]: a target and its clients on processors of their own, on one machine.
//!
//! Hosts do not take processors from each other, but processes of one machine do. With two
//! processors, a target and two clients that are never idle would measure the scheduler. So the
//! target gets the first processor, the clients get the others, and the measured client goes before
//! the others (`SCHED_FIFO`, see `sched(7)`). On a kernel that does not preempt its own code, the
//! client still waits for the end of a system call of another client.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::{Pid, gettid};

use crate::child;

const LIMIT: Duration = Duration::from_secs(10);
/// Priority of the client that is measured: any of `SCHED_FIFO` goes before all usual ones.
const PRIORITY: &str = "10";

/// The calling thread on processors without the target, and before all other clients there. Its
/// new threads have usual priority. Dropped, the thread is as it was; the target stays.
#[derive(Debug)]
pub(super) struct Apart {
    thread: Pid,
    before: CpuSet,
}

impl Apart {
    /// Moves the target and the calling thread.
    pub(super) fn of(target: u32) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "only root may set real-time priorities");
        ensure!(child::is_installed("chrt"), "there is no chrt (Debian: util-linux)");
        let before = sched_getaffinity(Pid::from_raw(0)).context("sched_getaffinity")?;
        let (first, others) = split(&before).context("there is one processor")?;
        for thread in threads_of(target)? {
            sched_setaffinity(thread, &first).context("sched_setaffinity of the target")?;
        }
        let apart = Self { thread: gettid(), before };
        sched_setaffinity(apart.thread, &others).context("sched_setaffinity")?;
        chrt(&["--reset-on-fork", "--fifo"], PRIORITY, apart.thread)?;
        Ok(apart)
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let undone = chrt(&["--other"], "0", self.thread).and_then(|()| {
            sched_setaffinity(self.thread, &self.before).context("sched_setaffinity")
        });
        if let Err(error) = undone {
            eprintln!("rblk-bench: the thread keeps its priority: {error:#}");
        }
    }
}

fn chrt(policy: &[&str], priority: &str, thread: Pid) -> Result<()> {
    let mut command = Command::new("chrt");
    command.args(policy).args(["--pid", priority, &thread.to_string()]);
    child::output(&mut command, LIMIT).map(drop)
}

/// The first processor of a set, and the others. `None`: there are no others.
fn split(all: &CpuSet) -> Option<(CpuSet, CpuSet)> {
    let mut one = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or(false));
    let (mut first, mut others) = (CpuSet::new(), *all);
    let cpu = one.next()?;
    one.next()?;
    first.set(cpu).and_then(|()| others.unset(cpu)).ok()?;
    Some((first, others))
}

fn threads_of(process: u32) -> Result<Vec<Pid>> {
    let dir = format!("/proc/{process}/task");
    let entries = std::fs::read_dir(&dir).with_context(|| format!("cannot read {dir}"))?;
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(numbers.map(Pid::from_raw).collect())
}

#[cfg(test)]
mod tests;
