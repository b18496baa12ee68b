//! Mounts of real block devices: IOPS against queues of one and against how many there are, their
//! memory, and what idle mounts cost.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rblk_initiator::volume::status::MountStatus;

use super::Setting;
use super::plot::{Line, plot};
use super::target::{Target, processor_time, resident};
use crate::compare::fio;
use crate::keys::Keys;
use crate::peer::access::Access;
use crate::peer::rblk::{Backing, Carrier, Rblk, RblkSpec};
use crate::peer::undo::{Step, Undo};
use crate::peer::{QUEUE_DEPTH, daemon::mount_status, loaded};
use crate::result::{Axis, Cell, Idle, ScalePlot, Summary, Unit};
use crate::{child, interrupt};

/// Most queues of one mount that are measured.
const QUEUES_MOST: u16 = 4;
/// Load on a mount with any number of queues: jobs, and I/Os outstanding of each.
const JOBS: u32 = 4;
const DEPTH: u32 = 32;
/// I/Os outstanding on each of many volumes, where the load grows with them.
const DEPTH_OF_EACH: u32 = 4;
/// Bytes of a volume with queues.
const BYTES: u64 = 256 << 20;
/// Bytes of each of many volumes.
const SMALL_BYTES: u64 = 16 << 20;
/// How long one mount may take.
const MOUNT_LIMIT: Duration = Duration::from_secs(60);
/// How long idle mounts take to come to rest: they then send KEEP_ALIVE rarely.
const REST: Duration = Duration::from_secs(15);
/// Port of a target of which the queues are measured.
const PORT: u16 = 7750;

/// What block devices need, as far as it was not there.
pub(super) fn front_end(setting: &Setting) -> Result<Option<Undo>> {
    ensure!(nix::unistd::geteuid().is_root(), "mounting needs root");
    ensure!(child::is_installed("fio"), "there is no fio: install it");
    let control = Path::new("/dev/ublk-control");
    if control.exists() {
        return Ok(None);
    }
    let undo = loaded::ensure(&setting.journal, "ublk_drv", &[])?;
    let there = child::until(Duration::from_secs(5), || control.exists().then_some(()));
    there.context("there is no /dev/ublk-control")?;
    Ok(undo)
}

/// IOPS against the queues of one mount, over each transport there is.
pub(super) fn queues(setting: &Setting) -> Result<ScalePlot> {
    let _module = front_end(setting)?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut plot = plot(
        "iops-by-queues",
        "IOPS against queues",
        Axis { label: "queues of the mount".to_owned(), unit: Unit::Count, log: false },
        Axis { label: "4 KiB random reads".to_owned(), unit: Unit::Iops, log: false },
        format!("{JOBS} jobs of depth {DEPTH} at any number of queues; {cpus} processors here"),
    );
    let carriers = [(Carrier::Verbs, "verbs"), (Carrier::Tcp, "tcp")];
    for (number, (carrier, name)) in (0_u16..).zip(carriers) {
        let address = match carrier {
            Carrier::Verbs => match setting.rdma_address {
                Some(address) => address,
                None => continue,
            },
            Carrier::Tcp => setting.address,
        };
        let mut line = Line::default();
        // The driver makes no more queues than there may be processors.
        for queues in 1..=QUEUES_MOST.min(u16::try_from(cpus).unwrap_or(QUEUES_MOST)) {
            let spec = RblkSpec {
                key: format!("scale-{name}-{queues}"),
                carrier,
                address,
                port: PORT + number,
                backing: Backing::Memory,
                bytes: BYTES,
                queues,
                depth: QUEUE_DEPTH,
                programs: setting.programs.clone(),
                environment: Vec::new(),
                with_keys: setting.with_keys,
                target_flags: Vec::new(),
                mount_flags: Vec::new(),
            };
            let mount = Rblk::start(&setting.journal, &spec)?;
            fill(setting, mount.path(), BYTES)?;
            let cell = Cell::new("randread", 4096, DEPTH, JOBS, queues.into(), 100);
            let iops = load(setting, &cell, mount.path(), BYTES, &[])?;
            setting.tell(&format!("{queues} queues over {name}: {:.0} IOPS", iops.median));
            line.add(f64::from(queues), iops);
        }
        plot.lines.push(line.plain(name));
    }
    if cpus < usize::from(QUEUES_MOST) {
        plot.note.push_str(", and no more queues than processors");
    }
    Ok(plot)
}

/// Many mounted volumes of one target. Dropped, they are gone.
struct Mounts<'s> {
    setting: &'s Setting,
    // The last one is given up first; the target after all of them.
    mounts: Vec<Mount>,
    target: Target,
}

struct Mount {
    _undo: Undo,
    disk: PathBuf,
    pid: u32,
}

