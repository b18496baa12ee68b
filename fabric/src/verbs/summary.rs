//! What RDMA devices a host has, for people: `doctor` and `discover`.
//!
//! Names, GUIDs and GIDs come from the `ibverbs` crate; states of ports from sysfs, since that crate opens
//! only devices whose first port is up.

use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

use nix::net::if_::if_indextoname;

use crate::error::{FabricError, Result};

/// A device as the host lists it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSummary {
    /// Name, such as `mlx5_0`.
    pub name: String,
    /// Node GUID; 0 where the device has none.
    pub guid: u64,
    /// Ports, from 1.
    pub ports: Vec<PortSummary>,
    /// Valid GIDs.
    pub gids: Vec<GidSummary>,
    /// Why the device could not be opened, if so: GIDs are unknown then.
    pub trouble: Option<String>,
}

/// A port of a device, in the kernel's words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortSummary {
    /// Number, from 1.
    pub number: u32,
    /// Logical state, such as `ACTIVE` or `DOWN`.
    pub state: String,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: String,
    /// Rate, such as `100 Gb/sec (4X EDR)`.
    pub rate: String,
}

/// A GID: the address of a port as RDMA knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GidSummary {
    /// Port it belongs to.
    pub port: u32,
    /// Index in the port's table.
    pub index: u32,
    /// The GID; an IPv4 address shows as a mapped one.
    pub gid: Ipv6Addr,
    /// `IB`, `RoCE v1`, `RoCE v2`.
    pub kind: &'static str,
    /// Network interface behind it.
    pub interface: Option<String>,
}

/// The host's RDMA devices; none is not an error.
///
/// # Errors
/// The list cannot be read.
pub fn devices() -> Result<Vec<DeviceSummary>> {
    let list = match ibverbs::devices() {
        Ok(list) => list,
        // A kernel without RDMA has no devices.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::ENOENT)) => {
            return Ok(Vec::new());
        }
        Err(source) => return Err(FabricError::Call { call: "ibv_get_device_list", source }),
    };
    let summaries = list.iter().map(|device| {
        let name = device.name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let (gids, trouble) = match device.open() {
            Ok(context) => (context.gid_table().iter().map(gid).collect(), None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        let ports = ports(&Path::new("/sys/class/infiniband").join(&name).join("ports"));
        DeviceSummary { guid: device.guid().map_or(0, u64::from), name, ports, gids, trouble }
    });
    Ok(summaries.collect())
}

fn gid(entry: &ibverbs::GidEntry) -> GidSummary {
    let bits = (u128::from(entry.gid.subnet_prefix()) << 64) | u128::from(entry.gid.interface_id());
    let interface = if_indextoname(entry.ndev_ifindex).ok();
    GidSummary {
        port: entry.port_num,
        index: entry.gid_index,
        gid: Ipv6Addr::from_bits(bits),
        kind: match entry.gid_type {
            0 => "IB",
            1 => "RoCE v1",
            2 => "RoCE v2",
            _ => "unknown",
        },
        interface: interface.map(|name| name.to_string_lossy().into_owned()),
    }
}

fn ports(folder: &Path) -> Vec<PortSummary> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut ports: Vec<_> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let number = entry.file_name().to_str()?.parse().ok()?;
            let line = |file: &str| {
                fs::read_to_string(entry.path().join(file)).unwrap_or_default().trim().to_owned()
            };
            let state = line("state");
            // `4: ACTIVE`
            let state = state.split_once(": ").map_or(state.as_str(), |(_, word)| word).to_owned();
            Some(PortSummary { number, state, link_layer: line("link_layer"), rate: line("rate") })
        })
        .collect();
    ports.sort_by_key(|port| port.number);
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_from_sysfs() {
        let folder = std::env::temp_dir().join(format!("rblk-ports-{}", std::process::id()));
        for (port, state) in [("2", "1: DOWN\n"), ("1", "4: ACTIVE\n")] {
            fs::create_dir_all(folder.join(port)).unwrap();
            fs::write(folder.join(port).join("state"), state).unwrap();
            fs::write(folder.join(port).join("link_layer"), "Ethernet\n").unwrap();
        }
        let found = ports(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].number, found[0].state.as_str()), (1, "ACTIVE"));
        assert_eq!((found[1].state.as_str(), found[1].link_layer.as_str()), ("DOWN", "Ethernet"));
        assert!(ports(Path::new("/nonexistent")).is_empty());
    }
}
