//! The cost of a system's I/Os: processor time, context switches, system calls, and rblk's own
//! counters, each as the difference of two readings. Values that this kernel does not have are
//! absent.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::interrupt;
use crate::peer::System;
use crate::peer::rblk::Counters;
use crate::peer::trigger;
use crate::peer::undo::{Journal, Step};
use crate::result::{Cpu, PerIo, Summary};

/// Windows of a count: a window in which the machine stood still does not decide.
const WINDOWS: u32 = 5;
const DATA_THREADS: [&str; 3] = ["rblk-queue", "poll-group", "ublk-null"];

#[derive(Clone, Debug)]
pub(crate) struct Look {
    at: Instant,
    busy: f64,
    initiator: Option<Usage>,
    target: Option<Usage>,
    counters: Counters,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Usage {
    cpu_ns: u64,
    pub(crate) switches: u64,
}

/// The cost between two looks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spent {
    pub(crate) cpu: Cpu,
    pub(crate) initiator: Option<PerIo>,
    pub(crate) target: Option<PerIo>,
    /// All counters of both ends that changed, per I/O.
    pub(crate) counters: Value,
}

impl Look {
    pub(crate) fn at(system: &System) -> Self {
        Self {
            at: Instant::now(),
            busy: busy_seconds(),
            initiator: system.initiator_pid.and_then(Usage::of),
            target: system.target_pid.and_then(Usage::of),
            counters: system.counters(),
        }
    }

    /// The cost since `before`. Each end's own count of I/Os is taken, or `ios` for systems that do
    /// not count.
    pub(crate) fn since(&self, before: &Self, ios: Option<f64>) -> Spent {
        let seconds = (self.at - before.at).as_secs_f64().max(1e-9);
        let usage = |after: Option<Usage>, before: Option<Usage>| {
            let (after, before) = (after?, before?);
            Some(Usage {
                cpu_ns: after.cpu_ns.saturating_sub(before.cpu_ns),
                switches: after.switches.saturating_sub(before.switches),
            })
        };
        let initiator = usage(self.initiator, before.initiator);
        let target = usage(self.target, before.target);
        let daemons: u64 = [initiator, target].into_iter().flatten().map(|u| u.cpu_ns).sum();
        let busy = (self.busy - before.busy) / seconds;
        let (after, before) = (&self.counters, &before.counters);
        let i = difference(&counts(&after.initiator), &counts(&before.initiator));
        let t = difference(&counts(&after.target), &counts(&before.target));
        let ios_i = answered(&i).or(ios);
        let ios_t = answered(&t).or(ios_i);
        let per = |map: &Counts, ios: Option<f64>| -> Value {
            let Some(ios) = ios else { return Value::Null };
            let changed = map.iter().filter(|(_, count)| **count > 0);
            let each = changed.map(|(name, count)| (name.clone(), json!(*count as f64 / ios)));
            Value::Object(each.collect::<Map<_, _>>())
        };
        Spent {
            cpu: Cpu { busy, fio: 0.0, daemons: daemons as f64 / 1e9 / seconds },
            initiator: ios_i.and_then(|ios| per_io(&i, initiator, ios)),
            target: ios_t.and_then(|ios| per_io(&t, target, ios)),
            counters: json!({ "initiator": per(&i, ios_i), "target": per(&t, ios_t) }),
        }
    }
}

pub(crate) type Counts = BTreeMap<String, u64>;

/// The numbers of a struct of counters.
pub(crate) fn counts(of: &impl Serialize) -> Counts {
    let value = serde_json::to_value(of).unwrap_or_default();
    let fields = value.as_object().into_iter().flatten();
    fields.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect()
}

pub(crate) fn difference(after: &Counts, before: &Counts) -> Counts {
    let before = |name: &String| before.get(name).copied().unwrap_or(0);
    after.iter().map(|(name, count)| (name.clone(), count.saturating_sub(before(name)))).collect()
}

/// Work requests on the send queue, of either end.
pub(crate) const MESSAGES: [&str; 4] =
    ["sends", "rdma_writes", "rdma_writes_with_imm", "rdma_reads"];

/// Reads and writes that an end answered.
fn answered(counts: &Counts) -> Option<f64> {
    let get = |name| counts.get(name).copied().unwrap_or(0);
    let ios = get("reads") + get("writes");
    (ios > 0).then_some(ios as f64)
}

fn per_io(counts: &Counts, usage: Option<Usage>, ios: f64) -> Option<PerIo> {
    if counts.is_empty() && usage.is_none() {
        return None;
    }
    let sum = |names: &[&str]| {
        let found: Vec<u64> = names.iter().filter_map(|name| counts.get(*name).copied()).collect();
        (!found.is_empty()).then(|| found.iter().sum::<u64>() as f64 / ios)
    };
    Some(PerIo {
        messages: sum(&MESSAGES),
        completions: sum(&["completions"]),
        doorbells: sum(&["send_doorbells"]),
        syscalls: None,
        switches: usage.map(|usage| usage.switches as f64 / ios),
        copied_bytes: sum(&["copied_bytes", "merged_bytes"]),
        cpu_ns: usage.map(|usage| usage.cpu_ns as f64 / ios),
    })
}

