//! The findings for made-up facts.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::SystemTime;

use rblk_config::Paths;
use rblk_config::key_file::{self, Side};
use rblk_operate::doctor::{
    Directory, HostFacts, Interface, PeerRoute, PortState, Subnet, SystemdFacts,
};

use super::paths as judged;
use super::*;
use rblk_operate::mount::mount_status::MountStatus;

/// A sound host without devices and without a key.
fn facts() -> Facts {
    Facts {
        is_root: true,
        host: HostFacts {
            kernel: "6.18.15".to_owned(),
            in_pid_namespace: false,
            io_uring: None,
            io_uring_disabled: Some(0),
            memlock: Some(u64::MAX),
            locks_beyond: false,
            now: SystemTime::now(),
            built: None,
            synchronised: None,
        },
        ublk: Ok(Features::from_bits(0x1_ffff)),
        ublk_minor: Some(62),
        interfaces: Vec::new(),
        devices: Vec::new(),
        key: key_file::read(Path::new("/nonexistent/host.key"), Side::Initiator)
            .map(|key| key.public()),
        run_dir: Directory::look(Path::new("/"), 0, 1),
        systemd: SystemdFacts { runs: false, file: None, user: None, units: Vec::new() },
        served: Vec::new(),
        dead: Vec::new(),
        without_note: Vec::new(),
    }
}

fn peer(address: &str) -> Peer {
    Peer { address: address.parse().unwrap(), resolved: Ok(Vec::new()), route: None }
}

fn failed_as(error: ProbeError) -> Finding {
    failed(error, "as it said", &peer("tcp://store1:99"), &facts(), None)
}

#[test]
fn the_driver_is_reported_with_its_features_or_the_fix() {
    let of = |result, minor, no_ring| {
        let finding = ublk(&result, minor, no_ring);
        (finding.verdict, finding.fix)
    };
    let all = Features::USER_RECOVERY | Features::USER_RECOVERY_REISSUE;
    assert_eq!(
        ublk(&Ok(all), None, false).found,
        "recovery yes; resize no (needs 6.16); zero copy no (not used)"
    );
    assert_eq!(of(Ok(Features::NONE), None, false).0, Verdict::Fail);
    let none = || Err(UblkError::NoDriver { kernel: "6.6".to_owned() });
    assert_eq!(of(none(), None, false), (Verdict::Fail, Some("modprobe ublk_drv".to_owned())));
    let node = "mknod -m 600 /dev/ublk-control c 10 62".to_owned();
    assert_eq!(of(none(), Some(62), false), (Verdict::Fail, Some(node)));
    let refused = || Err(UblkError::NoIoUring { source: io::ErrorKind::PermissionDenied.into() });
    assert_eq!(of(refused(), None, true).0, Verdict::Skip, "io_uring says so");
    assert_eq!(of(refused(), None, false).0, Verdict::Fail);
    let denied = Err(UblkError::NotPermitted { action: "x".to_owned() });
    assert_eq!(of(denied, None, false).0, Verdict::Skip);
}

#[test]
fn a_host_in_order_has_no_fault() {
    let config = MountConfig::default();
    for finding in host(&facts(), &config, true) {
        assert!(matches!(finding.verdict, Verdict::Ok | Verdict::Skip), "{finding:?}");
    }
    assert_eq!(buffer_bytes(&config), 4 * u64::from(config.queue_depth) * (256 << 10));
}

#[test]
fn a_missing_key_is_a_fault_only_where_the_target_wants_one() {
    let config = MountConfig::default();
    assert_eq!(key_file(&facts(), &config).verdict, Verdict::Skip);
    let key = "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe";
    let mut config = config;
    config.target_keys = vec![key.parse().unwrap()];
    let finding = key_file(&facts(), &config);
    assert_eq!(finding.verdict, Verdict::Fail);
    assert_eq!(finding.fix.as_deref(), Some("rblk-initiator key new --file /nonexistent/host.key"));
}

