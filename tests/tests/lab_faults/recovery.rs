//! Initiators that die or are replaced while their device is in use.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rblk_config::{CacheMode, OnLoss, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    Aligned, DEADLINE, Fio, KernelFeature, Lab, MountFlags, Mounted, StallMeter, Target,
    TargetFlags, Witness, pattern, run, until,
};

use super::{DETECT, MIB, PATIENCE, SLACK, endless_fio, flags, serve_file, wait_for_io};

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn crash_while_recovering() {
    run("crash_while_recovering", |lab| {
        let _target = Target::start(lab, &serve_file(lab, 1024 * MIB));
        let mut mounted = Mounted::new(lab, &flags(lab.rdma()));
        let node = mounted.node();
        let meter = StallMeter::start(mounted.device());
        let fio = endless_fio(&mounted).start();
        wait_for_io(&mounted, &meter);
        mounted.kill_daemon();
        for number in 0..lab.times(6, 30) {
            mounted.recover_and_kill(Duration::from_millis(number as u64 * 97 % 700));
        }
        mounted.recover();
        wait_for_io(&mounted, &meter);
        let _ = fio.stop(DEADLINE).ok();
        assert_eq!(mounted.node(), node);
        mounted.umount();
    });
}

/// A program that does not start changes nothing.
fn no_program_is_no_upgrade(lab: &Lab, mounted: &Mounted<'_>) {
    let pid = mounted.pid();
    let said = lab.initiator(&["upgrade", "v0", "--program", "/bin/false"], DEADLINE);
    assert_ne!(said.code(), 0, "{said}");
    assert_eq!(mounted.status().pid, pid, "{said}");
}

/// A mount that is handed over to one copy of the program after the other.
struct Upgrades<'l> {
    lab: &'l Lab,
    mounted: Mounted<'l>,
    meter: StallMeter,
    witness: Witness,
    copies: usize,
}

impl<'l> Upgrades<'l> {
    fn new(lab: &'l Lab) -> Self {
        let mounted = Mounted::new(lab, &flags(lab.rdma()));
        let meter = StallMeter::start(mounted.device());
        Self { lab, mounted, meter, witness: Witness::start(), copies: 0 }
    }

    /// Upgrades `times` times, while requests come.
    fn run(&mut self, times: usize) {
        let Self { lab, mounted, meter, witness, copies } = self;
        for round in 0..times {
            witness.judge(&format!("{}: {round}", lab.test()), || {
                wait_for_io(mounted, meter);
                // A new file each time, so that the test can tell which program runs afterwards.
                *copies += 1;
                let dir = lab.path(&format!("new{copies}"));
                std::fs::create_dir_all(&dir).expect("a directory");
                let new = dir.join("rblk-initiatord");
                let old = lab.program("rblk-initiatord");
                std::fs::copy(old.get_program(), &new).expect("copying the program");
                let (_, begun) = (meter.longest(), witness.now());
                let took = mounted.upgrade(Some(&new));
                wait_for_io(mounted, meter);
                let (stall, lost) = (meter.longest(), witness.lost_since(&begun));
                println!(
                    "{}: {round}: the command took {took:.2?}; no answer for {stall:.2?}",
                    lab.test()
                );
                // Compares the inodes: the path belongs to a mount namespace that is gone.
                let file = |path: &Path| {
                    let found = std::fs::metadata(path).expect("a program");
                    (found.dev(), found.ino())
                };
                let runs = format!("/proc/{}/exe", mounted.pid());
                assert_eq!(file(Path::new(&runs)), file(&new), "another program runs");
                has_all_requests(mounted);
                has_no_child(mounted);
                if stall > took + DETECT + SLACK + lost {
                    return Err(format!("a stall of {stall:?}"));
                }
                Ok(())
            });
        }
        let log = mounted.log();
        assert!(!log.contains("may be lost"), "a hand-over was not safe: {log}");
    }
}

/// The disk of a mount gets all requests again that an older kernel is to have.
fn has_all_requests(mounted: &Mounted<'_>) {
    if KernelFeature::SEES_END.is_there() {
        return;
    }
    let disk = mounted.device().file_name().expect("a name").display();
    let file = format!("/sys/block/{disk}/queue/nr_requests");
    let usual = (mounted.status().queue_depth - 1).to_string();
    until("all requests of the disk", PATIENCE, || {
        let found = std::fs::read_to_string(&file).expect("nr_requests");
        (found.trim() == usual).then_some(())
    });
}

