//! Links that break at any moment, stores that fail and delay: no write is lost, no repeated
//! request shows, and no resource is held indefinitely.

use rblk_fabric::soft::network::{Conditions, End};
use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{Features, Tag};
use rblk_rig::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_rig::ram_store::StoreConditions;
use rblk_rig::seed::Random;
use rblk_target::store::Store;
use rblk_target::volume::ids::VolumeIndex;
use rblk_tests::bed::{Bed, MEMORY, PATIENCE, STORE, pattern};
use rblk_tests::exerciser::Exerciser;

const LISTS: Features =
    Features(Features::CAPSULE_LISTS.0 | Features::DATA_LISTS.0 | Features::DATA_FIRST.0);
const IO_MAX: u32 = 32 << 10;

fn rig(seed: u64) -> RigOptions {
    let mut random = Random::new(seed);
    let delay_min = random.below(4);
    RigOptions {
        seed,
        conditions: Conditions {
            fragment: random.chance(700),
            delay_min,
            delay_max: delay_min + random.below(20),
            buffer: 1 << random.within(9, 17),
        },
        arena_bytes: IO_MAX as usize * random.index(12).max(1),
        io_max_bytes: IO_MAX,
        ..RigOptions::default()
    }
}

fn queue_options(random: &mut Random) -> QueueOptions {
    QueueOptions {
        depth: u16::try_from(random.within(1, 48)).unwrap(),
        io_max_bytes: IO_MAX,
        in_capsule_bytes: [0, 512, 4096][random.index(3)],
        features: [Features::WRITE_WITH_IMM, Features::default()][random.index(2)].or([
            LISTS,
            Features::CAPSULE_LISTS,
            Features::default(),
        ][random.index(3)]),
        reads_out: u8::try_from(random.within(1, 16)).unwrap(),
        lanes: 1,
    }
}

/// Raises the epoch and connects every queue again, as an initiator does after a lost path.
fn connect_again(exerciser: &mut Exerciser) {
    let session = exerciser.bed.session;
    exerciser.bed.rig.new_epoch(session).expect("the old connections end");
    for queue in exerciser.queues.clone() {
        exerciser.bed.rig.reconnect(queue).expect("a new path");
    }
}

fn break_something(exerciser: &mut Exerciser, queue: QueueId) {
    let kind = exerciser.random.below(4);
    let bytes = exerciser.random.index(20_000);
    let wire = exerciser.bed.rig.wire(queue).expect("a path").clone();
    match kind {
        0 => wire.cut(),
        1 => wire.cut_after(End::A, bytes),
        2 => wire.cut_after(End::B, bytes),
        _ => exerciser.bed.rig.disconnect(queue),
    }
}

fn break_and_replay(seed: u64, volume: VolumeIndex, errors_per_mille: u32) {
    let options = rig(seed);
    let mut random = Random::new(!seed);
    let queues = 1 + random.index(3);
    let mut exerciser =
        Exerciser::new(&options, volume, queue_options(&mut random), queues, 128 << 10);
    exerciser.bed.rig.store_mut().set_conditions(StoreConditions {
        delay_max: random.below(60),
        capacity: 1 + random.index(40),
        errors_per_mille,
        ..StoreConditions::default()
    });
    let mut breaks = 0;
    while breaks < 4 {
        let requests = 5 + random.index(40);
        exerciser.run(requests, |_| {});
        let victim = exerciser.queues[random.index(queues)];
        break_something(&mut exerciser, victim);
        breaks += 1;
        for _ in 0..random.below(30) {
            exerciser.begin();
            exerciser.bed.rig.step();
            exerciser.reap();
        }
        // The path was lost, or soon will be; either way the initiator has decided to connect
        // again.
        connect_again(&mut exerciser);
    }
    exerciser.run(30, |_| {});
    exerciser.check_all();
    if errors_per_mille == 0 {
        assert_eq!(exerciser.failed(), 0, "seed {seed}: a lost path is no error");
    }
    let session = exerciser.bed.session;
    exerciser.bed.rig.new_epoch(session).expect("everything ends");
    assert_eq!(exerciser.bed.rig.store_mut().in_flight(), 0, "seed {seed}");
    assert!(
        format!("{:?}", exerciser.bed.rig.group_mut()).contains("connections: 0"),
        "seed {seed}: the table is not empty"
    );
    exerciser.bed.assert_arena_is_whole(&options);
}

#[test]
fn a_lost_path_loses_nothing_on_a_store() {
    for seed in 0..24 {
        break_and_replay(seed, STORE, 0);
    }
}

#[test]
fn a_lost_path_loses_nothing_in_memory() {
    for seed in 100..112 {
        break_and_replay(seed, MEMORY, 0);
    }
}