#[test]
fn findings_that_block_a_connection() {
    for (finding, expected) in [
        (Finding::fail("name", ""), Some("the name")),
        (Finding::fail("mlx5_0/1", ""), Some("port mlx5_0/1")),
        (Finding::fail("key file", ""), Some("the key file")),
        (Finding::skip("route", ""), Some("the route")),
        (Finding::skip("rdma", ""), None),
        (Finding::warn("mlx5_0/1", ""), None),
        (Finding::ok("route", ""), None),
    ] {
        assert_eq!(blocks(&finding).as_deref(), expected, "{finding:?}");
    }
}

#[test]
fn each_failed_try_has_a_subject_and_a_fix() {
    for (error, subject, fix) in [
        (ProbeError::Refused, "port", Some("systemctl start rblk-target || rblk-target doctor")),
        (ProbeError::TimedOut, "port", Some("rblk-target doctor")),
        (ProbeError::NotRblk, "connect", Some("rblk-target status")),
        (ProbeError::WrongTargetKey, "keys", Some("rblk-target key show")),
        (
            ProbeError::HostNotAllowed,
            "keys",
            Some("rblk-target host add NAME --key KEY --volume VOLUME:rw"),
        ),
        (ProbeError::KeysWanted, "keys", Some("rblk-initiator key new")),
        (ProbeError::NoProof, "keys", Some("rblk-target key new; rblk-target doctor")),
        (ProbeError::NotEncrypted, "tls", Some("rblk-target doctor")),
        (ProbeError::Memlock, "memlock", Some("ulimit -l unlimited")),
        (ProbeError::Busy, "connect", Some("rblk-target status")),
        (ProbeError::SelfTest, "self-test", None),
        (ProbeError::Version, "connect", None),
        (ProbeError::NoVerbs, "connect", None),
        (ProbeError::Other, "connect", None),
    ] {
        let finding = failed_as(error);
        assert_eq!((finding.verdict, &*finding.subject), (Verdict::Fail, subject), "{error:?}");
        assert_eq!(finding.fix.as_deref(), fix, "{error:?}");
    }
}

#[test]
fn paths_by_one_port_are_one_cable() {
    let port = |number, interfaces: &[&str]| RdmaPort {
        number,
        state: PortState::Active,
        is_infiniband: false,
        rate: String::new(),
        gids: Vec::new(),
        interfaces: interfaces.iter().map(|name| (*name).to_owned()).collect(),
    };
    let device = |name: &str, ports| RdmaDevice {
        near: Default::default(),
        name: name.to_owned(),
        is_iwarp: false,
        is_software: false,
        ports,
    };
    let interface = |name: &str, at: u8| Interface {
        name: name.to_owned(),
        up: true,
        subnets: vec![Subnet { address: [10, at, 0, 2].into(), prefix: 24 }],
        ..Interface::default()
    };
    let devices = vec![
        device("mlx5_0", vec![port(1, &["eth0", "eth0.7"])]),
        device("mlx4_0", vec![port(1, &["ib0"]), port(2, &["ib1"])]),
    ];
    let names = ["eth0", "eth0.7", "ib0", "ib1", "eth9"];
    let interfaces = (0..).zip(names).map(|(at, name)| interface(name, at)).collect();
    let facts = Facts { devices, interfaces, ..facts() };
    let config = |paths| {
        let mut config = MountConfig::default();
        config.paths = paths;
        config
    };
    let of = |ways: &[u8], paths| {
        let peers: Vec<Peer> = ways
            .iter()
            .map(|at| {
                let local = Some([10, *at, 0, 2].into());
                let route = PeerRoute { peer: [10, *at, 0, 1].into(), local };
                Peer { route: Some(route), ..peer(&format!("10.{at}.0.1")) }
            })
            .collect();
        judged(&peers, &facts, &config(paths))
    };
    let vlans = of(&[0, 1, 2], Paths::All);
    assert_eq!((vlans.len(), vlans[0].verdict), (1, Verdict::Warn));
    assert_eq!(
        vlans[0].found,
        "2 paths, one cable: rdma://10.0.0.1:7720 and rdma://10.1.0.1:7720 leave by mlx5_0, and fail \
         together"
    );
    assert_eq!(of(&[2, 3], Paths::All)[0].verdict, Verdict::Ok, "two ports of a device");
    let same = of(&[3, 3], Paths::All);
    assert!(same[0].found.contains("by port 2 of mlx4_0"), "{same:?}");
    assert_eq!(of(&[4, 4], Paths::All)[0].verdict, Verdict::Warn, "TCP");
    assert_eq!(of(&[0, 1], Paths::Failover), []);
    assert_eq!(of(&[0], Paths::All), []);
    let lost = judged(&[peer("a"), peer("b")], &facts, &config(Paths::All));
    assert_eq!(lost[0].verdict, Verdict::Skip, "no route");
}

