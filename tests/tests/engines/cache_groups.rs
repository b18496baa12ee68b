//! One volume, several poll groups: commands over stripes of several shards, discards that hold
//! ranges at all of them, connections that die meanwhile, and memory of one shard that another
//! group's connection has.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::crash_store::{CrashStore, Fault};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::{Kind, StoreConditions};
use rblk_rig::seed::Random;
use rblk_target::cache::{STRIPE_BYTES, SlotsOf, shard_of};
use rblk_target::data::poll_group::other_groups::GroupMail::ReturnMemory;
use rblk_target::data::poll_group::{PollGroup, ToGroup};
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::SessionIndex;
use rblk_tests::bed::{PATIENCE, pattern};
use rblk_tests::long::times;
use rblk_tests::oracle::Oracle;
use rblk_tests::storm::{Mix, Storm, StormOptions, VOLUME, seeds};

const CACHED: [CacheMode; 2] = [CacheMode::WriteThrough, CacheMode::WriteBack];
const MIB: usize = 1 << 20;

/// A rig with a disk that its poll groups share.
fn rig(
    options: RigOptions,
    cache: CacheMode,
    image: &[u8],
    store: StoreConditions,
) -> Rig<CrashStore> {
    let volume = VolumeSpec { cache, ..VolumeSpec::new(VolumeKind::Store, image.len() as u64) };
    let options = RigOptions { volumes: vec![volume], ..options };
    let stores = CrashStore::shared(|region| {
        let mut disk = CrashStore::new(region, options.seed);
        disk.set_volume(VOLUME, image.to_vec());
        disk.set_conditions(store);
        disk
    });
    Rig::new(&options, stores).expect("a rig")
}

fn queue(rig: &mut Rig<CrashStore>, options: QueueOptions) -> (SessionIndex, QueueId) {
    let session = rig.begin_session();
    rig.open(session, VOLUME, AccessMode::Shared);
    let queue = rig.add_queue(session, VOLUME, options).expect("a queue");
    rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
    (session, queue)
}

fn submit(rig: &mut Rig<CrashStore>, queue: QueueId, tag: u16, op: IoOp, at: usize, len: usize) {
    let io = rig.request(queue, op, at as u64, len as u64);
    rig.submit(queue, Tag(tag), io).expect("a free tag");
}

/// Waits for `count` outcomes, all of them good.
fn finish(rig: &mut Rig<CrashStore>, count: usize, what: &str) {
    let mut all = Vec::new();
    let done = rig.run(PATIENCE, |rig| {
        all.extend(rig.take_outcomes());
        all.len() >= count
    });
    assert!(done.is_ok(), "{what}: {} of {count} ended: {rig:?}", all.len());
    assert!(all.iter().all(|outcome| outcome.result >= 0), "{what}: {all:?}");
}

fn run(rig: &mut Rig<CrashStore>, queue: QueueId, op: IoOp, at: usize, len: usize) {
    submit(rig, queue, 0, op, at, len);
    finish(rig, 1, &format!("{op:?} of {at}+{len}"));
}

fn write(rig: &mut Rig<CrashStore>, queue: QueueId, at: usize, data: &[u8], fua: bool) {
    rig.fill_buffer(queue, Tag(0), data);
    let io = rig.request(queue, IoOp::Write, at as u64, data.len() as u64);
    rig.submit(queue, Tag(0), Io { fua, ..io }).expect("a free tag");
    finish(rig, 1, &format!("a write of {at}+{}", data.len()));
}

fn read(rig: &mut Rig<CrashStore>, queue: QueueId, at: usize, len: usize) -> Vec<u8> {
    rig.fill_buffer(queue, Tag(0), &vec![0xee; len]);
    run(rig, queue, IoOp::Read, at, len);
    rig.buffer(queue, Tag(0), len)
}

