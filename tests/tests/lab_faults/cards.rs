//! Devices that differ from Soft-RoCE: odd devices, full ones, devices that are pulled out.

use std::time::{Duration, SystemTime};

use rblk_config::{TargetConfig, TransportKeys};
use rblk_operate::mount::mount_status::MountStatus;
use rblk_tests::lab::{
    Aligned, Cards, DEADLINE, Lab, MountFlags, Mounted, Plug, Running, Target, Witness, pattern,
    run, until,
};

use super::{KIB, MIB, PATIENCE, serve_file};

const TARGET: &str = "rblk-targetd";
const MOUNT: &str = "rblk-initiatord";
/// `IBV_ACCESS_RELAXED_ORDERING`.
const RELAXED: u64 = 1 << 20;

/// Writes a block and reads it back.
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
        for round in 0..lab.times(2, 4) {
            assert_eq!(target.status().listen_down, [], "round {round}");
            std::fs::write(&pulled, "").expect("a file");
            // A real kernel reports a lost device at once. Here this connection has to show it.
            let knock = MountFlags::new(plugged(), "v0").flag("--connect-timeout", "1s");
            assert_ne!(knock.try_mount(lab).code(), 0, "nobody listens");
            let down = || target.status().listen_down.into_iter().find(|down| down.tries > 0);
            let down = until("the outage to be told", DEADLINE, down);
            assert!(down.address.starts_with(&plugged()), "{down:?}");
            assert!(!down.why.is_empty(), "{down:?}");
            let said = status(lab);
            assert!(said.contains("WARN  no host can connect by rdma://10.92.0.1"), "{said}");
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
        // The kernel removes the device only after its users have closed it.
        drop((target, plug));
    });
}

/// The output of `rblk-target status`.
fn status(lab: &Lab) -> String {
    let mut command = lab.program("rblk-target");
    command.arg("status");
    Running::start(command).finish(DEADLINE).ok()
}