impl Drop for Mounts<'_> {
    fn drop(&mut self) {
        while let Some(mount) = self.mounts.pop() {
            drop(mount);
        }
    }
}

impl<'s> Mounts<'s> {
    /// A target with `volumes` volumes, of which none is mounted yet.
    fn new(setting: &'s Setting, volumes: u32) -> Result<Self> {
        let mut flags = Vec::new();
        for number in 0..volumes {
            flags.extend(["--memory".to_owned(), format!("v{number}={SMALL_BYTES}")]);
        }
        let target = setting.target("volumes", &flags, |_| Ok(()))?;
        Ok(Self { setting, mounts: Vec::new(), target })
    }

    /// Mounts more, until there are `count`.
    fn grow(&mut self, count: u32) -> Result<()> {
        while self.mounts.len() < count as usize {
            interrupt::check()?;
            let mount = self.mount(self.mounts.len());
            let number = self.mounts.len() + 1;
            self.mounts.push(mount.with_context(|| format!("mount {number}"))?);
        }
        Ok(())
    }

    fn mount(&self, number: usize) -> Result<Mount> {
        let programs = &self.setting.programs;
        let name = format!("bench-{}-v{number}", std::process::id());
        let tag = format!("{name}-mount");
        let program = programs.join("rblk-initiator");
        let step = Step::Mount { name: name.clone(), program: program.clone(), tag: tag.clone() };
        let undo = self.setting.journal.note(step)?;
        let mut command = Command::new(program);
        command.args(["mount", &self.target.address().to_string(), &format!("v{number}")]);
        command.args(["--name", &name, "--output", "json", "--queues", "1"]);
        // Buffers for a hundred of them: 2 MiB each.
        command.args(["--queue-depth", "16", "--max-io", "128KiB"]);
        command.args(Keys::of_mount(self.target.keys(), &[]));
        let json = child::output(command.env(child::TAG, &tag).current_dir("/"), MOUNT_LIMIT)?;
        let status: MountStatus =
            serde_json::from_str(&json).context("`rblk-initiator mount` gave something else")?;
        ensure!(mount_status(&name).is_some(), "{name} does not answer");
        Ok(Mount { _undo: undo, disk: PathBuf::from(&status.device), pid: status.pid })
    }

    /// All disks, as fio wants them.
    fn disks(&self) -> PathBuf {
        let disks: Vec<String> =
            self.mounts.iter().map(|mount| mount.disk.display().to_string()).collect();
        PathBuf::from(disks.join(":"))
    }

    fn resident(&self) -> u64 {
        self.mounts.iter().filter_map(|mount| resident(mount.pid)).sum()
    }

    /// Processor time so far: of the mounts together, and of the target.
    fn processor_time(&self) -> Result<(Duration, Duration)> {
        let gone = "a daemon is gone";
        let each = self.mounts.iter().map(|mount| processor_time(mount.pid).context(gone));
        let mounts = each.sum::<Result<Duration>>()?;
        Ok((mounts, processor_time(self.target.pid()).context(gone)?))
    }
}

/// IOPS and memory against mounted volumes up to `most`, and, if `idle` says for how long, what
/// they cost when they are idle.
pub(super) fn volumes(
    setting: &Setting,
    most: u32,
    with_load: bool,
    idle: Option<Duration>,
) -> Result<(Vec<ScalePlot>, Option<Idle>)> {
    let _module = front_end(setting)?;
    let mut mounts = Mounts::new(setting, most)?;
    let (mut each, mut divided, mut memory) = (Line::default(), Line::default(), Line::default());
    for count in steps(most).into_iter().filter(|count| with_load || *count == most) {
        mounts.grow(count)?;
        if !with_load {
            break;
        }
        let disks = mounts.disks();
        let rate = |depth| {
            let cell = Cell::new("randread", 4096, depth, 1, 1, 100);
            let more = ["--file_service_type=roundrobin:1".to_owned()];
            load(setting, &cell, &disks, SMALL_BYTES * u64::from(count), &more)
        };
        let (of_each, of_all) = (rate(DEPTH_OF_EACH * count)?, rate(DEPTH)?);
        let resident = mounts.resident();
        setting.tell(&format!(
            "{count} volumes: {:.0} IOPS at depth {DEPTH_OF_EACH} each, {:.0} at {DEPTH} over all; {} MiB resident in \
             their daemons",
            of_each.median,
            of_all.median,
            resident >> 20
        ));
        each.add(f64::from(count), of_each);
        divided.add(f64::from(count), of_all);
        #[allow(clippy::cast_precision_loss, reason = "bytes far below 2^53")]
        memory.add_one(f64::from(count), resident as f64);
    }
    let idle = idle.map(|time| watch(setting, &mounts, time)).transpose()?;
    drop(mounts);
    let volumes = || Axis { label: "mounted volumes".to_owned(), unit: Unit::Count, log: true };
    let what = "in the target's memory, one queue of depth 16 each, over TCP by the software \
                provider";
    let mut plots = Vec::new();
    if with_load {
        let rate = Axis { label: "4 KiB random reads".to_owned(), unit: Unit::Iops, log: false };
        let note = format!(
            "{what}; the exponent is that of the time for one I/O on each. {DEPTH} outstanding over all of them are \
             fewer on each the more there are, and share fewer messages and wake-ups: no growth to be judged"
        );
        let mut by_volumes = plot("iops-by-volumes", "IOPS against volumes", volumes(), rate, note);
        by_volumes.lines.push(each.growth_of_rate(&format!("{DEPTH_OF_EACH} outstanding on each")));
        by_volumes.lines.push(divided.plain(&format!("{DEPTH} outstanding over all")));
        let bytes = Axis {
            label: "resident memory of all mount daemons".to_owned(),
            unit: Unit::Bytes,
            log: true,
        };
        let mut by_memory = plot(
            "memory-by-volumes",
            "Memory of mounts",
            volumes(),
            bytes,
            format!("{what}; pages that they share are counted for each"),
        );
        by_memory.lines.push(memory.growth_from("initiator", 1.0));
        plots.extend([by_volumes, by_memory]);
    }
    Ok((plots, idle))
}