/// Ends every connection; then no shard lends any memory.
fn end(rig: &mut Rig<CrashStore>, sessions: &[SessionIndex], what: &str) {
    for session in sessions {
        rig.new_epoch(*session).expect("connections end");
    }
    // Memory on its way back to another group's shard needs a step or two.
    let idle = |rig: &mut Rig<CrashStore>| {
        rig.groups_mut().all(|group| {
            let shard = group.shard();
            shard.is_idle() && shard.slots().held().next().is_none()
        })
    };
    if rig.run(1000, idle).is_err() {
        let held = |group: &mut PollGroup<_>| group.shard().slots().held().next();
        let held: Vec<_> = rig.groups_mut().map(held).collect();
        panic!("{what}: {rig:?}; the first that is held in each group: {held:?}");
    }
    assert_eq!(rig.store_mut().breaches(), [""; 0], "{what}");
}

#[test]
fn the_longest_commands_work_at_every_cut_of_a_stripe() {
    let io = 4 * MIB;
    for groups in [1, 2, 3] {
        for cache in CACHED {
            let mut model = pattern(3, 10 * MIB);
            let options = RigOptions {
                groups,
                arena_bytes: groups * 8 * MIB,
                dirty_max_bytes: groups * 2 * MIB,
                io_max_bytes: 4 << 20,
                ..RigOptions::default()
            };
            let mut rig = rig(options, cache, &model, StoreConditions::default());
            let options =
                QueueOptions { depth: 2, io_max_bytes: 4 << 20, ..QueueOptions::default() };
            let queues: Vec<_> = (0..groups).map(|_| queue(&mut rig, options)).collect();
            let what = |at: usize| format!("{groups} groups, {cache:?}, at {at}");
            for (turn, at) in [0, MIB - 512, MIB / 2 + 1536, 3 * MIB + 4096].into_iter().enumerate()
            {
                let (_, writer) = queues[turn % groups];
                let (_, reader) = queues[(turn + 1) % groups];
                let data = pattern(turn as u64 + 10, io);
                write(&mut rig, writer, at, &data, turn % 2 == 1);
                model[at..at + io].copy_from_slice(&data);
                let from = at + MIB / 4;
                assert!(read(&mut rig, reader, from, io) == model[from..from + io], "{}", what(at));
                // Discards the blocks in between, and a part of a block at either end.
                let (from, to) = (at + MIB - 1024, at + 3 * MIB + 512);
                run(&mut rig, reader, IoOp::Discard, from, to - from);
                model[from..to].fill(0);
                assert!(read(&mut rig, writer, at, io) == model[at..at + io], "{}", what(at));
            }
            run(&mut rig, queues[0].1, IoOp::Flush, 0, 0);
            assert!(rig.store_mut().durable(VOLUME) == model, "{groups} groups, {cache:?}");
            let cached: Vec<_> =
                rig.groups_mut().map(|group| group.shard().slots().cached()).collect();
            assert!(cached.iter().all(|blocks| *blocks > 0), "{cached:?}");
            let sessions: Vec<_> = queues.iter().map(|(session, _)| *session).collect();
            end(&mut rig, &sessions, &what(0));
        }
    }
}

fn storm(seed: u64, mix: Mix, requests: u64) {
    let mut random = Random::new(seed);
    let cache = CACHED[random.index(2)];
    let volume_bytes = 6 * MIB + random.index(3) * 512 * 1024;
    let block_bytes = 4096;
    let io_max_bytes = [1 << 20, 4 << 20][random.index(2)];
    let groups = 2 + random.index(2);
    let arena_bytes = groups * [4, 6][random.index(2)] * io_max_bytes as usize;
    let mut options = StormOptions::random(seed, cache, block_bytes, volume_bytes);
    options = StormOptions {
        groups,
        io_max_bytes,
        arena_bytes,
        dirty_max_bytes: arena_bytes / 2,
        queues: groups + 1,
        queue: QueueOptions { depth: 4, io_max_bytes, ..options.queue },
        mix,
        ..options
    };
    println!("seed {seed}: {volume_bytes} bytes, {options:?}");
    let mut image = vec![0; volume_bytes];
    random.fill(&mut image);
    let oracle = Oracle::new(image.clone(), block_bytes as usize);
    let mut storm = Storm::new(&options, oracle, &image);
    for _ in 0..2 {
        storm.run(requests / 2);
        storm.settle();
        storm.read_all();
    }
    storm.calm();
    storm.check_lending();
}

