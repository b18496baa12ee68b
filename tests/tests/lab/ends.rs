//! Programs that end, asked to or not, while the other end is at work.

use std::time::{Duration, Instant};

use rblk_tests::lab::{
    Aligned, DEADLINE, FileSystem, Fio, KernelLog, MountFlags, Mounted, Target, TargetFlags,
    pattern, run, until,
};

use super::{FIO_DEADLINE, KIB, MIB, exists, serve_file, sh, slow_fio};

#[test]
fn two_initiators_one_killed() {
    run("two_initiators_one_killed", |lab| {
        let flags = TargetFlags::default()
            .file("keep", &lab.image("keep.img", 128 * MIB))
            .file("lose", &lab.image("lose.img", 128 * MIB));
        let target = Target::start(lab, &flags);
        let keep = Mounted::new(lab, &MountFlags::new(lab.rdma(), "keep"));
        let lose = Mounted::new(lab, &MountFlags::new(lab.rdma(), "lose"));
        let mut good = slow_fio(&keep, lab).start();
        let mut bad = slow_fio(&lose, lab).start();
        until("both to be at work", DEADLINE, || {
            (keep.counts().get("writes") > 20 && lose.counts().get("writes") > 20).then_some(())
        });
        let connected = || target.status().sessions.iter().filter(|s| s.connections > 0).count();
        assert_eq!(connected(), 2);
        lose.kill_daemon();
        until("the target to notice", DEADLINE, || (connected() == 1).then_some(()));
        assert!(good.is_running(), "the test was too slow to kill one while the other works");
        // The device waits for another server, and so does who uses it, until somebody gives it up.
        assert!(exists(lose.device()) && bad.is_running(), "a dead initiator is a stall");
        let said = lab.initiator(&["umount", "lose"], 3 * DEADLINE);
        let _ = said.fails_with(1, &["lose", "--force"]);
        lose.umount_by_force();
        assert_ne!(bad.finish(DEADLINE).code, 0, "fio lost its device and did not notice");
        let _ = lab.initiator(&["umount", "lose"], DEADLINE).fails_with(3, &["lose"]);

        let again = Mounted::new(lab, &MountFlags::new(lab.rdma(), "lose"));
        assert_eq!(target.status().sessions.len(), 2, "the dead session made way");
        Fio::verify(again.device(), MIB).run(FIO_DEADLINE).ok();
        good.finish(FIO_DEADLINE).ok();
        assert_eq!(keep.status().total.paths_lost, 0, "the other mount did not feel it");
        again.umount();
        keep.umount();
    });
}

#[test]
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
        let mut fio = slow_fio(&raw, lab).start();
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
        assert!(fio.is_running(), "fio ended before the initiator was back");
        fio.finish(FIO_DEADLINE).ok();
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
fn target_sigterm_drains() {
    run("target_sigterm_drains", |lab| {
        let (_, flags) = serve_file(lab, 64 * MIB);
        let flags = flags.flag("--drain-timeout", "3s");
        let mut target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        let data = pattern(3, 64 * KIB);
        let file = Aligned::open(mounted.device(), true, 0).expect("opening");
        Aligned::write_at(&file, &data, 4096).expect("writing");
        target.terminate();
        let since = Instant::now();
        let status = target.wait(DEADLINE);
        let took = since.elapsed();
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
        // Nobody is there: nothing to wait for.
        let mut target = target;
        target.terminate();
        let since = Instant::now();
        assert_eq!(target.wait(DEADLINE).code(), Some(0));
        assert!(
            since.elapsed() < Duration::from_secs(3),
            "a drain without sessions took {:?}",
            since.elapsed()
        );
    });
}

#[test]
fn force_umount_with_target_gone() {
    run("force_umount_with_target_gone", |lab| {
        let (_, flags) = serve_file(lab, 256 * MIB);
        let target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        let mut fio = slow_fio(&mounted, lab).start();
        until("fio to be at work", DEADLINE, || {
            (mounted.counts().get("writes") > 20).then_some(())
        });
        target.kill();
        std::thread::sleep(Duration::from_secs(1));
        assert!(fio.is_running(), "fio saw an error although nobody asked for one");
        let _ = lab.initiator(&["umount", "v0"], DEADLINE).fails_with(1, &["--force"]);
        let took = mounted.umount_by_force();
        println!("{}: umount --force took {took:.1?}", lab.test());
        assert!(took < Duration::from_secs(5), "umount --force took {took:?}");
        let fio = fio.finish(DEADLINE);
        assert_ne!(fio.code, 0, "fio lost its device and did not notice");
    });
}
