//! The engine of the initiator, from a hostile target: unexpected answers, immediates, writes to
//! lent memory, ends. Each request ends at most once.

use std::collections::BTreeSet;

use rblk_initiator::engine::io::{Io, IoOp};
use rblk_protocol::limits::RESPONSE_BYTES;
use rblk_protocol::{
    BlockSize, CommandCapsule, Features, Immediate, KeyedDescriptor, ResponseCapsule, Sequence,
    Status, Tag,
};
use rblk_rig::inprocess::QueueOptions;
use rblk_tests::raw::RawTarget;

use crate::Input;

const DEPTH: u16 = 8;
const STEPS: u32 = 64;

/// Byte 0: the features, and whether the self-test was passed. Then the acts of the target.
pub fn run(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let kind = input.u8();
    let features = Features(u32::from(kind & 0xd)).possible();
    let lanes = if kind & 0x20 != 0 { 2 } else { 1 };
    let options = QueueOptions {
        depth: DEPTH,
        io_max_bytes: 4096,
        in_capsule_bytes: if kind & 0x40 != 0 { 512 } else { 0 },
        features,
        reads_out: 2,
        lanes,
    };
    let is_tested = kind & 0x10 == 0;
    let mut target = if is_tested { RawTarget::tested(options) } else { RawTarget::new(options) };
    let mut waiting = BTreeSet::new();
    let mut seen: Vec<CommandCapsule> = Vec::new();
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        act(&mut target, &mut input, &mut waiting, &seen);
        target.steps(1 + u32::from(input.below(4)));
        seen.extend(target.messages().into_iter().flatten());
        for (tag, result) in target.outcomes.drain(..) {
            assert!(waiting.remove(&tag), "{tag:?} ended and nobody waits for it");
            assert!((-4096..=4096).contains(&result), "{tag:?} ended with {result}");
        }
        if target.engine.take_ended().is_some() {
            assert!(target.outcomes.is_empty(), "a path that ended ends no request");
            break;
        }
    }
    !seen.is_empty()
}

fn act(
    target: &mut RawTarget,
    input: &mut Input<'_>,
    waiting: &mut BTreeSet<Tag>,
    seen: &[CommandCapsule],
) {
    match input.below(8) {
        0 | 1 => submit(target, input, waiting),
        2 => target.send(input.bytes(RESPONSE_BYTES * 17)),
        3 => {
            let imm = Immediate::from_bits(input.u32());
            let to = buffer_of(target, input, seen);
            target.write_with_imm(to, input.bytes(64), imm);
        }
        4 => {
            let to = buffer_of(target, input, seen);
            target.write(to, input.bytes(64));
        }
        5 if input.flag() => target.switch_lane(),
        5 => {
            // A list of answers.
            let count = 1 + input.below(20);
            let answers: Vec<u8> = (0..count).flat_map(|_| answer(input, seen).to_wire()).collect();
            target.send(&answers);
        }
        // An honest answer, or nearly.
        6 => {
            let answer = answer(input, seen);
            target.send(&answer.to_wire());
        }
        _ => {
            let Some(command) = input.pick(seen) else { return };
            let Some(buffer) = command.buffer else { return };
            let length = (buffer.length as usize).min(4096);
            let imm = Immediate::new(command.tag, command.sequence);
            target.write_with_imm(buffer, &vec![0xab; length], imm);
        }
    }
}

fn submit(target: &mut RawTarget, input: &mut Input<'_>, waiting: &mut BTreeSet<Tag>) {
    let ops = [IoOp::Read, IoOp::Write, IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes];
    let op = ops[usize::from(input.below(5))];
    let tag = Tag(u16::from(input.below(12)));
    let blocks = if op == IoOp::Flush { 0 } else { 1 + u64::from(input.below(8)) };
    let size = BlockSize::new(512).expect("a size");
    let at = if op == IoOp::Flush { 0 } else { u64::from(input.u8()) * 512 };
    let io = Io::new(op, at, blocks * 512, size).expect("whole blocks");
    let is_taken = target.engine.submit(tag, io).is_ok();
    assert_eq!(is_taken, tag.0 < DEPTH && !waiting.contains(&tag), "{tag:?}");
    if is_taken {
        waiting.insert(tag);
    }
}

fn buffer_of(
    target: &RawTarget,
    input: &mut Input<'_>,
    seen: &[CommandCapsule],
) -> KeyedDescriptor {
    let own = input.pick(seen).and_then(|command| command.buffer).unwrap_or(target.scratch);
    let shift = u64::from(input.below(8)) << 9;
    let rkey = own.rkey ^ u32::from(input.u8() & 3);
    KeyedDescriptor { address: own.address.wrapping_add(shift), rkey, ..own }
}

fn answer(input: &mut Input<'_>, seen: &[CommandCapsule]) -> ResponseCapsule {
    let command = input.pick(seen);
    let (tag, sequence) = command.map_or((Tag(0), Sequence(0)), |c| (c.tag, c.sequence));
    let wrong = u32::from(input.below(16) == 1);
    let tag = if input.below(16) == 1 { Tag(u16::from(input.below(16))) } else { tag };
    let status = input.pick(&Status::ALL).unwrap_or(Status::Ok);
    ResponseCapsule::new(tag, Sequence(sequence.0.wrapping_add(wrong)), status)
}

/// Requests and answers, with and without lists.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for kind in [0, 1, 4, 5, 13, 0x25, 0x45, 0x10] {
        let mut seed = vec![kind];
        for op in 0..5 {
            // A request, then an honest answer to one of the requests so far.
            seed.extend([0, op, op, 1, 8, 2, 6, op, 0, 0, 0, 3, 7, op, 1]);
        }
        seeds.push(seed);
    }
    seeds
}
