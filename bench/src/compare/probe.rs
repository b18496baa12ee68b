//! What a system spends on its I/Os: processor time, context switches, system calls, and rblk's own
//! counters, each as the difference of two readings. Values that this kernel does not have are
//! absent.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Map, Value, json};

use crate::interrupt;
use crate::peer::System;
use crate::peer::rblk::Counters;
use crate::peer::trigger;
use crate::peer::undo::{Journal, Step};
use crate::result::{Cpu, PerIo, Summary};

/// Windows in which they are counted: one in which the machine stood still does not decide.
const WINDOWS: u32 = 5;
/// Data threads of both ends begin so.
const DATA_THREADS: [&str; 3] = ["rblk-queue", "poll-group", "ublk-null"];

/// A look at a system.
#[derive(Clone, Debug)]
pub struct Look {
    at: Instant,
    busy: f64,
    initiator: Option<Usage>,
    target: Option<Usage>,
    counters: Counters,
}

/// What a process has used so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Usage {
    cpu_ns: u64,
    switches: u64,
}

/// What was spent between two looks.
#[derive(Clone, Debug, Default)]
pub struct Spent {
    /// Processors kept busy, by anything and by both ends' processes.
    pub cpu: Cpu,
    /// Per I/O, by the initiator's side.
    pub initiator: Option<PerIo>,
    /// Per I/O, by the target's side.
    pub target: Option<PerIo>,
    /// All counters of both ends that changed, per I/O.
    pub counters: Value,
}

impl Look {
    /// Looks now.
    #[must_use]
    pub fn at(system: &System) -> Self {
        Self {
            at: Instant::now(),
            busy: busy_seconds(),
            initiator: system.initiator_pid().and_then(Usage::of),
            target: system.target_pid().and_then(Usage::of),
            counters: system.counters(),
        }
    }

    /// What was spent since `before`. I/Os are those that each end counted itself; `ios` is taken
    /// for systems that do not count.
    #[must_use]
    pub fn since(&self, before: &Self, ios: Option<f64>) -> Spent {
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
        let (i, t) = (counts(&self.counters, "initiator"), counts(&self.counters, "target"));
        let (i0, t0) = (counts(&before.counters, "initiator"), counts(&before.counters, "target"));
        let (i, t) = (difference(&i, &i0), difference(&t, &t0));
        let ios_i = answered(&i).or(ios);
        let ios_t = answered(&t).or(ios_i);
        let per = |map: &BTreeMap<String, u64>, ios: Option<f64>| -> Value {
            let Some(ios) = ios else { return Value::Null };
            let changed = map.iter().filter(|(_, count)| **count > 0);
            let each = changed.map(|(name, count)| (name.clone(), json!(*count as f64 / ios)));
            Value::Object(each.collect::<Map<_, _>>())
        };
        Spent {
            cpu: Cpu {
                busy: (self.busy - before.busy) / seconds,
                fio: 0.0,
                daemons: daemons as f64 / 1e9 / seconds,
            },
            initiator: ios_i.and_then(|ios| per_io(&i, initiator, ios)),
            target: ios_t.and_then(|ios| per_io(&t, target, ios)),
            counters: json!({ "initiator": per(&i, ios_i), "target": per(&t, ios_t) }),
        }
    }
}

/// One end's counters by name.
fn counts(counters: &Counters, end: &str) -> BTreeMap<String, u64> {
    let value = serde_json::to_value(counters).unwrap_or_default();
    let Some(end) = value.get(end).and_then(Value::as_object) else { return BTreeMap::new() };
    end.iter().filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect()
}

fn difference(
    after: &BTreeMap<String, u64>,
    before: &BTreeMap<String, u64>,
) -> BTreeMap<String, u64> {
    let before = |name: &String| before.get(name).copied().unwrap_or(0);
    after.iter().map(|(name, count)| (name.clone(), count.saturating_sub(before(name)))).collect()
}

/// Reads and writes that an end answered.
fn answered(counts: &BTreeMap<String, u64>) -> Option<f64> {
    let get = |name| counts.get(name).copied().unwrap_or(0);
    let ios = get("reads") + get("writes");
    (ios > 0).then_some(ios as f64)
}

fn per_io(counts: &BTreeMap<String, u64>, usage: Option<Usage>, ios: f64) -> Option<PerIo> {
    if counts.is_empty() && usage.is_none() {
        return None;
    }
    let sum = |names: &[&str]| {
        let found: Vec<u64> = names.iter().filter_map(|name| counts.get(*name).copied()).collect();
        (!found.is_empty()).then(|| found.iter().sum::<u64>() as f64 / ios)
    };
    Some(PerIo {
        messages: sum(&["sends", "rdma_writes", "rdma_writes_with_imm", "rdma_reads"]),
        completions: sum(&["completions"]),
        doorbells: sum(&["send_doorbells"]),
        syscalls: None,
        switches: usage.map(|usage| usage.switches as f64 / ios),
        copied_bytes: sum(&["copied_bytes", "merged_bytes"]),
        cpu_ns: usage.map(|usage| usage.cpu_ns as f64 / ios),
    })
}

