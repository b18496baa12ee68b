//! Targets on devices with the rules of iWARP: no immediates, a completed WRITE proves nothing, and
//! the sink of a READ needs the right of remote write, so its key is on the wire.
//!
//! `lab_iwarp` has the same tests over a real iWARP device.

use rblk_fabric::WcStatus;
use rblk_fabric::soft::network::{Conditions, End};
use rblk_initiator::engine::io::IoOp;
use rblk_protocol::digest::crc32c;
use rblk_protocol::{CommandCapsule, DataDigests, Features, Opcode, Status, Tag};
use rblk_rig::inprocess::{QueueOptions, RigOptions};
use rblk_rig::seed::Random;
use rblk_tests::bed::{Bed, MEMORY, NULL, PATIENCE, STORE, pattern};
use rblk_tests::raw::{Heard, RawPeer};

const IO_MAX: u32 = 64 << 10;
const LEN: usize = 64 << 10;

fn rig(seed: u64) -> RigOptions {
    RigOptions { seed, iwarp: true, destroy_steps: 20, ..RigOptions::default() }
}

fn with_digests() -> QueueOptions {
    let features = Features::CAPSULE_LISTS.or(Features::DIGEST);
    QueueOptions { features, ..options() }
}

fn options() -> QueueOptions {
    QueueOptions {
        depth: 16,
        io_max_bytes: IO_MAX,
        features: Features::CAPSULE_LISTS,
        ..QueueOptions::default()
    }
}

/// The landing memory has room for four commands of the longest kind in each direction. Here are
/// four times as many, of all lengths, with digests and without.
#[test]
fn data_passes_both_ways_at_any_load() {
    for seed in 0..20 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let delay_min = random.below(20);
        let rig = RigOptions {
            conditions: Conditions {
                fragment: random.chance(500),
                delay_min,
                delay_max: delay_min + random.below(40),
                buffer: 1 << random.within(12, 17),
            },
            groups: 1 + random.index(2),
            ..rig(seed)
        };
        let options = if seed % 2 == 0 { options() } else { with_digests() };
        let mut bed = Bed::new(&rig);
        for volume in [STORE, MEMORY] {
            let queue = bed.queue(volume, options);
            let lens: Vec<usize> =
                (0..16).map(|_| 512 << random.index(8)).map(|len: usize| len.min(LEN)).collect();
            // The last one covers two stripes, perhaps of two poll groups.
            let place = |tag: usize| (tag * LEN + LEN / 2) as u64;
            for round in 0..3 {
                for (tag, len) in lens.iter().enumerate() {
                    let bytes = pattern(seed ^ (tag as u64) << 8 ^ round, *len);
                    let tag = Tag(u16::try_from(tag).unwrap());
                    bed.rig.fill_buffer(queue, tag, &bytes);
                    bed.submit(queue, tag.0, IoOp::Write, place(tag.index()), *len as u64);
                }
                for outcome in bed.outcomes(16) {
                    assert_eq!(usize::try_from(outcome.result), Ok(lens[outcome.tag.index()]));
                }
                for (tag, len) in lens.iter().enumerate() {
                    let name = Tag(u16::try_from(tag).unwrap());
                    bed.rig.fill_buffer(queue, name, &vec![0xee; *len]);
                    bed.submit(queue, name.0, IoOp::Read, place(tag), *len as u64);
                }
                for outcome in bed.outcomes(16) {
                    let (tag, len) = (outcome.tag, lens[outcome.tag.index()]);
                    assert_eq!(usize::try_from(outcome.result), Ok(len));
                    let expected = pattern(seed ^ (tag.index() as u64) << 8 ^ round, len);
                    assert!(bed.rig.buffer(queue, tag, len) == expected, "{tag:?}, {len} bytes");
                }
            }
        }
        let nowhere = bed.queue(NULL, options);
        bed.write(nowhere, 0, &pattern(1, LEN));
        assert!(bed.read(nowhere, 0, LEN).iter().all(|byte| *byte == 0));
        assert_eq!(bed.rig.target_counts().digest_mismatches, 0);
        let session = bed.session;
        bed.rig.new_epoch(session).unwrap();
        bed.assert_arena_is_whole(&rig);
    }
}

/// As many READs of write data as credits allow are under way when reads find no room. The ends of
/// these READs prove nothing about later WRITEs, but the target asks for a barrier all the same.
#[test]
fn reads_and_writes_do_not_starve_each_other_of_room() {
    for seed in 0..30 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let delay_max = random.below(60);
        let conditions = Conditions { delay_max, ..Conditions::default() };
        let rig = RigOptions { conditions, ..rig(seed) };
        let mut bed = Bed::new(&rig);
        for volume in [STORE, MEMORY] {
            let reads_out = 1 + u8::try_from(random.below(4)).unwrap();
            let queue = bed.queue(volume, QueueOptions { reads_out, ..options() });
            for _ in 0..20 {
                for tag in 0..16 {
                    let op = if random.chance(500) { IoOp::Read } else { IoOp::Write };
                    let len = 4096 << random.index(5);
                    bed.submit(queue, tag, op, u64::from(tag) * LEN as u64, len);
                }
                assert!(bed.outcomes(16).iter().all(|outcome| outcome.result > 0));
            }
        }
    }
}

