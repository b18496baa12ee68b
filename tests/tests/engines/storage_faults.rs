//! Stores that fail: the error comes to the requests whose range failed and to no others, no
//! acknowledged write is forgotten, and nothing hangs.
//!
//! Parts of the store are bad in whole blocks of the cache, [`CACHE_BLOCK`] bytes: sectors in the
//! block of a bad sector may fail with it. `RBLK_LONG=1` runs more seeds; `RBLK_SEED=N` runs one
//! alone.

use std::ops::Range;
use std::time::Duration;

use nix::errno::Errno;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::crash_store::{CrashStore, Fault};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::{Kind, StoreConditions};
use rblk_rig::seed::Random;
use rblk_target::data::poll_group::ToGroup;
use rblk_target::store::Store;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::VolumeIndex;
use rblk_tests::bed::{PATIENCE, pattern};
use rblk_tests::long::times;
use rblk_tests::oracle::Oracle;
use rblk_tests::storm::{Crash, Failure, MODES, Mix, Storm, StormOptions, seeds};

/// Bytes of a block of the cache.
const CACHE_BLOCK: usize = 4096;
const KIND_CHANGES: [Kind; 3] = [Kind::Write, Kind::Discard, Kind::WriteZeroes];
const VOLUME_BYTES: usize = 256 << 10;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Some blocks of the cache, as ranges in bytes.
fn bad_ranges(random: &mut Random) -> Vec<Range<u64>> {
    let blocks = VOLUME_BYTES / CACHE_BLOCK;
    let all = (0..random.within(1, 6)).map(|_| {
        let first = random.index(blocks);
        let count = 1 + random.index(4.min(blocks - first));
        (first * CACHE_BLOCK) as u64..((first + count) * CACHE_BLOCK) as u64
    });
    all.collect()
}

fn touches(range: &Range<usize>, bad: &[Range<u64>]) -> bool {
    bad.iter().any(|bad| (range.start as u64) < bad.end && bad.start < range.end as u64)
}

fn storm(seed: u64, cache: CacheMode, mix: impl Fn(&mut Mix)) -> (Storm, Random) {
    let mut random = Random::new(seed ^ 0xfa17);
    let block_bytes = [512, 4096][random.index(2)];
    let mut options = StormOptions::random(seed, cache, block_bytes, VOLUME_BYTES);
    mix(&mut options.mix);
    println!("seed {seed}: {options:?}");
    let image = pattern(seed, VOLUME_BYTES);
    let oracle = Oracle::new(image.clone(), block_bytes as usize);
    (Storm::new(&options, oracle, &image), random)
}

fn storms() -> u64 {
    times(16, 200)
}

/// Runs requests while parts of the store are bad, then heals it and ends well. Returns the
/// failures.
fn fail_and_heal(
    storm: &mut Storm,
    kinds: &[Kind],
    bad: &[Range<u64>],
    errno: Errno,
) -> Vec<Failure> {
    storm.tolerate();
    storm.set_faults(kinds, bad, errno);
    storm.run(200);
    storm.settle();
    let failures = storm.take_failures();
    storm.set_faults(&[], &[], errno);
    // Write-backs under way still fail, and the next FLUSH would report them.
    let idle = storm.rig.run(PATIENCE, |rig| rig.store_mut().disk_in_flight() == 0);
    idle.expect("the store ends what it has");
    storm.run(50);
    // A change that failed may have left dirty blocks: the next FLUSH writes them.
    storm.calm();
    assert_eq!(storm.take_failures(), [], "after the store recovered");
    failures
}

#[test]
fn reads_fail_where_the_store_cannot_be_read() {
    for cache in MODES {
        let mut failed = 0;
        for seed in seeds(storms()) {
            let (mut storm, mut random) = storm(seed, cache, |_| {});
            let bad = bad_ranges(&mut random);
            for failure in fail_and_heal(&mut storm, &[Kind::Read], &bad, Errno::EIO) {
                // Write-back reads the rest of a block for a partial write.
                let around = failure.op == IoOp::Write && cache == CacheMode::WriteBack;
                let range = if around {
                    let Range { start, end } = failure.range;
                    start / CACHE_BLOCK * CACHE_BLOCK..end.next_multiple_of(CACHE_BLOCK)
                } else {
                    failure.range.clone()
                };
                assert!(
                    (failure.op == IoOp::Read || around) && touches(&range, &bad),
                    "seed {seed}, {cache:?}: {failure:?}, only {bad:?} are bad"
                );
                assert_eq!(failure.errno, EIO, "seed {seed}, {cache:?}");
                failed += 1;
            }
        }
        assert!(failed > 0 || seeds(storms()).end != storms(), "{cache:?}: nothing failed");
    }
}

