//! The systems that are measured, each set up and taken down.
//!
//! | module | contents |
//! |---|---|
//! | [`target`], [`rblk`], [`daemon`] | a target of rblk, a mount, the status of running daemons |
//! | [`nvmet`], `nvme_kernel` | the kernel's target and host of NVMe over RDMA and TCP |
//! | [`server`], [`nbd`] | servers of NBD and iSCSI; the kernel's client of NBD |
//! | [`ublk_null`], [`local`] | a ublk disk without work; RAM disks |
//! | [`undo`] | the journal by which all of it is taken down |
//! | [`access`] | the way of fio to a system: a disk, or an engine |
//! | [`loaded`] | kernel modules |
//! | [`trigger`] | the trigger that counts system calls |
//!
//! Every part has a line in the journal before it is set up.

use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail};

use self::access::Access;
use self::compare_volume::CompareVolume;
use self::loaded::Loaded;
use self::local::RamDisks;
use self::nbd::Nbd;
use self::nvmet::{Nvme, Transport};
use self::rblk::{Counters, Rblk, RblkSpec, VOLUME};
use self::server::{NbdSocket, Server, file_of, iscsi_url};
use self::target::{Carrier, Target, TargetSpec};
use self::ublk_null::UblkNull;
use self::undo::{Journal, Step, Undo};

pub(crate) mod access;
pub(crate) mod compare_volume;
pub(crate) mod daemon;
pub(crate) mod loaded;
pub(crate) mod local;
pub(crate) mod nbd;
mod nvme_kernel;
pub(crate) mod nvmet;
pub(crate) mod rblk;
pub(crate) mod server;
pub(crate) mod target;
pub(crate) mod trigger;
pub(crate) mod ublk_null;
pub(crate) mod undo;
mod unload;

/// Commands outstanding per queue, of every system that has queues.
pub(crate) const QUEUE_DEPTH: u16 = 128;
/// The depth for loads that have more outstanding.
pub(crate) const QUEUE_DEPTH_DEEP: u16 = 512;
/// Ports and the control socket of `tgtd`. The system's number is added, except to nbdkit's.
const NBD_PORT: u16 = 10809;
const ENGINE_PORT: u16 = 10820;
const RBLK_PORT: u16 = 7730;
const TGT_CONTROL: u16 = 7700;

/// The kind of a system.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Rblk(Variant),
    Nvme(Transport),
    /// rblk without a mount: fio's engine is the initiator.
    RblkEngine(Variant),
    Nbd,
    NbdEngine(NbdKind),
    /// iSCSI, and libiscsi's own load.
    Iscsi,
    UblkNull,
    Local,
    /// A file of this host, without a server.
    LocalFile,
    /// A TCP connection without a protocol.
    Socket,
    /// A disk that is there already.
    Given(PathBuf),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NbdKind {
    /// qemu-nbd instead of nbdkit.
    pub(crate) qemu: bool,
    /// On a Unix socket instead of TCP.
    pub(crate) unix: bool,
}

/// Settings of rblk beyond its defaults.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Variant {
    pub(crate) carrier: Carrier,
    /// Variables for both ends.
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) target_flags: Vec<String>,
    pub(crate) mount_flags: Vec<String>,
    /// No mount: fio's engine is the initiator.
    pub(crate) engine: bool,
    /// More lines of the engine's file, as in `mounts.d`.
    pub(crate) engine_lines: Vec<String>,
    /// The directory of the programs, if it is not that of the others.
    pub(crate) programs: Option<PathBuf>,
}

#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) journal: Journal,
    /// Loaded modules, which stay for the whole run.
    pub(crate) modules: Rc<Loaded>,
    pub(crate) rdma_address: Option<IpAddr>,
    /// Address for systems without RDMA.
    pub(crate) address: IpAddr,
    /// Bytes of each disk.
    pub(crate) bytes: u64,
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) programs: PathBuf,
    pub(crate) fio_engine: Option<PathBuf>,
    /// The backing of rblk's volumes.
    pub(crate) volume: CompareVolume,
    /// The directory of files; that of the journal without one.
    pub(crate) directory: Option<PathBuf>,
    /// Both ends of rblk prove their keys.
    pub(crate) with_keys: bool,
}

