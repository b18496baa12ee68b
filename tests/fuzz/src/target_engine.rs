//! A poll group of the target, from a hostile initiator. After any acts: control gets admin
//! commands of admin connections alone, the connection ends when its link does, and no memory of
//! the arena stays lent.

use rblk_fabric::soft::network::{Conditions, End};
use rblk_protocol::{
    AccessMode, BlockCount, CommandCapsule, CommandFlags, ConnectionKind, Features,
    KeyedDescriptor, Lba, Opcode, Sequence, Status, Tag, VolumeHandle, limits,
};
use rblk_rig::inprocess::{QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::RamStore;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::{SessionIndex, VolumeIndex};
use rblk_tests::bed::Bed;
use rblk_tests::raw::{LENT_BYTES, RawPeer};

use crate::Input;

const VOLUME_BYTES: u64 = 64 << 10;
const VOLUMES: u16 = 5;
const ACTS: u32 = 64;
/// Steps in which everything ends after a link is cut.
const PATIENCE: u64 = 50_000;

/// Bytes 0 and 1: the features and the depth. Then the acts of the peer.
pub fn run(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let (kind, depth) = (input.u8(), 1 + u16::from(input.below(16)));
    let mut bed = bed(kind);
    let session = bed.session;
    let is_admin = kind & 0x10 != 0;
    let options = QueueOptions {
        depth,
        io_max_bytes: 16 << 10,
        in_capsule_bytes: 4096,
        features: Features(u32::from(kind & 0xd)).possible(),
        reads_out: kind >> 5 & 3,
        lanes: 1,
    };
    let queue = if is_admin { ConnectionKind::Admin } else { ConnectionKind::Io { queue: 3 } };
    let mut peer = RawPeer::new(&mut bed, session, queue, VolumeIndex(0), options);
    if kind & 0x80 == 0 {
        let test = peer.self_test();
        peer.send(&test.to_wire());
        bed.rig.step();
    }
    let mut heard = 0;
    for _ in 0..ACTS {
        if input.is_empty() || peer.is_dead() {
            break;
        }
        act(&mut bed, &mut peer, &mut input, session);
        bed.rig.step();
        heard += peer.listen().len();
        for command in bed.rig.take_admin() {
            assert!(is_admin, "an I/O connection reached control: {command:?}");
            assert!(command.command.opcode.is_admin(), "control got {command:?}");
            let status = input.pick(&Status::ALL).unwrap_or(Status::Ok);
            let payload = vec![0xcc; usize::from(input.u8()) * 16];
            bed.rig.reply(&command, status, input.u32(), payload);
        }
    }
    peer.wire.stall(End::B, false);
    peer.wire.cut();
    let gone = bed.rig.run(PATIENCE, |rig| rig.connections(session) == 0);
    assert!(gone.is_ok(), "the connection does not end: {:?}", bed.rig);
    // Write-back of dirty blocks pins slots for a while.
    let idle = bed.rig.run(PATIENCE, |rig| {
        rig.groups_mut().all(|group| group.shard().slots().held().next().is_none())
    });
    assert!(idle.is_ok(), "slots are held when nobody is there");
    heard > 0
}

fn bed(kind: u8) -> Bed {
    let spec = |kind| VolumeSpec::new(kind, VOLUME_BYTES);
    let cached = |cache| VolumeSpec { cache, ..spec(VolumeKind::Store) };
    let options = RigOptions {
        seed: kind.into(),
        conditions: Conditions { fragment: kind & 2 != 0, ..Conditions::default() },
        arena_bytes: 128 << 10,
        dirty_max_bytes: 32 << 10,
        io_max_bytes: 16 << 10,
        cq_entries: 4096,
        volumes: vec![
            spec(VolumeKind::Memory),
            spec(VolumeKind::Null),
            spec(VolumeKind::Store),
            cached(CacheMode::WriteThrough),
            cached(CacheMode::WriteBack),
        ],
        ..RigOptions::default()
    };
    let mut rig = Rig::new(&options, |arena| {
        let mut store = RamStore::new(arena, options.seed);
        let len = usize::try_from(VOLUME_BYTES).expect("a small volume");
        (2..VOLUMES).for_each(|volume| store.set_volume(VolumeIndex(volume), vec![0; len]));
        store
    })
    .expect("a rig");
    let session = rig.begin_session();
    for volume in 0..VOLUMES {
        // A volume opened for reading alone.
        let mode = if volume == 1 { AccessMode::ReadOnly } else { AccessMode::Shared };
        rig.open(session, VolumeIndex(volume), mode);
    }
    Bed { rig, session }
}

fn act(bed: &mut Bed, peer: &mut RawPeer, input: &mut Input<'_>, session: SessionIndex) {
    match input.below(10) {
        0 => peer.send(input.bytes(512)),
        1 => peer.write_remote(input.u64(), input.u32(), input.bytes(64)),
        2 => peer.wire.stall(End::B, input.flag()),
        3 => bed.rig.skip(u32::from(input.u16())),
        4 => (0..input.u8()).for_each(|_| {
            bed.rig.step();
        }),
        5 => {
            let volume = VolumeIndex(u16::from(input.below(5)));
            if input.flag() {
                bed.rig.open(session, volume, AccessMode::Exclusive);
            } else {
                bed.rig.close(session, volume, Status::NotReady);
            }
        }
        6 => peer.lend_anew(),
        _ => {
            // A message of commands, followed by the data of each.
            let count = if input.flag() { 1 } else { 1 + input.below(17) };
            let (mut capsules, mut data) = (Vec::new(), Vec::new());
            for _ in 0..count {
                let command = command(peer, input);
                capsules.extend(command.to_wire());
                let bytes = vec![0xdd; command.in_capsule_bytes as usize];
                data.splice(0..0, bytes);
            }
            capsules.extend(data);
            // A few messages exceed the slots of the peer.
            capsules.truncate(18 << 10);
            let spoil = input.u16();
            if spoil & 0xf000 == 0xf000 {
                let at = usize::from(spoil & 0xfff) % capsules.len();
                capsules[at] ^= input.u8();
            }
            peer.send(&capsules);
        }
    }
}

fn command(peer: &mut RawPeer, input: &mut Input<'_>) -> CommandCapsule {
    let opcode = input.pick(&Opcode::ALL).unwrap_or(Opcode::Read);
    let mut command = peer.command(opcode, u16::from(input.below(18)));
    let odd = input.u8();
    command.volume = VolumeHandle(u32::from(input.below(7)));
    command.lba = Lba(if odd & 1 == 0 { u64::from(input.u8()) } else { input.u64() });
    command.count = BlockCount(if odd & 2 == 0 { u64::from(input.below(40)) } else { input.u64() });
    if odd & 4 != 0 {
        command.epoch.0 = input.u8().into();
    }
    if odd & 8 != 0 {
        command.sequence = Sequence(input.u32());
    }
    if odd & 16 != 0 {
        let bits = input.u8();
        command.flags =
            CommandFlags { fua: bits & 1 != 0, may_unmap: bits & 2 != 0, digest: bits & 4 != 0 };
        if command.flags.digest && opcode == Opcode::Write {
            command.data_digests.first = input.u32();
        }
    }
    let length = usize::try_from(command.count.0).unwrap_or(0).saturating_mul(512);
    let has_data = odd & 32 != 0;
    if has_data && opcode == Opcode::Write || odd & 64 != 0 {
        let longest = limits::IN_CAPSULE_MAX_BYTES as usize;
        command.in_capsule_bytes = u32::try_from(length.min(longest)).expect("within 16 KiB");
    } else if length > 0 || opcode == Opcode::SelfTest {
        let shift = usize::from(input.below(4)) << 12;
        let length = if odd & 128 != 0 { usize::from(input.u16()) } else { length };
        let length = length.clamp(1, LENT_BYTES - shift);
        let buffer = peer.descriptor(shift, length);
        let rkey = buffer.rkey ^ u32::from(input.below(32) == 31);
        command.buffer = Some(KeyedDescriptor { rkey, ..buffer });
    }
    if opcode == Opcode::SelfTest && odd & 1 == 0 {
        let tag: Tag = command.tag;
        command = peer.self_test();
        command.tag = if odd & 2 == 0 { command.tag } else { tag };
    }
    command
}

/// Commands of each kind, with each set of features.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for kind in [0x60, 0x61, 0x65, 0x6d, 0x70, 0x62, 0xe1, 0x01] {
        let mut seed = vec![kind, 15];
        for opcode in 0..13 {
            // A message of one command: opcode, tag, nothing odd, volume, LBA, 8 blocks.
            seed.extend([7, 1, opcode, opcode, 0, opcode % 6, 8, 8, 0, 0, 0, 0]);
            seed.extend([7, 1, opcode, opcode, 32, opcode % 6, 8, 8, 0, 0, 0, 0]);
        }
        seeds.push(seed);
    }
    seeds
}