#[test]
fn paths_by_unequal_ports_are_told() {
    let port = |at: u8, rate: &str| RdmaDevice {
        near: Default::default(),
        name: format!("mlx5_{at}"),
        is_iwarp: false,
        is_software: false,
        ports: vec![RdmaPort {
            number: 1,
            state: PortState::Active,
            is_infiniband: false,
            rate: rate.to_owned(),
            gids: Vec::new(),
            interfaces: vec![format!("eth{at}")],
        }],
    };
    let interface = |at: u8, mtu| Interface {
        name: format!("eth{at}"),
        up: true,
        mtu: Some(mtu),
        subnets: vec![Subnet { address: [10, at, 0, 2].into(), prefix: 24 }],
        ..Interface::default()
    };
    let mut config = MountConfig::default();
    config.paths = Paths::All;
    let peers = [0, 1].map(|at| {
        let route = PeerRoute { peer: [10, at, 0, 1].into(), local: Some([10, at, 0, 2].into()) };
        Peer { route: Some(route), ..peer(&format!("10.{at}.0.1")) }
    });
    let of = |rates: [&str; 2], mtus: [u32; 2]| {
        let devices = vec![port(0, rates[0]), port(1, rates[1])];
        let interfaces = vec![interface(0, mtus[0]), interface(1, mtus[1])];
        let found = judged(&peers, &Facts { devices, interfaces, ..facts() }, &config);
        found.into_iter().map(|finding| finding.found).collect::<Vec<_>>()
    };
    let fast = "100 Gb/sec (4X EDR)";
    assert_eq!(of([fast; 2], [4200; 2]), ["each leaves by a port of its own"]);
    assert_eq!(of([fast, ""], [4200; 2]), ["each leaves by a port of its own"], "not known");
    let [mtu, speed] = ["MTU: ", "speed: "].map(|what| format!("their ports differ in {what}"));
    let [one, two] = [0, 1].map(|at| format!("rdma://10.{at}.0.1:7720"));
    assert_eq!(of([fast; 2], [1500, 4200]), [format!("{mtu}{one} 1500, {two} 4200")]);
    let slow = "25 Gb/sec (1X EDR)";
    assert_eq!(of([slow, fast], [1500; 2]), [format!("{speed}{one} {slow}, {two} {fast}")]);
    assert_eq!(of([slow, fast], [1500, 4200]).len(), 2);
}

