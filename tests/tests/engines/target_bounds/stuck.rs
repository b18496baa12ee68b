//! A store that forgets a volume: the other volumes still have their memory and their operations.

use rblk_initiator::engine::io::{Io, IoOp};
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::{RamStore, StoreConditions};
use rblk_rig::seed::Random;
use rblk_target::store::{Op, OpDone, Segment, Store};
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::{SessionIndex, VolumeIndex};
use rblk_tests::bed::{PATIENCE, pattern};

use super::{MIB, MODES, STUCK};

const WELL: VolumeIndex = VolumeIndex(1);

/// A store that keeps the ops of one volume while `is_stuck`, and has a limit of ops in all.
struct PartlyStuck {
    inner: RamStore,
    is_stuck: bool,
    kept: Vec<(Op, Vec<Segment>)>,
    capacity: usize,
}

impl Store for PartlyStuck {
    fn submit(&mut self, op: Op, memory: &[Segment]) -> Result<(), Op> {
        if self.in_flight() >= self.capacity {
            return Err(op);
        }
        if self.is_stuck && op.volume == STUCK {
            self.kept.push((op, memory.to_vec()));
            return Ok(());
        }
        self.inner.submit(op, memory)
    }

    fn reap(&mut self, out: &mut Vec<OpDone>) {
        if !self.is_stuck {
            for (op, memory) in self.kept.drain(..) {
                self.inner.submit(op, &memory).expect("room: it was taken once");
            }
        }
        self.inner.reap(out);
    }

    fn in_flight(&self) -> usize {
        self.kept.len() + self.inner.in_flight()
    }
}

/// Two volumes at a store that has forgotten the first, and a queue for each.
struct Two {
    rig: Rig<PartlyStuck>,
    sessions: [SessionIndex; 2],
    well: QueueId,
    content: Vec<u8>,
}

const VOLUME_LEN: usize = 40 * MIB;

impl Two {
    fn new(arena_bytes: usize, modes: [CacheMode; 2]) -> Self {
        let spec =
            |cache| VolumeSpec { cache, ..VolumeSpec::new(VolumeKind::Store, VOLUME_LEN as u64) };
        let options = RigOptions {
            arena_bytes,
            dirty_max_bytes: arena_bytes / 2,
            volumes: modes.map(spec).to_vec(),
            ..RigOptions::default()
        };
        let content = pattern(3, VOLUME_LEN);
        let mut rig = Rig::new(&options, |region| {
            let mut inner = RamStore::new(region, 1);
            inner.set_volume(STUCK, content.clone());
            inner.set_volume(WELL, content.clone());
            PartlyStuck { inner, is_stuck: true, kept: Vec::new(), capacity: 1024 }
        })
        .expect("a rig");
        let sessions = [STUCK, WELL].map(|volume| {
            let session = rig.begin_session();
            rig.open(session, volume, AccessMode::Exclusive);
            session
        });
        let options = QueueOptions { depth: 4, ..QueueOptions::default() };
        let well = rig.add_queue(sessions[1], WELL, options).expect("a queue");
        rig.run(PATIENCE, |rig| rig.is_connected(well)).expect("a path");
        Self { rig, sessions, well, content }
    }

    /// A queue of the stuck volume.
    fn queue(&mut self, options: QueueOptions) -> QueueId {
        let queue = self.rig.add_queue(self.sessions[0], STUCK, options).expect("a queue");
        self.rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
        queue
    }

    fn submit(&mut self, queue: QueueId, tag: u16, op: IoOp, at: usize, len: usize) {
        let io = self.rig.request(queue, op, at as u64, len as u64);
        self.rig.submit(queue, Tag(tag), io).expect("a free tag");
    }

    /// Runs one request of the well volume.
    fn run(&mut self, io: Io, what: &str) {
        let queue = self.well;
        self.rig.submit(queue, Tag(0), io).expect("a free tag");
        let ended = self.rig.run(PATIENCE, |rig| rig.outstanding(queue) == 0);
        assert!(ended.is_ok(), "{what}: {io:?} does not end: {:?}", self.rig);
        let outcomes = self.rig.take_outcomes();
        let all_well = outcomes.iter().all(|outcome| outcome.queue == queue && outcome.result >= 0);
        assert!(all_well && outcomes.len() == 1, "{what}: {outcomes:?}");
    }

