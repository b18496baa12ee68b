//! A target with too little memory for larger receive slots: a connection does without the data
//! of several commands in one message, and has every other feature.

use std::sync::Arc;

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{ConnectionKind, Features, HelloAccept, Tag, VolumeHandle};
use rblk_rig::inprocess::{Join, QueueId, QueueOptions, RigOptions};
use rblk_target::volume::ids::AdmissionId;
use rblk_tests::bed::{Bed, MEMORY, PATIENCE, VOLUME_BYTES, pattern};

const BLOCK: u32 = 4096;
/// So deep that the receive slots are the largest MRs.
const DEPTH: u16 = 1024;
const ROUNDS: u64 = 3;
const DATA: Features = Features::DATA_LISTS;
const WISH: Features = Features(Features::WRITE_WITH_IMM.0 | Features::CAPSULE_LISTS.0 | DATA.0);

const _: () = assert!(DEPTH as u64 * BLOCK as u64 <= VOLUME_BYTES, "a block for each tag");

/// A target with a limit on the size of an MR, a queue with `lanes` lanes that asks for every
/// feature, and the accept.
fn connected(region_max_bytes: u64, lanes: u16) -> (Bed, QueueId, HelloAccept) {
    let arena_bytes = 4 << 20;
    let mut bed = Bed::new(&RigOptions { region_max_bytes, arena_bytes, ..RigOptions::default() });
    let options = QueueOptions {
        depth: DEPTH,
        io_max_bytes: BLOCK,
        in_capsule_bytes: BLOCK,
        features: WISH,
        lanes,
        ..QueueOptions::default()
    };
    let (session, epoch) = (bed.session, bed.rig.epoch(bed.session));
    let join = |queue| {
        let (admission, kind) = (AdmissionId(0), ConnectionKind::Io { queue });
        Join { admission, session, epoch, kind }
    };
    let joins: Vec<_> = (0..lanes).map(join).collect();
    let queue = bed.rig.add_engine(MEMORY, options, None).unwrap();
    let buffers = Arc::clone(bed.rig.buffers(queue));
    let volume = VolumeHandle(u32::from(MEMORY.0) + 1);
    let (path, wires) = bed.rig.path(&joins, volume, options, &buffers).expect("it connects");
    let told = path.accept;
    bed.rig.give_path(queue, path, wires);
    bed.rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("it passes its self-test");
    (bed, queue, told)
}

/// A few times, writes a block with every tag at once and checks the blocks. Returns the messages
/// of a round.
fn write_at_depth(bed: &mut Bed, queue: QueueId) -> u64 {
    let content = |round: u64, tag: u16| pattern(round << 16 | u64::from(tag), BLOCK as usize);
    let before = bed.rig.queue_counts(queue);
    for round in 0..ROUNDS {
        for tag in 0..DEPTH {
            bed.rig.fill_buffer(queue, Tag(tag), &content(round, tag));
            bed.submit(queue, tag, IoOp::Write, u64::from(tag) * u64::from(BLOCK), BLOCK.into());
        }
        let outcomes = bed.outcomes(DEPTH.into());
        assert!(outcomes.iter().all(|outcome| outcome.result == BLOCK.cast_signed()));
        let memory = bed.rig.memory(MEMORY).expect("a volume in memory");
        for tag in 0..DEPTH {
            let mut found = vec![0; BLOCK as usize];
            memory.read(usize::from(tag) * BLOCK as usize, &mut found);
            assert!(found == content(round, tag), "round {round}, tag {tag}");
        }
    }
    assert_eq!(bed.rig.take_path_ends(queue), [], "all by one path");
    let counts = bed.rig.queue_counts(queue).since(&before);
    let writes = ROUNDS * u64::from(DEPTH);
    assert_eq!((counts.writes, counts.in_capsule_writes), (writes, writes));
    counts.sends / ROUNDS
}

#[test]
fn without_memory_for_larger_receive_slots_each_write_has_its_own_message() {
    // 1027 receive slots of 5 KiB fit; with 13 KiB they do not.
    for lanes in [1, 2] {
        let (mut bed, queue, told) = connected(8 << 20, lanes);
        assert_eq!(told.features, WISH.without(DATA), "all else is granted");
        assert_eq!((told.depth.get(), told.in_capsule_bytes), (DEPTH, BLOCK));
        assert_eq!(write_at_depth(&mut bed, queue), u64::from(DEPTH));
    }
    // With enough memory the feature is granted.
    let (mut bed, queue, told) = connected(16 << 20, 1);
    assert_eq!(told.features, WISH);
    assert_eq!(write_at_depth(&mut bed, queue), u64::from(DEPTH).div_ceil(3));
}
