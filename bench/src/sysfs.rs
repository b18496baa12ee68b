//! The kernel's files, the one place of the bench that reads sysfs: RDMA devices ([`Card`]), the
//! addresses of their GIDs ([`Gid`]), and the rights of this process ([`Host`]).
//!
//! All paths start at a directory, `/` on a real host. An unreadable value is absent.

use std::net::IpAddr;
use std::path::Path;

use nix::sys::resource::{Resource, getrlimit};
use rblk_operate::doctor::{
    Interface, RdmaDevice, RdmaPort, can_lock_memory, interfaces, rdma_devices,
};
use rblk_operate::sysfs::{names_in, rdma_class, text};

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Pcie {
    /// GT/s of a lane.
    pub(crate) speed: f64,
    pub(crate) max_speed: f64,
    pub(crate) width: u32,
    pub(crate) max_width: u32,
}

/// An RDMA device.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Card {
    pub(crate) driver: String,
    pub(crate) hca: String,
    pub(crate) board: String,
    pub(crate) firmware: String,
    /// `4: ACTIVE`.
    pub(crate) state: String,
    /// `100 Gb/sec (4X EDR)`.
    pub(crate) rate: String,
    pub(crate) link_layer: String,
    /// `RoCE v2`, `IB/RoCE v1`, or empty.
    pub(crate) gid_type: String,
    pub(crate) interface: String,
    pub(crate) interface_mtu: Option<u32>,
    pub(crate) pcie: Option<Pcie>,
    pub(crate) is_virtual: bool,
    /// `None` without a node, as of a device that no bus has.
    pub(crate) numa_node: Option<u32>,
    pub(crate) cpus: String,
    /// Default type of service of connections (configfs), where it is shown.
    pub(crate) tos: Option<u32>,
}

impl Card {
    /// Reads the device `name`, with its port and the index of its GID.
    pub(crate) fn read(root: &Path, name: &str, port: u8, gid: u32) -> Self {
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

    pub(crate) fn gigabits(&self) -> Option<f64> {
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

/// The rights and resources of this process.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Host {
    pub(crate) memlock: Option<(u64, u64)>,
    pub(crate) locks_beyond: bool,
    /// The line of the device in `rdma.max` of the cgroup: `hca_handle=max hca_object=2000`.
    pub(crate) cgroup: Option<String>,
    pub(crate) numa_nodes: usize,
    /// Bytes that programs can have without swapping.
    pub(crate) available: u64,
}

impl Host {
    pub(crate) fn read(root: &Path, name: &str) -> Self {
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
pub(crate) fn meminfo(root: &Path, field: &str) -> Option<u64> {
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

/// One GID that is an IP address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Gid {
    pub(crate) device: String,
    pub(crate) port: u32,
    pub(crate) index: u32,
    pub(crate) ip: IpAddr,
    /// Whether it is of RoCE v2, or has no index (iWARP).
    pub(crate) is_newest: bool,
    /// iWARP: the GID is not used.
    pub(crate) is_iwarp: bool,
}

/// All GIDs that are addresses of this host, by device, port and index; link-local ones are left
/// out.
pub(crate) fn gids() -> Vec<Gid> {
    let root = Path::new("/");
    gids_of(&rdma_devices(root), &interfaces(root))
}

pub(crate) fn gid_of(ip: IpAddr, all: &[Gid]) -> Option<&Gid> {
    let same = all.iter().filter(|gid| gid.ip == ip);
    same.clone().find(|gid| gid.is_newest).or_else(|| same.clone().next())
}

fn gids_of(devices: &[RdmaDevice], interfaces: &[Interface]) -> Vec<Gid> {
    let mut found = Vec::new();
    for RdmaDevice { name, is_iwarp, ports, .. } in devices {
        for RdmaPort { number, gids, interfaces: own, .. } in ports {
            let gid = |index, ip, is_newest| {
                let (device, port) = (name.clone(), u32::from(*number));
                Gid { device, port, index, ip, is_newest, is_iwarp: *is_iwarp }
            };
            if *is_iwarp {
                let own = interfaces.iter().filter(|interface| own.contains(&interface.name));
                let addresses = own.flat_map(|interface| &interface.subnets);
                found.extend(addresses.map(|subnet| gid(0, subnet.address, true)));
            } else {
                found.extend(gids.iter().map(|one| gid(one.index, one.address, one.is_v2)));
            }
        }
    }
    // The GIDs of InfiniBand without a subnet of their own are link-local, too.
    found.retain(|gid| match gid.ip {
        IpAddr::V4(ip) => !ip.is_unspecified(),
        IpAddr::V6(ip) => !ip.is_unspecified() && !ip.is_unicast_link_local(),
    });
    found.sort_by(|a, b| (&a.device, a.port, a.index).cmp(&(&b.device, b.port, b.index)));
    found
}

#[cfg(test)]
mod tests;
