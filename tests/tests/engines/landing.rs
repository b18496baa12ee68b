//! Data of small writes that lands in slots of the cache: no copy is made, any cut by slot ends
//! keeps the data, and the slots come back.

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, BlockCount, CommandCapsule, Features, Lba, Opcode, Status, Tag};
use rblk_rig::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_rig::seed::Random;
use rblk_target::volume::CacheMode;
use rblk_tests::bed::{Bed, MEMORY, PATIENCE, STORE, pattern};
use rblk_tests::raw::{Heard, RawPeer};

const DEPTH: u16 = 32;
const LISTS: Features = Features(Features::CAPSULE_LISTS.0 | Features::DATA_LISTS.0);
const FIRST: Features = Features(Features::WRITE_WITH_IMM.0 | LISTS.0 | Features::DATA_FIRST.0);
const BLOCK: usize = 4096;
/// Slots of a queue: three for each of its RECVs.
const SLOTS: usize = 3 * (DEPTH as usize + 2);

fn rig() -> RigOptions {
    RigOptions { arena_bytes: 8 << 20, io_max_bytes: 64 << 10, ..RigOptions::default() }
}

fn options(features: Features) -> QueueOptions {
    QueueOptions { depth: DEPTH, io_max_bytes: 64 << 10, features, ..QueueOptions::default() }
}

fn set_apart(bed: &mut Bed) -> usize {
    bed.rig.groups_mut().map(|group| group.shard().slots().set_apart()).sum()
}

/// The session's connections end, and no memory of the arena is held any more.
fn end(bed: &mut Bed, rig: &RigOptions) {
    let session = bed.session;
    bed.rig.new_epoch(session).expect("the connections end");
    assert_eq!(set_apart(bed), 0, "slots of no connection");
    bed.assert_arena_is_whole(rig);
}

/// Writes a version of every block, all at once, and reads it back.
fn write_all(bed: &mut Bed, queue: QueueId, version: u64) {
    let seed = |tag: u16| version * 1000 + u64::from(tag);
    for tag in 0..DEPTH {
        bed.rig.fill_buffer(queue, Tag(tag), &pattern(seed(tag), BLOCK));
        bed.submit(queue, tag, IoOp::Write, u64::from(tag) * BLOCK as u64, BLOCK as u64);
    }
    assert!(bed.outcomes(DEPTH.into()).iter().all(|outcome| outcome.result == 4096));
    for tag in 0..DEPTH {
        let read = bed.read(queue, u64::from(tag) * BLOCK as u64, BLOCK);
        assert!(read == pattern(seed(tag), BLOCK), "version {version} of block {tag}");
    }
}

#[test]
fn writes_of_a_block_are_not_copied() {
    for digests in [Features::default(), Features::DIGEST] {
        for cache in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
            let rig = rig();
            let mut bed = Bed::with_cache(&rig, cache);
            let queue = bed.queue(STORE, options(FIRST.or(digests)));
            assert_eq!(set_apart(&mut bed), SLOTS, "{cache:?}");
            let before = bed.rig.target_counts();
            (0..20).for_each(|version| write_all(&mut bed, queue, version));
            let counts = bed.rig.target_counts().since(&before);
            assert_eq!(counts.in_capsule_writes, 20 * u64::from(DEPTH));
            assert_eq!(counts.copied_bytes, 0, "{cache:?}");
            assert_eq!(set_apart(&mut bed), SLOTS, "each that was taken has another in its place");
            end(&mut bed, &rig);
        }
    }
}

#[test]
fn data_is_copied_where_no_slots_are_set_apart() {
    // The arena is too small, or the ends did not agree on data first.
    let small = RigOptions { arena_bytes: 2 << 20, ..rig() };
    for (rig, features) in [(small, FIRST), (rig(), FIRST.without(Features::DATA_FIRST))] {
        let mut bed = Bed::with_cache(&rig, CacheMode::WriteThrough);
        let queue = bed.queue(STORE, options(features));
        assert_eq!(set_apart(&mut bed), 0);
        let before = bed.rig.target_counts();
        write_all(&mut bed, queue, 1);
        let counts = bed.rig.target_counts().since(&before);
        assert_eq!(counts.copied_bytes, u64::from(DEPTH) * 4096);
        end(&mut bed, &rig);
    }
    let mut bed = Bed::new(&rig());
    for (volume, mode, slots) in [
        (MEMORY, AccessMode::Shared, 0),
        (STORE, AccessMode::ReadOnly, 0),
        (STORE, AccessMode::Shared, SLOTS),
    ] {
        let session = bed.rig.begin_session();
        bed.rig.open(session, volume, mode);
        let before = set_apart(&mut bed);
        let queue = bed.rig.add_queue(session, volume, options(FIRST)).expect("a queue");
        bed.rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
        assert_eq!(set_apart(&mut bed) - before, slots, "{volume:?}, {mode:?}");
    }
}

#[test]
fn no_more_than_an_eighth_of_the_arena_is_set_apart() {
    let rig = rig();
    let mut bed = Bed::with_cache(&rig, CacheMode::WriteThrough);
    let most = rig.arena_bytes / BLOCK / 8;
    let queues: Vec<QueueId> = (0..5).map(|_| bed.queue(STORE, options(FIRST))).collect();
    assert_eq!(set_apart(&mut bed), most / SLOTS * SLOTS);
    for (version, queue) in (0..).zip(&queues) {
        write_all(&mut bed, *queue, version);
    }
    // The slots of an ended connection go to the next one.
    let session = bed.session;
    bed.rig.new_epoch(session).expect("the connections end");
    for queue in &queues {
        bed.rig.reconnect(*queue).expect("a new path");
        bed.rig.run(PATIENCE, |rig| rig.is_connected(*queue)).expect("a path");
    }
    assert_eq!(set_apart(&mut bed), most / SLOTS * SLOTS);
    queues.iter().for_each(|queue| write_all(&mut bed, *queue, 9));
    end(&mut bed, &rig);
}

