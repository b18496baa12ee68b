//! [`GroupNetwork`]: the network of a group of two targets and of their Ceph cluster. Each is a
//! host of its own, and each cable can be cut.
//!
//! ```text
//!  this host ---- cable ---- A ----+
//!      |                           switch ---- cluster
//!      +--------- cable ---- B ----+
//! ```
//!
//! The cables of this host have RDMA devices. A member that loses its cable to the switch also
//! loses the other member; members have nothing to say to each other but by the cluster. This host
//! has no way to the cluster, and needs none.

use std::path::Path;

use super::Lab;
use super::cable::{Cable, ip, make_host};
use super::process::start;
use super::wait::DEADLINE;

/// The members, and the cluster.
const SPACES: [&str; 3] = ["rblka", "rblkb", "rblkceph"];
const CLUSTER: usize = 2;
/// Cables of other hosts have lower numbers.
const FIRST_CABLE: usize = 2;
const SWITCH: &str = "rblkswitch";

/// See the module. Drop removes it.
#[derive(Debug)]
pub struct GroupNetwork {
    cables: [Cable; 2],
    addresses: [String; 3],
}

/// A cable between two of the hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupCable {
    /// From this host to a member.
    ToMember(usize),
    /// From a member to the cluster.
    ToCluster(usize),
}

/// The port of the switch for a host.
fn port(at: usize) -> String {
    format!("rblkswp{at}")
}

fn cable(member: usize) -> Cable {
    Cable::of(FIRST_CABLE + member, SPACES[member])
}

impl GroupNetwork {
    /// Makes the hosts, with RDMA devices of the lab's kind.
    ///
    /// # Panics
    /// The kernel has no network namespaces for Soft-RoCE (before 7.1), or other things are
    /// missing.
    #[must_use]
    pub fn new(lab: &Lab) -> Self {
        SPACES.into_iter().for_each(make_host);
        let cables = [0, 1].map(cable);
        cables.iter().for_each(|cable| cable.plug(if lab.is_iwarp() { "siw" } else { "rxe" }));
        ip(&format!("ip link add {SWITCH} type bridge"));
        ip(&format!("ip link set {SWITCH} up"));
        let addresses = [2, 3, 1].map(|last| format!("10.94.0.{last}"));
        for (at, (space, address)) in SPACES.iter().zip(&addresses).enumerate() {
            let (end, port) = (format!("rblksw{at}"), port(at));
            ip(&format!("ip link add {end} type veth peer name {port}"));
            ip(&format!("ip link set {port} master {SWITCH} up"));
            ip(&format!("ip link set {end} netns {space}"));
            ip(&format!("ip -n {space} addr add {address}/24 dev {end}"));
            ip(&format!("ip -n {space} link set {end} up"));
        }
        Self { cables, addresses }
    }

    /// The network namespace of a member.
    #[must_use]
    pub fn space(&self, member: usize) -> &'static str {
        SPACES[member]
    }

    /// The address of a member for this host.
    #[must_use]
    pub fn host(&self, member: usize) -> &str {
        self.cables[member].host()
    }

    /// The network namespace and the address of the cluster.
    #[must_use]
    pub fn cluster(&self) -> (&'static str, &str) {
        (SPACES[CLUSTER], &self.addresses[CLUSTER])
    }

    /// Cuts a cable: both hosts still send, and neither hears anything.
    ///
    /// # Panics
    /// The bridge keeps its port.
    pub fn cut(&self, cable: GroupCable) {
        match cable {
            GroupCable::ToMember(member) => self.cables[member].cut(),
            GroupCable::ToCluster(member) => ip(&format!("ip link set {} nomaster", port(member))),
        }
    }

    /// Mends a cable.
    ///
    /// # Panics
    /// It stays cut.
    pub fn mend(&self, cable: GroupCable) {
        match cable {
            GroupCable::ToMember(member) => drop(self.cables[member].mend().ok()),
            GroupCable::ToCluster(member) => {
                ip(&format!("ip link set {} master {SWITCH}", port(member)));
            }
        }
    }
}

impl Drop for GroupNetwork {
    fn drop(&mut self) {
        take_down();
    }
}

/// Removes every part of the network that exists.
pub(super) fn take_down() {
    if !SPACES.iter().any(|space| Path::new("/run/netns").join(space).exists()) {
        return;
    }
    [0, 1].map(cable).iter().for_each(Cable::take_down);
    for link in (0..SPACES.len()).map(port).chain([SWITCH.to_owned()]) {
        let _ = start(&["ip", "link", "del", &link]).finish(DEADLINE);
    }
    for space in SPACES {
        let _ = start(&["ip", "netns", "del", space]).finish(DEADLINE);
    }
}