/// The process of a mount has no child, not even a dead one.
fn has_no_child(mounted: &Mounted<'_>) {
    let pid = mounted.pid();
    let file = format!("/proc/{pid}/task/{pid}/children");
    until("the children of the mount to end", PATIENCE, || {
        std::fs::read_to_string(&file).expect("children").trim().is_empty().then_some(())
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn upgrade_under_fio() {
    run("upgrade_under_fio", |lab| {
        let _target = Target::start(lab, &serve_file(lab, 1024 * MIB));
        let mut upgrades = Upgrades::new(lab);
        let node = upgrades.mounted.node();
        let fio = endless_fio(&upgrades.mounted).start();
        upgrades.run(lab.times(3, 20));
        no_program_is_no_upgrade(lab, &upgrades.mounted);
        wait_for_io(&upgrades.mounted, &upgrades.meter);
        let _ = fio.stop(DEADLINE).ok();
        has_all_requests(&upgrades.mounted);
        assert_eq!(upgrades.mounted.node(), node);
        upgrades.mounted.umount();
    });
}

/// The kernel sends one FLUSH of a disk after the other: requests that wait for theirs have a place
/// in the queue, and do not reach it.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn upgrade_under_fsyncs() {
    run("upgrade_under_fsyncs", |lab| {
        let mut volume = VolumeConfig::file("v0", lab.image("v0.img", 256 * MIB));
        volume.cache = Some(CacheMode::WriteBack);
        let config = TargetConfig { volumes: vec![volume], ..TargetConfig::default() };
        let _target = Target::start(lab, &TargetFlags::default().config(lab, &config));
        let mut upgrades = Upgrades::new(lab);
        let fio = Fio::new(upgrades.mounted.device(), "randwrite")
            .with("bs", "4k")
            .with("fsync", 1)
            .with("numjobs", 8)
            .with("time_based", 1)
            .with("runtime", 3600)
            .start();
        upgrades.run(lab.times(2, 20));
        let _ = fio.stop(DEADLINE).ok();
        upgrades.mounted.umount();
    });
}

/// A mounted write-back volume, with an acknowledged write that no flush covered.
struct Unflushed<'l> {
    lab: &'l Lab,
    target_flags: TargetFlags,
    target: Option<Target<'l>>,
    mounted: Mounted<'l>,
    device: File,
    data: Vec<u8>,
}

impl<'l> Unflushed<'l> {
    fn new(lab: &'l Lab, retain: bool, on_loss: OnLoss) -> Self {
        let mut volume = VolumeConfig::file("v0", lab.image("v0.img", 64 * MIB));
        volume.cache = Some(CacheMode::WriteBack);
        let config = TargetConfig {
            volumes: vec![volume],
            write_back_delay: "1h".parse().expect("a duration"),
            ..TargetConfig::default()
        };
        let target_flags = TargetFlags::default().config(lab, &config);
        let target = Target::start(lab, &target_flags);
        let mut flags = flags(lab.rdma()).flag("--on-loss", on_loss.word());
        if retain {
            flags = flags.flag("--retain", "16MiB");
        }
        let mounted = Mounted::new(lab, &flags);
        let device = Aligned::open(mounted.device(), true, 0).expect("opening");
        Aligned::write_at(&device, &pattern(1, 64 << 10), MIB).expect("writing");
        device.sync_all().expect("fsync");
        let data = pattern(2, 64 << 10);
        Aligned::write_at(&device, &data, MIB).expect("writing");
        Self { lab, target_flags, target: Some(target), mounted, device, data }
    }

    fn restart_initiator(&mut self) {
        self.mounted.kill_daemon();
        self.mounted.recover();
    }

    fn kill_target(&mut self) {
        self.target.take().expect("a target").kill();
    }

    fn start_target(&mut self) {
        self.target = Some(Target::start(self.lab, &self.target_flags));
        self.mounted.wait_connected();
    }

    /// Nothing is lost, and no loss is reported.
    fn is_whole(&self) {
        let found = Aligned::read_at(&self.device, self.data.len(), MIB).expect("reading");
        assert!(found == self.data, "an acknowledged write is gone");
        self.device.sync_all().expect("fsync");
        let image = File::open(self.lab.path("v0.img")).expect("the image");
        let found = Aligned::read_at(&image, self.data.len(), MIB).expect("reading the image");
        assert!(found == self.data, "fsync did not bring it to the store");
    }

    /// The next flush reports the loss, and no later flush does.
    fn is_told(&self) {
        let error = self.device.sync_all().expect_err("the loss must be told");
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
        Aligned::write_at(&self.device, &self.data, MIB).expect("writing");
        self.is_whole();
    }

    /// Every flush reports the loss, also a flush by the next process.
    fn is_told_for_good(&mut self) {
        for _ in 0..2 {
            for _ in 0..3 {
                let error = self.device.sync_all().expect_err("every flush tells the loss");
                assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
            }
            Aligned::write_at(&self.device, &self.data, MIB).expect("writes go on");
            self.restart_initiator();
            self.mounted.wait_connected();
        }
        let lost = self.mounted.status().lost.expect("what to do about it");
        assert!(lost.contains("until the disk is unmounted and mounted again"), "{lost}");
    }

    fn end(self) {
        drop(self.device);
        self.mounted.umount();
    }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn unflushed_writes_outlive_the_initiator() {
    run("unflushed_writes_outlive_the_initiator", |lab| {
        let mut life = Unflushed::new(lab, false, OnLoss::UntilRemount);
        life.restart_initiator();
        life.mounted.wait_connected();
        life.is_whole();
        // That flush covered the write, so no doubt remains.
        life.kill_target();
        life.start_target();
        life.is_whole();
        life.end();
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_kill_of_both_ends_is_reported_as_a_loss() {
    run("a_kill_of_both_ends_is_reported_as_a_loss", |lab| {
        for retain in [false, true] {
            // The initiator comes back first, without its target.
            let mut life = Unflushed::new(lab, retain, OnLoss::Once);
            life.kill_target();
            life.restart_initiator();
            assert_ne!(life.mounted.status().state, "connected");
            life.start_target();
            life.is_told();
            life.end();
            // The initiator comes back, and then the target dies: the first process's knowledge is
            // still lost.
            let mut life = Unflushed::new(lab, retain, OnLoss::UntilRemount);
            life.restart_initiator();
            life.mounted.wait_connected();
            life.kill_target();
            life.start_target();
            life.is_told_for_good();
            life.end();
        }
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn dead_mounts_are_seen_and_given_up() {
    run("dead_mounts_are_seen_and_given_up", |lab| {
        let target = Target::start(lab, &serve_file(lab, 256 * MIB));
        let mounted = Mounted::new(lab, &flags(lab.rdma()));
        let device = mounted.device().to_owned();
        let meter = StallMeter::start(&device);
        let mut fio = endless_fio(&mounted).start();
        wait_for_io(&mounted, &meter);
        mounted.kill_daemon();
        let list = lab.initiator(&["list"], DEADLINE).ok();
        let line = list.lines().find(|line| line.starts_with("v0 ")).unwrap_or(&list);
        println!("{}: {line}", lab.test());
        assert!(line.contains("no server") || line.contains("ending"), "{list}");
        // The device is in use, so only force removes it.
        let said = lab.initiator(&["umount", "v0"], 2 * PATIENCE).fails_with(1, &["recover"]);
        println!("{}: {}", lab.test(), said.trim());
        // Another volume must not get that name.
        let other = MountFlags::new(lab.rdma(), "v1").name("v0").try_mount(lab);
        println!("{}: {}", lab.test(), other.fails_with(4, &["v0"]).trim());
        assert!(fio.is_running(), "fio saw an error");
        let force = lab.initiator(&["umount", "--force", "v0"], 2 * PATIENCE);
        assert_eq!(force.code(), 0, "{force}");
        let ended = fio.finish(DEADLINE);
        assert_ne!(ended.code, 0, "fio lost its device and did not notice");
        assert!(!Path::new(&device).exists());
        let _ = lab.initiator(&["recover", "v0"], DEADLINE).fails_with(3, &["v0"]);
        let again = Mounted::new(lab, &flags(lab.rdma()));
        until("the session of the dead one to make way", DEADLINE, || {
            (target.status().sessions.len() == 1).then_some(())
        });
        again.umount();
        mounted.forget();
    });
}
