//! Hosts that try to reach memory of the target or of others, or that hold lent memory too long.

use std::time::Duration;

use rblk_fabric::soft::network::{Conditions, End};
use rblk_protocol::{BlockCount, CommandCapsule, Features, KeyedDescriptor, Opcode, Tag};
use rblk_rig::inprocess::{QueueOptions, RigOptions};
use rblk_rig::seed::Random;
use rblk_tests::bed::{FROZEN, FROZEN_BYTES, MEMORY, PATIENCE, STORE, pattern};
use rblk_tests::raw::{Heard, LENT_BYTES, RawPeer};

use super::{DEPTH, assert_unharmed, options, watched};

#[test]
fn a_bad_key_ends_the_connection_that_named_it() {
    let rig =
        RigOptions { arena_bytes: 256 << 10, io_max_bytes: 64 << 10, ..RigOptions::default() };
    let (mut bed, bystander, suspect) = watched(&rig);
    for volume in [STORE, MEMORY] {
        for (opcode, blocks) in [(Opcode::Read, 8), (Opcode::Write, 16), (Opcode::SelfTest, 8)] {
            for (rkey, shift) in [(0xdead_beef, 0u64), (0, 0), (0, LENT_BYTES as u64), (0, 1 << 40)]
            {
                let mut peer = RawPeer::tested(&mut bed, suspect, volume, options());
                let mut command = peer.transfer(opcode, 1, 0, blocks);
                if opcode == Opcode::SelfTest {
                    command.tag = Tag(DEPTH);
                }
                let good = command.buffer.unwrap();
                let rkey = if shift == 0 { rkey } else { good.rkey };
                let address = good.address + shift;
                command.buffer = Some(KeyedDescriptor { address, rkey, ..good });
                peer.send(&command.to_wire());
                assert!(
                    matches!(peer.hear(&mut bed), Heard::End(_)),
                    "{opcode:?} {rkey:x} {shift}"
                );
                bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).unwrap();
            }
        }
    }
    assert_unharmed(&mut bed, bystander);
    bed.rig.new_epoch(bed.session).unwrap();
    bed.assert_arena_is_whole(&rig);
}

#[test]
fn a_peer_reaches_no_memory_of_the_target() {
    let (mut bed, bystander, suspect) = watched(&RigOptions::default());
    let memory = bed.rig.memory(MEMORY).unwrap().address();
    let mut random = Random::new(3);
    for rkey in (0..40).map(|_| u32::try_from(random.below(1 << 32)).unwrap()).chain(0..20) {
        let mut peer = RawPeer::tested(&mut bed, suspect, MEMORY, options());
        peer.write_remote(memory, rkey, &[0xff; 64]);
        assert!(matches!(peer.hear(&mut bed), Heard::End(_)), "rkey {rkey:#x}");
    }
    let queue = bed.queue(MEMORY, options());
    assert!(bed.read(queue, 0, 4096).iter().all(|b| *b == 0));
    assert_unharmed(&mut bed, bystander);
}

#[test]
fn memory_of_an_answer_is_not_given_to_others_before_it_left() {
    // The suspect does not take its data, and reuses the tag as if it had. The memory of the answer
    // must not go to another session meanwhile.
    let rig = RigOptions {
        arena_bytes: 128 << 10,
        io_max_bytes: 64 << 10,
        conditions: Conditions { buffer: 2048, ..Conditions::default() },
        ..RigOptions::default()
    };
    let (mut bed, bystander, suspect) = watched(&rig);
    let secret = bed.queue(FROZEN, options());
    let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options());
    peer.wire.stall(End::B, true);
    let command = peer.transfer(Opcode::Read, 1, 0, 32);
    peer.send(&command.to_wire());
    for _ in 0..50 {
        bed.rig.step();
    }
    let flush = peer.command(Opcode::Flush, 1);
    peer.send(&flush.to_wire());
    for _ in 0..50 {
        bed.rig.step();
    }
    assert!(bed.read(secret, 0, FROZEN_BYTES) == pattern(7, FROZEN_BYTES));
    peer.wire.stall(End::B, false);
    for _ in 0..500 {
        bed.rig.step();
        peer.listen();
    }
    let mut got = vec![0; 16384];
    peer.lent.region().read(0, &mut got);
    assert!(got.iter().all(|b| *b == 0), "it got bytes of another session's volume");
    assert_unharmed(&mut bed, bystander);
}

