//! Trees of sysfs as cards and software devices have them, and what is said of them.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use super::*;
use crate::doctor::peer_route::{PeerRoute, judge_listen, judge_route};
use crate::doctor::report::Verdict;
use crate::doctor::{Interface, Subnet};
use crate::host::rdma_device::{Gid, rdma_devices};

/// A host: a directory with a tree of sysfs, and the addresses of its interfaces.
struct HostTree {
    root: tempfile::TempDir,
    subnets: Vec<(&'static str, Subnet)>,
}

/// What tells one kind of device from another in sysfs.
#[derive(Clone, Copy)]
struct Kind {
    /// `node_type`.
    node: &'static str,
    link: &'static str,
    rate: &'static str,
    /// Whether it is a card: a device on a bus.
    card: bool,
    /// Whether it names its interface in `parent`.
    parent: bool,
    /// The type of its GIDs.
    gid: &'static str,
}

const MLX5: Kind = Kind {
    node: "1: CA",
    link: "Ethernet",
    rate: "100 Gb/sec (4X EDR)",
    card: true,
    parent: false,
    gid: "RoCE v2",
};
const MLX5_IB: Kind = Kind { link: "InfiniBand", gid: "IB/RoCE v1", ..MLX5 };
const IRDMA: Kind = Kind { node: "4: RNIC", gid: "", ..MLX5 };
const RXE: Kind = Kind { rate: "2.5 Gb/sec (1X SDR)", card: false, parent: true, ..MLX5 };
const SIW: Kind = Kind { node: "4: RNIC", parent: false, gid: "", ..RXE };

impl HostTree {
    fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap(), subnets: Vec::new() }
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root.path().join("sys/class").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn interface(mut self, name: &'static str, mtu: u32, up: bool, address: &str) -> Self {
        self.put(&format!("net/{name}/mtu"), &mtu.to_string());
        self.put(&format!("net/{name}/flags"), if up { "0x1003" } else { "0x1002" });
        self.put(&format!("net/{name}/operstate"), if up { "up" } else { "down" });
        self.put(&format!("net/{name}/address"), "02:00:00:00:00:0a");
        let address = address.parse().unwrap();
        self.subnets.push((name, Subnet { address, prefix: 24 }));
        self
    }

    fn device(self, name: &str, kind: Kind, state: &str, interface: &str, gid: &str) -> Self {
        let port = format!("infiniband/{name}/ports/1");
        self.put(&format!("infiniband/{name}/node_type"), kind.node);
        self.put(&format!("{port}/state"), state);
        self.put(&format!("{port}/link_layer"), kind.link);
        self.put(&format!("{port}/rate"), kind.rate);
        self.put(&format!("{port}/gids/0"), gid);
        self.put(&format!("{port}/gids/1"), "0000:0000:0000:0000:0000:0000:0000:0000");
        if !kind.gid.is_empty() {
            self.put(&format!("{port}/gid_attrs/types/0"), kind.gid);
        }
        if kind.card {
            self.put(&format!("infiniband/{name}/device/net/{interface}/mtu"), "");
            self.put(&format!("net/{interface}/device/infiniband/{name}/node_type"), "");
        }
        if kind.parent {
            self.put(&format!("infiniband/{name}/parent"), interface);
        }
        self
    }

    fn devices(&self) -> Vec<RdmaDevice> {
        rdma_devices(self.root.path())
    }

    fn interfaces(&self) -> Vec<Interface> {
        let mut found = crate::host::interface::from_sysfs(self.root.path());
        for (name, subnet) in &self.subnets {
            found.iter_mut().find(|i| i.name == *name).unwrap().subnets.push(*subnet);
        }
        found
    }

    fn judge(&self, needs: &[&str]) -> Vec<(Verdict, String, Option<String>)> {
        let addresses = needs.iter().map(|text| text.parse().unwrap()).collect();
        let needs = Needs { wanted: true, addresses };
        let judged = judge_rdma(&self.devices(), &self.interfaces(), &needs);
        judged
            .into_iter()
            .map(|f| (f.verdict, format!("{}: {}", f.subject, f.found), f.fix))
            .collect()
    }

