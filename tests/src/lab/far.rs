//! [`FarHost`]: a second host of sorts, joined to this one by cables that can be cut.
//!
//! A packet to the host's own address never leaves a Soft-RoCE device, so a test cannot drop it.
//! The far host is a network namespace with a Soft-RoCE device on a virtual interface for each
//! cable. A target runs there, and every packet goes over a bridge that both sides of the cable are
//! plugged into.
//!
//! To cut a cable, the bridge loses a port. Interfaces stay up and sending never fails, as with a
//! cable that is cut behind the first switch. An interface that is down, or that drops what it
//! sends, fails sends now and then. A failed send of rdma_cm puts QP 1 of a Soft-RoCE device into
//! the error state permanently (Linux 7.2), and no connection goes through the device again.

use std::path::Path;
use std::time::SystemTime;

use super::Lab;
use super::process::start;
use super::wait::DEADLINE;

const SPACE: &str = "rblkfar";
/// Most cables.
const CABLES: usize = 2;

/// The host behind the cables. Drop removes it.
#[derive(Debug)]
pub struct FarHost {
    hosts: Vec<String>,
}

/// How a cable fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CableFault {
    /// Nothing comes through.
    Cut,
    /// The far host hears, and is not heard.
    Silent,
    /// Everything comes through seconds late, and some of it after the cable is mended.
    Stalled,
    /// The far host has lost the address. Not for RDMA: see [`FarHost`].
    NoAddress,
}

/// How late packets are on a cable that is [stalled](CableFault::Stalled).
const LATE: &str = "delay 3s";
/// How they are on a cable that was. Those under way stay late.
const IN_TIME: &str = "delay 0ms";

/// A cable that fails. Drop mends it.
#[derive(Debug)]
pub struct Cut<'f> {
    far: &'f FarHost,
    cable: usize,
    how: CableFault,
    /// A moment just before the cut.
    pub at: SystemTime,
}

fn ip(words: &str) {
    let words: Vec<&str> = words.split(' ').collect();
    let _ = start(&words).finish(DEADLINE).ok();
}

/// Names of one cable's parts: here and there.
struct Names {
    ends: [String; 2],
    ports: [String; 2],
    bridge: String,
    devices: [String; 2],
    hosts: [String; 2],
    links: [String; 2],
}

impl Names {
    fn of(cable: usize) -> Self {
        Self {
            ends: ["near", "far"].map(|side| format!("rblk{side}{cable}")),
            ports: ["near", "far"].map(|side| format!("rblk{side}p{cable}")),
            bridge: format!("rblkbridge{cable}"),
            devices: ["near", "far"].map(|side| format!("rdma{side}{cable}")),
            hosts: [1, 2].map(|side| format!("10.91.{}.{side}", 7 + cable)),
            links: [1, 2].map(|side| format!("02:72:62:6c:6b:{cable}{side}")),
        }
    }

    /// The command that gives the far host its address, or takes it away.
    fn far_address(&self, what: &str) -> String {
        let Self { ends: [_, far], hosts: [_, host], .. } = self;
        format!("ip -n {SPACE} addr {what} {host}/24 dev {far}")
    }
}

impl FarHost {
    /// A far host with one cable and devices of the lab's kind: Soft-RoCE, or Soft-iWARP (siw).
    ///
    /// # Panics
    /// The kernel has no network namespaces for Soft-RoCE (before 7.1), or other things are
    /// missing.
    #[must_use]
    pub fn new(lab: &Lab) -> Self {
        Self::with_cables(lab, 1)
    }

    /// A far host with one or two cables. Each cable has its own addresses and devices.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    #[must_use]
    pub fn with_cables(lab: &Lab, cables: usize) -> Self {
        assert!((1..=CABLES).contains(&cables), "{cables} cables");
        for module in ["veth", "bridge", "sch_netem"] {
            // May be built in.
            let _ = start(&["modprobe", "-q", module]).finish(DEADLINE);
        }
        // `ip netns exec` has a copy of all mounts. Where they are not shared, as with systemd they
        // are, the copy of a file system that a test unmounts would stay, and hold its device.
        ip("mount --make-rshared /");
        ip(&format!("ip netns add {SPACE}"));
        let mut host = Self { hosts: Vec::new() };
        ip(&format!("ip -n {SPACE} link set lo up"));
        for cable in 0..cables {
            let names = Names::of(cable);
            plug(&names, if lab.is_iwarp() { "siw" } else { "rxe" });
            host.hosts.push(names.hosts[1].clone());
        }
        host
    }