#[test]
fn writes_fail_where_the_store_cannot_be_written() {
    for cache in MODES {
        let mut failed = 0;
        for seed in seeds(storms()) {
            // With FUA no block is written back later.
            let (mut storm, mut random) =
                storm(seed, cache, |mix| (mix.fua, mix.erase) = (1000, 40));
            let bad = bad_ranges(&mut random);
            for failure in fail_and_heal(&mut storm, &KIND_CHANGES, &bad, Errno::ENOSPC) {
                assert!(
                    touches(&failure.range, &bad) && failure.op != IoOp::Read,
                    "seed {seed}, {cache:?}: {failure:?}, only {bad:?} are bad"
                );
                assert_eq!(failure.errno, ENOSPC, "seed {seed}, {cache:?}");
                failed += 1;
            }
        }
        assert!(failed > 0 || seeds(storms()).end != storms(), "{cache:?}: nothing failed");
    }
}

#[test]
fn failed_write_backs_come_to_the_flush_and_lose_nothing() {
    let mut flushes = 0;
    for seed in seeds(2 * storms()) {
        let (mut storm, mut random) = storm(seed, CacheMode::WriteBack, |mix| {
            (mix.fua, mix.flush) = (100, mix.flush.max(30));
        });
        let bad = bad_ranges(&mut random);
        for failure in fail_and_heal(&mut storm, &KIND_CHANGES, &bad, Errno::ENOSPC) {
            flushes += u64::from(failure.op == IoOp::Flush);
            assert!(
                failure.op == IoOp::Flush
                    || failure.op != IoOp::Read && touches(&failure.range, &bad),
                "seed {seed}: {failure:?}, only {bad:?} are bad"
            );
            assert_eq!(failure.errno, ENOSPC, "seed {seed}");
        }
    }
    assert!(flushes > 0 || seeds(2 * storms()).end != 2 * storms(), "no flush failed");
}

#[test]
fn a_crash_of_a_failing_store_loses_no_flushed_write() {
    for cache in MODES {
        for seed in seeds(storms()) {
            let (mut storm, mut random) = storm(seed, cache, |_| {});
            storm.tolerate();
            storm.run(50);
            let bad = bad_ranges(&mut random);
            let kinds = [Kind::Write, Kind::Flush];
            storm.set_faults(&kinds[..1 + random.index(2)], &bad, Errno::EIO);
            let most = random.within(1, 600);
            for _ in 0..most {
                storm.step();
            }
            // The crash checks the contents itself.
            let _ = storm.crash(Crash::Machine);
        }
    }
}

/// A target with volumes in a store, one queue for each, and one request at a time.
#[derive(Debug)]
struct Bench {
    rig: Rig<CrashStore>,
    queues: Vec<QueueId>,
}

const FIRST: VolumeIndex = VolumeIndex(0);
const SECOND: VolumeIndex = VolumeIndex(1);

impl Bench {
    fn new(cache: CacheMode, dirty_max_bytes: usize) -> Self {
        let io_max_bytes = 16 << 10;
        let volume =
            VolumeSpec { cache, ..VolumeSpec::new(VolumeKind::Store, VOLUME_BYTES as u64) };
        let options = RigOptions {
            arena_bytes: 16 * io_max_bytes as usize,
            io_max_bytes,
            volumes: vec![volume; 2],
            dirty_max_bytes,
            write_back_delay: Duration::from_secs(3600),
            ..RigOptions::default()
        };
        let mut rig = Rig::new(&options, |region| {
            let mut store = CrashStore::new(region, 1);
            store.set_volume(FIRST, pattern(1, VOLUME_BYTES));
            store.set_volume(SECOND, pattern(2, VOLUME_BYTES));
            store
        })
        .expect("a rig");
        let session = rig.begin_session();
        let queues = [FIRST, SECOND].map(|volume| {
            rig.open(session, volume, AccessMode::Shared);
            let options = QueueOptions { io_max_bytes, ..QueueOptions::default() };
            rig.add_queue(session, volume, options).expect("a queue")
        });
        rig.settle(PATIENCE).expect("paths");
        Self { rig, queues: queues.to_vec() }
    }

