//! The systems that are measured, each set up and taken down.
//!
//! | module | what is in it |
//! |---|---|
//! | [`rblk`], [`daemon`] | a target of ours and a mount; what running ones say |
//! | [`nvmet`], `nvme_kernel` | the kernel's target and host of NVMe over RDMA and TCP |
//! | [`nbd`], [`nbd_server`] | servers of NBD, and the kernel's client |
//! | [`tgt`] | a server of iSCSI |
//! | [`ublk_null`] | a ublk disk that does nothing |
//! | [`local`] | RAM disks |
//! | [`undo`] | the journal by which all of it is taken down |
//! | [`access`] | how fio reaches a system: a disk, or an engine of its own |
//! | [`module`], [`loaded`] | kernel modules; those that a run loaded |
//! | [`trigger`] | the trigger that counts system calls |
//!
//! A [`System`] is a disk, or a server for an engine of fio's, that is there; dropped, it is gone.
//! Nothing is set up without a line in the journal.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use self::access::Access;
use self::loaded::Loaded;
use self::local::RamDisks;
use self::nbd::Nbd;
use self::nbd_server::{NbdProgram, NbdServer, NbdSocket};
use self::nvmet::{Nvme, Transport};
use self::rblk::{Backing, Carrier, Counters, Rblk, RblkSpec, Served};
use self::tgt::Tgt;
use self::ublk_null::{NullDisk, UblkNull};
use self::undo::{Journal, Step, Undo};
use crate::child;

pub mod access;
pub mod daemon;
pub mod loaded;
pub mod local;
pub mod module;
pub mod nbd;
pub mod nbd_server;
mod nvme_kernel;
pub mod nvmet;
pub mod rblk;
pub mod tgt;
pub mod trigger;
pub mod ublk_null;
pub mod undo;

/// Commands outstanding per queue, of every system that has queues.
pub const QUEUE_DEPTH: u16 = 128;
/// The same for loads that have more outstanding.
pub const QUEUE_DEPTH_DEEP: u16 = 512;
/// Where nbdkit listens.
const NBD_PORT: u16 = 10809;
/// Where servers for engines listen, each with its number added.
const ENGINE_PORT: u16 = 10820;

/// Number of the control socket of `tgtd`, with the system's number added. Others begin at 0.
const TGT_CONTROL: u16 = 7700;

/// What a system is.
#[derive(Clone, Debug)]
pub enum Kind {
    /// rblk; with what is special about it.
    Rblk(Variant),
    /// The kernel's NVMe over a fabric.
    Nvme(Transport),
    /// rblk without a mount: fio's engine is the initiator.
    RblkEngine(Variant),
    /// NBD.
    Nbd,
    /// A server of NBD, and fio's own engine.
    NbdEngine(NbdKind),
    /// iSCSI, and libiscsi's own load.
    Iscsi,
    /// A ublk disk that does nothing.
    UblkNull,
    /// A RAM disk.
    Local,
    /// A disk that is there already.
    Given(PathBuf),
}

/// A server of NBD for fio's engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NbdKind {
    /// qemu-nbd instead of nbdkit.
    pub qemu: bool,
    /// On a Unix socket instead of TCP.
    pub unix: bool,
}

/// An rblk that is not what a user gets who gives no flags.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Variant {
    /// What carries its messages.
    pub carrier: Carrier,
    /// Variables for both ends.
    pub environment: Vec<(String, String)>,
    /// More flags of the target.
    pub target_flags: Vec<String>,
    /// More flags of the mount.
    pub mount_flags: Vec<String>,
    /// No mount: fio's engine is the initiator.
    pub engine: bool,
    /// More lines of the engine's file, as in `mounts.d`.
    pub engine_lines: Vec<String>,
    /// Where its programs are, if not where the others' are.
    pub programs: Option<PathBuf>,
}

