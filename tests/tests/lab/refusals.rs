//! Refusals name their reason, have their exit status, and change nothing.

use rblk_tests::lab::{
    Aligned, DEADLINE, FileSystem, Finished, Fio, MountFlags, Mounted, Target, TargetFlags, run,
};

use super::{FIO_DEADLINE, MIB, serve_file, sh};

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
#[expect(clippy::too_many_lines, reason = "one case after another")]
fn refusals_say_why() {
    run("refusals_say_why", |lab| {
        let (_, flags) = serve_file(lab, 64 * MIB);
        let target =
            Target::start(lab, &flags.flag("--memory", "m0=16MiB").flag("--name", "store"));
        let refused = |flags: &MountFlags, code, texts: &[&str]| {
            let said = flags.try_mount(lab).fails_with(code, texts);
            println!("{code}: {}", said.trim());
        };
        let (rdma, tcp) = (lab.rdma(), lab.tcp());
        refused(&MountFlags::new(rdma.clone(), "v9"), 5, &["v9", "v0, m0"]);
        refused(&MountFlags::new(tcp.clone(), "v9"), 5, &["v9", "v0, m0"]);
        // No process listens there.
        let short =
            |address: String| MountFlags::new(address, "v0").flag("--connect-timeout", "3s");
        refused(&short(format!("{rdma}:7799")), 6, &["7799", "rblk-target"]);
        refused(&short(format!("{tcp}:7799")), 6, &["7799", "rblk-target"]);
        // The port of the other transport.
        refused(&short(format!("{rdma}:7721")), 6, &["7721"]);
        refused(&short(format!("{tcp}:7720")), 6, &["7720"]);

        let mounted =
            Mounted::new(lab, &MountFlags::new(rdma.clone(), "v0").flag("--host-name", "alice"));
        refused(&MountFlags::new(rdma.clone(), "v0"), 4, &["v0", "mounted already"]);
        // The target would take this mount for the first one come back, if the first one were away
        // at this moment.
        refused(
            &MountFlags::new(rdma.clone(), "v0").name("other").flag("--host-name", "bob"),
            4,
            &["on this host already", "umount v0", "--take-over"],
        );
        refused(
            &MountFlags::new(rdma.clone(), "v0").name("other").host("bob"),
            5,
            &["in use", "held by here"],
        );
        let id = mounted.dev().trim_start_matches("/dev/ublkb").to_owned();
        refused(&MountFlags::new(rdma.clone(), "m0").flag("--device-id", &id), 1, &[&id]);
        refused(&MountFlags::new("rdma://[".to_owned(), "m0"), 2, &["rdma://["]);

        // In use by a file system.
        let dir = lab.path("mnt");
        sh(&["mkfs.ext4", "-q", "-F", &mounted.dev()]);
        let fs = FileSystem::mount("ext4", &mounted.dev(), &dir, &[]);
        let busy = |said: Finished| {
            println!(
                "1: {}",
                said.fails_with(1, &[&mounted.dev(), dir.to_str().unwrap_or("?")]).trim()
            )
        };
        busy(lab.initiator(&["umount", "v0"], DEADLINE));
        busy(lab.initiator(&["umount", &mounted.dev()], DEADLINE));
        fs.umount();
        let _ = lab
            .initiator(&["umount", "nothing"], DEADLINE)
            .fails_with(3, &["nothing", "not mounted"]);
        let _ =
            lab.initiator(&["umount", "/dev/ublkb77"], DEADLINE).fails_with(3, &["/dev/ublkb77"]);
        mounted.umount();
        assert_eq!(target.counts().get("protocol_errors"), 0);
        drop(target);

        // Read-only at the target.
        let image = lab.image("ro.img", 16 * MIB);
        let flags = TargetFlags::default().file("ro", &image).switch("--read-only");
        let target = Target::start(lab, &flags);
        refused(&MountFlags::new(rdma.clone(), "ro"), 5, &["ro", "read-only"]);
        let mounted = Mounted::new(lab, &MountFlags::new(rdma, "ro").switch("--ro"));
        assert_eq!(mounted.sysfs().number("ro"), 1);
        let error = match Aligned::open(mounted.device(), true, 0) {
            Err(error) => error,
            Ok(file) => {
                Aligned::write_at(&file, &[1; 4096], 0).expect_err("a write to a read-only device")
            }
        };
        assert!(
            [Some(libc::EROFS), Some(libc::EPERM), Some(libc::EACCES)]
                .contains(&error.raw_os_error()),
            "{error}"
        );
        Fio::new(mounted.device(), "randread")
            .with("size", "1M")
            .with("bs", "4k")
            .run(FIO_DEADLINE)
            .ok();
        assert_eq!(target.counts().get("writes"), 0);
        mounted.umount();
    });
}