/// Watches idle mounts.
fn watch(setting: &Setting, mounts: &Mounts<'_>, time: Duration) -> Result<Idle> {
    let count = u32::try_from(mounts.mounts.len())?;
    setting.tell(&format!("{count} volumes with nothing to do, for {} s", time.as_secs()));
    interrupt::sleep(REST)?;
    let (begin, (mounts_before, target_before)) = (Instant::now(), mounts.processor_time()?);
    interrupt::sleep(time)?;
    let (took, (mounts_after, target_after)) = (begin.elapsed(), mounts.processor_time()?);
    let percent = |before: Duration, after: Duration| {
        100.0 * after.saturating_sub(before).as_secs_f64() / took.as_secs_f64()
    };
    let idle = Idle {
        volumes: count,
        seconds: took.as_secs_f64(),
        initiator_percent: percent(mounts_before, mounts_after),
        target_percent: percent(target_before, target_after),
        place: "over TCP by the software provider, one queue each".to_owned(),
    };
    setting.tell(&format!(
        "idle: {:.2} % of a processor for the mounts, {:.2} % for the target",
        idle.initiator_percent, idle.target_percent
    ));
    Ok(idle)
}

/// 1, 2, 5, 10, 20, 50, ... up to `most`, which is the last one.
fn steps(most: u32) -> Vec<u32> {
    super::steps(&[1, 2, 5], most)
}

/// Writes a disk once, so that it has its memory.
fn fill(setting: &Setting, disk: &Path, bytes: u64) -> Result<()> {
    let tag = format!("{}-scale-fill", std::process::id());
    let _load = setting.journal.note(Step::Load { tag: tag.clone() })?;
    fio::run(&fio::fill_words(&Access::Disk(disk.to_owned()), bytes), 30, &tag)
}

/// IOPS of a load over the rounds.
fn load(
    setting: &Setting,
    cell: &Cell,
    disk: &Path,
    bytes: u64,
    more: &[String],
) -> Result<Summary> {
    let tag = format!("{}-scale-load", std::process::id());
    let seconds = u32::try_from(setting.time.as_secs().max(1))?;
    let mut seen = Vec::new();
    let access = Access::Disk(disk.to_owned());
    for round in 0..setting.rounds {
        interrupt::check()?;
        let output = setting.scratch.join(format!("{}-{round}.json", cell.key));
        let mut words = fio::words(cell, &access, bytes, seconds, &output);
        words.extend_from_slice(more);
        let undo = setting.journal.note(Step::Load { tag: tag.clone() })?;
        fio::run(&words, seconds, &tag)?;
        drop(undo);
        let measured = fio::read(&output)?;
        if measured.errors > 0 {
            bail!("{} I/Os failed", measured.errors);
        }
        seen.push(measured.iops);
    }
    Summary::of(seen).context("nothing was measured")
}

/// The address to use where there is no RDMA device.
pub(super) const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_grow_to_the_most() {
        assert_eq!(steps(100), [1, 2, 5, 10, 20, 50, 100]);
        assert_eq!(steps(30), [1, 2, 5, 10, 20, 30]);
        assert_eq!(steps(1), [1]);
        assert!(steps(0).is_empty());
        assert_eq!(steps(u32::MAX).last(), Some(&u32::MAX));
    }
}
