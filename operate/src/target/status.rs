//! The output of `rblk-target status`: plain data, equal over the socket and in JSON.

use std::fmt;

use rblk_config::{ByteSize, CacheMode, Limits};
use rblk_runtime::rates::Rates;
use serde::{Deserialize, Serialize};

use crate::target::delays::DelayCounts;
use crate::target::events::EventCount;
use crate::target::group_counts::StatsSnapshot;
use crate::target::store_fault::{StoreFault, StoreFaultKind};
use crate::target::store_room::StoreRoom;
use crate::target::traffic::{IoCounts, VolumeTimes};
use crate::target::volume_counts::VolumeCounts;
use crate::target::volume_notes::VolumeNotes;

/// The state of a target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetStatus {
    /// Its name.
    pub name: String,
    /// Version of the program.
    pub version: String,
    /// Process.
    pub pid: u32,
    /// This run, in hexadecimal.
    pub instance: String,
    /// Seconds since the start.
    pub uptime_s: u64,
    /// When it started, in milliseconds since 1970.
    #[serde(default)]
    pub started_unix_ms: u64,
    /// Its state in one word, the worst that applies: see `condition.rs`.
    #[serde(default)]
    pub condition: String,
    /// The present faults, a sentence each: the WARN lines of `rblk-target status`.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// The use of its limited resources.
    #[serde(default)]
    pub usage: UsageStatus,
    /// Whether it drains.
    pub draining: bool,
    /// How far the drain is, while there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<DrainStatus>,
    /// The outcome of the upgrade that this program began with, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<UpgradeStatus>,
    /// How long an initiator without connections keeps its volumes, in milliseconds.
    pub lease_ms: u64,
    /// How often a holder was fenced: another host took its volume over, or it came back after
    /// another host had held it.
    pub fencings: u64,
    /// Hosts that may log in: `required` (those that prove their keys) or `none` (all).
    #[serde(default)]
    pub auth: String,
    /// No proof is required, and other hosts reach an address.
    #[serde(default)]
    pub insecure: bool,
    /// Connections that have not logged in.
    #[serde(default)]
    pub strangers: usize,
    /// Initiators that failed to prove their identity.
    #[serde(default)]
    pub unproven: u64,
    /// How many of the fencings were take-overs.
    pub take_overs: u64,
    /// Addresses listened on.
    pub listen: Vec<String>,
    /// The unreachable ones among them: their listener broke, and is not made anew yet.
    #[serde(default)]
    pub listen_down: Vec<ListenerStatus>,
    /// Why `state_dir` cannot be written; absent if it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_dir_fault: Option<String>,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Bytes of each page of the arena: 4096, or 2097152 for reserved huge pages.
    pub arena_page_bytes: u64,
    /// Devices with connections, now or before.
    pub devices: Vec<DeviceStatus>,
    /// Exported volumes.
    pub volumes: Vec<VolumeStatus>,
    /// Volumes of the configuration that are not served here: another member of the group serves
    /// them, or they have a fault, such as a file of another size than it says.
    #[serde(default)]
    pub volumes_away: Vec<AwayStatus>,
    /// Sessions.
    pub sessions: Vec<SessionStatus>,
    /// Its rates per second, all volumes together; absent until they were measured for a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// Counters of all poll groups together.
    pub total: StatsSnapshot,
    /// Counters by poll group.
    pub poll_groups: Vec<StatsSnapshot>,
    /// The number of events of each kind.
    #[serde(default)]
    pub events: Vec<EventCount>,
}

/// The use of the target's limited resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageStatus {
    /// Sessions.
    pub sessions: usize,
    /// Sessions at a time (`sessions_max`).
    pub sessions_max: usize,
    /// Live connections, admin included.
    pub connections: usize,
    /// Open files; absent where the kernel does not count them (before 6.2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<u64>,
    /// Open files at a time (`LimitNOFILE=`).
    pub files_max: u64,
    /// Bytes of memory of the process; absent where that cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The most bytes of memory for the process: those of the host, or of its cgroup if that has
    /// fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_max_bytes: Option<u64>,
}

/// An address without a listener now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerStatus {
    /// The address.
    pub address: String,
    /// Seconds since it broke, for example by the removal of its device.
    pub down_s: u64,
    /// Tries to listen again that failed.
    pub tries: u32,
    /// Why the last of them failed, or why it broke.
    pub why: String,
}

