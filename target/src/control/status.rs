//! What `rblk-target status` shows: plain data, the same over the socket and in JSON output.

use rblk_fabric::PageKind;
use serde::{Deserialize, Serialize};

use super::Control;
use crate::stats::StatsSnapshot;
use crate::volume::{CacheMode, Placement, Volume};
use crate::volume_stats::{LastError, VolumeCounts};

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
    /// Whether it drains.
    pub draining: bool,
    /// Addresses listened on.
    pub listen: Vec<String>,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Bytes of the pages it was allocated of: 4096, or 2097152 for reserved huge pages.
    pub arena_page_bytes: u64,
    /// Devices that connections came in by.
    pub devices: Vec<DeviceStatus>,
    /// Exported volumes.
    pub volumes: Vec<VolumeStatus>,
    /// Sessions.
    pub sessions: Vec<SessionStatus>,
    /// Counters of all poll groups together.
    pub total: StatsSnapshot,
    /// Counters by poll group.
    pub poll_groups: Vec<StatsSnapshot>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Its name.
    pub name: String,
    /// What it speaks.
    pub transport: String,
}

/// What people want to know of a volume beyond what the wire says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeNotes {
    /// File or device, where it has one.
    pub path: Option<String>,
    /// I/O passes by the page cache.
    pub direct: Option<bool>,
}

/// One volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// Its name.
    pub name: String,
    /// `file`, `memory` or `null`.
    pub store: String,
    /// Capacity in bytes.
    pub size_bytes: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Acknowledged writes may be lost before a flush.
    pub volatile_cache: bool,
    /// What the block cache does for it: `none`, `write-through` or `write-back`. `none` for volumes that are not
    /// `file`.
    pub cache: CacheMode,
    /// Its counters, all poll groups together; zeros for volumes that are not `file`.
    pub counts: VolumeCounts,
    /// The errno of the last of [`VolumeCounts::store_errors`], to the second; absent without one, 0 if it has no
    /// name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_errno: Option<i32>,
    /// Somebody opened it.
    pub in_use: bool,
    /// More.
    #[serde(flatten)]
    pub notes: VolumeNotes,
}

/// One session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// The host's name.
    pub host: String,
    /// Where it connects from.
    pub peer: String,
    /// Its epoch.
    pub epoch: u32,
    /// Live connections, admin included.
    pub connections: usize,
    /// Names of the volumes it opened.
    pub volumes: Vec<String>,
}

impl Control {
    fn volume_status(&self, v: &Volume) -> VolumeStatus {
        let (mut counts, mut last_error) = (VolumeCounts::default(), LastError::default());
        for stats in self.groups.iter().filter_map(|g| g.volume_stats(v.index)) {
            counts.add(&stats.snapshot());
            last_error = last_error.max(stats.last_error());
        }
        VolumeStatus {
            name: v.name.to_string(),
            store: match v.placement {
                Placement::Store => "file",
                Placement::Memory(_) => "memory",
                Placement::Null => "null",
            }
            .to_owned(),
            size_bytes: v.blocks.bytes(v.block_size).unwrap_or(0),
            block_size: v.block_size.bytes(),
            read_only: v.read_only,
            volatile_cache: v.has_volatile_cache(),
            cache: v.cache,
            counts,
            last_errno: last_error.errno(),
            in_use: self.sessions.is_open(v.index),
            notes: self.volume_notes.get(v.name.as_str()).cloned().unwrap_or_default(),
        }
    }

    pub(super) fn status(&self) -> TargetStatus {
        let poll_groups: Vec<StatsSnapshot> =
            self.groups.iter().map(|g| g.stats.snapshot()).collect();
        let mut total = StatsSnapshot::default();
        poll_groups.iter().for_each(|group| total.add(group));
        let name_of = |index| {
            self.volumes
                .iter()
                .find(|v| v.index == index)
                .map_or_else(String::new, |v| v.name.to_string())
        };
        TargetStatus {
            name: self.name.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            instance: self.instance.to_string(),
            uptime_s: self.started.elapsed().as_secs(),
            draining: self.draining.is_some(),
            listen: self.listening.clone(),
            arena_bytes: self.arena.len() as u64,
            arena_page_bytes: match self.arena.kind() {
                PageKind::Normal => 4096,
                PageKind::Huge2MiB => 2 << 20,
            },
            devices: self
                .devices
                .iter()
                .map(|d| DeviceStatus {
                    name: d.device.caps().name.clone(),
                    transport: d.device.caps().transport.to_string(),
                })
                .collect(),
            volumes: self.volumes.iter().map(|v| self.volume_status(v)).collect(),
            sessions: self
                .sessions
                .iter()
                .map(|s| SessionStatus {
                    host: s.host_name().to_owned(),
                    peer: s.peer.clone(),
                    epoch: s.epoch.0,
                    connections: s.connections(),
                    volumes: s.opened.keys().map(|v| name_of(*v)).collect(),
                })
                .collect(),
            total,
            poll_groups,
        }
    }
}
