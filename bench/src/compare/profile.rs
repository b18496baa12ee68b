//! Where the processors' time goes under a load: `perf` samples all of them while fio runs, and its report is folded
//! by thread and function.
//!
//! The samples are of the CPU clock, which every machine has, emulated ones too; so what runs with interrupts off is
//! charged to where they are on again (`_raw_spin_unlock_irqrestore`, `finish_task_switch`).

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::child;
use crate::result::{FunctionShare, ThreadShare};

/// The program.
pub const PERF: &str = "perf";
/// Samples a second of each processor: no divisor of a timer's rate.
const RATE: &str = "499";
/// How long perf may take to begin and to write what it has: it reads all symbols of the kernel first.
const LATE: Duration = Duration::from_secs(60);
/// Threads with less of the processors' time are left out.
const THREAD_LEAST: f64 = 0.005;
/// Functions with less are left out, and all but so many of a thread.
const FUNCTION_LEAST: f64 = 0.001;
const FUNCTIONS: usize = 16;

/// Samples all processors for `seconds` from when perf is ready, with its data in `dir`.
///
/// # Errors
/// perf cannot sample here, or was interrupted.
pub fn record(dir: &Path, seconds: u32) -> Result<Vec<ThreadShare>> {
    let data = dir.join("perf.data");
    let limit = Duration::from_secs(seconds.into()) + LATE;
    let mut record = Command::new(PERF);
    record.args(["record", "-q", "-e", "cpu-clock", "-F", RATE, "-a", "-o"]).arg(&data);
    record.args(["--", "sleep", &seconds.to_string()]);
    child::output(&mut record, limit).context("sampling")?;
    let mut report = Command::new(PERF);
    report.args(["report", "--stdio", "-q", "-g", "none", "-F", "overhead,comm,sym", "-t", "|"]);
    let text = child::output(report.arg("-i").arg(&data), LATE).context("reading the samples")?;
    Ok(fold(&text))
}

/// Lines such as ` 2.31%  |kworker/u8:4-rx|[k] crc32_le` by thread and function.
fn fold(report: &str) -> Vec<ThreadShare> {
    let mut threads: BTreeMap<String, BTreeMap<(String, bool), f64>> = BTreeMap::new();
    for (share, comm, symbol) in report.lines().filter_map(line) {
        let kernel = symbol.starts_with("[k]");
        let function = symbol.get(3..).unwrap_or_default().trim();
        let name = thread(comm, function);
        *threads.entry(name).or_default().entry((function.to_owned(), kernel)).or_default() +=
            share;
    }
    let mut threads: Vec<ThreadShare> = threads
        .into_iter()
        .map(|(name, functions)| {
            let share = functions.values().sum();
            let mut functions: Vec<FunctionShare> = functions
                .into_iter()
                .filter(|(_, share)| *share >= FUNCTION_LEAST)
                .map(|((name, kernel), share)| FunctionShare { name, kernel, share })
                .collect();
            functions.sort_by(|a, b| b.share.total_cmp(&a.share));
            functions.truncate(FUNCTIONS);
            ThreadShare { name, share, functions }
        })
        .filter(|thread| thread.share >= THREAD_LEAST)
        .collect();
    threads.sort_by(|a, b| b.share.total_cmp(&a.share));
    threads
}

/// Share, thread and symbol of a line.
fn line(line: &str) -> Option<(f64, &str, &str)> {
    let mut words = line.splitn(3, '|').map(str::trim);
    let percent: f64 = words.next()?.strip_suffix('%')?.parse().ok()?;
    let (comm, symbol) = (words.next()?, words.next()?);
    (percent.is_finite() && percent >= 0.0).then_some((percent / 100.0, comm, symbol))
}

/// The name that threads which do the same share.
fn thread(comm: &str, function: &str) -> String {
    if comm == "swapper" {
        // The kernel's own: waiting, or the interrupts that end it.
        let waits = ["halt", "idle", "mwait"].iter().any(|word| function.contains(word));
        return if waits { ThreadShare::IDLE } else { "interrupts when idle" }.to_owned();
    }
    if let Some(worker) = comm.strip_prefix("kworker/") {
        // Its number, and what it works for now.
        let work = worker.split_once(['-', '+']).map_or("", |(_, work)| work);
        return format!("kworker {work}").trim_end().to_owned();
    }
    let stem = comm.trim_end_matches(|c: char| c.is_ascii_digit());
    if stem.len() < comm.len() { stem.trim_end_matches(['-', '/', ':']) } else { comm }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_folded_by_thread_and_function() {
        let report = "\
 40.00% |swapper        |[k] pv_native_safe_halt\n\
 10.00% |rblk-queue-0   |[k] rep_movs_alternative\n\
  5.00% |rblk-queue-1   |[k] rep_movs_alternative\n\
  4.00% |rblk-queue-0   |[.] <a::B as c::D>::e\n\
  3.00% |kworker/u8:4-rx|[k] crc32_le\n\
  2.00% |kworker/u8:0+rx|[k] crc32_le\n\
  1.00% |swapper        |[k] handle_softirqs\n\
  0.40% |sleep          |[.] strcmp\n\
 nonsense\n\n\
 nan% |x|[k] y\n";
        let threads = fold(report);
        let names: Vec<&str> = threads.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, [ThreadShare::IDLE, "rblk-queue", "kworker rx", "interrupts when idle"]);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(near(threads[1].share, 0.19));
        let functions: Vec<(&str, bool)> =
            threads[1].functions.iter().map(|f| (f.name.as_str(), f.kernel)).collect();
        assert_eq!(functions, [("rep_movs_alternative", true), ("<a::B as c::D>::e", false)]);
        assert!(near(threads[1].functions[0].share, 0.15));
        assert!(near(threads[2].functions[0].share, 0.05));
        assert!(fold("").is_empty());
    }

    #[test]
    fn threads_that_do_the_same_have_one_name() {
        for (comm, name) in [
            ("rblk-queue-0", "rblk-queue"),
            ("ksoftirqd/1", "ksoftirqd"),
            ("iou-wrk-238", "iou-wrk"),
            ("fio", "fio"),
            ("kworker/0:1H", "kworker"),
            ("kworker/u8:3-nvmet-wq", "kworker nvmet-wq"),
            ("md5", "md"),
            ("7", ""),
        ] {
            assert_eq!(thread(comm, ""), name, "{comm}");
        }
    }
}
