//! RAID 1 of md over volumes of two targets (docs/layers.md): fio verifies the array, while the
//! targets of both halves are killed in turn.
//!
//! A half that is away for longer than `fail_after` is lost to the array, which says so and goes
//! on. A half that is back gets what it missed, by the bitmap. At the end both halves are equal.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rblk_config::{ByteSize, CacheMode, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    Aligned, Fio, GroupNetwork, KernelFeature, Lab, MountFlags, Mounted, RunningFio, StallMeter,
    Target, TargetFlags, pattern, run, start, until,
};

use super::{KIB, MIB, NEVER, open, sh, size};

const ARRAY: &str = "/dev/md77";
const HALVES: [&str; 2] = ["half0", "half1"];
const HALF_BYTES: u64 = 96 * MIB;
/// What fio writes to.
const WORK_BYTES: u64 = 8 * MIB;
const PATIENCE: Duration = Duration::from_secs(180);
/// How long the array may wait for a lost half: `fail_after`, and what md and an emulator take.
const STALL_MAX: Duration = Duration::from_secs(30);
const LEN: usize = 64 << 10;

/// One half: its target, and its mount.
struct Half<'l> {
    mounted: Option<Mounted<'l>>,
    target: Option<Target<'l>>,
    served: TargetFlags,
    flags: MountFlags,
    image: PathBuf,
    lab: &'l Lab,
}

impl<'l> Half<'l> {
    fn new(lab: &'l Lab, network: &GroupNetwork, at: usize, retain: bool) -> Self {
        let image = lab.image(HALVES[at], HALF_BYTES);
        let mut volume = VolumeConfig::file(HALVES[at], &image);
        volume.cache = Some(CacheMode::WriteBack);
        let config = TargetConfig {
            name: Some(format!("store{at}")),
            arena: ByteSize(48 * MIB),
            max_io: ByteSize(256 * KIB),
            write_back_delay: NEVER.parse().expect("a duration"),
            volumes: vec![volume],
            ..TargetConfig::default()
        };
        let served = TargetFlags::default().on_member(network, at).config(lab, &config);
        let flags = MountFlags::new(format!("rdma://{}", network.host(at)), HALVES[at]);
        let flags = flags.flag("--detect", "2s").flag("--fail-after", "3s");
        let flags = if retain { flags.flag("--retain", "16MiB") } else { flags };
        let target = Some(Target::start(lab, &served));
        let mounted = Some(Mounted::new(lab, &flags));
        Self { mounted, target, served, flags, image, lab }
    }

    fn mounted(&self) -> &Mounted<'l> {
        self.mounted.as_ref().expect("a mount")
    }

    fn dev(&self) -> String {
        self.mounted().dev()
    }

    fn kill(&mut self) {
        self.target.take().expect("a target").kill();
    }

    fn start(&mut self) {
        self.target = Some(Target::start(self.lab, &self.served));
        self.mounted().wait_connected();
    }

    /// Mounts the volume anew.
    fn mount_again(&mut self) {
        self.mounted.take().expect("a mount").umount();
        self.mounted = Some(Mounted::new(self.lab, &self.flags));
    }

    /// Bytes that were written to it.
    fn written(&self) -> u64 {
        // Documentation/block/stat.rst: the seventh figure.
        let text = self.mounted().sysfs().text("stat");
        let sectors = text.split_whitespace().nth(6).and_then(|n| n.parse::<u64>().ok());
        512 * sectors.expect("sectors written")
    }

    fn end(mut self) -> Vec<u8> {
        self.mounted.take().expect("a mount").umount();
        let mut target = self.target.take().expect("a target");
        target.terminate();
        assert_eq!(target.wait(PATIENCE).code(), Some(0), "{}", target.log());
        std::fs::read(&self.image).expect("the image")
    }
}

/// The array over both halves. The fields are dropped in this order.
struct Mirror<'l> {
    array: Array,
    halves: [Half<'l>; 2],
    _network: GroupNetwork,
    lab: &'l Lab,
}

/// Drop stops it.
struct Array;

impl Drop for Array {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- the array");
            for words in [&["cat", "/proc/mdstat"][..], &["mdadm", "--detail", ARRAY]] {
                println!("{}", start(words).finish(PATIENCE));
            }
        }
        let _ = start(&["mdadm", "--stop", ARRAY]).finish(PATIENCE);
    }
}

