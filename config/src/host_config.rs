//! [`HostConfig`]: one host that may connect to a target, and its rights there.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use rblk_protocol::auth::PublicKey;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::Fault;
use crate::schema::flag_layer::Flagged;
use crate::schema::key_table::key_table;
use crate::schema::rule::{Key, Schema};
use crate::schema::rule::{Rule, join};
use crate::schema::text_rules::{NAME, check_name};
use crate::setting::rate_limits::{LIMIT_KEYS, Limits};
use crate::units::ByteSize;

/// Most keys of a host, and of a target as a mount knows it: the one in use and the next one.
pub const KEYS_MAX: usize = 2;

/// Most names of volumes in a message.
const NAMES_SHOWN: usize = 8;

/// Most volumes of one host.
const VOLUMES_MAX: usize = 4096;

/// Least memory that a host may be limited to: one connection with small queues.
const MEMORY_MIN: u64 = 1 << 20;

/// Most memory that a host may be limited to.
const MEMORY_MAX: u64 = 1 << 40;

/// A public key.
pub(crate) const PUBLIC_KEY: Rule = Rule::Text {
    noun: "public key",
    form: "a public key such as `rblk-target key show` or `rblk-initiator key show` prints, \
           \"rblk1:\" and 58 letters and digits",
    check: check_key,
};

const RIGHT: Rule = Rule::Text {
    noun: "right",
    form: "a volume and what the host may do, such as \"vol0:rw\", \"logs:ro\" or \"*:rw\"",
    check: check_right,
};

key_table! {
    /// A host: a `[[host]]` table.
    #[extra(serde(deny_unknown_fields))]
    pub struct HostConfig in HOST_KEYS {
        /// Name by which the target shows the host and remembers what it holds. Keep the name when
        /// the key changes.
        pub name: String = String::new() => Key::new(NAME).required("\"db1\"").no_flag().live();
        /// Public keys that the host may prove, as `rblk-initiator key show` prints them there:
        /// one, or two while it changes its key. A key belongs to one host.
        #[serde(serialize_with = "write_keys", deserialize_with = "read_keys")]
        pub keys: Vec<PublicKey> = Vec::new()
            => Key::list(&PUBLIC_KEY, KEYS_MAX)
                .required("[\"rblk1:n4ja2ifhmaemcmpyur5k7rpesrcxf2h5xwdzd6wpggvre7d3kyu752zoua\"]")
                .no_flag().live();
        /// Volumes that the host may open: "VOLUME:rw", "VOLUME:ro" (read-only), "*:rw" or "*:ro"
        /// for every volume that is not named. The host sees no other volume.
        pub volumes: Vec<VolumeRight> = Vec::new()
            => Key::list(&RIGHT, VOLUMES_MAX).required("[\"vol0:rw\", \"nothing:ro\"]").no_flag().live();
        /// Whether the host may take a volume over from the host that holds it.
        pub take_over: bool = false => Key::new(Rule::Flag).live();
        /// Most connections of the host at once. Each mount has one for control, and one for each
        /// lane of each queue.
        pub connections_max: Option<u32> = None
            => Key::count(2, 65_536).absent("a quarter of those of the target", "64").live()
                .more("security.md#how-much-a-host-may-take");
        /// Most memory of the connections of the host.
        pub memory_max: Option<ByteSize> = None
            => Key::size(MEMORY_MIN, MEMORY_MAX, 4096)
                .absent("a quarter of the memory of the target, at least 512MiB", "\"128MiB\"").live()
                .more("security.md#how-much-a-host-may-take");
        /// The limits of all mounts of the host together.
        #[serde(flatten)]
        pub limits: Limits = Limits::default() => Key::new(Rule::Keys(&LIMIT_KEYS));
    }
}

/// The right of a host to a volume, or to every volume: `vol0:rw`, `*:ro`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct VolumeRight {
    volume: Option<String>,
    access: VolumeAccess,
}

