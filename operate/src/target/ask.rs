//! The commands of the control socket of a running target, and their responses: plain data.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use rblk_config::{ByteRate, ByteSize, CacheMode, Difference, HostConfig, Limits, VolumeConfig};
use serde::{Deserialize, Serialize};

use super::refusal::Refusal;
use super::status::{TargetStatus, UnsavedStatus};
use crate::target::events::EventsReport;
use crate::target::store_fault::StoreFault;

/// How long a command may take that changes no volume.
const SHORT: Duration = Duration::from_secs(10);
/// How long a change of volumes may take: its connections end, and dirty blocks are written.
const CHANGE_TIME: Duration = Duration::from_secs(300);
/// How long a removal waits at most for hosts to close the volume, and a drain for its end.
const DRAIN_TIME: Duration = Duration::from_secs(7 * 24 * 3600);

/// A control command.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Ask {
    /// The state of everything.
    Status,
    /// The events.
    Events {
        /// The number of the last event known; 0: send all that are kept.
        after: u64,
    },
    /// Stop in good order.
    Drain {
        /// Answer when the target has stopped, with its outcome.
        #[serde(default)]
        wait: bool,
    },
    /// Read the hosts of the configuration again, and allow these alone.
    ReloadHosts,
    /// Change the limits of a host. Absent ones stay.
    SetHost {
        /// The host's name.
        name: String,
        /// The new limits.
        #[serde(default)]
        limits: LimitsWish,
    },
    /// Read the configuration again, and apply the changes that need no restart.
    Reload {
        /// Only report the changes.
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
        /// The volume's name.
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
        /// The volume's name.
        name: String,
        /// The size; none: that of its file or device.
        #[serde(default)]
        size: Option<ByteSize>,
        /// Whether it may become smaller.
        #[serde(default)]
        shrink: bool,
    },
    /// Change how a volume is served. Absent settings stay.
    SetVolume {
        /// The volume's name.
        name: String,
        /// The new settings.
        #[serde(flatten)]
        edit: VolumeEdit,
    },
    /// Another program takes the place of this one.
    Upgrade {
        /// The program's absolute path.
        program: PathBuf,
        /// Also if that loses something.
        #[serde(default)]
        force: bool,
    },
    /// Clone the file of a volume, and serve the clone read-only.
    SnapshotVolume {
        /// The volume.
        name: String,
        /// The name of the clone.
        new_name: String,
        /// The file of the clone; none: beside that of the volume.
        #[serde(default)]
        path: Option<PathBuf>,
    },
    /// Hand a volume over to another member of the group.
    MoveVolume {
        /// The volume's name.
        name: String,
    },
    /// Move a volume to a member of the group.
    MoveVolumeTo {
        /// The volume's name.
        name: String,
        /// The name of the member.
        to: String,
    },
    /// Follow the commands of a volume that take long: one `Done`, then one
    /// [`TraceLine`](crate::target::trace_line::TraceLine) per line until the client goes.
    Trace {
        /// The volume.
        volume: String,
        /// The shortest time to report, in microseconds.
        slower_us: u64,
    },
    /// End sessions.
    Kick {
        /// A host, a peer or the number of a session. The prefixes `host:` and `number:` tell them
        /// apart.
        session: String,
    },
}

/// Settings of a volume to change. Absent ones stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct VolumeEdit {
    /// Refuse writes.
    pub read_only: Option<bool>,
    /// Its cache mode.
    pub cache: Option<CacheMode>,
    /// How far to read ahead.
    pub read_ahead: Option<ByteSize>,
    /// The part of the cache that is reserved for it.
    pub cache_min: Option<Wish<ByteSize>>,
    /// The most that it may have of the cache.
    pub cache_max: Option<Wish<ByteSize>>,
    /// The new limits.
    pub limits: LimitsWish,
}

