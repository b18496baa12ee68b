//! A target that is replaced by another program below fio: no request is repeated, none fails, no
//! loss is reported, and the disk is the same.

use rblk_config::{CacheMode, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    DEADLINE, Lab, MountFlags, Mounted, StallMeter, Target, TargetFlags, Witness, run,
};
use serde_json::Value;

use super::{MIB, endless_fio, serve_file, wait_for_io};

/// A write-back volume: acknowledged writes are in the target's memory alone.
fn write_back(lab: &Lab) -> TargetFlags {
    let mut volume = VolumeConfig::file("v0", lab.image("v0.img", 512 * MIB));
    volume.cache = Some(CacheMode::WriteBack);
    let config = TargetConfig {
        volumes: vec![volume],
        write_back_delay: "1h".parse().expect("a duration"),
        ..TargetConfig::default()
    };
    TargetFlags::default().config(lab, &config)
}

/// Memory of a process that cannot be swapped.
fn locked_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).expect("a number");
    line.trim_end_matches("kB").trim().parse().expect("a number")
}

fn upgrades(lab: &Lab, target_flags: &TargetFlags, address: String) {
    let target = Target::start(lab, target_flags);
    // An upgrade is announced, so no loss has to be detected. Requests under way must be answered
    // within the mount's time limit for them, at most 1 s. The socket of a second address by TCP
    // stays open. The listener of RDMA does not.
    let is_tcp = address == lab.tcp();
    let flags = MountFlags::new(address, "v0").flag("--detect", "20s");
    let mount_flags = if is_tcp { flags } else { flags.path(&lab.tcp()) };
    let mounted = Mounted::new(lab, &mount_flags);
    let path = mounted.status().address;
    assert!(locked_kib(mounted.pid()) > 0, "its pages could be swapped to its own disk");
    let (node, pid) = (mounted.node(), target.pid());
    let witness = Witness::start();
    let meter = StallMeter::start(mounted.device());
    let fio = endless_fio(&mounted).with("iodepth", 4).with("fsync", 64).start();
    for round in 0..lab.times(2, 5) {
        witness.judge(&format!("{}: {round}", lab.test()), || {
            wait_for_io(&mounted, &meter);
            let replayed = mounted.status().total.replayed;
            let _ = meter.longest();
            let mut command = lab.program("rblk-target");
            command.args(["upgrade", "--output", "json"]);
            let output = command.output().expect("rblk-target upgrade");
            let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            assert!(output.status.success(), "{output:?}\n{}", target.log());
            wait_for_io(&mounted, &meter);
            println!(
                "{}: {round}: a pause of {} ms as the target tells, ready after {} ms; no answer for {:.2?}",
                lab.test(),
                said["pause_ms"],
                said["ready_ms"],
                meter.longest()
            );
            assert_eq!((&said["mounts"], &said["back"]), (&1.into(), &1.into()), "{said}");
            let now = target.status();
            assert_eq!((now.pid, now.fencings), (pid, 0));
            let status = mounted.status();
            assert_eq!((&status.address, status.fallback.as_ref()), (&path, None), "at once");
            let again = status.total.replayed - replayed;
            match (again, said["sent_again"].as_u64(), said["stayed"].as_u64()) {
                (0, Some(0), Some(0)) => Ok(()),
                all => Err(format!("sent again, as the mount tells: {all:?}")),
            }
        });
    }
    let refused = lab.program("rblk-target").args(["upgrade", "--program", "/bin/false"]).output();
    let refused = refused.expect("rblk-target upgrade");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    wait_for_io(&mounted, &meter);
    let _ = fio.stop(DEADLINE).ok();
    let status = mounted.status();
    assert_eq!((status.state.as_str(), status.total.errors), ("connected", 0));
    assert_eq!((status.losses, status.verifier_changes), (0, 0), "nothing was lost");
    assert_eq!(mounted.node(), node);
    mounted.umount();
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn target_upgrade_replays_nothing() {
    run("target_upgrade_replays_nothing", |lab| {
        upgrades(lab, &serve_file(lab, 512 * MIB), lab.rdma())
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn target_upgrade_keeps_writes_that_only_memory_has() {
    run("target_upgrade_keeps_writes_that_only_memory_has", |lab| {
        upgrades(lab, &write_back(lab), lab.tcp());
    });
}