fn storms(count: u64) -> std::ops::Range<u64> {
    seeds(times(count, 20 * count))
}

#[test]
fn overlapping_requests_over_several_stripes_agree_with_the_oracle() {
    let mix = Mix { flush: 30, erase: 40, fua: 200, begins: 3, pause: 30 };
    storms(6).for_each(|seed| storm(seed, mix, 160));
}

#[test]
fn discards_over_many_stripes_do_not_wait_for_each_other_for_ever() {
    let mix = Mix { flush: 20, erase: 400, fua: 200, begins: 8, pause: 0 };
    storms(6).for_each(|seed| storm(seed, mix, 300));
}

/// Ends a connection while its discard holds the range at none, some or all of the shards, or is at
/// the store. Returns whether the discard was answered before.
fn killed_after(steps: u64, groups: usize, cache: CacheMode) -> bool {
    let what = format!("cut after {steps} steps, {groups} groups, {cache:?}");
    let image = pattern(5, 4 * MIB);
    let options = RigOptions {
        seed: steps,
        groups,
        arena_bytes: groups * (512 << 10),
        dirty_max_bytes: groups * (128 << 10),
        io_max_bytes: 64 << 10,
        write_back_delay: Duration::from_millis(1),
        ..RigOptions::default()
    };
    let store = StoreConditions { delay_min: 2, delay_max: 6, ..StoreConditions::default() };
    let mut rig = rig(options, cache, &image, store);
    let options = QueueOptions { depth: 8, io_max_bytes: 64 << 10, ..QueueOptions::default() };
    let (mortal, killed) = queue(&mut rig, options);
    let (session, other) = queue(&mut rig, options);
    // Blocks in every shard: clean ones, and dirty ones where that is possible.
    rig.store_mut().set_conditions(StoreConditions::default());
    for stripe in 0..4 {
        read(&mut rig, other, stripe * MIB + (64 << 10), 16 << 10);
    }
    for stripe in 0..4 {
        write(&mut rig, other, stripe * MIB + 8192, &pattern(stripe as u64, 16 << 10), false);
    }
    let dirty: usize = rig.groups_mut().map(|group| group.shard().slots().dirty()).sum();
    assert_eq!(dirty > 0, cache == CacheMode::WriteBack, "{what}");
    // Writes that keep the range busy in the first shard for a while, in the second for longer, and
    // so on: the discard holds it here and waits for it there.
    for shard in 0..groups {
        let delay = 12 * (shard as u64 + 1);
        rig.store_mut().set_conditions(StoreConditions {
            delay_min: delay,
            delay_max: delay,
            ..store
        });
        let tag = 3 + u16::try_from(shard).expect("few groups");
        rig.fill_buffer(other, Tag(tag), &pattern(50, 4096));
        let io = rig.request(other, IoOp::Write, (shard * MIB + (512 << 10)) as u64, 4096);
        rig.submit(other, Tag(tag), Io { fua: true, ..io }).expect("a free tag");
        let under_way = |rig: &mut Rig<CrashStore>| rig.store_mut().disk_in_flight() > shard;
        rig.run(PATIENCE, under_way).expect("a write under way");
    }
    rig.store_mut().set_conditions(store);
    let (from, to) = (8192 + 512, 3 * MIB + 8192 + 512);
    submit(&mut rig, killed, 0, IoOp::Discard, from, to - from);
    for _ in 0..steps {
        rig.step();
    }
    let outcomes = rig.take_outcomes();
    let answered = outcomes.iter().any(|outcome| outcome.queue == killed);
    let ended = outcomes.len() - usize::from(answered);
    rig.wire(killed).expect("a path").cut();
    // Another discard of the same range, and a write of a part of it.
    submit(&mut rig, other, 1, IoOp::WriteZeroes, MIB / 2, 3 * MIB);
    submit(&mut rig, other, 2, IoOp::Write, 2 * MIB, 64 << 10);
    finish(&mut rig, 2 + groups - ended, &what);
    let gone = rig.run(PATIENCE, |rig| rig.connections(mortal) == 0);
    assert!(gone.is_ok(), "{what}: {rig:?}");
    for stripe in 0..4 {
        let (at, data) = (stripe * MIB + 4096, pattern(stripe as u64 + 100, 64 << 10));
        write(&mut rig, other, at, &data, stripe % 2 == 0);
        assert!(read(&mut rig, other, at, 64 << 10) == data, "{what}: stripe {stripe}");
    }
    run(&mut rig, other, IoOp::Flush, 0, 0);
    let stored = rig.store_mut().bytes(VOLUME);
    for at in (0..4 * MIB).step_by(64 << 10) {
        let data = read(&mut rig, other, at, 64 << 10);
        assert!(data == stored[at..at + (64 << 10)], "{what}: {at} is not what the store has");
    }
    run(&mut rig, other, IoOp::Discard, 0, 4 * MIB);
    assert!(read(&mut rig, other, MIB - 4096, 8192).iter().all(|byte| *byte == 0), "{what}");
    end(&mut rig, &[session], &what);
    answered
}

