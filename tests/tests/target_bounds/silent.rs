//! Peers that take nothing and give nothing are ended; slow ones, and those that want nothing, are
//! not.

use std::time::Duration;

use rblk_fabric::soft::network::End;
use rblk_protocol::Opcode;
use rblk_rig::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_target::identity::SessionIndex;
use rblk_tests::bed::{Bed, MEMORY, STORE, pattern};
use rblk_tests::raw::{Heard, RawPeer};

use super::{SECOND, TICK};

fn slow_clock() -> RigOptions {
    RigOptions { tick: TICK, ..RigOptions::default() }
}

/// Many answers between two that tell of their completion.
fn raw_options() -> QueueOptions {
    QueueOptions { depth: 32, io_max_bytes: 64 << 10, ..QueueOptions::default() }
}

/// A bed with an honest queue, and a session with a connection that is driven by hand.
fn suspected() -> (Bed, QueueId, SessionIndex, RawPeer) {
    let mut bed = Bed::new(&slow_clock());
    // It has no memory of the arena.
    let bystander = bed.queue(MEMORY, raw_options());
    let suspect = bed.rig.begin_session();
    bed.open_all(suspect);
    let peer = RawPeer::tested(&mut bed, suspect, STORE, raw_options());
    (bed, bystander, suspect, peer)
}

fn ask_all(peer: &mut RawPeer, opcode: Opcode) {
    for tag in 0..32 {
        let command = peer.transfer(opcode, tag, u64::from(tag) * 128, 128);
        peer.send(&command.to_wire());
    }
}

fn held(bed: &mut Bed) -> usize {
    bed.rig.group_mut().shard().slots().held().count()
}

#[test]
fn a_peer_that_neither_takes_nor_gives_is_ended() {
    for opcode in [Opcode::Read, Opcode::Write] {
        let (mut bed, bystander, suspect, mut peer) = suspected();
        ask_all(&mut peer, opcode);
        // The other end does not receive from now on.
        let stalls = if opcode == Opcode::Read { End::B } else { End::A };
        bed.rig.step();
        peer.wire.stall(stalls, true);
        let begun = bed.rig.elapsed();
        for _ in 0..19 * SECOND / 10 {
            for _ in 0..10 {
                bed.rig.step();
            }
            // Others are served.
            let data = bed.read(bystander, 0, 4096);
            assert_eq!(data.len(), 4096);
            if bed.rig.elapsed() - begun > Duration::from_secs(19) {
                break;
            }
        }
        assert_eq!(bed.rig.connections(suspect), 1, "{opcode:?}: ended too soon");
        assert!(held(&mut bed) > 0, "{opcode:?}: nothing was lent");
        let lost = bed.rig.target_counts().lost_connections;
        let gone = bed.rig.run(10 * SECOND, |rig| rig.connections(suspect) == 0);
        assert!(gone.is_ok(), "{opcode:?}: {:?}", bed.rig);
        let took = bed.rig.elapsed() - begun;
        assert!((20..=23).contains(&took.as_secs()), "{opcode:?}: after {took:?}");
        assert_eq!(bed.rig.target_counts().lost_connections, lost + 1);
        // What it had is everybody's.
        bed.rig.run(100, |rig| rig.group_mut().shard().slots().held().next().is_none()).unwrap();
        bed.write(bystander, 4096, &pattern(1, 16384));
        assert!(bed.read(bystander, 4096, 16384) == pattern(1, 16384));
        assert_eq!(bed.rig.take_path_ends(bystander), []);
        bed.assert_arena_is_whole(&slow_clock());
    }
}

#[test]
fn a_slow_peer_that_moves_is_not_ended() {
    for opcode in [Opcode::Read, Opcode::Write] {
        let (mut bed, _, suspect, mut peer) = suspected();
        ask_all(&mut peer, opcode);
        let mut answered = 0;
        for round in 0..8 {
            // Deaf for long, but not for too long.
            bed.rig.step();
            peer.wire.stall(End::A, true);
            peer.wire.stall(End::B, true);
            for _ in 0..15 * SECOND {
                bed.rig.step();
            }
            assert!(held(&mut bed) > 0, "{opcode:?}, {round}: nothing waits for it");
            assert_eq!(bed.rig.connections(suspect), 1, "{opcode:?}, {round}");
            peer.wire.stall(End::A, false);
            peer.wire.stall(End::B, false);
            for _ in 0..50 {
                bed.rig.step();
                let heard = peer.listen();
                assert!(!heard.iter().any(|heard| matches!(heard, Heard::End(_))), "{round}");
                answered += heard.len();
                if answered >= 32 * (round + 1) {
                    ask_all(&mut peer, opcode);
                    break;
                }
            }
        }
        assert!(answered >= 32 * 4, "{opcode:?}: it was deaf: {answered}");
        assert_eq!(bed.rig.take_gone().len(), 0);
    }
}

#[test]
fn a_peer_that_wants_nothing_is_not_ended() {
    let (mut bed, bystander, suspect, mut peer) = suspected();
    // Answers that do not tell of their completion are on their way, as far as the target knows.
    let command = peer.transfer(Opcode::Read, 1, 0, 128);
    peer.send(&command.to_wire());
    assert!(!matches!(peer.hear(&mut bed), Heard::End(_)));
    assert!(held(&mut bed) > 0, "the answer told of its completion");
    for _ in 0..100 * SECOND {
        bed.rig.step();
    }
    assert_eq!(bed.rig.connections(suspect), 1);
    assert_eq!(bed.rig.take_path_ends(bystander), []);
    // A while without anything on its way does not count.
    ask_all(&mut peer, Opcode::Write);
    peer.wire.stall(End::A, true);
    for _ in 0..15 * SECOND {
        bed.rig.step();
    }
    assert_eq!(bed.rig.connections(suspect), 1);
    peer.wire.stall(End::A, false);
    let mut answered = 0;
    let all = bed.rig.run(10 * SECOND, |_| {
        answered += peer.listen().iter().filter(|h| !matches!(h, Heard::End(_))).count();
        answered == 32
    });
    assert!(all.is_ok(), "{answered} answers");
}
