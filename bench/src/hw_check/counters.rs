//! Counters of a port and of its interface, before and after.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rblk_operate::sysfs::{names_in, rdma_class, text};

use crate::child;

/// How long ethtool may take.
const ETHTOOL: Duration = Duration::from_secs(10);

/// All counters by name.
pub(super) type Counters = BTreeMap<String, u64>;

/// Those of sysfs, and those of ethtool where it is installed.
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

/// Those of the text of `ethtool -S`.
fn of_ethtool(text: &str) -> Counters {
    let pairs = text.lines().filter_map(|line| {
        let (name, value) = line.trim().rsplit_once(": ")?;
        Some((name.trim().to_owned(), value.trim().parse().ok()?))
    });
    pairs.collect()
}

/// What went up, and by how much. `lifespan` is a setting.
pub(super) fn changed(before: &Counters, after: &Counters) -> Vec<(String, u64)> {
    let went_up = after.iter().filter_map(|(name, value)| {
        let by = value.checked_sub(*before.get(name)?)?;
        (by > 0 && name != "lifespan").then(|| (name.clone(), by))
    });
    went_up.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let class = dir.path().join("sys/class/infiniband/mlx5_0/ports/1");
        let put = |file: &str, value: &str| {
            let file = class.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, value).unwrap();
        };
        put("hw_counters/out_of_sequence", "3\n");
        put("hw_counters/lifespan", "10\n");
        put("counters/port_xmit_data", "N/A (no PMA)\n");
        let before = read(dir.path(), "mlx5_0", 1, "");
        assert_eq!(before.len(), 2);
        put("hw_counters/out_of_sequence", "5\n");
        put("hw_counters/lifespan", "12\n");
        put("hw_counters/appeared", "7\n");
        let after = read(dir.path(), "mlx5_0", 1, "");
        assert_eq!(changed(&before, &after), [("out_of_sequence".to_owned(), 2)]);
        // One that was reset meanwhile.
        assert!(changed(&after, &before).is_empty());
    }

    #[test]
    fn ethtool_is_understood() {
        let text = "NIC statistics:\n     rx_prio3_pause: 12\n     [0]: rx_bytes: 7\n  x: y\n";
        let all = of_ethtool(text);
        assert_eq!(all.get("rx_prio3_pause"), Some(&12));
        assert_eq!(all.get("[0]: rx_bytes"), Some(&7));
        assert_eq!(all.len(), 2);
    }
}
