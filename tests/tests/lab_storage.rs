//! The lab suite of storage: the block cache and what must outlast deaths, with the real programs, on disks of a
//! real kernel that fail, fill up and forget.
//!
//! Run like `lab.rs`; the figures that tests print are for reading, bounds are wide, and no time is judged.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use rblk_config::{ByteSize, CacheMode, HugePages, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    Aligned, Counts, DEADLINE, FileSystem, Fio, Lab, Logged, LoopDisk, Mapped, MountFlags, Mounted,
    Target, TargetFlags, WriteLog, pattern, run, start, until,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const MODES: [CacheMode; 2] = [CacheMode::WriteThrough, CacheMode::WriteBack];

/// For a run of fio that works on some tens of MiB.
const FIO_DEADLINE: Duration = Duration::from_secs(240);
/// A write-back delay that never comes.
const NEVER: &str = "1h";

/// A command of the host that must work.
fn sh(words: &[&str]) -> String {
    start(words).finish(2 * DEADLINE).ok()
}

/// A target with the one volume `v0` on `path`, without read-ahead.
fn config(path: &Path, cache: CacheMode, arena: u64) -> TargetConfig {
    let mut volume = VolumeConfig::file("v0", path);
    volume.cache = Some(cache);
    volume.read_ahead = ByteSize(0);
    TargetConfig {
        arena: ByteSize(arena),
        max_io: ByteSize(256 * KIB),
        volumes: vec![volume],
        ..TargetConfig::default()
    }
}

fn with_delay(config: TargetConfig, delay: &str) -> TargetConfig {
    TargetConfig { write_back_delay: delay.parse().expect("a duration"), ..config }
}

fn serve<'l>(lab: &'l Lab, config: &TargetConfig) -> Target<'l> {
    Target::start(lab, &TargetFlags::default().config(lab, config))
}

fn mount(lab: &Lab) -> Mounted<'_> {
    Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"))
}

fn open(device: &Path) -> File {
    Aligned::open(device, true, 0).unwrap_or_else(|e| panic!("opening {}: {e}", device.display()))
}

/// Percentage of blocks of reads that were in the cache.
fn hit_ratio(counts: &Counts) -> f64 {
    let (hits, misses) = (counts.get("cache_hits"), counts.get("cache_misses"));
    100.0 * hits as f64 / (hits + misses).max(1) as f64
}

/// Reads by two jobs, on one half of `bytes` and one queue each.
fn both_halves(device: &Path, rw: &str, bytes: u64) -> Fio {
    Fio::new(device, rw)
        .with("iodepth", 32)
        .with("numjobs", 2)
        .with("size", bytes / 2)
        .with("offset_increment", bytes / 2)
        .with("cpus_allowed", "0-1")
        .with("cpus_allowed_policy", "split")
}

/// Checks what fio writes, then reads at random, with a cache of `arena` for `work` bytes. Returns the hit ratios
/// of reads everywhere and of reads that prefer some blocks.
fn fio_over_cache(lab: &Lab, cache: CacheMode, work: u64, arena: u64) -> (f64, f64) {
    let image = lab.image("v0.img", 2 * work);
    let target = serve(lab, &config(&image, cache, arena));
    let mounted = mount(lab);
    let since = |before: &Counts| target.counts().since(before);
    let fio = Fio::verify(mounted.device(), work / 2)
        .with("bsrange", "4k-256k")
        .run(FIO_DEADLINE * 4)
        .ok();
    let verified = target.counts();
    println!(
        "{} {cache}: {} writes and {} reads checked in {:.1?}; evictions {}, memory waits {}, range waits {}, \
         write-backs {} of {} KiB, to the store at once {}",
        lab.test(),
        fio.writes,
        fio.reads,
        fio.took,
        verified.get("cache_evictions"),
        verified.get("memory_waits"),
        verified.get("range_waits"),
        verified.get("write_backs"),
        verified.get("write_back_bytes") / KIB,
        verified.get("dirty_limited"),
    );
    assert!(verified.get("written_bytes") >= work && verified.get("read_bytes") >= work);
    let uniform = if arena > work {
        both_halves(mounted.device(), "randread", work).with("bs", "64k")
    } else {
        let ios = 2000 * lab.long(10);
        both_halves(mounted.device(), "randread", work).with("bs", "4k").with("number_ios", ios)
    };
    uniform.run(FIO_DEADLINE).ok();
    let uniform = since(&verified);
    let zipf = both_halves(mounted.device(), "randread", work)
        .with("bs", "4k")
        .with("number_ios", 3000 * lab.long(10))
        .with("norandommap", 1)
        .with("random_distribution", "zipf:1.1");
    let before = target.counts();
    zipf.run(FIO_DEADLINE).ok();
    let zipf = since(&before);
    let (reads, ratios) = (uniform.get("reads"), (hit_ratio(&uniform), hit_ratio(&zipf)));
    println!(
        "{} {cache}: a cache of {:.0} % of the working set: {:.1} % hits in {reads} uniform reads, {:.1} % with zipf:1.1",
        lab.test(),
        100.0 * arena as f64 / work as f64,
        ratios.0,
        ratios.1
    );
    let all = target.counts();
    assert_eq!((all.get("failed_commands"), all.get("protocol_errors")), (0, 0));
    assert_eq!(all.get("store_errors"), 0);
    assert_eq!(mounted.status().total.errors, 0);
    if arena < work {
        assert!(verified.get("cache_evictions") > 0, "more was written than there is room for");
    }
    if cache == CacheMode::WriteBack {
        assert!(verified.get("write_backs") > 0, "nothing was written back");
    }
    mounted.umount();
    assert_eq!(target.counts().get("dirty_bytes"), 0, "the last fsync left dirty blocks");
    ratios
}