    /// Checks that the well volume still does everything, with the longest requests too.
    fn goes_on(&mut self, random: &mut Random, what: &str) {
        for len in [4096, 64 << 10, MIB] {
            let at = random.index(VOLUME_LEN / 4096 - len / 4096) * 4096;
            let data = pattern(at as u64, len);
            self.rig.fill_buffer(self.well, Tag(0), &data);
            let io = self.rig.request(self.well, IoOp::Write, at as u64, len as u64);
            self.run(Io { fua: random.index(2) == 0, ..io }, what);
            self.content[at..at + len].copy_from_slice(&data);
            let at = random.index(VOLUME_LEN / 4096 - len / 4096) * 4096;
            let io = self.rig.request(self.well, IoOp::Discard, at as u64, 12288);
            self.run(io, what);
            self.content[at..at + 12288].fill(0);
            for from in [at, random.index(VOLUME_LEN / 4096 - len / 4096) * 4096] {
                let io = self.rig.request(self.well, IoOp::Read, from as u64, len as u64);
                self.run(io, what);
                let data = self.rig.buffer(self.well, Tag(0), len);
                assert!(data == self.content[from..from + len], "{what}: {from}+{len}");
            }
            let io = self.rig.request(self.well, IoOp::Flush, 0, 0);
            self.run(io, what);
            assert!(self.rig.store_mut().inner.bytes(WELL) == self.content, "{what}: flushed");
        }
    }

    fn wake(&mut self) {
        self.rig.store_mut().is_stuck = false;
    }

    /// Ends every connection. Then no memory is held.
    fn end(mut self, what: &str) {
        for session in self.sessions {
            self.rig.new_epoch(session).expect("connections end");
        }
        let idle = |rig: &mut Rig<PartlyStuck>| {
            rig.group_mut().shard().is_idle() && rig.group_mut().shard().slots().dirty() == 0
        };
        self.rig.run(PATIENCE, idle).expect(what);
        assert_eq!(self.rig.group_mut().shard().slots().held().next(), None, "{what}");
    }
}

#[test]
fn a_stuck_volume_leaves_memory_to_others() {
    let mut random = Random::new(5);
    for stuck in MODES {
        for well in MODES {
            let what = format!("{stuck:?} is stuck, {well:?} is not");
            let mut two = Two::new(16 * MIB, [stuck, well]);
            let options = QueueOptions { depth: 32, ..QueueOptions::default() };
            let (reader, writer) = (two.queue(options), two.queue(options));
            let data = pattern(7, MIB);
            for tag in 0..32 {
                // Whole blocks, which become dirty at once, and others.
                let len = MIB - 512 * usize::from(tag % 2);
                two.rig.fill_buffer(writer, Tag(tag), &data);
                two.submit(writer, tag, IoOp::Write, usize::from(tag) * MIB, len);
            }
            for _ in 0..1000 {
                two.rig.step();
            }
            for tag in 0..32 {
                two.submit(reader, tag, IoOp::Read, (usize::from(tag) + 4) * MIB, MIB);
            }
            for _ in 0..1000 {
                two.rig.step();
            }
            // Acknowledged from memory, up to the limit of dirty bytes.
            let written = two.rig.take_outcomes();
            assert_eq!(!written.is_empty(), stuck == CacheMode::WriteBack, "{what}: {written:?}");
            let (of_reader, of_writer) = (two.rig.outstanding(reader), two.rig.outstanding(writer));
            assert!(of_reader > 16 && of_writer > 8, "{what}: {of_reader}, {of_writer}");
            assert!(two.rig.target_counts().memory_waits > 0);
            for _ in 0..3 {
                two.goes_on(&mut random, &what);
            }
            // The store comes back, and every waiting request ends.
            two.wake();
            let done =
                two.rig.run(PATIENCE, |rig| rig.outstanding(reader) + rig.outstanding(writer) == 0);
            assert!(done.is_ok(), "{what}: {:?}", two.rig);
            assert!(two.rig.take_outcomes().iter().all(|outcome| outcome.result >= 0), "{what}");
            two.goes_on(&mut random, &what);
            two.end(&what);
        }
    }
}