#[test]
fn a_failing_store_behind_a_failing_link_lies_about_nothing() {
    for seed in 200..216 {
        break_and_replay(seed, STORE, 100);
    }
}

#[test]
fn a_stale_write_never_follows_its_own_replay() {
    // The store holds the first copy while its connection dies. The second copy may begin only
    // after the first has ended.
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    let stalled = StoreConditions { stalled: true, ..StoreConditions::default() };
    bed.rig.store_mut().set_conditions(stalled);
    bed.rig.fill_buffer(queue, Tag(0), &pattern(1, 8192));
    bed.submit(queue, 0, IoOp::Write, 0, 8192);
    bed.rig.run(PATIENCE, |rig| rig.store_mut().in_flight() == 1).unwrap();
    bed.rig.wire(queue).unwrap().cut();
    bed.rig.run(PATIENCE, |rig| !rig.is_connected(queue)).unwrap();
    for _ in 0..1000 {
        bed.rig.step();
    }
    assert_eq!(bed.rig.connections(bed.session), 1, "reported gone with a write in the store");
    assert!(bed.rig.reconnect(queue).is_ok(), "same epoch, as a second queue would");
    bed.rig.disconnect(queue);
    bed.rig.store_mut().set_conditions(StoreConditions::default());
    bed.rig.new_epoch(bed.session).unwrap();
    assert!(bed.rig.store_mut().bytes(STORE)[..8192] == pattern(1, 8192));
    bed.rig.reconnect(queue).unwrap();
    assert_eq!(bed.outcomes(1)[0].result, 8192);
    bed.write(queue, 0, &pattern(2, 8192));
    assert!(bed.read(queue, 0, 8192) == pattern(2, 8192));
    assert!(bed.rig.queue_counts(queue).replayed >= 1);
}

/// The stage of the target's requests when its peer goes.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// Some requests have memory, others wait for it.
    MemoryShort,
    /// READs of write data are on their way and more wait for a credit.
    DataOnItsWay,
    /// The store has the requests.
    Execute,
    /// The store refuses the requests for now.
    StoreFull,
    /// Answers are posted but do not leave.
    Respond,
}

#[expect(clippy::too_many_lines, reason = "one arm for each event")]
fn die_at(moment: Moment, immediates: bool) {
    let options = RigOptions {
        arena_bytes: 4 * IO_MAX as usize,
        io_max_bytes: IO_MAX,
        ..RigOptions::default()
    };
    let mut bed = Bed::new(&options);
    let features = if immediates { Features::WRITE_WITH_IMM } else { Features::default() };
    let features = features.or(LISTS);
    let queue_options = QueueOptions {
        depth: 32,
        io_max_bytes: IO_MAX,
        features,
        reads_out: 2,
        ..QueueOptions::default()
    };
    let victim = bed.queue(STORE, queue_options);
    let other_session = bed.rig.begin_session();
    bed.open_all(other_session);
    let bystander = bed.rig.add_queue(other_session, STORE, queue_options).unwrap();
    bed.rig.settle(PATIENCE).unwrap();
    let wire = bed.rig.wire(victim).unwrap().clone();
    let mut conditions = StoreConditions::default();
    let (op, len) = match moment {
        Moment::MemoryShort | Moment::Execute => {
            conditions.stalled = true;
            (IoOp::Read, if matches!(moment, Moment::Execute) { 4096 } else { u64::from(IO_MAX) })
        }
        Moment::StoreFull => {
            conditions.stalled = true;
            conditions.capacity = 2;
            (IoOp::Write, 4096)
        }
        Moment::DataOnItsWay => (IoOp::Write, 8192),
        Moment::Respond => {
            wire.stall(End::B, true);
            (IoOp::Read, 4096)
        }
    };
    bed.rig.store_mut().set_conditions(conditions);
    for tag in 0..32 {
        bed.submit(victim, tag, op, 0, len);
    }
    let waits = |bed: &Bed| bed.rig.target_counts();
    let mut most = 0;
    if matches!(moment, Moment::DataOnItsWay) {
        // The commands arrive, the answers to READs do not.
        bed.rig.run(PATIENCE, |rig| rig.target_counts().rdma_reads >= 1).unwrap();
        wire.stall(End::A, true);
    }
    for _ in 0..200 {
        bed.rig.step();
        most = most.max(bed.rig.store_mut().in_flight());
    }
    match moment {
        // The memory is enough for four, and the share of one volume is half of that.
        Moment::MemoryShort => assert!(waits(&bed).memory_waits >= 28 && (1..=2).contains(&most)),
        Moment::DataOnItsWay => assert!(waits(&bed).read_credit_waits >= 1),
        Moment::Execute => assert!(most > 4, "{most} at the store"),
        Moment::StoreFull => assert_eq!(most, 2),
        Moment::Respond => assert_eq!(bed.rig.outstanding(victim), 32),
    }
    wire.stall(End::A, false);
    wire.cut();
    bed.rig.run(PATIENCE, |rig| !rig.is_connected(victim)).unwrap();
    bed.rig.store_mut().set_conditions(StoreConditions::default());
    // The other session is served at once: the dead session's memory comes back.
    for _ in 0..8 {
        bed.read(bystander, 0, IO_MAX as usize);
    }
    bed.rig.new_epoch(bed.session).expect("the victim is gone");
    bed.rig.reconnect(victim).unwrap();
    let outcomes = bed.outcomes(32);
    let result = i32::try_from(len).unwrap();
    assert!(outcomes.iter().all(|o| o.queue == victim && o.result == result), "{moment:?}");
    bed.rig.new_epoch(bed.session).unwrap();
    bed.rig.new_epoch(other_session).unwrap();
    bed.assert_arena_is_whole(&options);
}

