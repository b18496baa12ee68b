//! The target's cache counters: per volume and in all, after I/O that uses every part of the cache.
//! `RBLK_SEED=N` runs one seed alone.

use std::process::Command;

use nix::errno::Errno;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_operate::target::volume_counts::VolumeCounts;
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::{Kind, RamStore, StoreConditions};
use rblk_rig::seed::Random;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::VolumeIndex;
use rblk_tests::bed::{PATIENCE, pattern};
use rblk_tests::program::{Client, Target, program, run, wait_for, wait_for_equal};
use rblk_tests::storm::{MODES, seeds};

const BLOCK: u64 = 4096;
const VOLUME_BYTES: u64 = 2 << 20;
/// One volume of each of [`MODES`], in that order, and one in memory.
const MEMORY: VolumeIndex = VolumeIndex(3);

struct Bench {
    rig: Rig<RamStore>,
    queues: Vec<QueueId>,
}

impl Bench {
    /// One poll group or more; the arena is smaller than the volumes.
    fn new(seed: u64, groups: usize) -> Self {
        let spec = VolumeSpec::new(VolumeKind::Store, VOLUME_BYTES);
        let mut volumes: Vec<_> =
            MODES.iter().map(|cache| VolumeSpec { cache: *cache, ..spec }).collect();
        volumes.push(VolumeSpec::new(VolumeKind::Memory, VOLUME_BYTES));
        let options = RigOptions {
            seed,
            groups,
            volumes,
            arena_bytes: groups * (512 << 10),
            dirty_max_bytes: groups * (128 << 10),
            io_max_bytes: 64 << 10,
            ..RigOptions::default()
        };
        let mut rig = Rig::new(&options, |arena| {
            let mut store = RamStore::new(arena, seed);
            for at in 0..MODES.len() {
                let bytes = pattern(seed, usize::try_from(VOLUME_BYTES).unwrap());
                store.set_volume(VolumeIndex(u16::try_from(at).unwrap()), bytes);
            }
            store
        })
        .unwrap();
        let session = rig.begin_session();
        let queues = [VolumeIndex(0), VolumeIndex(1), VolumeIndex(2), MEMORY].map(|volume| {
            rig.open(session, volume, AccessMode::Exclusive);
            let options = QueueOptions { io_max_bytes: 64 << 10, ..QueueOptions::default() };
            rig.add_queue(session, volume, options).unwrap()
        });
        rig.settle(PATIENCE).unwrap();
        Self { rig, queues: queues.to_vec() }
    }

    fn io(&mut self, volume: VolumeIndex, op: IoOp, offset: u64, len: u64) -> i32 {
        let io = self.rig.request(self.queues[usize::from(volume.0)], op, offset, len);
        self.run(volume, io)
    }

    fn run(&mut self, volume: VolumeIndex, io: Io) -> i32 {
        self.rig.submit(self.queues[usize::from(volume.0)], Tag(0), io).unwrap();
        self.rig.settle(PATIENCE).unwrap();
        self.rig.take_outcomes()[0].result
    }

    fn counts(&self, volume: VolumeIndex) -> VolumeCounts {
        self.rig.volume_counts(volume).0
    }

    /// The volumes' counters add up to the target's, now.
    fn assert_sums(&self, context: &str) {
        let total = self.rig.target_counts();
        let mut sum = VolumeCounts::default();
        for at in 0..self.queues.len() {
            sum.add(&self.counts(VolumeIndex(u16::try_from(at).unwrap())));
        }
        let expected = VolumeCounts {
            hits: total.cache_hits,
            misses: total.cache_misses,
            evictions: total.cache_evictions,
            store_errors: total.store_errors,
            cached_bytes: total.cached_bytes,
            dirty_bytes: total.dirty_bytes,
            failed_blocks: sum.failed_blocks,
        };
        assert_eq!(sum, expected, "{context}");
        assert!(sum.failed_blocks * BLOCK <= sum.dirty_bytes, "{context}: {sum:?}");
        assert!(sum.dirty_bytes <= sum.cached_bytes, "{context}: {sum:?}");
        assert!(total.dirty_bytes <= total.dirty_max_bytes, "{context}: {total:?}");
    }
}

fn volume_of(mode: CacheMode) -> VolumeIndex {
    let at = MODES.iter().position(|m| *m == mode).unwrap();
    VolumeIndex(u16::try_from(at).unwrap())
}