#[test]
fn a_connection_that_dies_holds_no_range() {
    for groups in [2, 3] {
        for cache in CACHED {
            let answered = (0..500).find(|steps| killed_after(*steps, groups, cache));
            let steps = answered.expect("a discard that ends");
            assert!(steps > 8 * groups as u64, "{groups} groups, {cache:?}: {steps} steps");
        }
    }
}

/// A shard is short of memory that another group's connection has sent. That connection is idle
/// since, so only its group can find out that the data has left.
#[test]
fn memory_that_another_group_has_sent_comes_back() {
    for cache in CACHED {
        let io_max_bytes = 64 << 10;
        let options = RigOptions {
            groups: 2,
            // Too little for one request beside the lent memory.
            arena_bytes: 2 * (96 << 10),
            io_max_bytes,
            ..RigOptions::default()
        };
        let image = pattern(6, 4 * MIB);
        let mut rig = rig(options, cache, &image, StoreConditions::default());
        let options = QueueOptions { depth: 4, io_max_bytes, ..QueueOptions::default() };
        let (idle, first) = queue(&mut rig, options);
        let (session, second) = queue(&mut rig, options);
        // The second stripe is the second group's; this connection is the first one's.
        assert_eq!(STRIPE_BYTES, MIB as u64);
        assert!(read(&mut rig, first, MIB, 64 << 10) == image[MIB..][..64 << 10]);
        let lent = |rig: &mut Rig<CrashStore>| {
            rig.groups_mut().map(|group| group.shard().slots().lent()).collect::<Vec<_>>()
        };
        for _ in 0..100 {
            rig.step();
        }
        assert_eq!(lent(&mut rig), [0, 16], "nothing was lent that would have to come back");
        let stalled = StoreConditions { stalled: true, ..StoreConditions::default() };
        rig.store_mut().set_conditions(stalled);
        for tag in 0..4 {
            let at = 2 * MIB - (usize::from(tag) + 1) * (64 << 10);
            rig.fill_buffer(second, Tag(tag), &[0xee; 64 << 10]);
            submit(&mut rig, second, tag, IoOp::Read, at, 64 << 10);
        }
        // One request of a session may always take memory.
        let all = rig.run(PATIENCE, |rig| rig.store_mut().disk_in_flight() == 1);
        assert!(all.is_ok(), "{cache:?}: {rig:?}");
        assert_eq!(lent(&mut rig), [0, 0]);
        assert!(rig.target_counts().memory_waits > 0);
        rig.store_mut().set_conditions(StoreConditions::default());
        finish(&mut rig, 4, "reads");
        for tag in 0..4 {
            let at = 2 * MIB - (usize::from(tag) + 1) * (64 << 10);
            let data = rig.buffer(second, Tag(tag), 64 << 10);
            assert!(data == image[at..at + (64 << 10)], "{cache:?}: {at}");
        }
        end(&mut rig, &[idle, session], "memory");
    }
}