#[test]
fn fio_verify_small_arena() {
    run("fio_verify_small_arena", |lab| {
        for cache in MODES {
            let (uniform, zipf) = fio_over_cache(lab, cache, 48 * MIB, 4800 * KIB);
            assert!((2.0..35.0).contains(&uniform), "{uniform} % of uniform reads hit");
            assert!(zipf > uniform + 15.0, "{zipf} % hits with zipf, {uniform} % without");
        }
    });
}

#[test]
fn fio_verify_large_arena() {
    run("fio_verify_large_arena", |lab| {
        for cache in MODES {
            let (uniform, zipf) = fio_over_cache(lab, cache, 48 * MIB, 96 * MIB);
            assert!(uniform >= 90.0 && zipf >= 90.0, "{uniform} % and {zipf} %");
        }
    });
}

#[test]
fn cached_reads_copy_nothing() {
    run("cached_reads_copy_nothing", |lab| {
        let image = lab.image("v0.img", 64 * MIB);
        let target = serve(lab, &config(&image, CacheMode::WriteThrough, 64 * MIB));
        let mounted = mount(lab);
        let is_iwarp = mounted.status().transport == "iWARP";
        mounted.sysfs().set("queue/nomerges", "2");
        let fio = |rw: &str, kib: u64| {
            Fio::new(mounted.device(), rw).with("size", "8M").with("bs", format!("{kib}k"))
        };
        fio("write", 128).run(FIO_DEADLINE).ok();
        let ios = 300 * lab.long(10);
        for bs in [4, 128] {
            let before = target.counts();
            let done = fio("randread", bs)
                .with("iodepth", 8)
                .with("number_ios", ios)
                .with("io_size", "1G")
                .run(FIO_DEADLINE)
                .ok();
            let did = target.counts().since(&before);
            let names = [
                "cache_hits",
                "cache_misses",
                "fill_bytes",
                "copied_bytes",
                "merged_bytes",
                "rdma_writes",
                "rdma_writes_with_imm",
                "peer_messages",
            ];
            let text: Vec<String> =
                names.iter().map(|name| format!("{name} {}", did.get(name))).collect();
            println!("{}: {} reads of {bs} KiB: {}", lab.test(), done.reads, text.join(", "));
            assert_eq!(did.get("cache_hits"), done.reads * bs / 4);
            for name in ["cache_misses", "fill_bytes", "copied_bytes", "merged_bytes"] {
                assert_eq!(did.get(name), 0, "{name}");
            }
            if !is_iwarp {
                assert_eq!(did.get("rdma_writes_with_imm"), done.reads);
            }
        }
        mounted.umount();
    });
}

