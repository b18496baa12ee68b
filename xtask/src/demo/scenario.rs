//! What a demo does, from the first `serve` to the last `drain`.
//!
//! A guard owns each thing that is started, and is declared after what it needs. So after any
//! failure the file system ends first, then the block device, then the target.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::counters::{Cost, Counters};
use super::filesystem::{self, Mounted};
use super::fio;
use super::keys::Keys;
use super::progress::Progress;
use super::report::{Report, Row};
use super::target::Target;
use super::tree::Tree;
use super::volume::Volume;
use crate::process;

/// The sparse file that holds the file system.
const FILE_BYTES: u64 = 1 << 30;

/// How long copying or comparing the tree may take.
const TREE_LIMIT: Duration = Duration::from_secs(400);

/// A port of its own: a target that serves this machine already has the usual ones.
const PORT: u16 = 27720;

/// One demo.
#[derive(Debug)]
pub(crate) struct Scenario {
    /// Where the programs are.
    pub(crate) programs: PathBuf,
    /// An empty directory for the backing file, the socket and the logs.
    pub(crate) work: PathBuf,
    /// `rdma` or `tcp`.
    pub(crate) scheme: &'static str,
    /// The address to listen on.
    pub(crate) host: String,
    /// What to copy, when the user says so.
    pub(crate) tree: Option<PathBuf>,
}

/// What `rblk-initiator discover` says.
#[derive(Debug, Deserialize)]
struct Discovered {
    volumes: Vec<DiscoveredVolume>,
}

#[derive(Debug, Deserialize)]
struct DiscoveredVolume {
    name: String,
}

/// A run of a scenario.
#[derive(Debug)]
struct Run<'a> {
    scenario: &'a Scenario,
    report: &'a mut Report,
    progress: Progress,
    keys: Keys,
}

impl Scenario {
    /// Does everything; what was done is in `report`, also after a failure.
    pub(crate) fn play(&self, report: &mut Report) {
        let progress = Progress::start();
        report.address = format!("{}://{}:{PORT}", self.scheme, self.host);
        progress.say("rblk-target key new, rblk-initiator key new");
        let result = Keys::make(&self.programs, &self.work)
            .and_then(|keys| Run { scenario: self, report: &mut *report, progress, keys }.all());
        report.seconds = progress.seconds();
        let errors: u64 = report.rows.iter().map(|row| row.errors).sum();
        report.error = match result {
            Err(error) => Some(format!("{error:#}")),
            Ok(()) if errors > 0 => {
                Some(format!("{errors} errors were counted: {}", words(report)))
            }
            Ok(()) => None,
        };
        report.passed = report.error.is_none();
    }
}

