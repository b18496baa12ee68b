//! Disks in use during an unmount, and the data that is kept; mounts with lost notes; descriptors
//! and protection of a mount's process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rblk_tests::lab::{
    DEADLINE, FileSystem, Lab, Mapped, MountFlags, Mounted, Running, Target, TargetFlags, run,
    start, until,
};

use super::{MIB, sh};

/// Time for a shell of a test to do its work.
const SHELL: Duration = Duration::from_secs(30);

fn serve(lab: &Lab) -> TargetFlags {
    TargetFlags::default().file("v0", &lab.image("v0.img", 256 * MIB))
}

fn mount(lab: &Lab) -> Mounted<'_> {
    Mounted::new(lab, &MountFlags::new(lab.tcp(), "v0"))
}

/// A shell that uses the disk, makes a file when it is ready, and waits until it is dropped.
fn user_of(lab: &Lab, script: &str) -> Running {
    let ready = lab.path("ready");
    let _ = fs::remove_file(&ready);
    let script = format!("{script}\ntouch {}; exec sleep 600", ready.display());
    let running = start(&["bash", "-ec", &script]);
    until("the shell", SHELL, || ready.exists().then_some(()));
    running
}

fn list(lab: &Lab) -> String {
    let finished = lab.initiator(&["list"], DEADLINE);
    format!("{}{}", finished.stdout, finished.stderr)
}

/// `umount` refuses and names the user, `list` shows it, and the disk stays.
#[track_caller]
fn stays(lab: &Lab, mounted: &Mounted<'_>, refusal: &[&str], shown: &str) {
    for what in ["v0".to_owned(), mounted.dev()] {
        let said = lab.initiator(&["umount", &what], 3 * DEADLINE).fails_with(1, refusal);
        println!("{}: {}", lab.test(), said.trim());
    }
    let listed = list(lab);
    assert!(listed.contains(shown), "{shown} is not in: {listed}");
    assert!(mounted.device().exists());
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_disk_in_use_stays() {
    run("a_disk_in_use_stays", |lab| {
        let _target = Target::start(lab, &serve(lab));
        let mounted = mount(lab);
        let dev = mounted.dev();

        let writer = user_of(lab, &format!("exec 7<>{dev}"));
        let process = format!("process {} (sleep)", writer.pid());
        stays(lab, &mounted, &["in use", "open for writing in", &process], &process);
        drop(writer);
        let reader = user_of(lab, &format!("exec 7<{dev}"));
        assert!(!list(lab).contains("process"), "who only reads keeps no disk");
        drop(reader);

        sh(&["mkswap", &dev]);
        sh(&["swapon", &dev]);
        stays(lab, &mounted, &["used for swap"], "swap");
        sh(&["swapoff", &dev]);

        let device = sh(&["losetup", "--find", "--show", &dev]);
        let device = device.trim();
        stays(lab, &mounted, &["in use", "losetup -d", device], device);
        sh(&["losetup", "-d", device]);

        sh(&["mkfs.ext4", "-q", "-F", &dev]);
        let dir = lab.path("mnt");
        fs::create_dir_all(&dir).expect("a directory");
        let at = dir.display();
        // Only this shell's namespace has the mount.
        let hidden = start(&[
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "bash",
            "-ec",
            &format!("mount {dev} {at}; touch {at}/ready; touch {at}.ready; exec sleep 600"),
        ]);
        let ready = PathBuf::from(format!("{at}.ready"));
        until("the hidden mount", SHELL, || ready.exists().then_some(()));
        let space = format!("in the mount namespace of process {}", hidden.pid());
        stays(lab, &mounted, &["in use", "mounted at", &space], "(ext4) of process");
        drop(hidden);
        until("the hidden mount to go", SHELL, || (!list(lab).contains("ext4")).then_some(()));
        mounted.umount();
    });
}

/// Data that only the memory of a file system has reaches the volume before its disk goes.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_file_system_is_synced_before_its_disk_goes() {
    run("a_file_system_is_synced_before_its_disk_goes", |lab| {
        let _target = Target::start(lab, &serve(lab));
        let mut mounted = mount(lab);
        sh(&["mkfs.ext4", "-q", "-F", &mounted.dev()]);
        let dir = lab.path("mnt");
        for (round, by_force) in [(1, false), (2, true), (3, false)] {
            let fs = FileSystem::mount("ext4", &mounted.dev(), &dir, &[]);
            if round == 3 {
                mounted.kill_daemon();
                mounted.recover();
            }
            end_under(lab, mounted, &dir, round, by_force);
            fs.umount();
            mounted = mount(lab);
            let fs = FileSystem::mount("ext4", &mounted.dev(), &dir, &[]);
            let found = fs::read_to_string(dir.join(format!("f{round}")));
            assert_eq!(found.ok().as_deref(), Some("precious"), "round {round}");
            fs.umount();
        }
        mounted.umount();
    });
}