/// Reads that the disk under a file has done.
fn disk_reads(file: &Path) -> u64 {
    let dev = std::fs::metadata(file).expect("the image").dev();
    let (major, minor) = (libc::major(dev), libc::minor(dev));
    let text = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat"));
    text.ok().and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[test]
fn read_ahead() {
    run("read_ahead", |lab| {
        const BYTES: u64 = 24 * MIB;
        let image = lab.path("v0.img");
        std::fs::write(&image, pattern(1, BYTES as usize)).expect("writing the image");
        sh(&["sync", &image.display().to_string()]);
        let mut results = Vec::new();
        for ahead in [0, 512 * KIB] {
            let mut config = config(&image, CacheMode::WriteThrough, 96 * MIB);
            config.volumes[0].read_ahead = ByteSize(ahead);
            // A new target's cache is empty.
            let target = serve(lab, &config);
            let mounted = mount(lab);
            let measure = |fio: Fio| {
                let before = (target.counts(), disk_reads(&image));
                let fio = fio.run(FIO_DEADLINE).ok();
                (target.counts().since(&before.0), disk_reads(&image) - before.1, fio)
            };
            // In a half that the sequential reader leaves alone.
            let random = Fio::new(mounted.device(), "randread")
                .with("bs", "4k")
                .with("offset", BYTES / 2)
                .with("size", BYTES / 2)
                .with("number_ios", 400);
            let (random, ..) = measure(random);
            let (did, reads, fio) = measure(
                Fio::new(mounted.device(), "read").with("bs", "128k").with("size", BYTES / 2),
            );
            println!(
                "{}: {} KiB ahead: {} reads of 128 KiB in {:.1?}: {:.0} % hits, {} blocks prefetched, {} KiB filled by \
                 {reads} reads of the disk; of 400 random reads {} blocks prefetched",
                lab.test(),
                ahead / KIB,
                fio.reads,
                fio.took,
                hit_ratio(&did),
                did.get("cache_prefetched"),
                did.get("fill_bytes") / KIB,
                random.get("cache_prefetched"),
            );
            assert_eq!(random.get("cache_prefetched"), 0, "random reads are no sequence");
            // What lies behind the end may have been read ahead, too.
            let filled = did.get("fill_bytes");
            assert!(
                (BYTES / 2..=BYTES / 2 + ahead).contains(&filled),
                "{filled} bytes were filled"
            );
            results.push((did, reads));
            mounted.umount();
        }
        let [(without, reads_without), (with, reads_with)] = &results[..] else { return };
        assert_eq!((without.get("cache_prefetched"), without.get("cache_hits")), (0, 0));
        assert!(with.get("cache_prefetched") * 4096 >= BYTES / 4, "half of it was not read ahead");
        assert!(hit_ratio(with) > 60.0, "{:.0} % hits", hit_ratio(with));
        assert!(
            reads_with < reads_without,
            "{reads_with} reads of the disk, {reads_without} without"
        );
    });
}

/// Content of file number `number` of the tests with a file system.
fn content(number: u64) -> Vec<u8> {
    pattern(number, 3000 + 17_001 * (number as usize % 9))
}

/// What is wrong with a file system that must have the files below `count`, whole.
fn check_files(dir: &Path, count: u64) -> Result<(), String> {
    for number in 0..count {
        let path = dir.join(format!("f{number}"));
        match std::fs::read(&path) {
            Ok(data) if data == content(number) => {}
            Ok(data) => return Err(format!("f{number} is otherwise; it has {} bytes", data.len())),
            Err(error) => return Err(format!("f{number}: {error}")),
        }
    }
    Ok(())
}

/// Replays the log up to many moments after the file system was made; at each the file system must be whole, with
/// every file that was marked as synchronised by then. Returns how many moments.
fn check_crash_points(lab: &Lab, log: &WriteLog, bytes: u64) -> usize {
    let disk = lab.image("replayed.img", bytes);
    let file = File::options().write(true).open(&disk).expect("opening the replayed disk");
    let (copy, dir) = (lab.path("crashed.img"), lab.path("crashed"));
    let marks: Vec<usize> =
        (0..log.entries.len()).filter(|at| matches!(log.entries[*at], Logged::Mark(_))).collect();
    let made = *marks.first().expect("the mark of mkfs");
    // At marks all of what was promised is just there; between them things are half done.
    let step = marks.len().div_ceil(4 * usize::try_from(lab.long(8)).unwrap_or(1)).max(1);
    let mut points: Vec<usize> = marks.iter().copied().step_by(step).collect();
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |d| d.as_secs());
    println!(
        "{}: {} log entries, {} marks, seed {seed}",
        lab.test(),
        log.entries.len(),
        marks.len()
    );
    let random = pattern(seed, 8 * 4 * lab.long(8) as usize);
    points.extend(random.chunks_exact(8).map(|word| {
        let word = word.iter().fold(0, |word, byte| word << 8 | usize::from(*byte));
        made + word % (log.entries.len() - made)
    }));
    points.push(log.entries.len() - 1);
    points.sort_unstable();
    points.dedup();
    let (mut done, mut promised) = (0, 0);
    for point in &points {
        while done <= *point {
            log.apply(done, &file).expect("replaying");
            if let Logged::Mark(text) = &log.entries[done]
                && let Some(number) = text.strip_prefix('f').and_then(|n| n.parse::<u64>().ok())
            {
                promised = number + 1;
            }
            done += 1;
        }
        let (from, to) = (disk.display().to_string(), copy.display().to_string());
        sh(&["cp", "--sparse=always", &from, &to]);
        let fs = FileSystem::mount("ext4", &to, &dir, &["-o", "loop"]);
        let found = check_files(&dir, promised);
        fs.umount();
        let fsck = start(&["fsck.ext4", "-fn", &to]).finish(DEADLINE);
        assert_eq!(found, Ok(()), "after entry {point} of the log, seed {seed}; {fsck}");
        assert_eq!(fsck.code(), 0, "after entry {point} of the log, seed {seed}: {fsck}");
    }
    let of = log.entries.len();
    println!("{}: whole at entries {points:?} of {of}; {promised} files at the end", lab.test());
    points.len()
}