impl Run<'_> {
    fn all(mut self) -> Result<()> {
        let tree = self.step("choosing files", |run| Tree::choose(run.scenario.tree.as_deref()))?;
        (self.report.files, self.report.file_bytes) = (tree.len() as u64, tree.bytes);
        self.progress.say(&format!(
            "  {} files of {}, {:.1} MiB",
            tree.len(),
            tree.root.display(),
            mib(tree.bytes)
        ));
        let target = self.step("rblk-target serve", |run| run.serve())?;
        self.step("rblk-initiator discover", |run| run.discover())?;
        let sums = self.first_session(&target, &tree)?;
        self.second_session(&target, &tree, &sums)?;
        self.measure(&target)?;
        let refusals = target.counts()?.refusals();
        self.step("rblk-target drain", |_| target.drain())?;
        if refusals > 0 {
            bail!("the target counted {refusals} failed commands or broken rules");
        }
        Ok(())
    }

    fn serve(&self) -> Result<Target> {
        let image = self.scenario.work.join("disk.img");
        File::create(&image)
            .and_then(|file| file.set_len(FILE_BYTES))
            .with_context(|| format!("cannot make {}", image.display()))?;
        let volumes = [
            "--file".to_owned(),
            format!("disk={}", image.display()),
            "--memory".to_owned(),
            "ram=256MiB".to_owned(),
        ];
        let Scenario { programs, work, .. } = self.scenario;
        Target::serve(programs, work, &self.report.address, &volumes, &self.keys)
    }

    fn discover(&self) -> Result<()> {
        let mut command = Command::new(self.scenario.programs.join("rblk-initiator"));
        command.args(["discover", &self.report.address, "--output", "json"]);
        command.args(self.keys.of_host());
        let json = process::output(&mut command, Duration::from_secs(30))?;
        let found: Discovered = serde_json::from_str(&json)
            .context("`rblk-initiator discover --output json` gave something else than expected")?;
        let mut names: Vec<&str> =
            found.volumes.iter().map(|volume| volume.name.as_str()).collect();
        names.sort_unstable();
        if names != ["disk", "ram"] {
            bail!("discover found the volumes {names:?} instead of disk and ram");
        }
        Ok(())
    }

    fn first_session(&mut self, target: &Target, tree: &Tree) -> Result<Vec<[u8; 32]>> {
        let volume = self.mount("disk")?;
        self.on(target, &volume, "mkfs.ext4", |_| filesystem::make(volume.device()))?;
        let dir = self.scenario.work.join("mnt");
        let progress = self.progress;
        let what = format!("copy {} files and sync", tree.len());
        let (filesystem, sums) = self.on(target, &volume, &what, |row| {
            let start = Instant::now();
            let filesystem = Mounted::mount(volume.device(), &dir, "noatime")?;
            let sums = volume.within(TREE_LIMIT, || {
                let sums = tree.copy(&filesystem.dir, &progress)?;
                filesystem.sync()?;
                Ok(sums)
            })?;
            row.mib_per_s = Some(mib(tree.bytes) / start.elapsed().as_secs_f64());
            Ok((filesystem, sums))
        })?;
        self.step("umount, rblk-initiator umount", |_| {
            filesystem.umount()?;
            volume.umount()
        })?;
        Ok(sums)
    }

    fn second_session(&mut self, target: &Target, tree: &Tree, sums: &[[u8; 32]]) -> Result<()> {
        let volume = self.mount("disk")?;
        self.on(target, &volume, "fsck.ext4 -fn", |_| filesystem::check(volume.device()))?;
        let dir = self.scenario.work.join("mnt");
        let progress = self.progress;
        let what = format!("compare SHA-256 of {} files", tree.len());
        self.on(target, &volume, &what, |row| {
            let start = Instant::now();
            let filesystem = Mounted::mount(volume.device(), &dir, "ro")?;
            let different =
                volume.within(TREE_LIMIT, || tree.differences(&filesystem.dir, sums, &progress))?;
            row.mib_per_s = Some(mib(tree.bytes) / start.elapsed().as_secs_f64());
            if let Some(first) = different.first() {
                row.errors += different.len() as u64;
                bail!("{} files differ, the first is {}", different.len(), first.display());
            }
            filesystem.umount()
        })?;
        self.step("rblk-initiator umount", |_| volume.umount())
    }

    fn measure(&mut self, target: &Target) -> Result<()> {
        let volume = self.mount("ram")?;
        let work = self.scenario.work.clone();
        for job in fio::JOBS {
            self.on(target, &volume, job.name, |row| {
                let outcome = job.run(volume.device(), &work)?;
                row.mib_per_s = Some(outcome.mib_per_s);
                row.iops = Some(outcome.iops);
                row.mean_us = Some(outcome.mean_us);
                row.errors += outcome.errors;
                Ok(())
            })?;
        }
        self.step("rblk-initiator umount", |_| volume.umount())
    }

    fn mount(&mut self, name: &str) -> Result<Volume> {
        let programs = self.scenario.programs.clone();
        let address = self.report.address.clone();
        let volume = self.step(&format!("rblk-initiator mount {name}"), |run| {
            let own = format!("demo-{name}-{}", std::process::id());
            Volume::mount(&programs, &address, name, &own, &run.keys)
        })?;
        let status = &volume.status;
        self.progress.say(&format!(
            "  {} by process {} over {} on {}",
            status.device.display(),
            status.pid,
            status.transport,
            status.rdma_device
        ));
        self.report.provider.clone_from(&status.rdma_device);
        self.report.transport.clone_from(&status.transport);
        if let Some(row) = self.report.rows.last_mut() {
            row.device = Some(status.device.display().to_string());
        }
        Ok(volume)
    }

    /// Does one thing that has no I/O to be counted.
    fn step<T>(&mut self, what: &str, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        process::check_interrupt()?;
        self.progress.say(what);
        let start = Instant::now();
        let result = work(self);
        let row = Row { what: what.to_owned(), ..Row::default() };
        self.finish(row, start, result)
    }

    /// Does one thing on a volume and counts what it cost.
    fn on<T>(
        &mut self,
        target: &Target,
        volume: &Volume,
        what: &str,
        work: impl FnOnce(&mut Row) -> Result<T>,
    ) -> Result<T> {
        process::check_interrupt()?;
        self.progress.say(what);
        let counters = || -> Result<Counters> {
            Ok(Counters { initiator: volume.counts()?, target: target.counts()? })
        };
        let before = counters()?;
        let device = Some(volume.device().display().to_string());
        let mut row = Row { what: what.to_owned(), device, ..Row::default() };
        let start = Instant::now();
        let result = work(&mut row);
        let seconds = start.elapsed().as_secs_f64();
        // After a failure a daemon may be what failed, so its silence is not reported as well.
        let cost = counters().map(|after| after.since(&before));
        if let Ok(cost) = cost {
            row.errors += cost.faults.sum();
            if cost.faults.sum() > 0 {
                self.progress.say(&format!("  {}", cost.faults.words()));
            }
            row.iops.get_or_insert(rate(&cost, seconds));
            row.cost = Some(cost);
        }
        self.finish(row, start, result)
    }

    fn finish<T>(&mut self, mut row: Row, start: Instant, result: Result<T>) -> Result<T> {
        row.seconds = start.elapsed().as_secs_f64();
        if result.is_err() {
            row.errors = row.errors.max(1);
        }
        let context = row.what.clone();
        self.report.rows.push(row);
        result.context(context)
    }
}

/// Which errors were counted, by what was being done.
fn words(report: &Report) -> String {
    let rows = report.rows.iter().filter(|row| row.errors > 0);
    let lines = rows.map(|row| {
        let faults = row.cost.map(|cost| cost.faults.words()).filter(|words| !words.is_empty());
        format!("{}: {}", row.what, faults.unwrap_or_else(|| "errors of the program".to_owned()))
    });
    lines.collect::<Vec<_>>().join("; ")
}

fn rate(cost: &Cost, seconds: f64) -> f64 {
    cost.commands as f64 / seconds.max(1e-3)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// What runs here.
pub(crate) fn kernel() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// Removes what a scenario left in its directory.
pub(crate) fn clean(work: &Path) {
    if let Err(error) = fs::remove_dir_all(work) {
        eprintln!("cannot remove {}: {error}", work.display());
    }
}
