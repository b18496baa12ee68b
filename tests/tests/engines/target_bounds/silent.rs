//! Peers that take nothing and give nothing are ended; slow peers, and peers that want nothing, are
//! not.

use std::time::Duration;

use rblk_fabric::soft::network::{Conditions, End};
use rblk_initiator::engine::io::IoOp;
use rblk_protocol::Opcode;
use rblk_rig::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::SessionIndex;
use rblk_tests::bed::{Bed, FROZEN, MEMORY, STORE, pattern};
use rblk_tests::raw::{Heard, RawPeer};

use super::{MIB, MODES, SECOND, TICK};

fn slow_clock() -> RigOptions {
    RigOptions { tick: TICK, ..RigOptions::default() }
}

/// Few signaled answers.
fn raw_options() -> QueueOptions {
    QueueOptions { depth: 32, io_max_bytes: 64 << 10, ..QueueOptions::default() }
}

/// A bed with an honest queue, and a session with a connection driven by hand.
fn suspected() -> (Bed, QueueId, SessionIndex, RawPeer) {
    let mut bed = Bed::new(&slow_clock());
    // A volume in memory uses no slots of the arena.
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
    bed.rig.groups_mut().map(|group| group.shard().slots().held().count()).sum()
}

#[test]
fn a_peer_that_neither_takes_nor_gives_is_ended() {
    for opcode in [Opcode::Read, Opcode::Write] {
        let (mut bed, bystander, suspect, mut peer) = suspected();
        ask_all(&mut peer, opcode);
        // The other end stops receiving.
        let stalls = if opcode == Opcode::Read { End::B } else { End::A };
        bed.rig.step();
        peer.wire.stall(stalls, true);
        let begun = bed.rig.elapsed();
        for _ in 0..4 * SECOND / 10 {
            for _ in 0..10 {
                bed.rig.step();
            }
            // Others are served.
            let data = bed.read(bystander, 0, 4096);
            assert_eq!(data.len(), 4096);
            if bed.rig.elapsed() - begun > Duration::from_secs(4) {
                break;
            }
        }
        assert_eq!(bed.rig.connections(suspect), 1, "{opcode:?}: ended too soon");
        assert!(held(&mut bed) > 0, "{opcode:?}: nothing was lent");
        let lost = bed.rig.target_counts().lost_connections;
        let gone = bed.rig.run(10 * SECOND, |rig| rig.connections(suspect) == 0);
        assert!(gone.is_ok(), "{opcode:?}: {:?}", bed.rig);
        let took = bed.rig.elapsed() - begun;
        assert!((5..=8).contains(&took.as_secs()), "{opcode:?}: after {took:?}");
        assert_eq!(bed.rig.target_counts().lost_connections, lost + 1);
        // Its memory is free for others.
        bed.rig.run(100, |rig| rig.group_mut().shard().slots().held().next().is_none()).unwrap();
        bed.write(bystander, 4096, &pattern(1, 16384));
        assert!(bed.read(bystander, 4096, 16384) == pattern(1, 16384));
        assert_eq!(bed.rig.take_path_ends(bystander), []);
        bed.assert_arena_is_whole(&slow_clock());
    }
}

/// A peer asks for all memory of the target and takes nothing, or gives nothing. It keeps only its
/// share, and other hosts read and write uncached blocks without a delay.
#[test]
fn a_deaf_reader_keeps_its_share() {
    for groups in [1, 2] {
        for cache in MODES {
            for opcode in [Opcode::Read, Opcode::Write] {
                keeps_its_share(groups, cache, opcode);
            }
        }
    }
}