    fn fail(&mut self, volume: VolumeIndex, kinds: &[Kind], range: Range<u64>, errno: Errno) {
        let fault = |kind: &Kind| Fault { kind: *kind, volume, range: range.clone(), errno };
        self.rig.store_mut().set_faults(kinds.iter().map(fault).collect());
    }

    fn heal(&mut self) {
        self.rig.store_mut().set_faults(Vec::new());
    }

    fn io(&mut self, volume: VolumeIndex, op: IoOp, range: Range<usize>, fua: bool) -> i32 {
        let queue = self.queues[usize::from(volume.0)];
        let io = self.rig.request(queue, op, range.start as u64, range.len() as u64);
        self.rig.submit(queue, Tag(0), Io { fua, ..io }).expect("a free tag");
        self.rig.settle(PATIENCE).unwrap_or_else(|_| panic!("{op:?} hangs: {:?}", self.rig));
        let outcomes = self.rig.take_outcomes();
        assert_eq!(outcomes.len(), 1, "{outcomes:?}");
        outcomes[0].result
    }

    fn flush(&mut self, volume: VolumeIndex) -> i32 {
        self.io(volume, IoOp::Flush, 0..0, false)
    }

    fn write(&mut self, volume: VolumeIndex, offset: usize, bytes: &[u8], fua: bool) -> i32 {
        self.rig.fill_buffer(self.queues[usize::from(volume.0)], Tag(0), bytes);
        self.io(volume, IoOp::Write, offset..offset + bytes.len(), fua)
    }

    fn read(&mut self, volume: VolumeIndex, range: Range<usize>) -> Result<Vec<u8>, i32> {
        let (queue, len) = (self.queues[usize::from(volume.0)], range.len());
        self.rig.fill_buffer(queue, Tag(0), &vec![0xee; len]);
        let result = self.io(volume, IoOp::Read, range, false);
        if result < 0 {
            return Err(-result);
        }
        Ok(self.rig.buffer(queue, Tag(0), len))
    }
}

#[test]
fn every_read_of_a_bad_block_fails_and_none_of_its_neighbours() {
    for cache in MODES {
        for errno in [(Errno::EIO, EIO), (Errno::ENOSPC, ENOSPC), (Errno::EREMOTEIO, EIO)] {
            let mut bench = Bench::new(cache, 16 << 10);
            bench.fail(FIRST, &[Kind::Read], 8192..12288, errno.0);
            let image = pattern(1, VOLUME_BYTES);
            for _ in 0..2 {
                for start in (0..32 << 10).step_by(CACHE_BLOCK) {
                    let range = start..start + CACHE_BLOCK;
                    let expected = if start == 8192 {
                        Err(errno.1)
                    } else {
                        Ok(image[range.clone()].to_vec())
                    };
                    assert_eq!(bench.read(FIRST, range), expected, "{cache:?} at {start}");
                }
                assert_eq!(bench.read(FIRST, 4096..16384), Err(errno.1), "{cache:?}");
            }
            assert_eq!(
                bench.read(SECOND, 8192..8704).unwrap(),
                pattern(2, VOLUME_BYTES)[8192..8704]
            );
            bench.heal();
            assert_eq!(bench.read(FIRST, 0..16384).unwrap(), image[..16384], "{cache:?}");
        }
    }
}

#[test]
fn short_reads_are_errors_and_are_not_kept() {
    for cache in MODES {
        let mut bench = Bench::new(cache, 16 << 10);
        let short = StoreConditions { short_by: 512, ..StoreConditions::default() };
        bench.rig.store_mut().set_conditions(short);
        for range in [0..4096, 0..16384, 512..1024] {
            assert_eq!(bench.read(FIRST, range), Err(EIO), "{cache:?}");
        }
        bench.rig.store_mut().set_conditions(StoreConditions::default());
        assert_eq!(bench.read(FIRST, 0..16384).unwrap(), pattern(1, VOLUME_BYTES)[..16384]);
    }
}

