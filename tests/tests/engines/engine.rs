//! The work of an engine beside requests: it holds them, asks whether the target lives, and gives a
//! silent path up.

use std::sync::Arc;
use std::time::Duration;

use rblk_config::OnLoss;
use rblk_fabric::soft::network::End;
use rblk_initiator::engine::durability::retain::RetainRing;
use rblk_initiator::engine::durability::{Durability, Ledger};
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::pulse::Pulse;
use rblk_initiator::engine::{Engine, PathEnd, QueueStats};
use rblk_protocol::{
    BlockSize, Immediate, KeyedDescriptor, Opcode, QueueDepth, ResponseCapsule, Sequence, Status,
    Tag,
};
use rblk_rig::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_rig::ram_store::StoreConditions;
use rblk_target::store::Store;
use rblk_tests::bed::{Bed, PATIENCE, STORE, pattern};
use rblk_tests::raw::RawTarget;

const DETECT: Duration = Duration::from_secs(2);

fn stall_store(bed: &mut Bed, stalled: bool) {
    let conditions = StoreConditions { stalled, ..StoreConditions::default() };
    bed.rig.store_mut().set_conditions(conditions);
}

fn slow_rig() -> RigOptions {
    RigOptions { tick: Duration::from_millis(10), ..RigOptions::default() }
}

#[test]
fn a_held_queue_becomes_quiet_and_leaves_its_path_without_sending_anything_twice() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    stall_store(&mut bed, true);
    for tag in 0..3u16 {
        bed.rig.fill_buffer(queue, Tag(tag), &pattern(tag.into(), 8192));
        bed.submit(queue, tag, IoOp::Write, u64::from(tag) * 8192, 8192);
    }
    bed.rig.run(PATIENCE, |rig| rig.store_mut().in_flight() == 3).unwrap();
    let sent = bed.rig.queue_counts(queue).sends;
    bed.rig.engine_mut(queue).hold(true);
    bed.rig.fill_buffer(queue, Tag(3), &pattern(3, 8192));
    bed.submit(queue, 3, IoOp::Write, 3 * 8192, 8192);
    bed.submit(queue, 4, IoOp::Flush, 0, 0);
    for _ in 0..1000 {
        bed.rig.step();
    }
    assert!(!bed.rig.engine_mut(queue).is_quiet(), "three are not answered");
    stall_store(&mut bed, false);
    assert_eq!(bed.outcomes(3).iter().map(|o| o.result).collect::<Vec<_>>(), [8192; 3]);
    assert!(bed.rig.engine_mut(queue).is_quiet());
    // The planned switch: no request is under way, so none is sent again, and the next path is held
    // as well.
    bed.rig.disconnect(queue);
    let session = bed.session;
    bed.rig.new_epoch(session).unwrap();
    bed.rig.reconnect(queue).unwrap();
    bed.rig.run(PATIENCE, |rig| rig.is_connected(queue)).unwrap();
    for _ in 0..1000 {
        bed.rig.step();
    }
    let counts = bed.rig.queue_counts(queue);
    assert_eq!(counts.sends, sent + 1, "the self-test of the new path");
    assert_eq!(counts.replayed, 0);
    assert_eq!((bed.rig.outstanding(queue), bed.rig.take_outcomes().len()), (2, 0));
    bed.rig.engine_mut(queue).hold(false);
    assert!(bed.outcomes(2).iter().all(|o| o.result >= 0));
    for tag in 0..4u16 {
        let at = u64::from(tag) * 8192;
        assert!(bed.read(queue, at, 8192) == pattern(tag.into(), 8192), "write {tag}");
    }
}

#[test]
fn held_requests_can_be_failed() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    bed.rig.engine_mut(queue).hold(true);
    bed.submit(queue, 0, IoOp::Read, 0, 4096);
    bed.submit(queue, 1, IoOp::Flush, 0, 0);
    bed.rig.step();
    bed.rig.engine_mut(queue).set_failed(Some(52));
    assert!(bed.outcomes(2).iter().all(|o| o.result == -52));
    bed.rig.engine_mut(queue).set_failed(None);
    bed.submit(queue, 0, IoOp::Read, 0, 4096);
    for _ in 0..100 {
        bed.rig.step();
    }
    assert!(bed.rig.take_outcomes().is_empty(), "it is still held");
    bed.rig.engine_mut(queue).hold(false);
    assert_eq!(bed.outcomes(1)[0].result, 4096);
}