/// A file system over a disk that logs its writes; both programs die by SIGKILL amid writes.
fn crash_ext4(lab: &Lab, cache: CacheMode) {
    const BYTES: u64 = 48 * MIB;
    let (data, log) = (LoopDisk::new(lab, "data", BYTES), LoopDisk::new(lab, "log", 512 * MIB));
    let table = format!(
        "0 {} log-writes {} {}\n",
        data.sectors(),
        data.device().display(),
        log.device().display()
    );
    let logged = Mapped::new(lab, "logged", &table);
    // Soon enough for write-backs amid everything else.
    let with = |path: &Path| with_delay(config(path, cache, 16 * MIB), "50ms");
    let target = serve(lab, &with(&logged.device()));
    let mounted = mount(lab);
    sh(&["mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4", &mounted.dev()]);
    open(mounted.device()).sync_all().expect("fsync");
    logged.message("mark made");
    let dir = lab.path("mnt");
    let fs = FileSystem::mount("ext4", &mounted.dev(), &dir, &[]);
    let files = 12 * lab.long(4);
    let write = |name: String, number: u64, sync: bool| -> io::Result<()> {
        let file = File::create(dir.join(name))?;
        file.write_all_at(&content(number), 0)?;
        if sync {
            file.sync_all()?;
            File::open(&dir)?.sync_all()?;
        }
        Ok(())
    };
    for number in 0..files {
        // Something to be half done with.
        write(format!("loose{number}"), number + 7, false).expect("writing");
        write(format!("f{number}"), number, true).expect("writing with fsync");
        logged.message(&format!("mark f{number}"));
    }
    let dirty = target.counts();
    // The end, with much on its way.
    let mut fill = start(&[
        "dd",
        "if=/dev/zero",
        &format!("of={}", dir.join("last").display()),
        "bs=64k",
        "count=200",
        "oflag=direct",
        "status=none",
    ]);
    until("the last writes", DEADLINE, || {
        (target.counts().since(&dirty).get("writes") >= 10).then_some(())
    });
    target.kill();
    mounted.kill();
    fs.umount();
    until("dd to end", DEADLINE, || (!fill.is_running()).then_some(()));
    drop(fill);
    logged.remove();
    let log = WriteLog::open(log.device()).expect("reading the log");
    let points = check_crash_points(lab, &log, BYTES);

    // And through the programs.
    let target = serve(lab, &with(data.device()));
    let mounted = mount(lab);
    let fs = FileSystem::mount("ext4", &mounted.dev(), &dir, &[]);
    assert_eq!(check_files(&dir, files), Ok(()));
    fs.umount();
    sh(&["fsck.ext4", "-fn", &mounted.dev()]);
    println!("{} {cache}: {files} files whole at {points} crash points, and remounted", lab.test());
    mounted.umount();
    drop(target);
}

#[test]
fn ext4_over_crashing_store() {
    run("ext4_over_crashing_store", |lab| {
        for cache in MODES {
            crash_ext4(lab, cache);
        }
    });
}

/// What an operation that must fail says.
fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    let error = result.expect_err("it had to fail");
    error.raw_os_error().unwrap_or_else(|| panic!("{error} has no errno"))
}

/// Lines of the target's log about failures of the store.
fn failure_lines(target: &Target<'_>) -> usize {
    target.log().lines().filter(|line| line.contains("the store failed")).count()
}