#[test]
fn a_failed_write_leaves_the_rest_readable() {
    for cache in MODES {
        let mut bench = Bench::new(cache, 16 << 10);
        let image = pattern(1, VOLUME_BYTES);
        assert_eq!(bench.read(FIRST, 0..16384).unwrap(), image[..16384]);
        bench.fail(FIRST, &[Kind::Write], 4096..8192, Errno::ENOSPC);
        let new = pattern(3, 12288);
        assert_eq!(bench.write(FIRST, 0, &new, true), -ENOSPC, "{cache:?}");
        assert_eq!(bench.read(FIRST, 12288..16384).unwrap(), image[12288..16384], "{cache:?}");
        // Each block has the old bytes or the new ones, and keeps them.
        let first = bench.read(FIRST, 0..12288).unwrap();
        for start in (0..12288).step_by(512) {
            let range = start..start + 512;
            let is = |of: &[u8]| first[range.clone()] == of[range.clone()];
            assert!(is(&image) || is(&new), "{cache:?} at {start}");
        }
        assert_eq!(bench.read(FIRST, 0..12288).unwrap(), first, "{cache:?}");
        bench.heal();
        assert_eq!(bench.write(FIRST, 0, &new, true), 12288);
        assert_eq!(bench.read(FIRST, 0..12288).unwrap(), new, "{cache:?}");
        assert_eq!(bench.flush(FIRST), 0);
        assert_eq!(bench.rig.store_mut().durable(FIRST)[..12288], new, "{cache:?}");
    }
}

#[test]
fn a_flush_fails_with_the_store_and_works_again_after_it() {
    for cache in MODES {
        let mut bench = Bench::new(cache, 16 << 10);
        let new = pattern(3, 8192);
        assert_eq!(bench.write(FIRST, 4096, &new, false), 8192);
        bench.fail(FIRST, &[Kind::Flush], 0..0, Errno::EIO);
        for _ in 0..2 {
            assert_eq!(bench.flush(FIRST), -EIO, "{cache:?}");
            assert_eq!(bench.flush(SECOND), 0, "{cache:?}");
            assert_eq!(bench.read(FIRST, 4096..12288).unwrap(), new, "{cache:?}");
        }
        bench.heal();
        assert_eq!(bench.flush(FIRST), 0, "{cache:?}");
        assert_eq!(bench.rig.store_mut().durable(FIRST)[4096..12288], new, "{cache:?}");
    }
}

#[test]
fn every_flush_fails_until_acknowledged_writes_are_in_the_store() {
    for len in [512, 4096, 12288] {
        let mut bench = Bench::new(CacheMode::WriteBack, 64 << 10);
        let new = pattern(3, len);
        assert_eq!(bench.write(FIRST, 8192, &new, false), i32::try_from(len).unwrap());
        bench.fail(FIRST, &[Kind::Write], 8192..8704, Errno::ENOSPC);
        for round in 0..4 {
            assert_eq!(bench.flush(FIRST), -ENOSPC, "round {round}");
            assert_eq!(bench.read(FIRST, 8192..8192 + len).unwrap(), new, "round {round}");
            assert_eq!(bench.read(FIRST, 0..8192).unwrap(), pattern(1, 8192));
            // The other volume works.
            let other = pattern(4 + round, 4096);
            assert_eq!(bench.write(SECOND, 0, &other, round % 2 == 1), 4096);
            assert_eq!(bench.flush(SECOND), 0, "round {round}");
            assert_eq!(bench.rig.store_mut().durable(SECOND)[..4096], other);
            assert_eq!(
                bench.write(FIRST, 65536, &other, true),
                4096,
                "a sound block, round {round}"
            );
        }
        bench.heal();
        assert_eq!(bench.flush(FIRST), 0);
        assert_eq!(bench.rig.store_mut().durable(FIRST)[8192..8192 + len], new);
        assert_eq!(bench.flush(FIRST), 0);
    }
}