impl<'l> Mirror<'l> {
    /// A mirror whose halves are equal. `retain` says whether the mounts keep what is not flushed.
    fn new(lab: &'l Lab, retain: bool) -> Self {
        let network = GroupNetwork::new(lab);
        let halves = [0, 1].map(|at| Half::new(lab, &network, at, retain));
        let [first, second] = [0, 1].map(|at| halves[at].dev());
        // A piece of the bitmap is 64 MiB by default: too much to see that little is copied.
        let _ = sh(&[
            "mdadm",
            "--create",
            ARRAY,
            "--run",
            "--level=1",
            "--raid-devices=2",
            "--bitmap=internal",
            "--bitmap-chunk=64K",
            "--failfast",
            &first,
            &second,
        ]);
        let mirror = Self { array: Array, halves, _network: network, lab };
        mirror.wait_whole();
        mirror
    }

    /// What `mdadm --detail` says.
    fn detail(&self) -> String {
        sh(&["mdadm", "--detail", ARRAY])
    }

    /// Waits until both halves have everything.
    fn wait_whole(&self) {
        until("both halves to be whole", PATIENCE, || {
            let state = std::fs::read_to_string("/proc/mdstat").ok()?;
            let is_busy = ["resync", "recovery", "check"].iter().any(|work| state.contains(work));
            (state.contains("[UU]") && !is_busy).then_some(())
        });
    }

    /// Waits until the array has given a half up, and says so.
    fn wait_lost(&self, half: usize) {
        let device = self.halves[half].dev();
        until("a lost half to show", PATIENCE, || {
            let detail = self.detail();
            let has =
                |part: &str| detail.lines().any(|l| l.contains("State :") && l.contains(part));
            let faulty = detail.lines().any(|l| l.contains("faulty") && l.ends_with(&device));
            (has("degraded") && faulty).then_some(())
        });
    }

    /// Takes a lost half out of the array, and puts it back in.
    fn add(&self, half: usize, how: &str) {
        let device = self.halves[half].dev();
        let _ = sh(&["mdadm", ARRAY, "--remove", "failed"]);
        if how == "--add" {
            let _ = sh(&["mdadm", "--zero-superblock", &device]);
        }
        let _ = sh(&["mdadm", ARRAY, how, &device]);
    }

    /// Compares the halves by md. Returns the sectors in which they differ.
    fn mismatches(&self) -> u64 {
        let md = |name: &str| Path::new("/sys/block/md77/md").join(name);
        let read = |name: &str| std::fs::read_to_string(md(name)).unwrap_or_default();
        std::fs::write(md("sync_action"), "check").expect("a check begins");
        until("the check to end", PATIENCE, || {
            (read("sync_action").trim() == "idle").then_some(())
        });
        read("mismatch_cnt").trim().parse().expect("a number")
    }

    /// Ends all. Both halves have the same data.
    fn end(self) {
        assert_eq!(self.mismatches(), 0, "the halves differ");
        let examined = sh(&["mdadm", "--examine", &self.halves[0].dev()]);
        let begin = figure(&examined, "Data Offset :") * 512;
        let Self { array, halves, _network, lab } = self;
        drop(array);
        let [first, second] = halves.map(Half::end);
        let from = size(begin);
        assert!(first.len() > from + size(WORK_BYTES), "{begin} bytes of metadata");
        assert!(first[from..] == second[from..], "the halves differ");
        let equal = (first.len() - from) >> 20;
        println!("{}: both halves have the same {equal} MiB", lab.test());
    }
}

/// The number after a word of a text.
fn figure(text: &str, word: &str) -> u64 {
    let (_, rest) = text.split_once(word).unwrap_or_else(|| panic!("no {word} in {text}"));
    let number = rest.split_whitespace().next().and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("no number after {word} in {text}"))
}

/// A half is lost, and comes back, while fio runs.
fn lose_and_mend(
    mirror: &mut Mirror<'_>,
    half: usize,
    (fio, meter): (&mut RunningFio, &StallMeter),
) {
    let test = mirror.lab.test();
    let _ = meter.longest();
    mirror.halves[half].kill();
    mirror.wait_lost(half);
    // The other half alone goes on.
    let written = mirror.halves[1 - half].written();
    until("fio to go on", PATIENCE, || {
        assert!(fio.is_running(), "fio has ended");
        (mirror.halves[1 - half].written() > written + MIB).then_some(())
    });
    let stall = meter.longest();
    assert!(stall < STALL_MAX, "a stall of {stall:?}");
    mirror.halves[half].start();
    let before = [0, 1].map(|at| mirror.halves[at].written());
    let begun = Instant::now();
    mirror.add(half, "--re-add");
    mirror.wait_whole();
    let took = begun.elapsed();
    let [lost, other] = [half, 1 - half].map(|at| mirror.halves[at].written() - before[at]);
    // What fio wrote meanwhile went to both.
    let copied = lost.saturating_sub(other);
    println!(
        "{test}: half {half} lost: a stall of {stall:.1?}; back: {} KiB copied in {took:.1?}, of {} MiB",
        copied >> 10,
        HALF_BYTES >> 20
    );
    assert!(copied > 0, "nothing was copied");
    assert!(copied < 2 * WORK_BYTES, "not by the bitmap: {copied} bytes were copied");
}

