//! The measuring itself: systems side by side, cells one after the other, in every cell all systems
//! in turn, round by round.
//!
//! A system that fails is removed and left out from then on, with the reason in the run; its
//! samples so far stay. Only an interrupt ends the whole run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::plan::{Candidate, order};
use super::probe::{self, Look};
use super::profile::{Sampler, Window};
use super::{fio, iscsi, wire};
use crate::folder::RunFolder;
use crate::interrupt;
use crate::peer::access::Access;
use crate::peer::rblk::Counters;
use crate::peer::undo::{Journal, Step};
use crate::peer::{QUEUE_DEPTH, QUEUE_DEPTH_DEEP, Setting, System};
use crate::result::{Cell, CpuProfile, Run, Sample};

/// How long filling a disk once may take.
const FILL_SECONDS: u32 = 180;
/// How long system calls are counted, and the processors sampled, each within a sample of its own.
const COUNTED: Duration = Duration::from_secs(2);
const SAMPLED: Duration = Duration::from_secs(4);
/// Seconds after which the load of such a sample would end by itself.
const LOAD_SECONDS: u32 = 60;
/// How long fio may take to begin in such a sample.
const START: Duration = Duration::from_secs(30);
/// Length of one sample beyond what is measured, for the estimate of what is left.
const OVERHEAD: Duration = Duration::from_millis(1500);

/// What is common to all measuring of a run.
#[derive(Debug)]
pub struct Rounds<'r> {
    /// Where everything goes.
    pub folder: &'r RunFolder,
    /// What everything is added to.
    pub run: &'r mut Run,
    /// Rounds.
    pub rounds: u32,
    /// Seconds of a sample.
    pub seconds: u32,
    /// Whether to count system calls in extra samples.
    pub probe: bool,
    /// Whether to sample where the processors' time goes, in extra samples.
    pub profile: bool,
    /// perftest beside, where there is a device for it.
    pub wire: Option<wire::Wire>,
    /// Samples of the whole run, and how many are done.
    pub progress: Progress,
}

/// How far it is.
#[derive(Debug)]
pub struct Progress {
    total: usize,
    done: usize,
    measured: u32,
    begun: Instant,
    each: Duration,
}

/// A system that is there, or was.
struct Contender<'p> {
    candidate: &'p Candidate,
    system: Option<System>,
}

impl Progress {
    /// Of a run of so many samples.
    #[must_use]
    pub fn of(total: usize, seconds: u32) -> Self {
        let each = Duration::from_secs(u64::from(seconds + fio::RAMP)) + OVERHEAD;
        Self { total, done: 0, measured: 0, begun: Instant::now(), each }
    }

    fn step(&mut self, was_measured: bool) {
        if self.measured == 0 && was_measured {
            // What is there already, and setting up, is no measure of the rest.
            self.begun = Instant::now();
        } else if was_measured {
            self.each = self.begun.elapsed() / self.measured;
        }
        self.measured += u32::from(was_measured);
        self.done += 1;
    }

    fn left(&self) -> String {
        let left = u32::try_from(self.total.saturating_sub(self.done)).unwrap_or(u32::MAX);
        let seconds = self.each.saturating_mul(left).as_secs();
        format!("{}:{:02} left", seconds / 60, seconds % 60)
    }
}