fn keeps_its_share(groups: usize, cache: CacheMode, opcode: Opcode) {
    let what = format!("{groups} groups, {cache:?}, {opcode:?}");
    let options = RigOptions { groups, arena_bytes: 4 * MIB, dirty_max_bytes: MIB, ..slow_clock() };
    let mut bed = Bed::with_cache(&options, cache);
    let options = QueueOptions { depth: 128, io_max_bytes: 256 << 10, ..raw_options() };
    let bystander = bed.queue(FROZEN, options);
    let suspect = bed.rig.begin_session();
    bed.open_all(suspect);
    let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options);
    if opcode == Opcode::Read {
        peer.wire.stall(End::B, true);
    }
    bed.rig.network().set_conditions(Conditions { buffer: 4096, ..Conditions::default() });
    for tag in 0..32 {
        let command = peer.transfer(opcode, tag, u64::from(tag) % 16 * 512, 512);
        peer.send(&command.to_wire());
    }
    if opcode == Opcode::Write {
        // The commands arrive, but no data.
        bed.rig
            .run(SECOND, |rig| rig.groups_mut().any(|g| g.shard().slots().held().count() > 0))
            .unwrap();
        peer.wire.stall(End::A, true);
    }
    for _ in 0..SECOND {
        bed.rig.step();
    }
    bed.rig.network().set_conditions(Conditions::default());
    let kept = held(&mut bed);
    assert!(kept >= 16, "{what}: {kept} slots are held");
    reads_at_once(&mut bed, bystander, &what);
    assert_eq!(bed.rig.connections(suspect), 1, "{what}: it was ended");
    // The peer is ended at last, and its memory is free for others.
    let gone = bed.rig.run(30 * SECOND, |rig| rig.connections(suspect) == 0);
    assert!(gone.is_ok(), "{what}: {:?}", bed.rig);
    for _ in 0..SECOND {
        bed.rig.step();
    }
    // The bystander's last unsignaled answers hold slots.
    assert!(held(&mut bed) < 16 * 16, "{what}: {:?}", bed.rig);
}

/// The queue reads uncached blocks, and reads them again, at full speed.
fn reads_at_once(bed: &mut Bed, queue: QueueId, what: &str) {
    let begun = bed.rig.elapsed();
    for round in 0..32 {
        for again in ["first", "again"] {
            let from = bed.rig.elapsed();
            assert_eq!(bed.read(queue, round * 65536, 65536).len(), 65536);
            let took = bed.rig.elapsed() - from;
            assert!(took < Duration::from_millis(200), "{what}, {round}, {again}: {took:?}");
        }
    }
    let took = bed.rig.elapsed() - begun;
    assert!(took < Duration::from_secs(6), "{what}: all together took {took:?}");
}

/// One host has twice as many sessions as largest requests fit into the memory of the target. Each
/// asks for much and takes nothing, or gives nothing: together they keep the share of one host.
#[test]
fn deaf_sessions_of_one_host_keep_one_share() {
    for groups in [1, 2] {
        for cache in MODES {
            for opcode in [Opcode::Read, Opcode::Write] {
                keep_one_share(groups, cache, opcode);
            }
        }
    }
}

const DEAF_ARENA: usize = 4 * MIB;
const DEAF_IO: usize = 256 << 10;

fn deaf_options() -> QueueOptions {
    QueueOptions { depth: 16, io_max_bytes: 256 << 10, ..raw_options() }
}

/// Sessions of one host, each of which asks for two pieces of the store and takes nothing.
fn deaf_sessions(bed: &mut Bed, opcode: Opcode) -> Vec<(SessionIndex, RawPeer)> {
    let mut deaf = Vec::new();
    for _ in 0..2 * DEAF_ARENA / DEAF_IO {
        let session = bed.rig.begin_session();
        let host = deaf.first().map_or(session, |(first, _)| *first);
        bed.rig.join_host(session, host);
        bed.open_all(session);
        deaf.push((session, RawPeer::tested(bed, session, STORE, deaf_options())));
    }
    bed.rig.network().set_conditions(Conditions { buffer: 4096, ..Conditions::default() });
    for (at, (_, peer)) in (0u64..).zip(&mut deaf) {
        if opcode == Opcode::Read {
            peer.wire.stall(End::B, true);
        }
        for tag in 0..2 {
            let command = peer.transfer(opcode, tag, (2 * at + u64::from(tag)) % 16 * 512, 512);
            peer.send(&command.to_wire());
        }
    }
    if opcode == Opcode::Write {
        // The commands arrive, but no data.
        bed.rig
            .run(SECOND, |rig| rig.groups_mut().any(|g| g.shard().slots().held().count() > 0))
            .unwrap();
        deaf.iter().for_each(|(_, peer)| peer.wire.stall(End::A, true));
    }
    for _ in 0..SECOND {
        bed.rig.step();
    }
    bed.rig.network().set_conditions(Conditions::default());
    deaf
}