fn is_here() -> bool {
    !KernelFeature::FAR_HOST.is_missing() && !KernelFeature::RAID_1.is_missing()
}

#[test]
#[ignore = "needs the lab: ublk, RDMA, RAID 1 and root; `cargo xtask test` runs it there"]
fn a_mirror_of_two_targets_outlives_either() {
    if !is_here() {
        return;
    }
    run("mirror", |lab| {
        let mut mirror = Mirror::new(lab, true);
        let fio = Fio::verifying(Path::new(ARRAY))
            .with("bsrange", "4k-64k")
            .with("size", WORK_BYTES)
            .with("thinktime", "10ms");
        let mut fio = fio.start();
        let meter = StallMeter::start(Path::new(ARRAY));
        for round in 0..lab.times(4, 10) {
            lose_and_mend(&mut mirror, round % 2, (&mut fio, &meter));
        }
        drop(meter);
        let fio = fio.stop(PATIENCE).ok();
        println!("{}: fio made {} writes and {} reads", lab.test(), fio.writes, fio.reads);
        mirror.end();
    });
}

/// A target that starts again within `fail_after` has lost acknowledged writes of a mount that
/// retains none. md learns of it by a FLUSH of its own, and its bitmap does not have these blocks.
#[test]
#[ignore = "needs the lab: ublk, RDMA, RAID 1 and root; `cargo xtask test` runs it there"]
fn a_half_of_a_mirror_that_lost_writes_is_copied_as_a_whole() {
    if !is_here() {
        return;
    }
    run("mirror_loss", |lab| {
        let mut mirror = Mirror::new(lab, false);
        let device = mirror.restart_with_unflushed();
        let old = mirror.read_half() != pattern(1, LEN);
        assert!(old, "the half has not lost the write");
        device.sync_all().expect("the other half has the write");
        mirror.wait_lost(0);
        assert_eq!(mirror.halves[0].mounted().status().losses, 1);
        let _ = sh(&["mdadm", ARRAY, "--remove", "failed"]);
        mirror.halves[0].mount_again();
        mirror.add(0, "--re-add");
        mirror.wait_whole();
        let differ = mirror.mismatches();
        println!("{}: {differ} sectors differ after --re-add", lab.test());
        assert!(differ > 0, "--re-add suffices: docs/layers.md says that it does not");
        let _ = sh(&["mdadm", ARRAY, "--fail", &mirror.halves[0].dev()]);
        mirror.add(0, "--add");
        mirror.wait_whole();
        assert!(mirror.read_half() == pattern(1, LEN), "the half has old data");
        drop(device);
        mirror.end();
    });
}

/// The same, with a mount that retains its writes: the array does not learn of the restart.
#[test]
#[ignore = "needs the lab: ublk, RDMA, RAID 1 and root; `cargo xtask test` runs it there"]
fn a_half_of_a_mirror_that_retains_writes_stays() {
    if !is_here() {
        return;
    }
    run("mirror_retained", |lab| {
        let mut mirror = Mirror::new(lab, true);
        let device = mirror.restart_with_unflushed();
        assert!(mirror.read_half() == pattern(1, LEN), "the half has old data");
        device.sync_all().expect("fsync");
        // As long as md may take to fail a half whose FLUSH fails.
        std::thread::sleep(Duration::from_secs(15));
        mirror.wait_whole();
        let status = mirror.halves[0].mounted().status();
        assert!(status.writes_rewritten > 0, "nothing was written again");
        assert_eq!((status.losses, status.total.errors), (0, 0));
        drop(device);
        mirror.end();
    });
}

impl Mirror<'_> {
    /// The target of the first half is killed and starts again, with an acknowledged write that no
    /// FLUSH covered. Returns the open array.
    fn restart_with_unflushed(&mut self) -> File {
        // md's own FLUSHes, when it calls the array clean, would cover the write.
        std::fs::write("/sys/block/md77/md/safe_mode_delay", "60").expect("a delay");
        let device = open(Path::new(ARRAY));
        device.sync_all().expect("fsync");
        Aligned::write_at(&device, &pattern(1, LEN), MIB).expect("writing");
        self.halves[0].kill();
        self.halves[0].start();
        device
    }

    /// What the first half has in the place of the write.
    fn read_half(&self) -> Vec<u8> {
        let half = self.halves[0].dev();
        let begin = figure(&sh(&["mdadm", "--examine", &half]), "Data Offset :") * 512;
        let half = Aligned::open(Path::new(&half), false, 0).expect("opening a half");
        Aligned::read_at(&half, LEN, begin + MIB).expect("reading a half")
    }
}
