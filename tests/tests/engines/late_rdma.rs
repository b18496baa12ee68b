//! RDMA of a path that is gone: it reaches no buffer, with its QP or its keys left over, and the
//! target counts it.

use std::sync::Arc;

use rblk_fabric::soft::network::Conditions;
use rblk_fabric::{Region, WcStatus};
use rblk_initiator::engine::PathEnd;
use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{CommandCapsule, Features, Immediate, KeyedDescriptor, Opcode, Tag};
use rblk_rig::inprocess::{QueueOptions, RigOptions};
use rblk_rig::ram_store::StoreConditions;
use rblk_rig::seed::Random;
use rblk_target::store::Store;
use rblk_tests::bed::{Bed, PATIENCE, STORE, pattern};
use rblk_tests::raw::{Heard, RawPeer, RawTarget};

const GUARD: u64 = 99;

fn guard(region: &Region) {
    region.write(0, &pattern(GUARD, region.len()));
}

fn is_guarded(region: &Region) -> bool {
    let mut bytes = vec![0; region.len()];
    region.read(0, &mut bytes);
    bytes == pattern(GUARD, region.len())
}

fn small() -> QueueOptions {
    QueueOptions { depth: 4, io_max_bytes: 16 << 10, ..QueueOptions::default() }
}

fn both_kinds() -> [QueueOptions; 2] {
    [small(), QueueOptions { features: Features::default(), ..small() }]
}

/// Answers a READ of a dead path, as a target that does not know of its end does.
fn send_late(target: &mut RawTarget, read: &CommandCapsule, with_imm: bool) {
    let to = read.buffer.unwrap();
    if with_imm {
        target.write_with_imm(to, &[0xbb; 512], Immediate::new(read.tag, read.sequence));
    } else {
        target.write(to, &[0xbb; 512]);
    }
}

#[test]
fn a_dead_queue_pair_takes_nothing_though_the_memory_is_still_registered() {
    for with_imm in [true, false] {
        let mut target = RawTarget::tested(small());
        let read = target.request(IoOp::Read, 0);
        // Control has not destroyed the path yet; the engine owns the buffer again.
        let dead = target.drop_path();
        assert_eq!(dead.memory.buffers.sinks.rkey().0, read.buffer.unwrap().rkey);
        guard(&target.buffers);
        send_late(&mut target, &read, with_imm);
        target.steps(100);
        let end = target.hear_end();
        assert!(matches!(end, Some(WcStatus::RetryExceeded | WcStatus::Flushed)), "{end:?}");
        assert!(is_guarded(&target.buffers), "with_imm {with_imm}");
        assert_eq!(target.engine.outstanding(), 1, "it waits for the next path");
    }
}

#[test]
fn a_key_of_a_dead_path_opens_nothing_on_a_living_one() {
    for with_imm in [true, false] {
        let mut target = RawTarget::tested(small());
        let old = target.request(IoOp::Read, 0);
        target.reconnect();
        // The repeated request uses the same buffer with another key and another address.
        let new = target.next_command();
        assert_eq!((new.opcode, new.tag), (Opcode::Read, old.tag));
        let (old_buffer, new_buffer) = (old.buffer.unwrap(), new.buffer.unwrap());
        assert_ne!(old_buffer.address, new_buffer.address, "random for each path");
        assert_ne!(old_buffer.rkey, new_buffer.rkey);
        // The address is valid, and only the key is wrong.
        let guessed = KeyedDescriptor { address: new_buffer.address, ..old_buffer };
        let old = CommandCapsule { buffer: Some(guessed), ..old };
        guard(&target.buffers);
        send_late(&mut target, &old, with_imm);
        target.steps(100);
        assert_eq!(target.hear_end(), Some(WcStatus::RemoteAccess));
        assert!(is_guarded(&target.buffers), "with_imm {with_imm}");
        assert!(matches!(target.path_end(), Some(PathEnd::Lost(_))));
        assert_eq!(target.engine.outstanding(), 1, "it waits for the next path");
        assert!(target.outcomes.is_empty());
    }
}