/// A disk, or a server for an engine of fio. Dropped, it is gone, unless it was [`Kind::Given`].
#[derive(Debug)]
pub(crate) struct System {
    pub(crate) access: Access,
    pub(crate) detail: String,
    /// QPs that carry one queue; 0 if unknown.
    pub(crate) qps: u32,
    /// Process of the initiator's side.
    pub(crate) initiator_pid: Option<u32>,
    /// Process of the target's side on this host.
    pub(crate) target_pid: Option<u32>,
    counted: Counted,
    // Dropped before the notes, which then find nothing.
    _held: Option<Box<dyn Debug>>,
    _notes: Vec<Undo>,
}

#[derive(Debug)]
enum Counted {
    Mount(Box<Rblk>),
    Target(Box<Target>),
    Given(String),
    Nothing,
}

impl Variant {
    pub(crate) fn plain(carrier: Carrier) -> Self {
        Self { carrier, ..Self::default() }
    }

    /// A variant in words: `tcp`, `programs=DIR`, `VARIABLE=VALUE` for both ends, `--flag=value`
    /// for both ends, `target:--flag=value`, `mount:--flag=value`; `engine` for fio's engine
    /// without a mount, and `engine:KEY=VALUE` for a line of its file.
    pub(crate) fn parse(words: &str) -> Result<Self> {
        let mut variant = Self::plain(Carrier::Verbs);
        for word in words.split_whitespace() {
            if word == "tcp" {
                variant.carrier = Carrier::Tcp;
            } else if word == "verbs" {
                variant.carrier = Carrier::Verbs;
            } else if word == "engine" {
                variant.engine = true;
            } else if let Some(line) = word.strip_prefix("engine:") {
                variant.engine_lines.push(line.to_owned());
            } else if let Some(flag) = word.strip_prefix("target:") {
                variant.target_flags.push(flag.to_owned());
            } else if let Some(flag) = word.strip_prefix("mount:") {
                variant.mount_flags.push(flag.to_owned());
            } else if word.starts_with("--") {
                variant.target_flags.push(word.to_owned());
                variant.mount_flags.push(word.to_owned());
            } else if let Some(dir) = word.strip_prefix("programs=") {
                variant.programs = Some(dir.into());
            } else if let Some((name, value)) = word.split_once('=') {
                variant.environment.push((name.to_owned(), value.to_owned()));
            } else {
                bail!(
                    "`{word}` is none of tcp, engine, programs=DIR, VARIABLE=VALUE, --flag=value, \
                     target:--flag=value, mount:--flag=value, engine:KEY=VALUE"
                );
            }
        }
        Ok(variant)
    }
}

impl Setting {
    /// Makes a file for a system.
    fn file(&self, key: &str) -> Result<(PathBuf, Undo)> {
        let name = format!("{}-{key}-file", std::process::id());
        let (dir, undo) = match &self.directory {
            Some(parent) => self.journal.directory_in(parent, &name)?,
            None => self.journal.directory(&name)?,
        };
        Ok((file_of(&dir, self.bytes)?, undo))
    }
}

