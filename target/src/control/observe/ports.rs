//! The ports of RDMA devices and the network interfaces, as sysfs shows them. For people only: no
//! decision depends on them.

use std::collections::HashMap;
use std::path::Path;

use rblk_operate::doctor::{PortState, interfaces, rdma_devices};

use rblk_operate::target::status::{OVER_TCP, PortStatus};

/// Interfaces that are shown: a host of containers has thousands.
const INTERFACES_MAX: usize = 16;

/// The ports of every RDMA device of sysfs below `root`, by its name; for TCP, the interfaces that
/// have addresses.
pub(in crate::control) fn all(root: &Path) -> HashMap<String, Vec<PortStatus>> {
    let mut all: HashMap<String, Vec<PortStatus>> = HashMap::new();
    for device in rdma_devices(root) {
        let ports = device.ports.into_iter().map(|port| PortStatus {
            name: port.number.to_string(),
            state: word(port.state).to_owned(),
            rate: port.rate,
            interfaces: port.interfaces,
        });
        all.insert(device.name, ports.collect());
    }
    let shown = interfaces(root);
    let shown = shown.into_iter().filter(|one| !one.is_loopback() && !one.subnets.is_empty());
    let interface = |one: rblk_operate::doctor::Interface| PortStatus {
        state: if one.up { "active" } else { "down" }.to_owned(),
        name: one.name,
        ..PortStatus::default()
    };
    all.insert(OVER_TCP.to_owned(), shown.take(INTERFACES_MAX).map(interface).collect());
    all
}

fn word(state: PortState) -> &'static str {
    match state {
        PortState::Down => "down",
        PortState::Init => "init",
        PortState::Active => "active",
        PortState::Other => "other",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn ports_are_read_from_sysfs() {
        let root = tempfile::tempdir().unwrap();
        let port = root.path().join("sys/class/infiniband/mlx5_0/ports/1");
        fs::create_dir_all(&port).unwrap();
        fs::write(port.join("state"), "1: DOWN\n").unwrap();
        fs::write(port.join("rate"), "100 Gb/sec (4X EDR)\n").unwrap();
        fs::write(port.join("link_layer"), "Ethernet\n").unwrap();
        let ports = all(root.path());
        let found = &ports["mlx5_0"][0];
        assert_eq!((found.name.as_str(), found.state.as_str()), ("1", "down"));
        assert!(found.rate.contains("100 Gb/sec") && !found.is_up(), "{found:?}");
        fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
        assert!(all(root.path())["mlx5_0"][0].is_up());
    }
}
