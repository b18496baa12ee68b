//! Long zeroing: other requests are served meanwhile, and the zeroing ends with its connection.

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::RamStore;
use rblk_target::data::poll_group::ToGroup;
use rblk_target::volume::ids::{SessionIndex, VolumeIndex};
use rblk_tests::bed::{Bed, MEMORY, PATIENCE, VOLUME_BYTES, pattern};

use super::MIB;

const LARGE: usize = 64 * MIB;
const LARGE_VOLUME: VolumeIndex = VolumeIndex(0);
const SMALL_VOLUME: VolumeIndex = VolumeIndex(1);

/// A large volume in memory, full of ones, another volume, and a queue for each.
fn large() -> (Rig<RamStore>, [SessionIndex; 2], [QueueId; 2]) {
    let volumes = [LARGE, MIB].map(|bytes| VolumeSpec::new(VolumeKind::Memory, bytes as u64));
    let options = RigOptions { volumes: volumes.to_vec(), ..RigOptions::default() };
    let mut rig = Rig::new(&options, |region| RamStore::new(region, 1)).expect("a rig");
    let memory = rig.memory(LARGE_VOLUME).expect("in memory");
    let ones = vec![1; MIB];
    (0..LARGE / MIB).for_each(|at| memory.write(at * MIB, &ones));
    let opened = [LARGE_VOLUME, SMALL_VOLUME].map(|volume| {
        let session = rig.begin_session();
        rig.open(session, volume, AccessMode::Exclusive);
        let queue = rig.add_queue(session, volume, QueueOptions::default()).expect("a queue");
        rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
        (session, queue)
    });
    (rig, opened.map(|(session, _)| session), opened.map(|(_, queue)| queue))
}

fn byte_at(rig: &Rig<RamStore>, at: usize) -> u8 {
    let mut byte = [0xee];
    rig.memory(LARGE_VOLUME).expect("in memory").read(at, &mut byte);
    byte[0]
}

fn is_all(rig: &Rig<RamStore>, range: std::ops::Range<usize>, byte: u8) -> bool {
    let mut bytes = vec![0xee; range.len()];
    rig.memory(LARGE_VOLUME).expect("in memory").read(range.start, &mut bytes);
    bytes.iter().all(|other| *other == byte)
}

#[test]
fn zeroing_a_large_volume_lets_others_go_on() {
    for op in [IoOp::WriteZeroes, IoOp::Discard] {
        let (mut rig, _, [large, small]) = large();
        let (from, to) = (512, LARGE - 1536);
        let io = rig.request(large, op, from as u64, (to - from) as u64);
        rig.submit(large, Tag(0), io).expect("a free tag");
        rig.run(100, |rig| byte_at(rig, from) == 0).expect("it begins");
        assert_eq!(byte_at(&rig, to - 1), 1, "{op:?}: in one go");
        // Reads and writes of another volume, a read of this one, and a second zeroing behind the
        // first.
        let mut answered = Vec::new();
        let io = rig.request(large, op, (to + 512) as u64, 512);
        rig.submit(large, Tag(1), io).expect("a free tag");
        let io = rig.request(large, IoOp::Read, 0, 512);
        rig.submit(large, Tag(2), io).expect("a free tag");
        for tag in 0..2 {
            let op = [IoOp::Read, IoOp::Write][usize::from(tag)];
            let io = rig.request(small, op, 4096, 64 << 10);
            rig.submit(small, Tag(tag), io).expect("a free tag");
        }
        let all = rig.run(PATIENCE, |rig| {
            let new = rig.take_outcomes();
            answered.extend(new.iter().map(|outcome| (outcome.queue, outcome.tag.0)));
            assert!(new.iter().all(|outcome| outcome.result >= 0), "{op:?}: {new:?}");
            answered.len() == 5
        });
        assert!(all.is_ok(), "{op:?}: {answered:?}");
        let place = |of| answered.iter().position(|other| *other == of).expect("answered");
        for other in [(small, 0), (small, 1), (large, 2)] {
            assert!(place(other) < place((large, 0)), "{op:?}: {other:?} waited: {answered:?}");
        }
        assert!(place((large, 0)) < place((large, 1)), "{op:?}: {answered:?}");
        assert!(is_all(&rig, 0..from, 1) && is_all(&rig, to..to + 512, 1), "{op:?}");
        assert!(is_all(&rig, to + 512..to + 1024, 0), "{op:?}");
        assert!(is_all(&rig, to + 1024..LARGE, 1), "{op:?}");
        for at in (0..LARGE).step_by(MIB) {
            assert!(is_all(&rig, at.max(from)..(at + MIB).min(to), 0), "{op:?}: {at}");
        }
    }
}

