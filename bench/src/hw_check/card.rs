//! [`Card`] and [`Host`]: what the kernel's files say of a device and of what this process may use.
//!
//! Everything is read below a directory, `/` on a real host. What cannot be read is absent.

use std::path::Path;

use nix::sys::resource::{Resource, getrlimit};
use rblk_operate::doctor::can_lock_memory;
use rblk_operate::sysfs::{names_in, rdma_class, text};

/// The link of a PCIe device.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Pcie {
    /// GT/s of a lane, now and at most.
    pub(super) speed: f64,
    pub(super) max_speed: f64,
    /// Lanes, now and at most.
    pub(super) width: u32,
    pub(super) max_width: u32,
}

/// A device as sysfs shows it.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Card {
    pub(super) driver: String,
    /// Name of the type, of the board, of the firmware.
    pub(super) hca: String,
    pub(super) board: String,
    pub(super) firmware: String,
    /// `4: ACTIVE`.
    pub(super) state: String,
    /// `100 Gb/sec (4X EDR)`.
    pub(super) rate: String,
    pub(super) link_layer: String,
    /// `RoCE v2`, `IB/RoCE v1`, or empty.
    pub(super) gid_type: String,
    pub(super) interface: String,
    pub(super) interface_mtu: Option<u32>,
    pub(super) pcie: Option<Pcie>,
    /// Whether it is a virtual function.
    pub(super) is_virtual: bool,
    /// `None` without a node, as of a device that no bus has.
    pub(super) numa_node: Option<u32>,
    /// CPUs near the device.
    pub(super) cpus: String,
    /// Default type of service of connections (configfs), where it is shown.
    pub(super) tos: Option<u32>,
}

impl Card {
    /// Of the device `name`, its port, and the index of the GID that is used.
    pub(super) fn read(root: &Path, name: &str, port: u8, gid: u32) -> Self {
        let class = rdma_class(root).join(name);
        let (device, port_dir) = (class.join("device"), class.join("ports").join(port.to_string()));
        let attributes = port_dir.join("gid_attrs");
        let mut interface = text(&attributes.join("ndevs").join(gid.to_string()));
        if interface.is_empty() {
            interface = text(&class.join("parent"));
        }
        let net = root.join("sys/class/net").join(&interface);
        let driver = std::fs::read_link(device.join("driver")).ok();
        let driver = driver.and_then(|link| Some(link.file_name()?.to_str()?.to_owned()));
        let tos = root.join("sys/kernel/config/rdma_cm").join(name);
        let tos = tos.join("ports").join(port.to_string()).join("default_roce_tos");
        Self {
            driver: driver.unwrap_or_default(),
            hca: text(&class.join("hca_type")),
            board: text(&class.join("board_id")),
            firmware: text(&class.join("fw_ver")),
            state: text(&port_dir.join("state")),
            rate: text(&port_dir.join("rate")),
            link_layer: text(&port_dir.join("link_layer")),
            gid_type: text(&attributes.join("types").join(gid.to_string())),
            interface_mtu: (!interface.is_empty()).then(|| number(&net.join("mtu"))).flatten(),
            interface,
            pcie: pcie(&device),
            is_virtual: device.join("physfn").exists(),
            // -1 without one.
            numa_node: number(&device.join("numa_node")),
            cpus: text(&device.join("local_cpulist")),
            tos: number(&tos),
        }
    }

    /// Gigabits per second, of the rate.
    pub(super) fn gigabits(&self) -> Option<f64> {
        self.rate.split_whitespace().next()?.parse().ok()
    }
}

fn pcie(device: &Path) -> Option<Pcie> {
    // `16.0 GT/s PCIe`
    let speed = |file| text(&device.join(file)).split_whitespace().next()?.parse().ok();
    Some(Pcie {
        speed: speed("current_link_speed")?,
        max_speed: speed("max_link_speed")?,
        width: number(&device.join("current_link_width"))?,
        max_width: number(&device.join("max_link_width"))?,
    })
}

/// What this process may use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Host {
    /// Soft and hard limit of locked memory.
    pub(super) memlock: Option<(u64, u64)>,
    /// Whether it may lock more than that.
    pub(super) locks_beyond: bool,
    /// The line of the device in `rdma.max` of the cgroup: `hca_handle=max hca_object=2000`.
    pub(super) cgroup: Option<String>,
    pub(super) numa_nodes: usize,
    /// Bytes that programs can have without swapping.
    pub(super) available: u64,
}

