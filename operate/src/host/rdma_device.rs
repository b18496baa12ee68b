//! [`RdmaDevice`]: an RDMA device as sysfs shows it, without libibverbs.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use super::cpu_list::CpuList;
use super::interface::{Interface, from_sysfs};
use super::sysfs::{names_in, rdma_class, text};

/// State of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortState {
    /// The port has no link.
    Down,
    /// The port has a link, and no subnet manager has configured it.
    Init,
    /// The port works.
    Active,
    /// Another state, or none that can be read.
    Other,
}

impl PortState {
    fn parse(text: &str) -> Self {
        match text.split(':').next().unwrap_or_default().trim() {
            "1" => Self::Down,
            "2" | "3" => Self::Init,
            "4" => Self::Active,
            _ => Self::Other,
        }
    }
}

/// An address of a port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gid {
    /// Its index in the table of the port.
    pub index: u32,
    /// The IP address of RoCE: IPv4 stands as IPv4.
    pub address: IpAddr,
    /// Whether it is one of RoCE v2.
    pub is_v2: bool,
}

/// A port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RdmaPort {
    /// Its number.
    pub number: u8,
    /// Whether it works.
    pub state: PortState,
    /// Whether its link is InfiniBand, not Ethernet.
    pub is_infiniband: bool,
    /// Its speed, in the words of the kernel: `100 Gb/sec`.
    pub rate: String,
    /// Its addresses.
    pub gids: Vec<Gid>,
    /// Its network interfaces.
    pub interfaces: Vec<String>,
}

/// An RDMA device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RdmaDevice {
    /// Its name.
    pub name: String,
    /// Whether it speaks iWARP.
    pub is_iwarp: bool,
    /// Whether a driver of the kernel plays it (rxe, siw).
    pub is_software: bool,
    /// Its ports.
    pub ports: Vec<RdmaPort>,
    /// The CPUs of its NUMA node. None where that cannot be read.
    pub near: CpuList,
}

impl RdmaDevice {
    /// Whether its GIDs are IP addresses (RoCE).
    pub(crate) fn has_ip_gids(&self) -> bool {
        !self.is_iwarp && self.ports.iter().any(|port| !port.is_infiniband)
    }
}

/// The RDMA devices of sysfs below `root`, by name.
#[must_use]
pub fn rdma_devices(root: &Path) -> Vec<RdmaDevice> {
    let class = rdma_class(root);
    let macs: Vec<Interface> = from_sysfs(root);
    let device = |name: String| {
        let path = class.join(&name);
        let is_iwarp = text(&path.join("node_type")).starts_with('4');
        // A card is a device on some bus.
        let is_software = !path.join("device").exists();
        let ports = names_in(&path.join("ports"));
        let ports = ports.iter().filter_map(|number| port(&path, number, is_iwarp, &macs));
        let near = CpuList::read(&path.join("device/local_cpulist"));
        RdmaDevice { is_iwarp, is_software, ports: ports.collect(), near, name }
    };
    names_in(&class).into_iter().map(device).collect()
}

/// The CPUs of the NUMA node of a device of this host. None for a software device, which is on no
/// node.
#[must_use]
pub fn near_cpus(device: &str) -> CpuList {
    CpuList::read(&rdma_class(Path::new("/")).join(device).join("device/local_cpulist"))
}

fn port(device: &Path, number: &str, is_iwarp: bool, all: &[Interface]) -> Option<RdmaPort> {
    let path = device.join("ports").join(number);
    let (attributes, gids) = (path.join("gid_attrs"), path.join("gids"));
    let mut found = Vec::new();
    let mut interfaces: Vec<String> = Vec::new();
    let mut add = |name: String| {
        if !name.is_empty() && !interfaces.contains(&name) {
            interfaces.push(name);
        }
    };
    add(text(&device.join("parent")));
    for index in names_in(&gids) {
        let raw = text(&gids.join(&index));
        add(text(&attributes.join("ndevs").join(&index)));
        if is_iwarp {
            // This form is the hardware address of the interface, and zeros.
            let mac = mac_of(&raw);
            all.iter().filter(|i| mac.as_ref() == Some(&i.mac)).for_each(|i| add(i.name.clone()));
            continue;
        }
        let Ok(gid) = raw.parse::<Ipv6Addr>() else { continue };
        if gid.is_unspecified() {
            continue;
        }
        let address = gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4);
        let is_v2 = text(&attributes.join("types").join(&index)) == "RoCE v2";
        let Ok(index) = index.parse() else { continue };
        found.push(Gid { index, address, is_v2 });
    }
    names_in(&device.join("device/net")).into_iter().for_each(add);
    Some(RdmaPort {
        number: number.parse().ok()?,
        state: PortState::parse(&text(&path.join("state"))),
        is_infiniband: text(&path.join("link_layer")) == "InfiniBand",
        rate: text(&path.join("rate")).split('(').next().unwrap_or_default().trim().to_owned(),
        gids: found,
        interfaces,
    })
}

/// The hardware address that begins the GID of an iWARP device.
fn mac_of(gid: &str) -> Option<String> {
    let bytes = gid.parse::<Ipv6Addr>().ok()?.octets();
    let mac: Vec<String> = bytes.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    Some(mac.join(":"))
}
