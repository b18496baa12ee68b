//! Every change that an administrator can make at run time, under one file system with fio on it:
//! the volume is added, grows twice, gets limits, becomes read-only and writable again; the target
//! takes another configuration and becomes another program. No request fails, and no byte is wrong.

use std::path::PathBuf;

use rblk_tests::lab::{
    FileSystem, Finished, Fio, KernelFeature, Running, RunningFio, pattern, run,
};
use serde_json::Value;

use super::*;

/// Sizes of the volume.
const SIZES: [u64; 3] = [128 * MIB, 192 * MIB, 320 * MIB];
/// Bytes for each of the two jobs of fio.
const FIO_BYTES: u64 = 24 * MIB;
/// A limit that fio feels, and that leaves it time to verify its writes.
const IOPS: u64 = 200;

/// The disk and its file system.
struct Bed<'l> {
    lab: &'l Lab,
    mount: Mounted<'l>,
    dir: PathBuf,
}

impl Bed<'_> {
    /// The output of `rblk-target` with these arguments.
    fn target(&self, words: &[&str]) -> String {
        target(self.lab, words)
    }

    fn fio(&self, rw: &str) -> Fio {
        Fio::new(&self.dir.join("fio"), rw)
            .with("bsrange", "4k-256k")
            .with("iodepth", 16)
            .with("numjobs", 2)
            .with("size", FIO_BYTES)
            .with("offset_increment", FIO_BYTES)
            .with("verify", "crc32c")
            .with("verify_fatal", 1)
            .with("verify_state_save", 0)
            .with("time_based", 1)
            .with("runtime", 3600)
    }

    /// Writes and verifies until it is told to end.
    fn writer(&self) -> RunningFio {
        self.fio("randwrite").with("verify_backlog", 32).start()
    }

    /// Waits until the disk has done more reads and writes.
    fn until_io(&self, what: &str, fio: &mut RunningFio) {
        let before = self.mount.counts();
        until(what, FIO_DEADLINE, || {
            let did = self.mount.counts().since(&before);
            (did.get("writes") > 64 && did.get("reads") > 16).then_some(())
        });
        assert!(fio.is_running(), "fio ended: {what}");
    }

    fn resize(&self, bytes: u64) {
        self.target(&["volume", "resize", "v0", &bytes.to_string(), "--persist"]);
        until("the disk to have its new size", DEADLINE, || {
            let status = self.mount.look()?;
            let sectors = self.mount.sysfs().number("size");
            ((status.size_bytes, sectors * 512) == (bytes, bytes)).then_some(())
        });
        sh(&["resize2fs", &self.mount.dev()]);
    }

    fn read_only(&self, yes: bool) {
        self.target(&["volume", "set", "v0", &format!("--read-only={yes}"), "--persist"]);
        until("the disk to follow", DEADLINE, || {
            let is = self.mount.sysfs().number("ro") == 1;
            (self.mount.look()?.read_only == yes && is == yes).then_some(())
        });
    }

    /// Upgrades the target to another program. No request is sent again.
    fn upgrade(&self) {
        let before = self.mount.status();
        let said = self.target(&["upgrade", "--output", "json"]);
        let said: Value = serde_json::from_str(&said).expect("JSON");
        let mounts = ["mounts", "back", "stayed"].map(|name| said[name].as_u64());
        assert_eq!(mounts, [Some(1), Some(1), Some(0)], "{said}");
        let now = self.mount.status();
        assert_eq!((now.losses, now.verifier_changes), (before.losses, before.verifier_changes));
    }
}

fn target(lab: &Lab, words: &[&str]) -> String {
    ended(lab, words).ok()
}

/// The output of a reload while some keys wait for a restart.
fn needs_restart(lab: &Lab, words: &[&str]) -> String {
    let ended = ended(lab, words);
    assert_eq!(ended.code(), 12, "{ended}");
    ended.stdout
}

fn ended(lab: &Lab, words: &[&str]) -> Finished {
    let mut command = lab.program("rblk-target");
    command.args(words).args(["--control-socket", rblk_operate::target::flags::CONTROL_SOCKET]);
    if words.contains(&"--persist") {
        command.arg("--config").arg(lab.path("target.toml"));
    }
    Running::start(command).finish(2 * DEADLINE)
}