/// The outcome of an upgrade, from the program that took over or got its place back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpgradeStatus {
    /// Version of the program before.
    pub from_version: String,
    /// Why the other program could not take over: the one before serves again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Milliseconds from the notice to the mounts until this program was ready.
    pub ready_ms: u64,
    /// Milliseconds from the notice to the mounts until the last of them was back; absent while
    /// some are away.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<u64>,
    /// Mounts that had volumes open.
    pub mounts: usize,
    /// Mounts that are back.
    pub back: usize,
    /// Hosts of the mounts that are away.
    pub away: Vec<String>,
    /// Mounts that had not left in time.
    pub stayed: usize,
    /// Requests without a reply at that time: mounts send them again.
    pub sent_again: u64,
    /// All acknowledged data was durable before.
    pub clean: bool,
}

/// A drain under way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DrainStatus {
    /// Whether it makes room for another program.
    pub upgrade: bool,
    /// How long it has taken so far, in milliseconds.
    pub lasted_ms: u64,
    /// Time until the target ends the sessions that stay, in milliseconds; 0 when it has.
    pub left_ms: u64,
    /// Sessions that have not left.
    pub sessions: usize,
    /// How long the stores may take after that, in milliseconds. Dirty blocks that they have not
    /// taken by then are lost.
    pub stores_ms: u64,
    /// The dirty blocks that the stores refuse. The target tries again.
    pub unsaved: Vec<UnsavedStatus>,
}

/// A configured volume that is not served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwayStatus {
    /// Its name.
    pub name: String,
    /// Why, and the remedy.
    pub why: String,
    /// Another member of the group serves it: that is no fault.
    #[serde(default)]
    pub elsewhere: bool,
    /// It was handed over, and no member serves it.
    #[serde(default)]
    pub handed_over: bool,
}

impl fmt::Display for AwayStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, why, elsewhere, handed_over } = self;
        match (elsewhere, handed_over) {
            (true, _) => write!(f, "volume `{name}` is not here: {why}"),
            (false, true) => write!(f, "volume `{name}` is not served: {why}"),
            (false, false) => {
                write!(f, "volume `{name}` is not served: {why}. Then `rblk-target reload` adds it")
            }
        }
    }
}

/// Acknowledged data of a volume that is not in its store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnsavedStatus {
    /// The volume.
    pub volume: String,
    /// Bytes; 0: all were written, and could not be made durable.
    pub dirty_bytes: u64,
    /// The store's error, with the errno; or that it did not answer.
    pub cause: String,
}

/// The volumes of a list, for people.
#[must_use]
pub fn in_words(unsaved: &[UnsavedStatus]) -> String {
    let words: Vec<String> = unsaved.iter().map(ToString::to_string).collect();
    words.join(", ")
}

impl fmt::Display for UnsavedStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { volume, dirty_bytes, cause } = self;
        match dirty_bytes {
            0 => write!(f, "volume `{volume}` (not made durable: {cause})"),
            bytes => write!(f, "volume `{volume}` {} ({cause})", ByteSize(*bytes)),
        }
    }
}

/// A target gave acknowledged data up when it stopped.
#[derive(Debug, thiserror::Error)]
#[error(
    "the target stopped, and acknowledged data is lost: {}. Mounts report the loss when they connect again, or write \
     again what they retained",
    in_words(.0)
)]
pub struct GivenUp(pub Vec<UnsavedStatus>);

/// The name of the device of all connections over TCP.
pub const OVER_TCP: &str = "soft";

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Its name.
    pub name: String,
    /// Its transport.
    pub transport: String,
    /// The block commands of its connections, those that ended included.
    #[serde(default)]
    pub io: IoCounts,
    /// The ports of an RDMA device, as they were seen last. For TCP: the network interfaces.
    #[serde(default)]
    pub ports: Vec<PortStatus>,
}

impl DeviceStatus {
    /// Whether the device is an RDMA device, with ports of its own.
    #[must_use]
    pub fn is_rdma(&self) -> bool {
        self.name != OVER_TCP
    }
}

/// A port of an RDMA device, or a network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PortStatus {
    /// Its number, or the name of the interface.
    pub name: String,
    /// `active`, `down`, `init` (no subnet manager has configured it), or `other`.
    pub state: String,
    /// Its speed, in the words of the kernel.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rate: String,
    /// Its network interfaces.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<String>,
}

impl PortStatus {
    /// Whether the port works.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.state == "active"
    }
}

