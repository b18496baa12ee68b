//! [`Cable`]: a cable between this host and another one, which can be cut. Both ends have an RDMA
//! device on a virtual interface. The other host is a network namespace.
//!
//! A packet to the host's own address never leaves a Soft-RoCE device, so a test cannot drop it.
//! Every packet of a cable goes over a bridge that both ends are plugged into.
//!
//! To cut a cable, the bridge loses a port. Interfaces stay up and sending never fails, as with a
//! cable that is cut behind the first switch. An interface that is down, or that drops what it
//! sends, fails sends now and then. A failed send of rdma_cm puts QP 1 of a Soft-RoCE device into
//! the error state permanently (Linux 7.2), and no connection goes through the device again.

use std::path::Path;

use super::process::{Finished, start};
use super::wait::DEADLINE;

/// See the module: the names of its parts here and there, and its addresses.
#[derive(Debug)]
pub(super) struct Cable {
    space: &'static str,
    ends: [String; 2],
    /// Ports of the bridge.
    pub(super) ports: [String; 2],
    pub(super) bridge: String,
    pub(super) devices: [String; 2],
    hosts: [String; 2],
    links: [String; 2],
}

/// Runs a command of words without spaces.
pub(super) fn ip(words: &str) {
    let words: Vec<&str> = words.split(' ').collect();
    let _ = start(&words).finish(DEADLINE).ok();
}

/// Makes a host that cables lead to.
pub(super) fn make_host(space: &str) {
    for module in ["veth", "bridge"] {
        // May be built in.
        let _ = start(&["modprobe", "-q", module]).finish(DEADLINE);
    }
    // `ip netns exec` has a copy of all mounts. Where they are not shared, as with systemd they
    // are, the copy of a file system that a test unmounts would stay, and hold its device.
    ip("mount --make-rshared /");
    ip(&format!("ip netns add {space}"));
    ip(&format!("ip -n {space} link set lo up"));
}

impl Cable {
    /// The cable of that number, of one digit, to a host.
    pub(super) fn of(number: usize, space: &'static str) -> Self {
        Self {
            space,
            ends: ["near", "far"].map(|side| format!("rblk{side}{number}")),
            ports: ["near", "far"].map(|side| format!("rblk{side}p{number}")),
            bridge: format!("rblkbridge{number}"),
            devices: ["near", "far"].map(|side| format!("rdma{side}{number}")),
            hosts: [1, 2].map(|side| format!("10.91.{}.{side}", 7 + number)),
            links: [1, 2].map(|side| format!("02:72:62:6c:6b:{number}{side}")),
        }
    }

    /// The address of the other host.
    pub(super) fn host(&self) -> &str {
        &self.hosts[1]
    }

    /// The command that gives the other host its address, or takes it away.
    pub(super) fn far_address(&self, what: &str) -> String {
        let Self { space, ends: [_, far], hosts: [_, host], .. } = self;
        format!("ip -n {space} addr {what} {host}/24 dev {far}")
    }

    /// The command that makes this host known to the other one, which forgets it with its address.
    /// By ARP it would learn of the bridge, which answers for this host, too: then nothing goes by
    /// the port of this side.
    pub(super) fn far_neighbour(&self) -> String {
        let Self { space, ends: [_, far], hosts: [host, _], links: [link, _], .. } = self;
        format!("ip -n {space} neigh replace {host} lladdr {link} dev {far}")
    }

    /// Lays the cable, with RDMA devices of a kind at its ends.
    pub(super) fn plug(&self, kind: &str) {
        let Self { space, ends: [near, far], ports, bridge, devices, hosts, links } = self;
        ip(&format!("ip link add {bridge} mtu 4500 type bridge"));
        ip(&format!("ip link set {bridge} up"));
        for ((end, port), mac) in self.ends.iter().zip(ports).zip(links) {
            ip(&format!(
                "ip link add {end} mtu 4500 address {mac} type veth peer name {port} mtu 4500"
            ));
            ip(&format!("ip link set {port} master {bridge} up"));
        }
        ip(&format!("ip link set {far} netns {space}"));
        ip(&format!("ip addr add {}/24 dev {near}", hosts[0]));
        ip(&format!("ip link set {near} up"));
        ip(&self.far_address("add"));
        ip(&format!("ip -n {space} link set {far} up"));
        // Each end knows the other as a neighbour. Otherwise the answer to ARP may come before the
        // RDMA core waits for it, and the core then waits for its whole timeout.
        ip(&format!("ip neigh replace {} lladdr {} dev {near}", hosts[1], links[1]));
        ip(&self.far_neighbour());
        ip(&format!("rdma link add {} type {kind} netdev {near}", devices[0]));
        ip(&format!("ip netns exec {space} rdma link add {} type {kind} netdev {far}", devices[1]));
    }

    /// Cuts it: both hosts still send, and neither hears anything.
    pub(super) fn cut(&self) {
        ip(&format!("ip link set {} nomaster", self.ports[1]));
    }

    /// Mends it.
    pub(super) fn mend(&self) -> Finished {
        start(&["ip", "link", "set", &self.ports[1], "master", &self.bridge]).finish(DEADLINE)
    }

    /// Removes every part of it that exists.
    pub(super) fn take_down(&self) {
        if !Path::new("/sys/class/net").join(&self.bridge).exists() {
            return;
        }
        for device in &self.devices {
            let _ = start(&["rdma", "link", "del", device]).finish(DEADLINE);
        }
        for link in [&self.ports[0], &self.ports[1], &self.bridge] {
            let _ = start(&["ip", "link", "del", link]).finish(DEADLINE);
        }
    }
}
