//! The rounds: systems side by side, cells one after the other, in every cell all systems in turn.
//!
//! A system that fails is removed and left out of later rounds, with the reason in the run; its
//! samples so far stay. Only an interrupt ends the whole run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::plan::{Candidate, order};
use super::probe::{self, Look};
use super::profile::{Sampler, Window};
use super::{fio, iscsi, perftest, socket_limit};
use crate::folder::RunFolder;
use crate::interrupt;
use crate::peer::access::Access;
use crate::peer::rblk::Counters;
use crate::peer::undo::{Journal, Step};
use crate::peer::{QUEUE_DEPTH, QUEUE_DEPTH_DEEP, Setting, System};
use crate::result::{Cell, CpuProfile, Run, Sample};

const FILL_SECONDS: u32 = 180;
/// Time of counting system calls, and of sampling the processors, each in a sample of its own.
const COUNTED: Duration = Duration::from_secs(2);
const SAMPLED: Duration = Duration::from_secs(4);
/// Seconds after which the load of these samples ends by itself.
const LOAD_SECONDS: u32 = 60;
/// Deadline of the first I/O of these samples.
const START: Duration = Duration::from_secs(30);
/// Time of a sample beyond its seconds, for the estimate.
const OVERHEAD: Duration = Duration::from_millis(1500);

#[derive(Debug)]
pub(crate) struct Rounds<'r> {
    pub(crate) folder: &'r RunFolder,
    pub(crate) run: &'r mut Run,
    pub(crate) rounds: u32,
    pub(crate) seconds: u32,
    pub(crate) probe: bool,
    pub(crate) profile: bool,
    pub(crate) wire: Option<perftest::Wire>,
    pub(crate) progress: Progress,
}

#[derive(Debug)]
pub(crate) struct Progress {
    total: usize,
    done: usize,
    measured: u32,
    begun: Instant,
    each: Duration,
}

struct Contender<'p> {
    candidate: &'p Candidate,
    system: Option<System>,
}

impl Progress {
    pub(crate) fn of(total: usize, seconds: u32) -> Self {
        let each = Duration::from_secs(u64::from(seconds + fio::RAMP)) + OVERHEAD;
        Self { total, done: 0, measured: 0, begun: Instant::now(), each }
    }

    fn step(&mut self, was_measured: bool) {
        if self.measured == 0 && was_measured {
            // Setting up is no measure of the rest.
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
    pub(crate) fn measure(
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
            let mut info = candidate.info.clone();
            match &started {
                Ok(system) => {
                    let took = since.elapsed().as_secs_f64();
                    let System { access, detail, qps, .. } = system;
                    say(&format!("{key:<16} {access} after {took:.1} s: {detail}"));
                    (info.detail, info.qps) = (detail.clone(), *qps);
                }
                Err(error) => {
                    let why = one_line(error);
                    say(&format!("{key:<16} not measured: {why}"));
                    info.error = Some(why);
                }
            }
            // With several numbers of queues the first detail stays.
            if !self.run.samples.iter().any(|sample| sample.system == *key) {
                self.run.set_system(info);
            }
            let system = started.ok();
            contenders.push(Contender { candidate, system });
        }
        Ok(contenders)
    }

    /// Measures one sample. False if the run has it, or the system cannot.
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
                let mut known = self.run.systems.iter_mut();
                if let Some(info) = known.find(|info| info.key == key) {
                    info.error = Some(why);
                }
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
        let (measured, after, ramp) = match &system.access {
            Access::Iscsi(url) => {
                let run = |tag: &str| iscsi::run(cell, url, self.seconds, tag);
                let (measured, said) = load(&setting.journal, run)?;
                let after = Look::at(system);
                std::fs::write(&path, said)
                    .with_context(|| format!("cannot write {}", path.display()))?;
                (measured, after, 0)
            }
            Access::Socket(ip) => {
                let measured = socket_limit::run(cell, *ip, self.seconds)?;
                std::fs::write(&path, serde_json::to_string_pretty(&measured)?)
                    .with_context(|| format!("cannot write {}", path.display()))?;
                (measured, Look::at(system), 0)
            }
            access => {
                let words = fio::words(cell, access, setting.bytes, self.seconds, &path);
                load(&setting.journal, |tag| fio::run(&words, self.seconds, tag))?;
                let after = Look::at(system);
                (fio::read(&path)?, after, fio::RAMP)
            }
        };
        // fio leaves out the I/Os of its first second, and the counters have them.
        let ios = measured.iops * (measured.seconds + f64::from(ramp));
        let mut spent = after.since(&before, Some(ios));
        spent.cpu.fio = measured.cpu.fio;
        let (counters, _) = self.folder.raw(&format!("{name}.counters.json"));
        if spent.counters["initiator"].as_object().is_some_and(|counts| !counts.is_empty()) {
            std::fs::write(&counters, serde_json::to_string_pretty(&spent.counters)?)
                .with_context(|| format!("cannot write {}", counters.display()))?;
        }
        Ok(Sample {
            system: key.to_owned(),
            cell: cell.key.clone(),
            round,
            cpu: spent.cpu,
            initiator: spent.initiator,
            target: spent.target,
            load_before,
            raw,
            ..measured
        })
    }

