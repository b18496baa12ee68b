//! The lab suite: the real programs, a real kernel, real verbs (Soft-RoCE or a card) and a real block device.
//!
//! Run by `cargo xtask test`; by hand with `cargo xtask lab -- TEST-BINARY --test-threads=1 --nocapture [NAME]`.
//! Tests whose names start with `kernel_` depend on the kernel's own behaviour most, and run on the oldest
//! supported kernel, too. `RBLK_LONG=1` makes each longer; `RBLK_SKIP_LAB=1` makes each pass without a look.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rblk_tests::lab::{
    Aligned, Bench, Counts, DEADLINE, FileSystem, Finished, Fio, KernelLog, Lab, MountFlags,
    Mounted, Target, TargetFlags, cpu_time, fabric_packets, file_syncs, pattern, run, start, until,
};

const KIB: usize = 1 << 10;
const MIB: u64 = 1 << 20;

/// For a run of fio that works on some tens of MiB.
const FIO_DEADLINE: Duration = Duration::from_secs(180);

fn exists(device: &Path) -> bool {
    std::fs::metadata(device).is_ok_and(|m| m.file_type().is_block_device())
}

/// A command of the host that must work.
fn sh(words: &[&str]) -> String {
    start(words).finish(2 * DEADLINE).ok()
}

/// A target with the one file volume `v0`.
fn serve_file(lab: &Lab, bytes: u64) -> (PathBuf, TargetFlags) {
    let image = lab.image("v0.img", bytes);
    let flags = TargetFlags::default().file("v0", &image);
    (image, flags)
}

fn fio_verifies(lab: &Lab, address: String) {
    let (_, flags) = serve_file(lab, 256 * MIB);
    let target = Target::start(lab, &flags);
    let mounted = Mounted::new(lab, &MountFlags::new(address, "v0"));
    let bytes = 24 * MIB * lab.long(4);
    let fio = Fio::verify(mounted.device(), bytes).run(FIO_DEADLINE * 4).ok();
    let status = mounted.status();
    let at_target = target.counts();
    println!(
        "{}: {} writes and {} reads checked in {:.1?} over {} ({}), {} MiB written, {} MiB read",
        lab.test(),
        fio.writes,
        fio.reads,
        fio.took,
        status.transport,
        status.rdma_device,
        at_target.get("written_bytes") / MIB,
        at_target.get("read_bytes") / MIB
    );
    assert_eq!(status.queues, 2);
    for (queue, counts) in status.by_queue.iter().enumerate() {
        assert!(counts.reads > 0 && counts.writes > 0, "queue {queue} had nothing to do");
    }
    assert_eq!(status.total.copied_bytes, 0, "the initiator copies no data");
    assert_eq!(status.total.errors, 0);
    assert_eq!(at_target.get("failed_commands"), 0);
    assert_eq!(at_target.get("protocol_errors"), 0);
    assert!(at_target.get("written_bytes") >= 2 * bytes);
    mounted.umount();
}

#[test]
fn kernel_fio_verify_rdma() {
    run("kernel_fio_verify_rdma", |lab| fio_verifies(lab, lab.rdma()));
}

#[test]
fn kernel_fio_verify_tcp() {
    run("kernel_fio_verify_tcp", |lab| fio_verifies(lab, lab.tcp()));
}

/// One line of the table of messages: what `ios` I/Os cost.
struct Cost {
    ios: u64,
    initiator: Counts,
    target: Counts,
    wire: Counts,
}

impl Cost {
    fn print_head() {
        println!(
            "{:<12} {:>5} | {:>6} {:>6} | {:>6} {:>6} {:>6} {:>6} | {:>6} {:>6} | {:>7} {:>6}",
            "per I/O",
            "I/Os",
            "i.SEND",
            "i.cqe",
            "t.SEND",
            "t.WR",
            "t.WRIM",
            "t.READ",
            "t.sig",
            "t.cqe",
            "packets",
            "errors"
        );
    }