#[test]
fn a_rogue_peer_reaches_no_sink_of_another() {
    for (volume, seed) in [(STORE, 1), (MEMORY, 2), (STORE, 3), (MEMORY, 4)] {
        let rig = rig(seed);
        let mut bed = Bed::new(&rig);
        let (honest, rogue) = (bed.session, bed.rig.begin_session());
        bed.open_all(rogue);
        let mut honest = RawPeer::tested(&mut bed, honest, volume, options());
        let sink = bed.rig.last_landing().expect("it is on iWARP");
        let mut rogue = RawPeer::tested(&mut bed, rogue, volume, options());
        let own = bed.rig.last_landing().expect("it is on iWARP");
        assert_ne!((own.addr, own.rkey), (sink.addr, sink.rkey));
        // The rogue may write to its own landing memory, and harms only itself.
        rogue.write_remote(own.addr, own.rkey.0, &[0xee; 512]);
        // Half of the honest peer's data has landed, and the rest is delayed.
        let bytes = pattern(seed, LEN);
        honest.lent.region().write(0, &bytes);
        let write = honest.transfer(Opcode::Write, 1, 0, u32::try_from(LEN / 512).unwrap());
        bed.rig.network().set_conditions(Conditions { buffer: LEN / 2, ..Conditions::default() });
        honest.send(&write.to_wire());
        for _ in 0..20 {
            bed.rig.step();
        }
        assert_eq!(honest.listen(), []);
        assert_eq!(rogue.listen(), [], "it lives");
        // The key and the address went over the wire with the READ.
        rogue.write_remote(sink.addr, sink.rkey.0, &[0xee; 512]);
        assert_eq!(rogue.hear(&mut bed), Heard::End(WcStatus::RemoteAccess));
        let Heard::Response(response) = honest.hear(&mut bed) else { panic!("no response") };
        assert_eq!(response.status, Status::Ok);
        let queue = bed.queue(volume, options());
        assert!(bed.read(queue, 0, LEN) == bytes, "the honest one's data changed");
    }
}

/// The digest is checked on the same copy that is written, since the peer may write to the landing
/// memory.
#[test]
fn data_that_was_changed_where_it_landed_is_not_written() {
    for (volume, seed) in [(STORE, 1), (MEMORY, 2), (NULL, 3)] {
        let mut bed = Bed::new(&rig(seed));
        let session = bed.rig.begin_session();
        bed.open_all(session);
        let mut peer = RawPeer::tested(&mut bed, session, volume, with_digests());
        let sink = bed.rig.last_landing().expect("it is on iWARP");
        let bytes = pattern(seed, LEN);
        peer.lent.region().write(0, &bytes);
        let command = peer.transfer(Opcode::Write, 1, 0, u32::try_from(LEN / 512).unwrap());
        let command = CommandCapsule {
            data_digests: DataDigests { first: crc32c(&bytes), second: 0 },
            ..command
        };
        // Half of the data has landed, and changes before the rest arrives.
        bed.rig.network().set_conditions(Conditions { buffer: LEN / 2, ..Conditions::default() });
        peer.send(&command.to_wire());
        for _ in 0..20 {
            bed.rig.step();
        }
        assert_eq!(peer.listen(), []);
        peer.write_remote(sink.addr, sink.rkey.0, &[0xee; 512]);
        let Heard::Response(response) = peer.hear(&mut bed) else { panic!("no response") };
        assert_eq!(response.status, Status::DigestMismatch);
        let queue = bed.queue(volume, with_digests());
        assert!(bed.read(queue, 0, LEN).iter().all(|byte| *byte == 0), "it was written");
    }
}

#[test]
fn a_peer_that_takes_nothing_starves_only_its_own_connection() {
    let rig = rig(5);
    let mut bed = Bed::new(&rig);
    let suspect = bed.rig.begin_session();
    bed.open_all(suspect);
    let bystander = bed.queue(STORE, options());
    let mut peer = RawPeer::tested(&mut bed, suspect, STORE, options());
    peer.wire.stall(End::A, true);
    peer.wire.stall(End::B, true);
    for tag in 0..16 {
        let opcode = if tag % 2 == 0 { Opcode::Read } else { Opcode::Write };
        let command = peer.transfer(opcode, tag, 0, 128);
        peer.send(&command.to_wire());
    }
    peer.wire.stall(End::A, false);
    for _ in 0..200 {
        bed.rig.step();
    }
    for round in 0..8 {
        bed.write(bystander, 0, &pattern(round, LEN));
        assert!(bed.read(bystander, 0, LEN) == pattern(round, LEN));
    }
    // The peer continues, and everything is answered.
    peer.wire.stall(End::B, false);
    let mut answers = 0;
    bed.rig
        .run(PATIENCE, |_| {
            answers += peer.listen().len();
            answers == 16
        })
        .expect("sixteen answers");
    peer.wire.cut();
    bed.rig.run(PATIENCE, |rig| rig.connections(suspect) == 0).unwrap();
    bed.rig.new_epoch(bed.session).unwrap();
    bed.assert_arena_is_whole(&rig);
}