impl Usage {
    /// Of a process with all its threads; `None` when it is gone.
    fn of(pid: u32) -> Option<Self> {
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
    // Hundredths of a second, whatever the kernel's own are.
    Some((all - ticks.get(3)? - ticks.get(4)?) / 100.0)
}

/// Processors that are busy though nothing is measured.
///
/// # Errors
/// Interrupted.
pub fn load() -> Result<f64> {
    let (at, before) = (Instant::now(), busy_seconds());
    interrupt::sleep(Duration::from_millis(200))?;
    Ok((busy_seconds() - before) / at.elapsed().as_secs_f64())
}

/// Reads and writes that a disk has done since it is there; 0 for one that tells nothing.
#[must_use]
pub fn disk_ios(disk: &Path) -> u64 {
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

/// Whether this kernel counts system calls for us, which is tried out.
///
/// # Errors
/// The kernel goes on counting.
pub fn counts_syscalls(journal: &Journal) -> Result<bool> {
    if !trigger::exists() {
        return Ok(false);
    }
    let undo = journal.note(Step::SyscallTrigger)?;
    let counts = trigger::set().is_ok();
    undo.undo()?;
    Ok(counts)
}

/// System calls that data threads made until some moment, since they are counted, and what was
/// looked at then.
#[derive(Clone, Debug)]
pub struct Called<T> {
    /// Of each process.
    pub calls: [u64; 2],
    /// What was looked at.
    pub seen: T,
}

/// Counts the system calls of the data threads of two processes for `time`, in a few windows with a
/// `look` at both ends of each. Counting is begun and ended once, for that changes the kernel's
/// code.
///
/// # Errors
/// The kernel does not count them, `look` fails, or it was interrupted; nothing is left on.
pub fn syscalls<T>(
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

/// What an end's calls are per I/O, in the middle of all windows. `ios` tells those between two
/// looks; no window with I/O, no number.
#[must_use]
pub fn calls_per_io<T>(
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
mod tests {
    use rblk_initiator::engine::QueueCounts;
    use rblk_target::data::group_stats::StatsSnapshot;

    use super::*;

    #[test]
    fn calls_are_divided_by_the_ios_of_their_window() {
        let threads = [HashSet::from([1, 2]), HashSet::from([7])];
        assert_eq!(sums(&[(1, 10), (2, 5), (7, 3), (9, 100)], &threads), [15, 3]);
        let called = |calls, ios: u64| Called { calls: [calls, 2 * calls], seen: ios };
        // 0.5, then a window with few I/Os, then 0.7, then one without any.
        let all = [
            called(100, 0),
            called(150, 100),
            called(180, 101),
            called(250, 201),
            called(260, 201),
        ];
        let ios = |before: &u64, after: &u64| after.checked_sub(*before);
        assert_eq!(calls_per_io(&all, 0, ios), Some(0.7));
        assert_eq!(calls_per_io(&all, 1, ios), Some(1.4));
        assert_eq!(calls_per_io(&all[3..], 0, ios), None);
        assert_eq!(calls_per_io(&all[..1], 0, ios), None);
    }

    #[test]
    fn a_disk_counts_reads_and_writes() {
        assert_eq!(
            ios_of("     120        1     8192       10       30        2 16384 5 0 1 2 0 0\n"),
            150
        );
        assert_eq!(ios_of("120 1"), 120);
        assert_eq!(ios_of(""), 0);
    }

    #[test]
    fn both_kinds_of_switches_count() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\n";
        assert_eq!(switches(status), 695);
    }

    #[test]
    fn waiting_is_not_busy() {
        let stat = "cpu  100 10 50 1000 200 5 5 30 100 0\ncpu0 1 2 3\n";
        assert!((busy(stat).unwrap() - 2.0).abs() < 1e-9);
        assert_eq!(busy("nothing"), None);
    }

    #[test]
    fn what_is_spent_is_divided_by_what_was_answered() {
        let look = |ios: u64, at| Look {
            at,
            busy: ios as f64,
            initiator: Some(Usage { cpu_ns: ios * 1000, switches: ios * 2 }),
            target: None,
            counters: Counters {
                initiator: Some(QueueCounts { reads: ios, sends: ios, ..QueueCounts::default() }),
                target: Some(StatsSnapshot {
                    reads: ios,
                    rdma_writes_with_imm: ios,
                    send_doorbells: ios / 2,
                    ..StatsSnapshot::default()
                }),
            },
        };
        let begun = Instant::now();
        let spent = look(300, begun + Duration::from_secs(100)).since(&look(100, begun), None);
        assert!((spent.cpu.busy - 2.0).abs() < 1e-9);
        let (i, t) = (spent.initiator.unwrap(), spent.target.unwrap());
        assert_eq!((i.messages, i.switches, i.cpu_ns), (Some(1.0), Some(2.0), Some(1000.0)));
        assert_eq!((t.messages, t.doorbells, t.cpu_ns), (Some(1.0), Some(0.5), None));
        assert_eq!(spent.counters["target"]["send_doorbells"], 0.5);
    }

    #[test]
    fn this_process_has_usage() {
        assert!(Usage::of(std::process::id()).is_some());
        assert!(busy_seconds() > 0.0);
    }
}