/// One volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// Its name.
    pub name: String,
    /// `file`, `rbd`, `memory` or `null`.
    pub store: String,
    /// Capacity in bytes.
    pub size_bytes: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Acknowledged writes may be lost before a flush.
    pub volatile_cache: bool,
    /// Its mode of the block cache: `none`, `write-through` or `write-back`. `none` for volumes
    /// that are not `file`.
    pub cache: CacheMode,
    /// Bytes of the cache that it keeps when other volumes need memory; 0: none.
    #[serde(default)]
    pub cache_min_bytes: u64,
    /// The most bytes of the cache that it may have; absent: all.
    #[serde(default)]
    pub cache_max_bytes: Option<u64>,
    /// Its counters, all poll groups together; zeros for volumes that are not `file`.
    pub counts: VolumeCounts,
    /// Its commands, all poll groups together.
    #[serde(default)]
    pub io: IoCounts,
    /// Its limits per second.
    #[serde(default)]
    pub limits: Limits,
    /// Its commands that waited for a limit, its own or that of their host.
    #[serde(default)]
    pub delays: DelayCounts,
    /// The times of its commands, and the causes of their waits.
    #[serde(default)]
    pub latency: VolumeTimes,
    /// Its rates per second; absent until they were measured for a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// The errno of the last of [`VolumeCounts::store_errors`], to the second; absent without one,
    /// 0 if it has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_errno: Option<i32>,
    /// How long ago that was, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error_age_s: Option<u64>,
    /// For how long the oldest dirty block has been dirty, in seconds; absent if no block is dirty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_age_s: Option<u64>,
    /// The space of its file and of the file system, as it was seen last; absent for devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<StoreRoom>,
    /// The fault of its file or device, as it was seen last; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_fault: Option<StoreFault>,
    /// A session has it open.
    pub in_use: bool,
    /// Rises with every change of its holders; 0 before the first. A volume without a record at any
    /// target begins at the time in microseconds, and tables show `-`.
    pub generation: u64,
    /// The host that may write to it: it has the volume open, or may come back for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<HolderStatus>,
    /// Its file.
    #[serde(flatten)]
    pub notes: VolumeNotes,
}

/// The host that may write to a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderStatus {
    /// The host's name; if several hosts share the volume, one of them.
    pub host: String,
    /// Whether others may write too.
    pub shared: bool,
    /// Whether it has a connection; if not, it may come back.
    pub present: bool,
}

/// One session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// The host's name.
    pub host: String,
    /// Its address.
    pub peer: String,
    /// The public key that its host has proven; absent if no proof is required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// All of its I/O connections are encrypted, and it has some. Admin commands are sealed if
    /// there is a [`key`](Self::key).
    #[serde(default)]
    pub encrypted: bool,
    /// Its number: no other session of this run of the target has it.
    #[serde(default)]
    pub number: u32,
    /// Its place among the sessions of its host, from 0: the label `session` of its metrics. A
    /// later session may have the same.
    #[serde(default)]
    pub place: u32,
    /// Its epoch.
    pub epoch: u32,
    /// Live connections, admin included.
    pub connections: usize,
    /// Names of its open volumes.
    pub volumes: Vec<String>,
    /// Commands and data of its I/O connections have digests.
    #[serde(default)]
    pub digest: bool,
    /// Another initiator took its volumes over. The session ends when nothing of it is under way.
    #[serde(default)]
    pub fenced: bool,
    /// Its block commands, those of connections that ended included.
    #[serde(default)]
    pub io: IoCounts,
    /// Its I/O connections, by queue.
    #[serde(default)]
    pub queues: Vec<QueueStatus>,
}

/// One I/O connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueStatus {
    /// Its number in the session. A further lane of a queue has a number of its own.
    pub queue: u16,
    /// The poll group that serves it.
    pub poll_group: usize,
    /// Its device.
    pub device: String,
    /// Its block commands.
    pub io: IoCounts,
}

impl VolumeStatus {
    /// Whether its data outlives the target: on a file, a device or an image.
    #[must_use]
    pub fn has_store(&self) -> bool {
        matches!(self.store.as_str(), "file" | "rbd")
    }

    /// `rw`, `ro`, or `(ro)` where its file or device takes no writes.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        match &self.store_fault {
            _ if self.read_only => "ro",
            Some(fault) if fault.kind == StoreFaultKind::ReadOnly => "(ro)",
            _ => "rw",
        }
    }
}
