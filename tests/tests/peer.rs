//! Peers that break the rules: it ends their own connection, or gets them a status, and nothing else.

use std::time::Duration;

use rblk_bench::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_bench::seed::Random;
use rblk_fabric::soft::memory::{Conditions, End};
use rblk_initiator::engine::PathEnd;
use rblk_initiator::io::IoOp;
use rblk_protocol::limits::COMMAND_BYTES;
use rblk_protocol::{
    BlockCount, CommandCapsule, ConnectionKind, Epoch, Features, Immediate, KeyedDescriptor, Lba,
    Opcode, ResponseCapsule, Sequence, Status, Tag, VolumeHandle, self_test_pattern,
};
use rblk_target::connection::SessionSlot;
use rblk_tests::bed::{Bed, FROZEN, FROZEN_BYTES, MEMORY, PATIENCE, STORE, pattern};
use rblk_tests::raw::{Heard, LENT_BYTES, RawPeer, RawTarget};

const DEPTH: u16 = 8;

fn options() -> QueueOptions {
    QueueOptions { depth: DEPTH, io_max_bytes: 64 << 10, ..QueueOptions::default() }
}

fn by_send() -> QueueOptions {
    QueueOptions { features: Features::default(), ..options() }
}

/// A bed with a well-behaved queue of its own session, and a session for the one to be watched.
fn watched(rig: &RigOptions) -> (Bed, QueueId, SessionSlot) {
    let mut bed = Bed::new(rig);
    let bystander = bed.queue(STORE, options());
    let suspect = bed.rig.begin_session();
    bed.open_all(suspect);
    (bed, bystander, suspect)
}

/// The honest one is served as if nothing had happened.
fn assert_unharmed(bed: &mut Bed, bystander: QueueId) {
    bed.write(bystander, 4096, &pattern(21, 16384));
    assert!(bed.read(bystander, 4096, 16384) == pattern(21, 16384));
    assert_eq!(bed.rig.take_path_ends(bystander), []);
}

fn ask(bed: &mut Bed, peer: &mut RawPeer, command: &CommandCapsule) -> Heard {
    peer.send(&command.to_wire());
    peer.hear(bed)
}

fn status_of(heard: Heard) -> Status {
    match heard {
        Heard::Response(response) => response.status,
        other => panic!("no response: {other:?}"),
    }
}

#[test]
fn whoever_breaks_a_rule_of_the_wire_loses_that_connection() {
    type Spoil = fn(&mut RawPeer) -> Vec<u8>;
    fn spoilt(peer: &mut RawPeer, at: usize, value: u8) -> Vec<u8> {
        let mut bytes = peer.transfer(Opcode::Read, 1, 0, 8).to_wire().to_vec();
        bytes[at] = value;
        bytes
    }
    let cases: &[(&str, Spoil)] = &[
        ("opcode 0", |p| spoilt(p, 0, 0)),
        ("unknown opcode", |p| spoilt(p, 0, 0x7f)),
        ("unknown flag", |p| spoilt(p, 1, 0x80)),
        ("tag beyond the depth", |p| spoilt(p, 2, 9)),
        ("tag far beyond the depth", |p| spoilt(p, 3, 0xff)),
        ("digest without its flag", |p| spoilt(p, 32, 1)),
        ("reserved byte", |p| spoilt(p, 40, 1)),
        ("last reserved byte", |p| spoilt(p, 47, 1)),
        ("in-capsule data that is not there", |p| spoilt(p, 36, 16)),
        ("in-capsule data above the protocol's limit", |p| spoilt(p, 39, 1)),
        ("data that was not announced", |p| {
            let mut bytes = p.transfer(Opcode::Read, 1, 0, 8).to_wire().to_vec();
            bytes.push(0);
            bytes
        }),
        ("one byte", |_| vec![1]),
        ("63 bytes", |p| p.transfer(Opcode::Read, 1, 0, 8).to_wire()[..63].to_vec()),
        ("a write with data in both places", |p| {
            let mut command = p.transfer(Opcode::Write, 1, 0, 1);
            command.in_capsule_bytes = 512;
            [command.to_wire().as_slice(), &[0; 512]].concat()
        }),
        ("a write without data", |p| {
            let mut command = p.transfer(Opcode::Write, 1, 0, 1);
            command.buffer = None;
            command.to_wire().to_vec()
        }),
        ("in-capsule data longer than agreed, in a message that fits", |p| {
            let mut command = p.transfer(Opcode::Write, 1, 0, 8);
            command.buffer = None;
            command.in_capsule_bytes = 4097;
            [command.to_wire().as_slice(), &[0; 4097]].concat()
        }),
        ("a message longer than any RECV", |p| {
            let mut command = p.transfer(Opcode::Write, 1, 0, 32);
            command.buffer = None;
            command.in_capsule_bytes = 16384;
            [command.to_wire().as_slice(), &[0; 16384]].concat()
        }),
        ("a descriptor that wraps around", |p| {
            let mut command = p.transfer(Opcode::Read, 1, 0, 8);
            command.buffer =
                Some(KeyedDescriptor { address: u64::MAX - 10, length: 4096, rkey: 1 });
            command.to_wire().to_vec()
        }),
        ("a descriptor of no length with a key", |p| {
            let mut command = p.transfer(Opcode::Flush, 1, 0, 1);
            command.buffer = Some(KeyedDescriptor { address: 0, length: 0, rkey: 1 });
            command.to_wire().to_vec()
        }),
    ];
    let (mut bed, bystander, suspect) = watched(&RigOptions::default());
    for (what, spoil) in cases {
        let before = bed.rig.target_counts();
        let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options());
        let mut other = RawPeer::tested(&mut bed, suspect, STORE, by_send());
        let bytes = spoil(&mut peer);
        peer.send(&bytes);
        assert!(matches!(peer.hear(&mut bed), Heard::End(_)), "{what}");
        bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 1).expect(what);
        let command = other.transfer(Opcode::Read, 1, 0, 8);
        assert_eq!(status_of(ask(&mut bed, &mut other, &command)), Status::Ok, "{what}");
        assert_unharmed(&mut bed, bystander);
        let after = bed.rig.target_counts();
        let ends = |c: &rblk_target::stats::StatsSnapshot| c.protocol_errors + c.lost_connections;
        assert_eq!(ends(&after) - ends(&before), 1, "{what}");
        drop(other);
        bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).expect(what);
    }
}