impl System {
    /// Sets a system up. `number` is its place among the systems.
    pub(crate) fn start(setting: &Setting, key: &str, kind: &Kind, number: u16) -> Result<Self> {
        match kind {
            Kind::Rblk(variant) => Self::rblk(setting, key, variant, number),
            Kind::RblkEngine(variant) => Self::rblk_engine(setting, key, variant, number),
            Kind::NbdEngine(kind) => Self::nbd_engine(setting, key, *kind, number),
            Kind::Iscsi => Self::iscsi(setting, key, number),
            Kind::Nvme(transport) => Self::nvme(setting, *transport),
            Kind::Nbd => Self::nbd(setting),
            Kind::UblkNull => Self::ublk_null(setting),
            Kind::Socket => {
                let access = Access::Socket(setting.address);
                let detail = "two threads that poll, no protocol".to_owned();
                Ok(Self::new(access, detail, Counted::Nothing))
            }
            Kind::Local => {
                let disks = RamDisks::make(&setting.modules, setting.bytes)?;
                let access = Access::Disk(disks.disk(0)?);
                Ok(Self::new(access, "brd, no network".to_owned(), Counted::Nothing))
            }
            Kind::LocalFile => {
                let (path, undo) = setting.file(key)?;
                let detail = format!("{}, no network", path.display());
                let system = Self::new(Access::Disk(path), detail, Counted::Nothing);
                Ok(Self { _notes: vec![undo], ..system })
            }
            Kind::Given(path) => {
                let is_disk = std::fs::metadata(path).is_ok_and(|meta| {
                    std::os::unix::fs::FileTypeExt::is_block_device(&meta.file_type())
                });
                if !is_disk {
                    bail!("{} is no block device", path.display());
                }
                local::must_be_unused(path)?;
                let mount = daemon::mount_of(path);
                let initiator_pid = mount.as_ref().map(|mount| mount.pid);
                let counted = mount.map_or(Counted::Nothing, |mount| Counted::Given(mount.name));
                let access = Access::Disk(path.clone());
                Ok(Self { initiator_pid, ..Self::new(access, path.display().to_string(), counted) })
            }
        }
    }

    fn new(access: Access, detail: String, counted: Counted) -> Self {
        Self {
            access,
            detail,
            qps: 0,
            initiator_pid: None,
            target_pid: None,
            counted,
            _held: None,
            _notes: Vec::new(),
        }
    }

    fn rblk(setting: &Setting, key: &str, variant: &Variant, number: u16) -> Result<Self> {
        setting.modules.ensure_ublk()?;
        let (target, notes) = target_spec(setting, key, variant, number)?;
        let (queues, depth) = (setting.queues, setting.depth);
        let spec = RblkSpec { target, queues, depth, mount_flags: variant.mount_flags.clone() };
        let rblk = Rblk::start(&setting.journal, &spec)?;
        let detail = format!("{} on {:?}", rblk.detail(), setting.volume);
        Ok(Self {
            qps: rblk.lanes(),
            initiator_pid: Some(rblk.initiator_pid()),
            target_pid: Some(rblk.target_pid()),
            _notes: notes,
            ..Self::new(Access::Disk(rblk.disk()), detail, Counted::Mount(Box::new(rblk)))
        })
    }

    fn rblk_engine(setting: &Setting, key: &str, variant: &Variant, number: u16) -> Result<Self> {
        let library = setting.fio_engine.as_deref().context(
            "there is no librblk_fio.so: `cargo xtask fio-engine` makes it, --fio-engine names it",
        )?;
        let (spec, notes) = target_spec(setting, key, variant, number)?;
        let target = Target::start(&setting.journal, &spec)?;
        let access = rblk::engine_access(&target, library, &variant.engine_lines)?;
        let detail = format!("one queue for each job, no mount, on {:?}", setting.volume);
        let target_pid = Some(target.pid());
        let counted = Counted::Target(Box::new(target));
        Ok(Self { target_pid, _notes: notes, ..Self::new(access, detail, counted) })
    }

    fn nbd_engine(setting: &Setting, key: &str, kind: NbdKind, number: u16) -> Result<Self> {
        Self::server(setting, key, |dir, tag| {
            let file = kind.qemu.then(|| file_of(dir, setting.bytes)).transpose()?;
            let (socket, access) = if kind.unix {
                let path = dir.join("nbd.sock");
                (NbdSocket::Unix(path.clone()), Access::nbd_unix(&path))
            } else {
                let at = SocketAddr::new(setting.address, ENGINE_PORT + number);
                (NbdSocket::Tcp(at), Access::nbd_tcp(at))
            };
            let server = Server::nbd(file.as_deref(), &socket, setting.bytes, tag)?;
            Ok((server, access, socket.to_string()))
        })
    }