    fn route(&self, peer: &str, local: Option<&str>) -> (Verdict, String, Option<String>) {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let route = PeerRoute { peer: ip(peer), local: local.map(ip) };
        let judged = judge_route(&route, &self.interfaces(), &self.devices(), true);
        (judged.verdict, judged.found, judged.fix)
    }
}

const ACTIVE: &str = "4: ACTIVE";
/// 10.9.0.1 as a GID, and the hardware address of the interfaces above.
const GID: &str = "0000:0000:0000:0000:0000:ffff:0a09:0001";
const MAC_GID: &str = "0200:0000:000a:0000:0000:0000:0000:0000";

fn host(kind: Kind, gid: &str) -> HostTree {
    HostTree::new()
        .interface("ens1", 4500, true, "10.9.0.1")
        .device("d0", kind, ACTIVE, "ens1", gid)
}

#[test]
fn every_kind_of_device_is_read_and_found_by_its_interface() {
    for (kind, gid, is_iwarp, is_software, words) in [
        (MLX5, GID, false, false, "RoCE v2, 100 Gb/sec, ens1, MTU 4096"),
        (MLX5_IB, "fe80::1", false, false, "InfiniBand, 100 Gb/sec, ens1"),
        (IRDMA, MAC_GID, true, false, "iWARP, 100 Gb/sec, ens1"),
        (RXE, GID, false, true, "RoCE v2, ens1, MTU 4096"),
        (SIW, MAC_GID, true, true, "iWARP, ens1"),
    ] {
        let host = host(kind, gid);
        let devices = host.devices();
        assert_eq!(devices.len(), 1);
        assert_eq!((devices[0].is_iwarp, devices[0].is_software), (is_iwarp, is_software));
        assert_eq!(devices[0].ports[0].interfaces, ["ens1"], "{words}");
        assert_eq!(host.judge(&["10.9.0.1"]), [(Verdict::Ok, format!("d0/1: {words}"), None)]);
        let (verdict, found, _) = host.route("10.9.0.2", Some("10.9.0.1"));
        assert_eq!((verdict, &*found), (Verdict::Ok, "to 10.9.0.2 leaves by ens1, which has d0"));
        let listen = judge_listen("10.9.0.1".parse().unwrap(), &host.interfaces(), &devices);
        assert_eq!(listen.verdict, Verdict::Ok, "{listen:?}");
    }
}

#[test]
fn a_gid_of_ipv4_stands_as_ipv4_and_empty_ones_are_left_out() {
    let devices = host(MLX5, GID).devices();
    let expected = Gid { index: 0, address: "10.9.0.1".parse().unwrap(), is_v2: true };
    assert_eq!(devices[0].ports[0].gids, [expected]);
}

#[test]
fn a_small_mtu_is_a_warning_where_roce_uses_it() {
    let tree = |mtu, kind, gid| {
        let tree = HostTree::new().interface("ens1", mtu, true, "10.9.0.1");
        tree.device("d0", kind, ACTIVE, "ens1", gid)
    };
    let judged = tree(1500, MLX5, GID).judge(&["10.9.0.1"]);
    assert_eq!(judged[0].0, Verdict::Warn);
    assert!(judged[0].1.ends_with("MTU 1024 of 4096"), "{judged:?}");
    assert_eq!(judged[0].2.as_deref(), Some("ip link set ens1 mtu 4200"));
    assert_eq!(tree(4200, MLX5, GID).judge(&["10.9.0.1"])[0].0, Verdict::Ok);
    assert_eq!(tree(1500, IRDMA, MAC_GID).judge(&["10.9.0.1"])[0].0, Verdict::Ok);
    assert_eq!(tree(1500, MLX5_IB, "fe80::1").judge(&["10.9.0.1"])[0].0, Verdict::Ok);
    // Nobody named the interface, or others decide with it: reading is proposed, not a change.
    let any = tree(1500, MLX5, GID).judge(&[]);
    let bonded = tree(1500, MLX5, GID);
    bonded.put("net/ens1/master", "");
    for judged in [any, bonded.judge(&["10.9.0.1"])] {
        assert_eq!(judged[0].0, Verdict::Warn);
        assert!(
            judged[0].1.ends_with("MTU 1024 of 4096, as the MTU of ens1 is 1500"),
            "{judged:?}"
        );
        assert_eq!(judged[0].2.as_deref(), Some("ip -d link show dev ens1"));
    }
    for (interface, mtu) in [(1500, 1024), (4191, 2048), (4192, 4096), (9000, 4096), (100, 256)] {
        assert_eq!(roce_mtu(interface), mtu, "{interface}");
    }
}