#[test]
fn each_counter_counts_its_event() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut bench = Bench::new(1, 1);
        let volume = volume_of(mode);
        let ok = |len: u64| i32::try_from(len).unwrap();
        assert_eq!(bench.counts(volume), VolumeCounts::default(), "{mode:?}");
        assert_eq!(bench.counts(volume).hit_ratio(), None, "{mode:?}");

        let read = 4 * BLOCK;
        for _ in 0..4 {
            assert_eq!(bench.io(volume, IoOp::Read, 0, read), ok(read));
        }
        let mut expected =
            VolumeCounts { hits: 12, misses: 4, cached_bytes: read, ..VolumeCounts::default() };
        assert_eq!(bench.counts(volume), expected, "{mode:?}");
        assert_eq!(bench.counts(volume).hit_ratio(), Some(0.75), "{mode:?}");

        // Half of the range was cached.
        let write = 4 * BLOCK;
        assert_eq!(bench.io(volume, IoOp::Write, 2 * BLOCK, write), ok(write));
        expected.cached_bytes = 6 * BLOCK;
        expected.dirty_bytes = if mode == CacheMode::WriteBack { write } else { 0 };
        assert_eq!(bench.counts(volume), expected, "{mode:?}");

        // In write-through mode another range, so that the failed write costs the cache nothing.
        let place = if mode == CacheMode::WriteBack { 2 } else { 32 } * BLOCK;
        bench.rig.store_mut().fail_next(Kind::Write, place, Errno::ENOSPC);
        let failed = match mode {
            CacheMode::WriteBack => bench.io(volume, IoOp::Flush, 0, 0),
            _ => bench.io(volume, IoOp::Write, place, write),
        };
        assert_eq!(failed, -(Errno::ENOSPC as i32), "{mode:?}");
        expected.store_errors = 1;
        expected.failed_blocks = expected.dirty_bytes / BLOCK;
        assert_eq!(bench.counts(volume), expected, "{mode:?}");
        assert_eq!(bench.rig.volume_counts(volume).1.errno(), Some(Errno::ENOSPC as i32));

        assert_eq!(bench.io(volume, IoOp::Flush, 0, 0), 0, "{mode:?}");
        (expected.dirty_bytes, expected.failed_blocks) = (0, 0);
        assert_eq!(bench.counts(volume), expected, "{mode:?}");

        assert_eq!(bench.io(volume, IoOp::Discard, 0, 3 * BLOCK), 0, "{mode:?}");
        expected.cached_bytes = 3 * BLOCK;
        assert_eq!(bench.counts(volume), expected, "{mode:?}");

        // More than the memory: blocks of this volume make room for the other's.
        let other = volume_of(if mode == CacheMode::WriteBack {
            CacheMode::WriteThrough
        } else {
            CacheMode::WriteBack
        });
        for at in 0..VOLUME_BYTES / (64 << 10) {
            assert_eq!(bench.io(other, IoOp::Read, at << 16, 64 << 10), ok(64 << 10));
        }
        let (counts, others) = (bench.counts(volume), bench.counts(other));
        assert_eq!(counts.evictions * BLOCK + counts.cached_bytes, expected.cached_bytes);
        assert!(counts.evictions > 0, "{mode:?}: {counts:?}");
        assert_eq!(others.evictions * BLOCK + others.cached_bytes, VOLUME_BYTES, "{mode:?}");
        assert_eq!(bench.rig.volume_counts(other).1.errno(), None, "{mode:?}");
        bench.assert_sums("in the end");
    }
}

#[test]
fn counters_of_volumes_add_up_to_those_of_the_target() {
    // The seeds together must have seen each of these, or the sums prove nothing.
    let mut seen = VolumeCounts::default();
    let seeds = seeds(12);
    for seed in seeds.clone() {
        let groups = 1 + usize::try_from(seed % 3).unwrap();
        println!("seed {seed}: {groups} poll groups");
        let mut bench = Bench::new(seed, groups);
        let mut random = Random::new(seed);
        let conditions =
            StoreConditions { delay_max: 5, errors_per_mille: 40, ..StoreConditions::default() };
        bench.rig.groups_mut().for_each(|g| g.store_mut().set_conditions(conditions));
        for round in 0..400 {
            let volume = VolumeIndex(u16::try_from(random.index(4)).unwrap());
            let op = match random.index(20) {
                0 => IoOp::Flush,
                1 => IoOp::Discard,
                2 => IoOp::WriteZeroes,
                3..10 => IoOp::Write,
                _ => IoOp::Read,
            };
            let blocks = VOLUME_BYTES / 512;
            // Half of the requests repeat an earlier range.
            let end = if random.index(2) == 0 { 256 } else { blocks - 64 };
            let first = random.within(0, end);
            let (offset, len) = match op {
                IoOp::Flush => (0, 0),
                _ => (first * 512, random.within(1, 64) * 512),
            };
            bench.io(volume, op, offset, len);
            bench.assert_sums(&format!("seed {seed}, round {round}, {op:?} of {volume:?}"));
            seen.dirty_bytes += bench.counts(volume_of(CacheMode::WriteBack)).dirty_bytes;
            seen.failed_blocks += bench.counts(volume_of(CacheMode::WriteBack)).failed_blocks;
        }
        for mode in MODES {
            let counts = bench.counts(volume_of(mode));
            seen.add(&VolumeCounts { dirty_bytes: 0, failed_blocks: 0, ..counts });
            if mode == CacheMode::None {
                let none = VolumeCounts { store_errors: counts.store_errors, ..Default::default() };
                assert_eq!(counts, none, "seed {seed}: a volume without a cache");
            }
        }
        assert_eq!(bench.counts(MEMORY), VolumeCounts::default(), "seed {seed}");
    }
    let VolumeCounts { hits, misses, evictions, store_errors, .. } = seen;
    let VolumeCounts { cached_bytes, dirty_bytes, failed_blocks, .. } = seen;
    let all = [hits, misses, evictions, store_errors, cached_bytes, dirty_bytes, failed_blocks];
    assert!(seeds.end - seeds.start == 1 || all.iter().all(|n| *n > 0), "not exercised: {seen:?}");
}