    fn print(&self, case: &str) {
        let per = |n: u64| format!("{:.2}", n as f64 / self.ios as f64);
        let t = |name| per(self.target.get(name));
        let answers = self.target.get("sends") - self.target.get("admin_commands");
        println!(
            "{case:<12} {:>5} | {:>6} {:>6} | {:>6} {:>6} {:>6} {:>6} | {:>6} {:>6} | {:>7} {:>6}",
            self.ios,
            per(self.initiator.get("sends")),
            per(self.initiator.get("completions")),
            per(answers),
            t("rdma_writes"),
            t("rdma_writes_with_imm"),
            t("rdma_reads"),
            t("signaled"),
            t("completions"),
            per(self.wire.nonzero().filter(|(n, _)| *n == "sent_pkts").map(|(_, v)| v).sum()),
            self.initiator.get("errors") + self.target.get("failed_commands"),
        );
    }
}

#[test]
fn counters_prove_the_messages() {
    run("counters_prove_the_messages", |lab| {
        // A part of the volume for each case: what another one left in the cache may lie in pieces, and data in
        // many pieces takes more than one message.
        const PART: u64 = 64 * MIB;
        let (_, flags) = serve_file(lab, 6 * PART);
        let target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        let status = mounted.status();
        let (with_imm, is_iwarp) = (status.write_with_imm, status.transport == "iWARP");
        // Two requests next to each other must stay two.
        mounted.sysfs().set("queue/nomerges", "2");
        let ios = 200 * lab.long(10);
        let measure = |part: u64, rw: &str, bs: &str, depth: u32| {
            let before = (mounted.counts(), target.counts(), fabric_packets());
            let fio = Fio::new(mounted.device(), rw)
                .with("bs", bs)
                .with("iodepth", depth)
                .with("number_ios", ios)
                .with("offset", part * PART)
                .with("size", PART)
                .run(FIO_DEADLINE)
                .ok();
            assert_eq!(fio.reads + fio.writes, ios);
            Cost {
                ios,
                initiator: mounted.counts().since(&before.0),
                target: target.counts().since(&before.1),
                wire: fabric_packets().since(&before.2),
            }
        };
        Cost::print_head();
        let mut wire = Vec::new();
        let cases = [
            ("read 4k", "randread", "4k", 16),
            ("read 128k", "randread", "128k", 16),
            ("write 4k", "randwrite", "4k", 16),
            ("write 128k", "randwrite", "128k", 16),
            ("read 4k qd1", "randread", "4k", 1),
            ("write 4k qd1", "randwrite", "4k", 1),
        ];
        for (part, (case, rw, bs, depth)) in (0..).zip(cases) {
            let cost = measure(part, rw, bs, depth);
            cost.print(case);
            let (i, t) = (|name| cost.initiator.get(name), |name| cost.target.get(name));
            let in_capsule = case.starts_with("write 4k");
            let reads = if rw == "randread" { ios } else { 0 };
            let writes = ios - reads;
            // One command each, alone in its SEND or with others of its turn, and nothing failed.
            let commands = i("sends") - i("lists") + i("listed");
            assert_eq!((i("reads"), i("writes"), commands), (reads, writes, ios), "{case}");
            assert_eq!((t("reads"), t("writes")), (reads, writes), "{case}");
            assert_eq!(i("errors") + t("failed_commands"), 0, "{case}");
            // Answers: data and answer in one message where the device can, else two. What has no data may share.
            let messages = t("sends") - t("admin_commands");
            let answers = messages - t("lists") + t("listed");
            if with_imm {
                assert_eq!(
                    (t("rdma_writes_with_imm"), t("rdma_writes"), answers),
                    (reads, 0, writes),
                    "{case}"
                );
                assert_eq!(i("immediates"), reads, "{case}");
            } else {
                assert_eq!(
                    (t("rdma_writes_with_imm"), t("rdma_writes"), answers),
                    (0, reads, ios),
                    "{case}"
                );
            }
            if depth == 1 {
                assert_eq!((i("lists"), t("lists")), (0, 0), "{case}: nobody waits for company");
            }
            // Data of writes: in the command, or fetched by one READ.
            let fetched = if in_capsule { 0 } else { writes };
            // On iWARP only a READ proves that data has left, so there are some more.
            let proofs = t("rdma_reads") - fetched;
            assert!(
                proofs == 0 || is_iwarp && proofs <= ios / 16,
                "{case}: {proofs} READs too many"
            );
            assert_eq!(t("in_capsule_writes"), writes - fetched, "{case}");
            assert_eq!(i("in_capsule_writes"), writes - fetched, "{case}");
            assert_eq!(i("keyed_commands"), reads + fetched, "{case}");
            // A completion per message that answers, and few for SENDs.
            let arrived = messages + t("rdma_writes_with_imm");
            assert_eq!(i("completions"), arrived + i("signaled"), "{case}");
            assert!(
                i("signaled") <= ios / 16 + 2,
                "{case}: {} of {ios} SENDs were signaled",
                i("signaled")
            );
            assert_eq!(i("copied_bytes"), 0, "{case}");
            wire.push((case, cost.wire));
        }
        println!("what the RDMA device counted, both ends together:");
        for (case, counts) in wire {
            let text: Vec<String> =
                counts.nonzero().map(|(name, value)| format!("{name} {value}")).collect();
            println!("{case:<12} {}", text.join(", "));
        }
        mounted.umount();
    });
}

