//! Queues with several QPs in their path: the distribution of requests, and a path that lives and
//! dies as one.

use std::time::Duration;

use rblk_fabric::soft::network::End;
use rblk_initiator::engine::PathEnd;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::pulse::Pulse;
use rblk_protocol::{BlockSize, CommandCapsule, Immediate, Opcode, ResponseCapsule, Status, Tag};
use rblk_rig::inprocess::{QueueOptions, RigOptions};
use rblk_tests::bed::{Bed, MEMORY, STORE, pattern};
use rblk_tests::raw::RawTarget;

const DETECT: Duration = Duration::from_secs(2);

fn of_lanes(lanes: u16) -> QueueOptions {
    QueueOptions { lanes, io_max_bytes: 64 << 10, ..QueueOptions::default() }
}

/// Submits a read of that many blocks.
fn read(target: &mut RawTarget, tag: u16, blocks: u64) {
    let io = Io::new(IoOp::Read, 0, blocks * 512, BlockSize::new(512).unwrap()).unwrap();
    target.engine.submit(Tag(tag), io).unwrap();
}

/// The commands on each lane, from the first on.
fn heard(target: &mut RawTarget, lanes: u16) -> Vec<Vec<CommandCapsule>> {
    target.steps(20);
    let mut heard = Vec::new();
    for _ in 0..lanes {
        heard.push(target.commands());
        target.switch_lane();
    }
    heard
}

fn tags(heard: &[Vec<CommandCapsule>]) -> Vec<Vec<u16>> {
    heard.iter().map(|commands| commands.iter().map(|command| command.tag.0).collect()).collect()
}

#[test]
fn data_takes_the_lane_with_the_least_on_its_way() {
    let mut target = RawTarget::tested(of_lanes(3));
    for (tag, blocks) in [(0, 16), (1, 4), (2, 8), (3, 1), (4, 1), (5, 4)] {
        read(&mut target, tag, blocks);
    }
    let first = heard(&mut target, 3);
    // 16 | 4 | 8 blocks, then always the second lane, with 5, 6, 10 by then; the third has 8.
    assert_eq!(tags(&first), [vec![0], vec![1, 3, 4, 5], vec![2]]);
    // An answer makes room on its lane.
    let large = &first[0][0];
    let imm = Immediate::new(large.tag, large.sequence);
    target.write_with_imm(large.buffer.unwrap(), &vec![7; 16 * 512], imm);
    target.steps(20);
    assert_eq!(target.outcomes, [(Tag(0), 16 * 512)]);
    read(&mut target, 6, 9);
    read(&mut target, 7, 1);
    assert_eq!(tags(&heard(&mut target, 3)), [vec![6], vec![], vec![7]]);
}

#[test]
fn small_commands_share_messages_on_the_first_lane() {
    let mut target = RawTarget::tested(of_lanes(2));
    read(&mut target, 0, 8);
    // These commands name no memory: no data moves for them, even if other data is on its way.
    for (tag, op) in [(1, IoOp::Flush), (2, IoOp::Discard), (3, IoOp::WriteZeroes)] {
        let len = if op == IoOp::Flush { 0 } else { 512 };
        let io = Io::new(op, 0, len, BlockSize::new(512).unwrap()).unwrap();
        target.engine.submit(Tag(tag), io).unwrap();
    }
    target.steps(20);
    let messages = target.messages();
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert_eq!(tags(&messages), [[0, 1, 2, 3]]);
    target.switch_lane();
    assert_eq!(target.commands(), []);
}

#[test]
fn an_answer_by_another_lane_than_its_command_ends_the_path() {
    for with_imm in [true, false] {
        let mut target = RawTarget::tested(of_lanes(2));
        read(&mut target, 0, 8);
        read(&mut target, 1, 8);
        let sent = heard(&mut target, 2);
        assert_eq!(tags(&sent), [[0], [1]]);
        // The first lane answers a command of the second one. The sequence is right.
        let command = &sent[1][0];
        if with_imm {
            let imm = Immediate::new(command.tag, command.sequence);
            target.write_with_imm(command.buffer.unwrap(), &[7; 4096], imm);
        } else {
            let answer = ResponseCapsule::new(command.tag, command.sequence, Status::Ok);
            target.send(&answer.to_wire());
        }
        let why = PathEnd::Protocol("an answer to a command that was not sent");
        assert_eq!(target.path_end(), Some(why));
        assert_eq!(target.outcomes, []);
        // Both QPs are dead, and both requests go by the next path.
        for _ in 0..2 {
            assert!(target.hear_end().is_some());
            target.switch_lane();
        }
        target.reconnect();
        assert_eq!(tags(&heard(&mut target, 2)), [[0], [1]]);
    }
}