/// Adds `v0` permanently to a target without volumes.
fn add_volume(lab: &Lab) {
    let image = lab.image("volume", SIZES[0]).display().to_string();
    let add = ["volume", "add", "v0", "--file", &image, "--cache", "write-through", "--persist"];
    target(lab, &add);
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn everything_changes_under_one_file_system() {
    if KernelFeature::RESIZE_IN_USE.is_missing() {
        return;
    }
    run("everything_changes", |lab| {
        let empty = TargetConfig {
            volumes: Vec::new(),
            ..config(Path::new("/"), CacheMode::WriteThrough, 32 * MIB)
        };
        let _target = serve(lab, &empty);
        add_volume(lab);
        let mount = mount(lab);
        let device = mount.dev();
        sh(&["mkfs.ext4", "-q", "-F", &device]);
        let dir = lab.path("fs");
        let fs = FileSystem::mount("ext4", &device, &dir, &[]);
        let bed = Bed { lab, mount, dir };
        let mut fio = bed.writer();
        bed.until_io("fio to work on the new file system", &mut fio);

        bed.resize(SIZES[1]);
        bed.until_io("fio to go on after the first growth", &mut fio);

        bed.target(&["volume", "set", "v0", "--iops", &IOPS.to_string(), "--persist"]);
        let delayed = |bed: &Bed<'_>| {
            let status = bed.target(&["status", "--output", "json"]);
            let status: Value = serde_json::from_str(&status).expect("JSON");
            status["volumes"][0]["delays"].clone()
        };
        let before = delayed(&bed);
        until("commands to wait for the limit", DEADLINE, || {
            (delayed(&bed) != before).then_some(())
        });

        reload(&bed);
        bed.until_io("fio to go on after the reload", &mut fio);
        bed.upgrade();
        bed.until_io("fio to go on after the upgrade", &mut fio);
        let dump = bed.target(&["dump"]);
        assert!(dump.contains("slow_io = \"250ms\""), "the upgrade brings it into force: {dump}");
        assert!(dump.contains(&format!("iops = {IOPS}")), "the limit stays: {dump}");
        bed.target(&["volume", "set", "v0", "--iops", "none", "--persist"]);

        bed.resize(SIZES[2]);
        let data = pattern(7, size(150 * MIB));
        std::fs::write(bed.dir.join("new"), &data).expect("the new room is usable");
        bed.until_io("fio to go on after the second growth", &mut fio);
        assert_eq!(fio.stop(FIO_DEADLINE).ok().errors, 0);

        read_only_and_back(&bed);
        let mut fio = bed.writer();
        bed.until_io("fio to write again", &mut fio);
        bed.upgrade();
        bed.until_io("fio to go on after the second upgrade", &mut fio);
        assert_eq!(fio.stop(FIO_DEADLINE).ok().errors, 0);

        let status = bed.mount.status();
        assert_eq!((status.total.errors, status.losses), (0, 0));
        fs.umount();
        // Every check of an unmounted file system, without a repair.
        sh(&["fsck.ext4", "-f", "-n", &device]);
        let fs = FileSystem::mount("ext4", &device, &bed.dir, &["-o", "ro"]);
        let found = std::fs::read(bed.dir.join("new")).expect("the file is there");
        assert!(found == data, "the file has other data");
        fs.umount();
        bed.mount.umount();
    });
}

/// Adds a volume by a hand-written file, and names the keys that need a restart.
fn reload(bed: &Bed<'_>) {
    let main = bed.lab.path("target.toml");
    let text = std::fs::read_to_string(&main).expect("the configuration");
    std::fs::write(&main, format!("slow_io = \"250ms\"\n{text}")).expect("the configuration");
    let image = bed.lab.image("logs", 16 * MIB);
    let table = format!("[[volume]]\nname = \"logs\"\nstore = \"file\"\npath = {image:?}\n");
    std::fs::write(bed.lab.path("target.d/logs.toml"), table).expect("another file");
    let epoch = bed.mount.status().epoch;
    let would = needs_restart(bed.lab, &["reload", "--dry-run"]);
    assert!(would.contains("add volume logs") && would.contains("slow_io"), "{would}");
    let _ = needs_restart(bed.lab, &["reload"]);
    let list = bed.target(&["volume", "list"]);
    assert!(list.contains("logs"), "{list}");
    assert_eq!(bed.mount.status().epoch, epoch, "the mount notices nothing");
}

/// Reads and verifies fio's data while the volume takes no write.
fn read_only_and_back(bed: &Bed<'_>) {
    let dir = bed.dir.display().to_string();
    let kept = |rw: &str| {
        let file = Fio::new(&bed.dir.join("kept"), rw).with("bs", "64k").with("iodepth", 8);
        file.with("size", FIO_BYTES).with("verify", "crc32c").with("verify_fatal", 1)
    };
    let wrote = kept("write").with("do_verify", 0).run(FIO_DEADLINE).ok();
    assert_eq!(wrote.errors, 0);
    sh(&["mount", "-o", "remount,ro", &dir]);
    bed.read_only(true);
    let before = bed.mount.counts();
    let read = kept("read").run(FIO_DEADLINE).ok();
    assert!(read.errors == 0 && read.reads > 0, "a read-only volume gives other data: {read:?}");
    let did = bed.mount.counts().since(&before);
    assert!(did.get("reads") > 0 && did.get("writes") == 0, "the disk was read");
    bed.read_only(false);
    sh(&["mount", "-o", "remount,rw", &dir]);
}