/// Writes and reads at many sizes and places, and compares with the file behind the volume.
fn sizes_agree(device: &Path, image: &Path, sizes: &[usize], offset_of: impl Fn(usize) -> u64) {
    let file = Aligned::open(device, true, 0).expect("opening the device");
    for (seed, &size) in (1..).zip(sizes) {
        let data = pattern(seed, size);
        let offset = offset_of(size);
        Aligned::write_at(&file, &data, offset)
            .unwrap_or_else(|e| panic!("writing {size} bytes at {offset}: {e}"));
        let back = Aligned::read_at(&file, size, offset)
            .unwrap_or_else(|e| panic!("reading {size} bytes: {e}"));
        assert!(back == data, "{size} bytes at {offset} came back otherwise");
        file.sync_all().expect("flush");
        let mut behind = vec![0; size];
        File::open(image)
            .and_then(|f| f.read_exact_at(&mut behind, offset))
            .expect("reading the image");
        assert!(behind == data, "{size} bytes at {offset} are otherwise in the file");
    }
}

#[test]
fn sizes_and_alignment() {
    run("sizes_and_alignment", |lab| {
        let large = [
            32 * KIB,
            36 * KIB,
            64 * KIB,
            128 * KIB,
            252 * KIB,
            256 * KIB,
            260 * KIB,
            512 * KIB,
            1020 * KIB,
            1024 * KIB,
        ];
        let (image, flags) = serve_file(lab, 64 * MIB);
        let target = Target::start(lab, &flags.flag("--max-io", "1MiB"));
        for (max_io, bytes) in [(None, 256 * KIB), (Some("1MiB"), 1024 * KIB)] {
            let mut flags = MountFlags::new(lab.rdma(), "v0");
            if let Some(max_io) = max_io {
                flags = flags.flag("--max-io", max_io).flag("--queue-depth", "32");
            }
            let mounted = Mounted::new(lab, &flags);
            assert_eq!(mounted.status().max_io_bytes as usize, bytes);
            assert_eq!(mounted.sysfs().number("queue/max_hw_sectors_kb"), (bytes / KIB) as u64);
            assert_eq!(mounted.sysfs().number("queue/logical_block_size"), 4096);
            mounted.sysfs().set("queue/max_sectors_kb", &(bytes / KIB).to_string());
            let before = target.counts();
            sizes_agree(mounted.device(), &image, &large, |size| (size as u64 * 7) & !4095);
            let did = target.counts().since(&before);
            let written = large.iter().sum::<usize>() as u64;
            assert_eq!(did.get("written_bytes"), written);
            assert_eq!(did.get("read_bytes"), written);
            let commands = large.iter().map(|size| size.div_ceil(bytes) as u64).sum::<u64>();
            assert_eq!(
                did.get("writes"),
                commands,
                "requests are split at {bytes} bytes, no earlier"
            );
            // Half a block is refused by the kernel itself.
            let file = Aligned::open(mounted.device(), true, 0).expect("opening");
            let error = Aligned::write_at(&file, &[1; 512], 512).expect_err("half a block");
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            drop(file);
            mounted.umount();
        }
        drop(target);

        let image = lab.image("small.img", 16 * MIB);
        let flags = TargetFlags::default().file("small", &image).flag("--block-size", "512");
        let _target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "small"));
        assert_eq!(mounted.sysfs().number("queue/logical_block_size"), 512);
        let small = [
            512,
            1024,
            1536,
            4 * KIB,
            4 * KIB + 512,
            7 * KIB,
            36 * KIB + 512,
            256 * KIB,
            300 * KIB + 512,
        ];
        sizes_agree(mounted.device(), &image, &small, |size| 512 * (size as u64 / 512 % 13 + 3));
        // The last block, and nothing after it.
        let file = Aligned::open(mounted.device(), true, 0).expect("opening");
        Aligned::write_at(&file, &pattern(77, 512), 16 * MIB - 512).expect("the last block");
        assert!(Aligned::write_at(&file, &[0; 512], 16 * MIB).is_err(), "a write past the end");
        drop(file);
        mounted.umount();
    });
}

