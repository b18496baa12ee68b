//! The costs that one I/O may have, as the data path promises: messages, completions, copies and
//! allocations. The ends' own counters give them, over the real engines in this process; nothing is
//! timed.
//!
//! A binary of its own: it counts its allocations.

use rblk_bench::cost::rig::{Cost, Plan, measure};
use rblk_bench::cost::{Op, Volume, aged};
use rblk_rig::allocations::{self, CountingAllocator};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const BLOCK: u32 = 4096;
/// An end signals at most one WR per this many messages; the initiator signals fewer.
const SIGNALED_MOST: f64 = 1.0 / 16.0;
/// The number of measured I/Os is no multiple of every interval, so one more WR than the share may
/// be signaled.
const IOS: u64 = 1024;

fn costs(volumes: &[Volume], immediates: bool) -> Vec<Cost> {
    costs_with(volumes, immediates, false)
}

fn costs_with(volumes: &[Volume], immediates: bool, digests: bool) -> Vec<Cost> {
    let plan = Plan {
        ops: vec![Op::Read, Op::Write],
        sizes: vec![BLOCK],
        depths: vec![1, 32],
        queue_depth: 128,
        ios: IOS,
        volumes: volumes.to_vec(),
        in_capsule_bytes: BLOCK,
        immediates,
        lists: true,
        data_lists: true,
        data_first: true,
        digests,
        reads_out: 16,
        seed: 1,
    };
    let costs = measure(&plan).unwrap().costs;
    assert_eq!(costs.len(), volumes.len() * 4);
    costs
}

#[test]
fn a_4_kib_request_takes_two_messages_and_one_completion() {
    let one_more = 1.0 / IOS as f64;
    let volumes = [Volume::Memory, Volume::Cached, Volume::WriteBack];
    for cost in [costs(&volumes, true), costs_with(&volumes, true, true)].concat() {
        let (case, i, t) = (cost.case, cost.initiator, cost.target);
        // The command, and the answer. Several may share a message, but one never takes two.
        assert!(i.messages > 0.0 && t.messages > 0.0, "{case}: nothing was counted");
        assert!(i.messages <= 1.0, "{case}: {} messages of the initiator", i.messages);
        assert!(t.messages <= 1.0, "{case}: {} messages of the target", t.messages);
        for (end, of) in [("initiator", i), ("target", t)] {
            let most = of.messages * SIGNALED_MOST + one_more;
            assert!(of.signaled <= most, "{case}: {} of the {end} are signaled", of.signaled);
            // One message arrives, and the signaled WRs complete.
            let most = 1.0 + most + one_more;
            assert!(of.completions <= most, "{case}: {} completions at the {end}", of.completions);
            let bells = of.send_doorbells.max(of.recv_doorbells);
            assert!(bells <= 1.0 + one_more, "{case}: {bells} doorbells at the {end}");
        }
    }
}

#[test]
fn at_depth_the_data_of_three_writes_shares_a_message() {
    let volumes = [Volume::Memory, Volume::Cached, Volume::WriteBack];
    for cost in [costs(&volumes, true), costs_with(&volumes, true, true)].concat() {
        let (case, messages) = (cost.case, cost.initiator.messages);
        // 32 commands of a turn are ten times three and two.
        let expected = match (case.op, case.depth) {
            (_, 1) => 1.0,
            (Op::Read, _) => 1.0 / 16.0,
            (Op::Write, _) => 11.0 / 32.0,
        };
        assert!((messages - expected).abs() < 0.01, "{case}: {messages} messages of the initiator");
    }
}

#[test]
fn data_is_copied_only_to_and_from_volumes_in_memory() {
    let volumes = [Volume::Memory, Volume::Cached, Volume::WriteBack, Volume::Store];
    let plain = costs(&volumes, true).into_iter().map(|cost| (cost, false));
    let digests = costs_with(&volumes, true, true).into_iter().map(|cost| (cost, true));
    for (cost, digests) in plain.chain(digests) {
        let (case, copied) = (cost.case, cost.target.copied_bytes);
        assert_eq!(cost.initiator.copied_bytes, 0.0, "{case}");
        // Data lands in slots of the cache, and a volume in memory has none. Memory that may change
        // while it is sent has no digest, so it is copied.
        let copies = case.volume == Volume::Memory && (case.op == Op::Write || digests);
        let most = if copies { f64::from(BLOCK) } else { 0.0 };
        assert_eq!(copied, most, "{case}: bytes copied by the target");
        assert_eq!(cost.keyed, f64::from(u8::from(case.op == Op::Read)), "{case}: keys exposed");
    }
}

#[test]
fn nothing_is_allocated_for_a_request() {
    assert!(allocations::are_counted(), "the allocator of this test does not count");
    let volumes = [Volume::Memory, Volume::Null, Volume::Store, Volume::Cached, Volume::WriteBack];
    for (volumes, immediates) in [(&volumes[..], true), (&[Volume::Memory, Volume::Cached], false)]
    {
        for cost in [costs(volumes, immediates), costs_with(volumes, immediates, true)].concat() {
            let case = cost.case;
            assert_eq!(cost.initiator.allocations, Some(0.0), "{case}: at the initiator");
            assert_eq!(cost.target.allocations, Some(0.0), "{case}: at the target");
        }
    }
}

/// A cache that small requests have filled moves large ones in as few messages as a fresh one.
#[test]
fn large_requests_move_in_runs_in_an_aged_cache() {
    for volume in [Volume::Cached, Volume::WriteBack] {
        for groups in [1, 3] {
            let costs = aged::measure_one(volume, groups, 1).unwrap();
            assert_eq!(costs.len(), 9);
            for cost in costs {
                let most = |of: f64, most: f64, what| {
                    assert!(
                        of <= most,
                        "{of:.2} {what} of a large request, more than {most}: {cost:?}"
                    );
                };
                most(cost.reads, 1.2, "READs");
                // The first read of blocks that came one by one may find no run for its copy.
                let copies = cost.after == aged::Past::SameBlocks;
                most(cost.writes, if copies { 1.5 } else { 1.2 }, "WRITEs");
                // Small dirty blocks go to the store while the large requests run.
                let late = if volume == Volume::WriteBack { 4.0 } else { 0.0 };
                most(cost.store_ops, 1.3 + late, "store operations");
                most(cost.store_pieces, 1.2 + late, "pieces of a store operation");
                // No more than the request's own blocks, on average.
                most(cost.moved, 32.0, "moved blocks");
            }
        }
    }
}