/// A file system on a device of the device mapper, as with LUKS and LVM, goes with the disk below.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_file_system_on_a_mapped_device_is_unmounted_and_synced() {
    run("a_file_system_on_a_mapped_device_is_unmounted_and_synced", |lab| {
        let _target = Target::start(lab, &serve(lab));
        let mounted = mount(lab);
        let dir = lab.path("mnt");
        fs::create_dir_all(&dir).expect("a directory");
        let map = |dev: &str| {
            Mapped::new(lab, "above", &format!("0 {} linear {dev} 0\n", 64 * MIB / 512))
        };
        let mapped = map(&mounted.dev());
        let node = mapped.device().display().to_string();
        sh(&["mkfs.ext4", "-q", "-F", &node]);

        sh(&["mount", &node, &dir.display().to_string()]);
        fs::write(dir.join("f0"), "precious").expect("a file");
        let refused = lab.initiator(&["umount", "--file-systems", "v0"], 3 * DEADLINE);
        let _ = refused.fails_with(1, &["in use", "held by dm-"]);
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("the mounts");
        assert!(!mounts.contains(&dir.display().to_string()), "it is unmounted: {mounts}");

        sh(&["mount", &node, &dir.display().to_string()]);
        fs::write(dir.join("f1"), "precious").expect("a file");
        let log = PathBuf::from("/run/rblk/log/v0.log");
        let pid = mounted.pid().to_string();
        sh(&["kill", "-TERM", &pid]);
        until("the process to end", 3 * DEADLINE, || {
            (!Path::new("/proc").join(&pid).exists()).then_some(())
        });
        let said = fs::read_to_string(&log).unwrap_or_default();
        assert!(said.contains("still stood on it; all data written until now is kept"), "{said}");
        mounted.forget();
        sh(&["umount", &dir.display().to_string()]);
        mapped.remove();

        let mounted = mount(lab);
        let mapped = map(&mounted.dev());
        sh(&["mount", &node, &dir.display().to_string()]);
        for name in ["f0", "f1"] {
            let found = fs::read_to_string(dir.join(name));
            assert_eq!(found.ok().as_deref(), Some("precious"), "{name}");
        }
        sh(&["umount", &dir.display().to_string()]);
        mapped.remove();
        mounted.umount();
    });
}