/// After a busy turn a group publishes only a few volumes; before a sleep, all of them.
#[test]
fn every_volume_is_published_in_turn() {
    const COUNT: u16 = 20;
    let volumes = vec![
        VolumeSpec {
            cache: CacheMode::WriteThrough,
            ..VolumeSpec::new(VolumeKind::Store, 64 << 10)
        };
        usize::from(COUNT)
    ];
    let options = RigOptions { volumes, io_max_bytes: 64 << 10, ..RigOptions::default() };
    let mut rig = Rig::new(&options, |arena| {
        let mut store = RamStore::new(arena, 1);
        (0..COUNT).for_each(|at| store.set_volume(VolumeIndex(at), vec![0; 64 << 10]));
        store
    })
    .unwrap();
    let session = rig.begin_session();
    for volume in (0..COUNT).map(VolumeIndex) {
        rig.open(session, volume, AccessMode::Exclusive);
        let options = QueueOptions { io_max_bytes: 64 << 10, ..QueueOptions::default() };
        let queue = rig.add_queue(session, volume, options).unwrap();
        rig.settle(PATIENCE).unwrap();
        let io = rig.request(queue, IoOp::Read, 0, BLOCK);
        rig.submit(queue, Tag(0), io).unwrap();
        rig.settle(PATIENCE).unwrap();
    }
    let told = |rig: &Rig<RamStore>| {
        (0..COUNT).filter(|at| rig.published(VolumeIndex(*at)).0.misses == 1).count()
    };
    assert_eq!(told(&rig), 0);
    let mut turns = 0;
    while told(&rig) < usize::from(COUNT) {
        let before = told(&rig);
        rig.group_mut().publish_turn();
        turns += 1;
        assert!(told(&rig) > before, "turn {turns} told of nothing new");
    }
    assert!(turns > 1, "the cost of a turn grows with the volumes");
}

#[test]
fn a_running_target_shows_its_cache() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("target.toml");
    // The flags name another address.
    let mut text = "listen = [\"tcp://127.0.0.1\"]\nwrite_back_delay = \"1h\"\n".to_owned();
    for (name, keys) in [
        ("back", "cache = \"write-back\""),
        ("through", "cache = \"write-through\""),
        ("none", "cache = \"none\""),
        ("frozen", "read_only = true"),
    ] {
        let path = dir.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        text += &format!(
            "[[volume]]\nname = \"{name}\"\nstore = \"file\"\npath = {path:?}\nread_ahead = \"0\"\n{keys}\n"
        );
    }
    text += "[[volume]]\nname = \"ram\"\nstore = \"memory\"\nsize = \"1MiB\"\n";
    std::fs::write(&config, text).unwrap();
    let target = Target::start(dir.path(), &["--config", &config.display().to_string()]);
    let mut client = Client::connect(&target.address, "back", 1).unwrap();
    client.write(0, &pattern(1, 8192));
    client.read(0, 4096);
    client.read(4096, 8192);
    // A busy thread publishes at the end of a turn, perhaps after its answer arrived here.
    let status = wait_for("the counters", || {
        Some(target.status()).filter(|s| s.total.cache_hits + s.total.cache_misses == 3)
    });
    let volume = |name: &str| status.volumes.iter().find(|v| v.name == name).unwrap();
    let shown = ["back", "through", "none", "frozen", "ram"]
        .map(|name| (volume(name).cache, volume(name).volatile_cache));
    assert_eq!(
        shown,
        [
            (CacheMode::WriteBack, true),
            (CacheMode::WriteThrough, true),
            (CacheMode::None, true),
            (CacheMode::WriteThrough, false),
            (CacheMode::None, false),
        ]
    );
    // The counters of each volume follow one after the other. A turn publishes the lookup before
    // the missing block comes from the store.
    let expected = VolumeCounts {
        hits: 2,
        misses: 1,
        cached_bytes: 12288,
        dirty_bytes: 8192,
        ..VolumeCounts::default()
    };
    wait_for_equal("the volume's counters", &expected, || {
        let volumes = target.status().volumes;
        volumes.into_iter().find(|v| v.name == "back").expect("the volume").counts
    });
    assert_eq!(volume("through").counts, VolumeCounts::default());
    assert_eq!(volume("back").last_errno, None);
    assert_eq!(status.total.dirty_max_bytes, 2 << 20, "a quarter of the arena");
    let table = run(Command::new(program("rblk-target"))
        .args(["status", "-v", "--control-socket"])
        .arg(&target.socket));
    assert_eq!(table.code, Some(0), "{table:?}");
    for piece in ["CACHE OF", "write-back", "66%", "8KiB", "12KiB", "cache: 8MiB arena"] {
        assert!(table.stdout.contains(piece), "{piece:?} is not in:\n{}", table.stdout);
    }
    client.logout();
}
