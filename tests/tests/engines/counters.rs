//! The request counters of both ends match the requests: operations, bytes, errors, requests in
//! flight, and times with stages that add up.

use rblk_fabric::soft::network::Conditions;
use rblk_initiator::engine::io::IoOp;
use rblk_operate::target::traffic::{IoCounts, VolumeTimes};
use rblk_protocol::width::{narrow, wide};
use rblk_rig::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_rig::ram_store::StoreConditions;
use rblk_rig::seed::Random;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::VolumeIndex;
use rblk_tests::bed::{Bed, FROZEN, MEMORY, NULL, STORE, VOLUME_BYTES};

const VOLUMES: [VolumeIndex; 4] = [MEMORY, NULL, STORE, FROZEN];
const BLOCK: u64 = 4096;
const ROUNDS: u64 = 300;

/// Counts a request.
fn note(counts: &mut IoCounts, op: IoOp, bytes: u64) {
    match op {
        IoOp::Read => {
            (counts.reads, counts.read_bytes) = (counts.reads + 1, counts.read_bytes + bytes)
        }
        IoOp::Write => {
            (counts.writes, counts.written_bytes) =
                (counts.writes + 1, counts.written_bytes + bytes);
        }
        IoOp::Flush => counts.flushes += 1,
        IoOp::Discard => counts.discards += 1,
        IoOp::WriteZeroes => counts.write_zeroes += 1,
    }
}

fn below(random: &mut Random, most: u64) -> usize {
    wide(random.below(most))
}

/// A random request: kind, first byte, bytes.
fn request(random: &mut Random) -> (IoOp, u64, u64) {
    let ops = [IoOp::Read, IoOp::Write, IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes];
    let op = if random.below(3) > 0 { ops[below(random, 2)] } else { ops[below(random, 5)] };
    // In the capsule, by RDMA READ, and over several stripes.
    let blocks = [1, 4, 300][below(random, 3)];
    let len = if op == IoOp::Write { BLOCK * blocks.min(256) } else { BLOCK * blocks.min(200) };
    let offset = random.below((VOLUME_BYTES - len) / BLOCK) * BLOCK;
    if op == IoOp::Flush { (op, 0, 0) } else { (op, offset, len) }
}

/// The stages of every kind of command add up to its whole.
fn assert_stages_add_up(times: &VolumeTimes, io: &IoCounts) {
    let counts = [io.reads, io.writes, io.flushes];
    for ((kind, times), count) in times.kinds().into_iter().zip(counts) {
        assert_eq!(times.total.count(), count, "{kind}");
        let stages = times.stages();
        assert!(stages.iter().all(|(_, stage)| stage.count() == count), "{kind}: {stages:?}");
        let sum: u64 = stages.iter().map(|(_, stage)| stage.sum_us()).sum();
        assert_eq!(sum, times.total.sum_us(), "{kind}: {stages:?}");
    }
}

fn sum(bed: &Bed) -> IoCounts {
    let mut sum = IoCounts::default();
    VOLUMES.iter().for_each(|volume| sum.add(&bed.rig.volume_io(*volume)));
    sum
}

fn run(seed: u64, cache: CacheMode, groups: usize) {
    let options = RigOptions { seed, groups, ..RigOptions::default() };
    let mut bed = Bed::with_cache(&options, cache);
    let conditions = StoreConditions {
        delay_min: 3,
        delay_max: 30,
        errors_per_mille: 20,
        ..StoreConditions::default()
    };
    bed.rig.store_mut().set_conditions(conditions);
    let queues = VOLUMES.map(|volume| bed.queue(volume, QueueOptions::default()));
    let mut random = Random::new(seed);
    let (mut expected, mut by_queue) = (IoCounts::default(), [IoCounts::default(); 4]);
    for _ in 0..ROUNDS {
        let mut asked = 0;
        for tag in 0..1 + narrow::<u16, _>(random.below(8)) {
            let at = below(&mut random, 4);
            let (op, offset, len) = request(&mut random);
            bed.submit(queues[at], tag, op, offset, len);
            let bytes = if matches!(op, IoOp::Read | IoOp::Write) { len } else { 0 };
            note(&mut expected, op, bytes);
            note(&mut by_queue[at], op, bytes);
            asked += 1;
        }
        let outcomes = bed.outcomes(asked);
        for outcome in outcomes.iter().filter(|outcome| outcome.result < 0) {
            expected.errors += 1;
            let at = queues.iter().position(|queue| *queue == outcome.queue).unwrap();
            by_queue[at].errors += 1;
        }
    }
    assert!(expected.errors > 10, "nothing failed: {expected:?}");
    assert_eq!(bed.rig.connections_io(), expected, "seed {seed}");
    let total = bed.rig.target_counts();
    assert_eq!(
        [total.reads, total.writes, total.flushes, total.discards, total.write_zeroes],
        [
            expected.reads,
            expected.writes,
            expected.flushes,
            expected.discards,
            expected.write_zeroes
        ]
    );
    assert_eq!(
        [total.read_bytes, total.written_bytes, total.failed_commands],
        [expected.read_bytes, expected.written_bytes, expected.errors]
    );
    for (at, volume) in VOLUMES.into_iter().enumerate() {
        let io = bed.rig.volume_io(volume);
        assert_stages_add_up(&bed.rig.volume_times(volume), &io);
        if volume == FROZEN {
            // Only the connection counts requests that the volume refused.
            let reads = (by_queue[at].reads, by_queue[at].read_bytes, by_queue[at].flushes);
            assert_eq!(
                (io.reads, io.read_bytes, io.flushes, io.writes),
                (reads.0, reads.1, reads.2, 0)
            );
        } else {
            assert_eq!(io, by_queue[at], "seed {seed}, volume {volume:?}");
        }
        assert_mount(&bed, queues[at], &by_queue[at]);
    }
    let store = bed.rig.volume_times(STORE);
    assert!(store.read.store.sum_us() > 0, "the store is slow: {:?}", store.read);
    assert!(store.write.data.sum_us() > 0, "data comes by RDMA READ: {:?}", store.write);
}