#[test]
fn a_tag_in_use_is_not_to_be_used_again() {
    let (mut bed, bystander, suspect) = watched(&RigOptions::default());
    let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options());
    let slow = rblk_bench::ram_store::StoreConditions {
        delay_min: 50,
        delay_max: 50,
        ..Default::default()
    };
    bed.rig.store_mut().set_conditions(slow);
    for _ in 0..2 {
        let command = peer.transfer(Opcode::Read, 3, 0, 8);
        peer.send(&command.to_wire());
    }
    assert!(matches!(peer.hear(&mut bed), Heard::End(_)));
    assert_unharmed(&mut bed, bystander);
    bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).unwrap();
}

#[test]
fn commands_out_of_place_get_a_status() {
    let (mut bed, bystander, suspect) = watched(&RigOptions::default());
    let kind = ConnectionKind::Io { queue: 0 };
    let mut peer = RawPeer::new(&mut bed, suspect, kind, STORE, by_send());
    for opcode in [Opcode::Read, Opcode::Flush, Opcode::Login] {
        let command = peer.transfer(opcode, 1, 0, 8);
        let heard = ask(&mut bed, &mut peer, &command);
        assert_eq!(status_of(heard), Status::NotReady, "{opcode:?} before the self-test");
    }
    let test = CommandCapsule { tag: Tag(0), ..peer.self_test() };
    assert_eq!(
        status_of(ask(&mut bed, &mut peer, &test)),
        Status::InvalidOpcode,
        "its tag is fixed"
    );
    let bare = CommandCapsule { buffer: None, ..peer.self_test() };
    assert_eq!(status_of(ask(&mut bed, &mut peer, &bare)), Status::BadLength);
    let short = CommandCapsule { buffer: Some(peer.descriptor(0, 63)), ..peer.self_test() };
    assert_eq!(status_of(ask(&mut bed, &mut peer, &short)), Status::BadLength);
    let test = peer.self_test();
    assert_eq!(status_of(ask(&mut bed, &mut peer, &test)), Status::Ok);
    for opcode in Opcode::ALL.into_iter().filter(|o| o.is_admin() && *o != Opcode::KeepAlive) {
        let command = peer.command(opcode, 2);
        let heard = ask(&mut bed, &mut peer, &command);
        assert_eq!(status_of(heard), Status::InvalidOpcode, "{opcode:?} on an I/O queue");
    }
    for epoch in [0, 2, u32::MAX] {
        let command =
            CommandCapsule { epoch: Epoch(epoch), ..peer.transfer(Opcode::Read, 1, 0, 8) };
        assert_eq!(status_of(ask(&mut bed, &mut peer, &command)), Status::Fenced, "epoch {epoch}");
    }
    for handle in [0, 5, 65536, u32::MAX] {
        let command =
            CommandCapsule { volume: VolumeHandle(handle), ..peer.transfer(Opcode::Read, 1, 0, 8) };
        assert_eq!(status_of(ask(&mut bed, &mut peer, &command)), Status::NoSuchVolume, "{handle}");
    }
    let lies: [(&str, CommandCapsule, Status); 8] = [
        (
            "digest",
            {
                let mut c = peer.transfer(Opcode::Read, 1, 0, 8);
                c.flags.digest = true;
                c
            },
            Status::NotSupported,
        ),
        (
            "fua read",
            {
                let mut c = peer.transfer(Opcode::Read, 1, 0, 8);
                c.flags.fua = true;
                c
            },
            Status::InvalidField,
        ),
        ("longer than agreed", peer.transfer(Opcode::Read, 1, 0, 129), Status::BadLength),
        (
            "less memory than blocks",
            {
                let buffer = Some(peer.descriptor(0, 512));
                CommandCapsule { buffer, ..peer.transfer(Opcode::Read, 1, 0, 8) }
            },
            Status::BadLength,
        ),
        (
            "no memory",
            { CommandCapsule { buffer: None, ..peer.transfer(Opcode::Read, 1, 0, 8) } },
            Status::BadLength,
        ),
        (
            "no blocks",
            { CommandCapsule { count: BlockCount(0), ..peer.transfer(Opcode::Read, 1, 0, 8) } },
            Status::InvalidField,
        ),
        (
            "beyond the end",
            { CommandCapsule { lba: Lba(u64::MAX - 7), ..peer.transfer(Opcode::Write, 1, 0, 8) } },
            Status::OutOfRange,
        ),
        ("discard with data", peer.transfer(Opcode::Discard, 1, 0, 8), Status::BadLength),
    ];
    for (what, command, status) in lies {
        assert_eq!(status_of(ask(&mut bed, &mut peer, &command)), status, "{what}");
    }
    let good = peer.transfer(Opcode::Read, 1, 0, 8);
    assert_eq!(status_of(ask(&mut bed, &mut peer, &good)), Status::Ok);
    assert_unharmed(&mut bed, bystander);
}

