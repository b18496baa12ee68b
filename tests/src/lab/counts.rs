//! Counters by name: those of the daemons, as their JSON has them, and those of the RDMA devices.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Counters at one moment, or the difference of two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts(BTreeMap<String, u64>);

impl Counts {
    /// The numbers of a JSON object.
    #[must_use]
    pub fn of(value: &serde_json::Value) -> Self {
        let pairs = value.as_object().into_iter().flatten();
        Self(pairs.filter_map(|(name, value)| Some((name.clone(), value.as_u64()?))).collect())
    }

    /// One counter.
    ///
    /// # Panics
    /// No counter has that name.
    #[must_use]
    pub fn get(&self, name: &str) -> u64 {
        *self.0.get(name).unwrap_or_else(|| panic!("no counter {name} among {:?}", self.0.keys()))
    }

    /// The increments since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let added = |(name, value): (&String, &u64)| {
            (name.clone(), value.wrapping_sub(before.0.get(name).copied().unwrap_or(0)))
        };
        Self(self.0.iter().map(added).collect())
    }

    /// Names and values of those that are not 0.
    pub fn nonzero(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().filter(|(_, value)| **value != 0).map(|(name, value)| (name.as_str(), *value))
    }
}

/// The RDMA devices that the kernel lists.
const DEVICES: &str = "/sys/class/infiniband";

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Counters of the RDMA devices themselves, all ports together: packets, retries and any others of
/// the driver.
#[must_use]
pub fn fabric_packets() -> Counts {
    packets_of(entries(Path::new(DEVICES)))
}

/// The same of one device of this host.
#[must_use]
pub fn device_packets(device: &str) -> Counts {
    packets_of([Path::new(DEVICES).join(device)])
}

fn packets_of(devices: impl IntoIterator<Item = PathBuf>) -> Counts {
    let mut counts = BTreeMap::new();
    for device in devices {
        let ports = entries(&device.join("ports"));
        let places = ports.map(|port| port.join("hw_counters")).chain([device.join("hw_counters")]);
        for file in places.flat_map(|dir| entries(&dir).collect::<Vec<_>>()) {
            let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
            let value =
                std::fs::read_to_string(&file).ok().and_then(|t| t.trim().parse::<u64>().ok());
            if name != "lifespan" {
                *counts.entry(name).or_default() += value.unwrap_or(0);
            }
        }
    }
    Counts(counts)
}