    /// Its name as a network namespace.
    #[must_use]
    pub fn space(&self) -> &'static str {
        SPACE
    }

    /// Its address on the first cable.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.hosts[0]
    }

    /// Its addresses, by cable.
    #[must_use]
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// The RDMA device of this host on a cable.
    #[must_use]
    pub fn near_device(cable: usize) -> String {
        let [near, _] = Names::of(cable).devices;
        near
    }

    /// Cuts the first cable: both hosts still send, and neither hears anything.
    ///
    /// # Panics
    /// The bridge keeps its port.
    #[must_use]
    pub fn cut(&self) -> Cut<'_> {
        self.cut_cable(0)
    }

    /// Cuts one cable.
    ///
    /// # Panics
    /// The bridge keeps its port.
    #[must_use]
    pub fn cut_cable(&self, cable: usize) -> Cut<'_> {
        self.break_cable(cable, CableFault::Cut)
    }

    /// Has one cable fail.
    ///
    /// # Panics
    /// A command fails.
    #[must_use]
    pub fn break_cable(&self, cable: usize, how: CableFault) -> Cut<'_> {
        let at = SystemTime::now();
        let names = Names::of(cable);
        let [near, far] = &names.ports;
        match how {
            CableFault::Cut => ip(&format!("ip link set {far} nomaster")),
            // What a port of the bridge sends goes to the end on its side.
            CableFault::Silent => ip(&queue(near, "loss 100%")),
            CableFault::Stalled => [near, far].into_iter().for_each(|port| ip(&queue(port, LATE))),
            CableFault::NoAddress => ip(&names.far_address("del")),
        }
        Cut { far: self, cable, how, at }
    }
}

/// The command that has the packets of a port wait or vanish.
fn queue(port: &str, how: &str) -> String {
    format!("tc qdisc replace dev {port} root netem {how} limit 100000")
}

fn plug(names: &Names, kind: &str) {
    let Names { ends: [near, far], ports, bridge, devices, hosts, links } = names;
    ip(&format!("ip link add {bridge} mtu 4500 type bridge"));
    ip(&format!("ip link set {bridge} up"));
    for ((end, port), mac) in names.ends.iter().zip(ports).zip(links) {
        ip(&format!(
            "ip link add {end} mtu 4500 address {mac} type veth peer name {port} mtu 4500"
        ));
        ip(&format!("ip link set {port} master {bridge} up"));
    }
    ip(&format!("ip link set {far} netns {SPACE}"));
    ip(&format!("ip addr add {}/24 dev {near}", hosts[0]));
    ip(&format!("ip link set {near} up"));
    ip(&names.far_address("add"));
    ip(&format!("ip -n {SPACE} link set {far} up"));
    // Each end knows the other as a neighbour. Otherwise the answer to ARP may come before the RDMA
    // core waits for it, and the core then waits for its whole timeout.
    ip(&format!("ip neigh replace {} lladdr {} dev {near}", hosts[1], links[1]));
    ip(&format!("ip -n {SPACE} neigh replace {} lladdr {} dev {far}", hosts[0], links[0]));
    ip(&format!("rdma link add {} type {kind} netdev {near}", devices[0]));
    ip(&format!("ip netns exec {SPACE} rdma link add {} type {kind} netdev {far}", devices[1]));
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        let names = Names::of(self.cable);
        let [near, far] = &names.ports;
        let commands = match self.how {
            CableFault::Cut => vec![format!("ip link set {far} master {}", names.bridge)],
            CableFault::Silent => vec![queue(near, IN_TIME)],
            CableFault::Stalled => [near, far].map(|port| queue(port, IN_TIME)).to_vec(),
            CableFault::NoAddress => vec![names.far_address("add")],
        };
        for command in commands {
            let ended = start(&command.split(' ').collect::<Vec<_>>()).finish(DEADLINE);
            if ended.code() != 0 {
                println!("the cable to {} stays cut: {ended}", self.far.hosts[self.cable]);
            }
        }
    }
}

impl Drop for FarHost {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- the cables, and what is connected through them");
            for words in ["rdma link show", "rdma resource show qp", "bridge link show", "ip neigh"]
            {
                let words: Vec<&str> = words.split(' ').collect();
                println!("{}", start(&words).finish(DEADLINE));
            }
        }
        take_down();
    }
}

/// Removes every part of the far host that exists.
pub(super) fn take_down() {
    for cable in 0..CABLES {
        let Names { ports, bridge, devices, .. } = Names::of(cable);
        if !Path::new("/sys/class/net").join(&bridge).exists() {
            continue;
        }
        for device in devices {
            let _ = start(&["rdma", "link", "del", &device]).finish(DEADLINE);
        }
        for link in [&ports[0], &ports[1], &bridge] {
            let _ = start(&["ip", "link", "del", link]).finish(DEADLINE);
        }
    }
    let _ = start(&["ip", "netns", "del", SPACE]).finish(DEADLINE);
}