fn bad_sectors(lab: &Lab, cache: CacheMode) {
    const BAD: u64 = 8 * MIB;
    let disk = LoopDisk::new(lab, "disk", 32 * MIB);
    let (all, at) = (disk.sectors(), disk.device().display());
    let whole = format!("0 {all} linear {at} 0\n");
    let (bad, end) = (BAD / 512, (BAD + 2 * MIB) / 512);
    let broken = format!(
        "0 {bad} linear {at} 0\n{bad} {} error\n{end} {} linear {at} {end}\n",
        end - bad,
        all - end
    );
    let store = Mapped::new(lab, "store", &broken);
    let target = serve(lab, &with_delay(config(&store.device(), cache, 16 * MIB), NEVER));
    let mounted = mount(lab);
    let file = open(mounted.device());
    let data = pattern(1, 64 << 10);

    // Reads.
    for offset in [BAD, BAD + MIB, BAD + 2 * MIB - 4096] {
        assert_eq!(errno(Aligned::read_at(&file, 4096, offset)), libc::EIO);
        assert_eq!(errno(Aligned::read_at(&file, 64 << 10, offset - 32 * KIB)), libc::EIO);
    }
    for offset in [0, BAD - 64 * KIB, BAD + 2 * MIB, 31 * MIB] {
        assert!(
            Aligned::read_at(&file, 64 << 10, offset)
                .expect("a good place")
                .iter()
                .all(|b| *b == 0)
        );
    }
    // Writes.
    let mut told = 0;
    if cache == CacheMode::WriteThrough {
        assert_eq!(errno(Aligned::write_at(&file, &data, BAD)), libc::EIO);
        assert_eq!(errno(Aligned::write_at(&file, &data, BAD - 32 * KIB)), libc::EIO);
        assert_eq!(errno(Aligned::write_at(&file, &data[..4096], BAD + MIB)), libc::EIO);
        file.sync_all().expect("nothing that was acknowledged is missing");
    } else {
        Aligned::write_at(&file, &data, BAD).expect("into memory");
        Aligned::write_at(&file, &data, 20 * MIB).expect("into memory");
        for _ in 0..3 {
            assert_eq!(errno(file.sync_all()), libc::EIO, "it is not on the store");
            told += 1;
        }
        assert!(Aligned::read_at(&file, data.len(), BAD).expect("from memory") == data);
    }
    // The good parts work on.
    Aligned::write_at(&file, &data, MIB).expect("a good place");
    assert!(Aligned::read_at(&file, data.len(), MIB).expect("a good place") == data);
    let (counts, lines) = (target.counts(), failure_lines(&target));
    println!(
        "{} {cache}: {} store errors, {} failed commands, {told} fsyncs told, {lines} lines in the log; volumes: {}",
        lab.test(),
        counts.get("store_errors"),
        counts.get("failed_commands"),
        serde_json::to_string(&target.status().volumes).unwrap_or_default(),
    );
    assert!(counts.get("store_errors") >= 6);
    // One for each poll group, and one more for each 10 s.
    assert!(
        (1..=6).contains(&lines),
        "{lines} lines of store errors in the log:\n{}",
        target.log()
    );

    store.load(&whole);
    file.sync_all().expect("the store works again");
    if cache == CacheMode::WriteThrough {
        Aligned::write_at(&file, &data, BAD).expect("a repaired place");
        file.sync_all().expect("fsync");
    }
    let behind = open(disk.device());
    assert!(Aligned::read_at(&behind, data.len(), BAD).expect("the disk") == data);
    assert!(Aligned::read_at(&file, data.len(), BAD).expect("reading") == data);
    assert_eq!(target.counts().get("dirty_bytes"), 0);
    assert_eq!(mounted.status().state, "connected");
    assert_eq!(mounted.status().total.paths_lost, 0);
    drop((file, behind));
    mounted.umount();
    drop(target);
    store.remove();
}

/// A file on a file system that has no room for it, until it is given more.
fn full_disk(lab: &Lab, cache: CacheMode) {
    let dir = lab.path("small");
    let fs = FileSystem::mount("tmpfs", "tmpfs", &dir, &["-o", "size=6m"]);
    let image = dir.join("v0.img");
    File::create(&image).and_then(|file| file.set_len(32 * MIB)).expect("a sparse image");
    let target = serve(lab, &with_delay(config(&image, cache, 64 * MIB), NEVER));
    let mounted = mount(lab);
    let file = open(mounted.device());
    let data = pattern(2, 12 << 20);
    let written = Aligned::write_at(&file, &data, 0);
    if cache == CacheMode::WriteThrough {
        assert_eq!(errno(written), libc::ENOSPC);
    } else {
        written.expect("into memory");
        assert_eq!(errno(file.sync_all()), libc::ENOSPC);
        assert_eq!(errno(file.sync_all()), libc::ENOSPC);
    }
    let lines = failure_lines(&target);
    println!(
        "{} {cache}: full: {} store errors, {lines} lines in the log",
        lab.test(),
        target.counts().get("store_errors")
    );
    assert!((1..=4).contains(&lines), "{lines} lines:\n{}", target.log());
    sh(&["mount", "-o", "remount,size=64m", &dir.display().to_string()]);
    if cache == CacheMode::WriteThrough {
        Aligned::write_at(&file, &data, 0).expect("there is room");
    }
    file.sync_all().expect("there is room");
    assert!(std::fs::read(&image).expect("the image")[..data.len()] == data);
    drop(file);
    mounted.umount();
    drop(target);
    fs.umount();
}

#[test]
fn store_errors() {
    run("store_errors", |lab| {
        for cache in MODES {
            bad_sectors(lab, cache);
            full_disk(lab, cache);
        }
    });
}

/// What was acknowledged and not flushed, and where: small and large writes, and some blocks twice.
struct Unflushed(Vec<(u64, Vec<u8>)>);

