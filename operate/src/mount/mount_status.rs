//! The state of a mount: plain data, for its socket and for JSON output.

use std::time::Duration;

use rblk_config::OnLoss;
use rblk_runtime::rates::Rates;
use serde::{Deserialize, Serialize};

use crate::mount::mount_times::MountTimes;
use crate::mount::path_status::PathStatus;
use crate::mount::queue_counts::QueueCounts;

/// State of a mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MountStatus {
    /// The name of the mount: the volume's unless another was given.
    pub name: String,
    /// The block device; for the disk of a guest, its socket.
    pub device: String,
    /// The volume.
    pub volume: String,
    /// Addresses of the target.
    pub target: Vec<String>,
    /// The address in use.
    pub address: String,
    /// The preferred address, and why another is in use; absent while the first address is in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// The paths of a mount that uses all its addresses at once, in the order of `target`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathStatus>,
    /// The mount has `paths = "all"`, and its target knows only one path at a time.
    #[serde(default)]
    pub one_path: bool,
    /// The target's name.
    pub target_name: String,
    /// RDMA device or `soft`.
    pub rdma_device: String,
    /// The transport of the messages.
    pub transport: String,
    /// `key`: both ends prove their keys. `none`: neither end proves anything. Empty where no
    /// process serves the mount.
    #[serde(default)]
    pub auth: String,
    /// The I/O connections are encrypted, as of the last connect. Admin commands are sealed
    /// wherever `auth` is `key`.
    #[serde(default)]
    pub encrypted: bool,
    /// `waiting` (for the first connect; there is no device yet), `connected`, `reconnecting`
    /// (requests wait), `failing` (they fail until the target is back), `volume removed` (they fail
    /// until the target serves the volume again), `fenced` (they fail permanently: `last_loss` says
    /// why) or `volume lost` (they fail permanently: a different volume came back).
    pub state: String,
    /// Why the last connection was lost, or why the last try to reconnect failed.
    pub last_loss: Option<String>,
    /// The time of the last loss of the target, in milliseconds since 1970; it stays when the
    /// target is back.
    #[serde(default)]
    pub lost_at_unix_ms: Option<u64>,
    /// Milliseconds since the target was lost; absent while it is connected.
    #[serde(default)]
    pub lost_ms_ago: Option<u64>,
    /// The longest time without the target so far, in milliseconds, the present one included.
    #[serde(default)]
    pub stall_ms_max: u64,
    /// A likely fault of the network, deduced from the losses of the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Process.
    pub pid: u32,
    /// Version of the program.
    pub version: String,
    /// Seconds since the mount.
    pub uptime_s: u64,
    /// Capacity of the volume in bytes.
    pub size_bytes: u64,
    /// Capacity of the disk in bytes. It differs from the volume's if the volume was resized and
    /// the kernel cannot resize a disk in use. 0: there is no disk yet, or no process serves it.
    #[serde(default)]
    pub disk_size_bytes: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Acknowledged writes may be lost before a flush.
    pub volatile_cache: bool,
    /// Hardware queues.
    pub queues: u16,
    /// The least number of QPs of a queue, as of the last connect.
    #[serde(default)]
    pub lanes: usize,
    /// Commands outstanding per queue.
    pub queue_depth: u16,
    /// Most data of one command in bytes.
    pub max_io_bytes: u32,
    /// Write data up to this size travels in the command.
    pub in_capsule_bytes: u32,
    /// Reads are answered by WRITE_WITH_IMM: data and answer in one message.
    pub write_with_imm: bool,
    /// Commands and data of every queue have digests, as of the last connect.
    #[serde(default)]
    pub digest: bool,
    /// Memory for retained writes in bytes; 0 retains none.
    #[serde(default)]
    pub retain_bytes: u64,
    /// Acknowledged writes that no FLUSH covered yet.
    #[serde(default)]
    pub unflushed_writes: u64,
    /// Times the target came back and may have lost unflushed writes.
    #[serde(default)]
    pub verifier_changes: u64,
    /// Acknowledged writes that were written again after that.
    #[serde(default)]
    pub writes_rewritten: u64,
    /// Times acknowledged writes may have been lost. FLUSHes fail after that by `on_loss`.
    #[serde(default)]
    pub losses: u64,
    /// A loss has to be reported: with `once` by the next FLUSH, with `until-remount` by every
    /// FLUSH to the end of the mount.
    #[serde(default)]
    pub loss_untold: bool,
    /// Which FLUSHes fail after a loss. A process older than the key fails them once.
    #[serde(default = "once")]
    pub on_loss: OnLoss,
    /// The consequence of such a loss, and the remedy; absent without one.
    #[serde(default)]
    pub lost: Option<String>,
    /// Times the device was taken over by a new process.
    #[serde(default)]
    pub recovered: u32,
    /// Session epoch: rises with every reconnect.
    pub epoch: u32,
    /// The volume's generation that this mount holds: it changes with the host that may write. For
    /// volumes that the target does not remember it starts at the time: see
    /// [`Self::generation_shown`].
    #[serde(default)]
    pub generation: u64,
    /// The volume ends with its target's process.
    #[serde(default)]
    pub ephemeral: bool,
    /// Counters of all queues together.
    pub total: QueueCounts,
    /// Counters by queue.
    pub by_queue: Vec<QueueCounts>,
    /// The times of the requests of all queues together.
    #[serde(default)]
    pub latency: MountTimes,
    /// The latencies by queue.
    #[serde(default)]
    pub latency_by_queue: Vec<MountTimes>,
    /// Work per second; absent until rates have been measured for a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
}

