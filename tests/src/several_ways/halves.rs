//! [`equal_halves`]: two ways that are equally fast carry equal halves of the data.

use rblk_fabric::soft::network::End;
use rblk_initiator::engine::io::IoOp;
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::engine::ways::choice::ChoicePolicy;
use rblk_protocol::Tag;
use rblk_rig::inprocess::QueueId;

use super::others::{both, finish};
use super::{Bench, PATIENCE};
use crate::bed::pattern;
use crate::sim::plan::Plan;

/// Requests at a time.
const DEPTH: u16 = 8;
/// Bytes of a request.
const BYTES: u32 = 128 << 10;
const LEN: usize = BYTES as usize;
const ROUNDS: u64 = 10;

fn plan(seed: u64) -> Plan {
    let mut plan = Bench::plan(seed);
    (plan.depth, plan.io_max_bytes) = (DEPTH, BYTES);
    plan.volume_bytes = usize::from(DEPTH) * LEN;
    plan.arena_bytes = plan.groups * 4 * plan.volume_bytes;
    plan.network.fragment = false;
    plan
}

/// Commands that have been sent by each way.
fn commands(bench: &Bench, queue: QueueId) -> [u64; 2] {
    [0, 1].map(|at| {
        let work = bench.site.rig.sent_by(queue, WayIndex::new(at).expect("a place"));
        work.reads + work.writes
    })
}

/// Bytes that the links of each way have carried.
fn carried(bench: &Bench, queue: QueueId) -> [u64; 2] {
    [0, 1].map(|at| {
        let wires = bench.site.rig.wires_of(queue, WayIndex::new(at).expect("a place"));
        wires.iter().map(|wire| wire.sent(End::A) + wire.sent(End::B)).sum()
    })
}

/// Large writes and reads, several at a time, by a queue with two ways.
///
/// # Panics
/// A way carries more than 55 % of the data or of the commands, or a read finds other data than was
/// written.
pub fn equal_halves(seed: u64) {
    let (mut bench, queue) = both(Bench::by(plan(seed), 2), ChoicePolicy::Least);
    for op in [IoOp::Write, IoOp::Read] {
        let (before, sent_before) = (carried(&bench, queue), commands(&bench, queue));
        for round in 0..ROUNDS {
            let round = if op == IoOp::Read { ROUNDS - 1 } else { round };
            let value = |at: u16| round * u64::from(DEPTH) + u64::from(at);
            let offset = |at: u16| u64::from(at) * u64::from(BYTES);
            let tags: Vec<Tag> =
                (0..DEPTH).map(|at| bench.begin(0, op, (offset(at), LEN), value(at))).collect();
            finish(&mut bench, &tags, PATIENCE);
            for (at, tag) in (0..).zip(&tags).filter(|_| op == IoOp::Read) {
                let found = bench.site.rig.buffer(queue, *tag, LEN);
                assert!(found == pattern(value(at), LEN), "stale data: {:?}", bench.log);
            }
        }
        let after = carried(&bench, queue);
        let shares = [0, 1].map(|way| after[way] - before[way]);
        let total: u64 = shares.iter().sum();
        assert!(total >= ROUNDS * u64::from(DEPTH) * u64::from(BYTES), "{op:?}: {shares:?}");
        assert!(shares.iter().all(|share| share * 100 <= total * 55), "{op:?}: {shares:?}");
        let sent_after = commands(&bench, queue);
        let sent = [0, 1].map(|way| sent_after[way] - sent_before[way]);
        let all: u64 = sent.iter().sum();
        assert_eq!(all, ROUNDS * u64::from(DEPTH), "{op:?}: {sent:?}");
        assert!(sent.iter().all(|share| share * 100 <= all * 55), "{op:?}: {sent:?} commands");
    }
    assert_eq!(bench.site.breaches(), [] as [String; 0]);
}
