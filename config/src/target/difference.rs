//! [`Difference`]: the steps that bring a running target from one configuration to another. Pure.

use std::fmt;

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::error::ConfigError;
use crate::target::TargetConfig;
use crate::volume::VolumeConfig;

/// One key that has another value.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeyChange {
    /// The key.
    pub key: String,
    /// Its value now, as it stands in a file; none if the key is absent.
    pub from: Option<String>,
    /// Its new value.
    pub to: Option<String>,
}

/// A volume that is not the same.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "change")]
pub enum VolumeDifference {
    /// The volume is new.
    Add {
        /// The volume.
        volume: VolumeConfig,
    },
    /// The volume is gone.
    Remove {
        /// Its name.
        name: String,
    },
    /// Some of its keys have other values.
    Alter {
        /// The volume as it is to be.
        volume: VolumeConfig,
        /// The keys.
        keys: Vec<KeyChange>,
    },
}

/// The difference between two configurations of one target.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Difference {
    /// Volumes, in the order of the new configuration, the removed ones first.
    pub volumes: Vec<VolumeDifference>,
    /// Names of hosts that are new, gone or changed.
    pub hosts: Vec<String>,
    /// Other keys. They need a restart.
    pub restart: Vec<KeyChange>,
}

impl VolumeDifference {
    /// The name of the volume.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Add { volume } | Self::Alter { volume, .. } => &volume.name,
            Self::Remove { name } => name,
        }
    }

    /// Whether it takes something from the hosts of the volume: it becomes read-only.
    #[must_use]
    pub fn narrows(&self) -> bool {
        let Self::Alter { volume, keys } = self else { return false };
        volume.read_only && keys.iter().any(|change| change.key == "read_only")
    }

    /// The first key that cannot change while the target runs.
    #[must_use]
    pub fn fixed(&self) -> Option<&KeyChange> {
        let Self::Alter { keys, .. } = self else { return None };
        let is_live =
            |change: &&KeyChange| VolumeConfig::keys().key(&change.key).is_some_and(|key| key.live);
        keys.iter().find(|change| !is_live(change))
    }
}

impl Difference {
    /// The changes from one configuration to the other.
    ///
    /// # Errors
    /// [`ConfigError::Dump`] if a path is not UTF-8.
    pub fn between(from: &TargetConfig, to: &TargetConfig) -> Result<Self, ConfigError> {
        let gone = |volume: &&VolumeConfig| named(&to.volumes, &volume.name).is_none();
        let removed = from.volumes.iter().filter(gone);
        let mut volumes: Vec<VolumeDifference> =
            removed.map(|volume| VolumeDifference::Remove { name: volume.name.clone() }).collect();
        for volume in &to.volumes {
            match named(&from.volumes, &volume.name) {
                None => volumes.push(VolumeDifference::Add { volume: volume.clone() }),
                Some(old) => {
                    let keys = key_changes(&table(old)?, &table(volume)?);
                    if !keys.is_empty() {
                        volumes.push(VolumeDifference::Alter { volume: volume.clone(), keys });
                    }
                }
            }
        }
        let lists = |config: &TargetConfig| {
            let others = TargetConfig { volumes: Vec::new(), hosts: Vec::new(), ..config.clone() };
            table(&others)
        };
        Ok(Self {
            volumes,
            hosts: hosts(from, to),
            restart: key_changes(&lists(from)?, &lists(to)?),
        })
    }

    /// Whether nothing is different.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.volumes.is_empty() && self.hosts.is_empty() && self.restart.is_empty()
    }
}

fn named<'v>(volumes: &'v [VolumeConfig], name: &str) -> Option<&'v VolumeConfig> {
    volumes.iter().find(|volume| volume.name == name)
}

