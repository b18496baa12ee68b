//! The kernel's own: nvmet as the target, by configfs, and the NVMe host as the initiator, by
//! `/dev/nvme-fabrics`.
//!
//! | made | by | removed by |
//! |---|---|---|
//! | subsystem, namespace 1 on a block device | `nvmet/subsystems/NQN` | `remove_subsystem` |
//! | port with the subsystem | `nvmet/ports/N`, the first free one | `remove_port` |
//! | controller | a line written to `/dev/nvme-fabrics` | `disconnect` |
//!
//! Everything has the kernel's defaults but the number of queues and their depth, which are those
//! of the others. Controllers go before ports: a host whose port vanishes tries to reconnect, and
//! over rxe does not recover.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::module::Loaded;
use super::undo::{Journal, Step, Undo};
use crate::child;

const NVMET: &str = "/sys/kernel/config/nvmet";
const FABRICS: &str = "/dev/nvme-fabrics";
const CONTROLLERS: &str = "/sys/class/nvme";

/// How long a write to the kernel's files may take.
const WRITE_LIMIT: Duration = Duration::from_secs(20);
/// How long connecting and disconnecting a controller may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// How long a disk may take to appear.
const DISK_LIMIT: Duration = Duration::from_secs(10);
/// Number of the last port tried.
const PORTS_MAX: u16 = 1000;

/// What carries NVMe's messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// RDMA.
    Rdma,
    /// TCP.
    Tcp,
}

impl Transport {
    /// The kernel's word.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }

    /// The port it listens on.
    #[must_use]
    pub fn service(self) -> u16 {
        match self {
            Self::Rdma => 4420,
            Self::Tcp => 4421,
        }
    }

    /// Modules of the target and of the host.
    #[must_use]
    pub fn modules(self) -> [&'static str; 2] {
        match self {
            Self::Rdma => ["nvmet_rdma", "nvme_rdma"],
            Self::Tcp => ["nvmet_tcp", "nvme_tcp"],
        }
    }
}

/// An exported block device with a disk made of it, on one host. Dropped, it is taken down.
#[derive(Debug)]
pub struct Nvme {
    disk: PathBuf,
    // In the order in which they are undone.
    _host: Undo,
    _port: Undo,
    _subsystem: Undo,
}

impl Nvme {
    /// Exports `backing` over `transport` at `address`, an address of this host, and connects to it
    /// with `queues` I/O queues of `depth`.
    ///
    /// # Errors
    /// The kernel lacks a part, refuses, or takes too long; nothing is left behind.
    pub fn start(
        journal: &Journal,
        modules: &Loaded,
        transport: Transport,
        address: IpAddr,
        backing: &Path,
        queues: u16,
        depth: u16,
    ) -> Result<Self> {
        for name in transport.modules() {
            modules.ensure(name, &[])?;
        }
        if !Path::new(NVMET).exists() {
            bail!("{NVMET} is not there: is configfs mounted at /sys/kernel/config?");
        }
        let nqn = format!("nqn.2026-11.rblk:bench-{}-{}", std::process::id(), transport.word());
        let subsystem = export(journal, &nqn, backing)?;
        let port = listen(journal, &nqn, transport, address)?;
        let host = journal.note(Step::NvmeHost { nqn: nqn.clone() })?;
        connect(&nqn, transport, address, queues, depth)?;
        let disk = child::until(DISK_LIMIT, || disk(&nqn))
            .with_context(|| format!("no disk of {nqn} after {DISK_LIMIT:?}"))?;
        Ok(Self { disk, _host: host, _port: port, _subsystem: subsystem })
    }

    /// The block device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.disk
    }
}

fn export(journal: &Journal, nqn: &str, backing: &Path) -> Result<Undo> {
    let undo = journal.note(Step::NvmetSubsystem { nqn: nqn.to_owned() })?;
    let dir = subsystem(nqn);
    make(&dir)?;
    set(&dir.join("attr_allow_any_host"), "1")?;
    let namespace = dir.join("namespaces/1");
    make(&namespace)?;
    set(&namespace.join("device_path"), &backing.display().to_string())?;
    set(&namespace.join("enable"), "1")?;
    Ok(undo)
}