impl Unflushed {
    fn write(device: &File) -> Self {
        let mut writes = Vec::new();
        for number in 0..40u64 {
            let len = [4096, 64 << 10, 20 << 10, 256 << 10][number as usize % 4];
            let data = pattern(100 + number, len);
            let offset = number * 700 * KIB / 4096 * 4096;
            Aligned::write_at(device, &pattern(7, 8192), offset).expect("writing");
            Aligned::write_at(device, &data, offset).expect("writing");
            writes.push((offset, data));
        }
        Self(writes)
    }

    /// How many of them `read` finds.
    fn found(&self, read: impl Fn(u64, usize) -> Vec<u8>) -> usize {
        self.0.iter().filter(|(offset, data)| read(*offset, data.len()) == *data).count()
    }

    fn found_by(&self, device: &File) -> usize {
        self.found(|offset, len| Aligned::read_at(device, len, offset).expect("reading"))
    }

    fn found_in(&self, image: &Path) -> usize {
        let file = File::open(image).expect("opening the image");
        self.found(|offset, len| {
            let mut data = vec![0; len];
            file.read_exact_at(&mut data, offset).expect("reading the image");
            data
        })
    }
}

/// Writes without a flush, ends the target by `end`, starts it again, and hands over all to be looked at.
fn target_ends(
    lab: &Lab,
    cache: CacheMode,
    retain: Option<&str>,
    end: impl Fn(Target<'_>),
    look: impl Fn(&Mounted<'_>, &File, &Unflushed, &Path),
) {
    let image = lab.image("v0.img", 64 * MIB);
    let config = with_delay(config(&image, cache, 128 * MIB), NEVER);
    let target = serve(lab, &config);
    let mut flags = MountFlags::new(lab.rdma(), "v0");
    if let Some(retain) = retain {
        flags = flags.flag("--retain", retain);
    }
    let mounted = Mounted::new(lab, &flags);
    let file = open(mounted.device());
    let writes = Unflushed::write(&file);
    let (all, there) = (writes.0.len(), writes.found_in(&image));
    match cache {
        CacheMode::WriteBack if retain.is_none() => {
            assert_eq!(there, 0, "the writes are in memory only");
        }
        // Retaining them flushes now and then.
        CacheMode::WriteBack => assert!(there < all, "the last writes are in memory only"),
        _ => assert_eq!(there, all, "the store has what was acknowledged"),
    }
    let before = mounted.status();
    end(target);
    let at_end = writes.found_in(&image);
    let target = serve(lab, &config);
    mounted.wait_connected();
    until("another epoch", DEADLINE, || {
        (mounted.status().epoch > before.epoch
            || mounted.status().verifier_changes > 0
            || mounted.status().state == "connected")
            .then_some(())
    });
    println!(
        "{} {cache}, retain {}: of {all} writes the store had {there}, at the target's end {at_end}; {} unflushed",
        lab.test(),
        retain.unwrap_or("nothing"),
        before.unflushed_writes
    );
    look(&mounted, &file, &writes, &image);
    let status = mounted.status();
    println!(
        "{} {cache}: verifier changes {}, writes rewritten {}, losses {}",
        lab.test(),
        status.verifier_changes,
        status.writes_rewritten,
        status.losses
    );
    drop(file);
    mounted.umount();
    drop(target);
}

fn by_sigkill(target: Target<'_>) {
    target.kill();
}

fn by_sigterm(mut target: Target<'_>) {
    target.terminate();
    assert_eq!(target.wait(DEADLINE).code(), Some(0), "{}", target.log());
}

/// Everything is there, and it was no trouble.
fn nothing_lost(mounted: &Mounted<'_>, file: &File, writes: &Unflushed, image: &Path) {
    assert_eq!(writes.found_by(file), writes.0.len(), "acknowledged writes are gone");
    file.sync_all().expect("fsync");
    assert_eq!(writes.found_in(image), writes.0.len(), "fsync did not bring them to the store");
    let status = mounted.status();
    assert_eq!((status.losses, status.total.errors), (0, 0));
}

#[test]
fn write_back_kill_retained() {
    run("write_back_kill_retained", |lab| {
        target_ends(
            lab,
            CacheMode::WriteBack,
            Some("64MiB"),
            by_sigkill,
            |mounted, file, writes, image| {
                nothing_lost(mounted, file, writes, image);
                let status = mounted.status();
                assert_eq!(status.verifier_changes, 1);
                assert!(status.writes_rewritten > 0, "nothing was written again");
            },
        );
        // And under load, twice.
        let image = lab.image("v0.img", 128 * MIB);
        let config = with_delay(config(&image, CacheMode::WriteBack, 32 * MIB), "300ms");
        let mut target = serve(lab, &config);
        let flags = MountFlags::new(lab.rdma(), "v0").flag("--retain", "64MiB");
        let mounted = Mounted::new(lab, &flags);
        let mut fio = Fio::new(mounted.device(), "randwrite")
            .with("bsrange", "4k-256k")
            .with("iodepth", 16)
            .with("size", 32 * MIB * lab.long(4))
            .with("rate", "3M,12M")
            .with("verify", "crc32c")
            .with("verify_fatal", 1)
            .with("verify_state_save", 0)
            .start();
        for kill in 1..=2 {
            let before = mounted.counts();
            until("fio to be at work", DEADLINE, || {
                (mounted.counts().since(&before).get("writes") > 20).then_some(())
            });
            assert!(fio.is_running(), "fio ended before death number {kill}");
            target.kill();
            target = serve(lab, &config);
            mounted.wait_connected();
        }
        let fio = fio.finish(FIO_DEADLINE).ok();
        let status = mounted.status();
        println!(
            "{}: fio found all of its {} writes after 2 deaths of the target; {} unanswered requests were sent again, \
             {} acknowledged writes written again",
            lab.test(),
            fio.writes,
            status.total.replayed,
            status.writes_rewritten
        );
        assert_eq!((status.losses, status.total.errors), (0, 0));
        assert!(status.verifier_changes >= 1);
        mounted.umount();
    });
}

#[test]
fn write_back_kill_is_told_once() {
    run("write_back_kill_is_told_once", |lab| {
        target_ends(lab, CacheMode::WriteBack, None, by_sigkill, |mounted, file, writes, _| {
            let status = mounted.status();
            assert_eq!((status.verifier_changes, status.losses), (1, 1));
            assert!(status.loss_untold);
            let found = writes.found_by(file);
            println!("{}: {found} of {} writes are there", lab.test(), writes.0.len());
            assert_eq!(found, 0, "they were in memory only");
            assert_eq!(errno(file.sync_all()), libc::EIO, "the loss is told");
            assert!(!mounted.status().loss_untold);
            for _ in 0..3 {
                file.sync_all().expect("it is told once");
            }
            // Life goes on.
            let data = pattern(3, 64 << 10);
            Aligned::write_at(file, &data, 0).expect("writing");
            file.sync_all().expect("fsync");
            assert!(Aligned::read_at(file, data.len(), 0).expect("reading") == data);
            assert_eq!(mounted.status().losses, 1);
        });
    });
}

#[test]
fn ends_that_lose_nothing() {
    run("ends_that_lose_nothing", |lab| {
        let no_trouble = |mounted: &Mounted<'_>, file: &File, writes: &Unflushed, image: &Path| {
            nothing_lost(mounted, file, writes, image);
            assert_eq!(mounted.status().verifier_changes, 0);
        };
        target_ends(lab, CacheMode::WriteThrough, None, by_sigkill, no_trouble);
        target_ends(lab, CacheMode::WriteBack, None, by_sigterm, no_trouble);
        target_ends(lab, CacheMode::WriteBack, Some("64MiB"), by_sigterm, no_trouble);
    });
}

#[test]
fn limits_tell_the_truth() {
    run("limits_tell_the_truth", |lab| {
        let image = lab.image("v0.img", 64 * MIB);
        let names = [
            "write_cache",
            "fua",
            "logical_block_size",
            "physical_block_size",
            "max_sectors_kb",
            "max_hw_sectors_kb",
            "discard_granularity",
            "discard_max_bytes",
            "write_zeroes_max_bytes",
        ];
        println!("{:<26} {}", "volume", names.join(" | "));
        for cache in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
            for (block, read_only) in [(4096, false), (512, false), (4096, true)] {
                if read_only && cache == CacheMode::WriteBack {
                    continue;
                }
                let mut config = config(&image, cache, 64 * MIB);
                config.volumes[0].block_size = block;
                config.volumes[0].read_only = read_only;
                let target = serve(lab, &config);
                let flags = MountFlags::new(lab.rdma(), "v0");
                let mounted =
                    Mounted::new(lab, &if read_only { flags.switch("--ro") } else { flags });
                let sysfs = mounted.sysfs();
                let text = |name: &str| sysfs.text(&format!("queue/{name}"));
                let number = |name: &str| sysfs.number(&format!("queue/{name}"));
                let what = format!("{cache} {block}{}", if read_only { " read-only" } else { "" });
                println!("{what:<26} {}", names.map(text).join(" | "));
                assert_eq!(sysfs.number("ro"), u64::from(read_only));
                assert_eq!(number("logical_block_size"), u64::from(block));
                assert_eq!((number("max_hw_sectors_kb"), number("max_sectors_kb")), (256, 256));
                let volatile = !read_only;
                assert_eq!(
                    text("write_cache"),
                    if volatile { "write back" } else { "write through" }
                );
                assert_eq!(number("fua"), u64::from(volatile));
                assert_eq!(number("discard_max_bytes") > 0, !read_only);
                assert_eq!(number("write_zeroes_max_bytes") > 0, !read_only);
                if !read_only {
                    assert!(number("discard_granularity") >= 4096);
                }
                assert_eq!(target.status().volumes[0].volatile_cache, volatile);
                mounted.umount();
            }
        }
    });
}