/// Names of the devices with the target's memory registered.
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
fn memory_is_registered_with_the_first_connection() {
    run("memory_is_registered_with_the_first_connection", |lab| {
        let plug = Plug::new(lab, true);
        let cards = Cards::new(lab, "slow-register@rxeplug=300");
        let flags = serve_file(lab, 16 * MIB).flag("--listen", EVERYWHERE);
        let flags = flags.flag("--memory", "m0=16MiB");
        let target = Target::start(lab, &flags.environment(cards.environment()));
        assert!(!served(&target).contains(&Plug::NAME.to_owned()), "before anybody came");
        let near = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        // Only this connection waits for the registration of memory.
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
        // The address of the lab belongs to another device.
        assert!(!target.wait(PATIENCE).success());
        assert!(target.log().contains("which `devices` does not name"), "{}", target.log());
        drop((target, plug));
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_mount_waits_for_a_full_card() {
    run("a_mount_waits_for_a_full_card", |lab| {
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
                transport: TransportKeys {
                    relaxed_ordering: relaxed,
                    tos: (tos != 0).then_some(tos),
                    ..TransportKeys::default()
                },
                // The device has no NUMA node, so its vectors follow the order of the CPUs.
                cpus: Some(if relaxed { vec![1, 0] } else { vec![0, 1] }),
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
            let vectors = cards.asked(TARGET, "vector");
            let expected = if relaxed { ["1 of 2", "0 of 2"] } else { ["0 of 2", "1 of 2"] };
            // The first CQ tries the device; the poll groups' CQs follow.
            assert!(vectors.ends_with(&expected.map(str::to_owned)), "{vectors:?}");
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
fn objects_of_a_lost_device_are_freed() {
    run("objects_of_a_lost_device_are_freed", |lab| {
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

/// Some drivers (irdma) report a limit of their own device as the number of READs that the peer
/// serves.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_target_never_reads_more_than_the_peer_serves() {
    run("a_target_never_reads_more_than_the_peer_serves", |lab| {
        let cards = Cards::new(lab, "ird=128");
        let few = Cards::new(lab, "max-reads=4");
        let served = serve_file(lab, 16 * MIB).environment(cards.environment());
        let target = Target::start(lab, &served);
        let flags = MountFlags::new(lab.rdma(), "v0").environment(few.environment());
        let mounted = Mounted::new(lab, &flags);
        use_it(&mounted);
        mounted.umount();
        drop(target);
        let granted = cards.asked(TARGET, "reads");
        let most = granted.iter().filter_map(|reads| reads.parse::<u8>().ok()).max();
        assert_eq!(most, Some(4), "{granted:?}");
    });
}

/// The registrations of at least 64 MiB in a part of a log.
#[derive(Default, Debug)]
struct Registrations {
    /// All registrations.
    all: usize,
    /// Most at a time.
    at_once: usize,
    /// Connections begun while a registration was under way.
    connects: usize,
}

impl Registrations {
    fn of(lines: &[String]) -> Self {
        let mut found = Self::default();
        let mut under_way = 0_usize;
        for line in lines {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["registers", step, bytes] if bytes.parse::<u64>().is_ok_and(|b| b >= 64 * MIB) => {
                    match step {
                        "begin" => (under_way, found.all) = (under_way + 1, found.all + 1),
                        _ => under_way -= 1,
                    }
                    found.at_once = found.at_once.max(under_way);
                }
                ["by", _, "rdma_connect"] if under_way > 0 => found.connects += 1,
                _ => {}
            }
        }
        found
    }
}

/// Requests wait for the registrations of a reconnect, so these run in parallel, and beside the
/// connections.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_reconnect_registers_while_it_connects() {
    run("a_reconnect_registers_while_it_connects", |lab| {
        let served = serve_file(lab, 16 * MIB);
        let target = Target::start(lab, &served);
        let cards = Cards::new(lab, "slow-bytes=500");
        let flags = MountFlags::new(lab.rdma(), "v0").flag("--max-io", "1MiB");
        let flags = flags.flag("--lanes", "1").flag("--detect", "2s");
        let mounted = Mounted::new(lab, &flags.environment(cards.environment()));
        use_it(&mounted);
        let before = cards.all_of(MOUNT).len();
        let epoch = mounted.status().epoch;
        target.kill();
        let target = Target::start(lab, &served);
        use_it(&mounted);
        assert_eq!(mounted.status().total.paths_lost, 2, "{epoch}");
        let found = Registrations::of(&cards.all_of(MOUNT)[before..]);
        println!("{}: {found:?}", lab.test());
        // Two queues, both directions of each, and registrations of failed attempts.
        assert!(found.all >= 4, "{found:?}");
        assert!(found.at_once >= 2, "one after the other: {found:?}");
        assert!(found.connects >= 1, "no connection meanwhile: {found:?}");
        mounted.umount();
        drop(target);
    });
}

/// The exponents of ACK timeouts that a program gave to its QPs.
fn ack_timeouts(cards: &Cards, program: &str) -> Vec<u8> {
    let all = cards.asked(program, "timeout");
    all.iter().map(|timeout| timeout.parse().expect("an exponent")).collect()
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn all_retries_of_a_card_end_within_detect() {
    run("all_retries_of_a_card_end_within_detect", |lab| {
        // 4.096 us times 2 to the 15th, times 4 and 7, is 3.8 s; 2 to the 16th gives 7.5 s.
        for (target_key, flag, expected) in [
            (None, ["--detect", "5s"], [15, 15]),
            (None, ["--detect", "12s"], [16, 16]),
            (Some("68ms"), ["--ack-timeout", "600ms"], [14, 17]),
        ] {
            let cards = Cards::new(lab, "");
            let ack_timeout = target_key.map(|time| time.parse().expect("a time"));
            let transport = TransportKeys { ack_timeout, ..TransportKeys::default() };
            let config = TargetConfig { transport, ..TargetConfig::default() };
            let flags = serve_file(lab, 16 * MIB).config(lab, &config);
            let target = Target::start(lab, &flags.environment(cards.environment()));
            let flags = MountFlags::new(lab.rdma(), "v0").flag(flag[0], flag[1]);
            let mounted = Mounted::new(lab, &flags.environment(cards.environment()));
            use_it(&mounted);
            mounted.umount();
            drop(target);
            for (program, expected) in [TARGET, MOUNT].into_iter().zip(expected) {
                // The timeouts of the queues. The first connection is the admin connection, made at
                // the target before it knows the mount's `--detect`.
                let all = &ack_timeouts(&cards, program)[1..];
                assert!(!all.is_empty(), "{program} has connections");
                assert!(all.iter().all(|one| *one == expected), "{program}, {flag:?}: {all:?}");
            }
            std::fs::remove_file(lab.path("v0.img")).expect("the image");
        }
    });
}

const DETECT: Duration = Duration::from_secs(4);
/// The time allowed on top until the loss is reported.
const REPORT: Duration = Duration::from_millis(500);

/// A card that completes nothing any more, neither data nor errors: heart-beats detect that, and
/// the mount switches to the other card.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_card_that_completes_nothing_is_left_within_detect() {
    run("a_card_that_completes_nothing_is_left_within_detect", |lab| {
        let plug = Plug::new(lab, true);
        let mute = lab.path("mute");
        let cards = Cards::new(lab, &format!("mute@{}={}", Plug::NAME, mute.display()));
        let target = Target::start(lab, &serve_file(lab, 16 * MIB).flag("--listen", &plugged()));
        let flags = MountFlags::new(plugged(), "v0").path(&lab.rdma());
        let flags = flags.flag("--detect", "4s").flag("--failback", "24h");
        let witness = Witness::start();
        witness.judge(lab.test(), || {
            let _ = std::fs::remove_file(&mute);
            let mounted = Mounted::new(lab, &flags.clone().environment(cards.environment()));
            use_it(&mounted);
            assert!(mounted.status().address.contains(Plug::HOST), "not by the first address");
            let (begun, begun_at) = (witness.now(), SystemTime::now());
            std::fs::write(&mute, "").expect("a file");
            let uses_plug = |status: &MountStatus| {
                status.state == "connected" && status.address.contains(Plug::HOST)
            };
            let status = until("the loss to be reported", PATIENCE, || {
                mounted.look().filter(|status| !uses_plug(status))
            });
            let at = status.lost_at_unix_ms;
            let at = at.map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms));
            let took = at.unwrap_or_else(SystemTime::now).duration_since(begun_at);
            let took = took.unwrap_or_default();
            until("the other card to be used", PATIENCE, || {
                mounted.look().filter(|s| s.state == "connected" && !uses_plug(s))
            });
            use_it(&mounted);
            let lost = witness.lost_since(&begun);
            println!("{}: lost after {took:.2?}, {lost:.2?} not its own", lab.test());
            assert_eq!(mounted.status().total.errors, 0);
            std::fs::remove_file(&mute).expect("the file");
            mounted.umount();
            if took > DETECT + REPORT + lost {
                return Err(format!("the loss was found after {took:.2?}"));
            }
            Ok(())
        });
        drop((target, plug));
    });
}
