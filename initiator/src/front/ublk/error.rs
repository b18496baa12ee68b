//! [`UblkError`]: the failed action, its values, and the remedy.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::abi::ANY_DEVICE;
use super::feature::Features;

/// Result of this module.
pub(crate) type Result<T> = std::result::Result<T, UblkError>;

/// The reason why a ublk operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UblkError {
    /// The driver is missing.
    #[error(
        "/dev/ublk-control is missing: load the driver with `modprobe ublk_drv` (needs kernel 6.4 or \
         later built with CONFIG_BLK_DEV_UBLK; this is kernel {kernel})"
    )]
    NoDriver {
        /// Running release.
        kernel: String,
    },
    /// The caller may not use the driver.
    #[error("{action} is not permitted: run as root, or with CAP_SYS_ADMIN")]
    NotPermitted {
        /// The action.
        action: String,
    },
    /// io_uring is switched off.
    #[error(
        "io_uring is refused: {source}; ublk needs it, so set `sysctl kernel.io_uring_disabled=0` (or 1 \
         with the process in kernel.io_uring_group) and allow it in seccomp filters"
    )]
    NoIoUring {
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel lacks a required feature.
    #[error("kernel {kernel} has no ublk feature {feature}: it came with {since}")]
    FeatureMissing {
        /// Its name in the kernel.
        feature: &'static str,
        /// The release that brought it.
        since: &'static str,
        /// Running release.
        kernel: String,
    },
    /// The device was added without a required feature.
    #[error("the driver left out {features} when adding ublk device {id}")]
    FeatureRefused {
        /// The device.
        id: u32,
        /// The missing features.
        features: Features,
    },
    /// The id is in use.
    #[error("ublk device id {id} is taken: choose another, or let the kernel choose")]
    DeviceIdTaken {
        /// The id.
        id: u32,
    },
    /// The driver allows no more devices.
    #[error(
        "no more ublk devices can be added: the driver's limit ublks_max is {}; raise \
         /sys/module/ublk_drv/parameters/ublks_max", .limit.map_or("unknown".to_owned(), |n| n.to_string())
    )]
    TooManyDevices {
        /// Value of the module parameter, if it can be read.
        limit: Option<u32>,
    },
    /// The device does not exist.
    #[error("there is no ublk device {id}")]
    NoSuchDevice {
        /// The id.
        id: u32,
    },
    /// A value is outside the driver's bounds.
    #[error("{name} = {value}: {rule}")]
    Invalid {
        /// The name of the value.
        name: &'static str,
        /// The value.
        value: u64,
        /// The bounds.
        rule: &'static str,
    },
    /// The device was made without recovery.
    #[error("ublk device {id} cannot be recovered: it was added without USER_RECOVERY")]
    NotRecoverable {
        /// The device.
        id: u32,
    },
    /// The kernel compares the id of this process with its id in another pid namespace.
    #[error(
        "{command} of ublk device {id} was refused: this process is in a pid namespace, and ublk of \
         Linux 6.16 to 6.18.7 starts disks only for processes of the first one (this is kernel \
         {kernel}): run it in the pid namespace of the host"
    )]
    OtherPid {
        /// Name of the command.
        command: &'static str,
        /// The device.
        id: u32,
        /// Running release.
        kernel: String,
    },
    /// Another process serves the device.
    #[error(
        "ublk device {id} is still held by {}: end that process first (a killed server whose requests \
         were all in flight needs up to 30 s on some kernels before 6.16)",
        .pid.map_or("a process".to_owned(), |pid| format!("process {pid}"))
    )]
    StillServed {
        /// The device.
        id: u32,
        /// The process id of its server, if the kernel knows it.
        pid: Option<i32>,
    },
    /// Not every queue had all requests of the disk in time, before its server left.
    #[error(
        "the queues of ublk device {id} did not get all requests of their disk (they have {held:?}): \
         a request that is on its way while this process leaves may be lost (a fault of kernels \
         before 6.16)"
    )]
    NotFull {
        /// The device.
        id: u32,
        /// By queue: its requests.
        held: Vec<u16>,
    },
    /// A command did not finish in time.
    #[error(
        "{command} of {} did not finish within {waited:?}{}; the kernel does not say why: {kernel}",
        device(*.id), if *.still_running { " and cannot be interrupted" } else { "" }
    )]
    Timeout {
        /// Name of the command.
        command: &'static str,
        /// The device.
        id: u32,
        /// What the kernel does before it answers.
        kernel: &'static str,
        /// The time waited.
        waited: Duration,
        /// The command still runs in the kernel.
        still_running: bool,
    },
    /// The device is marked deleted, but its node is still open.
    #[error(
        "ublk device {id} is deleted but not gone after {waited:?}: a queue, or another process, still \
         holds /dev/ublkc{id}"
    )]
    StillHeld {
        /// The device.
        id: u32,
        /// The time waited.
        waited: Duration,
    },
    /// A device node did not appear.
    #[error(
        "{} did not appear within {waited:?}: is devtmpfs mounted on /dev, or is udev running? (it is \
         device {major}:{minor})", path.display()
    )]
    NoNode {
        /// The node.
        path: PathBuf,
        /// Its device number.
        major: u32,
        /// Its device number.
        minor: u32,
        /// The time waited.
        waited: Duration,
    },
    /// The driver refused a command for another reason.
    #[error("{command} of {} was refused: {source}", device(*.id))]
    Refused {
        /// Name of the command.
        command: &'static str,
        /// The device.
        id: u32,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{action}: {source}")]
    System {
        /// The action.
        action: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The ring of a queue does not work any more; the queue has to be dropped.
    #[error("io_uring_enter of queue {queue_id} failed: {source}")]
    Enter {
        /// The queue.
        queue_id: u16,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A completed tag holds no request: a bug of the caller.
    #[error("tag {tag} of queue {queue_id} holds no request to complete")]
    NotOwned {
        /// The queue.
        queue_id: u16,
        /// The tag.
        tag: u16,
    },
    /// No free place to watch another file descriptor, or the token is in use.
    #[error("queue {queue_id} cannot watch another descriptor: {reason}")]
    CannotWatch {
        /// The queue.
        queue_id: u16,
        /// The reason.
        reason: &'static str,
    },
}

impl UblkError {
    pub(crate) fn system(action: impl Into<String>, source: io::Error) -> Self {
        Self::System { action: action.into(), source }
    }
}

/// A device in messages. ADD_DEV may leave the number to the kernel.
fn device(id: u32) -> String {
    match id {
        ANY_DEVICE => "a new ublk device".to_owned(),
        id => format!("ublk device {id}"),
    }
}

/// Release of the running kernel, for messages.
pub(super) fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|_| "unknown".to_owned(), |release| release.trim().to_owned())
}