#[test]
fn self_tests_without_end_harm_only_their_sender() {
    for features in [Features::WRITE_WITH_IMM, Features::default()] {
        let (mut bed, bystander, suspect) = watched(&RigOptions::default());
        let options = QueueOptions { depth: 1, features, ..options() };
        let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options);
        peer.wire.stall(End::B, true);
        for _ in 0..200 {
            let command = peer.self_test();
            peer.send(&command.to_wire());
            bed.rig.step();
        }
        peer.wire.stall(End::B, false);
        for _ in 0..500 {
            bed.rig.step();
            peer.listen();
        }
        assert_unharmed(&mut bed, bystander);
    }
}

#[test]
fn commands_faster_than_answers_are_taken_harm_only_their_sender() {
    for opcode in [Opcode::Read, Opcode::Flush, Opcode::KeepAlive] {
        let rig =
            RigOptions { arena_bytes: 256 << 10, io_max_bytes: 64 << 10, ..RigOptions::default() };
        let (mut bed, bystander, suspect) = watched(&rig);
        let options = QueueOptions { depth: 2, ..options() };
        let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options);
        peer.wire.stall(End::B, true);
        for round in 0..200 {
            let tag = if opcode == Opcode::KeepAlive { 2 } else { round % 2 };
            let mut command = peer.transfer(opcode, tag, 0, 8);
            if opcode != Opcode::Read {
                command = CommandCapsule { buffer: None, count: BlockCount(0), ..command };
            }
            peer.send(&command.to_wire());
            for _ in 0..4 {
                bed.rig.step();
            }
        }
        assert_unharmed(&mut bed, bystander);
        peer.wire.cut();
        bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).unwrap();
        bed.rig.new_epoch(bed.session).unwrap();
        bed.assert_arena_is_whole(&rig);
    }
}

#[test]
fn a_peer_that_serves_no_reads_does_not_starve_others_of_memory() {
    let rig =
        RigOptions { arena_bytes: 256 << 10, io_max_bytes: 64 << 10, ..RigOptions::default() };
    let (mut bed, bystander, suspect) = watched(&rig);
    let options = QueueOptions { depth: 16, reads_out: 0, ..options() };
    let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options);
    for tag in 0..16 {
        let command = peer.transfer(Opcode::Write, tag, 0, 128);
        peer.send(&command.to_wire());
    }
    for _ in 0..100 {
        bed.rig.step();
    }
    assert_unharmed(&mut bed, bystander);
}

#[test]
fn a_peer_that_talks_but_gives_no_data_is_ended() {
    let (mut bed, bystander, suspect) = watched(&RigOptions::default());
    let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options());
    let write = peer.transfer(Opcode::Write, 0, 0, 16);
    peer.send(&write.to_wire());
    bed.rig.take_gone();
    // The suspect never polls, so its device serves no READ; but it sends KEEP_ALIVEs.
    let begun = bed.rig.now();
    let mut beats = 0;
    while bed.rig.take_gone().is_empty() {
        let waited = bed.rig.now() - begun;
        assert!(waited < Duration::from_secs(30), "after {beats} beats");
        if waited > Duration::from_secs(beats) && beats < 19 {
            beats += 1;
            let tag = Tag(DEPTH);
            let beat = peer.command(Opcode::KeepAlive, tag.0);
            peer.send(&beat.to_wire());
        }
        bed.rig.skip(50);
        bed.rig.step();
    }
    let waited = bed.rig.now() - begun;
    println!("left after {waited:?} and {beats} beats");
    assert!(beats >= 5 && waited > Duration::from_secs(5), "{waited:?}, {beats} beats");
    assert_unharmed(&mut bed, bystander);
}
