//! The processors' time under a load: `perf` samples all of them while fio runs, and the samples
//! are folded by thread and function.
//!
//! perf starts slowly, above all in an emulated guest, so one perf samples all loads of a run, and
//! each sample counts for the load of its [`Window`].
//!
//! The samples are of the CPU clock, which emulated machines have, too. Code with interrupts off is
//! charged to the place where they are on again (`_raw_spin_unlock_irqrestore`,
//! `finish_task_switch`).

use std::collections::BTreeMap;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::child::{self, OnInterrupt};
use crate::interrupt;
use crate::peer::undo::{Journal, Step, Undo};
use crate::result::{FunctionShare, ThreadShare};

pub(crate) const PERF: &str = "perf";
/// Samples a second of each processor: no divisor of a timer's rate.
const RATE: &str = "199";
/// Deadline of each step of perf: it reads all symbols of the kernel.
const LATE: Duration = Duration::from_secs(180);
/// Smaller shares are left out.
const THREAD_LEAST: f64 = 0.005;
const FUNCTION_LEAST: f64 = 0.001;
const FUNCTIONS: usize = 16;
/// Addresses from here on are the kernel's.
const KERNEL_FROM: u64 = 1 << 63;

/// A time on the monotonic clock, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Window {
    /// Waits, and returns the time of that.
    pub(crate) fn pass(time: Duration) -> Result<Self> {
        let from = now()?;
        interrupt::sleep(time)?;
        Ok(Self { from, to: now()? })
    }
}

fn now() -> Result<u64> {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    u64::try_from(now.as_nanos()).context("the clock")
}

/// perf, sampling all processors. Dropped, it ends.
#[derive(Debug)]
pub(crate) struct Sampler {
    perf: Child,
    // Ends it when this process is killed.
    undo: Undo,
    dir: TempDir,
}

impl Sampler {
    pub(crate) fn start(journal: &Journal) -> Result<Self> {
        let dir = tempfile::tempdir().context("a directory for perf")?;
        let tag = format!("{}-perf", std::process::id());
        let undo = journal.note(Step::Load { tag: tag.clone() })?;
        let (_, log) = child::log_file(&dir.path().join("log"))?;
        let mut command = Command::new(PERF);
        command.args(["record", "-q", "-e", "cpu-clock", "-k", "mono", "-F", RATE, "-a", "-o"]);
        command.arg(data(&dir)).env(child::TAG, &tag).stdout(log.try_clone()?).stderr(log);
        // perf runs this command when it is ready.
        let ready = dir.path().join("ready");
        command.args(["--", "sh", "-c", "touch \"$0\"; exec sleep 3600"]).arg(&ready);
        let mut sampler = Self { perf: child::spawn(&mut command)?, undo, dir };
        let begun = child::until(LATE, || {
            let ended = sampler.perf.try_wait().is_ok_and(|status| status.is_some());
            (ready.exists() || ended || interrupt::check().is_err()).then_some(())
        });
        interrupt::check()?;
        ensure!(begun.is_some() && ready.exists(), "perf does not sample: {}", sampler.said());
        Ok(sampler)
    }

    /// Ends perf. Returns the samples of each of `windows`.
    pub(crate) fn stop(mut self, windows: &[Window]) -> Result<Vec<Vec<ThreadShare>>> {
        kill(Pid::from_raw(i32::try_from(self.perf.id())?), Signal::SIGINT)?;
        child::wait(&mut self.perf, LATE, OnInterrupt::End).context("ending perf")?;
        let mut script = Command::new(PERF);
        script.args(["script", "--ns", "-F", "comm,time,ip,sym", "-i"]).arg(data(&self.dir));
        let text = child::output(&mut script, LATE)
            .with_context(|| format!("reading the samples; perf said: {}", self.said()))?;
        self.undo.undo()?;
        Ok(fold(&text, windows))
    }

    fn said(&self) -> String {
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        child::tail(&log)
    }
}

fn data(dir: &TempDir) -> std::path::PathBuf {
    dir.path().join("perf.data")
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sample<'t> {
    comm: &'t str,
    at: u64,
    ip: u64,
    function: &'t str,
}

fn fold(script: &str, windows: &[Window]) -> Vec<Vec<ThreadShare>> {
    let mut counts = vec![Threads::new(); windows.len()];
    for sample in script.lines().filter_map(sample) {
        let hit = windows.iter().position(|w| (w.from..w.to).contains(&sample.at));
        let Some(threads) = hit.and_then(|at| counts.get_mut(at)) else { continue };
        let functions = threads.entry(thread(sample.comm, sample.function)).or_default();
        let key = (sample.function.to_owned(), sample.ip >= KERNEL_FROM);
        *functions.entry(key).or_default() += 1;
    }
    counts.into_iter().map(shares).collect()
}

/// Samples by thread, function, and whether the function is the kernel's.
type Threads = BTreeMap<String, BTreeMap<(String, bool), u64>>;

#[allow(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn shares(threads: Threads) -> Vec<ThreadShare> {
    let all: u64 = threads.values().flat_map(BTreeMap::values).sum();
    let part = |count: u64| count as f64 / all.max(1) as f64;
    let mut threads: Vec<ThreadShare> = threads
        .into_iter()
        .map(|(name, functions)| {
            let share = part(functions.values().sum());
            let mut functions: Vec<FunctionShare> = functions
                .into_iter()
                .map(|((name, kernel), count)| FunctionShare { name, kernel, share: part(count) })
                .filter(|function| function.share >= FUNCTION_LEAST)
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

/// A line such as `   rblk-queue-0 77212.924869248:  ffffffff821f236b finish_task_switch`.
fn sample(line: &str) -> Option<Sample<'_>> {
    let (before, after) = line.split_once(": ")?;
    let (comm, time) = before.trim().rsplit_once(' ')?;
    let (seconds, nanos) = time.split_once('.')?;
    let nanos: u64 = (nanos.len() == 9).then(|| nanos.parse().ok())??;
    let at = seconds.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(nanos)?;
    let (ip, function) = after.trim().split_once(' ')?;
    let ip = u64::from_str_radix(ip, 16).ok()?;
    Some(Sample { comm: comm.trim(), at, ip, function: function.trim() })
}

/// The name of threads with one job.
fn thread(comm: &str, function: &str) -> String {
    if comm == "swapper" {
        // The kernel's own: waiting, or the interrupts that end it.
        let waits = ["halt", "idle", "mwait"].iter().any(|word| function.contains(word));
        return if waits { ThreadShare::IDLE } else { "interrupts when idle" }.to_owned();
    }
    if let Some(worker) = comm.strip_prefix("kworker/") {
        let work = worker.split_once(['-', '+']).map_or("", |(_, work)| work);
        return format!("kworker {work}").trim_end().to_owned();
    }
    let stem = comm.trim_end_matches(|c: char| c.is_ascii_digit());
    if stem.len() < comm.len() { stem.trim_end_matches(['-', '/', ':']) } else { comm }.to_owned()
}

#[cfg(test)]
mod tests;
