//! The effects of the block cache on reads: right data, as many hits as its size allows, no copies,
//! reading ahead.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rblk_config::{ByteSize, CacheMode};
use rblk_tests::lab::{Counts, DEADLINE, Fio, Lab, Target, pattern, run, until};

use super::{FIO_DEADLINE, KIB, MIB, MODES, config, dirty_bytes, mount, serve, sh, size};

/// Percentage of blocks of reads that were in the cache.
fn hit_ratio(counts: &Counts) -> f64 {
    let (hits, misses) = (counts.get("cache_hits"), counts.get("cache_misses"));
    100.0 * hits as f64 / (hits + misses).max(1) as f64
}

/// The target's counters once they satisfy `is_so` and stay stable. A thread publishes counters at
/// the end of its turn, after its answers.
fn settled(target: &Target<'_>, what: &str, is_so: impl Fn(&Counts) -> bool) -> Counts {
    const FIGURES: [&str; 5] =
        ["cache_hits", "cache_misses", "cache_prefetched", "fill_bytes", "rdma_writes_with_imm"];
    until(what, DEADLINE, || {
        let before = target.counts();
        std::thread::sleep(Duration::from_millis(100));
        let after = target.counts();
        let same = FIGURES.iter().all(|name| before.get(name) == after.get(name));
        (same && is_so(&after)).then_some(after)
    })
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

/// Verifies writes of fio, then reads at random, with a cache of `arena` for `work` bytes. Returns
/// the hit ratios of uniform reads and of reads that prefer some blocks.
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
        let ios = 2500 * lab.long(10);
        both_halves(mounted.device(), "randread", work)
            .with("bs", "4k")
            .with("number_ios", ios)
            .with("norandommap", 1)
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
        until("something to be written back", DEADLINE, || {
            (target.counts().get("write_backs") > 0).then_some(())
        });
    }
    mounted.umount();
    assert_eq!(dirty_bytes(&target), 0, "the last fsync left dirty blocks");
    ratios
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fio_verify_small_arena() {
    run("fio_verify_small_arena", |lab| {
        for cache in MODES {
            let (uniform, zipf) = fio_over_cache(lab, cache, 32 * MIB, 3200 * KIB);
            assert!((2.0..35.0).contains(&uniform), "{uniform} % of uniform reads hit");
            assert!(zipf > uniform + 15.0, "{zipf} % hits with zipf, {uniform} % without");
        }
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fio_verify_large_arena() {
    run("fio_verify_large_arena", |lab| {
        for cache in MODES {
            let (uniform, zipf) = fio_over_cache(lab, cache, 32 * MIB, 64 * MIB);
            assert!(uniform >= 90.0 && zipf >= 90.0, "{uniform} % and {zipf} %");
        }
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
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
            let before = settled(&target, "what was before to be counted", |_| true);
            let done = fio("randread", bs)
                .with("iodepth", 8)
                .with("number_ios", ios)
                .with("io_size", "1G")
                .run(FIO_DEADLINE)
                .ok();
            let after = settled(&target, "all hits and all answers to be counted", |after| {
                let did = after.since(&before);
                let answers = if is_iwarp { 0 } else { done.reads };
                did.get("cache_hits") >= done.reads * bs / 4
                    && did.get("rdma_writes_with_imm") >= answers
            });
            let did = after.since(&before);
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
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn read_ahead() {
    run("read_ahead", |lab| {
        const BYTES: u64 = 24 * MIB;
        const SEQUENCE: u64 = BYTES / 2 - MIB;
        let image = lab.path("v0.img");
        std::fs::write(&image, pattern(1, size(BYTES))).expect("writing the image");
        sh(&["sync", &image.display().to_string()]);
        let mut results = Vec::new();
        for ahead in [0, 512 * KIB] {
            let mut config = config(&image, CacheMode::WriteThrough, 96 * MIB);
            config.volumes[0].read_ahead = ByteSize(ahead);
            // A new target's cache is empty.
            let target = serve(lab, &config);
            let mounted = mount(lab);
            let measure = |fio: Fio, fills: u64| {
                let before = settled(&target, "what was before to be counted", |_| true);
                let reads = disk_reads(&image);
                let fio = fio.run(FIO_DEADLINE).ok();
                let after = settled(&target, "all that was filled to be counted", |after| {
                    after.since(&before).get("fill_bytes") >= fills
                });
                (after.since(&before), disk_reads(&image) - reads, fio)
            };
            // In the half that the sequential reader does not touch.
            let random = Fio::new(mounted.device(), "randread")
                .with("bs", "4k")
                .with("offset", BYTES / 2)
                .with("size", BYTES / 2)
                .with("number_ios", 400);
            // The kernel looks at the last block, for partitions.
            let (random, ..) = measure(random, 399 * 4096);
            // Reads from 1 MiB on, because the kernel reads the start to find partitions.
            let (did, reads, fio) = measure(
                Fio::new(mounted.device(), "read")
                    .with("bs", "128k")
                    .with("offset", MIB)
                    .with("size", SEQUENCE),
                SEQUENCE,
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
            // Blocks behind the end may have been read ahead, too. In a slow lab, some that were
            // read ahead are replaced before they are used, and are read again.
            let filled = did.get("fill_bytes");
            let most = SEQUENCE + 2 * ahead;
            assert!((SEQUENCE..=most).contains(&filled), "{filled} bytes were filled");
            results.push((did, reads));
            mounted.umount();
        }
        let [(without, _), (with, reads)] = &results[..] else { panic!("two were measured") };
        assert_eq!((without.get("cache_prefetched"), without.get("cache_hits")), (0, 0));
        assert!(
            with.get("cache_prefetched") * 4096 >= SEQUENCE / 2,
            "half of it was not read ahead"
        );
        assert!(hit_ratio(with) > 60.0, "{:.0} % hits", hit_ratio(with));
        // A read may find a part of its blocks on their way, and then reads the rest by itself. But
        // most reads of the disk are as large as those of the reader.
        let filled = with.get("fill_bytes");
        assert!(reads * 96 * KIB <= filled, "{reads} reads of the disk for {filled} bytes");
    });
}