impl Rounds<'_> {
    /// Sets the systems up with one number of queues, measures `cells` on them, and takes them
    /// down.
    ///
    /// # Errors
    /// Interrupted, or the run cannot be saved.
    pub fn measure(
        &mut self,
        candidates: &[Candidate],
        cells: &[Cell],
        setting: &Setting,
    ) -> Result<()> {
        let mut contenders = self.set_up(candidates, setting)?;
        for round in 1..=self.rounds {
            if let Some(wire) = &self.wire {
                wire.measure(self.run, round)?;
            }
            for cell in cells {
                for at in order(contenders.len(), round) {
                    interrupt::check()?;
                    let measured = self.one(&mut contenders[at], cell, round, setting)?;
                    self.progress.step(measured);
                }
            }
            self.folder.save(self.run)?;
        }
        if self.profile {
            self.sample_processors(&contenders, cells, setting)?;
            self.folder.save(self.run)?;
        }
        if self.probe && probe::counts_syscalls(&setting.journal)? {
            let at_depth = |cell: &&Cell| {
                cell.jobs == 1 && cell.block_bytes == 4096 && [1, 32].contains(&cell.depth)
            };
            for cell in cells.iter().filter(at_depth) {
                for contender in &contenders {
                    self.count_syscalls(contender, cell, setting)?;
                }
            }
        }
        for contender in &mut contenders {
            take_down(contender);
        }
        self.folder.save(self.run)
    }

    fn set_up<'p>(
        &mut self,
        candidates: &'p [Candidate],
        setting: &Setting,
    ) -> Result<Vec<Contender<'p>>> {
        let mut contenders = Vec::new();
        for (number, candidate) in (0..).zip(candidates) {
            let key = &candidate.info.key;
            let since = Instant::now();
            let started = System::start(setting, key, &candidate.kind, number).and_then(|system| {
                fill(&system, setting)?;
                Ok(system)
            });
            interrupt::check()?;
            let system = match started {
                Ok(system) => {
                    say(&format!(
                        "{key:<16} {} after {:.1} s: {}",
                        system.access(),
                        since.elapsed().as_secs_f64(),
                        system.detail()
                    ));
                    self.describe(candidate, system.detail(), system.qps(), None);
                    Some(system)
                }
                Err(error) => {
                    let why = one_line(&error);
                    say(&format!("{key:<16} not measured: {why}"));
                    self.describe(candidate, "", 0, Some(why));
                    None
                }
            };
            contenders.push(Contender { candidate, system });
        }
        Ok(contenders)
    }

    /// Takes a system into the run. With several numbers of queues the first decides what is said
    /// of it.
    fn describe(&mut self, candidate: &Candidate, detail: &str, qps: u32, error: Option<String>) {
        let key = &candidate.info.key;
        let mut info = candidate.info.clone();
        let known = self.run.systems.iter().find(|info| info.key == *key);
        let has_samples = self.run.samples.iter().any(|sample| sample.system == *key);
        match known {
            Some(known) if has_samples => info = known.clone(),
            _ => (info.detail, info.qps, info.error) = (detail.to_owned(), qps, error),
        }
        self.run.set_system(info);
    }

    /// Measures one sample, unless the run has it. Whether it did.
    fn one(
        &mut self,
        contender: &mut Contender<'_>,
        cell: &Cell,
        round: u32,
        setting: &Setting,
    ) -> Result<bool> {
        let key = contender.candidate.info.key.clone();
        let Some(system) = &contender.system else { return Ok(false) };
        if !can(system, cell) || self.run.sample(&key, &cell.key, round).is_some() {
            return Ok(false);
        }
        let measured = self.sample(system, &key, cell, round, setting);
        interrupt::check()?;
        let place = format!("[{}/{}] round {round}", self.progress.done + 1, self.progress.total);
        match measured {
            Ok(sample) => {
                say(&format!(
                    "{place} {:<26} {key:<16} {:>8.0} IOPS {:>8.1} MiB/s  mean {:>7.0} us  p99 {:>7.0} us  cpu {:.2}  {}",
                    cell.key,
                    sample.iops,
                    sample.bytes_per_s / f64::from(1 << 20),
                    sample.latency.mean_ns / 1e3,
                    sample.latency.p99 as f64 / 1e3,
                    sample.cpu.busy,
                    self.progress.left()
                ));
                self.run.set_sample(sample);
                Ok(true)
            }
            Err(error) => {
                let why = format!("{} round {round}: {}", cell.key, one_line(&error));
                say(&format!("{place} {key}: {why}"));
                take_down(contender);
                let mut info = contender.candidate.info.clone();
                if let Some(known) = self.run.systems.iter().find(|info| info.key == key) {
                    info = known.clone();
                }
                info.error = Some(why);
                self.run.set_system(info);
                Ok(true)
            }
        }
    }

    fn sample(
        &self,
        system: &System,
        key: &str,
        cell: &Cell,
        round: u32,
        setting: &Setting,
    ) -> Result<Sample> {
        let name = format!("r{round}-{}-{key}", cell.key);
        let (path, raw) = self.folder.raw(&format!("{name}.json"));
        let load_before = probe::load()?;
        let before = Look::at(system);
        let (measured, after, ramp) = match system.access() {
            Access::Iscsi(url) => {
                let run = |tag: &str| iscsi::run(cell, url, self.seconds, tag);
                let (measured, said) = load(&setting.journal, run)?;
                let after = Look::at(system);
                std::fs::write(&path, said)
                    .with_context(|| format!("cannot write {}", path.display()))?;
                (measured, after, 0)
            }
            access => {
                let words = fio::words(cell, access, setting.bytes, self.seconds, &path);
                load(&setting.journal, |tag| fio::run(&words, self.seconds, tag))?;
                let after = Look::at(system);
                (fio::read(&path)?, after, fio::RAMP)
            }
        };
        // fio does not tell of the I/Os of its first second, which are counted, too.
        let ios = measured.iops * (measured.seconds + f64::from(ramp));
        let mut spent = after.since(&before, Some(ios));
        spent.cpu.fio = measured.cpu;
        let (counters, _) = self.folder.raw(&format!("{name}.counters.json"));
        if spent.counters["initiator"].as_object().is_some_and(|counts| !counts.is_empty()) {
            std::fs::write(&counters, serde_json::to_string_pretty(&spent.counters)?)
                .with_context(|| format!("cannot write {}", counters.display()))?;
        }
        Ok(Sample {
            system: key.to_owned(),
            cell: cell.key.clone(),
            round,
            seconds: measured.seconds,
            iops: measured.iops,
            bytes_per_s: measured.bytes_per_s,
            latency: measured.latency,
            errors: measured.errors,
            cpu: spent.cpu,
            initiator: spent.initiator,
            target: spent.target,
            load_before,
            raw,
        })
    }

    /// Samples where the processors' time goes in each cell, once in a run, in samples that are not
    /// kept.
    fn sample_processors(
        &mut self,
        contenders: &[Contender<'_>],
        cells: &[Cell],
        setting: &Setting,
    ) -> Result<()> {
        let has = |system: &str, cell: &Cell| {
            self.run.profiles.iter().any(|p| p.system == system && p.cell == cell.key)
        };
        let mut wanted = Vec::new();
        for cell in cells {
            for contender in contenders {
                let key = contender.candidate.info.key.as_str();
                if let Some(system) = contender
                    .system
                    .as_ref()
                    .filter(|s| s.access().disk().is_some() && !has(key, cell))
                {
                    wanted.push((key, system, cell));
                }
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        say("sampling the processors: waiting for perf");
        let sampler = match Sampler::start(&setting.journal) {
            Ok(sampler) => sampler,
            Err(error) => {
                interrupt::check()?;
                say(&format!("processors not sampled: {}", one_line(&error)));
                return Ok(());
            }
        };
        let (mut sampled, mut windows) = (Vec::new(), Vec::new());
        for (key, system, cell) in wanted {
            let window = under_load(system, cell, setting, || Window::pass(SAMPLED));
            interrupt::check()?;
            match window {
                Ok(window) => {
                    say(&format!("{:<26} {key:<16} processors sampled", cell.key));
                    sampled.push((key, cell.key.clone()));
                    windows.push(window);
                }
                Err(error) => say(&format!("{} {key}: {}", cell.key, one_line(&error))),
            }
        }
        let profiles = sampler.stop(&windows);
        interrupt::check()?;
        match profiles {
            Ok(profiles) => {
                for ((system, cell), threads) in sampled.into_iter().zip(profiles) {
                    self.run.profiles.push(CpuProfile { system: system.to_owned(), cell, threads });
                }
            }
            Err(error) => say(&format!("processors not sampled: {}", one_line(&error))),
        }
        Ok(())
    }

    /// Counts the system calls of a cell's I/Os in a sample of its own, which is not kept: counting
    /// them costs time.
    fn count_syscalls(
        &mut self,
        contender: &Contender<'_>,
        cell: &Cell,
        setting: &Setting,
    ) -> Result<()> {
        let key = &contender.candidate.info.key;
        let Some(system) = &contender.system else { return Ok(()) };
        if system.counters().initiator.is_none() || self.run.rounds(key, &cell.key).is_empty() {
            return Ok(());
        }
        let counted = calls_per_io(system, cell, setting);
        interrupt::check()?;
        match counted {
            Ok([initiator, target]) => {
                let show = |calls: Option<f64>| calls.map_or("-".into(), |c| format!("{c:.2}"));
                say(&format!(
                    "{:<26} {key:<16} system calls per I/O: initiator {}, target {}",
                    cell.key,
                    show(initiator),
                    show(target)
                ));
                let samples = self.run.samples.iter_mut();
                for sample in samples.filter(|s| s.system == *key && s.cell == cell.key) {
                    if let Some(end) = &mut sample.initiator {
                        end.syscalls = initiator;
                    }
                    if let Some(end) = &mut sample.target {
                        end.syscalls = target;
                    }
                }
            }
            Err(error) => {
                say(&format!("{} {key}: system calls not counted: {}", cell.key, one_line(&error)));
            }
        }
        Ok(())
    }
}

/// Runs a cell's load while `look` looks, which it does when there is I/O. The load is killed then;
/// one that had ended before is an error, for nothing ran meanwhile.
fn under_load<T>(
    system: &System,
    cell: &Cell,
    setting: &Setting,
    look: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let dir = tempfile::tempdir().context("a directory for fio")?;
    let output = dir.path().join("fio.json");
    let words = fio::words(cell, system.access(), setting.bytes, LOAD_SECONDS, &output);
    let (tag, undo) = load_tag(&setting.journal)?;
    std::thread::scope(|scope| {
        let running = scope.spawn(|| fio::run(&words, LOAD_SECONDS, &tag));
        let seen = wait_for_io(system).and_then(|()| look());
        let ended = running.is_finished();
        undo.undo()?;
        let load = running.join().unwrap_or_else(|_| Err(anyhow::anyhow!("fio's thread")));
        if ended {
            load?;
            anyhow::bail!("fio ended before it was to be looked at");
        }
        seen
    })
}

/// System calls per I/O of both ends' data threads, in the middle of some windows.
fn calls_per_io(system: &System, cell: &Cell, setting: &Setting) -> Result<[Option<f64>; 2]> {
    let called = under_load(system, cell, setting, || {
        let pids = [system.initiator_pid(), system.target_pid()];
        probe::syscalls(&setting.journal, pids, COUNTED, || Ok(system.counters()))
    })?;
    let per_io = |at, ios: fn(&Counters) -> Option<u64>| {
        probe::calls_per_io(&called, at, |before, after| ios(after)?.checked_sub(ios(before)?))
    };
    Ok([
        per_io(0, |c| c.initiator.map(|c| c.reads + c.writes)),
        per_io(1, |c| c.target.map(|c| c.reads + c.writes)),
    ])
}

/// Waits until a load that was started does I/O: programs start slowly on a guest's shared file
/// system.
fn wait_for_io(system: &System) -> Result<()> {
    let disk = system.access().disk().context("only disks are looked at under load")?;
    let (before, deadline) = (probe::disk_ios(disk), Instant::now() + START);
    while probe::disk_ios(disk) == before {
        if Instant::now() > deadline {
            anyhow::bail!("no I/O after {START:?}");
        }
        interrupt::sleep(Duration::from_millis(100))?;
    }
    interrupt::sleep(Duration::from_millis(500))
}

/// Runs a load, whose processes carry the tag that `run` is given. They are in the journal: a later
/// run ends them if this process is killed.
fn load<T>(journal: &Journal, run: impl FnOnce(&str) -> Result<T>) -> Result<T> {
    let (tag, undo) = load_tag(journal)?;
    let done = run(&tag);
    if done.is_ok() {
        undo.forget();
    } else if let Err(error) = undo.undo() {
        // It waits for its disk, and ends when that is taken down.
        say(&format!("{error:#}"));
    }
    done
}

fn load_tag(journal: &Journal) -> Result<(String, crate::peer::undo::Undo)> {
    let tag = format!("{}-load", std::process::id());
    let undo = journal.note(Step::Load { tag: tag.clone() })?;
    Ok((tag, undo))
}

/// Whether what measures a system can do what a cell asks for.
fn can(system: &System, cell: &Cell) -> bool {
    !matches!(system.access(), Access::Iscsi(_)) || iscsi::can(cell)
}

fn fill(system: &System, setting: &Setting) -> Result<()> {
    if matches!(system.access(), Access::Iscsi(_)) {
        // It wrote its file itself.
        return Ok(());
    }
    let words = fio::fill_words(system.access(), setting.bytes);
    let run = |tag: &str| fio::run(&words, FILL_SECONDS, tag);
    load(&setting.journal, run).context("writing the whole disk once")
}

fn take_down(contender: &mut Contender<'_>) {
    if let Some(system) = contender.system.take() {
        let since = Instant::now();
        drop(system);
        let took = since.elapsed();
        if took > Duration::from_secs(5) {
            say(&format!("{} took {took:.1?} to take down", contender.candidate.info.key));
        }
    }
}

/// Cells by number and depth of the queues they need, in the order in which they come.
///
/// io_uring gives every request for which a disk has no tag to a kernel thread of its own, and
/// hundreds of those are what is measured then, on all systems alike.
#[must_use]
pub fn by_shape(cells: &[Cell]) -> BTreeMap<(u32, u16), Vec<Cell>> {
    let mut groups: BTreeMap<_, Vec<Cell>> = BTreeMap::new();
    for cell in cells {
        let outstanding = cell.depth.saturating_mul(cell.jobs).div_ceil(cell.queues.max(1));
        let fits = outstanding <= u32::from(QUEUE_DEPTH);
        let depth = if fits { QUEUE_DEPTH } else { QUEUE_DEPTH_DEEP };
        groups.entry((cell.queues, depth)).or_default().push(cell.clone());
    }
    groups
}

/// An error with its reasons, without line breaks.
fn one_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// A line of progress.
fn say(line: &str) {
    eprintln!("{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_measured_by_the_queues_they_need() {
        let cell = |depth, jobs, queues| Cell::new("randread", 4096, depth, jobs, queues, 100);
        let shallow = [cell(1, 1, 1), cell(128, 1, 1)];
        let deep = [cell(8, 64, 1), cell(129, 1, 1)];
        let two = [cell(2, 128, 2), cell(1, 1, 2)];
        let groups = by_shape(&[shallow.as_slice(), &deep, &two].concat());
        assert_eq!(groups[&(1, QUEUE_DEPTH)], shallow);
        assert_eq!(groups[&(1, QUEUE_DEPTH_DEEP)], deep);
        assert_eq!(groups[&(2, QUEUE_DEPTH)], two);
        assert_eq!(groups.len(), 3);
    }

    #[test]
    fn reasons_are_one_line() {
        let error = anyhow::anyhow!("b\n\n  c\n").context("a");
        assert_eq!(one_line(&error), "a: b; c");
    }
}