/// Gives an unused queue a ledger that retains `bytes`.
fn retain(bed: &mut Bed, queue: QueueId, bytes: usize) -> Arc<Durability> {
    let shared = Durability::new(OnLoss::default());
    let depth = QueueDepth::new(QueueOptions::default().depth).unwrap();
    let ledger = Ledger::new(Arc::clone(&shared), depth, Some(RetainRing::new(bytes, 64)));
    let engine = bed.rig.engine_mut(queue);
    let other = Engine::new(depth, 1 << 20, Arc::new(QueueStats::default()));
    *engine = std::mem::replace(engine, other).with_ledger(ledger);
    shared
}

#[test]
fn a_hold_begun_behind_a_flush_ahead_keeps_the_write_behind_it() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(STORE, QueueOptions::default());
    let shared = retain(&mut bed, queue, 2048);
    for at in 0..3 {
        bed.write(queue, at * 512, &pattern(at, 512));
    }
    assert_eq!(shared.unflushed(), 3);
    stall_store(&mut bed, true);
    // More than half of the ring is used: a FLUSH goes out under the tag of this write.
    bed.rig.fill_buffer(queue, Tag(7), &pattern(7, 512));
    bed.submit(queue, 7, IoOp::Write, 7 * 512, 512);
    bed.rig.run(PATIENCE, |rig| rig.store_mut().in_flight() == 1).unwrap();
    assert_eq!(bed.rig.queue_counts(queue).flushes_ahead, 1);
    bed.rig.engine_mut(queue).hold(true);
    assert!(!bed.rig.engine_mut(queue).is_quiet(), "the FLUSH is under way");
    stall_store(&mut bed, false);
    bed.rig.run(PATIENCE, |rig| rig.engine_mut(queue).is_quiet()).unwrap();
    for _ in 0..1000 {
        bed.rig.step();
    }
    assert_eq!((shared.unflushed(), bed.rig.outstanding(queue)), (0, 1));
    assert!(bed.rig.take_outcomes().is_empty());
    // Its own FLUSH behind it is held too, and does not succeed too early.
    bed.submit(queue, 8, IoOp::Flush, 0, 0);
    bed.rig.step();
    bed.rig.engine_mut(queue).hold(false);
    assert!(bed.outcomes(2).iter().all(|o| o.result >= 0));
    assert!(bed.read(queue, 7 * 512, 512) == pattern(7, 512));
    assert_eq!(bed.rig.queue_counts(queue).flushes_ahead, 1, "it was not sent again");
}

#[test]
fn a_slow_store_is_no_silent_target_and_idle_paths_ask_nothing() {
    let mut bed = Bed::new(&slow_rig());
    let queue = bed.queue(STORE, QueueOptions::default());
    bed.rig.engine_mut(queue).set_pulse(Some(Pulse::of(DETECT)));
    let sent = bed.rig.queue_counts(queue).sends;
    // An idle hour.
    for _ in 0..360_000 {
        bed.rig.step();
    }
    assert_eq!(bed.rig.queue_counts(queue).sends, sent);
    stall_store(&mut bed, true);
    bed.submit(queue, 0, IoOp::Read, 0, 4096);
    // A minute with a stalled store.
    for _ in 0..6_000 {
        bed.rig.step();
    }
    let counts = bed.rig.queue_counts(queue);
    assert!((100..=120).contains(&counts.beats), "{} beats in a minute", counts.beats);
    assert_eq!(counts.sends, sent + 1 + counts.beats);
    assert_eq!(bed.rig.take_path_ends(queue), []);
    stall_store(&mut bed, false);
    assert_eq!(bed.outcomes(1)[0].result, 4096);
}

#[test]
fn a_path_that_carries_nothing_is_given_up_within_the_time_to_detect() {
    // Either direction may be broken.
    for broken in [End::A, End::B] {
        let mut bed = Bed::new(&slow_rig());
        let queue = bed.queue(STORE, QueueOptions::default());
        bed.rig.engine_mut(queue).set_pulse(Some(Pulse::of(DETECT)));
        bed.write(queue, 0, &pattern(1, 4096));
        bed.rig.wire(queue).unwrap().stall(broken, true);
        // Without a request the engine cannot notice; its admin connection does.
        for _ in 0..1_000 {
            bed.rig.step();
        }
        assert_eq!(bed.rig.take_path_ends(queue), []);
        bed.submit(queue, 0, IoOp::Read, 0, 4096);
        let steps = bed.rig.run(1_000, |rig| !rig.is_connected(queue)).unwrap();
        assert!(steps <= 200, "{steps} steps of 10 ms");
        assert_eq!(bed.rig.take_path_ends(queue), [PathEnd::Silent]);
        let session = bed.session;
        bed.rig.new_epoch(session).unwrap();
        bed.rig.reconnect(queue).unwrap();
        assert_eq!(bed.outcomes(1)[0].result, 4096, "{broken:?}");
        assert!(bed.rig.buffer(queue, Tag(0), 4096) == pattern(1, 4096));
    }
}