/// The initiator's own counters are equal.
fn assert_mount(bed: &Bed, queue: QueueId, io: &IoCounts) {
    let (counts, times) = (bed.rig.queue_counts(queue), bed.rig.queue_times(queue));
    assert_eq!(
        [
            counts.reads,
            counts.writes,
            counts.flushes,
            counts.read_bytes,
            counts.written_bytes,
            counts.errors
        ],
        [io.reads, io.writes, io.flushes, io.read_bytes, io.written_bytes, io.errors]
    );
    for ((kind, times), count) in times.kinds().into_iter().zip([io.reads, io.writes, io.flushes]) {
        assert_eq!(times.total.count(), count, "{kind}");
        let parts = times.queue.sum_us() + times.target.sum_us();
        assert_eq!(parts, times.total.sum_us(), "{kind}: {times:?}");
    }
}

#[test]
fn counters_match_the_requests() {
    for (seed, (cache, groups)) in [
        (CacheMode::None, 1),
        (CacheMode::WriteThrough, 1),
        (CacheMode::WriteBack, 1),
        (CacheMode::WriteBack, 3),
    ]
    .into_iter()
    .enumerate()
    {
        run(seed as u64, cache, groups);
    }
}

#[test]
fn requests_of_a_lost_connection_are_not_in_flight() {
    let mut bed = Bed::with_cache(&RigOptions::default(), CacheMode::WriteThrough);
    bed.rig
        .store_mut()
        .set_conditions(StoreConditions { stalled: true, ..StoreConditions::default() });
    let queue = bed.queue(STORE, QueueOptions::default());
    (0..5).for_each(|tag| bed.submit(queue, tag, IoOp::Read, u64::from(tag) * BLOCK, BLOCK));
    bed.rig.run(1000, |rig| rig.volume_io(STORE).in_flight == 5).expect("they wait for the store");
    assert_eq!(bed.rig.connections_io().in_flight, 5);
    bed.rig.disconnect(queue);
    bed.rig.run(1000, |rig| rig.volume_io(STORE).in_flight == 0).expect("their connection is gone");
    assert_eq!(bed.rig.connections_io().in_flight, 0);
    assert_eq!(sum(&bed), IoCounts::default(), "nothing was answered");

    // The requests are sent again, and answered once.
    bed.rig.store_mut().set_conditions(StoreConditions::default());
    let session = bed.session;
    bed.rig.new_epoch(session).expect("an epoch");
    bed.rig.reconnect(queue).expect("a path");
    assert_eq!(bed.outcomes(5).iter().filter(|outcome| outcome.result < 0).count(), 0);
    let expected = IoCounts { reads: 5, read_bytes: 5 * BLOCK, ..IoCounts::default() };
    assert_eq!((sum(&bed), bed.rig.connections_io()), (expected, expected));
    let read = bed.rig.queue_times(queue).read;
    assert!(read.queue.sum_us() > 0, "they waited for a path: {read:?}");
}

/// A volume with its first MiB in the cache, and a connection whose memory for copies, as a device
/// with iWARP needs them, has room for half of the reads that the queue can send. The wire is slow.
fn with_little_copy_room(groups: usize) -> (Bed, QueueId) {
    let options = RigOptions { groups, iwarp: true, ..RigOptions::default() };
    let mut bed = Bed::with_cache(&options, CacheMode::WriteThrough);
    let queue = bed.queue(STORE, QueueOptions { depth: 16, ..QueueOptions::default() });
    assert_eq!(bed.io(queue, IoOp::Write, 0, 1 << 20), 1 << 20);
    let conditions = Conditions { buffer: 16 << 10, ..Conditions::default() };
    bed.rig.network().set_conditions(conditions);
    (bed, queue)
}

#[test]
fn a_read_that_waits_behind_others_waits_for_credits() {
    let (mut bed, queue) = with_little_copy_room(1);
    (0..15).for_each(|tag| bed.submit(queue, tag, IoOp::Read, 0, 1 << 20));
    bed.submit(queue, 15, IoOp::Read, 0, BLOCK);
    bed.outcomes(16);
    assert!(bed.rig.target_counts().send_credit_waits > 0);
    let times = bed.rig.volume_times(STORE).read;
    assert_eq!(times.total.count(), 16);
    assert!(times.answer.sum_us() > 0, "{times:?}");
    assert_eq!(times.store.sum_us(), 0, "{times:?}");
}

#[test]
fn a_read_without_credits_waits_for_the_store_until_all_of_it_is_there() {
    let (mut bed, queue) = with_little_copy_room(2);
    let conditions =
        StoreConditions { delay_min: 20_000, delay_max: 20_000, ..StoreConditions::default() };
    bed.rig.groups_mut().for_each(|group| group.store_mut().set_conditions(conditions));
    // All blocks but the last are in the cache, but there are no credits for them.
    (0..15).for_each(|tag| bed.submit(queue, tag, IoOp::Read, 0, 1 << 20));
    bed.submit(queue, 15, IoOp::Read, BLOCK, 1 << 20);
    bed.outcomes(16);
    assert!(bed.rig.target_counts().send_credit_waits > 0);
    let times = bed.rig.volume_times(STORE).read;
    assert!(times.store.sum_us() > 150_000 && times.answer.sum_us() < 50_000, "{times:?}");
}
