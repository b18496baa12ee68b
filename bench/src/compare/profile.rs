//! Where the processors' time goes under a load: `perf` samples all of them while fio runs, and the
//! samples are folded by thread and function.
//!
//! perf begins slowly, above all in an emulated guest, so one of it samples all loads of a run, and
//! each sample is counted for the load within whose [`Window`] it was taken.
//!
//! The samples are of the CPU clock, which every machine has, emulated machines too. Code that runs
//! with interrupts off is charged to the place where they are on again
//! (`_raw_spin_unlock_irqrestore`, `finish_task_switch`).

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

/// The program.
pub const PERF: &str = "perf";
/// Samples a second of each processor: no divisor of a timer's rate.
const RATE: &str = "199";
/// How long perf may take to begin, to write what it has, and to find the names: it reads all
/// symbols of the kernel.
const LATE: Duration = Duration::from_secs(180);
/// Threads with less of the processors' time are left out.
const THREAD_LEAST: f64 = 0.005;
/// Functions with less are left out, and all but so many of a thread.
const FUNCTION_LEAST: f64 = 0.001;
const FUNCTIONS: usize = 16;
/// Addresses from here on are the kernel's.
const KERNEL_FROM: u64 = 1 << 63;

/// A time on the monotonic clock, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// Its begin.
    pub from: u64,
    /// Its end, not in it.
    pub to: u64,
}

impl Window {
    /// From now on for so long, which is waited for.
    ///
    /// # Errors
    /// Interrupted.
    pub fn pass(time: Duration) -> Result<Self> {
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
pub struct Sampler {
    perf: Child,
    // Ends it when this process is killed.
    undo: Undo,
    dir: TempDir,
}

impl Sampler {
    /// Starts it, and waits until it samples.
    ///
    /// # Errors
    /// perf cannot sample here, or it was interrupted.
    pub fn start(journal: &Journal) -> Result<Self> {
        let dir = tempfile::tempdir().context("a directory for perf")?;
        let tag = format!("{}-perf", std::process::id());
        let undo = journal.note(Step::Load { tag: tag.clone() })?;
        let (_, log) = child::log_file(&dir.path().join("log"))?;
        let mut command = Command::new(PERF);
        command.args(["record", "-q", "-e", "cpu-clock", "-k", "mono", "-F", RATE, "-a", "-o"]);
        command.arg(data(&dir)).env(child::TAG, &tag).stdout(log.try_clone()?).stderr(log);
        // What perf runs is begun when it is ready.
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

    /// Ends it, and says what was sampled in each of `windows`.
    ///
    /// # Errors
    /// perf's, or it was interrupted.
    pub fn stop(mut self, windows: &[Window]) -> Result<Vec<Vec<ThreadShare>>> {
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

/// What a sample says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sample<'t> {
    comm: &'t str,
    at: u64,
    ip: u64,
    function: &'t str,
}

/// Samples by window, thread and function.
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

/// Samples of each function, which may be the kernel's, by thread.
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
    fn samples_are_folded_by_window_thread_and_function() {
        let script = "\
         swapper     1.000000000:  ffffffff821f236b pv_native_safe_halt\n\
    rblk-queue-0     1.100000000:  ffffffff820000aa rep_movs_alternative\n\
    rblk-queue-1     1.100000001:  ffffffff820000ab rep_movs_alternative\n\
    rblk-queue-0     1.200000000:      55d0c8a1b2c3 <a::B as c::D>::e\n\
 kworker/u8:4-rx     1.300000000:  ffffffff820000cc crc32_le\n\
 kworker/u8:0+rx     1.999999999:  ffffffff820000cc crc32_le\n\
         swapper     2.000000000:  ffffffff820000dd handle_softirqs\n\
  a thread: two      2.500000000:      7f00000000aa [unknown]\n\
     no time here\n\n\
     x 1.5: ffffffff820000cc short\n";
        let windows = [
            Window { from: 1_000_000_000, to: 2_000_000_000 },
            Window { from: 5_000_000_000, to: 6_000_000_000 },
            Window { from: 2_000_000_000, to: 2_000_000_001 },
        ];
        let folded = fold(script, &windows);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let [threads, nothing, last] = folded.as_slice() else { panic!("{folded:?}") };
        let names: Vec<&str> = threads.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["rblk-queue", "kworker rx", ThreadShare::IDLE]);
        assert!(near(threads[0].share, 0.5) && near(threads[2].share, 1.0 / 6.0));
        let functions: Vec<(&str, bool)> =
            threads[0].functions.iter().map(|f| (f.name.as_str(), f.kernel)).collect();
        assert_eq!(functions, [("rep_movs_alternative", true), ("<a::B as c::D>::e", false)]);
        assert!(near(threads[0].functions[0].share, 2.0 / 6.0));
        assert!(nothing.is_empty());
        assert_eq!(last[0].name, "interrupts when idle");
        let odd = sample("  a thread: two      2.500000000:      7f00000000aa [unknown]");
        assert_eq!(odd.map(|s| s.comm), None, "a name with a colon is not understood, not misread");
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