/// A mount that uses an address other than its best.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallback {
    /// The preferred address: the first of the mount's.
    pub preferred: String,
    /// The reason why it is not in use, if this process has tried it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The status word for the proofs of both ends.
pub fn auth(with_keys: bool) -> &'static str {
    if with_keys { "key" } else { "none" }
}

fn once() -> OnLoss {
    OnLoss::Once
}

impl MountStatus {
    /// The consequence of an unreported loss, and the remedy; `None` without one. A process older
    /// than `lost` does not report it itself.
    #[must_use]
    pub fn lost(&self) -> Option<String> {
        self.loss_untold
            .then(|| format!("acknowledged writes may be lost; {}", self.on_loss.consequence()))
    }

    /// A line about a mount that has lost its target: the time, the reason, and the state of its
    /// requests. `None` for one that has it.
    #[must_use]
    pub fn outage(&self) -> Option<String> {
        let why = self.last_loss.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
        if self.state == "waiting" {
            return Some(format!("{}: it waits for its target{why}", self.name));
        }
        let since = Duration::from_millis(self.lost_ms_ago?);
        let what = match self.state.as_str() {
            "reconnecting" => "its target is lost, and requests wait",
            "failing" => "its target is lost, and requests fail until it is back",
            "volume removed" => {
                "its target removed the volume, and requests fail until it is served again"
            }
            "fenced" => "it is fenced from its volume, and every request fails; unmount it",
            "volume lost" => {
                "its volume was replaced by a different one, and every request fails; unmount it"
            }
            _ => return None,
        };
        Some(format!("{}: {what} (for {} s{why})", self.name, since.as_secs()))
    }

    /// Whether it is the disk of a guest, with a socket in the place of a device.
    #[must_use]
    pub fn is_of_guest(&self) -> bool {
        is_of_guest(&self.device)
    }

    /// A line about a path that is not the best; `None` if it is.
    #[must_use]
    pub fn fallback_line(&self) -> Option<String> {
        let Fallback { preferred, reason } = self.fallback.as_ref()?;
        let why = reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        Some(format!("its path is {}, and not the preferred {preferred}{why}", self.address))
    }

    /// How many of the paths are in use, for people; `None` for a mount that uses one at a time.
    #[must_use]
    pub fn paths_in_use(&self) -> Option<String> {
        let in_use = self.paths.iter().filter(|path| path.is_in_use()).count();
        (!self.paths.is_empty()).then(|| format!("{in_use} of {}", self.paths.len()))
    }

    /// A line about a target that knows one path at a time, if the mount wants all.
    #[must_use]
    pub fn one_path_line(&self) -> Option<String> {
        self.one_path.then(|| {
            format!(
                "it uses one of its {} addresses at a time, because its target does not know `paths = \"all\"`; \
                 upgrade the target",
                self.target.len()
            )
        })
    }

    /// Lines about paths that are not in use. None while the target is lost: another line tells
    /// that.
    #[must_use]
    pub fn path_lines(&self) -> Vec<String> {
        let others = self.paths.iter().filter(|_| self.state == "connected");
        others.filter_map(PathStatus::line).chain(self.one_path_line()).collect()
    }

    /// Fills in `lost`.
    pub fn with_lost(self) -> Self {
        Self { lost: self.lost(), ..self }
    }

    /// The generation for people; `-` where the number has no meaning: before the volume was
    /// opened, and for a volume that lives no longer than its target's process. The target does not
    /// remember such a volume, so its generations begin at the time in microseconds, to be above
    /// all earlier ones.
    #[must_use]
    pub fn generation_shown(&self) -> String {
        match self.generation {
            0 => "-".to_owned(),
            _ if self.ephemeral => "-".to_owned(),
            generation => generation.to_string(),
        }
    }
}

/// Whether a mount with this device is the disk of a guest, with a socket in the place of a device.
pub(super) fn is_of_guest(device: &str) -> bool {
    !device.starts_with("/dev/ublkb")
}