#[test]
fn a_target_counts_rdma_to_memory_that_is_no_longer_lent() {
    for options in both_kinds() {
        for opcode in [Opcode::Read, Opcode::Write] {
            let rig = RigOptions::default();
            let mut bed = Bed::new(&rig);
            let session = bed.rig.begin_session();
            bed.open_all(session);
            let mut peer = RawPeer::tested(&mut bed, session, STORE, options);
            // A served command is not counted as blocked.
            let command = peer.transfer(opcode, 1, 0, 16);
            peer.send(&command.to_wire());
            assert!(!matches!(peer.hear(&mut bed), Heard::End(_)));
            assert_eq!(bed.rig.target_counts().stale_rdma_blocked, 0);
            let before = bed.rig.store_mut().bytes(STORE).to_vec();
            // The QP stays. The key in the command dies while the store works, or is dead before
            // the command arrives.
            let stalled = StoreConditions { stalled: true, ..StoreConditions::default() };
            bed.rig.store_mut().set_conditions(stalled);
            let command = peer.transfer(opcode, 2, 64, 16);
            if opcode == Opcode::Write {
                peer.lend_anew();
            }
            peer.send(&command.to_wire());
            if opcode == Opcode::Read {
                bed.rig.run(PATIENCE, |rig| rig.store_mut().in_flight() == 1).unwrap();
                peer.lend_anew();
            }
            let region = Arc::clone(peer.lent.region());
            guard(&region);
            bed.rig.store_mut().set_conditions(StoreConditions::default());
            assert!(matches!(peer.hear(&mut bed), Heard::End(_)), "{opcode:?}");
            bed.rig.run(PATIENCE, |rig| rig.connections(session) == 0).unwrap();
            assert!(is_guarded(&region), "{opcode:?}");
            assert!(bed.rig.store_mut().bytes(STORE) == before, "{opcode:?}");
            assert_eq!(bed.rig.target_counts().stale_rdma_blocked, 1, "{opcode:?}");
            bed.assert_arena_is_whole(&rig);
        }
    }
}

#[test]
fn data_on_its_way_when_a_path_ends_gets_nowhere() {
    let mut on_their_way = 0;
    for seed in 0..60 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let delay_min = random.below(20);
        let rig = RigOptions {
            seed,
            conditions: Conditions {
                fragment: random.chance(500),
                delay_min,
                delay_max: delay_min + random.below(40),
                buffer: 1 << random.within(9, 17),
            },
            ..RigOptions::default()
        };
        let mut bed = Bed::new(&rig);
        let options = both_kinds()[random.index(2)];
        let queue = bed.queue(STORE, options);
        let mut reads = [false; 4];
        for tag in 0..4u16 {
            let op = if random.chance(300) { IoOp::Write } else { IoOp::Read };
            reads[usize::from(tag)] = op == IoOp::Read;
            bed.rig.fill_buffer(queue, Tag(tag), &pattern(seed, 16 << 10));
            bed.submit(queue, tag, op, u64::from(tag) * 16384, 16384);
        }
        for _ in 0..random.below(200) {
            bed.rig.step();
        }
        let outcomes = bed.rig.take_outcomes();
        let read = outcomes.iter().filter(|outcome| reads[outcome.tag.index()]).count() as u64;
        let counts = bed.rig.target_counts();
        on_their_way += counts.rdma_writes + counts.rdma_writes_with_imm - read;
        bed.rig.disconnect(queue);
        // All buffers are ours now, including those of requests that wait for the next path.
        let buffers = Arc::clone(bed.rig.buffers(queue));
        guard(&buffers);
        for _ in 0..2000 {
            bed.rig.step();
        }
        assert!(is_guarded(&buffers), "seed {seed}");
    }
    assert!(on_their_way > 10, "{on_their_way} WRITEs: the disconnects hit nothing");
}