#[test]
fn a_port_that_is_needed_and_down_is_the_only_fault() {
    let tree = HostTree::new()
        .interface("ens1", 4500, false, "10.9.0.1")
        .device("d0", RXE, "1: DOWN", "ens1", GID)
        .interface("ens2", 4500, false, "10.8.0.1")
        .device("d1", RXE, "1: DOWN", "ens2", GID);
    let judged = tree.judge(&["10.9.0.1"]);
    assert_eq!(judged[0].0, Verdict::Fail);
    assert_eq!(judged[0].2.as_deref(), Some("ip link set ens1 up"));
    assert_eq!(judged[1].0, Verdict::Skip, "nobody needs it");
    // Whether the kernel still has a route or not.
    for local in [Some("10.9.0.1"), None] {
        let (verdict, found, fix) = tree.route("10.9.0.2", local);
        assert_eq!((verdict, &*found, fix), (Verdict::Skip, "needs ens1 to be up", None));
    }
    let init = HostTree::new()
        .interface("ib0", 2044, true, "10.9.0.1")
        .device("d0", MLX5_IB, "2: INIT", "ib0", "fe80::1");
    let judged = init.judge(&["10.9.0.1"]);
    assert!(judged[0].1.contains("subnet manager"), "{judged:?}");
    let unplugged = HostTree::new()
        .interface("ens1", 4500, true, "10.9.0.1")
        .device("d0", MLX5, "1: DOWN", "ens1", GID);
    assert!(unplugged.judge(&["10.9.0.1"])[0].1.contains("cable"));
}

#[test]
fn a_route_by_an_interface_without_rdma_is_a_fault_with_a_way_out() {
    let tree = host(MLX5, GID).interface("eth0", 1500, true, "10.8.0.1");
    let (verdict, found, fix) = tree.route("192.0.2.1", Some("10.8.0.1"));
    assert_eq!(verdict, Verdict::Fail);
    assert_eq!(found, "to 192.0.2.1 leaves by eth0, which has no RDMA device");
    assert_eq!(fix.as_deref(), Some("ip route add 192.0.2.1 dev ens1"));
    // An address of this host itself: only a device helps.
    let (_, _, fix) = tree.route("10.8.0.1", Some("10.8.0.1"));
    assert_eq!(fix.as_deref(), Some("rdma link add rxe_eth0 type rxe netdev eth0"));
    let (verdict, found, fix) = tree.route("192.0.2.1", None);
    assert_eq!((verdict, &*found), (Verdict::Fail, "no route to 192.0.2.1"));
    assert_eq!(fix.as_deref(), Some("ip route add 192.0.2.1 dev ens1"));
}

