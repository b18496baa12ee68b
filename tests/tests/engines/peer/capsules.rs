//! Wrong, misplaced or doubtful capsules of a host: the connection ends, or the command gets a
//! status.

use rblk_protocol::limits::COMMAND_BYTES;
use rblk_protocol::{
    BlockCount, CommandCapsule, ConnectionKind, Epoch, Features, KeyedDescriptor, Lba, Opcode,
    Status, Tag, VolumeHandle,
};
use rblk_rig::inprocess::{AdminCommand, QueueOptions, RigOptions};
use rblk_rig::seed::Random;
use rblk_tests::bed::{Bed, FROZEN, MEMORY, PATIENCE, STORE, pattern};
use rblk_tests::raw::{Heard, RawPeer};

use super::{ask, assert_unharmed, by_send, options, status_of, watched};

#[test]
#[expect(clippy::too_many_lines, reason = "one case after another")]
fn a_broken_rule_of_the_wire_ends_the_connection() {
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
        let ends = |c: &rblk_operate::target::group_counts::StatsSnapshot| {
            c.protocol_errors + c.lost_connections
        };
        assert_eq!(ends(&after) - ends(&before), 1, "{what}");
        drop(other);
        bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).expect(what);
    }
}

#[test]
fn a_tag_in_use_must_not_be_used_again() {
    let (mut bed, bystander, suspect) = watched(&RigOptions::default());
    let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options());
    let slow =
        rblk_rig::ram_store::StoreConditions { delay_min: 50, delay_max: 50, ..Default::default() };
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
#[expect(clippy::too_many_lines, reason = "one case after another")]
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

/// The admin commands that reach control, at least one.
fn asked_of_control(bed: &mut Bed) -> Vec<AdminCommand> {
    let mut asked = Vec::new();
    bed.rig
        .run(PATIENCE, |rig| {
            asked.extend(rig.take_admin());
            !asked.is_empty()
        })
        .unwrap();
    asked
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
    // A reply longer than its buffer, and one that fits.
    for (room, status) in [(8, Status::BadLength), (100, Status::Ok)] {
        let buffer = Some(peer.descriptor(0, room));
        let command = CommandCapsule { buffer, ..peer.command(Opcode::ListVolumes, 2) };
        peer.send(&command.to_wire());
        let asked = asked_of_control(&mut bed);
        bed.rig.reply(&asked[0], Status::Ok, 9, vec![7; 100]);
        // Sent twice by mistake: the second reply finds no request.
        bed.rig.reply(&asked[0], Status::Internal, 0, Vec::new());
        assert_eq!(status_of(peer.hear(&mut bed)), status);
    }
    // Control's answer to a connection that has died meanwhile.
    let command = peer.command(Opcode::AsyncEvent, 3);
    peer.send(&command.to_wire());
    let asked = asked_of_control(&mut bed);
    peer.wire.cut();
    assert!(matches!(peer.hear(&mut bed), Heard::End(_)));
    // A parked command does not keep the connection; the late answer finds no connection.
    bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).unwrap();
    bed.rig.reply(&asked[0], Status::Ok, 1, vec![1; 16]);
    for _ in 0..100 {
        bed.rig.step();
    }
    assert_unharmed(&mut bed, bystander);
}

/// Mostly good capsules, some of them with an error.
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

/// Raises the soft limit on open files to the hard limit: every connection has a descriptor, and
/// the usual soft limit of 1024 is too low.
fn may_open_many_files() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
}

#[test]
fn a_hundred_thousand_doubtful_capsules_harm_nobody_else() {
    may_open_many_files();
    let rig =
        RigOptions { arena_bytes: 512 << 10, io_max_bytes: 64 << 10, ..RigOptions::default() };
    let (mut bed, bystander, suspect) = watched(&rig);
    // The suspect's writes must not reach the blocks that the honest host checks.
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
        let data_lists = lists && random.chance(500);
        let features = if data_lists { features.or(Features::DATA_LISTS) } else { features };
        let depth = u16::try_from(random.within(1, 32)).unwrap();
        let options = QueueOptions { depth, features, reads_out: 2, ..options() };
        let mut peer = RawPeer::tested(&mut bed, suspect, volume, options);
        for _ in 0..random.within(1, 60) {
            for _ in 0..random.within(1, u64::from(depth)) {
                let mut bytes = doubtful(&mut random, &mut peer, depth);
                said += 1;
                // Some have data, in the middle of the commands or in its right place.
                let places = data_lists && random.chance(700);
                let mut data = Vec::new();
                if places {
                    data = bytes.split_off(bytes.len().min(COMMAND_BYTES));
                }
                while lists && random.chance(600) && bytes.len() + data.len() < 15 << 10 {
                    let mut more = doubtful(&mut random, &mut peer, depth);
                    if places {
                        data.splice(0..0, more.split_off(more.len().min(COMMAND_BYTES)));
                    }
                    bytes.extend(more);
                    said += 1;
                }
                bytes.extend(data);
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