fn listen(journal: &Journal, nqn: &str, transport: Transport, address: IpAddr) -> Result<Undo> {
    let id = (1..PORTS_MAX).find(|id| !port(*id).exists()).context("no free port of nvmet")?;
    let undo = journal.note(Step::NvmetPort { id, nqn: nqn.to_owned() })?;
    let dir = port(id);
    make(&dir)?;
    set(&dir.join("addr_adrfam"), if address.is_ipv4() { "ipv4" } else { "ipv6" })?;
    set(&dir.join("addr_trtype"), transport.word())?;
    set(&dir.join("addr_traddr"), &address.to_string())?;
    set(&dir.join("addr_trsvcid"), &transport.service().to_string())?;
    let link = dir.join("subsystems").join(nqn);
    let target = subsystem(nqn);
    within(format!("linking {}", link.display()), move || {
        std::os::unix::fs::symlink(&target, &link)
    })?;
    Ok(undo)
}

/// Has the host connect. In a process of its own, which can be killed when the kernel takes too
/// long.
fn connect(
    nqn: &str,
    transport: Transport,
    address: IpAddr,
    queues: u16,
    depth: u16,
) -> Result<()> {
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid").context("no uuid")?;
    let uuid = uuid.trim();
    let line = format!(
        "nqn={nqn},transport={},traddr={address},trsvcid={},nr_io_queues={queues},queue_size={depth},\
         hostnqn=nqn.2014-08.org.nvmexpress:uuid:{uuid},hostid={uuid}",
        transport.word(),
        transport.service(),
    );
    // The answer, as in `instance=0,cntlid=1`, is read from the same open file.
    let script = r#"exec 3<>"$1" && printf %s "$2" >&3 && read -r answer <&3 && echo "$answer""#;
    let mut command = Command::new("sh");
    command.args(["-c", script, "connect", FABRICS, &line]);
    let answer = child::output(&mut command, CONNECT_LIMIT)
        .with_context(|| format!("the NVMe host cannot connect ({})", kernel_says("nvme")))?;
    if !answer.starts_with("instance=") {
        bail!("{FABRICS} answers `{}`", answer.trim());
    }
    Ok(())
}

/// The last line of the kernel's log with a word.
fn kernel_says(word: &str) -> String {
    let log = child::output_uninterrupted(&mut Command::new("dmesg"), Duration::from_secs(5));
    let log = log.unwrap_or_default();
    let line = log.lines().rev().find(|line| line.contains(word));
    line.unwrap_or("the kernel's log says nothing").to_owned()
}

/// The disk of a subsystem: what the kernel makes for all paths together.
fn disk(nqn: &str) -> Option<PathBuf> {
    let disks = fs::read_dir("/sys/block").ok()?.flatten();
    disks
        .filter_map(|disk| Some((disk.file_name().into_string().ok()?, disk.path())))
        .filter(|(name, _)| name.starts_with("nvme"))
        .filter(|(_, path)| word(&path.join("hidden")).as_deref() != Some("1"))
        .filter(|(_, path)| word(&path.join("device/subsysnqn")).as_deref() == Some(nqn))
        .filter(|(_, path)| word(&path.join("size")).is_some_and(|size| size != "0"))
        .map(|(name, _)| Path::new("/dev").join(name))
        .find(|path| path.exists())
}

/// Controllers of a subsystem.
fn controllers(nqn: &str) -> Vec<PathBuf> {
    let Ok(all) = fs::read_dir(CONTROLLERS) else { return Vec::new() };
    let ours = |path: &PathBuf| word(&path.join("subsysnqn")).as_deref() == Some(nqn);
    all.flatten().map(|controller| controller.path()).filter(ours).collect()
}

