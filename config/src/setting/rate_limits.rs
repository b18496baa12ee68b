//! [`Limits`]: how much of its commands and bytes a volume or a host may have per second;
//! [`ByteRate`]: bytes per second as people write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::Fault;
use crate::schema::flag_layer::Flagged;
use crate::schema::key_table::key_table;
use crate::schema::rule::{Key, Schema};
use crate::schema::rule::{Rule, join};
use crate::units::{ByteSize, ByteSizeError};

/// Fewest commands per second. With less, a full queue of a host takes minutes.
const IOPS_MIN: u32 = 10;
/// Most commands per second.
const IOPS_MAX: u32 = 100_000_000;
/// Fewest bytes per second: one command of the usual largest size.
const BANDWIDTH_MIN: u64 = 1 << 20;
/// Most bytes per second.
const BANDWIDTH_MAX: u64 = 1 << 40;
/// Most bytes at once.
const BURST_MAX: u64 = 1 << 40;
/// The default burst is the rate of one part of a second: a tenth.
const BURST_PARTS: u32 = 10;
/// Least default burst of `bandwidth`.
const BANDWIDTH_BURST_MIN: u64 = 1 << 20;

const RATE: Rule = Rule::Text {
    noun: "size/s",
    form: "bytes per second from \"1MiB/s\" to \"1TiB/s\", such as \"200MiB/s\"",
    check: check_rate,
};

/// A number of bytes per second: `"200MiB/s"`, or without the `/s`.
///
/// ```
/// use rblk_config::ByteRate;
///
/// assert_eq!("200MiB/s".parse(), Ok(ByteRate(200 << 20)));
/// assert_eq!("200MiB".parse(), Ok(ByteRate(200 << 20)));
/// assert_eq!(ByteRate(200 << 20).to_string(), "200MiB/s");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ByteRate(pub u64);

impl FromStr for ByteRate {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let text = text.trim();
        text.strip_suffix("/s").unwrap_or(text).parse().map(|ByteSize(bytes)| Self(bytes))
    }
}

impl fmt::Display for ByteRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}/s", ByteSize(self.0)))
    }
}

impl Serialize for ByteRate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

key_table! {
    /// The limits of a volume or of a host. They stand beside the other keys of its table.
    #[extra(derive(Copy))]
    pub struct Limits in LIMIT_KEYS {
        /// Most commands per second: reads, writes, discards and zeroing. Those of a host count for
        /// all its mounts together. Commands above a limit wait at the target.
        pub iops: Option<u32> = None
            => Key::count(IOPS_MIN, IOPS_MAX).absent("no limit", "20000").live()
                .more("change.md#limit-a-volume-or-a-host");
        /// Most bytes per second of reads and writes, from 1MiB/s to 1TiB/s, such as 200MiB/s.
        pub bandwidth: Option<ByteRate> = None
            => Key::new(RATE).absent("no limit", "\"500MiB/s\"").live();
        /// Most commands at once after a pause. Needs `iops`.
        pub iops_burst: Option<u32> = None
            => Key::count(1, IOPS_MAX).absent("those of a tenth of a second", "2000").live();
        /// Most bytes at once after a pause, at least `max_io`. Needs `bandwidth`.
        pub bandwidth_burst: Option<ByteSize> = None
            => Key::size(4096, BURST_MAX, 1)
                .absent("those of a tenth of a second, at least 1MiB", "\"64MiB\"").live();
    }
}

impl Limits {
    /// The keys.
    #[must_use]
    pub fn keys() -> &'static Schema {
        &LIMIT_KEYS
    }

    /// Whether nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.iops.is_none() && self.bandwidth.is_none()
    }

    /// Commands per second and at once, where they are limited. Without a given burst, the burst is
    /// the rate of a tenth of a second.
    #[must_use]
    pub fn commands(&self) -> Option<(u64, u64)> {
        let iops = self.iops?;
        let burst = self.iops_burst.unwrap_or((iops / BURST_PARTS).max(1));
        Some((iops.into(), burst.into()))
    }

    /// Bytes per second and at once, where they are limited. Without a given burst, the burst is
    /// the rate of a tenth of a second, in whole 4 KiB, and at least 1 MiB.
    #[must_use]
    pub fn bytes(&self) -> Option<(u64, u64)> {
        let ByteRate(rate) = self.bandwidth?;
        let tenth = rate / u64::from(BURST_PARTS) / 4096 * 4096;
        let tenth = tenth.max(BANDWIDTH_BURST_MIN);
        Some((rate, self.bandwidth_burst.map_or(tenth, |burst| burst.0)))
    }

    /// Adds the faults between the keys. `path` is the path of the table.
    pub(crate) fn relate(&self, path: &str, max_io: ByteSize, faults: &mut Vec<Fault>) {
        let mut add = |key: &str, value: String, problem: String, fix: &str| {
            let mut fault = Fault::new(join(path, key), problem, fix).value(value);
            fault.rests_beside = true;
            faults.push(fault.rests_on(&["max_io"]));
        };
        if let (None, Some(burst)) = (self.iops, self.iops_burst) {
            let problem = "without iops there is nothing to exceed".to_owned();
            add("iops_burst", burst.to_string(), problem, "write iops, or remove iops_burst");
        }
        let Some(burst) = self.bandwidth_burst else { return };
        if self.bandwidth.is_none() {
            let problem = "without bandwidth there is nothing to exceed".to_owned();
            let fix = "write bandwidth, or remove bandwidth_burst";
            add("bandwidth_burst", burst.to_string(), problem, fix);
        } else if burst < max_io {
            let problem = format!("less than max_io = \"{max_io}\", the largest command");
            let fix = format!("raise bandwidth_burst to \"{max_io}\", or remove it");
            add("bandwidth_burst", burst.to_string(), problem, &fix);
        }
    }
}

