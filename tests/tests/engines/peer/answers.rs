//! Targets with wrong answers: the initiator leaves the path, and every request is answered once,
//! or waits for another path.

use std::time::Duration;

use rblk_initiator::engine::PathEnd;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_protocol::{
    BlockSize, CommandCapsule, Epoch, Features, Immediate, KeyedDescriptor, Nonce, ResponseCapsule,
    Sequence, Status, Tag, self_test_pattern,
};
use rblk_rig::inprocess::QueueOptions;
use rblk_rig::seed::Random;
use rblk_tests::raw::{self, RawTarget};

use super::{DEPTH, options};

fn keyed(features: Features) -> QueueOptions {
    QueueOptions { in_capsule_bytes: 0, features, ..options() }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one case after another")]
fn a_target_that_breaks_a_rule_loses_the_path() {
    type Spoil = fn(&mut RawTarget, &CommandCapsule);
    fn respond(target: &mut RawTarget, bytes: &[u8]) {
        target.send(bytes);
    }
    fn good(command: &CommandCapsule) -> ResponseCapsule {
        ResponseCapsule::new(command.tag, command.sequence, Status::Ok)
    }
    let cases: &[(&str, Features, IoOp, Spoil)] = &[
        ("wrong check", Features::default(), IoOp::Write, |t, c| {
            let stale = Sequence(c.sequence.0.wrapping_sub(1));
            respond(t, &ResponseCapsule::new(c.tag, stale, Status::Ok).to_wire());
        }),
        ("unused tag", Features::default(), IoOp::Write, |t, c| {
            respond(t, &ResponseCapsule { tag: Tag(5), ..good(c) }.to_wire());
        }),
        ("tag beyond the depth", Features::default(), IoOp::Write, |t, c| {
            respond(t, &ResponseCapsule { tag: Tag(DEPTH + 1), ..good(c) }.to_wire());
        }),
        ("the self-test's tag", Features::default(), IoOp::Write, |t, c| {
            respond(t, &ResponseCapsule { tag: Tag(DEPTH), ..good(c) }.to_wire());
        }),
        ("short", Features::default(), IoOp::Write, |t, c| respond(t, &good(c).to_wire()[..15])),
        ("long", Features::default(), IoOp::Write, |t, c| {
            respond(t, &[good(c).to_wire().as_slice(), &[0]].concat());
        }),
        ("reserved", Features::default(), IoOp::Write, |t, c| {
            let mut bytes = good(c).to_wire();
            bytes[15] = 1;
            respond(t, &bytes);
        }),
        ("an immediate that was not agreed", Features::default(), IoOp::Read, |t, c| {
            t.write_with_imm(c.buffer.unwrap(), &[1; 512], Immediate::new(c.tag, c.sequence));
        }),
        ("an immediate with another check", Features::WRITE_WITH_IMM, IoOp::Read, |t, c| {
            let stale = Sequence(c.sequence.0 ^ 1);
            t.write_with_imm(c.buffer.unwrap(), &[1; 512], Immediate::new(c.tag, stale));
        }),
        (
            "an immediate with a tag beyond the depth",
            Features::WRITE_WITH_IMM,
            IoOp::Read,
            |t, c| {
                let imm = Immediate { tag: Tag(999), check: 0 };
                t.write_with_imm(c.buffer.unwrap(), &[1; 512], imm);
            },
        ),
        (
            "a write into what was lent for reading",
            Features::WRITE_WITH_IMM,
            IoOp::Write,
            |t, c| {
                t.write_with_imm(c.buffer.unwrap(), &[1; 512], Immediate::new(c.tag, c.sequence));
            },
        ),
        ("a key that was never given", Features::WRITE_WITH_IMM, IoOp::Read, |t, c| {
            let buffer = KeyedDescriptor { rkey: 0x1234, ..c.buffer.unwrap() };
            t.write_with_imm(buffer, &[1; 512], Immediate::new(c.tag, c.sequence));
        }),
        ("a write beyond the buffers", Features::WRITE_WITH_IMM, IoOp::Read, |t, c| {
            let buffer = c.buffer.unwrap();
            let address = buffer.address + u64::from(DEPTH) * (64 << 10) - 256;
            let buffer = KeyedDescriptor { address, ..buffer };
            t.write_with_imm(buffer, &[1; 512], Immediate::new(c.tag, c.sequence));
        }),
    ];
    for (what, features, op, spoil) in cases {
        let mut target = RawTarget::tested(keyed(*features));
        let command = target.request(*op, 0);
        spoil(&mut target, &command);
        let end = target.path_end();
        assert!(matches!(end, Some(PathEnd::Protocol(_) | PathEnd::Lost(_))), "{what}: {end:?}");
        assert_eq!(target.outcomes, [], "{what}: the request waits for another path");
        assert_eq!(target.engine.outstanding(), 1, "{what}");
    }
}

#[test]
fn an_immediate_for_a_flush_is_no_answer() {
    let mut target = RawTarget::tested(keyed(Features::WRITE_WITH_IMM));
    let read = target.request(IoOp::Read, 0);
    let flush = target.request(IoOp::Flush, 1);
    target.write_with_imm(
        read.buffer.unwrap(),
        &[1; 512],
        Immediate::new(flush.tag, flush.sequence),
    );
    assert!(matches!(target.path_end(), Some(PathEnd::Protocol(_))));
    assert_eq!(target.outcomes, [], "neither of them is answered");
    assert_eq!(target.engine.outstanding(), 2, "a request is lost");
}

#[test]
fn a_status_of_a_later_version_is_an_io_error() {
    let mut target = RawTarget::tested(keyed(Features::default()));
    let command = target.request(IoOp::Write, 4);
    let mut bytes = ResponseCapsule::new(command.tag, command.sequence, Status::Ok).to_wire();
    bytes[2] = 200;
    target.send(&bytes);
    assert_eq!(target.path_end(), None);
    assert_eq!(target.outcomes, [(Tag(4), -5)]);
}

#[test]
fn an_answer_given_twice_ends_the_path_and_counts_once() {
    let mut target = RawTarget::tested(keyed(Features::default()));
    let command = target.request(IoOp::Write, 0);
    let bytes = ResponseCapsule::new(command.tag, command.sequence, Status::Ok).to_wire();
    target.send(&bytes);
    target.send(&bytes);
    assert!(matches!(target.path_end(), Some(PathEnd::Protocol(_))));
    assert_eq!(target.outcomes, [(Tag(0), 512)]);
    assert_eq!(target.engine.outstanding(), 0);
}

#[test]
fn a_self_test_that_fails_gives_the_path_back() {
    let with_imm = keyed(Features::WRITE_WITH_IMM);
    let mut target = RawTarget::new(with_imm);
    target.next_command();
    target.steps_of(250, Duration::from_millis(10));
    assert_eq!(target.path_end(), Some(PathEnd::SelfTest), "no answer");

    let mut target = RawTarget::new(with_imm);
    let command = target.next_command();
    target.answer_self_test(&command, &[0; 64], true);
    assert_eq!(target.path_end(), Some(PathEnd::SelfTest), "nothing was written");

    let mut target = RawTarget::new(with_imm);
    let command = target.next_command();
    target.answer_self_test(&command, &self_test_pattern(command.sequence), false);
    assert_eq!(target.path_end(), Some(PathEnd::SelfTest), "by other verbs than agreed");

    let mut target = RawTarget::new(with_imm);
    let command = target.next_command();
    let answer = ResponseCapsule::new(command.tag, command.sequence, Status::NotReady);
    target.send(&answer.to_wire());
    assert_eq!(target.path_end(), Some(PathEnd::SelfTest), "refused");

    let mut target = RawTarget::tested(with_imm);
    let command = CommandCapsule { tag: Tag(DEPTH), ..target.request(IoOp::Read, 0) };
    let imm = Immediate::new(Tag(DEPTH), command.sequence);
    target.write_with_imm(command.buffer.unwrap(), &[0; 64], imm);
    assert!(matches!(target.path_end(), Some(PathEnd::Protocol(_))), "answered again");
}

/// The self-test of an engine that proves its session, with its body.
fn self_test_of(target: &mut RawTarget) -> (CommandCapsule, Vec<u8>) {
    target.steps(20);
    let mut heard = target.messages_with_data();
    assert_eq!(heard.iter().flatten().count(), 1, "a self-test alone: {heard:?}");
    heard.pop().unwrap().pop().unwrap()
}

#[test]
fn both_ends_of_each_lane_prove_the_session() {
    for features in [Features::WRITE_WITH_IMM.or(Features::CAPSULE_LISTS), Features::default()] {
        let with_imm = features.has(Features::WRITE_WITH_IMM);
        let features = features.or(Features::AUTH);
        let mut target = RawTarget::new(QueueOptions { lanes: 2, ..keyed(features) });
        for lane in 0..2 {
            assert!(!target.engine.is_connected());
            let (command, body) = self_test_of(&mut target);
            let key = raw::queue_key(Epoch(1), lane);
            let proof = key.check(&raw::hellos(), &body).unwrap();
            target.answer_self_test(&command, &proof.answer(command.sequence), with_imm);
            target.steps(20);
            target.switch_lane();
        }
        assert!(target.engine.is_connected());
        assert_eq!(target.path_end(), None);
        // Later messages in the slot of the self-test are as usual.
        let command = target.request(IoOp::Read, 0);
        assert_eq!(command.in_capsule_bytes, 0);
    }
}

#[test]
fn a_target_that_does_not_know_the_session_gets_no_request() {
    let features = Features::AUTH.or(Features::WRITE_WITH_IMM);
    type Answer = fn(Sequence, &[u8]) -> [u8; 64];
    let answers: [(&str, Answer); 4] = [
        ("no proof", |sequence, _| self_test_pattern(sequence)),
        ("another secret", |sequence, _| {
            let (_, other) = raw::queue_key(Epoch(2), 0).prove(&raw::hellos(), Nonce([3; 16]));
            other.answer(sequence)
        }),
        ("another queue", |sequence, _| {
            let (_, other) = raw::queue_key(Epoch(1), 1).prove(&raw::hellos(), Nonce([3; 16]));
            other.answer(sequence)
        }),
        ("our own proof", |sequence, body| {
            let mut answer = self_test_pattern(sequence);
            answer[32..].copy_from_slice(&body[16..]);
            answer
        }),
    ];
    for (what, answer) in answers {
        let mut target = RawTarget::new(keyed(features));
        let io = Io::new(IoOp::Read, 0, 512, BlockSize::new(512).unwrap()).unwrap();
        target.engine.submit(Tag(0), io).unwrap();
        let (command, body) = self_test_of(&mut target);
        target.answer_self_test(&command, &answer(command.sequence, &body), true);
        let end = target.path_end();
        assert!(matches!(end, Some(PathEnd::Protocol(_))), "{what}: {end:?}");
        assert_eq!(target.engine.outstanding(), 1, "{what}: the request waits for a better path");
    }
    // A failed self-test is reported as one, also with proofs.
    let mut target = RawTarget::new(keyed(features));
    let (command, _) = self_test_of(&mut target);
    target.answer_self_test(&command, &[0; 64], true);
    assert_eq!(target.path_end(), Some(PathEnd::SelfTest));
}

#[test]
fn random_answers_never_panic_and_never_end_a_request_that_was_not_sent() {
    let mut said = 0;
    for seed in 0.. {
        if said > 20_000 {
            break;
        }
        let mut random = Random::new(seed);
        let features = [Features::WRITE_WITH_IMM, Features::default()][random.index(2)];
        let mut target = RawTarget::tested(keyed(features));
        let commands: Vec<_> = (0..4u16).map(|tag| target.request(IoOp::Read, tag)).collect();
        let mut answered = 0;
        for _ in 0..50 {
            let command = &commands[random.index(4)];
            let mut bytes =
                ResponseCapsule::new(command.tag, command.sequence, Status::Ok).to_wire();
            if random.chance(900) {
                bytes[random.index(16)] ^= 1 << random.below(8);
            }
            if random.chance(300) {
                let imm = Immediate::from_bits(u32::try_from(random.below(1 << 20)).unwrap());
                target.write_with_imm(command.buffer.unwrap(), &bytes, imm);
            } else {
                let len = if random.chance(950) { 16 } else { 1 + random.index(16) };
                target.send(&bytes[..len]);
            }
            said += 1;
            target.steps(3);
            if target.engine.take_ended().is_some() {
                break;
            }
            answered = target.outcomes.len();
        }
        answered = answered.max(target.outcomes.len());
        assert_eq!(target.engine.outstanding() + answered, 4, "seed {seed}");
        let mut tags: Vec<u16> = target.outcomes.iter().map(|(tag, _)| tag.0).collect();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), target.outcomes.len(), "seed {seed}: a tag was answered twice");
    }
}