#[test]
fn a_path_carries_nothing_before_every_lane_is_tested() {
    let mut target = RawTarget::new(of_lanes(2));
    read(&mut target, 0, 8);
    let tests = heard(&mut target, 2);
    assert!(tests.iter().all(|heard| heard.len() == 1 && heard[0].opcode == Opcode::SelfTest));
    assert_ne!(tests[0][0].sequence, tests[1][0].sequence);
    assert_ne!(tests[0][0].buffer.unwrap().address, tests[1][0].buffer.unwrap().address);
    let pattern = |lane: usize| rblk_protocol::self_test_pattern(tests[lane][0].sequence);
    target.answer_self_test(&tests[0][0], &pattern(0), true);
    assert_eq!(tags(&heard(&mut target, 2)), [[0_u16; 0]; 2], "one lane is not tested");
    // The self-test bytes of the other lane are wrong here.
    target.switch_lane();
    target.answer_self_test(&tests[1][0], &pattern(0), true);
    assert_eq!(target.path_end(), Some(PathEnd::SelfTest));
}

#[test]
fn the_end_of_one_lane_is_that_of_the_path_and_no_data_is_lost() {
    for lane in 0..3 {
        let mut bed = Bed::new(&RigOptions::default());
        let queue = bed.queue(STORE, of_lanes(3));
        for tag in 0..12u16 {
            bed.rig.fill_buffer(queue, Tag(tag), &pattern(tag.into(), 32 << 10));
            bed.submit(queue, tag, IoOp::Write, u64::from(tag) << 15, 32 << 10);
        }
        // In the middle of the data.
        bed.rig.wires(queue)[lane].cut_after(End::A, 20_000);
        bed.rig.run(10_000, |rig| !rig.is_connected(queue)).unwrap();
        let ends = bed.rig.take_path_ends(queue);
        assert!(matches!(ends[..], [PathEnd::Lost(_)]), "lane {lane}: {ends:?}");
        let session = bed.session;
        bed.rig.new_epoch(session).unwrap();
        bed.rig.reconnect(queue).unwrap();
        assert!(bed.outcomes(12).iter().all(|outcome| outcome.result == 32 << 10));
        for tag in 0..12u64 {
            assert!(bed.read(queue, tag << 15, 32 << 10) == pattern(tag, 32 << 10), "{tag}");
        }
    }
}

#[test]
fn one_silent_lane_is_noticed_beside_busy_ones() {
    let tick = Duration::from_millis(10);
    let mut bed = Bed::new(&RigOptions { tick, ..RigOptions::default() });
    let queue = bed.queue(MEMORY, of_lanes(2));
    bed.rig.engine_mut(queue).set_pulse(Some(Pulse::of(DETECT)));
    bed.write(queue, 0, &pattern(1, 8192));
    bed.rig.wires(queue)[1].stall(End::B, true);
    // The first lane has as much data on its way, so the second one gets the next command.
    bed.submit(queue, 0, IoOp::Read, 0, 8192);
    bed.submit(queue, 1, IoOp::Read, 0, 8192);
    let mut steps = 0;
    while bed.rig.is_connected(queue) {
        assert!(steps <= 210, "the path is still there");
        // Small commands use the first lane and are answered.
        let flush = bed.rig.request(queue, IoOp::Flush, 0, 0);
        if bed.rig.submit(queue, Tag(2), flush).is_err() {
            bed.rig.step();
            steps += 1;
        }
    }
    assert!(steps > 100, "{steps} steps of 10 ms: not before its time");
    assert_eq!(bed.rig.take_path_ends(queue), [PathEnd::Silent]);
}