impl Flagged for Limits {
    fn schema() -> &'static Schema {
        &LIMIT_KEYS
    }
}

/// For people: `2000 IOPS (burst 200), 200MiB/s (burst 20MiB)`, or `none`.
impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let commands = self.commands().map(|(iops, burst)| format!("{iops} IOPS (burst {burst})"));
        let bytes = self.bytes();
        let bytes =
            bytes.map(|(rate, burst)| format!("{} (burst {})", ByteRate(rate), ByteSize(burst)));
        let parts: Vec<String> = commands.into_iter().chain(bytes).collect();
        f.pad(&if parts.is_empty() { "none".to_owned() } else { parts.join(", ") })
    }
}

fn check_rate(text: &str) -> Result<(), String> {
    let rate: ByteRate = text.parse().map_err(|error: ByteSizeError| error.to_string())?;
    match rate.0 {
        ..BANDWIDTH_MIN => Err(format!("less than {}", ByteRate(BANDWIDTH_MIN))),
        BANDWIDTH_MIN..=BANDWIDTH_MAX => Ok(()),
        _ => Err(format!("more than {}", ByteRate(BANDWIDTH_MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TargetConfig;

    fn volume(keys: &str) -> Result<Limits, String> {
        let text = format!(
            "listen = ['tcp://127.0.0.1']\n[[volume]]\nname = 'a'\nstore = 'null'\nsize = '1MiB'\n{keys}"
        );
        match TargetConfig::parse(&text, "t.toml") {
            Ok(config) => {
                let again = TargetConfig::parse(&config.dump().unwrap(), "t.toml").unwrap();
                assert_eq!(again.volumes, config.volumes, "a dump loads to the same");
                Ok(config.volumes[0].limits)
            }
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn limits_have_bursts_also_where_none_is_given() {
        assert!(volume("").unwrap().is_none());
        let limits = volume("iops = 2000\nbandwidth = '200MiB/s'\n").unwrap();
        assert_eq!(limits.commands(), Some((2000, 200)));
        assert_eq!(limits.bytes(), Some((200 << 20, 20 << 20)));
        assert_eq!(limits.to_string(), "2000 IOPS (burst 200), 200MiB/s (burst 20MiB)");
        let limits = volume("iops = 10\niops_burst = 7\nbandwidth = '2MiB'\n").unwrap();
        assert_eq!((limits.commands(), limits.bytes()), (Some((10, 7)), Some((2 << 20, 1 << 20))));
    }

    #[test]
    fn limits_that_cannot_be_are_refused_with_their_fix() {
        for (keys, words) in [
            ("iops = 0\n", "from 10 to"),
            ("iops = 5000000000\n", "from 10 to"),
            ("bandwidth = '0'\n", "less than 1MiB/s"),
            ("bandwidth = '20EiB/s'\n", "more than 16EiB"),
            ("bandwidth = 7\n", "a number, not a string"),
            ("bandwidth = '10MiB/h'\n", "unknown unit"),
            ("iops_burst = 9\n", "write iops, or remove iops_burst"),
            ("bandwidth_burst = '4MiB'\n", "write bandwidth, or remove"),
            (
                "bandwidth = '9MiB/s'\nbandwidth_burst = '512KiB'\n",
                "raise bandwidth_burst to \"1MiB\"",
            ),
        ] {
            let error = volume(keys).unwrap_err();
            assert!(error.contains(words), "{keys}: {error}");
        }
    }
}