/// Writes a file, and unmounts the disk before the file system has written it back.
fn end_under(lab: &Lab, mounted: Mounted<'_>, dir: &Path, round: u32, by_force: bool) {
    fs::write(dir.join(format!("f{round}")), "precious").expect("a file");
    if by_force {
        mounted.umount_by_force();
        return;
    }
    let log = PathBuf::from("/run/rblk/log/v0.log");
    let pid = mounted.pid().to_string();
    sh(&["kill", "-TERM", &pid]);
    until("the process to end", 3 * DEADLINE, || {
        (!Path::new("/proc").join(&pid).exists()).then_some(())
    });
    let said = fs::read_to_string(&log).unwrap_or_default();
    println!("{}: {}", lab.test(), said.lines().last().unwrap_or_default());
    // After a recovery the process has none of the host's mounts in its namespace.
    assert!(said.contains("ended while in use: ext4"), "round {round}: {said}");
    mounted.forget();
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_mount_without_its_note_can_be_seen_and_ended() {
    run("a_mount_without_its_note_can_be_seen_and_ended", |lab| {
        let _target = Target::start(lab, &serve(lab));
        for force in [false, true] {
            let mounted = mount(lab);
            let (dev, pid) = (mounted.dev(), mounted.pid());
            fs::remove_dir_all("/run/rblk/mounts").expect("the run directory");
            let listed = list(lab);
            let wanted = format!("{dev}: process {pid} serves it, and its note is gone");
            assert!(listed.contains(&wanted), "{wanted} is not in: {listed}");
            let doctor = lab.initiator(&["doctor"], 3 * DEADLINE);
            let fix = format!("rblk-initiator umount {dev}");
            assert!(doctor.stdout.contains(&wanted) && doctor.stdout.contains(&fix), "{doctor}");

            let user = user_of(lab, &format!("exec 7<>{dev}"));
            let refused = lab.initiator(&["umount", &dev], DEADLINE);
            let _ = refused.fails_with(1, &[&dev, "in use", "open for writing in process"]);
            let words: &[&str] =
                if force { &["umount", "--force", &dev] } else { &["umount", &dev] };
            if !force {
                drop(user);
            }
            let said = lab.initiator(words, 10 * DEADLINE);
            assert_eq!(said.code(), 0, "{said}");
            assert!(said.stderr.contains(&format!("process {pid}")), "{said}");
            assert!(!Path::new(&dev).exists() && !Path::new(&format!("/proc/{pid}")).exists());
            assert!(!list(lab).contains("note is gone"));
            mounted.forget();
        }
    });
}

/// Two mounts on one host. The second takes the volume over.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_fenced_disk_below_a_file_system_stays() {
    run("a_fenced_disk_below_a_file_system_stays", |lab| {
        let _target = Target::start(lab, &serve(lab));
        let first = mount(lab);
        sh(&["mkfs.ext4", "-q", "-F", &first.dev()]);
        let dir = lab.path("mnt");
        let fs = FileSystem::mount("ext4", &first.dev(), &dir, &[]);
        let flags = MountFlags::new(lab.tcp(), "v0").name("second").switch("--take-over");
        let second = Mounted::new(lab, &flags);
        until("the first to be fenced", DEADLINE, || {
            (first.status().state == "fenced").then_some(())
        });
        let listed = list(lab);
        assert!(listed.contains("held by another mount of this host"), "{listed}");
        assert!(!listed.contains("another host"), "{listed}");
        let refused = lab.initiator(&["umount", "v0"], 3 * DEADLINE);
        let _ = refused.fails_with(1, &["in use", "mounted at", &dir.display().to_string()]);
        assert!(first.device().exists());
        fs.umount();
        first.umount();
        second.umount();
    });
}

/// A script holds a lock, and mounts. The lock must be free after the script.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_process_of_a_mount_keeps_no_descriptor_of_its_script_and_is_protected() {
    run("a_process_of_a_mount_keeps_no_descriptor_of_its_script_and_is_protected", |lab| {
        let _target = Target::start(lab, &serve(lab));
        let lent = lab.path("lock");
        let keep = |words: &str| {
            let program = lab.programs().join("rblk-initiator");
            let script = format!(
                "exec 9>{}; flock -n 9; exec 12<{}; {} {words}",
                lent.display(),
                lab.dir().display(),
                program.display()
            );
            let said = start(&["bash", "-ec", &script]).finish(3 * DEADLINE);
            assert_eq!(said.code(), 0, "{said}");
        };
        let proofs = lab.proofs().join(" ");
        keep(&format!("mount {} v0 {proofs}", lab.tcp()));
        is_free(lab, &lent);
        keep("upgrade v0");
        is_free(lab, &lent);
        sh(&["kill", "-KILL", &server(lab).to_string()]);
        keep("recover v0");
        is_free(lab, &lent);
        let said = lab.initiator(&["umount", "v0"], 3 * DEADLINE);
        assert_eq!(said.code(), 0, "{said}");
    });
}

/// The process of the only mount.
fn server(lab: &Lab) -> u32 {
    let text = lab.initiator(&["status", "v0", "-o", "json"], DEADLINE).ok();
    let status: rblk_operate::mount::mount_status::MountStatus =
        serde_json::from_str(&text).expect("a status");
    status.pid
}

#[track_caller]
fn is_free(lab: &Lab, lent: &Path) {
    let proc = PathBuf::from(format!("/proc/{}", server(lab)));
    for fd in fs::read_dir(proc.join("fd")).expect("descriptors").flatten() {
        let to = fs::read_link(fd.path()).unwrap_or_default();
        assert!(to != lent && to != lab.dir(), "{} is kept", to.display());
    }
    let taken = Command::new("flock").arg("-n").arg(lent).arg("true").status();
    assert!(taken.expect("flock").success(), "the lock is held");
    let read = |name: &str| fs::read_to_string(proc.join(name)).unwrap_or_default();
    assert_eq!(read("oom_score_adj").trim(), "-1000");
    let limits = read("limits");
    let core = limits.lines().find(|line| line.starts_with("Max core file size"));
    let words: Vec<&str> = core.unwrap_or_default().split_whitespace().collect();
    assert_eq!(words.get(4..6), Some(&["0", "0"][..]), "{core:?}");
}