/// Places of single blocks in a range, each far from the others, of stripes of this group's shard.
fn places(
    range: std::ops::Range<usize>,
    group: usize,
    groups: usize,
    random: &mut Random,
) -> Vec<usize> {
    let is_own = |at: &usize| shard_of(VOLUME, *at as u64, groups) == group;
    let all: Vec<_> = range.step_by(16384).filter(is_own).collect();
    let part = all.len() / 4;
    assert!(part > 0, "a range without stripes of group {group}");
    (0..4).map(|quarter| all[quarter * part + random.index(part)]).collect()
}

/// Discards and zeroing over several stripes by one group, and requests of other groups as soon as
/// they are answered. The groups sleep through turns and have much mail to read: still no read
/// finds old bytes, and no write is lost.
fn erased_under_others(seed: u64, groups: usize, cache: CacheMode, then: IoOp) {
    let what = format!("seed {seed}, {groups} groups, {cache:?}, then {then:?}");
    let mut random = Random::new(seed);
    let mut model = pattern(seed, 4 * MIB);
    let options = RigOptions {
        seed,
        groups,
        skipped_turns_per_mille: 500,
        arena_bytes: groups * 4 * MIB,
        dirty_max_bytes: groups * MIB,
        io_max_bytes: 64 << 10,
        write_back_delay: Duration::from_secs(3600),
        ..RigOptions::default()
    };
    let mut rig = rig(options, cache, &model, StoreConditions::default());
    let options = QueueOptions { depth: 4, io_max_bytes: 64 << 10, ..QueueOptions::default() };
    let queues: Vec<_> = (0..groups).map(|_| queue(&mut rig, options)).collect();
    for round in 0..20 {
        let by = random.index(groups);
        // From within the first stripe to within the last.
        let from = random.index(MIB / 4096) * 4096;
        let to = 3 * MIB + (1 + random.index(MIB / 4096)) * 4096;
        let mut asked = Vec::new();
        for (at, (_, queue)) in queues.iter().enumerate().filter(|(at, _)| *at != by) {
            for (tag, place) in (0u16..).zip(places(from..to, at, groups, &mut random)) {
                // Cached, not zero, and perhaps dirty.
                let data = pattern(random.within(1, 1 << 40), 4096);
                write(&mut rig, *queue, place, &data, random.chance(500));
                assert!(read(&mut rig, *queue, place, 4096) == data, "{what}");
                asked.push((*queue, tag, place));
            }
        }
        let op = if random.chance(500) { IoOp::Discard } else { IoOp::WriteZeroes };
        submit(&mut rig, queues[by].1, 0, op, from, to - from);
        let mut steps = 0;
        while rig.outstanding(queues[by].1) > 0 {
            steps += 1;
            assert!(steps < PATIENCE, "{what}, round {round}: {rig:?}");
            if then == IoOp::Write && steps < 100 {
                // More mail than a group reads in a turn: messages of other groups come after the
                // requests of its own connections.
                let others = rig.groups_mut().nth(by).expect("a group").others_mut();
                for other in (0..groups).filter(|other| *other != by) {
                    (0..2000).for_each(|_| others.send(other, ReturnMemory(SlotsOf::All)));
                }
            }
            rig.step();
        }
        finish(&mut rig, 1, &what);
        model[from..to].fill(0);
        // After the answer every group must see the zeros.
        for (queue, tag, at) in &asked {
            let data = pattern(random.within(1, 1 << 40), 4096);
            rig.fill_buffer(*queue, Tag(*tag), &data);
            submit(&mut rig, *queue, *tag, then, *at, 4096);
            if then == IoOp::Write {
                model[*at..*at + 4096].copy_from_slice(&data);
            }
        }
        finish(&mut rig, asked.len(), &what);
        for (queue, tag, at) in &asked {
            let data = rig.buffer(*queue, Tag(*tag), 4096);
            assert!(data == model[*at..*at + 4096], "{what}, round {round}: old data at {at}");
        }
        // Mail still on its way between the groups arrives.
        for _ in 0..50 {
            rig.step();
        }
        for (queue, _, at) in asked {
            let data = read(&mut rig, queue, at, 4096);
            assert!(data == model[at..at + 4096], "{what}, round {round}: lost at {at}");
        }
    }
    run(&mut rig, queues[0].1, IoOp::Flush, 0, 0);
    assert!(rig.store_mut().durable(VOLUME)[..] == model[..], "{what}");
    let sessions: Vec<_> = queues.iter().map(|(session, _)| *session).collect();
    end(&mut rig, &sessions, &what);
}