/// To make a device anew would end the connections of all its users: that is not proposed.
#[test]
fn a_mute_software_device_is_named_and_left_alone() {
    let device: RdmaDevice = RdmaDevice {
        near: Default::default(),
        name: "rxe0".to_owned(),
        is_iwarp: false,
        is_software: true,
        ports: vec![RdmaPort {
            number: 1,
            state: PortState::Active,
            is_infiniband: false,
            rate: String::new(),
            gids: Vec::new(),
            interfaces: vec!["eth0".to_owned()],
        }],
    };
    let address: IpAddr = "10.9.0.1".parse().unwrap();
    let interface = Interface {
        name: "eth0".to_owned(),
        up: true,
        subnets: vec![Subnet { address, prefix: 24 }],
        ..Interface::default()
    };
    let facts = Facts { devices: vec![device], interfaces: vec![interface], ..facts() };
    let route = PeerRoute { peer: "10.9.0.2".parse().unwrap(), local: Some(address) };
    let peer = Peer { route: Some(route), ..peer("rdma://10.9.0.2") };
    let finding = failed(ProbeError::TimedOut, "late", &peer, &facts, None);
    assert_eq!(finding.fix.as_deref(), Some("rdma resource show qp link rxe0"));
    assert!(finding.found.contains("rxe0, which is Soft-RoCE"), "{finding:?}");
    assert!(finding.found.contains("(UDP port 4791 (RoCE) must pass)"), "{finding:?}");
    assert!(!finding.found.contains("7720"), "no packet has that port: {finding:?}");
}

#[test]
fn the_traffic_for_a_firewall_is_named() {
    let of = |address: &str| failed(ProbeError::TimedOut, "late", &peer(address), &facts(), None);
    assert!(of("tcp://store1").found.contains("(TCP port 7721 must pass)"));
    let rdma = of("rdma://store1").found;
    assert!(rdma.contains("(UDP port 4791 for RoCE, TCP port 7720 for iWARP must pass)"), "{rdma}");
}

#[test]
fn data_that_does_not_come_names_the_mtu() {
    let read = |fault| LargeRead {
        volume: "a".to_owned(),
        bytes: 256 << 10,
        took: std::time::Duration::from_micros(1300),
        fault,
    };
    let of = |fault| large_read(&read(fault), &peer("tcp://store1"), &facts());
    assert_eq!(of(None).found, "256KiB of a read in 1.3ms");
    let silent = of(Some(ReadFault::Silent));
    assert_eq!(silent.verdict, Verdict::Fail);
    assert!(silent.found.starts_with("logins pass, and 256KiB of a do not come: MTU?"));
    assert_eq!(silent.fix.as_deref(), Some("ping -M do -c 3 -s 1472 store1"));
    assert!(of(Some(ReadFault::Errno(5))).found.contains("Input/output error"));
}

#[test]
fn a_closed_port_leads_to_the_usual_one() {
    let refused = Probe::Failed { error: ProbeError::Refused, text: String::new() };
    let address = |text: &str| text.parse::<Address>().unwrap();
    let usual = |text| may_be_elsewhere(&refused, &address(text));
    assert_eq!(usual("tcp://store1:99"), Some(address("tcp://store1:7721")));
    assert_eq!(usual("[fd00::1]:99"), Some(address("rdma://[fd00::1]:7720")));
    assert_eq!(usual("store1"), None, "it is the usual one");
    let other = Probe::other(String::new());
    assert_eq!(may_be_elsewhere(&other, &address("tcp://store1:99")), None);
    let elsewhere = address("tcp://store1");
    let peer = peer("tcp://store1:99");
    let finding = failed(ProbeError::Refused, "", &peer, &facts(), Some(&elsewhere));
    assert_eq!(finding.fix.as_deref(), Some("rblk-initiator doctor tcp://store1:7721"));
}

#[test]
fn a_volume_that_is_not_shown_is_a_fault() {
    let works = Probe::Works {
        target: "t".to_owned(),
        transport: "soft/TCP".to_owned(),
        device: "soft".to_owned(),
        volumes: vec!["a".to_owned(), "b".to_owned()],
        data: None,
    };
    let of = |volume: &str| {
        let mut config = MountConfig::default();
        volume.clone_into(&mut config.volume);
        connection(&works, &peer("tcp://t"), &facts(), &config, None)
    };
    assert!(of("").iter().all(|finding| finding.subject != "volume"));
    assert_eq!(of("a").last().unwrap().verdict, Verdict::Ok);
    let missing = of("c");
    let missing = missing.last().unwrap();
    assert_eq!(missing.verdict, Verdict::Fail);
    assert!(missing.found.ends_with("it shows: a, b"), "{missing:?}");
}

