//! Programs that end, on request or not, while the other end is active.

use std::time::{Duration, Instant};

use rblk_tests::lab::{
    Aligned, DEADLINE, FileSystem, Fio, KernelLog, MountFlags, Mounted, Target, TargetFlags,
    Witness, pattern, run, until,
};

use super::{FIO_DEADLINE, KIB, MIB, check_and_stop, endless_fio, exists, serve_file, sh};

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn two_initiators_one_killed() {
    run("two_initiators_one_killed", |lab| {
        let flags = TargetFlags::default()
            .file("keep", &lab.image("keep.img", 128 * MIB))
            .file("lose", &lab.image("lose.img", 128 * MIB));
        let target = Target::start(lab, &flags);
        // This mount keeps its path even if the machine stands still.
        let patient = MountFlags::new(lab.rdma(), "keep").flag("--detect", "30s");
        let keep = Mounted::new(lab, &patient);
        let lose = Mounted::new(lab, &MountFlags::new(lab.rdma(), "lose"));
        let mut good = endless_fio(&keep).start();
        let mut bad = endless_fio(&lose).start();
        until("both to be at work", DEADLINE, || {
            (keep.counts().get("writes") > 20 && lose.counts().get("writes") > 20).then_some(())
        });
        let connected = || target.status().sessions.iter().filter(|s| s.connections > 0).count();
        until("both to be connected", DEADLINE, || (connected() == 2).then_some(()));
        lose.kill_daemon();
        until("the target to notice", DEADLINE, || (connected() == 1).then_some(()));
        assert!(good.is_running(), "fio on the other mount saw an error");
        // The device and its users wait for another server, until an administrator gives the device
        // up.
        assert!(exists(lose.device()) && bad.is_running(), "a dead initiator is a stall");
        let said = lab.initiator(&["umount", "lose"], 3 * DEADLINE);
        let _ = said.fails_with(1, &["lose", "--force"]);
        lose.umount_by_force();
        assert_ne!(bad.finish(DEADLINE).code, 0, "fio lost its device and did not notice");
        let _ = lab.initiator(&["umount", "lose"], DEADLINE).fails_with(3, &["lose"]);

        let again = Mounted::new(lab, &MountFlags::new(lab.rdma(), "lose"));
        until("the dead session to make way", DEADLINE, || {
            (target.status().sessions.len() == 2).then_some(())
        });
        Fio::verify(again.device(), MIB).run(FIO_DEADLINE).ok();
        check_and_stop(good, &keep);
        assert_eq!(keep.status().total.paths_lost, 0, "the other mount did not feel it");
        again.umount();
        keep.umount();
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn kernel_kill_and_recover() {
    run("kernel_kill_and_recover", |lab| {
        let flags = TargetFlags::default()
            .file("raw", &lab.image("raw.img", 256 * MIB))
            .file("fs", &lab.image("fs.img", 96 * MIB));
        let _target = Target::start(lab, &flags);
        let [mut raw, mut fs] =
            ["raw", "fs"].map(|name| Mounted::new(lab, &MountFlags::new(lab.rdma(), name)));
        let nodes = [raw.node(), fs.node()];
        let log = KernelLog::mark(lab);
        sh(&["mkfs.ext4", "-q", "-F", &fs.dev()]);
        let dir = lab.path("mnt");
        let mounted_fs = FileSystem::mount("ext4", &fs.dev(), &dir, &[]);
        let data = pattern(4, 3 << 20);
        std::fs::write(dir.join("before"), &data).expect("writing");
        let mut fio = endless_fio(&raw).start();
        until("fio to be at work", DEADLINE, || (raw.counts().get("writes") > 20).then_some(()));
        raw.kill_daemon();
        fs.kill_daemon();
        let since = Instant::now();
        raw.recover();
        let took = since.elapsed();
        fs.recover();
        println!("{}: recovered after {:.1?} and {:.1?}", lab.test(), took, since.elapsed());
        std::fs::write(dir.join("after"), &data).expect("writing");
        sh(&["sync", "-f", &dir.display().to_string()]);
        assert!(fio.is_running(), "fio saw an error");
        check_and_stop(fio, &raw);
        assert_eq!([raw.node(), fs.node()], nodes, "the same device nodes");
        assert_eq!(raw.status().total.errors, 0);
        mounted_fs.umount();
        assert_eq!(log.complaints(), Vec::<String>::new(), "the kernel complains");
        sh(&["fsck.ext4", "-fn", &fs.dev()]);
        raw.umount();
        fs.umount();
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn sighup_ends_no_mount() {
    run("sighup_ends_no_mount", |lab| {
        let (_, flags) = serve_file(lab, 64 * MIB);
        let target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        let fio = endless_fio(&mounted).start();
        until("fio to be at work", DEADLINE, || {
            (mounted.counts().get("writes") > 20).then_some(())
        });
        let pid = mounted.status().pid;
        mounted.hang_up();
        until("a line in the log of the mount", DEADLINE, || {
            mounted.log().contains("SIGHUP: nothing was reloaded").then_some(())
        });
        let before = mounted.counts().get("writes");
        until("more writes", DEADLINE, || (mounted.counts().get("writes") > before).then_some(()));
        check_and_stop(fio, &mounted);
        let status = mounted.status();
        assert_eq!((status.pid, status.state.as_str(), status.total.errors), (pid, "connected", 0));
        mounted.umount();
        drop(target);
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn target_sigterm_drains() {
    run("target_sigterm_drains", |lab| {
        let (_, flags) = serve_file(lab, 64 * MIB);
        let flags = flags.flag("--drain-timeout", "3s");
        let mut target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        let data = pattern(3, 64 * KIB);
        let file = Aligned::open(mounted.device(), true, 0).expect("opening");
        Aligned::write_at(&file, &data, 4096).expect("writing");
        let witness = Witness::start();
        let begun = witness.now();
        target.terminate();
        let since = Instant::now();
        let status = target.wait(DEADLINE);
        let took = since.elapsed().saturating_sub(witness.lost_since(&begun));
        println!("{}: the target ended after {took:.1?}", lab.test());
        assert_eq!(status.code(), Some(0), "{}", target.log());
        assert!(took < Duration::from_secs(6), "the drain took {took:?}");
        drop(target);
        until("the initiator to notice", DEADLINE, || {
            (mounted.status().state == "reconnecting").then_some(())
        });
        let target = Target::start(lab, &flags);
        mounted.wait_connected();
        assert!(Aligned::read_at(&file, data.len(), 4096).expect("reading") == data);
        drop(file);
        mounted.umount();
        // No connection is left, so the target does not wait.
        let mut target = target;
        let begun = witness.now();
        target.terminate();
        let since = Instant::now();
        assert_eq!(target.wait(DEADLINE).code(), Some(0));
        let took = since.elapsed().saturating_sub(witness.lost_since(&begun));
        assert!(took < Duration::from_secs(3), "a drain without sessions took {took:?}");
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn force_umount_with_target_gone() {
    run("force_umount_with_target_gone", |lab| {
        let (_, flags) = serve_file(lab, 256 * MIB);
        let target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        let mut fio = endless_fio(&mounted).start();
        until("fio to be at work", DEADLINE, || {
            (mounted.counts().get("writes") > 20).then_some(())
        });
        target.kill();
        std::thread::sleep(Duration::from_secs(1));
        assert!(fio.is_running(), "fio saw an error");
        let _ = lab.initiator(&["umount", "v0"], DEADLINE).fails_with(1, &["--force"]);
        let witness = Witness::start();
        let begun = witness.now();
        let took = mounted.umount_by_force().saturating_sub(witness.lost_since(&begun));
        println!("{}: umount --force took {took:.1?}", lab.test());
        assert!(took < Duration::from_secs(5), "umount --force took {took:?}");
        let fio = fio.finish(DEADLINE);
        assert_ne!(fio.code, 0, "fio lost its device and did not notice");
    });
}
