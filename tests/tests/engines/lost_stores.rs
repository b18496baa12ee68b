//! A store that is lost while several poll groups serve its volume: another owner may have changed
//! its data, so no host gets an answer any more, not even an error.

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::RamStore;
use rblk_target::data::poll_group::ToGroup;
use rblk_target::store::Store;
use rblk_target::volume::CacheMode;
use rblk_tests::bed::PATIENCE;
use rblk_tests::storm::VOLUME;

const MIB: usize = 1 << 20;
/// Requests of a queue.
const DEPTH: u16 = 8;

fn rig(groups: usize, cache: CacheMode) -> Rig<RamStore> {
    let bytes = 8 * MIB;
    let volume = VolumeSpec { cache, ..VolumeSpec::new(VolumeKind::Store, bytes as u64) };
    let options = RigOptions {
        groups,
        volumes: vec![volume],
        arena_bytes: groups * 2 * MIB,
        io_max_bytes: 64 << 10,
        ..RigOptions::default()
    };
    Rig::new(&options, |region| {
        let mut store = RamStore::new(region, 1);
        store.set_volume(VOLUME, vec![7; bytes]);
        store
    })
    .expect("a rig")
}

/// A queue with a session of its own.
fn queue(rig: &mut Rig<RamStore>) -> QueueId {
    let session = rig.begin_session();
    rig.open(session, VOLUME, AccessMode::Shared);
    let options = QueueOptions { depth: DEPTH, io_max_bytes: 64 << 10, ..QueueOptions::default() };
    let queue = rig.add_queue(session, VOLUME, options).expect("a queue");
    rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
    queue
}

fn steps(rig: &mut Rig<RamStore>) {
    for _ in 0..500 {
        rig.step();
    }
}

#[test]
fn no_poll_group_answers_for_a_lost_store_while_others_learn_of_it() {
    for cache in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
        for groups in [1, 2, 3] {
            for first in 0..groups {
                let what = format!("{cache:?}, {first} of {groups} learns of it first");
                let mut rig = rig(groups, cache);
                let queues: Vec<_> = (0..groups).map(|_| queue(&mut rig)).collect();
                rig.groups_mut().for_each(|group| group.store_mut().lose(VOLUME));
                // Reads of every stripe, so of every shard.
                for queue in &queues {
                    for tag in 0..DEPTH {
                        let io = rig.request(*queue, IoOp::Read, u64::from(tag) << 20, 4096);
                        rig.submit(*queue, Tag(tag), io).expect("a free tag");
                    }
                }
                steps(&mut rig);
                let others = (0..groups).filter(|group| *group != first);
                for group in std::iter::once(first).chain(others) {
                    rig.mail_to(group, ToGroup::Lost(VOLUME));
                    steps(&mut rig);
                    assert_eq!(rig.take_outcomes(), [], "{what}");
                    assert_eq!(rig.take_losses_known(), [(group, VOLUME)], "{what}");
                }
                (0..groups).for_each(|group| rig.mail_to(group, ToGroup::LetGo(VOLUME)));
                steps(&mut rig);
                assert_eq!(rig.take_outcomes(), [], "{what}");
                let held: usize = rig.groups_mut().map(|group| group.store_mut().in_flight()).sum();
                assert_eq!(held, 0, "{what}");
                assert!(queues.iter().all(|queue| !rig.is_connected(*queue)), "{what}");
            }
        }
    }
}
