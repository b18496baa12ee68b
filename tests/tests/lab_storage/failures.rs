//! Stores that fail or are full: the users that hear of it, and the fate of the data.

use std::fs::File;
use std::time::Instant;

use rblk_config::CacheMode;
use rblk_tests::lab::{
    Aligned, DEADLINE, FileSystem, Lab, LoopDisk, Mapped, MountFlags, Mounted, Target, pattern,
    run, until,
};

use super::{KIB, MIB, MODES, NEVER, config, dirty_bytes, errno, open, serve, sh, with_delay};

/// Checks the log of a target, started at `since`, for store failures: a line for a burst, not one
/// for each error. Returns the number of lines.
fn failure_lines(target: &Target<'_>, since: Instant) -> u64 {
    let log = target.log();
    // Earlier targets wrote to this file, too.
    let own = log.rsplit("registered").next().unwrap_or_default();
    let lines = own.lines().filter(|line| line.contains("the store failed")).count() as u64;
    // Each of two poll groups logs a line, and again every 10 s.
    let most = 2 * (1 + since.elapsed().as_secs() / 10);
    assert!((1..=most).contains(&lines), "{lines} lines about store errors:\n{own}");
    lines
}

/// A mount that recovers from a flush that failed at the store.
fn once(lab: &Lab) -> MountFlags {
    MountFlags::new(lab.rdma(), "v0").flag("--on-loss", "once")
}

#[expect(clippy::too_many_lines, reason = "one arm for each event")]
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
    let since = Instant::now();
    let target = serve(lab, &with_delay(config(&store.device(), cache, 16 * MIB), NEVER));
    // The path survives even if the machine stands still. Flushes work again as soon as the store
    // does.
    let patient = once(lab).flag("--detect", "30s");
    let mounted = Mounted::new(lab, &patient);
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
        // While the store fails, memory takes no more.
        assert_eq!(errno(Aligned::write_at(&file, &data, BAD + 128 * KIB)), libc::EIO);
    }
    // The good parts still work.
    Aligned::write_at(&file, &data, MIB).expect("a good place");
    assert!(Aligned::read_at(&file, data.len(), MIB).expect("a good place") == data);
    // A thread publishes counters at the end of its turn, after its answers.
    let counts = until("store errors to be counted", DEADLINE, || {
        Some(target.counts()).filter(|counts| counts.get("store_errors") >= 6)
    });
    let lines = failure_lines(&target, since);
    println!(
        "{} {cache}: {} store errors, {} failed commands, {told} fsyncs told, {lines} lines in the log; volumes: {}",
        lab.test(),
        counts.get("store_errors"),
        counts.get("failed_commands"),
        serde_json::to_string(&target.status().volumes).unwrap_or_default(),
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
    assert_eq!(dirty_bytes(&target), 0, "the flush left dirty blocks");
    assert_eq!(mounted.status().state, "connected");
    assert_eq!(mounted.status().total.paths_lost, 0);
    drop((file, behind));
    mounted.umount();
    drop(target);
    store.remove();
}

/// A file on a file system without room for it, until that is enlarged.
fn full_disk(lab: &Lab, cache: CacheMode) {
    let dir = lab.path("small");
    let fs = FileSystem::mount("tmpfs", "tmpfs", &dir, &["-o", "size=6m"]);
    let image = dir.join("v0.img");
    File::create(&image).and_then(|file| file.set_len(32 * MIB)).expect("a sparse image");
    let since = Instant::now();
    let target = serve(lab, &with_delay(config(&image, cache, 128 * MIB), NEVER));
    let mounted = Mounted::new(lab, &once(lab));
    let file = open(mounted.device());
    // Less than half of the limit for dirty blocks, so that none is written back before the flush.
    let data = pattern(2, 12 << 20);
    let written = Aligned::write_at(&file, &data, 0);
    if cache == CacheMode::WriteThrough {
        assert_eq!(errno(written), libc::ENOSPC);
    } else {
        written.expect("into memory");
        assert_eq!(errno(file.sync_all()), libc::ENOSPC);
        assert_eq!(errno(file.sync_all()), libc::ENOSPC);
    }
    let lines = failure_lines(&target, since);
    println!(
        "{} {cache}: full: {} store errors, {lines} lines in the log",
        lab.test(),
        target.counts().get("store_errors")
    );
    sh(&["mount", "-o", "remount,size=64m", &dir.display().to_string()]);
    if cache == CacheMode::WriteThrough {
        Aligned::write_at(&file, &data, 0).expect("there is room");
    }
    file.sync_all().expect("there is room");
    assert!(std::fs::read(&image).expect("the image")[..data.len()] == data);
    drop(file);
    mounted.umount();
    drop(target);
    fs.umount_after_process();
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn store_errors() {
    run("store_errors", |lab| {
        for cache in MODES {
            bad_sectors(lab, cache);
            full_disk(lab, cache);
        }
    });
}
