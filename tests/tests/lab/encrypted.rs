//! Data over TCP that the kernel encrypts, at both ends of a real mount.

use std::path::{Path, PathBuf};

use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::target::status::TargetStatus;
use rblk_tests::lab::{DEADLINE, Fio, Lab, Running, run, until};

use super::{FIO_DEADLINE, MIB};

/// The name of the volume and of the mount.
const NAME: &str = "sealed";
const SIZE: u64 = 128 * MIB;
/// The name of the test's host at the target.
const HOST: &str = "db1";

/// A key made for the test.
struct Key {
    file: String,
    public: String,
}

impl Key {
    fn new(lab: &Lab, program: &str, file: &str) -> Self {
        let file = lab.path(file).display().to_string();
        let mut command = lab.program(program);
        command.args(["key", "new", "--file", &file]);
        let public = Running::start(command).finish(DEADLINE).ok().trim().to_owned();
        Self { file, public }
    }
}

/// Starts a target that takes only encrypted connections over TCP, and waits until it serves. Drop
/// of the result kills the target.
fn serve(lab: &Lab, image: &Path, target: &Key, host: &Key) -> Running {
    let config = lab.path("sealed.toml");
    let text = format!("listen = ['{}']\nauth = 'required'\nencrypt = 'required'\n", lab.tcp());
    std::fs::write(&config, text).expect("the configuration");
    let mut command = lab.program("rblk-target");
    command
        .args(["serve", "--poll-groups", "2", "--key-file", &target.file])
        .args(["--host", &format!("{HOST}={}", host.public)])
        .args(["--file", &format!("{NAME}={}", image.display())])
        .arg("--config")
        .arg(config)
        .arg("--state-dir")
        .arg(lab.path("state"));
    let mut running = Running::start(command);
    until("the target to serve", DEADLINE, || {
        let serves = status_of_target(lab).is_some_and(|status| status.pid == running.pid());
        assert!(serves || running.is_running(), "the target ended");
        serves.then_some(())
    });
    running
}

fn status_of_target(lab: &Lab) -> Option<TargetStatus> {
    let mut command = lab.program("rblk-target");
    command.args(["status", "--output", "json"]);
    let said = Running::start(command).finish(DEADLINE);
    (said.code() == 0).then(|| serde_json::from_str(&said.stdout).expect("a status"))
}

/// A mounted volume. Drop unmounts it by force.
struct Disk<'l> {
    lab: &'l Lab,
    device: PathBuf,
}

impl<'l> Disk<'l> {
    fn mount(lab: &'l Lab, target: &Key, host: &Key) -> Self {
        let address = lab.tcp();
        let words = ["mount", &address, NAME, "--queues", "2", "--reconnect-delay", "200ms"];
        let keys = ["--key-file", &host.file, "--target-key", &target.public];
        let said = lab.initiator(&[&words[..], &keys].concat(), 2 * DEADLINE).ok();
        Self { lab, device: PathBuf::from(said.trim()) }
    }

    fn status(&self) -> MountStatus {
        let text = self.lab.initiator(&["list", "--output", "json"], DEADLINE).ok();
        let mounts: Vec<MountStatus> = serde_json::from_str(&text).expect("mounts");
        mounts.into_iter().find(|mount| mount.name == NAME).expect("the mount is listed")
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        let said = self.lab.initiator(&["umount", NAME, "--force"], 3 * DEADLINE);
        if !std::thread::panicking() {
            let _ = said.ok();
        }
    }
}

fn assert_encrypted(mount: &MountStatus, target: &TargetStatus) {
    assert!(mount.encrypted && mount.auth == "key", "{mount:?}");
    let [session] = &target.sessions[..] else { panic!("{:?}", target.sessions) };
    assert!(session.encrypted && session.key.is_some(), "{session:?}");
    assert_eq!(session.host, HOST);
    assert_eq!((mount.total.bad_records, target.total.bad_records), (0, 0));
}

#[test]
#[ignore = "needs the lab: ublk, TLS of the kernel and root; `cargo xtask test` runs it there"]
fn kernel_encrypts_and_connects_again() {
    run("kernel_encrypts_and_connects_again", |lab| {
        let image = lab.image("sealed.img", SIZE);
        let target = Key::new(lab, "rblk-target", "target.key");
        let host = Key::new(lab, "rblk-initiator", "host.key");
        let first = serve(lab, &image, &target, &host);
        let disk = Disk::mount(lab, &target, &host);
        let before = disk.status();
        assert_encrypted(&before, &status_of_target(lab).expect("it serves"));
        Fio::verify(&disk.device, 16 * MIB).run(FIO_DEADLINE).ok();

        // The target is killed while fio writes and verifies.
        let mut fio = Fio::new(&disk.device, "randwrite")
            .with("bsrange", "4k-256k")
            .with("iodepth", 16)
            .with("size", 40 * MIB)
            .with("loops", 1_000_000)
            .with("rate", "3M,3M")
            .with("verify", "crc32c")
            .with("verify_backlog", 64)
            .with("verify_fatal", 1)
            .with("verify_state_save", 0)
            .start();
        let writes = |disk: &Disk<'_>| disk.status().total.writes;
        let until_at_work = |from: u64| {
            until("fio to be at work", FIO_DEADLINE, || (writes(&disk) > from + 100).then_some(()));
        };
        until_at_work(writes(&disk));
        // Drop kills the target.
        drop(first);
        until("the mount to notice", DEADLINE, || {
            (disk.status().state == "reconnecting").then_some(())
        });
        assert!(fio.is_running(), "a dead target is a stall");
        let _second = serve(lab, &image, &target, &host);
        let after = until("the mount to come back", DEADLINE, || {
            Some(disk.status()).filter(|status| status.state == "connected")
        });
        assert_encrypted(&after, &status_of_target(lab).expect("it serves"));
        assert!(after.total.paths_lost > before.total.paths_lost, "it did connect again");
        until_at_work(after.total.writes);
        let _ = fio.stop(DEADLINE).ok();
        Fio::verify(&disk.device, 16 * MIB).run(FIO_DEADLINE).ok();
    });
}