#[test]
fn an_address_without_a_gid_of_roce_v2_is_a_fault() {
    let other = "0000:0000:0000:0000:0000:ffff:0a09:0063";
    let (verdict, found, _) = host(MLX5, other).route("10.9.0.2", Some("10.9.0.1"));
    assert_eq!((verdict, &*found), (Verdict::Fail, "ens1: d0 has no GID for 10.9.0.1"));
    let v1 = Kind { gid: "IB/RoCE v1", ..MLX5 };
    let (verdict, _, fix) = host(v1, GID).route("10.9.0.2", Some("10.9.0.1"));
    assert_eq!(verdict, Verdict::Fail);
    assert_eq!(fix.as_deref(), Some("cma_roce_mode -d d0 -p 1 -m 2"));
}

#[test]
fn a_host_without_devices_is_told_how_to_get_one_if_it_wants_one() {
    let tree = HostTree::new()
        .interface("lo", 65536, true, "127.0.0.1")
        .interface("eth0", 1500, true, "10.9.0.1");
    let judged = tree.judge(&["10.9.0.1"]);
    assert_eq!(judged[0].0, Verdict::Fail);
    assert_eq!(judged[0].2.as_deref(), Some("rdma link add rxe_eth0 type rxe netdev eth0"));
    // Soft-RoCE does not work on the loopback interface.
    assert_eq!(tree.judge(&["127.0.0.1"])[0].2, judged[0].2);
    let unwanted = judge_rdma(&[], &tree.interfaces(), &Needs::default());
    assert_eq!(unwanted[0].verdict, Verdict::Skip);
    assert_eq!(tree.route("10.9.0.1", Some("10.9.0.1")).0, Verdict::Skip);
    assert!(rdma_devices(Path::new("/nonexistent")).is_empty());
}

#[test]
fn an_address_that_no_interface_has_cannot_be_listened_on() {
    let tree = host(MLX5, GID);
    let listen = judge_listen("10.7.0.1".parse().unwrap(), &tree.interfaces(), &tree.devices());
    assert_eq!(listen.verdict, Verdict::Fail);
    assert_eq!(listen.fix.as_deref(), Some("ip addr add 10.7.0.1/24 dev ens1"));
}

#[test]
fn what_makes_no_sense_in_sysfs_is_no_panic() {
    let tree = HostTree::new();
    for (path, text) in [
        ("infiniband/x/ports/one/state", "4: ACTIVE"),
        ("infiniband/x/ports/1/state", "what"),
        ("infiniband/x/ports/1/gids/0", "no gid"),
        ("infiniband/x/node_type", ""),
        ("net/e/flags", "zz"),
        ("net/e/mtu", "-1"),
    ] {
        tree.put(path, text);
    }
    let devices = tree.devices();
    assert_eq!(devices[0].ports.len(), 1);
    assert_eq!(devices[0].ports[0].state, PortState::Other);
    assert_eq!(tree.judge(&[])[0].0, Verdict::Fail);
}

#[test]
fn cpus_of_another_node_than_a_device_are_named() {
    let host = HostTree::new();
    // A card on each node, and Soft-RoCE, which is on none.
    for (name, near) in [("mlx5_0", Some("16-31")), ("mlx5_1", Some("0-15")), ("rxe0", None)] {
        host.put(&format!("infiniband/{name}/node_type"), "1: CA");
        if let Some(near) = near {
            host.put(&format!("infiniband/{name}/device/local_cpulist"), near);
        }
    }
    let devices = rdma_devices(host.root.path());
    let far = |cpus: &[u16], name: &str| far_cpus(&devices, Some(&[name.to_owned()]), cpus);
    assert_eq!(far(&[16, 31], "mlx5_0"), Vec::<String>::new());
    assert_eq!(far(&[3], "rxe0"), Vec::<String>::new());
    assert_eq!(
        far(&[3, 16, 4], "mlx5_0"),
        [
            "the NUMA node of mlx5_0 has no CPU 3, 4; its CPUs are 16-31. Data of the other CPUs crosses nodes"
        ]
    );
    assert_eq!(far_cpus(&devices, None, &[3, 16]).len(), 2, "each card has one that is far");
    assert_eq!(far_cpus(&devices, None, &[]), Vec::<String>::new());
}
