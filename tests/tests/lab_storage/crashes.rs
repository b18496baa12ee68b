//! A file system over a store that logs every write: after a crash at any moment,
//! synchronised files are there.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::SystemTime;

use rblk_config::CacheMode;
use rblk_tests::lab::{
    DEADLINE, FileSystem, Lab, Logged, LoopDisk, Mapped, WriteLog, pattern, run, start, until,
};

use super::{MIB, MODES, config, mount, open, serve, sh, size, with_delay};

/// The content of file number `number`.
fn content(number: u64) -> Vec<u8> {
    pattern(number, 3000 + 17_001 * size(number % 9))
}

/// The fault of a file system that must have the files below `count`, whole.
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

/// Replays the log up to many moments after the file system was made. At each one the file system
/// must be whole, with every file that was marked as synchronised by then. Returns the number of
/// moments.
fn check_crash_points(lab: &Lab, log: &WriteLog, bytes: u64) -> usize {
    let disk = lab.image("replayed.img", bytes);
    let file = File::options().write(true).open(&disk).expect("opening the replayed disk");
    let (copy, dir) = (lab.path("crashed.img"), lab.path("crashed"));
    let marks: Vec<usize> =
        (0..log.entries.len()).filter(|at| matches!(log.entries[*at], Logged::Mark(_))).collect();
    let made = *marks.first().expect("the mark of mkfs");
    // At a mark the promised files are just complete; between marks, operations are half done.
    let step = marks.len().div_ceil(size(4 * lab.long(8))).max(1);
    let mut points: Vec<usize> = marks.iter().copied().step_by(step).collect();
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |d| d.as_secs());
    println!(
        "{}: {} log entries, {} marks, seed {seed}",
        lab.test(),
        log.entries.len(),
        marks.len()
    );
    let random = pattern(seed, size(8 * 4 * lab.long(8)));
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
        if *point == made {
            assert!(check_files(&dir, 1).is_err(), "a file before it was written");
        }
        fs.umount();
        let fsck = start(&["fsck.ext4", "-fn", &to]).finish(DEADLINE);
        assert_eq!(found, Ok(()), "after entry {point} of the log, seed {seed}; {fsck}");
        assert_eq!(fsck.code(), 0, "after entry {point} of the log, seed {seed}: {fsck}");
    }
    let of = log.entries.len();
    println!("{}: whole at entries {points:?} of {of}; {promised} files at the end", lab.test());
    points.len()
}

/// A file system over a disk that logs its writes; both programs die by SIGKILL during writes.
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
    // Short, so that write-backs run beside everything else.
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
        // Files without a sync, which may be half written.
        write(format!("loose{number}"), number + 7, false).expect("writing");
        write(format!("f{number}"), number, true).expect("writing with fsync");
        logged.message(&format!("mark f{number}"));
    }
    let before = target.counts();
    // The end, with many writes on their way.
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
        (target.counts().since(&before).get("writes") >= 10).then_some(())
    });
    target.kill();
    mounted.kill();
    fs.umount();
    until("dd to end", DEADLINE, || (!fill.is_running()).then_some(()));
    drop(fill);
    logged.remove();
    let log = WriteLog::open(log.device()).expect("reading the log");
    let points = check_crash_points(lab, &log, BYTES);

    // The same check through the programs.
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
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn ext4_over_crashing_store() {
    run("ext4_over_crashing_store", |lab| {
        for cache in MODES {
            crash_ext4(lab, cache);
        }
    });
}
