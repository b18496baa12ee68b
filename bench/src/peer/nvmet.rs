//! The kernel's own: nvmet as the target, by configfs, and the NVMe host as the initiator, by
//! `/dev/nvme-fabrics`.
//!
//! | made | by | removed by |
//! |---|---|---|
//! | subsystem, namespace 1 on a block device | `nvmet/subsystems/NQN` | `remove_subsystem` |
//! | port with the subsystem | `nvmet/ports/N`, the first free one | `remove_port` |
//! | controller | a line written to `/dev/nvme-fabrics` | `disconnect` |
//!
//! Everything has the kernel's defaults, except the number of queues and their depth, which are the
//! same as those of the other systems. Controllers are removed before ports: a host whose port
//! vanishes tries to reconnect, and over rxe does not recover.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::Setting;
use super::nvme_kernel::{
    CONNECT_LIMIT, NVMET, PORTS_MAX, disk, kernel_says, make, port, set, subsystem, within,
};
use super::undo::{Journal, Step, Undo};
use crate::child;

const FABRICS: &str = "/dev/nvme-fabrics";

const DISK_LIMIT: Duration = Duration::from_secs(10);
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    Rdma,
    Tcp,
}

impl Transport {
    /// The kernel's word, the port, and the modules of the target and of the host.
    fn facts(self) -> (&'static str, u16, [&'static str; 2]) {
        match self {
            Self::Rdma => ("rdma", 4420, ["nvmet_rdma", "nvme_rdma"]),
            Self::Tcp => ("tcp", 4421, ["nvmet_tcp", "nvme_tcp"]),
        }
    }
}

/// An exported block device with a disk made of it, on one host. Dropped, it is taken down.
#[derive(Debug)]
pub(crate) struct Nvme {
    disk: PathBuf,
    // In the order of the drop.
    _host: Undo,
    _port: Undo,
    _subsystem: Undo,
}

impl Nvme {
    /// Exports `backing` over `transport` at an address of this host, and connects to it.
    pub(super) fn start(
        setting: &Setting,
        transport: Transport,
        address: IpAddr,
        backing: &Path,
    ) -> Result<Self> {
        let (word, _, modules) = transport.facts();
        for name in modules {
            setting.modules.ensure(name, &[])?;
        }
        if !Path::new(NVMET).exists() {
            bail!("{NVMET} is not there: is configfs mounted at /sys/kernel/config?");
        }
        let journal = &setting.journal;
        let nqn = format!("nqn.2026-11.rblk:bench-{}-{}", std::process::id(), word);
        let subsystem = export(journal, &nqn, backing)?;
        let port = listen(journal, &nqn, transport, address)?;
        let host = journal.note(Step::NvmeHost { nqn: nqn.clone() })?;
        connect(&nqn, transport, address, setting.queues, setting.depth)?;
        let disk = child::until(DISK_LIMIT, || disk(&nqn))
            .with_context(|| format!("no disk of {nqn} after {DISK_LIMIT:?}"))?;
        Ok(Self { disk, _host: host, _port: port, _subsystem: subsystem })
    }

    pub(crate) fn path(&self) -> &Path {
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
    let (word, service, _) = transport.facts();
    set(&dir.join("addr_trtype"), word)?;
    set(&dir.join("addr_traddr"), &address.to_string())?;
    set(&dir.join("addr_trsvcid"), &service.to_string())?;
    let link = dir.join("subsystems").join(nqn);
    let target = subsystem(nqn);
    within(format!("linking {}", link.display()), move || {
        std::os::unix::fs::symlink(&target, &link)
    })?;
    Ok(undo)
}

/// Connects the host, in a process of its own, which can be killed.
fn connect(
    nqn: &str,
    transport: Transport,
    address: IpAddr,
    queues: u16,
    depth: u16,
) -> Result<()> {
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid").context("no uuid")?;
    let uuid = uuid.trim();
    let (word, service, _) = transport.facts();
    let line = format!(
        "nqn={nqn},transport={},traddr={address},trsvcid={},nr_io_queues={queues},queue_size={depth},\
         hostnqn=nqn.2014-08.org.nvmexpress:uuid:{uuid},hostid={uuid}",
        word, service,
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