#[test]
fn erased_blocks_are_read_by_no_group() {
    for seed in seeds(times(2, 20)) {
        for groups in [2, 3] {
            for cache in CACHED {
                erased_under_others(seed, groups, cache, IoOp::Read);
            }
        }
    }
}

#[test]
fn writes_after_an_erase_stay() {
    for seed in seeds(times(2, 20)) {
        for groups in [2, 3] {
            // Write-back acknowledges from memory.
            erased_under_others(seed, groups, CacheMode::WriteBack, IoOp::Write);
        }
    }
}

/// A discard that fails at the store: its holds end before the answer.
#[test]
fn a_failed_discard_holds_no_range() {
    for cache in CACHED {
        let image = pattern(8, 4 * MIB);
        let options = RigOptions {
            groups: 2,
            skipped_turns_per_mille: 500,
            write_back_delay: Duration::from_secs(3600),
            ..RigOptions::default()
        };
        let mut rig = rig(options, cache, &image, StoreConditions::default());
        let (first, writer) = queue(&mut rig, QueueOptions::default());
        let (second, eraser) = queue(&mut rig, QueueOptions::default());
        let data = pattern(9, 64 << 10);
        write(&mut rig, writer, MIB, &data, false);
        let all = 0..4 << 20;
        let fault = Fault { kind: Kind::Discard, volume: VOLUME, range: all, errno: Errno::EIO };
        rig.store_mut().set_faults(vec![fault]);
        for _ in 0..20 {
            submit(&mut rig, eraser, 0, IoOp::Discard, 4096, 3 * MIB);
            let ended = rig.run(PATIENCE, |rig| rig.outstanding(eraser) == 0);
            assert!(ended.is_ok(), "{cache:?}: {rig:?}");
            let outcomes = rig.take_outcomes();
            assert_eq!(outcomes[0].result, -(Errno::EIO as i32), "{cache:?}");
            // No hold is left: a durable write reaches the store.
            write(&mut rig, writer, 2 * MIB, &data, true);
        }
        rig.store_mut().set_faults(Vec::new());
        run(&mut rig, writer, IoOp::Flush, 0, 0);
        // After a failed discard the range is undefined, except for dirty blocks and later writes.
        let stored = rig.store_mut().durable(VOLUME);
        let dirty = (cache == CacheMode::WriteBack).then_some(MIB);
        for at in [2 * MIB].into_iter().chain(dirty) {
            assert!(stored[at..at + (64 << 10)] == data, "{cache:?}: {at}");
        }
        end(&mut rig, &[first, second], "a failed discard");
    }
}

