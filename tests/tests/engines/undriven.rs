//! Paths that control has tested: they wait for a queue that is not driven yet.

use std::time::Duration;

use rblk_client::{Queue, Request};
use rblk_fabric::soft::network::FaultyWire;
use rblk_initiator::engine::PathEnd;
use rblk_initiator::engine::path::Path;
use rblk_initiator::front::program::detached::Detached;
use rblk_protocol::{BlockSize, ConnectionKind, QueueDepth, VolumeHandle};
use rblk_rig::inprocess::{QueueOptions, RigOptions};
use rblk_tests::bed::{Bed, PATIENCE, STORE};

const DATA_MAX: usize = 16 << 10;

fn options(lanes: u16) -> QueueOptions {
    QueueOptions { depth: 4, io_max_bytes: 16 << 10, lanes, ..QueueOptions::default() }
}

struct World {
    bed: Bed,
    control: Detached,
    queue: Queue,
}

impl World {
    fn new() -> Self {
        let (depth, block_size) = (QueueDepth::new(4).unwrap(), BlockSize::new(512).unwrap());
        let (control, queue) = Detached::new(depth, DATA_MAX, 0, block_size).unwrap();
        Self { bed: Bed::new(&RigOptions::default()), control, queue }
    }

    fn path(&mut self, lanes: u16) -> (Path, Vec<FaultyWire>) {
        let joins = (0..lanes).map(|lane| {
            let queue = QueueOptions::lane(0, lane);
            self.bed.rig.join_by_hand(self.bed.session, ConnectionKind::Io { queue }).unwrap()
        });
        let joins: Vec<_> = joins.collect();
        let volume = VolumeHandle(u32::from(STORE.0) + 1);
        let memory = self.control.memory().unwrap();
        self.bed.rig.path(&joins, volume, options(lanes), &memory).unwrap()
    }

    /// Tests the path as control does, while the target works.
    fn tested(&mut self, path: Path) -> Result<Path, PathEnd> {
        runtime().block_on(async {
            let works = async {
                loop {
                    self.bed.rig.step();
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                tested = path.test() => tested,
                () = works => unreachable!("it has no end"),
            }
        })
    }

    fn steps(&mut self) {
        for _ in 0..2000 {
            self.bed.rig.step();
        }
    }

    #[track_caller]
    fn assert_no_connection(&mut self) {
        let session = self.bed.session;
        self.bed.rig.run(PATIENCE, |rig| rig.connections(session) == 0).unwrap();
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

#[test]
fn a_path_that_was_tested_carries_requests_whenever_its_queue_is_driven() {
    for lanes in [1, 2] {
        let mut world = World::new();
        let (path, _wires) = world.path(lanes);
        let path = world.tested(path).unwrap();
        assert_eq!(path.lanes(), usize::from(lanes));
        world.control.connect(path);
        // The queue is not driven.
        world.steps();
        let buffer = world.queue.buffer().unwrap();
        world.queue.submit(Request::read(buffer, 0, DATA_MAX)).unwrap();
        let mut done = Vec::new();
        world.queue.poll(&mut done).unwrap();
        world.steps();
        // In one turn: no self-test comes first.
        assert_eq!(world.bed.rig.target_counts().reads, 1, "{lanes} lanes");
        world.queue.poll(&mut done).unwrap();
        assert_eq!(done.len(), 1, "{lanes} lanes");
        assert_eq!(done[0].result, Ok(DATA_MAX));
        // As many requests as on any path.
        for round in 0..200 {
            let buffer = done.pop().and_then(|done| done.buffer).unwrap();
            let request = match round % 2 {
                0 => Request::write(buffer, 4096, 8192),
                _ => Request::read(buffer, 4096, 8192),
            };
            world.queue.submit(request).unwrap();
            for _ in 0..PATIENCE {
                if world.queue.poll(&mut done).unwrap() > 0 {
                    break;
                }
                world.bed.rig.step();
            }
            assert_eq!(done[0].result, Ok(8192), "{lanes} lanes, round {round}");
        }
        assert_eq!(world.queue.counts().paths_lost, 0);
    }
}

#[test]
fn a_tested_path_that_no_queue_takes_ends_like_others() {
    // The path is in the mailbox of a queue that is dropped; or another path replaces it.
    for replaced in [false, true] {
        let mut world = World::new();
        let (path, _wires) = world.path(2);
        let path = world.tested(path).unwrap();
        world.control.connect(path);
        if replaced {
            world.control.disconnect();
        }
        world.steps();
        let World { bed, mut control, queue } = world;
        drop(queue);
        let ended: Vec<_> = std::iter::from_fn(|| control.next_end()).collect();
        let found: Vec<_> =
            ended.iter().map(|ended| (ended.end, ended.dead.connections.len())).collect();
        let expected = [(PathEnd::Dropped, 2)];
        assert_eq!(found, if replaced { &[][..] } else { &expected[..] });
        drop(ended);
        assert!(control.memory().is_none(), "its memory is still mapped");
        let (_, queue) = World::new().into_parts();
        World { bed, control, queue }.assert_no_connection();
    }
}

impl World {
    fn into_parts(self) -> (Detached, Queue) {
        (self.control, self.queue)
    }
}

#[test]
fn a_test_that_fails_or_is_given_up_leaves_nothing() {
    let mut world = World::new();
    let (path, wires) = world.path(1);
    wires.iter().for_each(FaultyWire::cut);
    let end = world.tested(path).map(drop).unwrap_err();
    assert!(matches!(end, PathEnd::Lost(_)), "{end:?}");
    world.assert_no_connection();

    let (path, _wires) = world.path(2);
    let given_up = runtime().block_on(async {
        // The target does not answer meanwhile.
        tokio::time::timeout(Duration::from_millis(20), path.test()).await.is_err()
    });
    assert!(given_up);
    world.assert_no_connection();
    let World { control, queue, .. } = world;
    drop(queue);
    assert!(control.memory().is_none(), "its memory is still mapped");
}