#[test]
fn discard_zeroes_flush_fua() {
    run("discard_zeroes_flush_fua", |lab| {
        let (image, flags) = serve_file(lab, 64 * MIB);
        let target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        let sysfs = mounted.sysfs();
        assert_eq!(sysfs.text("queue/write_cache"), "write back");
        assert_eq!(sysfs.number("queue/fua"), 1);
        assert!(sysfs.number("queue/discard_granularity") >= 4096);
        assert!(sysfs.number("queue/discard_max_bytes") >= 64 * MIB);
        assert!(sysfs.number("queue/write_zeroes_max_bytes") >= 64 * MIB);

        let both = || (mounted.counts(), target.counts());
        let did = |before: &(Counts, Counts), name: &str| {
            let (i, t) = both();
            let (i, t) = (i.since(&before.0).get(name), t.since(&before.1).get(name));
            assert_eq!(i, t, "{name} at the initiator and at the target");
            i
        };
        let allocated = || std::fs::metadata(&image).expect("the image").blocks() * 512;
        let device = mounted.dev();
        let file = Aligned::open(mounted.device(), true, 0).expect("opening");
        let data = pattern(5, 8 << 20);
        Aligned::write_at(&file, &data, 0).expect("writing");

        // sync reaches the disk behind.
        let before = both();
        file.sync_all().expect("fsync");
        assert!(did(&before, "flushes") >= 1);
        let full = allocated();
        assert!(full >= 8 * MIB, "8 MiB were written, {full} bytes are allocated");

        let before = both();
        sh(&["blkdiscard", "--offset", "1048576", "--length", "2097152", &device]);
        assert!(did(&before, "discards") >= 1);
        assert!(
            allocated() <= full - MIB,
            "discard freed nothing: {full} bytes before, {} after",
            allocated()
        );
        let back = Aligned::read_at(&file, 4 << 20, 0).expect("reading");
        assert!(
            back[..1 << 20] == data[..1 << 20] && back[3 << 20..] == data[3 << 20..4 << 20],
            "discard went too far"
        );
        assert!(back[1 << 20..3 << 20].iter().all(|b| *b == 0), "what was discarded is not zero");

        let before = both();
        sh(&["blkdiscard", "-z", "--offset", "4194304", "--length", "1048576", &device]);
        assert!(did(&before, "write_zeroes") >= 1);
        assert_eq!(did(&before, "writes"), 0, "zeroes were sent as data");
        let back = Aligned::read_at(&file, 3 << 20, 3 << 20).expect("reading");
        assert!(
            back[..1 << 20] == data[3 << 20..4 << 20] && back[2 << 20..] == data[5 << 20..6 << 20]
        );
        assert!(back[1 << 20..2 << 20].iter().all(|b| *b == 0), "what was zeroed is not zero");

        let before = both();
        let fio = Fio::new(mounted.device(), "randwrite")
            .with("bs", "4k")
            .with("size", "1M")
            .with("fsync", 1)
            .with("number_ios", 40)
            .run(FIO_DEADLINE)
            .ok();
        assert_eq!(did(&before, "writes"), fio.writes);
        assert!(did(&before, "flushes") >= fio.writes - 1, "an fsync after every write");

        // O_DSYNC is a write with FUA and no flush; it must be on the disk behind when it is answered.
        let before = both();
        let dsync = Fio::new(mounted.device(), "randwrite")
            .with("bs", "4k")
            .with("size", "1M")
            .with("sync", "dsync")
            .with("number_ios", 40);
        let mut done = None;
        let syncs = file_syncs(|| done = Some(dsync.run(FIO_DEADLINE).ok()));
        let fio = done.expect("it ran");
        assert_eq!(did(&before, "writes"), fio.writes);
        let flushes = did(&before, "flushes");
        println!(
            "{}: {} writes with O_DSYNC: {flushes} flushes, {syncs:?} syncs of the file",
            lab.test(),
            fio.writes
        );
        if let Some(syncs) = syncs {
            assert!(
                syncs as u64 >= fio.writes,
                "FUA did not reach the file: {syncs} syncs for {} writes",
                fio.writes
            );
        }
        let dsync = Aligned::open(mounted.device(), true, libc::O_DSYNC).expect("opening");
        Aligned::write_at(&dsync, &pattern(9, 4096), 8192).expect("writing with O_DSYNC");
        drop(dsync);
        sh(&["sync", &device]);

        // The whole device.
        sh(&["blkdiscard", &device]);
        assert!(allocated() < MIB, "{} bytes are left of a device that was discarded", allocated());
        let back = Aligned::read_at(&file, 8 << 20, 0).expect("reading");
        assert!(back.iter().all(|b| *b == 0));
        drop(file);
        mounted.umount();
    });
}

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
fn ext4_survives_remount() {
    run("ext4_survives_remount", |lab| {
        let (_, flags) = serve_file(lab, 96 * MIB);
        let _target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        let dir = lab.path("mnt");
        sh(&["mkfs.ext4", "-q", "-F", &mounted.dev()]);
        let fs = FileSystem::mount("ext4", &mounted.dev(), &dir, &[]);
        let files: Vec<(PathBuf, Vec<u8>)> = (1..=12u64)
            .map(|n| {
                (
                    dir.join(format!("file{n}")),
                    pattern(n, usize::try_from(n * n * 20_001).unwrap_or(0)),
                )
            })
            .collect();
        for (path, data) in &files {
            std::fs::write(path, data).expect("writing");
        }
        sh(&["fstrim", &dir.display().to_string()]);
        fs.umount();
        mounted.umount();

        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        sh(&["fsck.ext4", "-fn", &mounted.dev()]);
        let fs = FileSystem::mount("ext4", &mounted.dev(), &dir, &["-o", "ro"]);
        for (path, data) in &files {
            assert!(
                std::fs::read(path).expect("reading") == *data,
                "{} is not what was written",
                path.display()
            );
        }
        fs.umount();
        mounted.umount();
    });
}