/// Deletes all controllers of a subsystem and waits until they are gone.
pub(super) fn disconnect(nqn: &str) -> Result<()> {
    for controller in controllers(nqn) {
        let mut command = Command::new("sh");
        let file = controller.join("delete_controller");
        // It may have gone by itself.
        command.args(["-c", "[ ! -e \"$1\" ] || echo 1 >\"$1\"", "delete"]).arg(file);
        child::output_uninterrupted(&mut command, CONNECT_LIMIT)
            .with_context(|| format!("{} does not go", controller.display()))?;
    }
    match child::until(CONNECT_LIMIT, || controllers(nqn).is_empty().then_some(())) {
        Some(()) => Ok(()),
        None => bail!("a controller of {nqn} is still there after {CONNECT_LIMIT:?}"),
    }
}

/// Removes a port, if it is for that subsystem or for none.
pub(super) fn remove_port(id: u16, nqn: &str) -> Result<()> {
    let dir = port(id);
    if !dir.exists() {
        return Ok(());
    }
    let links = fs::read_dir(dir.join("subsystems")).with_context(|| dir.display().to_string())?;
    let others = links.flatten().any(|link| link.file_name() != *nqn);
    if others {
        // Somebody else's of the same number.
        return Ok(());
    }
    let link = dir.join("subsystems").join(nqn);
    within(format!("removing {}", dir.display()), move || {
        ignore_missing(fs::remove_file(&link))?;
        ignore_missing(fs::remove_dir(&dir))
    })
}

/// Removes a subsystem with its namespace.
pub(super) fn remove_subsystem(nqn: &str) -> Result<()> {
    let dir = subsystem(nqn);
    if !dir.exists() {
        return Ok(());
    }
    within(format!("removing {}", dir.display()), move || {
        let namespace = dir.join("namespaces/1");
        if namespace.exists() {
            ignore_missing(fs::write(namespace.join("enable"), "0"))?;
            ignore_missing(fs::remove_dir(&namespace))?;
        }
        ignore_missing(fs::remove_dir(&dir))
    })
}

fn subsystem(nqn: &str) -> PathBuf {
    Path::new(NVMET).join("subsystems").join(nqn)
}

fn port(id: u16) -> PathBuf {
    Path::new(NVMET).join("ports").join(id.to_string())
}

fn make(dir: &Path) -> Result<()> {
    fs::create_dir(dir).with_context(|| format!("cannot make {}", dir.display()))
}

fn set(file: &Path, value: &str) -> Result<()> {
    let (path, text) = (file.to_owned(), value.to_owned());
    within(format!("setting {} to {value}", file.display()), move || {
        // Never made: a name that the kernel does not know is an error.
        use std::io::Write;
        fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
    })
}

fn word(file: &Path) -> Option<String> {
    Some(fs::read_to_string(file).ok()?.trim().to_owned())
}

fn ignore_missing(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Does what the kernel may take long for, in a thread that is left alone after a deadline.
fn within(what: String, work: impl FnOnce() -> std::io::Result<()> + Send + 'static) -> Result<()> {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    let since = Instant::now();
    match ended.recv_timeout(WRITE_LIMIT) {
        Ok(result) => result.with_context(|| format!("{what} ({})", kernel_says("nvmet"))),
        Err(_) => bail!("{what}: not done after {:?}; the kernel still waits", since.elapsed()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_removed() {
        let nqn = "nqn.2026-11.rblk:bench-test-that-is-not-there";
        remove_subsystem(nqn).unwrap();
        remove_port(PORTS_MAX, nqn).unwrap();
        disconnect(nqn).unwrap();
        assert_eq!(disk(nqn), None);
    }

    #[test]
    fn a_failure_says_what_was_done() {
        let error = set(Path::new("/proc/no-such-file"), "1").unwrap_err();
        assert!(format!("{error:#}").contains("setting /proc/no-such-file to 1"), "{error:#}");
    }
}
