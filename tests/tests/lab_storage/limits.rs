//! The attributes of the device, discards of dirty blocks, and the pages of the arena.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rblk_config::{CacheMode, HugePages, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    Aligned, DEADLINE, Fio, LoopDisk, Mapped, MountFlags, Mounted, Running, Target, TargetFlags,
    pattern, run, until,
};

use super::{FIO_DEADLINE, KIB, MIB, NEVER, config, mount, open, serve, sh, size, with_delay};

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn limits_tell_the_truth() {
    run("limits_tell_the_truth", |lab| {
        let modes = [
            ("none", CacheMode::None, 4096, false),
            ("through", CacheMode::WriteThrough, 4096, false),
            ("through512", CacheMode::WriteThrough, 512, false),
            ("through-ro", CacheMode::WriteThrough, 4096, true),
            ("back", CacheMode::WriteBack, 4096, false),
            ("back512", CacheMode::WriteBack, 512, false),
        ];
        let volumes = modes.map(|(name, cache, block_size, read_only)| VolumeConfig {
            cache: Some(cache),
            block_size,
            read_only,
            ..VolumeConfig::file(name, lab.image(name, 16 * MIB))
        });
        let all = TargetConfig {
            volumes: volumes.to_vec(),
            ..config(Path::new("/"), CacheMode::None, 64 * MIB)
        };
        let target = serve(lab, &all);
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
        println!("{:<12} {}", "volume", names.join(" | "));
        let served = target.status().volumes;
        for ((name, _, block, read_only), served) in modes.into_iter().zip(served) {
            let flags = MountFlags::new(lab.rdma(), name);
            let mounted = Mounted::new(lab, &if read_only { flags.switch("--ro") } else { flags });
            let sysfs = mounted.sysfs();
            let text = |name: &str| sysfs.text(&format!("queue/{name}"));
            let number = |name: &str| sysfs.number(&format!("queue/{name}"));
            println!("{name:<12} {}", names.map(text).join(" | "));
            assert_eq!((served.name.as_str(), served.volatile_cache), (name, !read_only));
            assert_eq!(sysfs.number("ro"), u64::from(read_only));
            assert_eq!(number("logical_block_size"), u64::from(block));
            assert_eq!((number("max_hw_sectors_kb"), number("max_sectors_kb")), (256, 256));
            // Also without write-back: the disk behind may have a cache of its own.
            let cache = if read_only { "write through" } else { "write back" };
            assert_eq!(text("write_cache"), cache);
            assert_eq!(number("fua"), u64::from(!read_only));
            assert_eq!(number("discard_max_bytes") > 0, !read_only);
            assert_eq!(number("write_zeroes_max_bytes") > 0, !read_only);
            assert_eq!(number("discard_granularity") >= 4096, !read_only);
            mounted.umount();
        }
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn discards_reach_dirty_blocks() {
    run("discards_reach_dirty_blocks", |lab| {
        let image = lab.image("v0.img", 64 * MIB);
        let target = serve(lab, &with_delay(config(&image, CacheMode::WriteBack, 64 * MIB), NEVER));
        let mounted = mount(lab);
        let file = open(mounted.device());
        let data = pattern(5, 8 << 20);
        Aligned::write_at(&file, &data, 0).expect("writing");
        let allocated = || std::fs::metadata(&image).expect("the image").blocks() * 512;
        // A thread publishes counters at the end of its turn, after its answers.
        let dirty = |what: &str, is_so: &dyn Fn(u64) -> bool| {
            until(what, DEADLINE, || Some(target.counts().get("dirty_bytes")).filter(|n| is_so(*n)))
        };
        dirty("all of it to be dirty", &|bytes| bytes == 8 * MIB);
        assert_eq!(allocated(), 0, "none of it is in the file");
        let blkdiscard = |flags: &[&str], offset: u64, length: u64| {
            let (offset, length) = (offset.to_string(), length.to_string());
            let range = ["--offset", &*offset, "--length", &*length];
            sh(&[&["blkdiscard", "-f"], flags, &range, &[&*mounted.dev()]].concat());
        };
        // Across stripes of the cache, which are 1 MiB, and with partial blocks at both ends.
        let (discarded, zeroed) = (MIB + 512 * KIB..MIB + 2560 * KIB, 5 * MIB..6 * MIB + 4096);
        blkdiscard(&[], discarded.start, discarded.end - discarded.start);
        blkdiscard(&["-z"], zeroed.start, zeroed.end - zeroed.start);
        let mut expected = data;
        for range in [&discarded, &zeroed] {
            expected[size(range.start)..size(range.end)].fill(0);
        }
        // Zeroing may leave zeroed blocks allocated; a discard may not.
        let left = dirty("what was discarded", &|left| left <= 8 * MIB - 2 * MIB - MIB);
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
        assert!(allocated() <= 6 * MIB, "{} bytes of the file are allocated", allocated());
        blkdiscard(&[], 0, 64 * MIB);
        file.sync_all().expect("fsync");
        assert_eq!(allocated(), 0, "the whole device was discarded");
        drop(file);
        mounted.umount();
    });
}

/// The kernel sends no request with REQ_NOWAIT to a disk of dm-flakey, nor to one of dm-crypt or
/// VDO.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn discards_reach_a_disk_that_makes_callers_wait() {
    run("discards_reach_a_disk", |lab| {
        let disk = LoopDisk::new(lab, "disk", 64 * MIB);
        let below = disk.device().display();
        let waits =
            Mapped::new(lab, "waits", &format!("0 {} flakey {below} 0 3600 0", disk.sectors()));
        let _target = serve(lab, &config(&waits.device(), CacheMode::None, 64 * MIB));
        let mounted = mount(lab);
        let file = open(mounted.device());
        Aligned::write_at(&file, &pattern(6, 8 << 20), 0).expect("writing");
        file.sync_all().expect("fsync");
        let full = disk.allocated();
        sh(&["blkdiscard", "-f", "--offset", "1048576", "--length", "2097152", &mounted.dev()]);
        let left = disk.allocated();
        println!("{}: {full} bytes before the discard, {left} after it", lab.test());
        assert!(left + 2 * MIB <= full, "{full} bytes before, {left} after");
        drop(file);
        mounted.umount();
    });
}

/// Huge pages of the kernel's pool. Drop empties the pool.
struct HugePool;

impl HugePool {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    fn new(pages: u32) -> Self {
        let (pool, pages) = (Self, pages.to_string());
        // Memory of other tests may be fragmented, or in the page cache.
        until("the kernel to have enough memory in large pieces", DEADLINE, || {
            std::fs::write("/proc/sys/vm/drop_caches", "3").expect("dropping caches");
            // Some kernels cannot compact memory.
            let _ = std::fs::write("/proc/sys/vm/compact_memory", "1");
            std::fs::write(Self::COUNT, &pages).expect("asking for huge pages");
            let got = std::fs::read_to_string(Self::COUNT).expect("counting huge pages");
            (got.trim() == pages).then_some(())
        });
        pool
    }
}

impl Drop for HugePool {
    fn drop(&mut self) {
        let _ = std::fs::write(Self::COUNT, "0");
    }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn huge_pages() {
    run("huge_pages", |lab| {
        let image = lab.image("v0.img", 64 * MIB);
        let mut config = config(&image, CacheMode::WriteBack, 64 * MIB);
        config.hugepages = HugePages::Required;
        let config_path = lab.path("target.toml");
        let flags = TargetFlags::default().config(lab, &config);
        let mut command = lab.program("rblk-target");
        command.args(["serve", "--config"]).arg(&config_path);
        let refused = Running::start(command).finish(DEADLINE);
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