    fn iscsi(setting: &Setting, key: &str, number: u16) -> Result<Self> {
        Self::server(setting, key, |dir, tag| {
            let file = file_of(dir, setting.bytes)?;
            // iscsi-perf does not write, so the file gets its memory here.
            let mut zeroes = std::io::Read::take(std::io::repeat(0), setting.bytes);
            std::io::copy(&mut zeroes, &mut std::fs::File::options().write(true).open(&file)?)?;
            let at = SocketAddr::new(setting.address, ENGINE_PORT + number);
            let server = Server::iscsi(&file, at, TGT_CONTROL + number, tag)?;
            let detail = "tgtd on a file, iscsi-perf: reads of one job".to_owned();
            Ok((server, Access::Iscsi(iscsi_url(at)), detail))
        })
    }

    /// A server that `start` starts, by its directory and its tag, with the way to it and a detail.
    fn server(
        setting: &Setting,
        key: &str,
        start: impl FnOnce(&Path, &str) -> Result<(Server, Access, String)>,
    ) -> Result<Self> {
        let name = format!("{}-{key}", std::process::id());
        let (dir, directory) = setting.journal.directory(&name)?;
        let tag = format!("{name}-server");
        let processes = setting.journal.note(Step::Processes { tag: tag.clone() })?;
        let (server, access, detail) = start(&dir, &tag)?;
        Ok(Self {
            target_pid: Some(server.pid()),
            _held: Some(Box::new(server)),
            _notes: vec![processes, directory],
            ..Self::new(access, detail, Counted::Nothing)
        })
    }

    fn nvme(setting: &Setting, transport: Transport) -> Result<Self> {
        let disks = RamDisks::make(&setting.modules, setting.bytes)?;
        let address = match transport {
            Transport::Rdma => setting.rdma_address.context("there is no RDMA device")?,
            Transport::Tcp => setting.address,
        };
        let backing = disks.disk(1)?;
        let nvme = Nvme::start(setting, transport, address, &backing)?;
        let access = Access::Disk(nvme.path().to_owned());
        let detail = format!(
            "nvmet on {}, nr_io_queues={}, queue_size={}",
            backing.display(),
            setting.queues,
            setting.depth
        );
        Ok(Self { _held: Some(Box::new(nvme)), ..Self::new(access, detail, Counted::Nothing) })
    }

    fn nbd(setting: &Setting) -> Result<Self> {
        let journal = &setting.journal;
        setting.modules.ensure("nbd", &[])?;
        let tag = format!("{}-nbd", std::process::id());
        let processes = journal.note(Step::Processes { tag: tag.clone() })?;
        let to_come = journal.note(Step::NbdToCome { connected: connected_nbd() })?;
        let at = SocketAddr::new(setting.address, NBD_PORT);
        let nbd = Nbd::start(at, setting.queues, setting.bytes, &tag)?;
        let device = nbd.path().to_owned();
        let connected = journal.note(Step::Nbd { device: device.clone() })?;
        to_come.forget();
        let detail = format!("nbdkit memory, {} connections", setting.queues);
        Ok(Self {
            target_pid: Some(nbd.server_pid()),
            _held: Some(Box::new(nbd)),
            _notes: vec![connected, processes],
            ..Self::new(Access::Disk(device), detail, Counted::Nothing)
        })
    }

    fn ublk_null(setting: &Setting) -> Result<Self> {
        setting.modules.ensure_ublk()?;
        let token = UblkNull::new_token()?;
        let note = setting.journal.note(Step::Ublk { token: token.to_string() })?;
        let null = UblkNull::start(setting.queues, setting.depth, setting.bytes, token)?;
        let access = Access::Disk(null.path().to_owned());
        let detail = format!("{} queues of {}", null.queues(), setting.depth);
        Ok(Self {
            initiator_pid: Some(std::process::id()),
            _held: Some(Box::new(null)),
            _notes: vec![note],
            ..Self::new(access, detail, Counted::Nothing)
        })
    }

