//! Counters of a port and of its interface, before and after.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rblk_operate::sysfs::{names_in, rdma_class, text};

use crate::child;

const ETHTOOL: Duration = Duration::from_secs(10);

pub(super) type Counters = BTreeMap<String, u64>;

/// All of sysfs, and of ethtool where it is installed.
pub(super) fn read(root: &Path, device: &str, port: u8, interface: &str) -> Counters {
    let mut all = Counters::new();
    let class = rdma_class(root).join(device);
    let port = class.join("ports").join(port.to_string());
    for dir in [class.join("hw_counters"), port.join("hw_counters"), port.join("counters")] {
        for name in names_in(&dir) {
            if let Ok(value) = text(&dir.join(&name)).parse() {
                all.insert(name, value);
            }
        }
    }
    if !interface.is_empty() && child::is_installed("ethtool") {
        let said = child::output(Command::new("ethtool").args(["-S", interface]), ETHTOOL);
        all.extend(of_ethtool(&said.unwrap_or_default()));
    }
    all
}

fn of_ethtool(text: &str) -> Counters {
    let pairs = text.lines().filter_map(|line| {
        let (name, value) = line.trim().rsplit_once(": ")?;
        Some((name.trim().to_owned(), value.trim().parse().ok()?))
    });
    pairs.collect()
}

/// The counters that went up, and by how much. `lifespan` is a setting.
pub(super) fn changed(before: &Counters, after: &Counters) -> Vec<(String, u64)> {
    let went_up = after.iter().filter_map(|(name, value)| {
        let by = value.checked_sub(*before.get(name)?)?;
        (by > 0 && name != "lifespan").then(|| (name.clone(), by))
    });
    went_up.collect()
}

#[cfg(test)]
mod tests;
