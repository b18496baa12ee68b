//! [`Interface`]: a network interface with its addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use nix::ifaddrs::getifaddrs;

/// Most interfaces that are looked at.
const INTERFACES_MAX: usize = 1024;

/// An address of this host, and how many bits of it name the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Subnet {
    /// The address.
    pub address: IpAddr,
    /// Bits of the network.
    pub prefix: u32,
}

impl Subnet {
    /// Whether an address is in the network.
    #[must_use]
    pub fn has(&self, peer: IpAddr) -> bool {
        match (self.address, peer) {
            (IpAddr::V4(own), IpAddr::V4(peer)) => {
                let mask = u32::MAX.checked_shl(32 - self.prefix.min(32)).unwrap_or(0);
                own.to_bits() & mask == peer.to_bits() & mask
            }
            (IpAddr::V6(own), IpAddr::V6(peer)) => {
                let mask = u128::MAX.checked_shl(128 - self.prefix.min(128)).unwrap_or(0);
                own.to_bits() & mask == peer.to_bits() & mask
            }
            _ => false,
        }
    }
}

/// A network interface.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Whether it is up.
    pub up: bool,
    /// Its MTU.
    pub mtu: Option<u32>,
    /// Its hardware address, as sysfs writes it.
    pub mac: String,
    /// Its addresses.
    pub subnets: Vec<Subnet>,
    /// RDMA devices of the same card.
    pub rdma: Vec<String>,
    /// Whether it is part of another interface, or is made of others (bond, bridge, VLAN): its MTU
    /// is not its own matter.
    pub is_tied: bool,
}

impl Interface {
    /// Whether it has that address.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        self.subnets.iter().any(|subnet| subnet.address == address)
    }

    /// Whether it is the loopback interface.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.name == "lo"
    }
}

/// The interfaces of this host: sysfs below `root`, and the addresses that the kernel names.
#[must_use]
pub fn interfaces(root: &Path) -> Vec<Interface> {
    let mut found = from_sysfs(root);
    let Ok(addresses) = getifaddrs() else { return found };
    for address in addresses {
        let (Some(own), Some(mask)) = (address.address, address.netmask) else { continue };
        let v4 = || Some((own.as_sockaddr_in()?.ip(), mask.as_sockaddr_in()?.ip()));
        let v6 = || Some((own.as_sockaddr_in6()?.ip(), mask.as_sockaddr_in6()?.ip()));
        let subnet = match (v4(), v6()) {
            (Some((own, mask)), _) => subnet_of_4(own, mask),
            (None, Some((own, mask))) => subnet_of_6(own, mask),
            (None, None) => continue,
        };
        if let Some(interface) = found.iter_mut().find(|i| i.name == address.interface_name) {
            interface.subnets.push(subnet);
        }
    }
    found
}

fn subnet_of_4(address: Ipv4Addr, mask: Ipv4Addr) -> Subnet {
    Subnet { address: IpAddr::V4(address), prefix: mask.to_bits().leading_ones() }
}

fn subnet_of_6(address: Ipv6Addr, mask: Ipv6Addr) -> Subnet {
    Subnet { address: IpAddr::V6(address), prefix: mask.to_bits().leading_ones() }
}

/// The interfaces without their addresses, by name.
pub(crate) fn from_sysfs(root: &Path) -> Vec<Interface> {
    let Ok(dir) = std::fs::read_dir(root.join("sys/class/net")) else { return Vec::new() };
    let mut found: Vec<Interface> = dir
        .flatten()
        .take(INTERFACES_MAX)
        .filter_map(|entry| {
            let path = entry.path();
            let text = |name: &str| {
                let text = std::fs::read_to_string(path.join(name)).unwrap_or_default();
                text.trim().to_owned()
            };
            let flags = u32::from_str_radix(text("flags").trim_start_matches("0x"), 16);
            let is_up = flags.is_ok_and(|flags| flags & 1 == 1) && text("operstate") != "down";
            Some(Interface {
                name: entry.file_name().into_string().ok()?,
                up: is_up,
                mtu: text("mtu").parse().ok(),
                mac: text("address"),
                subnets: Vec::new(),
                rdma: super::sysfs::names_in(&path.join("device/infiniband")),
                is_tied: super::sysfs::names_in(&path)
                    .iter()
                    .any(|name| name == "master" || name.starts_with("lower_")),
            })
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_the_addresses_of_its_prefix() {
        let subnet = |text: &str, prefix| Subnet { address: text.parse().unwrap(), prefix };
        for (own, prefix, peer, expected) in [
            ("10.9.0.1", 24, "10.9.0.7", true),
            ("10.9.0.1", 24, "10.9.1.7", false),
            ("10.9.0.1", 32, "10.9.0.1", true),
            ("10.9.0.1", 0, "192.0.2.1", true),
            ("fd00::1", 64, "fd00::9", true),
            ("fd00::1", 128, "fd00::9", false),
            ("fd00::1", 0, "10.0.0.1", false),
        ] {
            let peer = peer.parse().unwrap();
            assert_eq!(subnet(own, prefix).has(peer), expected, "{own}/{prefix} {peer}");
        }
    }

    #[test]
    fn this_host_has_a_loopback_interface_with_its_address() {
        let found = interfaces(Path::new("/"));
        let lo = found.iter().find(|i| i.is_loopback()).expect("lo");
        assert!(lo.has(Ipv4Addr::LOCALHOST.into()), "{lo:?}");
        assert_eq!(lo.subnets.iter().find(|s| s.address.is_ipv4()).unwrap().prefix, 8);
    }
}