#[test]
fn an_admin_connection_serves_no_blocks() {
    let (mut bed, bystander, suspect) = watched(&RigOptions::default());
    let options = QueueOptions { depth: 16, ..by_send() };
    let mut peer = RawPeer::new(&mut bed, suspect, ConnectionKind::Admin, STORE, options);
    for opcode in [Opcode::Read, Opcode::Write, Opcode::Flush, Opcode::Discard, Opcode::SelfTest] {
        let command = peer.transfer(opcode, 1, 0, 8);
        assert_eq!(
            status_of(ask(&mut bed, &mut peer, &command)),
            Status::InvalidOpcode,
            "{opcode:?}"
        );
    }
    let command = peer.command(Opcode::KeepAlive, 16);
    assert_eq!(status_of(ask(&mut bed, &mut peer, &command)), Status::Ok);
    // A reply longer than the room for it, and one that fits.
    for (room, status) in [(8, Status::BadLength), (100, Status::Ok)] {
        let buffer = Some(peer.descriptor(0, room));
        let command = CommandCapsule { buffer, ..peer.command(Opcode::ListVolumes, 2) };
        peer.send(&command.to_wire());
        let mut asked = Vec::new();
        bed.rig
            .run(PATIENCE, |rig| {
                asked.extend(rig.take_admin());
                !asked.is_empty()
            })
            .unwrap();
        bed.rig.reply(&asked[0], Status::Ok, 9, vec![7; 100]);
        // Said twice by mistake: the second finds nobody.
        bed.rig.reply(&asked[0], Status::Internal, 0, Vec::new());
        assert_eq!(status_of(peer.hear(&mut bed)), status);
    }
    // Control's answer to a connection that died meanwhile.
    let command = peer.command(Opcode::AsyncEvent, 3);
    peer.send(&command.to_wire());
    let mut asked = Vec::new();
    bed.rig
        .run(PATIENCE, |rig| {
            asked.extend(rig.take_admin());
            !asked.is_empty()
        })
        .unwrap();
    peer.wire.cut();
    assert!(matches!(peer.hear(&mut bed), Heard::End(_)));
    // A parked command does not keep it; the answer that comes after all finds nobody.
    bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).unwrap();
    bed.rig.reply(&asked[0], Status::Ok, 1, vec![1; 16]);
    for _ in 0..100 {
        bed.rig.step();
    }
    assert_unharmed(&mut bed, bystander);
}

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
    // The suspect does not take its data, and uses the tag again as if it had. What the answer is sent from
    // must not become another session's memory meanwhile.
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