#[test]
fn each_leftover_has_the_command_that_clears_it() {
    let dead = |condition| DeadMount { name: "m".to_owned(), condition, disk: None };
    for (condition, verdict, fix) in [
        (Condition::Waiting, Verdict::Fail, "rblk-initiator recover m"),
        (Condition::Ending, Verdict::Fail, "rblk-initiator recover m"),
        (Condition::Unusable, Verdict::Fail, "rblk-initiator umount --force m"),
        (Condition::Gone, Verdict::Warn, "rblk-initiator umount m"),
        (Condition::Diskless, Verdict::Warn, "rblk-initiator umount m"),
    ] {
        let found = mounts(&Facts { dead: vec![dead(condition)], ..facts() });
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].verdict, found[0].fix.as_deref()), (verdict, Some(fix)));
    }
    let without_note = [
        ("/dev/ublkb3", ServedBy::Nobody),
        ("/dev/ublkb4", ServedBy::Process(7)),
        ("/dev/ublkb5", ServedBy::Elsewhere),
    ];
    let without_note = without_note.map(|(disk, by)| (disk.to_owned(), by)).to_vec();
    let found = mounts(&Facts { without_note, ..facts() });
    assert_eq!((found.len(), found[1].verdict), (3, Verdict::Warn));
    assert_eq!((found[2].verdict, found[2].fix.as_deref()), (Verdict::Warn, None), "it lives");
    assert!(found[1].found.contains("/dev/ublkb4: process 7 serves it"), "{found:?}");
    assert_eq!(found[1].fix.as_deref(), Some("rblk-initiator umount /dev/ublkb4"));
    assert_eq!(found[0].fix.as_deref(), Some("rblk-initiator umount --force /dev/ublkb3"));
    assert_eq!(mounts(&facts())[0].verdict, Verdict::Ok);
    assert_eq!(mounts(&Facts { is_root: false, ..facts() })[0].verdict, Verdict::Skip);
}

#[test]
fn a_mount_without_its_target_is_a_failure() {
    let served = |state: &str| {
        let mut status = MountStatus { name: "m".to_owned(), ..MountStatus::default() };
        status.state = state.to_owned();
        status.target = vec!["tcp://store1".to_owned()];
        status.lost_ms_ago = (state != "connected").then_some(12_000);
        ServedMount { name: "m".to_owned(), status: Some(status) }
    };
    let judged = |mount| mounts(&Facts { served: vec![mount], ..facts() }).remove(0);
    assert_eq!(judged(served("connected")).verdict, Verdict::Ok);
    let lost = judged(served("reconnecting"));
    assert_eq!(lost.verdict, Verdict::Fail);
    assert_eq!(lost.found, "m: its target is lost, and requests wait (for 12 s)");
    assert_eq!(lost.fix.as_deref(), Some("rblk-initiator doctor tcp://store1"));
    let silent = judged(ServedMount { name: "m".to_owned(), status: None });
    assert_eq!(silent.verdict, Verdict::Warn);
}

#[test]
fn a_mount_that_proves_its_key_spares_the_try_without_one() {
    let asked = |state: &str, address: &str| {
        let status = MountStatus {
            name: "m".to_owned(),
            state: state.to_owned(),
            lost_ms_ago: (state != "connected").then_some(1),
            auth: "key".to_owned(),
            address: address.to_owned(),
            ..MountStatus::default()
        };
        let mount = ServedMount { name: "m".to_owned(), status: Some(status) };
        keys_wanted(&peer("tcp://store1:99").address, &Facts { served: vec![mount], ..facts() })
    };
    let spared = asked("connected", "tcp://store1:99");
    assert_eq!(spared.verdict, Verdict::Skip);
    assert!(spared.found.contains("mount m proves its own"), "{}", spared.found);
    for (state, address) in [("reconnecting", "tcp://store1:99"), ("connected", "tcp://store1")] {
        assert_eq!(asked(state, address).verdict, Verdict::Fail, "{state} {address}");
    }
}