/// How a host may open a volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum VolumeAccess {
    /// Only read-only.
    ReadOnly,
    /// In every way.
    ReadWrite,
}

/// Why a text is not a [`VolumeRight`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VolumeRightError {
    /// No access behind the name.
    #[error("no \":rw\" or \":ro\" behind the name of the volume")]
    NoAccess,
    /// Neither `rw` nor `ro`.
    #[error("{0:?} is neither \"rw\" nor \"ro\"")]
    Access(String),
    /// No name of a volume.
    #[error("{0}")]
    Volume(String),
}

impl HostConfig {
    /// A host with these keys and these rights.
    #[must_use]
    pub fn new(name: impl Into<String>, keys: Vec<PublicKey>, volumes: Vec<VolumeRight>) -> Self {
        Self { name: name.into(), keys, volumes, ..Self::default() }
    }

    /// The keys of a `[[host]]` table.
    #[must_use]
    pub fn keys() -> &'static Schema {
        &HOST_KEYS
    }

    /// The access of the host to a volume. The right of the volume's own name counts before that of
    /// `*`. `None`: the host must not learn that the volume exists.
    #[must_use]
    pub fn access(&self, volume: &str) -> Option<VolumeAccess> {
        let of = |name: Option<&str>| {
            let right = self.volumes.iter().find(|right| right.volume.as_deref() == name);
            right.map(|right| right.access)
        };
        of(Some(volume)).or_else(|| of(None))
    }

    /// Adds the faults of the rights, where there are these volumes. `path` is the path of the
    /// table.
    pub(crate) fn relate(&self, path: &str, volumes: &BTreeSet<&str>, faults: &mut Vec<Fault>) {
        for (index, right) in self.volumes.iter().enumerate() {
            let at = join(path, &format!("volumes[{index}]"));
            let same = |earlier: &VolumeRight| earlier.volume == right.volume;
            if let Some(first) = self.volumes[..index].iter().position(same) {
                let other = join(path, &format!("volumes[{first}]"));
                let problem = "the host has another right to the same volume";
                let fault = Fault::new(at, problem, "remove one of them");
                faults.push(fault.value(right.to_string()).other(other));
                continue;
            }
            let Some(volume) = right.volume().filter(|volume| !volumes.contains(volume)) else {
                continue;
            };
            let names: Vec<&str> = volumes.iter().copied().take(NAMES_SHOWN).collect();
            let fix = match names.is_empty() {
                true => "write its [[volume]], remove this right, or name every volume by \"*\""
                    .to_owned(),
                false => format!("the volumes are {}", names.join(", ")),
            };
            let problem = format!("there is no volume {volume:?}");
            let fault = Fault::new(at, problem, fix).value(right.to_string());
            faults.push(fault.rests_on(&["volume[].name"]));
        }
    }
}

/// Why a volume cannot go: hosts have a right to it by its name, which would be a right to nothing.
/// `None`: nothing is in its way.
#[must_use]
pub fn named_in_rights(hosts: &[HostConfig], volume: &str) -> Option<String> {
    let has = |host: &&HostConfig| host.volumes.iter().any(|right| right.volume() == Some(volume));
    let hosts: Vec<&str> =
        hosts.iter().filter(has).take(NAMES_SHOWN).map(|host| host.name.as_str()).collect();
    hosts.first().map(|first| {
        format!(
            "{volume} is named in the rights of {}: take that right away first \
             (`rblk-target host remove {first} --volume {volume}`)",
            hosts.join(", ")
        )
    })
}

impl VolumeRight {
    /// A right to one volume, or to every volume that the host has no right of its own to.
    #[must_use]
    pub fn new(volume: Option<String>, access: VolumeAccess) -> Self {
        Self { volume, access }
    }

    /// The volume; `None`: every one.
    #[must_use]
    pub fn volume(&self) -> Option<&str> {
        self.volume.as_deref()
    }