/// What rblk's volumes are in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Volume {
    /// Registered memory of the target.
    Memory,
    /// A RAM disk, behind the cache.
    RamDisk,
    /// A file, behind the cache.
    File,
}

/// What all systems of a run have in common.
#[derive(Debug)]
pub struct Setting {
    /// Where everything is written down.
    pub journal: Journal,
    /// Modules that were loaded; they stay for the whole run.
    pub modules: Rc<Loaded>,
    /// Address of the RDMA device, for what needs one.
    pub rdma_address: Option<IpAddr>,
    /// Address for what needs no RDMA device.
    pub address: IpAddr,
    /// Bytes of each disk.
    pub bytes: u64,
    /// Queues of each disk.
    pub queues: u16,
    /// Commands outstanding on each queue, of what has a depth.
    pub depth: u16,
    /// Where rblk's programs are.
    pub programs: PathBuf,
    /// The engine of rblk for fio, if there is one.
    pub fio_engine: Option<PathBuf>,
    /// What rblk's volumes are in.
    pub volume: Volume,
    /// Both ends of rblk prove their keys.
    pub with_keys: bool,
}

/// A disk, or a server, that is there. Dropped, it is gone, unless it was [`Kind::Given`].
#[derive(Debug)]
pub struct System {
    access: Access,
    detail: String,
    what: What,
    _more: Vec<Undo>,
}

