//! [`others_go_on`]: a way dies while the store holds its write. Requests by the other way are
//! served in their usual time, and those of the dead way when the target has ended its epoch.

use rblk_initiator::engine::io::IoOp;
use rblk_initiator::engine::pulse::Pulse;
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::engine::ways::choice::ChoicePolicy;
use rblk_protocol::{DropRequest, Epoch, Join, Opcode, Status, Tag};
use rblk_rig::inprocess::QueueId;
use rblk_rig::seed::Random;

use super::{Bench, PATIENCE};
use crate::bed::pattern;
use crate::storm::VOLUME;

/// Steps that a request takes at most, if nothing stands in its way.
const SOON: u64 = 1500;

/// Has a bench use both ways in one queue.
pub(super) fn both(mut bench: Bench, policy: ChoicePolicy) -> (Bench, QueueId) {
    let (options, pulse) = (bench.queue_options(), Pulse::of(bench.plan.detect));
    let queue = bench.site.rig.add_engine(VOLUME, options, None).expect("memory");
    let engine = bench.site.rig.engine_mut(queue);
    engine.allow_ways(0, policy);
    engine.set_pulse(Some(pulse));
    bench.shared = Some(queue);
    bench.ask_in(0, 0, None);
    bench.come_in(0);
    bench.ask_in(1, 2, Some(Join { beside: Epoch(1), ends: None }));
    let (status, _) = bench.wait("LOGIN", |bench| bench.answer(1));
    assert_eq!(status, Status::Ok);
    bench.give_queue(1, Epoch(2), true);
    let way = WayIndex::new(1).expect("a place");
    bench.wait("a path", |bench| {
        bench.site.rig.engine_mut(queue).live_ways().has(way).then_some(())
    });
    (bench, queue)
}

/// The results of those tags, in any order, within so many steps.
pub(super) fn finish(bench: &mut Bench, tags: &[Tag], most: u64) {
    let mut left = tags.to_vec();
    for _ in 0..most {
        for outcome in bench.site.rig.take_outcomes() {
            assert!(outcome.result >= 0, "errno {}", -outcome.result);
            left.retain(|tag| *tag != outcome.tag);
        }
        if left.is_empty() {
            return;
        }
        bench.step();
    }
    panic!("{left:?} take too long: {:?} {:?}", bench.plan, bench.log);
}

/// See the module. Returns whether the write was on the way that died.
///
/// # Panics
/// A rule is broken.
pub fn others_go_on(seed: u64) -> bool {
    let mut random = Random::new(seed ^ 0x6f_7468_6572);
    let (mut bench, queue) = both(Bench::of(seed, 2), ChoicePolicy::RoundRobin);
    let block = bench.plan.block_bytes as usize;
    let held = bench.begin(0, IoOp::Write, (0, block), 1);
    bench.wait("a write", |bench| {
        (bench.site.rig.store_mut().changes_in_flight() > 0).then_some(())
    });
    bench.site.rig.store_mut().hold();
    // Either of the ways has it.
    let dead = random.index(2);
    let way = WayIndex::new(dead).expect("a place");
    let old = bench.ways[dead].take().expect("a way");
    old.break_link(random.chance(500));
    bench.site.rig.end_way(queue, way);
    let was_there = bench.site.rig.engine_mut(queue).old_way(held) == Some(way);
    let request = DropRequest::new(&[old.epoch]).expect("an epoch");
    bench.call(1 - dead, Opcode::Drop, &request.to_wire());
    // The store goes on with later requests, and so does the queue.
    for round in 0..8 {
        // Its tag stays with the write that the store holds.
        bench.tag = held.0;
        // The store serves the blocks of a slot of the cache one after the other.
        let half = bench.plan.volume_bytes / 2;
        let place = ((half + block * random.index(half / block)) as u64, block);
        let write = bench.begin(1 - dead, IoOp::Write, place, 10 + round);
        finish(&mut bench, &[write], SOON);
        let read = bench.begin(1 - dead, IoOp::Read, place, 0);
        finish(&mut bench, &[read], SOON);
        let found = bench.site.rig.buffer(queue, read, block);
        assert!(found == pattern(10 + round, block), "stale data: {:?}", bench.log);
    }
    let still = bench.site.rig.engine_mut(queue).old_way(held) == Some(way);
    assert!(!was_there || still, "the write went on before its old copy was over");
    bench.site.rig.store_mut().release();
    let (status, _) = bench.wait("DROP", |bench| bench.answer(1 - dead));
    assert_eq!(status, Status::Ok);
    bench.site.rig.engine_mut(queue).way_dropped(way);
    // The QPs of the dead way may be destroyed late.
    finish(&mut bench, &[held], PATIENCE);
    bench.tag = held.0;
    let read = bench.begin(1 - dead, IoOp::Read, (0, block), 0);
    finish(&mut bench, &[read], SOON);
    assert!(bench.site.rig.buffer(queue, read, block) == pattern(1, block), "stale data");
    assert_eq!(bench.site.breaches(), [] as [String; 0]);
    was_there
}
