//! Reads return the written data, and so does the file behind the volume: any size, any place, with
//! a file system, after discards and flushes.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rblk_tests::lab::{
    Aligned, Counts, FileSystem, Fio, Lab, MountFlags, Mounted, Target, TargetFlags, file_syncs,
    pattern, run,
};

use super::{FIO_DEADLINE, KIB, MIB, serve_file, sh};

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
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn kernel_fio_verify_rdma() {
    run("kernel_fio_verify_rdma", |lab| fio_verifies(lab, lab.rdma()));
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn kernel_fio_verify_tcp() {
    run("kernel_fio_verify_tcp", |lab| fio_verifies(lab, lab.tcp()));
}

/// The CPUs that a thread of a process may run on, as the kernel writes lists.
fn cpus_of_thread(pid: u32, name: &str) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the threads of the mount");
    let statuses = tasks.flatten().filter_map(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        status.starts_with(&format!("Name:\t{name}\n")).then_some(status)
    });
    let all: Vec<String> = statuses.collect();
    assert_eq!(all.len(), 1, "threads with the name {name}");
    let list = all[0].lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t"));
    list.expect("the CPUs of a thread").to_owned()
}

/// The CPUs that send their requests to a hardware queue.
fn cpus_of_queue(device: &Path, queue: u16) -> String {
    let name = device.file_name().and_then(|name| name.to_str()).expect("a device");
    let list = std::fs::read_to_string(format!("/sys/block/{name}/mq/{queue}/cpu_list"));
    list.expect("the CPUs of a queue").trim().replace(", ", ",")
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn kernel_a_queues_thread_runs_where_its_requests_are_made() {
    run("kernel_a_queues_thread_runs_where_its_requests_are_made", |lab| {
        let (_, flags) = serve_file(lab, 64 * MIB);
        let _target = Target::start(lab, &flags);
        let everywhere = cpus_of_thread(std::process::id(), "lab");
        assert_ne!(everywhere, "0", "the lab needs two CPUs");
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        for queue in 0..mounted.status().queues {
            let cpus = cpus_of_thread(mounted.pid(), &format!("rblk-queue-{queue}"));
            assert_eq!(cpus, cpus_of_queue(mounted.device(), queue), "queue {queue}");
            assert_ne!(cpus, everywhere, "two queues share the CPUs");
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
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
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
            // The kernel itself refuses half a block.
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
        // The last block, and no byte beyond it.
        let file = Aligned::open(mounted.device(), true, 0).expect("opening");
        Aligned::write_at(&file, &pattern(77, 512), 16 * MIB - 512).expect("the last block");
        assert!(Aligned::write_at(&file, &[0; 512], 16 * MIB).is_err(), "a write past the end");
        drop(file);
        mounted.umount();
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
#[expect(clippy::too_many_lines, reason = "one case after another")]
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

        // An fsync reaches the disk behind.
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

        // O_DSYNC is a write with FUA and no flush; it must be on the disk behind before the
        // answer.
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
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
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