#[test]
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
        // Nobody there.
        let short =
            |address: String| MountFlags::new(address, "v0").flag("--connect-timeout", "3s");
        refused(&short(format!("{rdma}:7799")), 6, &["7799", "rblk-target"]);
        refused(&short(format!("{tcp}:7799")), 6, &["7799", "rblk-target"]);
        // The other kind's port.
        refused(&short(format!("{rdma}:7721")), 6, &["7721"]);
        refused(&short(format!("{tcp}:7720")), 6, &["7720"]);

        let mounted =
            Mounted::new(lab, &MountFlags::new(rdma.clone(), "v0").flag("--host-name", "alice"));
        refused(&MountFlags::new(rdma.clone(), "v0"), 4, &["v0", "mounted already"]);
        // The target would take it for the first one come back, should that one be away at this moment.
        refused(
            &MountFlags::new(rdma.clone(), "v0").name("other").flag("--host-name", "bob"),
            4,
            &["on this host already", "umount v0", "--take-over"],
        );
        refused(
            &MountFlags::new(rdma.clone(), "v0").name("other").host("bob"),
            5,
            &["in use", "alice"],
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

        // Read-only there.
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

/// fio that checks what it writes while it writes, slowly enough for things to happen to it meanwhile.
fn slow_fio(mounted: &Mounted, lab: &Lab) -> Fio {
    Fio::new(mounted.device(), "randwrite")
        .with("bsrange", "4k-256k")
        .with("iodepth", 16)
        .with("size", 40 * MIB * lab.long(4))
        .with("rate", "3M,3M")
        .with("verify", "crc32c")
        .with("verify_backlog", 64)
        .with("verify_fatal", 1)
        .with("verify_state_save", 0)
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

#[test]
fn idle_uses_no_cpu() {
    run("idle_uses_no_cpu", |lab| {
        let (_, flags) = serve_file(lab, 64 * MIB);
        let target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        Fio::new(mounted.device(), "randread")
            .with("bs", "4k")
            .with("size", "1M")
            .run(FIO_DEADLINE)
            .ok();
        std::thread::sleep(Duration::from_secs(1));
        let used = || [cpu_time(target.pid()), cpu_time(mounted.pid())];
        let (since, before) = (Instant::now(), used());
        std::thread::sleep(Duration::from_secs(5));
        let (elapsed, after) = (since.elapsed(), used());
        for (who, after, before) in
            [("target", after[0], before[0]), ("initiator", after[1], before[1])]
        {
            let percent = 100.0 * (after - before).as_secs_f64() / elapsed.as_secs_f64();
            println!("{}: the idle {who} used {percent:.2} % of a CPU", lab.test());
            assert!(percent < 1.0, "the idle {who} used {percent:.2} % of a CPU");
        }
        mounted.umount();
    });
}

#[test]
fn bench_compare_smoke() {
    run("bench_compare_smoke", |lab| {
        let bench = Bench::new(lab);
        let before = bench.left();
        assert!(before.is_empty(), "there was before: {}", before.join("; "));
        let compared = bench.compare("whole");
        for system in &compared.systems {
            assert_eq!(system.error, None, "{} was not measured", system.key);
            for cell in &compared.cells {
                let sample = compared.sample(&system.key, &cell.key, 1);
                let sample = sample.unwrap_or_else(|| panic!("no {} {}", system.key, cell.key));
                assert!(sample.iops > 0.0 && sample.errors == 0, "{sample:?}");
                assert!(sample.latency.p50 > 0 && !sample.latency.bins.is_empty(), "{sample:?}");
                assert!(lab.path("whole").join(&sample.raw).exists(), "{}", sample.raw);
            }
        }
        // All that are known but the one that only spins.
        assert_eq!((compared.systems.len(), compared.cells.len()), (8, 2));
        // The commands of a mount are one message each, and the kernel counts system calls here.
        let ours = compared.sample("rblk-verbs", "randread-4k-qd1-j1-q1", 1).expect("ours");
        let initiator = ours.initiator.expect("counters of the mount");
        let messages = initiator.messages.expect("messages");
        assert!((0.99..1.05).contains(&messages), "{messages} messages");
        assert!(initiator.syscalls.is_some_and(|calls| calls > 0.0), "{initiator:?}");
        let left = bench.left();
        assert!(left.is_empty(), "a whole run left {}", left.join("; "));

        bench.kill_amid("killed");
        let left = bench.left();
        println!("{}: a killed run left {} things", lab.test(), left.len());
        for part in ["/sys/class/nvme", "nvmet/ports", "ublkb", "connected", "module", "process"] {
            assert!(left.iter().any(|what| what.contains(part)), "no {part} in {left:?}");
        }
        println!("{}", bench.clean_up().ok().trim());
        let left = bench.left();
        assert!(left.is_empty(), "clean-up left {}", left.join("; "));
    });
}

#[test]
fn bench_fabric_smoke() {
    run("bench_fabric_smoke", |lab| {
        let bench = Bench::new(lab);
        let measured = bench.fabric("fabric", &[lab.rdma(), lab.tcp()]);
        let fabric = measured.fabric.expect("a fabric");
        assert_eq!(fabric.devices.len(), 2);
        for device in &fabric.devices {
            let what = &device.title;
            assert_eq!(device.error, None, "{what}");
            // 4 KiB, twice as much each time, up to 4 MiB.
            let sizes: BTreeSet<u64> = device.registration.iter().map(|r| r.bytes).collect();
            assert_eq!(sizes.len(), 11, "{what}: {sizes:?}");
            for ping in &device.pingpong {
                assert!(ping.error.is_none() && ping.latency.p50 > 0, "{what}: {ping:?}");
            }
            let pings: BTreeSet<&str> = device.pingpong.iter().map(|p| p.what.as_str()).collect();
            for kind in ["UDP", "TCP", "SEND", "WRITE", "READ"] {
                assert!(pings.contains(kind), "{what}: no {kind} in {pings:?}");
            }
            // SEND, WRITE and READ of nine sizes.
            assert_eq!(device.bandwidth.len(), 27, "{what}");
            assert!(device.bandwidth.iter().all(|b| b.bytes_per_s > 0.0), "{what}");
        }
        let left = bench.left();
        assert!(left.is_empty(), "it left {}", left.join("; "));
    });
}
