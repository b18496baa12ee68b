//! The RDMA devices of a host, judged. Pure.
//!
//! sysfs shows no MTU of a RoCE port. The kernel takes the largest one of RDMA that fits the
//! interface (`iboe_get_mtu`), so it is computed here in the same way.

use std::net::IpAddr;

use super::report::Finding;
use crate::host::interface::Interface;
use crate::host::rdma_device::{PortState, RdmaDevice, RdmaPort};

/// Bytes of all headers that a RoCE packet may have beside its payload.
const ROCE_HEADERS: u32 = 96;

/// The largest MTU of RDMA, and an MTU of an interface that has room for it.
const MTU_MAX: u32 = 4096;
const MTU_WANTED: u32 = 4200;

/// The warnings about CPUs on another NUMA node than a device: a sentence for each used device of
/// `devices`. Those with these `names` are used, or all.
#[must_use]
pub fn far_cpus(devices: &[RdmaDevice], names: Option<&[String]>, cpus: &[u16]) -> Vec<String> {
    let is_used = |device: &&RdmaDevice| names.is_none_or(|names| names.contains(&device.name));
    let far = |RdmaDevice { name, near, .. }: &RdmaDevice| {
        let far = near.lacks(cpus)?;
        Some(format!(
            "the NUMA node of {name} has no CPU {far}; its CPUs are {near}. Data of the other CPUs crosses nodes"
        ))
    };
    devices.iter().filter(is_used).filter_map(far).collect()
}

/// The RDMA devices of an interface.
pub(super) fn devices_of<'d>(
    interface: &Interface,
    devices: &'d [RdmaDevice],
) -> Vec<&'d RdmaDevice> {
    let has = |device: &&RdmaDevice| {
        interface.rdma.contains(&device.name)
            || device.ports.iter().any(|port| port.interfaces.contains(&interface.name))
    };
    devices.iter().filter(has).collect()
}

/// Which device has an address as a GID.
pub(super) enum GidMatch<'d> {
    V2(&'d str),
    V1Only(&'d str),
    None,
}

/// Looks for an address among the GIDs.
pub(super) fn find_gid(devices: &[RdmaDevice], address: IpAddr) -> GidMatch<'_> {
    let mut found = GidMatch::None;
    for device in devices {
        for gid in device.ports.iter().flat_map(|port| &port.gids) {
            match (gid.address == address, gid.is_v2) {
                (true, true) => return GidMatch::V2(&device.name),
                (true, false) => found = GidMatch::V1Only(&device.name),
                (false, _) => {}
            }
        }
    }
    found
}

/// The use of RDMA.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Needs {
    /// Whether it is needed at all.
    pub wanted: bool,
    /// Addresses of this host that it is needed for. None: any port will do.
    pub addresses: Vec<IpAddr>,
}

impl Needs {
    fn is_for(&self, port: &RdmaPort, device: &RdmaDevice, interfaces: &[Interface]) -> bool {
        let its =
            |i: &&Interface| port.interfaces.contains(&i.name) || i.rdma.contains(&device.name);
        let mut own = interfaces.iter().filter(its);
        own.any(|i| self.addresses.iter().any(|address| i.has(*address)))
    }
}

/// Judges the devices and their ports: one line a port.
#[must_use]
pub fn judge_rdma(devices: &[RdmaDevice], interfaces: &[Interface], needs: &Needs) -> Vec<Finding> {
    if devices.is_empty() {
        return vec![match needs.wanted {
            true => {
                let is_own =
                    |i: &&Interface| !i.is_loopback() && needs.addresses.iter().any(|a| i.has(*a));
                let own = interfaces.iter().find(is_own);
                let name =
                    own.map_or_else(|| usual_interface(interfaces, devices), |i| i.name.clone());
                Finding::fail(
                    "rdma",
                    "no RDMA device: load the driver of the card, or use Soft-RoCE",
                )
                .fix(soft_roce(&name))
            }
            false => Finding::skip("rdma", "no RDMA device; tcp:// works without"),
        }];
    }
    let all = || devices.iter().flat_map(|device| device.ports.iter().map(move |p| (device, p)));
    let some_works = all().any(|(_, port)| port.state == PortState::Active);
    let judged = all().map(|(device, port)| {
        let is_needed = match needs.addresses.is_empty() {
            true => needs.wanted && !some_works,
            false => needs.wanted && needs.is_for(port, device, interfaces),
        };
        judge_port(device, port, interfaces, is_needed, needs.addresses.is_empty())
    });
    judged.collect()
}

