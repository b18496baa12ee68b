//! Where a demo runs: on this machine if it has the devices, else in the lab.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::Transport;
use crate::lab::host;
use crate::process;

/// The RDMA devices of a machine.
const DEVICES: &str = "/sys/class/infiniband";

/// A place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// This machine, with the address to listen on.
    Here(String),
    /// The lab, for this reason.
    Lab(String),
}

impl Place {
    /// Looks at this machine.
    pub(crate) fn choose(transport: Transport) -> Self {
        if !host::is_root() {
            return Place::Lab("this user is not root".to_owned());
        }
        if !Path::new("/dev/ublk-control").exists() {
            return Place::Lab("there is no /dev/ublk-control (modprobe ublk_drv)".to_owned());
        }
        match transport {
            Transport::Tcp => Place::Here("127.0.0.1".to_owned()),
            Transport::Rdma => match rdma_address() {
                Ok(address) => Place::Here(address),
                Err(why) => Place::Lab(format!("{why:#}")),
            },
        }
    }
}

/// An IPv4 address of an interface that has an RDMA device.
fn rdma_address() -> Result<String> {
    let devices: Vec<PathBuf> =
        fs::read_dir(DEVICES).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    if devices.is_empty() {
        anyhow::bail!("there is no RDMA device in {DEVICES}");
    }
    devices
        .iter()
        .flat_map(|device| interfaces(device))
        .find_map(|interface| address_of(&interface).ok().flatten())
        .context("no RDMA device here has an interface with an IPv4 address; give it one with `ip addr add`")
}

/// Interfaces of an RDMA device: those of its GIDs (RoCE, iWARP), its parent (rxe), IPoIB's.
fn interfaces(device: &Path) -> Vec<String> {
    let names = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path());
    let read = |path: PathBuf| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let mut found: Vec<String> = names(device.join("ports"))
        .flat_map(|port| names(port.join("gid_attrs/ndevs")))
        .chain([device.join("parent")])
        .filter_map(read)
        .collect();
    found.extend(
        names(device.join("device/net"))
            .filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())),
    );
    found.retain(|name| !name.is_empty());
    found.dedup();
    found
}

fn address_of(interface: &str) -> Result<Option<String>> {
    let mut command = Command::new("ip");
    command.args(["-json", "-4", "addr", "show", "dev", interface, "up"]);
    parse_addresses(&process::output(&mut command, Duration::from_secs(10))?)
}

fn parse_addresses(json: &str) -> Result<Option<String>> {
    #[derive(Deserialize)]
    struct Link {
        #[serde(default)]
        addr_info: Vec<Address>,
    }
    #[derive(Deserialize)]
    struct Address {
        local: String,
    }
    let links: Vec<Link> =
        serde_json::from_str(json).context("`ip -json addr` gave something else than expected")?;
    Ok(links.into_iter().flat_map(|link| link.addr_info).map(|address| address.local).next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_address_is_taken() {
        let json = r#"[{},{"ifname":"v0","addr_info":[{"family":"inet","local":"10.9.0.1"}]}]"#;
        assert_eq!(parse_addresses(json).unwrap().as_deref(), Some("10.9.0.1"));
        assert_eq!(parse_addresses("[{}]").unwrap(), None);
    }

    #[test]
    fn interfaces_come_from_gids_and_parents() {
        let device = tempfile::tempdir().unwrap();
        let ndevs = device.path().join("ports/1/gid_attrs/ndevs");
        fs::create_dir_all(&ndevs).unwrap();
        fs::write(ndevs.join("0"), "eth1\n").unwrap();
        fs::write(device.path().join("parent"), "eth1\n").unwrap();
        fs::create_dir_all(device.path().join("device/net/ib0")).unwrap();
        assert_eq!(interfaces(device.path()), ["eth1", "ib0"]);
    }
}