#[test]
fn discards_reach_dirty_blocks() {
    run("discards_reach_dirty_blocks", |lab| {
        let image = lab.image("v0.img", 64 * MIB);
        let target = serve(lab, &with_delay(config(&image, CacheMode::WriteBack, 64 * MIB), NEVER));
        let mounted = mount(lab);
        let file = open(mounted.device());
        let data = pattern(5, 8 << 20);
        Aligned::write_at(&file, &data, 0).expect("writing");
        let allocated = || std::fs::metadata(&image).expect("the image").blocks() * 512;
        let dirty = |target: &Target<'_>| target.counts().get("dirty_bytes");
        assert_eq!((dirty(&target), allocated()), (8 * MIB, 0), "all of it is dirty");
        let blkdiscard = |flags: &[&str], offset: u64, length: u64| {
            let (offset, length) = (offset.to_string(), length.to_string());
            let range = ["--offset", &*offset, "--length", &*length];
            sh(&[&["blkdiscard", "-f"], flags, &range, &[&*mounted.dev()]].concat());
        };
        // Across stripes of the cache, which are 1 MiB, and from within one block to within another.
        let (discarded, zeroed) = (MIB + 512 * KIB..MIB + 2560 * KIB, 5 * MIB..6 * MIB + 4096);
        blkdiscard(&[], discarded.start, discarded.end - discarded.start);
        blkdiscard(&["-z"], zeroed.start, zeroed.end - zeroed.start);
        let mut expected = data;
        for range in [&discarded, &zeroed] {
            expected[range.start as usize..range.end as usize].fill(0);
        }
        let left = dirty(&target);
        assert!(
            Aligned::read_at(&file, 8 << 20, 0).expect("reading") == expected,
            "before the flush"
        );
        file.sync_all().expect("fsync");
        assert!(
            Aligned::read_at(&file, 8 << 20, 0).expect("reading") == expected,
            "after the flush"
        );
        assert!(std::fs::read(&image).expect("the image")[..8 << 20] == expected, "in the file");
        println!(
            "{}: {} KiB dirty after discards, {} KiB of the file allocated after the flush",
            lab.test(),
            left / KIB,
            allocated() / KIB
        );
        // Zeroing may leave what it zeroed allocated; discarding may not.
        assert!(left <= 8 * MIB - 2 * MIB - MIB, "{left} bytes are still dirty");
        assert!(allocated() <= 6 * MIB, "{} bytes of the file are allocated", allocated());
        blkdiscard(&[], 0, 64 * MIB);
        file.sync_all().expect("fsync");
        assert_eq!(allocated(), 0, "the whole device was discarded");
        drop(file);
        mounted.umount();
    });
}