/// A message in which the data comes first.
fn packed(list: &[(CommandCapsule, Vec<u8>)]) -> Vec<u8> {
    let data = list.iter().flat_map(|(_, data)| data.clone());
    data.chain(list.iter().rev().flat_map(|(command, _)| command.to_wire())).collect()
}

fn write(peer: &mut RawPeer, tag: u16, lba: u64, data: &[u8]) -> CommandCapsule {
    let bytes = u32::try_from(data.len()).expect("little data");
    let command = peer.transfer(Opcode::Write, tag, lba, 1);
    let count = BlockCount((bytes / 512).into());
    CommandCapsule { buffer: None, lba: Lba(lba), count, in_capsule_bytes: bytes, ..command }
}

/// Messages with data of any lengths: each command gets its own data. Data of another size than a
/// slot is cut by slot ends.
#[test]
fn data_of_any_length_is_what_was_sent() {
    for (seed, cache) in (0..).zip([CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack])
    {
        let mut random = Random::new(seed);
        let rig = rig();
        let mut bed = Bed::with_cache(&rig, cache);
        let reader = bed.queue(STORE, options(FIRST));
        let session = bed.rig.begin_session();
        bed.open_all(session);
        let mut peer = RawPeer::tested(&mut bed, session, STORE, options(FIRST));
        assert_eq!(set_apart(&mut bed), 2 * SLOTS);
        let mut expected = vec![0; 256 << 10];
        let mut cut = 0;
        for round in 0..400 {
            let writes = random.within(1, 3);
            let mut list = Vec::new();
            let mut at = 0;
            for tag in 0..writes {
                let blocks = [1, 7, 8, 8, random.within(1, 8)][random.index(5)];
                let bytes = usize::try_from(blocks).expect("few") * 512;
                let data = pattern(seed << 32 | round << 8 | tag, bytes);
                // No two writes of this round overlap.
                let lba = tag * 128 + random.below(120);
                let place = usize::try_from(lba).expect("near") * 512;
                expected[place..place + bytes].copy_from_slice(&data);
                let tag = u16::try_from(tag).expect("few");
                list.push((write(&mut peer, tag, lba, &data), data));
                cut += usize::from(at / BLOCK != (at + bytes - 1) / BLOCK);
                at += bytes;
            }
            for tag in 0..random.below(12) {
                let tag = 8 + u16::try_from(tag).expect("few");
                let read = peer.transfer(Opcode::Read, tag, 1024, 1);
                list.insert(random.index(list.len() + 1), (read, Vec::new()));
            }
            let answers = list.len();
            peer.send(&packed(&list));
            let heard = peer.hear_answers(&mut bed, answers);
            assert_eq!(heard.len(), answers, "{heard:?}");
            let is_good = |answer: &Heard| match answer {
                Heard::Response(response) => response.status == Status::Ok,
                Heard::Immediate(_) => true,
                Heard::End(_) => false,
            };
            assert!(heard.iter().all(is_good), "{heard:?}");
        }
        assert!(cut > 100, "the ends of slots cut data: {cut}");
        for at in (0..expected.len()).step_by(64 << 10) {
            let read = bed.read(reader, at as u64, 64 << 10);
            assert!(read == expected[at..at + (64 << 10)], "{cache:?}, from {at} on");
        }
        assert_eq!(set_apart(&mut bed), 2 * SLOTS);
        bed.rig.new_epoch(session).expect("the peer's connection ends");
        end(&mut bed, &rig);
    }
}

/// A message that breaks a rule ends its connection, which returns its slots; others are served on.
#[test]
fn a_wrong_message_harms_nobody() {
    let spoils: [fn(&mut Vec<u8>); 6] = [
        |bytes| bytes.truncate(bytes.len() - 1),
        |bytes| drop(bytes.drain(..1)),
        |bytes| bytes.insert(0, 7),
        |bytes| bytes.truncate(4000),
        |bytes| bytes.rotate_left(64),
        |bytes| bytes.resize(bytes.len() + 4096, 0),
    ];
    for (case, spoil) in spoils.into_iter().enumerate() {
        let rig = rig();
        let mut bed = Bed::with_cache(&rig, CacheMode::WriteBack);
        let bystander = bed.queue(STORE, options(FIRST));
        let session = bed.rig.begin_session();
        bed.open_all(session);
        let mut peer = RawPeer::tested(&mut bed, session, STORE, options(FIRST));
        let list: Vec<_> = (0..3)
            .map(|tag| {
                let data = vec![0xbb; BLOCK];
                (write(&mut peer, tag, 512 + u64::from(tag) * 8, &data), data)
            })
            .collect();
        let mut bytes = packed(&list);
        spoil(&mut bytes);
        peer.send(&bytes);
        let heard = peer.hear_answers(&mut bed, 4);
        assert!(matches!(heard.last(), Some(Heard::End(_))), "case {case}: {heard:?}");
        (0..3).for_each(|version| write_all(&mut bed, bystander, version));
        assert_eq!(bed.rig.take_path_ends(bystander), []);
        bed.rig.new_epoch(session).expect("it has ended");
        assert_eq!(set_apart(&mut bed), SLOTS, "case {case}");
        end(&mut bed, &rig);
    }
}
