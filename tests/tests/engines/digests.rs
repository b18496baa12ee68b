//! Digests: each end detects changes on the way before it uses the data.
//!
//! The ends are driven by hand, so that one of them spoils its messages. To the other end that
//! looks like a fault of the network.

use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::{DigestFailure, PathEnd};
use rblk_operate::mount::queue_counts::QueueCounts;
use rblk_protocol::digest::crc32c;
use rblk_protocol::{
    AccessMode, BlockSize, CommandCapsule, DataDigests, Features, Immediate, KeyedDescriptor,
    Opcode, ReadTrailer, ResponseCapsule, Sequence, Status, Tag,
};
use rblk_rig::inprocess::{QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::RamStore;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::SessionIndex;
use rblk_tests::bed::{Bed, MEMORY, NULL, STORE, VOLUME_BYTES, pattern};
use rblk_tests::raw::{Heard, RawPeer, RawTarget};

const IMM: Features = Features(Features::WRITE_WITH_IMM.0 | Features::DIGEST.0);

fn options(features: Features) -> QueueOptions {
    QueueOptions { depth: 8, io_max_bytes: 1 << 20, features, ..QueueOptions::default() }
}

fn keyed(features: Features) -> QueueOptions {
    QueueOptions { in_capsule_bytes: 0, ..options(features) }
}

/// Data and trailer, as a correct target answers a READ.
fn answer(command: &CommandCapsule, data: &[u8]) -> Vec<u8> {
    let trailer = ReadTrailer { crc: crc32c(data), sequence: command.sequence };
    [data, &trailer.to_wire()].concat()
}

/// Answers a READ with these bytes.
fn give(target: &mut RawTarget, command: &CommandCapsule, bytes: &[u8]) {
    let (to, imm) = (command.buffer.unwrap(), Immediate::new(command.tag, command.sequence));
    target.write_with_imm(to, bytes, imm);
}

fn mismatches(counts: QueueCounts) -> (u64, u64) {
    (counts.digest_mismatches, counts.digest_retries)
}

type Spoil = fn(&CommandCapsule, &mut Vec<u8>);

/// Faults of an answer with the right length.
const SPOILS: &[(&str, Spoil)] = &[
    ("the first bit of the data", |_, bytes| bytes[0] ^= 1),
    ("the last bit of the data", |_, bytes| bytes[511] ^= 0x80),
    ("the CRC", |_, bytes| bytes[513] ^= 4),
    ("the sequence", |_, bytes| bytes[516] ^= 1),
    ("the answer to another command", |command, bytes| {
        let other = CommandCapsule { sequence: Sequence(command.sequence.0 ^ 2), ..*command };
        *bytes = answer(&other, &[9; 512]);
    }),
    ("zeros", |_, bytes| bytes.fill(0)),
];

#[test]
fn a_spoilt_read_is_sent_once_again() {
    for (what, spoil) in SPOILS {
        let mut target = RawTarget::tested(keyed(IMM));
        let data = pattern(3, 512);
        let first = target.request(IoOp::Read, 2);
        assert_eq!(first.buffer.unwrap().length, 512 + 8, "room for the trailer");
        let mut bytes = answer(&first, &data);
        spoil(&first, &mut bytes);
        give(&mut target, &first, &bytes);
        let second = target.next_command();
        assert_eq!((second.tag, second.opcode), (first.tag, Opcode::Read), "{what}");
        assert_eq!(target.outcomes, [], "{what}: it is not answered");
        assert_eq!(mismatches(target.counts()), (1, 1), "{what}");
        give(&mut target, &second, &answer(&second, &data));
        target.steps(20);
        assert_eq!(target.outcomes, [(Tag(2), 512)], "{what}");
        let mut read = vec![0; 512];
        target.buffers.read(2 * keyed(IMM).buffer_stride(), &mut read);
        assert_eq!(read, data, "{what}");
        assert_eq!(target.engine.take_digest_failure(), None);
        // The next request of the tag may be repeated, too.
        let third = target.request(IoOp::Read, 2);
        give(&mut target, &third, &[0; 520]);
        let fourth = target.next_command();
        give(&mut target, &fourth, &answer(&fourth, &data));
        target.steps(20);
        assert_eq!(target.outcomes.len(), 2, "{what}");
        assert_eq!(mismatches(target.counts()), (2, 2), "{what}");
    }
}

#[test]
fn a_read_that_is_spoilt_twice_fails_and_names_the_place() {
    let mut target = RawTarget::tested(keyed(IMM));
    for _ in 0..2 {
        let command = match target.outcomes.is_empty() && target.engine.outstanding() == 0 {
            true => target.request(IoOp::Read, 5),
            false => target.next_command(),
        };
        let mut bytes = answer(&command, &[7; 512]);
        bytes[100] ^= 0x10;
        give(&mut target, &command, &bytes);
    }
    target.steps(20);
    assert_eq!(target.outcomes, [(Tag(5), -5)]);
    assert_eq!(mismatches(target.counts()), (2, 1));
    let io = Io::new(IoOp::Read, 0, 512, BlockSize::new(512).unwrap()).unwrap();
    assert_eq!(target.engine.take_digest_failure(), Some(DigestFailure { io, count: 1 }));
    assert_eq!(target.engine.take_digest_failure(), None, "told once");
    assert!(target.engine.is_connected(), "the path stays");
}

#[test]
fn data_that_never_came_is_an_error() {
    // The target answers with an immediate, but its data went into the buffer of another tag.
    let mut target = RawTarget::tested(keyed(IMM));
    for _ in 0..2 {
        let command = match target.engine.outstanding() {
            0 => target.request(IoOp::Read, 1),
            _ => target.next_command(),
        };
        let stride = keyed(IMM).buffer_stride() as u64;
        let buffer = command.buffer.unwrap();
        let other = KeyedDescriptor { address: buffer.address + stride, ..buffer };
        let imm = Immediate::new(command.tag, command.sequence);
        target.write_with_imm(other, &answer(&command, &[1; 512]), imm);
    }
    target.steps(20);
    assert_eq!(target.outcomes, [(Tag(1), -5)]);
    // Data and trailer of an earlier path with the same sequence numbers are still in the buffer.
    let mut target = RawTarget::tested(keyed(IMM));
    let before = target.request(IoOp::Read, 1);
    give(&mut target, &before, &answer(&before, &[2; 512]));
    target.steps(20);
    target.reconnect();
    for _ in 0..2 {
        let command = match target.engine.outstanding() {
            0 => target.request(IoOp::Read, 1),
            _ => target.next_command(),
        };
        let buffer = command.buffer.unwrap();
        let other = KeyedDescriptor { address: buffer.address + (1 << 20), ..buffer };
        let imm = Immediate::new(command.tag, command.sequence);
        target.write_with_imm(other, &[0; 520], imm);
    }
    target.steps(20);
    assert_eq!(target.outcomes, [(Tag(1), 512), (Tag(1), -5)]);
    // An immediate with too little or too much data, with digests and without.
    for (features, lengths) in [(IMM, [1, 7, 521]), (Features::WRITE_WITH_IMM, [513, 520, 1024])] {
        for len in lengths {
            let mut target = RawTarget::tested(keyed(features));
            let command = target.request(IoOp::Read, 1);
            give(&mut target, &command, &vec![0; len]);
            let end = target.path_end();
            assert!(matches!(end, Some(PathEnd::Protocol(_))), "{len} bytes: {end:?}");
            assert_eq!(target.outcomes, [], "the request waits for another path");
        }
    }
}

#[test]
fn a_repeated_write_has_the_digests_of_the_user_data() {
    for second_try_works in [true, false] {
        let mut target = RawTarget::tested(keyed(IMM));
        let at = 4 * keyed(IMM).buffer_stride();
        let data = pattern(8, 512);
        target.buffers.write(at, &data);
        let first = target.request(IoOp::Write, 4);
        assert_eq!(first.data_digests, DataDigests { first: crc32c(&data), second: 0 });
        let refused = ResponseCapsule::new(first.tag, first.sequence, Status::DigestMismatch);
        target.respond(&refused);
        // A target may write where READs land, but the digest still covers the user's data.
        target.buffers.write(at, &[0; 512]);
        let second = target.next_command();
        assert_eq!(second.data_digests, first.data_digests);
        assert_ne!(second.sequence, first.sequence);
        let status = if second_try_works { Status::Ok } else { Status::DigestMismatch };
        target.respond(&ResponseCapsule::new(second.tag, second.sequence, status));
        target.steps(20);
        let expected = if second_try_works { 512 } else { -5 };
        assert_eq!(target.outcomes, [(Tag(4), expected)]);
        assert_eq!(target.engine.take_digest_failure().is_some(), !second_try_works);
        // The next write of the tag has its own digest.
        let third = target.request(IoOp::Write, 4);
        assert_eq!(third.data_digests.first, crc32c(&[0; 512]));
    }
}

#[test]
fn a_spoilt_response_ends_the_path() {
    let mut target = RawTarget::tested(keyed(Features::DIGEST));
    let command = target.request(IoOp::Write, 4);
    let good = ResponseCapsule::new(command.tag, command.sequence, Status::Fenced);
    let mut bytes = good.to_wire_sealed();
    bytes[2] ^= 8;
    target.send(&bytes);
    assert_eq!(target.path_end(), Some(PathEnd::Corrupted));
    assert_eq!((&target.outcomes[..], target.engine.outstanding()), (&[][..], 1));
    assert_eq!(mismatches(target.counts()), (1, 0));
    // A response without a digest ends the path, too.
    let mut target = RawTarget::tested(keyed(Features::DIGEST));
    let command = target.request(IoOp::Write, 4);
    let bare = ResponseCapsule::new(command.tag, command.sequence, Status::Ok);
    target.send(&bare.to_wire());
    assert_eq!(target.path_end(), Some(PathEnd::Corrupted));
}

/// A WRITE by hand of `data` to byte `offset`, and its message.
fn write(peer: &mut RawPeer, offset: u64, data: &[u8], inside: bool) -> CommandCapsule {
    let blocks = u32::try_from(data.len() / 512).unwrap();
    let mut command = peer.transfer(Opcode::Write, 1, offset / 512, blocks);
    let len = u32::try_from(data.len()).unwrap();
    command.data_digests =
        DataDigests::of(offset, len, |from, len| crc32c(&data[from as usize..][..len as usize]));
    if inside {
        command.buffer = None;
        command.in_capsule_bytes = len;
    }
    command
}

fn send(bed: &mut Bed, peer: &mut RawPeer, command: &CommandCapsule, data: &[u8]) -> Heard {
    let mut message = command.to_wire().to_vec();
    if command.buffer.is_none() {
        message.extend(data);
    } else {
        peer.lent.region().write(0, data);
    }
    peer.send(&message);
    peer.hear(bed)
}

/// A bed with this cache mode for STORE. Without a cache a volume needs one poll group here: each
/// group has its own store.
fn bed(groups: usize, cache: CacheMode) -> (Bed, RigOptions) {
    let len = usize::try_from(VOLUME_BYTES).unwrap();
    let spec = |kind| VolumeSpec::new(kind, VOLUME_BYTES);
    let store = VolumeSpec { cache, ..spec(VolumeKind::Store) };
    let volumes = vec![spec(VolumeKind::Memory), spec(VolumeKind::Null), store];
    let options = RigOptions { groups, volumes, ..RigOptions::default() };
    let mut rig = Rig::new(&options, |arena| {
        let mut store = RamStore::new(arena, 5);
        store.set_volume(STORE, vec![0; len]);
        store
    })
    .unwrap();
    let session = begin(&mut rig);
    (Bed { rig, session }, options)
}

fn begin(rig: &mut Rig<RamStore>) -> SessionIndex {
    let session = rig.begin_session();
    for volume in [MEMORY, NULL, STORE] {
        rig.open(session, volume, AccessMode::Shared);
    }
    session
}

/// Poll groups and caches.
const TARGETS: &[(usize, CacheMode)] = &[
    (1, CacheMode::None),
    (1, CacheMode::WriteThrough),
    (2, CacheMode::WriteThrough),
    (1, CacheMode::WriteBack),
    (3, CacheMode::WriteBack),
];

fn status(heard: Heard) -> Status {
    match heard {
        Heard::Response(response) => response.status,
        other => panic!("no response: {other:?}"),
    }
}

#[test]
fn spoilt_data_of_a_write_goes_nowhere() {
    const STRIPE: u64 = 1 << 20;
    let cases: &[(bool, u64, usize, &[usize])] = &[
        (true, 8192, 4096, &[0, 4095]),
        (true, 512, 512, &[3]),
        (true, STRIPE - 512, 1024, &[0, 1023]),
        (false, 8192, 16384, &[0, 9000, 16383]),
        // Over two stripes.
        (false, STRIPE - 4096, 16384, &[0, 4095, 4096, 16383]),
        (false, 2 * STRIPE - 512, 300 << 10, &[0, 700]),
    ];
    for (groups, cache) in TARGETS {
        for volume in [MEMORY, NULL, STORE] {
            let (mut bed, rig) = bed(*groups, *cache);
            let reader = bed.queue(volume, options(IMM.or(Features::CAPSULE_LISTS)));
            let session = begin(&mut bed.rig);
            let mut peer = RawPeer::tested(&mut bed, session, volume, options(Features::DIGEST));
            let mut found = 0;
            for (inside, offset, len, places) in cases {
                let data = pattern(*offset + *len as u64, *len);
                let before = bed.read(reader, *offset, *len);
                for place in *places {
                    let mut spoilt = data.clone();
                    spoilt[*place] ^= 0x20;
                    let command = write(&mut peer, *offset, &data, *inside);
                    let heard = send(&mut bed, &mut peer, &command, &spoilt);
                    assert_eq!(status(heard), Status::DigestMismatch, "{offset} {place}");
                    found += 1;
                    assert_eq!(bed.rig.target_counts().digest_mismatches, found);
                    // A stripe with intact data may be written; a stripe with spoilt data is not.
                    let cut = DataDigests::cut(*offset, u32::try_from(*len).unwrap()) as usize;
                    let read = bed.read(reader, *offset, *len);
                    let of_place = if *place < cut { 0..cut } else { cut..*len };
                    // The bytes are the old ones, or an earlier attempt's; never the spoilt ones.
                    let now = &read[of_place.clone()];
                    let kept = now == &before[of_place.clone()] || now == &data[of_place];
                    assert!(kept, "{volume:?} {offset} {place}");
                }
                let command = write(&mut peer, *offset, &data, *inside);
                assert_eq!(status(send(&mut bed, &mut peer, &command, &data)), Status::Ok);
                let expected = if volume == NULL { vec![0; *len] } else { data };
                let read = bed.read(reader, *offset, *len);
                let wrong = read.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(wrong, None, "{volume:?} {offset} {len} {groups} {cache:?}");
            }
            drop(peer);
            let own = bed.session;
            bed.rig.new_epoch(session).unwrap();
            bed.rig.new_epoch(own).unwrap();
            bed.assert_arena_is_whole(&rig);
        }
    }
}

#[test]
fn a_spoilt_command_ends_its_connection() {
    let mut bed = Bed::new(&RigOptions::default());
    let session = bed.rig.begin_session();
    bed.open_all(session);
    for bit in (0..512).step_by(7) {
        let mut peer = RawPeer::tested(&mut bed, session, STORE, options(Features::DIGEST));
        let mut bytes = peer.transfer(Opcode::Read, 1, 8, 1).to_wire();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let before = bed.rig.target_counts();
        peer.send(&bytes);
        assert!(matches!(peer.hear(&mut bed), Heard::End(_)), "bit {bit}");
        assert_eq!(bed.rig.target_counts().protocol_errors, before.protocol_errors + 1);
        bed.rig.new_epoch(session).unwrap();
    }
    assert!(bed.rig.target_counts().digest_mismatches > 40);
}

#[test]
fn with_digests_every_command_has_one() {
    let mut bed = Bed::new(&RigOptions::default());
    let session = bed.rig.begin_session();
    bed.open_all(session);
    for (features, flag) in [(Features::DIGEST, false), (Features::default(), true)] {
        let mut peer = RawPeer::tested(&mut bed, session, STORE, options(features));
        let mut command = peer.transfer(Opcode::Read, 1, 8, 1);
        command.flags.digest = flag;
        peer.send(&command.to_wire());
        assert_eq!(status(peer.hear(&mut bed)), Status::NotSupported);
        bed.rig.new_epoch(session).unwrap();
    }
}

#[test]
fn a_read_has_the_trailer_of_its_data() {
    for (groups, cache) in TARGETS {
        let (mut bed, _) = bed(*groups, *cache);
        let session = begin(&mut bed.rig);
        for volume in [MEMORY, NULL, STORE] {
            let writer = bed.queue(volume, options(IMM));
            let mut peer = RawPeer::tested(&mut bed, session, volume, options(IMM));
            for (offset, len) in [(0u64, 4096usize), (512, 512), ((1 << 20) - 4608, 64 << 10)] {
                let mut data = pattern(offset, len);
                bed.write(writer, offset, &data);
                if volume == NULL {
                    data.fill(0);
                }
                // From the store, and from memory.
                for _ in 0..2 {
                    let blocks = u32::try_from(len / 512).unwrap();
                    let mut command = peer.transfer(Opcode::Read, 1, offset / 512, blocks);
                    command.buffer = Some(peer.descriptor(0, len + 8));
                    peer.send(&command.to_wire());
                    assert!(matches!(peer.hear(&mut bed), Heard::Immediate(_)));
                    let mut bytes = vec![0; len + 8];
                    peer.lent.region().read(0, &mut bytes);
                    assert!(bytes == answer(&command, &data), "{volume:?} {offset} {len}");
                }
            }
            bed.rig.new_epoch(session).unwrap();
        }
    }
}
