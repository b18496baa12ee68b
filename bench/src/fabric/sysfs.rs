//! RDMA devices of this host as the kernel's files show them: names and the IP addresses of their
//! GIDs.
//!
//! The GIDs of iWARP devices are no addresses: those have the addresses of their network interface.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use nix::ifaddrs::getifaddrs;

/// Where the kernel shows them.
const PLACE: &str = "/sys/class/infiniband";

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
    gids_in(Path::new(PLACE), &interface_addresses)
}

/// The GID to use for an address.
#[must_use]
pub fn gid_of(ip: IpAddr, all: &[Gid]) -> Option<&Gid> {
    let same = all.iter().filter(|gid| gid.ip == ip);
    same.clone().find(|gid| gid.is_newest).or_else(|| same.clone().next())
}

fn gids_in(place: &Path, addresses: &dyn Fn(&str) -> Vec<IpAddr>) -> Vec<Gid> {
    let mut found = Vec::new();
    for device in names(place) {
        // The kernel's number for RNICs.
        if read(&place.join(&device).join("node_type")).starts_with("4:") {
            let gid = |ip| {
                let device = device.clone();
                Gid { device, port: 1, index: 0, ip, is_newest: true, is_iwarp: true }
            };
            let interfaces = names(&place.join(&device).join("device/net"));
            let shown = read(&place.join(&device).join("ports/1/gid_attrs/ndevs/0"));
            let interfaces = interfaces.iter().map(String::as_str).chain([shown.trim()]);
            found.extend(interfaces.flat_map(addresses).map(gid));
            continue;
        }
        let ports = place.join(&device).join("ports");
        for port in names(&ports) {
            let port_dir = ports.join(&port);
            for index in names(&port_dir.join("gids")) {
                let text = read(&port_dir.join("gids").join(&index));
                let kind = read(&port_dir.join("gid_attrs/types").join(&index));
                if let (Some(ip), Ok(port), Ok(index)) =
                    (ip_of_gid(text.trim()), port.parse(), index.parse())
                {
                    let (device, is_newest) = (device.clone(), !kind.contains("v1"));
                    found.push(Gid { device, port, index, ip, is_newest, is_iwarp: false });
                }
            }
        }
    }
    found.sort_by(|a, b| (&a.device, a.port, a.index).cmp(&(&b.device, b.port, b.index)));
    found
}

/// The IP address that a GID is, unless it is none that one connects to.
fn ip_of_gid(text: &str) -> Option<IpAddr> {
    let ip: Ipv6Addr = text.parse().ok()?;
    if let Some(v4) = ip.to_ipv4_mapped() {
        return (!v4.is_unspecified()).then_some(v4.into());
    }
    let links_only = ip.segments()[0] & 0xffc0 == 0xfe80;
    // The GIDs of InfiniBand without a subnet of their own are fe80 as well.
    (!ip.is_unspecified() && !links_only).then_some(ip.into())
}

/// The addresses of a network interface, except link-local ones.
fn interface_addresses(name: &str) -> Vec<IpAddr> {
    let Ok(all) = getifaddrs() else { return Vec::new() };
    let of_it = all.filter(|one| one.interface_name == name).filter_map(|one| one.address);
    of_it
        .filter_map(|address| match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => Some(IpAddr::from(v4.ip())),
            (_, Some(v6)) => ip_of_gid(&v6.ip().to_string()),
            _ => None,
        })
        .collect()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_with_addresses_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let port = dir.path().join("rxe0/ports/1");
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
        let iwarp = dir.path().join("siw0/ports/1");
        std::fs::create_dir_all(iwarp.join("gids")).unwrap();
        std::fs::create_dir_all(iwarp.join("gid_attrs/ndevs")).unwrap();
        std::fs::write(iwarp.join("gids/0"), "3671:47ad:0088:0000:0000:0000:0000:0000\n").unwrap();
        std::fs::write(iwarp.join("gid_attrs/ndevs/0"), "v1\n").unwrap();
        std::fs::write(dir.path().join("siw0/node_type"), "4: RNIC\n").unwrap();
        let addresses = |name: &str| match name {
            "v1" => vec![IpAddr::from([10, 9, 1, 1])],
            _ => Vec::new(),
        };
        let all = gids_in(dir.path(), &addresses);
        let brief: Vec<(u32, String)> = all.iter().map(|g| (g.index, g.ip.to_string())).collect();
        let want = [(1, "10.9.0.1"), (2, "10.9.0.1"), (4, "fd00::7"), (0, "10.9.1.1")];
        assert_eq!(brief, want.map(|(index, ip)| (index, ip.to_owned())));
        assert_eq!(gid_of([10, 9, 0, 1].into(), &all).unwrap().index, 2);
        assert_eq!(gid_of([10, 9, 0, 2].into(), &all), None);
        assert!(gid_of([10, 9, 1, 1].into(), &all).unwrap().is_iwarp);
        assert!(gids_in(&dir.path().join("none"), &addresses).is_empty());
    }
}