impl Usage {
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let mut sum = Self::default();
        for task in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
            let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
            sum.cpu_ns += read("schedstat")
                .split(' ')
                .next()
                .and_then(|word| word.parse::<u64>().ok())
                .unwrap_or(0);
            sum.switches += switches(&read("status"));
        }
        Some(sum)
    }
}

/// Wanted and unwanted ones, in a `/proc/.../status`.
fn switches(status: &str) -> u64 {
    let of_line = |line: &str| -> Option<u64> {
        let (name, value) = line.split_once(':')?;
        name.ends_with("voluntary_ctxt_switches").then(|| value.trim().parse().ok())?
    };
    status.lines().filter_map(of_line).sum()
}

/// Seconds that all processors together have been busy since the boot.
fn busy_seconds() -> f64 {
    busy(&fs::read_to_string("/proc/stat").unwrap_or_default()).unwrap_or(0.0)
}

fn busy(stat: &str) -> Option<f64> {
    let words = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let ticks: Vec<f64> = words.filter_map(|word| word.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal; guests are in user already.
    let all: f64 = ticks.iter().take(8).sum();
    // Hundredths of a second, on every kernel.
    Some((all - ticks.get(3)? - ticks.get(4)?) / 100.0)
}

/// Processors that are busy before a sample.
pub(crate) fn load() -> Result<f64> {
    let (at, before) = (Instant::now(), busy_seconds());
    interrupt::sleep(Duration::from_millis(200))?;
    Ok((busy_seconds() - before) / at.elapsed().as_secs_f64())
}

/// Reads and writes of a disk so far; 0 for one without a count.
pub(crate) fn disk_ios(disk: &Path) -> u64 {
    let disk = fs::canonicalize(disk).unwrap_or_default();
    let name = disk.file_name().unwrap_or_default();
    ios_of(
        &fs::read_to_string(Path::new("/sys/class/block").join(name).join("stat"))
            .unwrap_or_default(),
    )
}

/// Fields 1 and 5 of a disk's `stat`: I/Os done.
fn ios_of(stat: &str) -> u64 {
    let fields: Vec<u64> = stat.split_whitespace().map_while(|word| word.parse().ok()).collect();
    [0, 4].iter().filter_map(|at| fields.get(*at)).sum()
}

/// Whether this kernel counts system calls, by trying it.
pub(crate) fn counts_syscalls(journal: &Journal) -> Result<bool> {
    if !trigger::exists() {
        return Ok(false);
    }
    let undo = journal.note(Step::SyscallTrigger)?;
    let counts = trigger::set().is_ok();
    undo.undo()?;
    Ok(counts)
}

/// System calls of data threads until a moment, and the look at that moment.
#[derive(Clone, Debug)]
pub(crate) struct Called<T> {
    pub(crate) calls: [u64; 2],
    pub(crate) seen: T,
}

/// Counts the system calls of the data threads of two processes for `time`, in a few windows with a
/// `look` at both ends of each. Counting starts and ends once, because that changes the kernel's
/// code.
pub(crate) fn syscalls<T>(
    journal: &Journal,
    pids: [Option<u32>; 2],
    time: Duration,
    mut look: impl FnMut() -> Result<T>,
) -> Result<Vec<Called<T>>> {
    let undo = journal.note(Step::SyscallTrigger)?;
    let threads = pids.map(|pid| pid.map(data_threads).unwrap_or_default());
    let mut called = || -> Result<Called<T>> {
        Ok(Called { calls: sums(&trigger::counts()?, &threads), seen: look()? })
    };
    let mut count = || -> Result<Vec<Called<T>>> {
        trigger::set()?;
        let mut all = vec![called()?];
        for _ in 0..WINDOWS {
            interrupt::sleep(time / WINDOWS)?;
            all.push(called()?);
        }
        Ok(all)
    };
    let counted = count();
    undo.undo()?;
    counted
}

fn sums(calls: &[(u32, u64)], threads: &[HashSet<u32>; 2]) -> [u64; 2] {
    let of = |threads: &HashSet<u32>| {
        calls.iter().filter(|(thread, _)| threads.contains(thread)).map(|(_, count)| count).sum()
    };
    [of(&threads[0]), of(&threads[1])]
}

/// System calls of an end per I/O, the median of all windows with I/O. `ios` gives the I/Os between
/// two looks.
pub(crate) fn calls_per_io<T>(
    called: &[Called<T>],
    end: usize,
    ios: impl Fn(&T, &T) -> Option<u64>,
) -> Option<f64> {
    let each = called.windows(2).filter_map(|window| {
        let [before, after] = window else { return None };
        let calls = after.calls[end].checked_sub(before.calls[end])?;
        let ios = ios(&before.seen, &after.seen).filter(|ios| *ios > 0)?;
        Some(calls as f64 / ios as f64)
    });
    Summary::of(each).map(|summary| summary.median)
}

fn data_threads(pid: u32) -> HashSet<u32> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return HashSet::new() };
    let is_data = |task: &fs::DirEntry| {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        DATA_THREADS.iter().any(|prefix| name.starts_with(prefix))
    };
    let ids = tasks.flatten().filter(is_data);
    ids.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests;