/// Names of hosts that one of the configurations lacks, or says something else about.
fn hosts(from: &TargetConfig, to: &TargetConfig) -> Vec<String> {
    let differs = |host: &&crate::HostConfig| !from.hosts.contains(host);
    let mut names: Vec<String> =
        to.hosts.iter().filter(differs).map(|host| host.name.clone()).collect();
    let is_gone = |host: &&crate::HostConfig| !to.hosts.iter().any(|other| other.name == host.name);
    names.extend(from.hosts.iter().filter(is_gone).map(|host| host.name.clone()));
    names
}

fn table<T: Serialize>(value: &T) -> Result<Table, ConfigError> {
    Table::try_from(value).map_err(|error| ConfigError::Dump(error.to_string()))
}

fn key_changes(from: &Table, to: &Table) -> Vec<KeyChange> {
    let mut keys: Vec<&String> = from.keys().chain(to.keys()).collect();
    keys.sort();
    keys.dedup();
    let text = |value: Option<&Value>| value.map(ToString::to_string);
    let change = |key: &String| KeyChange {
        key: key.clone(),
        from: text(from.get(key)),
        to: text(to.get(key)),
    };
    let differs = |key: &&String| from.get(*key) != to.get(*key);
    keys.into_iter().filter(differs).map(change).collect()
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "(absent)".to_owned());
        write!(f, "{}: {} -> {}", self.key, text(&self.from), text(&self.to))
    }
}

impl fmt::Display for VolumeDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Add { volume } => write!(f, "add volume {}", volume.name),
            Self::Remove { name } => write!(f, "remove volume {name}"),
            Self::Alter { volume, keys } => {
                let keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
                write!(f, "change volume {}: {}", volume.name, keys.join(", "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ByteSize, HostConfig, VolumeAccess, VolumeRight};

    fn config(text: &str) -> TargetConfig {
        TargetConfig::parse(&format!("listen = ['tcp://127.0.0.1']\n{text}"), "t.toml").unwrap()
    }

    #[test]
    fn volumes_hosts_and_other_keys_are_told_apart() {
        let a = "[[volume]]\nname = 'a'\nstore = 'memory'\nsize = '1MiB'\n";
        let b = "[[volume]]\nname = 'b'\nstore = 'memory'\nsize = '1MiB'\n";
        let from = config(&format!("{a}{b}"));
        assert!(Difference::between(&from, &from.clone()).unwrap().is_empty());
        let c = "[[volume]]\nname = 'c'\nstore = 'null'\nsize = '4KiB'\n";
        let mut to = config(&format!("lease = '1m'\n{c}{}", b.replace("1M", "2M")));
        let right = VolumeRight::new(None, VolumeAccess::ReadOnly);
        to.hosts.push(HostConfig::new("db1", Vec::new(), vec![right]));
        let difference = Difference::between(&from, &to).unwrap();
        let volumes: Vec<String> = difference.volumes.iter().map(ToString::to_string).collect();
        assert_eq!(
            volumes,
            ["remove volume a", "add volume c", "change volume b: size: \"1MiB\" -> \"2MiB\""]
        );
        assert_eq!(difference.hosts, ["db1"]);
        let keys: Vec<String> = difference.restart.iter().map(ToString::to_string).collect();
        assert_eq!(keys, ["lease: \"30s\" -> \"1m\""]);
        let back = Difference::between(&to, &from).unwrap();
        assert_eq!(back.hosts, ["db1"], "it is gone");
    }

    #[test]
    fn a_store_stays_what_it_is() {
        let mut from = config("");
        from.volumes.push(VolumeConfig::file("a", "/srv/a"));
        let mut to = from.clone();
        to.volumes[0].read_only = true;
        let change = |to: &TargetConfig| Difference::between(&from, to).unwrap().volumes.remove(0);
        assert_eq!(change(&to).fixed(), None);
        to.volumes[0].path = Some("/srv/b".into());
        assert_eq!(change(&to).fixed().unwrap().key, "path");
        let mut other = from.clone();
        other.volumes[0] = VolumeConfig::memory("a", ByteSize(4096));
        assert!(change(&other).fixed().is_some());
    }
}
