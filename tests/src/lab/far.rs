//! [`FarHost`]: a second host of sorts, joined to this one by a cable that can be cut.
//!
//! Packets to an address of its own never leave a Soft-RoCE device, so nothing can be done to them. This is a
//! network namespace with a Soft-RoCE device on a virtual interface; a target runs there, and every packet goes
//! over a bridge that both sides are plugged into.
//!
//! Cut, the bridge loses a port. Interfaces stay up and sending never fails, as with a cable that is cut beyond
//! the first switch. Taking the interface down, or dropping on its way out, fails sends now and then; one that
//! rdma_cm makes just then puts QP 1 of a Soft-RoCE device into the error state for ever (Linux 7.2), and
//! nobody connects through the device again.

use super::Lab;
use super::process::start;
use super::wait::DEADLINE;

const SPACE: &str = "rblkfar";
const ENDS: [&str; 2] = ["rblknear0", "rblkfar0"];
const PORTS: [&str; 2] = ["rblknear1", "rblkfar1"];
const BRIDGE: &str = "rblkbridge0";
const DEVICES: [&str; 2] = ["rxenear", "rxefar"];
const HOSTS: [&str; 2] = ["10.91.7.1", "10.91.7.2"];
const LINKS: [&str; 2] = ["02:72:62:6c:6b:01", "02:72:62:6c:6b:02"];

/// The host behind the cable. Dropped, it is gone.
#[derive(Debug)]
pub struct FarHost(());

/// A cut cable. Dropped, it is whole again.
#[derive(Debug)]
pub struct Cut<'f>(&'f FarHost);

fn ip(words: &str) {
    let words: Vec<&str> = words.split(' ').collect();
    let _ = start(&words).finish(DEADLINE).ok();
}

impl FarHost {
    /// Makes it. `lab` is proof that this machine may be changed.
    ///
    /// # Panics
    /// The kernel has no network namespaces for Soft-RoCE (before 7.1), or other things are missing.
    #[must_use]
    pub fn new(_lab: &Lab) -> Self {
        for module in ["veth", "bridge"] {
            // Built in, maybe.
            let _ = start(&["modprobe", "-q", module]).finish(DEADLINE);
        }
        let [near, far] = ENDS;
        ip(&format!("ip netns add {SPACE}"));
        let host = Self(());
        ip(&format!("ip link add {BRIDGE} mtu 4500 type bridge"));
        ip(&format!("ip link set {BRIDGE} up"));
        for ((end, port), mac) in ENDS.iter().zip(PORTS).zip(LINKS) {
            ip(&format!(
                "ip link add {end} mtu 4500 address {mac} type veth peer name {port} mtu 4500"
            ));
            ip(&format!("ip link set {port} master {BRIDGE} up"));
        }
        ip(&format!("ip link set {far} netns {SPACE}"));
        ip(&format!("ip addr add {}/24 dev {near}", HOSTS[0]));
        ip(&format!("ip link set {near} up"));
        ip(&format!("ip -n {SPACE} addr add {}/24 dev {far}", HOSTS[1]));
        ip(&format!("ip -n {SPACE} link set lo up"));
        ip(&format!("ip -n {SPACE} link set {far} up"));
        // Neighbours know each other: here the answer to ARP comes before the RDMA core waits for it, which then
        // sits out its whole timeout.
        ip(&format!("ip neigh replace {} lladdr {} dev {near}", HOSTS[1], LINKS[1]));
        ip(&format!("ip -n {SPACE} neigh replace {} lladdr {} dev {far}", HOSTS[0], LINKS[0]));
        ip(&format!("rdma link add {} type rxe netdev {near}", DEVICES[0]));
        ip(&format!("ip netns exec {SPACE} rdma link add {} type rxe netdev {far}", DEVICES[1]));
        host
    }

    /// Its name as a network namespace.
    #[must_use]
    pub fn space(&self) -> &'static str {
        SPACE
    }

    /// Its address.
    #[must_use]
    pub fn host(&self) -> &'static str {
        HOSTS[1]
    }

    /// Cuts the cable: both hosts still send, and neither hears anything.
    ///
    /// # Panics
    /// The bridge keeps its port.
    #[must_use]
    pub fn cut(&self) -> Cut<'_> {
        ip(&format!("ip link set {} nomaster", PORTS[1]));
        Cut(self)
    }
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        let ended = start(&["ip", "link", "set", PORTS[1], "master", BRIDGE]).finish(DEADLINE);
        if ended.code() != 0 {
            println!("the cable to {} stays cut: {ended}", self.0.host());
        }
    }
}

impl Drop for FarHost {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- the cable, and what is connected through it");
            for words in ["rdma link show", "rdma resource show qp", "bridge link show", "ip neigh"]
            {
                let words: Vec<&str> = words.split(' ').collect();
                println!("{}", start(&words).finish(DEADLINE));
            }
        }
        take_down();
    }
}

/// Removes it, as far as it is there.
pub(super) fn take_down() {
    for device in DEVICES {
        let _ = start(&["rdma", "link", "del", device]).finish(DEADLINE);
    }
    for link in [PORTS[0], PORTS[1], BRIDGE] {
        let _ = start(&["ip", "link", "del", link]).finish(DEADLINE);
    }
    let _ = start(&["ip", "netns", "del", SPACE]).finish(DEADLINE);
}
