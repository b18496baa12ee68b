//! Targets on a real iWARP device, which may be Soft-iWARP (siw).
//!
//! `cargo test` ignores these tests, and `cargo xtask test` cannot run them: Debian's kernels have
//! no siw. CONTRIBUTING.md describes how to run them by hand. Without an iWARP device they fail.
//! `tests/engines/iwarp.rs` tests the rules that need no device.

#![forbid(unsafe_code)]

mod host;
mod stream;

use std::time::Duration;

use host::{Host, IO_MAX};
use rblk_tests::lab::{Fio, Lab, MountFlags, Mounted, Target, TargetFlags, pattern, run};
use stream::Place;

const MIB: u64 = 1 << 20;

/// Fails unless every RDMA device is an iWARP one: these rules exist on no other transport.
fn assert_iwarp() {
    let devices = std::fs::read_dir("/sys/class/infiniband").expect("RDMA devices");
    for device in devices.map(|device| device.expect("a device").path()) {
        let kind = std::fs::read_to_string(device.join("node_type")).expect("a kind");
        let text = "is no iWARP device (`rdma link add siw0 type siw netdev v0` makes one)";
        assert!(kind.contains("RNIC"), "{} {text}", device.display());
    }
}

/// A target with volumes of both kinds for two hosts, started with these further flags.
fn target(lab: &Lab, flags: TargetFlags) -> Target<'_> {
    let [mine, theirs] = ["mine.img", "theirs.img"].map(|name| lab.image(name, 64 * MIB));
    let flags = flags.file("mine", &mine).file("theirs", &theirs).flag("--memory", "memory=16MiB");
    Target::start(lab, &flags)
}

#[test]
#[ignore = "needs the lab's devices and an iWARP device, which Debian's kernels lack: by hand, see CONTRIBUTING.md"]
fn a_rogue_peer_reaches_no_sink_of_another() {
    run("a_rogue_peer_reaches_no_sink_of_another", |lab| {
        assert_iwarp();
        // The hosts are driven by hand, and prove no keys.
        let target = target(lab, TargetFlags::default().switch("--insecure"));
        let address = format!("{}:7720", lab.host());
        for (round, volume) in ["mine", "memory"].into_iter().enumerate() {
            let mut honest = Host::connect(&address, "honest", volume);
            let bytes = pattern(7 + round as u64, IO_MAX as usize);
            let half = bytes.len() / 2;
            // The rogue's own connection shows it the range of the keys.
            let mut rogue = Host::connect(&address, "rogue", "theirs");
            let own = rogue.begin_write(&bytes).sink;
            let read = honest.begin_write(&bytes);
            honest.answer(&read, 0..half);
            println!(
                "{volume}: the honest one's data lands at {:x?}, the rogue's at {own:x?}",
                read.sink
            );
            let mut survived = rogue.survives_write(read.sink, &[0xee; 4096]);
            drop(rogue);
            // The rogue knows the address, and guesses the key.
            for step in [-0x200i32, -0x100, 0x100, 0x200, 0x300, 0x400] {
                let guess = Place { stag: own.stag.wrapping_add_signed(step), ..read.sink };
                let mut rogue = Host::connect(&address, &format!("rogue{step}"), "theirs");
                survived |= rogue.survives_write(guess, &[0xee; 4096]);
            }
            honest.answer(&read, half..bytes.len());
            honest.finish();
            let found = honest.read(bytes.len());
            let changed = found.iter().zip(&bytes).filter(|(found, sent)| found != sent).count();
            assert_eq!(changed, 0, "bytes of the honest one's data changed");
            assert!(!survived, "a rogue's connection goes on");
        }
        drop(target);
    });
}

#[test]
#[ignore = "needs the lab's devices and an iWARP device, which Debian's kernels lack: by hand, see CONTRIBUTING.md"]
fn data_passes_both_ways() {
    run("data_passes_both_ways", |lab| {
        assert_iwarp();
        let _target = target(lab, TargetFlags::default());
        for volume in ["mine", "memory"] {
            let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), volume));
            Fio::new(mounted.device(), "randwrite")
                .with("bsrange", "4k-256k")
                .with("iodepth", 32)
                .with("size", 12 * MIB)
                .with("loops", lab.long(20) + 1)
                .with("verify", "crc32c")
                .with("verify_fatal", 1)
                .with("verify_state_save", 0)
                .run(Duration::from_secs(180))
                .ok();
            mounted.umount();
        }
    });
}

#[test]
#[ignore = "needs the lab's devices and an iWARP device, which Debian's kernels lack: by hand, see CONTRIBUTING.md"]
fn fio_engine_sees_targets_die() {
    run("fio_engine_sees_targets_die", |lab| {
        assert_iwarp();
        let flags = TargetFlags::default().file("v0", &lab.image("v0.img", 1024 * MIB));
        let mut target = Target::start(lab, &flags);
        let mut fio = Fio::endless_by_engine(lab, &lab.rdma()).start();
        for _ in 0..lab.times(3, 9) {
            fio.wait_for_io(&target, Duration::from_secs(60));
            target.kill();
            target = Target::start(lab, &flags);
        }
        fio.wait_for_io(&target, Duration::from_secs(60));
        let result = fio.stop(Duration::from_secs(60)).ok();
        println!("{} writes and {} reads", result.writes, result.reads);
        drop(target);
    });
}