#[test]
fn a_peer_may_die_at_any_moment() {
    for moment in [
        Moment::MemoryShort,
        Moment::DataOnItsWay,
        Moment::Execute,
        Moment::StoreFull,
        Moment::Respond,
    ] {
        for immediates in [true, false] {
            die_at(moment, immediates);
        }
    }
}

#[test]
fn a_cut_at_every_byte_of_a_small_exchange_is_survived() {
    for bytes in (1..1500).step_by(23) {
        for end in [End::A, End::B] {
            let mut bed = Bed::new(&RigOptions { seed: bytes as u64, ..RigOptions::default() });
            let queue = bed.queue(MEMORY, QueueOptions { depth: 4, ..QueueOptions::default() });
            bed.write(queue, 0, &pattern(1, 4096));
            bed.rig.wire(queue).unwrap().cut_after(end, bytes);
            bed.rig.fill_buffer(queue, Tag(1), &pattern(2, 512));
            bed.submit(queue, 0, IoOp::Read, 0, 512);
            bed.submit(queue, 1, IoOp::Write, 8192, 512);
            bed.submit(queue, 2, IoOp::Flush, 0, 0);
            let mut done = 0;
            for _ in 0..300 {
                bed.rig.step();
                done += bed.rig.take_outcomes().len();
            }
            if done < 3 {
                bed.rig.new_epoch(bed.session).unwrap();
                bed.rig.reconnect(queue).unwrap();
                assert!(bed.outcomes(3 - done).iter().all(|o| o.result >= 0), "{bytes} {end:?}");
                assert!(bed.rig.buffer(queue, Tag(0), 512) == pattern(1, 4096)[..512]);
                assert!(bed.read(queue, 8192, 512) == pattern(2, 512));
            }
        }
    }
}

#[test]
fn requests_wait_without_a_path_and_fail_when_told_to() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(MEMORY, QueueOptions::default());
    bed.rig.wire(queue).unwrap().cut();
    bed.rig.run(PATIENCE, |rig| !rig.is_connected(queue)).unwrap();
    for tag in 0..8 {
        bed.submit(queue, tag, IoOp::Read, 0, 4096);
    }
    assert!(bed.rig.settle(2000).is_err());
    assert_eq!(bed.rig.take_outcomes(), []);
    bed.rig.engine_mut(queue).set_failed(Some(5));
    assert!(bed.outcomes(8).iter().all(|o| o.result == -5));
    bed.submit(queue, 0, IoOp::Flush, 0, 0);
    assert_eq!(bed.outcomes(1)[0].result, -5);
    bed.rig.engine_mut(queue).set_failed(None);
    bed.submit(queue, 0, IoOp::Read, 0, 4096);
    bed.rig.new_epoch(bed.session).unwrap();
    bed.rig.reconnect(queue).unwrap();
    assert_eq!(bed.outcomes(1)[0].result, 4096);
}

#[test]
fn a_stop_ends_everything() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    let slow = StoreConditions { delay_min: 100, delay_max: 100, ..StoreConditions::default() };
    bed.rig.store_mut().set_conditions(slow);
    for tag in 0..16 {
        bed.submit(queue, tag, IoOp::Read, 0, 4096);
    }
    bed.rig.run(PATIENCE, |rig| rig.store_mut().in_flight() == 16).unwrap();
    bed.rig.mail(rblk_target::data::poll_group::ToGroup::Stop);
    assert!(bed.rig.stopped().is_none(), "the store still works");
    bed.rig.run(PATIENCE, |rig| rig.stopped().is_some()).unwrap();
    assert_eq!(bed.rig.connections(bed.session), 0);
    assert_eq!(bed.rig.outstanding(queue), 16, "they wait for another target");
}