#[test]
fn a_full_cache_before_a_failing_store_gives_errors() {
    let mut bench = Bench::new(CacheMode::WriteBack, 16 << 10);
    bench.fail(FIRST, &KIND_CHANGES, 0..VOLUME_BYTES as u64, Errno::EIO);
    let image = pattern(1, VOLUME_BYTES);
    let mut acknowledged = Vec::new();
    for at in 0..VOLUME_BYTES / CACHE_BLOCK {
        let new = pattern(at as u64 + 10, CACHE_BLOCK);
        match bench.write(FIRST, at * CACHE_BLOCK, &new, false) {
            4096 => acknowledged.push((at, new)),
            result => assert_eq!(result, -EIO, "block {at}"),
        }
    }
    assert!((1..=4).contains(&acknowledged.len()), "{} fit", acknowledged.len());
    assert_eq!(bench.flush(FIRST), -EIO);
    for (at, new) in &acknowledged {
        let range = at * CACHE_BLOCK..(at + 1) * CACHE_BLOCK;
        assert_eq!(bench.read(FIRST, range).unwrap(), *new, "block {at}");
    }
    // The other volume works, at the speed of its store.
    assert_eq!(bench.write(SECOND, 0, &image[..16384], false), 16384);
    assert_eq!(bench.flush(SECOND), 0);
    assert_eq!(bench.rig.store_mut().durable(SECOND)[..16384], image[..16384]);
    bench.heal();
    assert_eq!(bench.flush(FIRST), 0);
    for (at, new) in &acknowledged {
        let range = at * CACHE_BLOCK..(at + 1) * CACHE_BLOCK;
        assert_eq!(bench.rig.store_mut().durable(FIRST)[range], *new, "block {at}");
    }
    assert_eq!(bench.rig.store_mut().in_flight(), 0);
}

/// A command that hangs at the store keeps its connection open. Dirty blocks must reach the store
/// all the same when the target stops.
#[test]
fn a_command_that_hangs_at_the_end_holds_up_no_write_back() {
    let mut bench = Bench::new(CacheMode::WriteBack, 16 << 10);
    let slow = StoreConditions { delay_min: 20, delay_max: 20, ..StoreConditions::default() };
    bench.rig.store_mut().set_conditions(slow);
    let queue = bench.queues[usize::from(FIRST.0)];
    let io = bench.rig.request(queue, IoOp::Read, 128 << 10, 4096);
    bench.rig.submit(queue, Tag(1), io).expect("a free tag");
    let asked = bench.rig.run(PATIENCE, |rig| rig.store_mut().disk_in_flight() > 0);
    asked.expect("the store is asked");
    bench.rig.store_mut().hold();
    let data = pattern(3, 4096);
    bench.rig.fill_buffer(bench.queues[1], Tag(0), &data);
    let io = bench.rig.request(bench.queues[1], IoOp::Write, 0, 4096);
    bench.rig.submit(bench.queues[1], Tag(0), io).expect("a free tag");
    let acknowledged = bench.rig.run(PATIENCE, |rig| !rig.take_outcomes().is_empty());
    acknowledged.expect("it is acknowledged");
    bench.rig.mail(ToGroup::Stop);
    let saved = bench.rig.run(PATIENCE, |rig| rig.group_mut().unsaved().is_empty());
    saved.expect("all that was acknowledged is in the store");
    assert!(bench.rig.group_mut().has_connections(), "the command still hangs");
    assert_eq!(bench.rig.stopped(), None);
    assert_eq!(bench.rig.store_mut().durable(SECOND)[..4096], data);
    bench.rig.store_mut().release();
    bench.rig.run(PATIENCE, |rig| rig.stopped().is_some()).expect("it ends");
    assert_eq!(bench.rig.stopped(), Some(true));
}

/// A store that refuses dirty blocks does not affect the others, and gets them again.
#[test]
fn a_store_that_refuses_at_the_end_is_asked_again() {
    let mut bench = Bench::new(CacheMode::WriteBack, 64 << 10);
    for volume in [FIRST, SECOND] {
        assert_eq!(bench.write(volume, 8192, &pattern(4, 4096), false), 4096);
    }
    bench.fail(FIRST, &[Kind::Write], 0..VOLUME_BYTES as u64, Errno::ENOSPC);
    bench.rig.mail(ToGroup::Stop);
    let listed = bench.rig.run(PATIENCE, |rig| {
        let unsaved = rig.group_mut().unsaved();
        unsaved.len() == 1 && unsaved[0].cause == "No space left on device (os error 28)"
    });
    listed.expect("the other one is safe");
    assert_eq!(bench.rig.store_mut().durable(SECOND)[8192..12288], pattern(4, 4096));
    let [unsaved] = &bench.rig.group_mut().unsaved()[..] else { panic!("one") };
    assert_eq!((unsaved.volume, unsaved.dirty_bytes), (FIRST, 4096));
    bench.heal();
    bench.rig.run(PATIENCE, |rig| rig.stopped().is_some()).expect("it ends");
    assert_eq!(bench.rig.stopped(), Some(true));
    assert_eq!(bench.rig.store_mut().durable(FIRST)[8192..12288], pattern(4, 4096));
}