fn keep_one_share(groups: usize, cache: CacheMode, opcode: Opcode) {
    let what = format!("{groups} groups, {cache:?}, {opcode:?}");
    let options =
        RigOptions { groups, arena_bytes: DEAF_ARENA, dirty_max_bytes: MIB, ..slow_clock() };
    let mut bed = Bed::with_cache(&options, cache);
    let reader = bed.queue(FROZEN, deaf_options());
    let writer = bed.queue(STORE, deaf_options());
    let deaf = deaf_sessions(&mut bed, opcode);
    let (kept, all) = (held(&mut bed), DEAF_ARENA / 4096);
    assert!(kept >= 16 && kept <= all / 4 + groups * 64, "{what}: {kept} slots of {all} are held");
    reads_at_once(&mut bed, reader, &what);
    for round in 0..8u64 {
        let from = bed.rig.elapsed();
        bed.write(writer, round * 65536, &pattern(round, 65536));
        let took = bed.rig.elapsed() - from;
        // The store may have to finish waiting ops first.
        assert!(took < Duration::from_millis(200), "{what}, {round}: a write took {took:?}");
    }
    let lives = deaf.iter().filter(|(session, _)| bed.rig.connections(*session) > 0).count();
    assert!(lives > 0, "{what}: they were ended before");
    // All are ended at last: a few at a time have their turn, and take nothing.
    bed.rig
        .run(300 * SECOND, |rig| deaf.iter().all(|(session, _)| rig.connections(*session) == 0))
        .unwrap_or_else(|error| panic!("{what}: {error}: {:?}", bed.rig));
}

/// A peer takes a little now and then, so that WRs complete, and holds much memory: it is ended.
#[test]
fn a_peer_that_takes_too_little_is_ended() {
    let mut bed = Bed::new(&slow_clock());
    let options = QueueOptions { depth: 1000, io_max_bytes: 4096, ..raw_options() };
    let slow = bed.queue(STORE, options);
    let wire = bed.rig.wire(slow).expect("a path").clone();
    for tag in 0..1000u16 {
        bed.submit(slow, tag, IoOp::Read, u64::from(tag) * 4096, 4096);
    }
    // The commands arrive.
    bed.rig.step();
    wire.stall(End::B, true);
    bed.rig.network().set_conditions(Conditions { buffer: 4096, ..Conditions::default() });
    let (begun, before) = (bed.rig.elapsed(), bed.rig.target_counts().completions);
    let session = bed.session;
    let ended = (0..30).any(|_| {
        for _ in 0..4 * SECOND {
            bed.rig.step();
        }
        wire.stall(End::B, false);
        for _ in 0..40 {
            bed.rig.step();
        }
        wire.stall(End::B, true);
        bed.rig.connections(session) == 0
    });
    let took = bed.rig.elapsed() - begun;
    assert!(bed.rig.target_counts().completions > before + 4, "nothing was taken");
    assert!(ended && took.as_secs() < 45, "after {took:?}");
}

#[test]
fn a_slow_peer_that_moves_is_not_ended() {
    for opcode in [Opcode::Read, Opcode::Write] {
        let (mut bed, _, suspect, mut peer) = suspected();
        ask_all(&mut peer, opcode);
        let mut answered = 0;
        for round in 0..8 {
            // Deaf for long, but within the limit.
            bed.rig.step();
            peer.wire.stall(End::A, true);
            peer.wire.stall(End::B, true);
            for _ in 0..4 * SECOND {
                bed.rig.step();
            }
            assert!(held(&mut bed) > 0, "{opcode:?}, {round}: nothing waits for it");
            assert_eq!(bed.rig.connections(suspect), 1, "{opcode:?}, {round}");
            peer.wire.stall(End::A, false);
            peer.wire.stall(End::B, false);
            for _ in 0..100 {
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
    // Unsignaled answers are on their way, as far as the target knows.
    let command = peer.transfer(Opcode::Read, 1, 0, 128);
    peer.send(&command.to_wire());
    assert!(!matches!(peer.hear(&mut bed), Heard::End(_)));
    assert!(held(&mut bed) > 0, "the answer told of its completion");
    for _ in 0..100 * SECOND {
        bed.rig.step();
    }
    assert_eq!(bed.rig.connections(suspect), 1);
    assert_eq!(bed.rig.take_path_ends(bystander), []);
    // An idle time does not count.
    ask_all(&mut peer, Opcode::Write);
    peer.wire.stall(End::A, true);
    for _ in 0..4 * SECOND {
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