/// Mostly good capsules with something wrong in some of them.
fn doubtful(random: &mut Random, peer: &mut RawPeer, depth: u16) -> Vec<u8> {
    let opcode = Opcode::ALL[random.index(Opcode::ALL.len())];
    let tag = u16::try_from(random.below(u64::from(depth) + 1)).unwrap();
    let blocks = u32::try_from(random.within(1, 64)).unwrap();
    let mut command = peer.transfer(opcode, tag, random.below(8192), blocks);
    let mut data = Vec::new();
    match random.below(8) {
        0 => command.buffer = None,
        1 => command = peer.self_test(),
        2 | 3 => {
            command.buffer = None;
            command.count = BlockCount(u64::from(blocks.min(8)));
            command.in_capsule_bytes = blocks.min(8) * 512;
            data = pattern(random.bits(), command.in_capsule_bytes as usize);
        }
        4 => command.epoch = Epoch(u32::try_from(random.below(3)).unwrap()),
        _ => {}
    }
    let mut bytes = command.to_wire().to_vec();
    bytes.extend(data);
    if random.chance(60) {
        let at = random.index(COMMAND_BYTES);
        bytes[at] ^= 1 << random.below(8);
    }
    if random.chance(10) {
        bytes.truncate(1 + random.index(bytes.len()));
    }
    bytes
}

#[test]
fn a_hundred_thousand_doubtful_capsules_harm_nobody_else() {
    let rig =
        RigOptions { arena_bytes: 512 << 10, io_max_bytes: 64 << 10, ..RigOptions::default() };
    let (mut bed, bystander, suspect) = watched(&rig);
    // Its writes must not reach what the honest one checks.
    bed.rig.close(suspect, STORE, Status::NoSuchVolume);
    let mut said = 0;
    for seed in 0.. {
        if said >= 100_000 {
            break;
        }
        let mut random = Random::new(seed);
        let volume = [MEMORY, FROZEN][random.index(2)];
        let features = [Features::WRITE_WITH_IMM, Features::default()][random.index(2)];
        let lists = random.chance(500);
        let features = if lists { features.or(Features::CAPSULE_LISTS) } else { features };
        let depth = u16::try_from(random.within(1, 32)).unwrap();
        let options = QueueOptions { depth, features, reads_out: 2, ..options() };
        let mut peer = RawPeer::tested(&mut bed, suspect, volume, options);
        for _ in 0..random.within(1, 60) {
            for _ in 0..random.within(1, u64::from(depth)) {
                let mut bytes = doubtful(&mut random, &mut peer, depth);
                said += 1;
                // Some have data, and then it is in the middle.
                while lists && random.chance(600) && bytes.len() < 15 << 10 {
                    bytes.extend(doubtful(&mut random, &mut peer, depth));
                    said += 1;
                }
                peer.send(&bytes);
            }
            bed.rig.step();
            bed.rig.step();
            peer.listen();
            if peer.is_dead() {
                break;
            }
        }
        let reached = bed.rig.take_admin();
        assert!(reached.is_empty(), "seed {seed}: an I/O connection reached control: {reached:?}");
        if seed % 64 == 0 {
            assert_unharmed(&mut bed, bystander);
        }
    }
    bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).unwrap();
    assert_unharmed(&mut bed, bystander);
    bed.rig.new_epoch(bed.session).unwrap();
    bed.assert_arena_is_whole(&rig);
}

fn keyed(features: Features) -> QueueOptions {
    QueueOptions { in_capsule_bytes: 0, features, ..options() }
}

#[test]
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
        ("tag of nobody", Features::default(), IoOp::Write, |t, c| {
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

#[test]
fn random_answers_never_panic_and_never_answer_what_was_not_asked() {
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

#[test]
fn a_peer_that_talks_and_gives_no_data_is_left() {
    let (mut bed, bystander, suspect) = watched(&RigOptions::default());
    let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options());
    let write = peer.transfer(Opcode::Write, 0, 0, 16);
    peer.send(&write.to_wire());
    bed.rig.take_gone();
    // It never looks at what comes in, so that its device serves no READ; but it says that it lives.
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
    assert!(beats >= 10 && waited > Duration::from_secs(15), "{waited:?}, {beats} beats");
    assert_unharmed(&mut bed, bystander);
}