#[test]
fn an_engine_that_was_stopped_asks_before_it_gives_its_path_up() {
    let mut target = RawTarget::tested(QueueOptions::default());
    target.engine.set_pulse(Some(Pulse::of(DETECT)));
    let first = target.request(IoOp::Read, 0);
    // The engine's thread is stopped for a minute; then requests and a turn come at once.
    let io = Io::new(IoOp::Read, 512, 512, BlockSize::new(512).unwrap()).unwrap();
    target.engine.submit(Tag(1), io).unwrap();
    target.steps_of(1, Duration::from_secs(60));
    assert_eq!(target.path_end(), None, "the target was not asked");
    let sent: Vec<_> = target.commands().iter().map(|command| command.opcode).collect();
    assert_eq!(sent, [Opcode::Read, Opcode::KeepAlive]);
    // The target has 5/8 of the time to detect for an answer, and no more.
    target.steps_of(12, Duration::from_millis(100));
    assert_eq!(target.path_end(), None);
    target.steps_of(1, Duration::from_millis(100));
    assert_eq!(target.path_end(), Some(PathEnd::Silent));
    assert_eq!(target.engine.outstanding(), 2, "both wait for the next path");
    // With an answer that came meanwhile the path stays.
    let mut target = RawTarget::tested(QueueOptions::default());
    target.engine.set_pulse(Some(Pulse::of(DETECT)));
    let command = target.request(IoOp::Flush, 0);
    assert_ne!(command.opcode, first.opcode);
    target.engine.submit(Tag(1), io).unwrap();
    let response = ResponseCapsule::new(command.tag, command.sequence, Status::Ok);
    target.send(&response.to_wire());
    target.steps_of(1, Duration::from_secs(60));
    assert_eq!(target.outcomes, [(Tag(0), 0)]);
    assert_eq!(target.next_command().opcode, Opcode::Read);
    assert_eq!(target.path_end(), None);
}

/// An engine that waits for a target and has just sent a KEEP_ALIVE.
fn asked() -> (RawTarget, Tag, Sequence) {
    let mut target = RawTarget::tested(QueueOptions::default());
    target.engine.set_pulse(Some(Pulse::of(DETECT)));
    let _ = target.request(IoOp::Read, 0);
    target.steps_of(6, Duration::from_millis(100));
    let beat = target.next_command();
    assert_eq!(beat.opcode, Opcode::KeepAlive);
    assert!(beat.buffer.is_none());
    (target, beat.tag, beat.sequence)
}

#[test]
fn an_answer_to_a_beat_must_be_one() {
    let (mut target, tag, sequence) = asked();
    target.send(&ResponseCapsule::new(tag, sequence, Status::Ok).to_wire());
    target.steps_of(10, Duration::from_millis(100));
    assert_eq!(target.path_end(), None);
    let beat = target.next_command();
    assert_eq!(beat.opcode, Opcode::KeepAlive, "the next one");

    let unasked = PathEnd::Protocol("an answer to no command");
    let (mut target, tag, sequence) = asked();
    target.send(&ResponseCapsule::new(tag, Sequence(sequence.0 + 1), Status::Ok).to_wire());
    assert_eq!(target.path_end(), Some(unasked));

    let (mut target, tag, sequence) = asked();
    for _ in 0..2 {
        target.send(&ResponseCapsule::new(tag, sequence, Status::Ok).to_wire());
    }
    assert_eq!(target.path_end(), Some(unasked));

    let (mut target, tag, sequence) = asked();
    target.send(&ResponseCapsule::new(tag, sequence, Status::Fenced).to_wire());
    assert_eq!(target.path_end(), Some(PathEnd::Protocol("a KEEP_ALIVE that was refused")));

    let (mut target, tag, sequence) = asked();
    let scratch: KeyedDescriptor = target.scratch;
    target.write_with_imm(scratch, &[0; 8], Immediate::new(tag, sequence));
    assert_eq!(target.path_end(), Some(unasked));
}