#[test]
fn a_connection_that_dies_while_it_zeroes_leaves_nothing_behind() {
    for waits in [0, 1, 3, 8] {
        let (mut rig, [session, _], [large, small]) = large();
        for tag in 0..2 {
            let io = rig.request(large, IoOp::WriteZeroes, 0, LARGE as u64);
            rig.submit(large, Tag(tag), io).expect("a free tag");
        }
        rig.run(100, |rig| byte_at(rig, 0) == 0).expect("it begins");
        for _ in 0..waits {
            rig.step();
        }
        assert_eq!(byte_at(&rig, LARGE - 1), 1, "{waits}: it was over already");
        rig.wire(large).expect("a path").cut();
        rig.run(PATIENCE, |rig| rig.connections(session) == 0).expect("it is buried");
        rig.take_outcomes();
        // No late write of the dead connection may change the volume.
        let ones = vec![0x77; MIB];
        let memory = rig.memory(LARGE_VOLUME).expect("in memory");
        (0..LARGE / MIB).for_each(|at| memory.write(at * MIB, &ones));
        for _ in 0..100 {
            rig.step();
        }
        for at in (0..LARGE).step_by(MIB) {
            assert!(is_all(&rig, at..at + MIB, 0x77), "{waits}: zeroed at {at} by the dead");
        }
        // Zeroing of the other volume works as usual.
        rig.reconnect(large).expect("a path");
        let io = rig.request(small, IoOp::WriteZeroes, 0, MIB as u64);
        rig.submit(small, Tag(0), io).expect("a free tag");
        rig.run(PATIENCE, |rig| rig.is_connected(large) && rig.outstanding(small) == 0)
            .expect("both go on");
        let done = rig.run(PATIENCE, |rig| rig.outstanding(large) == 0);
        assert!(done.is_ok(), "what was on its way is asked again: {rig:?}");
        assert!(is_all(&rig, 0..MIB, 0) && is_all(&rig, LARGE - MIB..LARGE, 0), "{waits}");
    }
}

#[test]
fn the_end_of_a_target_waits_for_its_zeroing() {
    let (mut rig, _, [large, _]) = large();
    let io = rig.request(large, IoOp::WriteZeroes, 0, LARGE as u64);
    rig.submit(large, Tag(0), io).expect("a free tag");
    rig.run(100, |rig| byte_at(rig, 0) == 0).expect("it begins");
    rig.mail(ToGroup::Stop);
    assert_eq!(rig.stopped(), None);
    rig.run(PATIENCE, |rig| rig.stopped().is_some()).expect("it ends");
    assert_eq!(rig.stopped(), Some(true));
    assert_eq!(byte_at(&rig, LARGE - 1), 0, "it ended in the middle");
}

#[test]
fn small_zeroing_is_done_at_once() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(MEMORY, QueueOptions::default());
    bed.write(queue, 0, &pattern(1, 64 << 10));
    assert_eq!(bed.io(queue, IoOp::WriteZeroes, 4096, VOLUME_BYTES - 4096), 0);
    assert!(bed.read(queue, 4096, 60 << 10).iter().all(|byte| *byte == 0));
    assert!(bed.read(queue, 0, 4096) == pattern(1, 64 << 10)[..4096]);
}
