use rblk_operate::doctor::Subnet;

use super::*;

#[test]
fn a_card_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let class = "sys/class/infiniband/mlx5_0";
    for (file, text) in [
        ("hca_type", "MT4123"),
        ("board_id", "MT_0000000223"),
        ("fw_ver", "20.35.1012"),
        ("ports/1/state", "4: ACTIVE"),
        ("ports/1/rate", "100 Gb/sec (4X EDR)"),
        ("ports/1/link_layer", "Ethernet"),
        ("ports/1/gid_attrs/types/3", "RoCE v2"),
        ("ports/1/gid_attrs/ndevs/3", "ens1f0"),
        ("device/current_link_speed", "8.0 GT/s PCIe"),
        ("device/max_link_speed", "16.0 GT/s PCIe"),
        ("device/current_link_width", "8"),
        ("device/max_link_width", "16"),
        ("device/numa_node", "1"),
        ("device/local_cpulist", "16-31"),
        ("device/physfn/vendor", "0x15b3"),
    ] {
        let file = dir.path().join(class).join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, format!("{text}\n")).unwrap();
    }
    let net = dir.path().join("sys/class/net/ens1f0");
    std::fs::create_dir_all(&net).unwrap();
    std::fs::write(net.join("mtu"), "1500\n").unwrap();
    let card = Card::read(dir.path(), "mlx5_0", 1, 3);
    let pcie = Pcie { speed: 8.0, max_speed: 16.0, width: 8, max_width: 16 };
    assert_eq!(card.pcie, Some(pcie));
    assert_eq!((card.numa_node, card.cpus.as_str()), (Some(1), "16-31"));
    assert_eq!((card.interface.as_str(), card.interface_mtu), ("ens1f0", Some(1500)));
    assert_eq!((card.gid_type.as_str(), card.gigabits()), ("RoCE v2", Some(100.0)));
    assert!(card.is_virtual);
    // Of a software device most is absent.
    assert_eq!(Card::read(dir.path(), "rxe0", 1, 0), Card::default());
}

#[test]
fn the_limit_of_the_lowest_cgroup_counts() {
    let dir = tempfile::tempdir().unwrap();
    let put = |file: &str, text: &str| {
        let file = dir.path().join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    };
    put("proc/self/cgroup", "0::/system.slice/rblk-target.service\n");
    let top = "sys/fs/cgroup/system.slice";
    put(&format!("{top}/rdma.max"), "mlx5_0 hca_handle=9 hca_object=max\n");
    assert_eq!(cgroup_line(dir.path(), "mlx5_0").unwrap(), "hca_handle=9 hca_object=max");
    put(&format!("{top}/rblk-target.service/rdma.max"), "mlx5_0 hca_handle=2 hca_object=40\n");
    assert_eq!(cgroup_line(dir.path(), "mlx5_0").unwrap(), "hca_handle=2 hca_object=40");
    let free = "mlx5_0 hca_handle=max hca_object=max\n";
    put(&format!("{top}/rblk-target.service/rdma.max"), free);
    put(&format!("{top}/rdma.max"), free);
    assert_eq!(cgroup_line(dir.path(), "mlx5_0"), None);
    assert_eq!(cgroup_line(dir.path(), "mlx5_"), None);
    put("proc/meminfo", "MemTotal:  8 kB\nMemAvailable:   4 kB\n");
    assert_eq!(meminfo(dir.path(), "MemAvailable:"), Some(4096));
}

#[test]
fn gids_with_addresses_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let class = rdma_class(dir.path());
    let port = class.join("rxe0/ports/1");
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
    let iwarp = class.join("siw0/ports/1");
    std::fs::create_dir_all(iwarp.join("gids")).unwrap();
    std::fs::create_dir_all(iwarp.join("gid_attrs/ndevs")).unwrap();
    std::fs::write(iwarp.join("gids/0"), "3671:47ad:0088:0000:0000:0000:0000:0000\n").unwrap();
    std::fs::write(iwarp.join("gid_attrs/ndevs/0"), "v1\n").unwrap();
    std::fs::write(class.join("siw0/node_type"), "4: RNIC\n").unwrap();
    let subnet = Subnet { address: [10, 9, 1, 1].into(), prefix: 24 };
    let v1 = Interface { name: "v1".to_owned(), subnets: vec![subnet], ..Interface::default() };
    let all = gids_of(&rdma_devices(dir.path()), &[v1]);
    let brief: Vec<(u32, String)> = all.iter().map(|g| (g.index, g.ip.to_string())).collect();
    let want = [(1, "10.9.0.1"), (2, "10.9.0.1"), (4, "fd00::7"), (0, "10.9.1.1")];
    assert_eq!(brief, want.map(|(index, ip)| (index, ip.to_owned())));
    assert_eq!(gid_of([10, 9, 0, 1].into(), &all).unwrap().index, 2);
    assert_eq!(gid_of([10, 9, 0, 2].into(), &all), None);
    assert!(gid_of([10, 9, 1, 1].into(), &all).unwrap().is_iwarp);
}
