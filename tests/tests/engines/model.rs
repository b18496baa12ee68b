//! Random I/O against a vector of bytes, over links that fragment and delay.

use proptest::prelude::*;
use rblk_fabric::soft::network::Conditions;
use rblk_protocol::{Features, limits};
use rblk_rig::inprocess::{QueueOptions, RigOptions};
use rblk_rig::ram_store::StoreConditions;
use rblk_target::volume::ids::VolumeIndex;
use rblk_tests::bed::{MEMORY, STORE};
use rblk_tests::exerciser::Exerciser;

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    volume: VolumeIndex,
    depth: u16,
    queues: usize,
    immediates: bool,
    lists: bool,
    data_lists: bool,
    data_first: bool,
    digests: bool,
    in_capsule_bytes: u32,
    reads_out: u8,
    lanes: u16,
    arena_extents: usize,
    network: Conditions,
    store: StoreConditions,
}

fn case() -> impl Strategy<Value = Case> {
    let network = (any::<bool>(), 0..5u64, 0..20u64, 200..100_000usize).prop_map(
        |(fragment, delay_min, more, buffer)| Conditions {
            fragment,
            delay_min,
            delay_max: delay_min + more,
            buffer,
        },
    );
    let store = (0..30u64, 1..40usize).prop_map(|(delay_max, capacity)| StoreConditions {
        delay_max,
        capacity,
        ..StoreConditions::default()
    });
    let queue = (
        prop_oneof![Just(MEMORY), Just(STORE)],
        1..=64u16,
        1..4usize,
        any::<[bool; 5]>(),
        prop_oneof![Just(0), Just(512), Just(4096), Just(16384)],
        1..=16u8,
        (1..12usize, 1..=limits::LANES_MAX),
    );
    (any::<u64>(), queue, network, store).prop_map(|(seed, queue, network, store)| Case {
        seed,
        volume: queue.0,
        depth: queue.1,
        queues: queue.2,
        immediates: queue.3[0],
        lists: queue.3[1],
        data_lists: queue.3[2],
        digests: queue.3[3],
        data_first: queue.3[4],
        in_capsule_bytes: queue.4,
        reads_out: queue.5,
        arena_extents: queue.6.0,
        lanes: queue.6.1,
        network,
        store,
    })
}

fn run(case: &Case) {
    let io_max_bytes = 32 << 10;
    let rig = RigOptions {
        seed: case.seed,
        conditions: case.network,
        arena_bytes: case.arena_extents * io_max_bytes as usize,
        io_max_bytes,
        ..RigOptions::default()
    };
    let features = if case.immediates { Features::WRITE_WITH_IMM } else { Features::default() };
    let features = if case.lists { features.or(Features::CAPSULE_LISTS) } else { features };
    let features = if case.data_lists { features.or(Features::DATA_LISTS) } else { features };
    let features = if case.data_first { features.or(Features::DATA_FIRST) } else { features };
    let features = if case.digests { features.or(Features::DIGEST) } else { features };
    let options = QueueOptions {
        depth: case.depth,
        io_max_bytes,
        in_capsule_bytes: case.in_capsule_bytes,
        features,
        reads_out: case.reads_out,
        lanes: case.lanes,
    };
    let mut exerciser = Exerciser::new(&rig, case.volume, options, case.queues, 256 << 10);
    exerciser.bed.rig.store_mut().set_conditions(case.store);
    exerciser.run(150, |_| {});
    exerciser.check_all();
    assert_eq!(exerciser.failed(), 0, "seed {}", case.seed);
    for queue in exerciser.queues.clone() {
        assert_eq!(exerciser.bed.rig.take_path_ends(queue), [], "seed {}", case.seed);
    }
    let session = exerciser.bed.session;
    exerciser.bed.rig.new_epoch(session).unwrap();
    exerciser.bed.assert_arena_is_whole(&rig);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, max_shrink_iters: 30, ..ProptestConfig::default() })]

    #[test]
    fn a_volume_behaves_like_a_vector_of_bytes(case in case()) {
        run(&case);
    }
}
