//! Devices that are not like Soft-RoCE: odd ones, full ones, ones that are pulled out.

use rblk_config::TargetConfig;
use rblk_tests::lab::{
    Aligned, Cards, DEADLINE, Lab, MountFlags, Mounted, Plug, Running, Target, pattern, run, until,
};

use super::{KIB, MIB, PATIENCE, serve_file};

const TARGET: &str = "rblk-targetd";
const MOUNT: &str = "rblk-initiatord";
/// `IBV_ACCESS_RELAXED_ORDERING`.
const RELAXED: u64 = 1 << 20;

/// A block, written and read back.
fn use_it(mounted: &Mounted<'_>) {
    let bytes = usize::try_from(64 * KIB).expect("a length");
    let disk = Aligned::open(mounted.device(), true, 0).expect("the device");
    Aligned::write_at(&disk, &pattern(7, bytes), 0).expect("a write");
    assert_eq!(Aligned::read_at(&disk, bytes, 0).expect("a read"), pattern(7, bytes));
}

/// Contexts of RDMA devices that a process has open.
fn contexts(pid: u32) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the descriptors").flatten();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    links.filter(|link| link.to_string_lossy().contains("infiniband/uverbs")).count()
}

fn plugged() -> String {
    format!("rdma://{}", Plug::HOST)
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_listener_comes_back_with_its_device() {
    run("a_listener_comes_back_with_its_device", |lab| {
        let plug = Plug::new(lab, true);
        let pulled = lab.path("pulled");
        let cards = Cards::new(lab, &format!("pulled@rxeplug={}", pulled.display()));
        let flags = serve_file(lab, 16 * MIB).flag("--listen", &plugged());
        let target = Target::start(lab, &flags.environment(cards.environment()));
        for round in 0..lab.times(2, 20) {
            assert_eq!(target.status().listen_down, [], "round {round}");
            std::fs::write(&pulled, "").expect("a file");
            // The kernel tells of it at once; here the next event does.
            let knock = MountFlags::new(plugged(), "v0").flag("--connect-timeout", "1s");
            assert_ne!(knock.try_mount(lab).code(), 0, "nobody listens");
            let down = || target.status().listen_down.into_iter().find(|down| down.tries > 0);
            let down = until("the outage to be told", DEADLINE, down);
            assert!(down.address.starts_with(&plugged()), "{down:?}");
            assert!(!down.why.is_empty(), "{down:?}");
            let said = status(lab);
            assert!(said.contains("WARN  nobody can connect by rdma://10.92.0.1"), "{said}");
            // Others are served.
            let other = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
            use_it(&other);
            other.umount();
            std::fs::remove_file(&pulled).expect("the file");
            let is_up = || target.status().listen_down.is_empty().then_some(());
            until("the address to be listened on again", PATIENCE, is_up);
            let mounted = Mounted::new(lab, &MountFlags::new(plugged(), "v0"));
            use_it(&mounted);
            mounted.umount();
        }
        // The device does not go before those who have it open.
        drop((target, plug));
    });
}

/// What `rblk-target status` says.
fn status(lab: &Lab) -> String {
    let mut command = lab.program("rblk-target");
    command.arg("status");
    Running::start(command).finish(DEADLINE).ok()
}

/// Names of the devices that the target has given its memory to.
fn served(target: &Target<'_>) -> Vec<String> {
    target.status().devices.into_iter().map(|device| device.name).filter(|n| n != "soft").collect()
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_device_that_is_not_used_is_not_opened() {
    run("a_device_that_is_not_used_is_not_opened", |lab| {
        let plug = Plug::new(lab, true);
        let target = Target::start(lab, &serve_file(lab, 16 * MIB));
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        use_it(&mounted);
        assert_eq!((contexts(target.pid()), contexts(mounted.pid())), (1, 1));
        mounted.umount();
        drop((target, plug));
    });
}

const EVERYWHERE: &str = "rdma://0.0.0.0:7730";

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn an_odd_device_is_passed_over() {
    run("an_odd_device_is_passed_over", |lab| {
        for (behaviour, has_address, reason) in [
            ("dead@rxeplug", true, "does not open"),
            ("no-rc@rxeplug", true, "reliable connections"),
            ("", false, "no IP address"),
        ] {
            let plug = Plug::new(lab, has_address);
            let cards = Cards::new(lab, behaviour);
            let flags = serve_file(lab, 16 * MIB).flag("--listen", EVERYWHERE);
            let target = Target::start(lab, &flags.environment(cards.environment()));
            let log = target.log();
            let warned = |line: &&str| line.contains(reason) && line.contains("WARN");
            let line = log.lines().find(warned);
            let line = line.unwrap_or_else(|| panic!("{behaviour}: no warning in:\n{log}"));
            assert!(line.contains(Plug::NAME), "{line}");
            assert_eq!(served(&target).len(), 1, "{behaviour}: {:?}", served(&target));
            let mounted = Mounted::new(lab, &MountFlags::new(format!("{}:7730", lab.rdma()), "v0"));
            use_it(&mounted);
            mounted.umount();
            drop((target, plug));
            std::fs::remove_file(lab.path("target.log")).expect("the log");
        }
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn memory_is_registered_where_somebody_comes() {
    run("memory_is_registered_where_somebody_comes", |lab| {
        let plug = Plug::new(lab, true);
        let cards = Cards::new(lab, "slow-register@rxeplug=300");
        let flags = serve_file(lab, 16 * MIB).flag("--listen", EVERYWHERE);
        let flags = flags.flag("--memory", "m0=16MiB");
        let target = Target::start(lab, &flags.environment(cards.environment()));
        assert!(!served(&target).contains(&Plug::NAME.to_owned()), "before anybody came");
        let near = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        // Who comes while memory is registered waits for that, and nobody else does.
        let far = Mounted::new(lab, &MountFlags::new(format!("{}:7730", plugged()), "m0"));
        assert!(served(&target).contains(&Plug::NAME.to_owned()));
        let registered = cards.asked(TARGET, "register");
        let there = registered.iter().filter(|line| line.starts_with(Plug::NAME)).count();
        assert!(there >= 3, "arena, zeros and m0: {registered:?}");
        use_it(&near);
        use_it(&far);
        far.umount();
        near.umount();
        drop((target, plug));
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn only_named_devices_are_used() {
    run("only_named_devices_are_used", |lab| {
        let plug = Plug::new(lab, true);
        let config =
            TargetConfig { devices: Some(vec![Plug::NAME.to_owned()]), ..TargetConfig::default() };
        let flags = serve_file(lab, 16 * MIB).config(lab, &config).flag("--listen", EVERYWHERE);
        let mut target = Target::begin(lab, &flags);
        // The address of the lab is of another device.
        assert!(!target.wait(PATIENCE).success());
        assert!(target.log().contains("which `devices` does not name"), "{}", target.log());
        drop((target, plug));
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_full_card_is_waited_for() {
    run("a_full_card_is_waited_for", |lab| {
        let _target = Target::start(lab, &serve_file(lab, 16 * MIB));
        let cards = Cards::new(lab, "full=2");
        let flags = MountFlags::new(lab.rdma(), "v0").environment(cards.environment());
        let refused = flags.try_mount(lab).fails_with(1, &["no room left", "memlock limit is not"]);
        println!("{}", refused.trim());
        let mounted = Mounted::new(lab, &flags.switch("--wait=60s"));
        use_it(&mounted);
        assert_eq!(cards.asked(MOUNT, "full").len(), 3, "the first process did not wait");
        mounted.umount();
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn keys_of_the_configuration_reach_the_card() {
    run("keys_of_the_configuration_reach_the_card", |lab| {
        for (relaxed, tos) in [(true, 106), (false, 0)] {
            let cards = Cards::new(lab, "");
            let config = TargetConfig {
                relaxed_ordering: relaxed,
                tos: (tos != 0).then_some(tos),
                ..TargetConfig::default()
            };
            let flags = serve_file(lab, 16 * MIB).config(lab, &config);
            let target = Target::start(lab, &flags.environment(cards.environment()));
            let mut flags = MountFlags::new(lab.rdma(), "v0").environment(cards.environment());
            if tos != 0 {
                flags = flags.flag("--tos", &tos.to_string());
            }
            let mounted = Mounted::new(lab, &flags);
            use_it(&mounted);
            mounted.umount();
            drop(target);
            for program in [TARGET, MOUNT] {
                let classes = cards.asked(program, "tos");
                assert!(!classes.is_empty(), "{program} has connections");
                assert!(classes.iter().all(|class| *class == tos.to_string()), "{classes:?}");
            }
            let access = |line: &String| {
                let flags = line.rsplit_once("0x").map(|(_, hex)| u64::from_str_radix(hex, 16));
                flags.and_then(Result::ok).unwrap_or_else(|| panic!("{line}"))
            };
            let all = cards.asked(TARGET, "register");
            assert!(!all.is_empty());
            assert!(all.iter().all(|line| (access(line) & RELAXED != 0) == relaxed), "{all:?}");
            let mount = cards.asked(MOUNT, "register");
            assert!(mount.iter().all(|line| access(line) & RELAXED != 0), "{mount:?}");
            std::fs::remove_file(lab.path("v0.img")).expect("the image");
        }
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn what_was_on_a_device_that_is_gone_is_freed() {
    run("what_was_on_a_device_that_is_gone_is_freed", |lab| {
        let _target = Target::start(lab, &serve_file(lab, 16 * MIB));
        let gone = lab.path("gone");
        let cards = Cards::new(lab, &format!("gone={}", gone.display()));
        let flags = MountFlags::new(lab.rdma(), "v0").environment(cards.environment());
        let mounted = Mounted::new(lab, &flags);
        use_it(&mounted);
        std::fs::write(&gone, "").expect("a file");
        let log = mounted.log();
        mounted.umount();
        assert!(!log.contains("leaked"), "{log}");
        for call in ["ibv_dereg_mr", "ibv_destroy_cq"] {
            let asked = cards.asked(MOUNT, call);
            assert!(!asked.is_empty(), "{call} was not called");
            assert!(asked.iter().all(|end| end == "freed"), "{call}: {asked:?}");
        }
    });
}