    /// The counters of rblk now; other systems have none.
    pub(crate) fn counters(&self) -> Counters {
        match &self.counted {
            Counted::Mount(rblk) => rblk.counters(),
            Counted::Target(target) => rblk::target_counters(target),
            Counted::Given(name) => Counters {
                initiator: daemon::mount_status(name).map(|status| status.total),
                target: None,
            },
            Counted::Nothing => Counters::default(),
        }
    }
}

/// A target for a variant, and the notes of its backing.
fn target_spec(
    setting: &Setting,
    key: &str,
    variant: &Variant,
    number: u16,
) -> Result<(TargetSpec, Vec<Undo>)> {
    let mut notes = Vec::new();
    let mut tables = None;
    let file = |path: PathBuf| vec!["--file".to_owned(), format!("{VOLUME}={}", path.display())];
    let volume = match setting.volume {
        CompareVolume::Memory => {
            vec!["--memory".to_owned(), format!("{VOLUME}={}", setting.bytes)]
        }
        CompareVolume::RamDisk => {
            let disks = RamDisks::make(&setting.modules, setting.bytes)?;
            // The first two are those of `local` and of nvmet.
            file(disks.disk(2 + u32::from(number))?)
        }
        CompareVolume::File => {
            let (path, undo) = setting.file(key)?;
            notes.push(undo);
            file(path)
        }
        CompareVolume::UncachedFile => {
            let (path, undo) = setting.file(key)?;
            notes.push(undo);
            tables = Some(uncached(&path));
            Vec::new()
        }
    };
    let address = match variant.carrier {
        Carrier::Verbs => setting.rdma_address.context("there is no RDMA device")?,
        Carrier::Tcp => setting.address,
    };
    let spec = TargetSpec {
        key: key.to_owned(),
        carrier: variant.carrier,
        at: SocketAddr::new(address, RBLK_PORT + number),
        programs: variant.programs.clone().unwrap_or_else(|| setting.programs.clone()),
        environment: variant.environment.clone(),
        with_keys: setting.with_keys,
        tables,
        flags: volume.into_iter().chain(variant.target_flags.iter().cloned()).collect(),
    };
    Ok((spec, notes))
}

/// The table of an uncached volume in a file.
fn uncached(file: &Path) -> String {
    let path = file.display().to_string();
    format!(
        "[[volume]]\nname = \"{VOLUME}\"\nstore = \"file\"\npath = {path:?}\ncache = \"none\"\n"
    )
}

fn connected_nbd() -> Vec<PathBuf> {
    let Ok(disks) = std::fs::read_dir("/sys/block") else { return Vec::new() };
    let names = disks.flatten().filter(|disk| disk.path().join("pid").exists());
    let names = names.filter_map(|disk| disk.file_name().into_string().ok());
    names.filter(|n| n.starts_with("nbd")).map(|n| Path::new("/dev").join(n)).collect()
}

/// Undoes the steps of killed runs; with `dry_run` only prints the steps.
pub(crate) fn clean_up(dry_run: bool) -> Result<()> {
    let dir = Path::new(undo::DIR);
    if dry_run {
        for step in undo::look(dir)? {
            println!("{}", serde_json::to_string(&step)?);
        }
        return Ok(());
    }
    let swept = undo::sweep(dir)?;
    if swept.alive > 0 {
        println!("{} runs are still going on; they were left alone", swept.alive);
    }
    println!("{} steps of runs that were killed are undone", swept.undone);
    if swept.failed.is_empty() {
        return Ok(());
    }
    let failed: Vec<String> = swept.failed.iter().map(|error| format!("{error:#}")).collect();
    bail!("still there: {}", failed.join("; "))
}

#[cfg(test)]
mod tests;
