//! RDMA devices of this host as the kernel's files show them: names and the IP addresses of their
//! GIDs.
//!
//! The GIDs of iWARP devices are no addresses: those have the addresses of their network interface.

use std::net::IpAddr;
use std::path::Path;

use nix::ifaddrs::getifaddrs;
use rblk_operate::doctor::{RdmaDevice, rdma_devices};

/// One GID that is an IP address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gid {
    /// The device.
    pub device: String,
    /// Its port.
    pub port: u32,
    /// The index in the port's table.
    pub index: u32,
    /// The address.
    pub ip: IpAddr,
    /// Whether it is of RoCE v2 or of a kind without versions.
    pub is_newest: bool,
    /// Whether the device is an iWARP one, whose GIDs no program names.
    pub is_iwarp: bool,
}

/// All GIDs that are addresses of this host, by device, port and index; link-local ones are left
/// out.
#[must_use]
pub fn gids() -> Vec<Gid> {
    gids_in(Path::new("/"), &interface_addresses)
}

/// The GID to use for an address.
#[must_use]
pub fn gid_of(ip: IpAddr, all: &[Gid]) -> Option<&Gid> {
    let same = all.iter().filter(|gid| gid.ip == ip);
    same.clone().find(|gid| gid.is_newest).or_else(|| same.clone().next())
}

fn gids_in(root: &Path, addresses: &dyn Fn(&str) -> Vec<IpAddr>) -> Vec<Gid> {
    let mut found = Vec::new();
    for RdmaDevice { name, is_iwarp, ports, .. } in rdma_devices(root) {
        for port in ports {
            let number = u32::from(port.number);
            if is_iwarp {
                let addresses = port.interfaces.iter().flat_map(|name| addresses(name));
                found.extend(addresses.map(|ip| Gid {
                    device: name.clone(),
                    port: number,
                    index: 0,
                    ip,
                    is_newest: true,
                    is_iwarp,
                }));
                continue;
            }
            let gids = port.gids.iter().filter(|gid| is_for_connections(gid.address));
            found.extend(gids.map(|gid| Gid {
                device: name.clone(),
                port: number,
                index: gid.index,
                ip: gid.address,
                is_newest: gid.is_v2,
                is_iwarp,
            }));
        }
    }
    found.sort_by(|a, b| (&a.device, a.port, a.index).cmp(&(&b.device, b.port, b.index)));
    found
}

/// Whether connections use an address: link-local ones need an interface beside it. The GIDs of
/// InfiniBand without a subnet of their own are fe80 as well.
fn is_for_connections(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_unspecified(),
        IpAddr::V6(ip) => !ip.is_unspecified() && !ip.is_unicast_link_local(),
    }
}

/// The addresses of a network interface, except link-local ones.
fn interface_addresses(name: &str) -> Vec<IpAddr> {
    let Ok(all) = getifaddrs() else { return Vec::new() };
    let of_it = all.filter(|one| one.interface_name == name).filter_map(|one| one.address);
    of_it
        .filter_map(|address| match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => Some(IpAddr::from(v4.ip())),
            (_, Some(v6)) => Some(IpAddr::from(v6.ip())).filter(|ip| is_for_connections(*ip)),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_with_addresses_are_found() {
        let root = tempfile::tempdir().unwrap();
        let dir = rblk_operate::sysfs::rdma_class(root.path());
        let port = dir.join("rxe0/ports/1");
        std::fs::create_dir_all(port.join("gids")).unwrap();
        std::fs::create_dir_all(port.join("gid_attrs/types")).unwrap();
        for (index, gid, kind) in [
            (0, "fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2"),
            (1, "0000:0000:0000:0000:0000:ffff:0a09:0001", "IB/RoCE v1"),
            (2, "0000:0000:0000:0000:0000:ffff:0a09:0001", "RoCE v2"),
            (3, "0000:0000:0000:0000:0000:0000:0000:0000", ""),
            (4, "fd00:0000:0000:0000:0000:0000:0000:0007", "RoCE v2"),
        ] {
            std::fs::write(port.join(format!("gids/{index}")), format!("{gid}\n")).unwrap();
            std::fs::write(port.join(format!("gid_attrs/types/{index}")), kind).unwrap();
        }
        // Its GIDs are no addresses.
        let iwarp = dir.join("siw0/ports/1");
        std::fs::create_dir_all(iwarp.join("gids")).unwrap();
        std::fs::create_dir_all(iwarp.join("gid_attrs/ndevs")).unwrap();
        std::fs::write(iwarp.join("gids/0"), "3671:47ad:0088:0000:0000:0000:0000:0000\n").unwrap();
        std::fs::write(iwarp.join("gid_attrs/ndevs/0"), "v1\n").unwrap();
        std::fs::write(dir.join("siw0/node_type"), "4: RNIC\n").unwrap();
        let addresses = |name: &str| match name {
            "v1" => vec![IpAddr::from([10, 9, 1, 1])],
            _ => Vec::new(),
        };
        let all = gids_in(root.path(), &addresses);
        let brief: Vec<(u32, String)> = all.iter().map(|g| (g.index, g.ip.to_string())).collect();
        let want = [(1, "10.9.0.1"), (2, "10.9.0.1"), (4, "fd00::7"), (0, "10.9.1.1")];
        assert_eq!(brief, want.map(|(index, ip)| (index, ip.to_owned())));
        assert_eq!(gid_of([10, 9, 0, 1].into(), &all).unwrap().index, 2);
        assert_eq!(gid_of([10, 9, 0, 2].into(), &all), None);
        assert!(gid_of([10, 9, 1, 1].into(), &all).unwrap().is_iwarp);
        assert!(gids_in(&root.path().join("none"), &addresses).is_empty());
    }
}