#[derive(Debug)]
enum What {
    Rblk(Box<Rblk>),
    Served(Box<Served>),
    NbdServer(NbdServer),
    Tgt(Tgt),
    // Dropped before the notes in `_more`, which then find nothing.
    Nbd { server_pid: u32, _nbd: Nbd },
    UblkNull(#[expect(dead_code, reason = "held, so that the disk is")] UblkNull),
    Nvme(#[expect(dead_code, reason = "held, so that the disk is")] Nvme),
    Given { mount: Option<String> },
    Local,
}

impl Variant {
    /// What a user gets who gives no flags.
    #[must_use]
    pub fn plain(carrier: Carrier) -> Self {
        Self {
            carrier,
            environment: Vec::new(),
            target_flags: Vec::new(),
            mount_flags: Vec::new(),
            engine: false,
            engine_lines: Vec::new(),
            programs: None,
        }
    }

    /// A variant in words: `tcp`, `programs=DIR`, `VARIABLE=VALUE` for both ends, `--flag=value`
    /// for both ends, `target:--flag=value`, `mount:--flag=value`; `engine` for fio's engine
    /// without a mount, and `engine:KEY=VALUE` for a line of its file.
    ///
    /// # Errors
    /// A word is none of these.
    pub fn parse(words: &str) -> Result<Self> {
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

impl System {
    /// Sets a system up. `number` is its place among the systems: those of one kind differ by it.
    ///
    /// # Errors
    /// This machine lacks something for it, or it does not come up in time; nothing is left behind.
    pub fn start(setting: &Setting, key: &str, kind: &Kind, number: u16) -> Result<Self> {
        match kind {
            Kind::Rblk(variant) => Self::rblk(setting, key, variant, number),
            Kind::RblkEngine(variant) => Self::rblk_engine(setting, key, variant, number),
            Kind::NbdEngine(kind) => Self::nbd_engine(setting, key, *kind, number),
            Kind::Iscsi => Self::iscsi(setting, key, number),
            Kind::Nvme(transport) => Self::nvme(setting, *transport),
            Kind::Nbd => Self::nbd(setting),
            Kind::UblkNull => Self::ublk_null(setting),
            Kind::Local => {
                let disks = RamDisks::make(&setting.modules, setting.bytes)?;
                let access = Access::Disk(disks.disk(0)?);
                Ok(Self::new(access, "brd, no network".to_owned(), What::Local))
            }
            Kind::Given(path) => {
                let is_disk = std::fs::metadata(path).is_ok_and(|meta| {
                    std::os::unix::fs::FileTypeExt::is_block_device(&meta.file_type())
                });
                if !is_disk {
                    bail!("{} is no block device", path.display());
                }
                local::must_be_unused(path)?;
                let mount = daemon::mount_of(path).map(|status| status.name);
                let access = Access::Disk(path.clone());
                Ok(Self::new(access, format!("{}", path.display()), What::Given { mount }))
            }
        }
    }

    fn new(access: Access, detail: String, what: What) -> Self {
        Self { access, detail, what, _more: Vec::new() }
    }

    fn rblk(setting: &Setting, key: &str, variant: &Variant, number: u16) -> Result<Self> {
        need_ublk(&setting.modules)?;
        let (spec, more) = Self::rblk_spec(setting, key, variant, number)?;
        let rblk = Rblk::start(&setting.journal, &spec)?;
        let access = Access::Disk(rblk.path().to_owned());
        let detail = format!("{} on {:?}", rblk.detail(), setting.volume);
        let mut system = Self::new(access, detail, What::Rblk(Box::new(rblk)));
        system._more = more;
        Ok(system)
    }

    fn rblk_engine(setting: &Setting, key: &str, variant: &Variant, number: u16) -> Result<Self> {
        let library = setting.fio_engine.as_deref().context(
            "there is no librblk_fio.so: `cargo xtask fio-engine` makes it, --fio-engine names it",
        )?;
        let (spec, more) = Self::rblk_spec(setting, key, variant, number)?;
        let served = Served::start(&setting.journal, &spec)?;
        let access = served.access(library, &variant.engine_lines)?;
        let detail = format!("one queue for each job, no mount, on {:?}", setting.volume);
        let mut system = Self::new(access, detail, What::Served(Box::new(served)));
        system._more = more;
        Ok(system)
    }

    fn nbd_engine(setting: &Setting, key: &str, kind: NbdKind, number: u16) -> Result<Self> {
        let name = format!("{}-{key}", std::process::id());
        let (dir, directory) = setting.journal.directory(&name)?;
        let mut more = vec![directory];
        let program = if kind.qemu {
            NbdProgram::QemuNbd(nbd_server::file_of(&dir, setting.bytes)?)
        } else {
            NbdProgram::Nbdkit
        };
        let (socket, access) = if kind.unix {
            let path = dir.join("nbd.sock");
            (NbdSocket::Unix(path.clone()), Access::nbd_unix(&path))
        } else {
            let at = SocketAddr::new(setting.address, ENGINE_PORT + number);
            (NbdSocket::Tcp(at), Access::nbd_tcp(at))
        };
        let tag = format!("{name}-server");
        more.insert(0, setting.journal.note(Step::Processes { tag: tag.clone() })?);
        let server = NbdServer::start(&program, &socket, setting.bytes, &tag)?;
        let mut system = Self::new(access, format!("{socket}"), What::NbdServer(server));
        system._more = more;
        Ok(system)
    }

    fn iscsi(setting: &Setting, key: &str, number: u16) -> Result<Self> {
        let name = format!("{}-{key}", std::process::id());
        let (dir, directory) = setting.journal.directory(&name)?;
        let file = nbd_server::file_of(&dir, setting.bytes)?;
        // iscsi-perf does not write, so the file gets its memory here.
        let mut zeroes = std::io::Read::take(std::io::repeat(0), setting.bytes);
        std::io::copy(&mut zeroes, &mut std::fs::File::options().write(true).open(&file)?)?;
        let tag = format!("{name}-server");
        let processes = setting.journal.note(Step::Processes { tag: tag.clone() })?;
        let at = SocketAddr::new(setting.address, ENGINE_PORT + number);
        let server = Tgt::start(&file, at, TGT_CONTROL + number, &tag)?;
        let detail = "tgtd on a file, iscsi-perf: reads of one job".to_owned();
        let mut system = Self::new(Access::Iscsi(Tgt::url(at)), detail, What::Tgt(server));
        system._more = vec![processes, directory];
        Ok(system)
    }

    fn rblk_spec(
        setting: &Setting,
        key: &str,
        variant: &Variant,
        number: u16,
    ) -> Result<(RblkSpec, Vec<Undo>)> {
        let mut more = Vec::new();
        let backing = match setting.volume {
            Volume::Memory => Backing::Memory,
            Volume::RamDisk => {
                let disks = RamDisks::make(&setting.modules, setting.bytes)?;
                // The first two are the local one and nvmet's.
                Backing::Path(disks.disk(2 + u32::from(number))?)
            }
            Volume::File => {
                let name = format!("{}-{key}-file", std::process::id());
                let (dir, undo) = setting.journal.directory(&name)?;
                more.push(undo);
                let path = dir.join("volume");
                std::fs::File::create(&path)?.set_len(setting.bytes)?;
                Backing::Path(path)
            }
        };
        let address = match variant.carrier {
            Carrier::Verbs => setting.rdma_address.context("there is no RDMA device")?,
            Carrier::Tcp => setting.address,
        };
        let spec = RblkSpec {
            key: key.to_owned(),
            carrier: variant.carrier,
            address,
            // Not the ports of a target that somebody uses.
            port: 7730 + number,
            backing,
            bytes: setting.bytes,
            queues: setting.queues,
            depth: setting.depth,
            programs: variant.programs.clone().unwrap_or_else(|| setting.programs.clone()),
            environment: variant.environment.clone(),
            with_keys: setting.with_keys,
            target_flags: variant.target_flags.clone(),
            mount_flags: variant.mount_flags.clone(),
        };
        Ok((spec, more))
    }

    fn nvme(setting: &Setting, transport: Transport) -> Result<Self> {
        let disks = RamDisks::make(&setting.modules, setting.bytes)?;
        let address = match transport {
            Transport::Rdma => setting.rdma_address.context("there is no RDMA device")?,
            Transport::Tcp => setting.address,
        };
        let backing = disks.disk(1)?;
        let nvme = Nvme::start(
            &setting.journal,
            &setting.modules,
            transport,
            address,
            &backing,
            setting.queues,
            setting.depth,
        )?;
        let access = Access::Disk(nvme.path().to_owned());
        let detail = format!(
            "nvmet on {}, nr_io_queues={}, queue_size={}",
            backing.display(),
            setting.queues,
            setting.depth
        );
        Ok(Self::new(access, detail, What::Nvme(nvme)))
    }

    fn nbd(setting: &Setting) -> Result<Self> {
        let journal = &setting.journal;
        let mut more = Vec::new();
        setting.modules.ensure("nbd", &[])?;
        let tag = format!("{}-nbd", std::process::id());
        let processes = journal.note(Step::Processes { tag: tag.clone() })?;
        let to_come = journal.note(Step::NbdToCome { connected: connected_nbd() })?;
        let nbd = Nbd::start(setting.address, NBD_PORT, setting.queues, setting.bytes, &tag)?;
        let path = nbd.path().to_owned();
        more.push(journal.note(Step::Nbd { device: path.clone() })?);
        to_come.forget();
        more.push(processes);
        let detail = format!("nbdkit memory, {} connections", setting.queues);
        let what = What::Nbd { server_pid: nbd.server_pid(), _nbd: nbd };
        let mut system = Self::new(Access::Disk(path), detail, what);
        system._more = more;
        Ok(system)
    }

    fn ublk_null(setting: &Setting) -> Result<Self> {
        need_ublk(&setting.modules)?;
        let mut more = Vec::new();
        let mut disk = NullDisk::new(setting.queues, setting.depth)?;
        disk.bytes = setting.bytes;
        more.push(setting.journal.note(Step::Ublk { token: disk.token.to_string() })?);
        let null = UblkNull::start_disk(disk)?;
        let access = Access::Disk(null.path().to_owned());
        let detail = format!("{} queues of {}", null.queues(), setting.depth);
        let mut system = Self::new(access, detail, What::UblkNull(null));
        system._more = more;
        Ok(system)
    }

    /// How fio reaches it.
    #[must_use]
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// QPs that carry one queue; 0 if nobody says.
    #[must_use]
    pub fn qps(&self) -> u32 {
        match &self.what {
            What::Rblk(rblk) => rblk.lanes(),
            _ => 0,
        }
    }

    /// What was set up, in a line.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// Process of the initiator's side, if it is one.
    #[must_use]
    pub fn initiator_pid(&self) -> Option<u32> {
        match &self.what {
            What::Rblk(rblk) => Some(rblk.initiator_pid()),
            What::UblkNull(_) => Some(std::process::id()),
            What::Given { mount } => Some(daemon::mount_status(mount.as_deref()?)?.pid),
            What::Served(_) | What::NbdServer(_) | What::Tgt(_) => None,
            What::Nbd { .. } | What::Nvme(_) | What::Local => None,
        }
    }

    /// Process of the target's side on this host, if it is one.
    #[must_use]
    pub fn target_pid(&self) -> Option<u32> {
        match &self.what {
            What::Rblk(rblk) => Some(rblk.target_pid()),
            What::Nbd { server_pid, .. } => Some(*server_pid),
            What::Served(served) => Some(served.target_pid()),
            What::NbdServer(server) => Some(server.pid()),
            What::Tgt(server) => Some(server.pid()),
            _ => None,
        }
    }

    /// Our counters, for what has them.
    #[must_use]
    pub fn counters(&self) -> Counters {
        match &self.what {
            What::Rblk(rblk) => rblk.counters(),
            What::Served(served) => served.counters(),
            What::Given { mount: Some(name) } => Counters {
                initiator: daemon::mount_status(name).map(|status| status.total),
                target: None,
            },
            _ => Counters::default(),
        }
    }
}

/// Makes sure that there is a ublk driver.
fn need_ublk(modules: &Loaded) -> Result<()> {
    let control = Path::new("/dev/ublk-control");
    if !control.exists() {
        modules.ensure("ublk_drv", &[])?;
    }
    child::until(Duration::from_secs(5), || control.exists().then_some(()))
        .context("there is no /dev/ublk-control")
}

/// NBD devices that are connected.
fn connected_nbd() -> Vec<PathBuf> {
    let Ok(disks) = std::fs::read_dir("/sys/block") else { return Vec::new() };
    let names = disks.flatten().filter(|disk| disk.path().join("pid").exists());
    let names = names.filter_map(|disk| disk.file_name().into_string().ok());
    names.filter(|n| n.starts_with("nbd")).map(|n| Path::new("/dev").join(n)).collect()
}

/// Undoes what runs that were killed have left; with `dry_run` only prints the steps.
///
/// # Errors
/// A step cannot be undone.
pub fn clean_up(dry_run: bool) -> Result<()> {
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
mod tests {
    use super::*;

    #[test]
    fn variants_are_told_in_words() {
        let variant = Variant::parse(
            "tcp RBLK_LOG=warn --spin=always target:--poll-groups=1 mount:--max-io=256KiB programs=/x",
        )
        .unwrap();
        assert_eq!(variant.carrier, Carrier::Tcp);
        assert_eq!(variant.environment, [("RBLK_LOG".to_owned(), "warn".to_owned())]);
        assert_eq!(variant.target_flags, ["--spin=always", "--poll-groups=1"]);
        assert_eq!(variant.mount_flags, ["--spin=always", "--max-io=256KiB"]);
        assert_eq!(variant.programs, Some("/x".into()));
        assert!(!variant.engine);
        let variant = Variant::parse("engine tcp engine:digest=\"off\"").unwrap();
        assert!(variant.engine && variant.engine_lines == ["digest=\"off\""]);
        assert!(Variant::parse("fast").is_err());
        assert_eq!(Variant::parse("").unwrap(), Variant::plain(Carrier::Verbs));
    }
}