fn judge_port(
    device: &RdmaDevice,
    port: &RdmaPort,
    interfaces: &[Interface],
    is_needed: bool,
    any_will_do: bool,
) -> Finding {
    let subject = format!("{}/{}", device.name, port.number);
    let own = interfaces.iter().find(|i| port.interfaces.contains(&i.name));
    if port.state != PortState::Active {
        let (why, fix) = why_not_active(port, own);
        if !is_needed {
            return Finding::skip(subject, format!("{why}; not needed"));
        }
        let finding = Finding::fail(subject, why);
        return match fix {
            Some(fix) => finding.fix(fix),
            None => finding,
        };
    }
    let kind = match (device.is_iwarp, port.is_infiniband) {
        (true, _) => "iWARP",
        (false, true) => "InfiniBand",
        (false, false) if port.gids.iter().any(|gid| gid.is_v2) => "RoCE v2",
        (false, false) => "RoCE v1 only",
    };
    let mut found = kind.to_owned();
    if !device.is_software {
        found = format!("{found}, {}", port.rate);
    }
    let Some(interface) = own else { return Finding::ok(subject, found) };
    let mtu = interface.mtu.filter(|_| device.has_ip_gids() && !port.is_infiniband);
    let Some(payload) = mtu.map(roce_mtu) else {
        return Finding::ok(subject, format!("{found}, {}", interface.name));
    };
    found = format!("{found}, {}, MTU {payload}", interface.name);
    if payload < MTU_MAX && (is_needed || any_will_do) {
        let name = &interface.name;
        // A larger MTU is a change for every host on that network: it is proposed only for the
        // interface that is to be used, where the interface alone decides.
        return match is_needed && !any_will_do && !interface.is_tied {
            true => Finding::warn(subject, format!("{found} of {MTU_MAX}"))
                .fix(format!("ip link set {name} mtu {MTU_WANTED}")),
            false => {
                let own = interface.mtu.unwrap_or_default();
                let found = format!("{found} of {MTU_MAX}, as the MTU of {name} is {own}");
                Finding::warn(subject, found).fix(format!("ip -d link show dev {name}"))
            }
        };
    }
    Finding::ok(subject, found)
}

/// Why a port does not work, and the fix.
fn why_not_active(port: &RdmaPort, interface: Option<&Interface>) -> (String, Option<String>) {
    match (port.state, interface) {
        (PortState::Init, _) if port.is_infiniband => (
            "no subnet manager has configured it".to_owned(),
            Some("systemctl start opensm".to_owned()),
        ),
        (_, Some(interface)) if !interface.up => (
            format!("not active, {} is down", interface.name),
            Some(format!("ip link set {} up", interface.name)),
        ),
        (PortState::Down, _) => ("no link: check the cable and the switch".to_owned(), None),
        _ => ("not active".to_owned(), None),
    }
}

/// The MTU of RDMA on an interface of that MTU.
fn roce_mtu(interface: u32) -> u32 {
    let room = interface.saturating_sub(ROCE_HEADERS);
    [4096, 2048, 1024, 512].into_iter().find(|mtu| *mtu <= room).unwrap_or(256)
}

/// The command that makes a Soft-RoCE device of an interface.
pub(super) fn soft_roce(interface: &str) -> String {
    let name: String = interface.chars().filter(char::is_ascii_alphanumeric).take(10).collect();
    format!("rdma link add rxe_{name} type rxe netdev {interface}")
}

/// The interface that a command is to name: one with RDMA, else one that is up.
pub(super) fn usual_interface(interfaces: &[Interface], devices: &[RdmaDevice]) -> String {
    let usable = || interfaces.iter().filter(|i| !i.is_loopback());
    let with_rdma = usable().find(|i| !devices_of(i, devices).is_empty());
    let addressed = || usable().find(|i| i.up && !i.subnets.is_empty());
    let found = with_rdma.or_else(addressed).or_else(|| usable().next());
    found.map_or_else(|| "IFACE".to_owned(), |i| i.name.clone())
}

#[cfg(test)]
mod tests;