impl VolumeEdit {
    /// The volume with these settings.
    #[must_use]
    pub fn on(self, config: &VolumeConfig) -> VolumeConfig {
        let mut config = config.clone();
        config.limits = self.limits.on(config.limits);
        config.read_only = self.read_only.unwrap_or(config.read_only);
        // The rules of the configuration decide whether its store may have one.
        config.cache = self.cache.or(config.cache);
        config.read_ahead = self.read_ahead.unwrap_or(config.read_ahead);
        config.cache_min = Wish::on(self.cache_min, config.cache_min);
        config.cache_max = Wish::on(self.cache_max, config.cache_max);
        config
    }
}

/// Limits to change. Absent ones stay, and [`Wish::None`] takes a limit away.
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
    /// No value.
    None,
    /// This value.
    Some(T),
}

impl<T> Wish<T> {
    /// The value that holds after a wish.
    pub fn on(wish: Option<Self>, value: Option<T>) -> Option<T> {
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
    /// Applies the changes to these limits. A limit that goes takes its burst with it.
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
    /// How long the response may take.
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

/// The response.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// The state.
    Status(Box<TargetStatus>),
    /// The events.
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
    /// The command was carried out.
    Done,
    /// The command was refused or failed.
    Error(Refusal),
}

impl Response {
    /// A refusal, for this reason.
    pub fn refused(why: impl Into<Refusal>) -> Self {
        Self::Error(why.into())
    }
}

/// How a target stopped.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EndReport {
    /// The volumes with acknowledged data that was given up.
    pub unsaved: Vec<UnsavedStatus>,
    /// The failure of the target, if there was one: then more data may be lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A volume after a change.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeReport {
    /// The volume's name.
    pub name: String,
    /// Its configuration now; absent if it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeConfig>,
    /// Its size in bytes; 0 if it was removed.
    pub size_bytes: u64,
    /// The data that is lost, if it was removed by force and its store did not take everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_up: Option<String>,
    /// The fault of its file or device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_fault: Option<StoreFault>,
    /// A contradiction between its image and its block size, if it was added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contradiction: Option<String>,
}

/// The effect of a reload, or the effect it would have.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReloadReport {
    /// Nothing was changed: the report shows the changes to come.
    pub dry_run: bool,
    /// The differences between the files and the running target.
    #[serde(flatten)]
    pub difference: Difference,
    /// Why the reload is refused: then nothing of it is done.
    pub refused: Vec<String>,
    /// The faults of the files and devices of volumes, by volume.
    #[serde(default)]
    pub store_faults: BTreeMap<String, StoreFault>,
    /// Its effect on hosts.
    pub access: HostsReport,
}

/// The effect of a reload of the hosts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostsReport {
    /// Names of the hosts that may connect, in the order of the configuration.
    pub hosts: Vec<String>,
    /// Whether hosts must prove their keys. If not, every host may connect, and the list has no
    /// effect.
    pub required: bool,
    /// Names of the hosts that lost sessions, one for each session.
    pub ended: Vec<String>,
}

/// The refusal of a target that is stopping.
pub const STOPPING: &str = "the target is stopping";

/// The response of a target that is stopping.
pub fn stopping() -> Response {
    Response::refused(STOPPING)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_of_a_volume_stand_beside_its_name() {
        let edit = VolumeEdit {
            read_only: Some(true),
            cache_min: Some(Wish::None),
            cache_max: Some(Wish::Some(ByteSize(1 << 20))),
            ..VolumeEdit::default()
        };
        let ask = Ask::SetVolume { name: "db".to_owned(), edit };
        let json = serde_json::to_string(&ask).unwrap();
        let limits = r#"{"iops":null,"bandwidth":null,"iops_burst":null,"bandwidth_burst":null}"#;
        let expected = format!(
            r#"{{"do":"set-volume","name":"db","read_only":true,"cache":null,"read_ahead":null,"cache_min":"none",{}{limits}}}"#,
            r#""cache_max":{"some":"1MiB"},"limits":"#
        );
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_str::<Ask>(&json).unwrap(), ask);
        let short: Ask = serde_json::from_str(r#"{"do":"set-volume","name":"db"}"#).unwrap();
        assert_eq!(short, Ask::SetVolume { name: "db".to_owned(), edit: VolumeEdit::default() });
    }
}
