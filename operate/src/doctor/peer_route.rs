//! [`PeerRoute`]: by which interface packets to a peer leave, and whether RDMA can leave there.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use super::rdma::{GidMatch, devices_of, find_gid, soft_roce, usual_interface};
use super::report::Finding;
use crate::host::interface::Interface;
use crate::host::rdma_device::RdmaDevice;

/// The route to a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerRoute {
    /// The peer.
    pub peer: IpAddr,
    /// The address of this host that packets to it have; `None` without a route.
    pub local: Option<IpAddr>,
}

impl PeerRoute {
    /// Asks the kernel: it chooses the address when a UDP socket is connected. No packet is sent.
    #[must_use]
    pub fn ask(peer: SocketAddr) -> Self {
        let any: SocketAddr = match peer {
            SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
            SocketAddr::V6(_) => ([0_u16; 8], 0).into(),
        };
        let local = || {
            let socket = UdpSocket::bind(any)?;
            socket.connect(peer)?;
            socket.local_addr()
        };
        Self { peer: peer.ip(), local: local().ok().map(|local| local.ip()) }
    }

    /// The interface by which it leaves, or would leave if it were up.
    #[must_use]
    pub fn interface<'i>(&self, interfaces: &'i [Interface]) -> Option<&'i Interface> {
        match self.local {
            Some(local) => interfaces.iter().find(|i| i.has(local)),
            None => interfaces
                .iter()
                .find(|i| !i.up && !i.is_loopback() && i.subnets.iter().any(|s| s.has(self.peer))),
        }
    }

    /// The address of this host that it has, or would have.
    #[must_use]
    pub fn source(&self, interfaces: &[Interface]) -> Option<IpAddr> {
        self.local.or_else(|| {
            let interface = self.interface(interfaces)?;
            interface.subnets.iter().find(|s| s.has(self.peer)).map(|s| s.address)
        })
    }
}

/// Judges the route to a peer. With `rdma` it must leave by an interface that has an RDMA device
/// with a GID for the address.
#[must_use]
pub fn judge_route(
    route: &PeerRoute,
    interfaces: &[Interface],
    devices: &[RdmaDevice],
    rdma: bool,
) -> Finding {
    let peer = route.peer;
    let Some(interface) = route.interface(interfaces) else {
        return match route.local {
            None => Finding::fail("route", format!("no route to {peer}"))
                .fix(format!("ip route add {peer} dev {}", usual_interface(interfaces, devices))),
            Some(local) => Finding::ok("route", format!("to {peer} leaves from {local}")),
        };
    };
    let name = &interface.name;
    if !interface.up {
        return match rdma && !devices_of(interface, devices).is_empty() {
            // The line of the port says so, and how to mend it.
            true => Finding::skip("route", format!("needs {name} to be up")),
            false => Finding::fail("route", format!("to {peer} leaves by {name}, which is down"))
                .fix(format!("ip link set {name} up")),
        };
    }
    let source = route.source(interfaces).unwrap_or(peer);
    if !rdma {
        return Finding::ok("route", format!("to {peer} leaves by {name}"));
    }
    if devices.is_empty() {
        return Finding::skip("route", "needs an RDMA device");
    }
    judge_rdma_route(route, interface, source, interfaces, devices)
}

/// Judges an address of this host that a target listens on by RDMA.
#[must_use]
pub fn judge_listen(address: IpAddr, interfaces: &[Interface], devices: &[RdmaDevice]) -> Finding {
    let Some(interface) = interfaces.iter().find(|i| i.has(address)) else {
        let prefix = if address.is_ipv4() { 24 } else { 64 };
        let name = usual_interface(interfaces, devices);
        return Finding::fail("listen", format!("no interface of this host has {address}"))
            .fix(format!("ip addr add {address}/{prefix} dev {name}"));
    };
    let name = &interface.name;
    if devices.is_empty() || !interface.up {
        // Another line says so.
        return Finding::skip(
            "listen",
            format!("{address} on {name}: needs an RDMA device that is up"),
        );
    }
    match rdma_there(interface, address, devices) {
        Ok(device) => Finding::ok("listen", format!("{address} on {name}, which has {device}")),
        Err(NoRdma::Device) => {
            Finding::fail("listen", format!("{address} is on {name}, which has no RDMA device"))
                .fix(soft_roce(name))
        }
        Err(NoRdma::Gid { why, fix }) => Finding::fail("listen", why).fix(fix),
    }
}

/// Why RDMA cannot use an address of an interface.
enum NoRdma {
    Device,
    Gid { why: String, fix: String },
}

/// The RDMA device by which an address of an interface is used.
fn rdma_there<'d>(
    interface: &Interface,
    source: IpAddr,
    devices: &'d [RdmaDevice],
) -> Result<&'d str, NoRdma> {
    let name = &interface.name;
    let there = devices_of(interface, devices);
    let device = there.first().ok_or(NoRdma::Device)?;
    if !device.has_ip_gids() {
        return Ok(&device.name);
    }
    match find_gid(devices, source) {
        GidMatch::V2(device) => Ok(device),
        GidMatch::V1Only(device) => Err(NoRdma::Gid {
            why: format!("{name}: {device} has {source} as a GID of RoCE v1 only"),
            fix: format!("cma_roce_mode -d {device} -p 1 -m 2"),
        }),
        GidMatch::None => Err(NoRdma::Gid {
            why: format!("{name}: {} has no GID for {source}", device.name),
            fix: format!("ip link set {name} down && ip link set {name} up"),
        }),
    }
}

fn judge_rdma_route(
    route: &PeerRoute,
    interface: &Interface,
    source: IpAddr,
    interfaces: &[Interface],
    devices: &[RdmaDevice],
) -> Finding {
    let (peer, name) = (route.peer, &interface.name);
    let elsewhere = || {
        interfaces.iter().find(|i| i.up && i.name != *name && !devices_of(i, devices).is_empty())
    };
    match rdma_there(interface, source, devices) {
        Ok(device) => {
            Finding::ok("route", format!("to {peer} leaves by {name}, which has {device}"))
        }
        Err(NoRdma::Gid { why, fix }) => Finding::fail("route", why).fix(fix),
        Err(NoRdma::Device) => {
            let found = format!("to {peer} leaves by {name}, which has no RDMA device");
            // An address of this host itself cannot be routed elsewhere.
            let is_here = interfaces.iter().any(|i| i.has(peer));
            Finding::fail("route", found).fix(match elsewhere().filter(|_| !is_here) {
                Some(other) => format!("ip route add {peer} dev {}", other.name),
                None => soft_roce(name),
            })
        }
    }
}