#[test]
fn a_stuck_volume_leaves_operations_to_others() {
    let mut random = Random::new(6);
    for (at, stuck) in MODES.into_iter().enumerate() {
        let well = MODES[(at + 1) % 3];
        let what = format!("{stuck:?} is stuck, {well:?} is not");
        let mut two = Two::new(32 * MIB, [stuck, well]);
        let options = QueueOptions { depth: 1024, io_max_bytes: 4096, ..QueueOptions::default() };
        let queues = [two.queue(options), two.queue(options)];
        let size = VOLUME_LEN / 4096;
        for (half, queue) in queues.into_iter().enumerate() {
            for tag in 0..1000u16 {
                // No neighbours, and no two reads of one block.
                let block = (usize::from(tag) * 2 + half * 2000) % size;
                two.submit(queue, tag, IoOp::Read, block * 4096, 4096);
            }
        }
        for _ in 0..1000 {
            two.rig.step();
        }
        assert_eq!(two.rig.store_mut().kept.len(), 512, "{what}");
        two.goes_on(&mut random, &what);
        assert_eq!(two.rig.store_mut().kept.len(), 512, "{what}");
        two.wake();
        let done =
            two.rig.run(PATIENCE, |rig| queues.iter().all(|queue| rig.outstanding(*queue) == 0));
        assert!(done.is_ok(), "{what}: {:?}", two.rig);
        assert!(two.rig.take_outcomes().iter().all(|outcome| outcome.result == 4096), "{what}");
        two.end(&what);
    }
}

#[test]
fn a_dead_connection_of_a_stuck_volume_is_destroyed_in_the_end() {
    let mut random = Random::new(7);
    for stuck in MODES {
        let what = format!("{stuck:?}");
        let mut two = Two::new(16 * MIB, [stuck, CacheMode::WriteThrough]);
        let options = QueueOptions { depth: 32, ..QueueOptions::default() };
        let queue = two.queue(options);
        for tag in 0..32 {
            let op = [IoOp::Read, IoOp::Write, IoOp::WriteZeroes][usize::from(tag % 3)];
            two.submit(queue, tag, op, usize::from(tag) * MIB, MIB - 512);
        }
        for _ in 0..1000 {
            two.rig.step();
        }
        two.rig.wire(queue).expect("a path").cut();
        two.rig.take_outcomes();
        two.goes_on(&mut random, &what);
        for _ in 0..1000 {
            two.rig.step();
        }
        assert_eq!(two.rig.connections(two.sessions[0]), 1, "{what}: its jobs are not done");
        two.wake();
        let stuck = two.sessions[0];
        let gone = two.rig.run(PATIENCE, |rig| rig.connections(stuck) == 0);
        assert!(gone.is_ok(), "{what}: {:?}", two.rig);
        two.goes_on(&mut random, &what);
        two.end(&what);
    }
}

#[test]
fn a_volume_alone_may_use_more_than_half() {
    for mode in MODES {
        let volume =
            VolumeSpec { cache: mode, ..VolumeSpec::new(VolumeKind::Store, VOLUME_LEN as u64) };
        let options = RigOptions { volumes: vec![volume], ..RigOptions::default() };
        let mut rig = Rig::new(&options, |region| {
            let mut store = RamStore::new(region, 1);
            store.set_volume(STUCK, vec![0; VOLUME_LEN]);
            store.set_conditions(StoreConditions { stalled: true, ..StoreConditions::default() });
            store
        })
        .expect("a rig");
        // One session alone may keep less.
        let queues = [(); 6].map(|()| {
            let session = rig.begin_session();
            rig.open(session, STUCK, AccessMode::Shared);
            let queue = rig.add_queue(session, STUCK, QueueOptions::default()).expect("a queue");
            rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
            queue
        });
        for (at, queue) in (0u64..).zip(queues) {
            for tag in 0..4u16 {
                let block = at * 4 + u64::from(tag);
                let io = rig.request(queue, IoOp::Read, block << 20, 1 << 20);
                rig.submit(queue, Tag(tag), io).expect("a free tag");
            }
        }
        // Sixteen requests fill the memory, less the part for dirty blocks.
        let half = if mode == CacheMode::WriteBack { 6 } else { 8 };
        let more = rig.run(PATIENCE, |rig| rig.store_mut().in_flight() > half);
        assert!(more.is_ok(), "{mode:?}: {rig:?}");
        rig.store_mut().set_conditions(StoreConditions::default());
        for queue in queues {
            rig.run(PATIENCE, |rig| rig.outstanding(queue) == 0).expect("reads that end");
        }
    }
}
