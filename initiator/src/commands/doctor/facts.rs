//! [`Facts`]: the facts about this host, read once.

use std::path::Path;
use std::time::Duration;

use io_uring::IoUring;
use rblk_config::MountConfig;
use rblk_config::key_file::{self, KeyFileError, Side};
use rblk_operate::doctor::{
    Directory, HostFacts, Interface, RdmaDevice, SystemdFacts, interfaces, rdma_devices,
};
use rblk_protocol::auth::PublicKey;

use super::mounts_of;
use crate::front::ublk::{Control, DeviceInfo, Features, UblkError, disk_path};
use crate::mount::device::server::ServedBy;
use crate::mount::note::leftovers::{self, Condition};
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::mount_ask::status_of;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::run_dir::{RUN_DIR, names};

/// Time for the process of a mount to answer.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// The unit of mounts.
pub(super) const UNIT: &str = "rblk-mount@.service";

/// A mount without a process.
#[derive(Debug)]
pub(super) struct DeadMount {
    pub name: String,
    pub condition: Condition,
    /// The disk, if it is known.
    pub disk: Option<String>,
}

/// A mount that a process serves.
#[derive(Debug)]
pub(super) struct ServedMount {
    pub name: String,
    /// `None`: the process does not answer.
    pub status: Option<MountStatus>,
}

/// The facts about this host.
#[derive(Debug)]
pub(super) struct Facts {
    pub is_root: bool,
    pub host: HostFacts,
    pub ublk: Result<Features, UblkError>,
    /// The minor number of the driver, if the kernel has the driver.
    pub ublk_minor: Option<u32>,
    pub interfaces: Vec<Interface>,
    pub devices: Vec<RdmaDevice>,
    pub key: Result<PublicKey, KeyFileError>,
    pub run_dir: Directory,
    pub systemd: SystemdFacts,
    /// Mounts that a process serves.
    pub served: Vec<ServedMount>,
    pub dead: Vec<DeadMount>,
    /// Disks without notes, each with the process that serves it.
    pub without_note: Vec<(String, ServedBy)>,
}

impl Facts {
    /// Reads the facts. Tries an io_uring, and asks the driver.
    pub(super) fn read(root: &Path, config: &MountConfig) -> Self {
        let is_root = nix::unistd::geteuid().is_root();
        let me = nix::unistd::geteuid().as_raw();
        let io_uring = IoUring::new(8).map(drop);
        let names = names();
        let (served, others): (Vec<_>, Vec<_>) =
            names.iter().partition(|name| MountLock::is_held(name));
        let units: Vec<String> =
            mounts_of(root).iter().map(|name| format!("rblk-mount@{name}.service")).collect();
        let misc = std::fs::read_to_string(root.join("proc/misc")).unwrap_or_default();
        Self {
            is_root,
            host: HostFacts::read(root, &io_uring, rblk_runtime::clock::synchronised()),
            ublk: Control::open().map(|control| control.features()),
            ublk_minor: minor_of(&misc, "ublk-control"),
            interfaces: interfaces(root),
            devices: rdma_devices(root),
            key: key_file::read(&config.key_file, Side::Initiator).map(|key| key.public()),
            run_dir: Directory::look(Path::new(RUN_DIR), 0, me),
            systemd: SystemdFacts::read(root, UNIT, &units),
            served: served.into_iter().map(|name| serving(name)).collect(),
            dead: others.into_iter().filter_map(|name| dead(name)).collect(),
            without_note: leftovers::without_note()
                .unwrap_or_default()
                .iter()
                .map(without_note)
                .collect(),
        }
    }
}

fn without_note(info: &DeviceInfo) -> (String, ServedBy) {
    (disk_path(info.id).display().to_string(), ServedBy::of(info))
}

/// Asks the process of a mount. Only root may.
fn serving(name: &str) -> ServedMount {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let status = runtime.ok().and_then(|runtime| runtime.block_on(status_of(name, ANSWER_TIME)));
    ServedMount { name: name.to_owned(), status }
}

fn dead(name: &str) -> Option<DeadMount> {
    let found = leftovers::find(name).ok()?;
    let disk = found.note.ok().flatten().map(|note| note.disk());
    Some(DeadMount { name: name.to_owned(), condition: found.condition, disk })
}

/// The minor number of a driver in `/proc/misc`.
fn minor_of(misc: &str, driver: &str) -> Option<u32> {
    misc.lines().find_map(|line| {
        let (minor, name) = line.trim().split_once(' ')?;
        minor.parse().ok().filter(|_| name.trim() == driver)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_are_found_by_name() {
        let misc = " 62 ublk-control\n124 rdma_cm\n  1 psaux\nnonsense\n";
        assert_eq!(minor_of(misc, "ublk-control"), Some(62));
        assert_eq!(minor_of(misc, "rdma_cm"), Some(124));
        assert_eq!(minor_of(misc, "ublk"), None);
    }
}
