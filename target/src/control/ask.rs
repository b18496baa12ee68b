//! What is asked of a running target by its control socket, and what it answers: plain data.

use std::path::PathBuf;
use std::time::Duration;

use rblk_config::{ByteSize, CacheMode, Difference, VolumeConfig};
use serde::{Deserialize, Serialize};

use super::status::TargetStatus;
use crate::events::EventsReport;

/// How long a question may take that changes no volume.
const SHORT: Duration = Duration::from_secs(10);
/// How long a change of volumes may take: its connections end, and what is dirty is written.
const CHANGE_TIME: Duration = Duration::from_secs(300);
/// How long a removal waits at most until nobody has the volume open.
const DRAIN_TIME: Duration = Duration::from_secs(7 * 24 * 3600);

/// What a control command asks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Ask {
    /// The state of everything.
    Status,
    /// What happened.
    Events {
        /// After the event of this number; 0 for all that is kept.
        after: u64,
    },
    /// Stop in good order.
    Drain,
    /// Read the hosts of the configuration again, and let in those.
    ReloadHosts,
    /// Read the configuration again, and change what can change without a restart.
    Reload {
        /// Only say what would change.
        #[serde(default)]
        dry_run: bool,
    },
    /// The configuration that the target runs with.
    Dump,
    /// Serve another volume.
    AddVolume {
        /// The volume, as a `[[volume]]` table.
        volume: Box<VolumeConfig>,
    },
    /// Serve a volume no longer.
    RemoveVolume {
        /// Its name.
        name: String,
        /// Also if hosts have it open.
        #[serde(default)]
        force: bool,
        /// Wait until no host has it open.
        #[serde(default)]
        drain: bool,
    },
    /// Give a volume another size.
    ResizeVolume {
        /// Its name.
        name: String,
        /// The size; none: that of its file or device.
        #[serde(default)]
        size: Option<ByteSize>,
        /// It may become smaller.
        #[serde(default)]
        shrink: bool,
    },
    /// Change how a volume is served. What is absent stays.
    SetVolume {
        /// Its name.
        name: String,
        /// Refuse writes.
        #[serde(default)]
        read_only: Option<bool>,
        /// What the block cache does for it.
        #[serde(default)]
        cache: Option<CacheMode>,
        /// How far to read ahead.
        #[serde(default)]
        read_ahead: Option<ByteSize>,
    },
    /// Clone the file of a volume, and serve the clone read-only.
    SnapshotVolume {
        /// The volume.
        name: String,
        /// The name of the new one.
        new_name: String,
        /// The new file; none: beside that of the volume.
        #[serde(default)]
        path: Option<PathBuf>,
    },
    /// Follow the commands of a volume that take long: one `Done`, then one
    /// [`TraceLine`](super::trace::TraceLine) per line until the client goes.
    Trace {
        /// The volume.
        volume: String,
        /// How long, in microseconds.
        slower_us: u64,
    },
    /// End sessions.
    Kick {
        /// A host, a peer or the number of a session.
        session: String,
    },
}

impl Ask {
    /// How long the answer may take.
    #[must_use]
    pub fn patience(&self) -> Duration {
        match self {
            Self::Status
            | Self::Events { .. }
            | Self::Drain
            | Self::ReloadHosts
            | Self::Dump
            | Self::Kick { .. } => SHORT,
            Self::RemoveVolume { drain: true, .. } => DRAIN_TIME,
            _ => CHANGE_TIME,
        }
    }
}

/// The answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// The state.
    Status(Box<TargetStatus>),
    /// What happened.
    Events(EventsReport),
    /// The hosts that may connect now.
    Hosts(HostsReport),
    /// A volume has changed.
    Volume(Box<VolumeReport>),
    /// The configuration was read again.
    Reload(Box<ReloadReport>),
    /// The running configuration, as TOML.
    Dump(String),
    /// These sessions were ended, by host and peer.
    Kicked(Vec<String>),
    /// It was taken.
    Done,
    /// It was not.
    Error(String),
}

/// A volume after a change.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeReport {
    /// Its name.
    pub name: String,
    /// Its configuration now; absent if it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeConfig>,
    /// Its size in bytes; 0 if it was removed.
    pub size_bytes: u64,
}

/// What a reload did, or would do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReloadReport {
    /// Nothing was changed; this is what would be.
    pub dry_run: bool,
    /// What was different between the files and the running target.
    #[serde(flatten)]
    pub difference: Difference,
    /// Why it is refused: then nothing of it is done.
    pub refused: Vec<String>,
    /// What it meant for hosts.
    pub access: HostsReport,
}

/// What a reload of the hosts did.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostsReport {
    /// Names of the hosts that may connect, in the order of the configuration.
    pub hosts: Vec<String>,
    /// Whether hosts must prove their keys. If not, everybody may connect, and the hosts have no
    /// effect.
    pub required: bool,
    /// Names of the hosts whose sessions ended, one for each session.
    pub ended: Vec<String>,
}

/// The answer of a target that does nothing any more.
pub(super) fn stopping() -> Response {
    Response::Error("the target is stopping".into())
}