    /// How it may be opened.
    #[must_use]
    pub fn access(&self) -> VolumeAccess {
        self.access
    }
}

impl fmt::Display for VolumeRight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let access = match self.access {
            VolumeAccess::ReadOnly => "ro",
            VolumeAccess::ReadWrite => "rw",
        };
        f.pad(&format!("{}:{access}", self.volume.as_deref().unwrap_or("*")))
    }
}

impl FromStr for VolumeRight {
    type Err = VolumeRightError;

    fn from_str(text: &str) -> Result<Self, VolumeRightError> {
        let (volume, access) = text.split_once(':').ok_or(VolumeRightError::NoAccess)?;
        let access = match access {
            "ro" => VolumeAccess::ReadOnly,
            "rw" => VolumeAccess::ReadWrite,
            other => return Err(VolumeRightError::Access(other.to_owned())),
        };
        if volume == "*" {
            return Ok(Self { volume: None, access });
        }
        check_name(volume).map_err(VolumeRightError::Volume)?;
        Ok(Self { volume: Some(volume.to_owned()), access })
    }
}

impl Serialize for VolumeRight {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for VolumeRight {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl Flagged for HostConfig {
    fn schema() -> &'static Schema {
        &HOST_KEYS
    }
}

/// Writes keys as their texts.
pub(crate) fn write_keys<S: Serializer>(keys: &[PublicKey], s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(keys.iter().map(ToString::to_string))
}

/// Reads keys from their texts.
pub(crate) fn read_keys<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<PublicKey>, D::Error> {
    let texts = Vec::<String>::deserialize(d)?;
    texts.iter().map(|text| text.parse().map_err(de::Error::custom)).collect()
}

fn check_key(text: &str) -> Result<(), String> {
    text.parse::<PublicKey>().map(drop).map_err(|error| error.to_string())
}

fn check_right(text: &str) -> Result<(), String> {
    text.parse::<VolumeRight>().map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(volumes: &[&str]) -> HostConfig {
        let rights = volumes.iter().map(|text| text.parse().unwrap()).collect();
        HostConfig::new("db1", Vec::new(), rights)
    }

    #[test]
    fn the_right_of_a_name_counts_before_that_of_all() {
        use VolumeAccess::{ReadOnly, ReadWrite};
        let host = host(&["*:ro", "vol0:rw"]);
        assert_eq!(host.access("vol0"), Some(ReadWrite));
        assert_eq!(host.access("vol1"), Some(ReadOnly));
        assert_eq!(self::host(&["vol0:rw"]).access("vol1"), None);
        assert_eq!(self::host(&["vol0:ro", "*:rw"]).access("vol0"), Some(ReadOnly));
    }

    #[test]
    fn whose_rights_keep_a_volume_is_said() {
        let hosts = [host(&["vol0:rw", "*:ro"]), host(&["vol1:ro"])];
        assert_eq!(named_in_rights(&hosts, "vol2"), None, "a right to all is in nobody's way");
        let text = named_in_rights(&hosts, "vol1").unwrap();
        assert!(text.contains("rights of db1: ") && text.contains("host remove db1 --volume vol1"));
    }

    #[test]
    fn rights_are_texts() {
        for text in ["vol0:rw", "a.b-c_d:ro", "*:rw"] {
            assert_eq!(text.parse::<VolumeRight>().unwrap().to_string(), text);
        }
        for (text, error) in [
            ("vol0", "no \":rw\" or \":ro\" behind the name of the volume"),
            ("vol0:w", "\"w\" is neither \"rw\" nor \"ro\""),
            ("vol0:", "\"\" is neither \"rw\" nor \"ro\""),
            (":rw", "empty"),
            ("a b:rw", "' ' is not allowed in a name"),
            ("vol*:rw", "'*' is not allowed in a name"),
        ] {
            assert_eq!(text.parse::<VolumeRight>().unwrap_err().to_string(), error);
        }
    }
}