/// Huge pages of the kernel's pool. Dropped, there are none.
struct HugePool;

impl HugePool {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    fn new(pages: u32) -> Self {
        let pool = Self;
        std::fs::write(Self::COUNT, pages.to_string()).expect("asking for huge pages");
        let got = std::fs::read_to_string(Self::COUNT).expect("counting huge pages");
        assert_eq!(got.trim(), pages.to_string(), "the kernel has too little memory in one piece");
        pool
    }
}

impl Drop for HugePool {
    fn drop(&mut self) {
        let _ = std::fs::write(Self::COUNT, "0");
    }
}

#[test]
fn huge_pages() {
    run("huge_pages", |lab| {
        let image = lab.image("v0.img", 64 * MIB);
        let mut config = config(&image, CacheMode::WriteBack, 64 * MIB);
        config.hugepages = HugePages::Required;
        let config_path = lab.path("target.toml");
        let flags = TargetFlags::default().config(lab, &config);
        let mut command = lab.program("rblk-target");
        command.args(["serve", "--config"]).arg(&config_path);
        let refused = rblk_tests::lab::Running::start(command).finish(DEADLINE);
        println!("{}: without any: {}", lab.test(), refused.fails_with(7, &["huge pages"]).trim());

        let pool = HugePool::new(64);
        let target = Target::start(lab, &flags);
        let status = target.status();
        assert_eq!((status.arena_page_bytes, status.arena_bytes), (2 << 20, 64 * MIB));
        let mounted = mount(lab);
        let fio = Fio::verify(mounted.device(), 8 * MIB).with("bsrange", "4k-256k");
        let fio = fio.run(FIO_DEADLINE).ok();
        println!("{}: {} writes checked in {:.1?}", lab.test(), fio.writes, fio.took);
        mounted.umount();
        drop(target);
        drop(pool);
    });
}