impl Host {
    /// Of this process, for the device `name`.
    pub(super) fn read(root: &Path, name: &str) -> Self {
        Self {
            memlock: getrlimit(Resource::RLIMIT_MEMLOCK).ok(),
            locks_beyond: can_lock_memory(root),
            cgroup: cgroup_line(root, name),
            numa_nodes: names_in(&root.join("sys/devices/system/node"))
                .iter()
                .filter(|node| node.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok()))
                .count(),
            available: meminfo(root, "MemAvailable:").unwrap_or(0),
        }
    }
}

/// Bytes of a line of `/proc/meminfo`.
pub(super) fn meminfo(root: &Path, field: &str) -> Option<u64> {
    let all = text(&root.join("proc/meminfo"));
    let value = all.lines().find_map(|line| line.strip_prefix(field))?;
    value.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// The lowest cgroup with a line for the device, of this process and those above it.
fn cgroup_line(root: &Path, name: &str) -> Option<String> {
    let own = text(&root.join("proc/self/cgroup"));
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
    let top = root.join("sys/fs/cgroup");
    let mut at = top.join(path);
    loop {
        let all = text(&at.join("rdma.max"));
        let line = all.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        // Without a limit it says `max` of both.
        if let Some(line) = line.filter(|line| line.split(' ').any(|word| !word.ends_with("=max")))
        {
            return Some(line.to_owned());
        }
        if at == top || !at.pop() {
            return None;
        }
    }
}

fn number(file: &Path) -> Option<u32> {
    text(file).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let class = "sys/class/infiniband/mlx5_0";
        for (file, text) in [
            ("hca_type", "MT4123"),
            ("board_id", "MT_0000000223"),
            ("fw_ver", "20.35.1012"),
            ("ports/1/state", "4: ACTIVE"),
            ("ports/1/rate", "100 Gb/sec (4X EDR)"),
            ("ports/1/link_layer", "Ethernet"),
            ("ports/1/gid_attrs/types/3", "RoCE v2"),
            ("ports/1/gid_attrs/ndevs/3", "ens1f0"),
            ("device/current_link_speed", "8.0 GT/s PCIe"),
            ("device/max_link_speed", "16.0 GT/s PCIe"),
            ("device/current_link_width", "8"),
            ("device/max_link_width", "16"),
            ("device/numa_node", "1"),
            ("device/local_cpulist", "16-31"),
            ("device/physfn/vendor", "0x15b3"),
        ] {
            let file = dir.path().join(class).join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, format!("{text}\n")).unwrap();
        }
        let net = dir.path().join("sys/class/net/ens1f0");
        std::fs::create_dir_all(&net).unwrap();
        std::fs::write(net.join("mtu"), "1500\n").unwrap();
        let card = Card::read(dir.path(), "mlx5_0", 1, 3);
        let pcie = Pcie { speed: 8.0, max_speed: 16.0, width: 8, max_width: 16 };
        assert_eq!(card.pcie, Some(pcie));
        assert_eq!((card.numa_node, card.cpus.as_str()), (Some(1), "16-31"));
        assert_eq!((card.interface.as_str(), card.interface_mtu), ("ens1f0", Some(1500)));
        assert_eq!((card.gid_type.as_str(), card.gigabits()), ("RoCE v2", Some(100.0)));
        assert!(card.is_virtual);
        // Of a software device most is absent.
        assert_eq!(Card::read(dir.path(), "rxe0", 1, 0), Card::default());
    }

    #[test]
    fn the_limit_of_the_lowest_cgroup_counts() {
        let dir = tempfile::tempdir().unwrap();
        let put = |file: &str, text: &str| {
            let file = dir.path().join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        };
        put("proc/self/cgroup", "0::/system.slice/rblk-target.service\n");
        let top = "sys/fs/cgroup/system.slice";
        put(&format!("{top}/rdma.max"), "mlx5_0 hca_handle=9 hca_object=max\n");
        assert_eq!(cgroup_line(dir.path(), "mlx5_0").unwrap(), "hca_handle=9 hca_object=max");
        put(&format!("{top}/rblk-target.service/rdma.max"), "mlx5_0 hca_handle=2 hca_object=40\n");
        assert_eq!(cgroup_line(dir.path(), "mlx5_0").unwrap(), "hca_handle=2 hca_object=40");
        let free = "mlx5_0 hca_handle=max hca_object=max\n";
        put(&format!("{top}/rblk-target.service/rdma.max"), free);
        put(&format!("{top}/rdma.max"), free);
        assert_eq!(cgroup_line(dir.path(), "mlx5_0"), None);
        assert_eq!(cgroup_line(dir.path(), "mlx5_"), None);
        put("proc/meminfo", "MemTotal:  8 kB\nMemAvailable:   4 kB\n");
        assert_eq!(meminfo(dir.path(), "MemAvailable:"), Some(4096));
    }
}
