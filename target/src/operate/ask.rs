//! What is asked of a running target by its control socket, and what it answers: plain data.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use rblk_config::{ByteRate, ByteSize, CacheMode, Difference, HostConfig, Limits, VolumeConfig};
use serde::{Deserialize, Serialize};

use super::refusal::Refusal;
use super::status::{TargetStatus, UnsavedStatus};
use crate::operate::events::EventsReport;
use crate::store::StoreFault;

/// How long a question may take that changes no volume.
const SHORT: Duration = Duration::from_secs(10);
/// How long a change of volumes may take: its connections end, and what is dirty is written.
const CHANGE_TIME: Duration = Duration::from_secs(300);
/// How long a removal waits at most until nobody has the volume open, and a drain for its end.
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
    Drain {
        /// Answer when the target has stopped, and how.
        #[serde(default)]
        wait: bool,
    },
    /// Read the hosts of the configuration again, and let in those.
    ReloadHosts,
    /// Change what a host may have per second. What is absent stays.
    SetHost {
        /// Its name.
        name: String,
        /// Other limits.
        #[serde(default)]
        limits: LimitsWish,
    },
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
        /// What it keeps of the cache.
        #[serde(default)]
        cache_min: Option<Wish<ByteSize>>,
        /// What it has of the cache at most.
        #[serde(default)]
        cache_max: Option<Wish<ByteSize>>,
        /// Other limits.
        #[serde(default)]
        limits: LimitsWish,
    },
    /// Another program takes the place of this one.
    Upgrade {
        /// Its absolute path.
        program: PathBuf,
        /// Also if that loses something.
        #[serde(default)]
        force: bool,
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
    /// [`TraceLine`](crate::operate::trace_line::TraceLine) per line until the client goes.
    Trace {
        /// The volume.
        volume: String,
        /// How long, in microseconds.
        slower_us: u64,
    },
    /// End sessions.
    Kick {
        /// A host, a peer or the number of a session. `host:` or `number:` before it says which.
        session: String,
    },
}

/// Limits to change. What is absent stays, and `None` takes a limit away.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitsWish {
    /// Commands per second.
    pub iops: Option<Wish<u32>>,
    /// Bytes per second.
    pub bandwidth: Option<Wish<ByteRate>>,
    /// Commands at once.
    pub iops_burst: Option<Wish<u32>>,
    /// Bytes at once.
    pub bandwidth_burst: Option<Wish<ByteSize>>,
}

/// A value, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wish<T> {
    /// There is none from now on.
    None,
    /// This one.
    Some(T),
}

impl<T> Wish<T> {
    pub(crate) fn on(wish: Option<Self>, value: Option<T>) -> Option<T> {
        match wish {
            None => value,
            Some(Self::None) => None,
            Some(Self::Some(value)) => Some(value),
        }
    }
}

/// A value as the rules of files and flags have it, or `none`.
impl<T: FromStr> FromStr for Wish<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        if text == "none" { Ok(Self::None) } else { text.parse().map(Self::Some) }
    }
}

impl LimitsWish {
    /// What comes of these limits. A limit that goes takes its burst with it.
    #[must_use]
    pub fn on(self, limits: Limits) -> Limits {
        let iops = Wish::on(self.iops, limits.iops);
        let bandwidth = Wish::on(self.bandwidth, limits.bandwidth);
        let kept = |burst: Option<u32>| burst.filter(|_| iops.is_some());
        let kept_bytes = |burst: Option<ByteSize>| burst.filter(|_| bandwidth.is_some());
        Limits {
            iops,
            bandwidth,
            iops_burst: Wish::on(self.iops_burst, kept(limits.iops_burst)),
            bandwidth_burst: Wish::on(self.bandwidth_burst, kept_bytes(limits.bandwidth_burst)),
        }
    }
}

impl Ask {
    /// How long the answer may take.
    #[must_use]
    pub fn patience(&self) -> Duration {
        match self {
            Self::Status
            | Self::Events { .. }
            | Self::Drain { wait: false }
            | Self::ReloadHosts
            | Self::Dump
            | Self::Kick { .. } => SHORT,
            Self::RemoveVolume { drain: true, .. } | Self::Drain { wait: true } => DRAIN_TIME,
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
    /// A host has changed: its entry now.
    Host(Box<HostConfig>),
    /// A volume has changed.
    Volume(Box<VolumeReport>),
    /// The configuration was read again.
    Reload(Box<ReloadReport>),
    /// The running configuration, as TOML.
    Dump(String),
    /// These sessions were ended, by host and peer.
    Kicked(Vec<String>),
    /// The target has stopped.
    Ended(EndReport),
    /// It was taken.
    Done,
    /// It was not.
    Error(Refusal),
}

impl Response {
    /// It was not, for that reason.
    pub(crate) fn refused(why: impl Into<Refusal>) -> Self {
        Self::Error(why.into())
    }
}

/// How a target stopped.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EndReport {
    /// The volumes of which acknowledged data was given up.
    pub unsaved: Vec<UnsavedStatus>,
    /// What broke, if something did: then more may be lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
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
    /// What is lost, where it was removed by force and its store did not take everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_up: Option<String>,
    /// What is wrong with its file or device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_fault: Option<StoreFault>,
    /// What its image says against its block size, where it was added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contradiction: Option<String>,
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
    /// What is wrong with the files and devices of volumes, by volume.
    #[serde(default)]
    pub store_faults: BTreeMap<String, StoreFault>,
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

/// What a target says that takes no orders any more.
pub const STOPPING: &str = "the target is stopping";

/// The answer of a target that does nothing any more.
pub(crate) fn stopping() -> Response {
    Response::refused(STOPPING)
}