/// A group that has ended is asked for nothing: groups with connections end first.
#[test]
fn a_group_ends_after_all_groups_with_connections() {
    for groups in [2, 3] {
        for cache in CACHED {
            for seed in seeds(times(4, 40)) {
                let what = format!("seed {seed}, {groups} groups, {cache:?}");
                let mut random = Random::new(seed);
                let mut model = pattern(seed, 4 * MIB);
                let options = RigOptions {
                    seed,
                    groups,
                    skipped_turns_per_mille: 700,
                    write_back_delay: Duration::from_secs(3600),
                    ..RigOptions::default()
                };
                let delays =
                    StoreConditions { delay_min: 1, delay_max: 30, ..StoreConditions::default() };
                let mut rig = rig(options, cache, &model, delays);
                let (session, only) = queue(&mut rig, QueueOptions::default());
                // Acknowledged writes in every shard.
                for stripe in 0..4 {
                    let at = stripe * MIB + random.index(16) * (64 << 10);
                    let data = pattern(random.within(0, u64::from(u32::MAX)), 64 << 10);
                    write(&mut rig, only, at, &data, false);
                    model[at..at + (64 << 10)].copy_from_slice(&data);
                }
                // Reads under way at the end.
                for tag in 0..8u16 {
                    let at = usize::from(tag) * (MIB / 2) + 4096;
                    submit(&mut rig, only, tag, IoOp::Read, at, 128 << 10);
                }
                submit(&mut rig, only, 8, IoOp::Flush, 0, 0);
                (0..random.index(30)).for_each(|_| _ = rig.step());
                rig.mail(ToGroup::Stop);
                let mut steps = 0;
                while rig.stopped().is_none() {
                    let ended = rig.groups_mut().any(|group| group.stopped().is_some());
                    let asks = rig.groups_mut().any(|group| group.has_connections());
                    assert!(!(ended && asks), "{what}: one ended that others may ask");
                    let idle = |group: &mut PollGroup<_>| {
                        group.stopped().is_none() || group.shard().is_idle()
                    };
                    assert!(rig.groups_mut().all(idle), "{what}: one ended that works");
                    steps += 1;
                    assert!(steps < PATIENCE, "{what}: {rig:?}");
                    rig.step();
                }
                assert_eq!(rig.stopped(), Some(true), "{what}");
                assert_eq!(rig.connections(session), 0, "{what}");
                assert!(rig.store_mut().durable(VOLUME) == model, "{what}");
                assert_eq!(rig.store_mut().breaches(), [""; 0], "{what}");
            }
        }
    }
}

/// A group sends all its mail before it ends, also to a group that does not read for a while.
#[test]
fn a_group_ends_when_its_mail_is_sent() {
    let options = RigOptions { groups: 2, ..RigOptions::default() };
    let mut rig =
        rig(options, CacheMode::WriteBack, &pattern(1, 4 * MIB), StoreConditions::default());
    rig.mail(ToGroup::Stop);
    let now = Instant::now();
    let mut groups: Vec<_> = rig.groups_mut().collect();
    let [deaf, talker] = &mut groups[..] else { panic!("two groups") };
    // The first group has reported that it has no connections; it does not yet read the mail of the
    // other.
    deaf.turn(now);
    (0..5000).for_each(|_| talker.others_mut().send(0, ReturnMemory(SlotsOf::All)));
    for _ in 0..20 {
        talker.turn(now);
        assert!(talker.others_mut().keeps());
        assert_eq!(talker.stopped(), None, "what it has to say was not said");
    }
    assert_eq!(deaf.stopped(), None);
    for _ in 0..20 {
        deaf.turn(now);
        talker.turn(now);
    }
    assert_eq!((deaf.stopped(), talker.stopped()), (Some(true), Some(true)));
}
