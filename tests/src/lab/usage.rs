//! Resources of processes and of the RDMA core.

use std::collections::BTreeMap;
use std::time::Duration;

use super::process::start;
use super::wait::DEADLINE;

/// Resources of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Open files.
    pub files: usize,
    /// Threads of its own.
    pub threads: usize,
    /// Resident memory in KiB.
    pub rss_kib: u64,
}

impl Usage {
    /// The resources of a process.
    ///
    /// # Panics
    /// The process has ended.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        let list = |dir: &str| {
            std::fs::read_dir(format!("/proc/{pid}/{dir}"))
                .unwrap_or_else(|e| panic!("process {pid}: {e}"))
                .flatten()
        };
        // The kernel's own workers for io_uring come and go.
        let is_own = |task: &std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm"))
                .is_ok_and(|name| !name.starts_with("iou-"))
        };
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let rss = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.trim().split(' ').next()?.parse().ok());
        Self {
            files: list("fd").count(),
            threads: list("task").filter(is_own).count(),
            rss_kib: rss.unwrap_or(0),
        }
    }
}

/// CPU time of all threads of a process: the scheduler's count, or ticks if the kernel has no such
/// count.
///
/// # Panics
/// The process has ended.
#[must_use]
pub fn cpu_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // utime and stime, in ticks of 10 ms; the second field may have spaces.
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let ticks: u64 =
        after_name.split(' ').skip(11).take(2).filter_map(|t| t.parse::<u64>().ok()).sum();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap_or_else(|e| panic!("process {pid}: {e}"));
    let nanos = tasks.flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanos.sum()).max(Duration::from_millis(10 * ticks))
}

/// The numbers of QPs, CQs, MRs, PDs and CM ids in the kernel, by name, without the kernel's spare
/// CQs.
///
/// # Panics
/// `rdma` of iproute2 cannot tell.
#[must_use]
pub fn rdma_resources() -> BTreeMap<String, u64> {
    // Such as `0: rxe0: qp 1 cq 1 pd 1 mr 0 ctx 0 srq 0`, one device per line.
    let text = start(&["rdma", "resource", "show"]).finish(DEADLINE).ok();
    let mut counts = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split_whitespace().skip(2);
        while let (Some(name), Some(Ok(value))) =
            (words.next(), words.next().map(str::parse::<u64>))
        {
            *counts.entry(name.to_owned()).or_default() += value;
        }
    }
    // Spare CQs that a device keeps for the kernel's own users, after the kernel's NVMe used it.
    let text = start(&["rdma", "resource", "show", "cq"]).finish(DEADLINE).ok();
    let is_spare = |line: &&str| line.contains(" users 0 ") && line.contains(" poll-ctx ");
    let spare = text.lines().filter(is_spare).count() as u64;
    counts
        .entry("cq".to_owned())
        .and_modify(|count: &mut u64| *count = count.saturating_sub(spare));
    counts
}