    /// Samples the processors in each cell, once in a run, in samples that are not kept.
    fn sample_processors(
        &mut self,
        contenders: &[Contender<'_>],
        cells: &[Cell],
        setting: &Setting,
    ) -> Result<()> {
        let has = |key: &str, cell: &Cell| {
            self.run.profiles.iter().any(|p| p.system == key && p.cell == cell.key)
        };
        let pairs = cells.iter().flat_map(|cell| contenders.iter().map(move |one| (cell, one)));
        let disks = pairs.filter_map(|(cell, one)| {
            let (key, system) = (one.candidate.info.key.as_str(), one.system.as_ref()?);
            (system.access.disk().is_some() && !has(key, cell)).then_some((key, system, cell))
        });
        let wanted: Vec<(&str, &System, &Cell)> = disks.collect();
        if wanted.is_empty() {
            return Ok(());
        }
        say("sampling the processors: waiting for perf");
        let failed = |error: anyhow::Error| {
            say(&format!("processors not sampled: {}", one_line(&error)));
            interrupt::check()
        };
        let sampler = match Sampler::start(&setting.journal) {
            Ok(sampler) => sampler,
            Err(error) => return failed(error),
        };
        let (mut sampled, mut windows) = (Vec::new(), Vec::new());
        for (key, system, cell) in wanted {
            let window = under_load(system, cell, setting, || Window::pass(SAMPLED));
            interrupt::check()?;
            match window {
                Ok(window) => {
                    say(&format!("{:<26} {key:<16} processors sampled", cell.key));
                    sampled.push((key.to_owned(), cell.key.clone()));
                    windows.push(window);
                }
                Err(error) => say(&format!("{} {key}: {}", cell.key, one_line(&error))),
            }
        }
        match sampler.stop(&windows) {
            Ok(profiles) => {
                let all = sampled.into_iter().zip(profiles);
                let all = all.map(|((system, cell), threads)| CpuProfile { system, cell, threads });
                self.run.profiles.extend(all);
                interrupt::check()
            }
            Err(error) => failed(error),
        }
    }

    /// Counts the system calls of a cell in a sample of its own: counting costs time.
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

/// Runs a cell's load until `look` has looked, from its first I/O on. A load that ended before is
/// an error.
fn under_load<T>(
    system: &System,
    cell: &Cell,
    setting: &Setting,
    look: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let dir = tempfile::tempdir().context("a directory for fio")?;
    let output = dir.path().join("fio.json");
    let words = fio::words(cell, &system.access, setting.bytes, LOAD_SECONDS, &output);
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

/// System calls per I/O of both ends' data threads.
fn calls_per_io(system: &System, cell: &Cell, setting: &Setting) -> Result<[Option<f64>; 2]> {
    let called = under_load(system, cell, setting, || {
        let pids = [system.initiator_pid, system.target_pid];
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

fn wait_for_io(system: &System) -> Result<()> {
    let disk = system.access.disk().context("only disks are looked at under load")?;
    let (before, deadline) = (probe::disk_ios(disk), Instant::now() + START);
    while probe::disk_ios(disk) == before {
        if Instant::now() > deadline {
            anyhow::bail!("no I/O after {START:?}");
        }
        interrupt::sleep(Duration::from_millis(100))?;
    }
    interrupt::sleep(Duration::from_millis(500))
}

/// Runs a load. Its processes carry the tag that `run` gets. The journal ends them if this
/// process is killed.
fn load<T>(journal: &Journal, run: impl FnOnce(&str) -> Result<T>) -> Result<T> {
    let (tag, undo) = load_tag(journal)?;
    let done = run(&tag);
    if done.is_ok() {
        undo.forget();
    } else if let Err(error) = undo.undo() {
        // A process that waits for its disk ends when the disk is taken down.
        say(&format!("{error:#}"));
    }
    done
}

fn load_tag(journal: &Journal) -> Result<(String, crate::peer::undo::Undo)> {
    let tag = format!("{}-load", std::process::id());
    let undo = journal.note(Step::Load { tag: tag.clone() })?;
    Ok((tag, undo))
}

fn can(system: &System, cell: &Cell) -> bool {
    match &system.access {
        Access::Iscsi(_) => iscsi::can(cell),
        Access::Socket(_) => socket_limit::can(cell),
        Access::Disk(_) | Access::Engine(_) => true,
    }
}

fn fill(system: &System, setting: &Setting) -> Result<()> {
    if matches!(system.access, Access::Iscsi(_) | Access::Socket(_)) {
        // Its file is written already, or it has none.
        return Ok(());
    }
    let words = fio::fill_words(&system.access, setting.bytes);
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

/// Cells by number and depth of the queues they need, in their order.
///
/// io_uring hands every request without a free tag to a kernel thread of its own, and hundreds of
/// such threads would be measured then.
pub(crate) fn by_shape(cells: &[Cell]) -> BTreeMap<(u32, u16), Vec<Cell>> {
    let mut groups: BTreeMap<_, Vec<Cell>> = BTreeMap::new();
    for cell in cells {
        let outstanding = cell.depth.saturating_mul(cell.jobs).div_ceil(cell.queues.max(1));
        let fits = outstanding <= u32::from(QUEUE_DEPTH);
        let depth = if fits { QUEUE_DEPTH } else { QUEUE_DEPTH_DEEP };
        groups.entry((cell.queues, depth)).or_default().push(cell.clone());
    }
    groups
}

fn one_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

fn say(line: &str) {
    eprintln!("{line}");
}

#[cfg(test)]
mod tests;
