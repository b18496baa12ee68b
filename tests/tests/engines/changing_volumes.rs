//! A volume that changes while requests are under way, in the steps that control would order, over
//! the in-memory network. No acknowledged write is lost. Every request meets the old or the new
//! volume. Dirty blocks are in the store before the volume goes.

use std::collections::BTreeMap;
use std::sync::Arc;

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, BlockCount, Tag};
use rblk_rig::crash_store::CrashStore;
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::StoreConditions;
use rblk_rig::seed::Random;
use rblk_target::data::poll_group::VolumeStep;
use rblk_target::volume::ids::SessionIndex;
use rblk_target::volume::{CacheMode, Volume};
use rblk_tests::bed::{PATIENCE, pattern};
use rblk_tests::long::times;
use rblk_tests::storm::{VOLUME, seeds};

const MIB: usize = 1 << 20;
/// Bytes of the disk. The volume covers a part of it.
const DISK: usize = 6 * MIB;
const DEPTH: u16 = 16;
/// Bytes of one request.
const IO: usize = 8192;
const EROFS: i32 = -30;

/// A request under way.
struct Asked {
    op: IoOp,
    at: usize,
    data: Vec<u8>,
    // The volume has refused writes at some time since.
    frozen: bool,
    // Its connection ended, so the request may have been done, and its answer lost.
    cut: bool,
}

struct World {
    rig: Rig<CrashStore>,
    session: SessionIndex,
    queue: QueueId,
    random: Random,
    // The bytes that the volume must have, also beyond its present end.
    model: Vec<u8>,
    asked: BTreeMap<u16, Asked>,
    volume: Volume,
    // The smallest size of the volume since the oldest request.
    shortest: usize,
    counts: (usize, usize, usize),
}

impl World {
    fn new(seed: u64, cache: CacheMode, groups: usize) -> Self {
        let image = pattern(seed, DISK);
        let spec = VolumeSpec {
            cache,
            read_ahead_bytes: 64 << 10,
            ..VolumeSpec::new(VolumeKind::Store, 3 * MIB as u64)
        };
        let options = RigOptions {
            seed,
            groups,
            volumes: vec![spec],
            arena_bytes: groups * 2 * MIB,
            dirty_max_bytes: groups * MIB,
            io_max_bytes: 64 << 10,
            ..RigOptions::default()
        };
        let conditions = StoreConditions { delay_min: 1, delay_max: 30, ..Default::default() };
        let stores = CrashStore::shared(|region| {
            let mut store = CrashStore::new(region, seed);
            store.set_volume(VOLUME, image.clone());
            store.set_conditions(conditions);
            store
        });
        let mut rig = Rig::new(&options, stores).expect("a rig");
        let session = rig.begin_session();
        rig.open(session, VOLUME, AccessMode::Exclusive);
        let options = QueueOptions { depth: DEPTH, io_max_bytes: 64 << 10, ..Default::default() };
        let queue = rig.add_queue(session, VOLUME, options).expect("a queue");
        let volume = Volume::clone(&rig.volumes()[0]);
        Self {
            rig,
            session,
            queue,
            random: Random::new(seed ^ 0x6368),
            model: image,
            asked: BTreeMap::new(),
            volume,
            shortest: 3 * MIB,
            counts: (0, 0, 0),
        }
    }

    /// A request on every free tag. Each tag has blocks of its own, so that the order of requests
    /// does not matter.
    fn submit(&mut self) {
        for tag in 0..DEPTH {
            if self.asked.contains_key(&tag) || self.random.chance(500) {
                continue;
            }
            let bytes = usize::try_from(self.volume.size_bytes()).unwrap();
            let places = (DISK.min(bytes + MIB / 2)) / (IO * usize::from(DEPTH));
            let at = (self.random.index(places) * usize::from(DEPTH) + usize::from(tag)) * IO;
            let op = if self.random.chance(500) { IoOp::Write } else { IoOp::Read };
            let data = pattern(self.random.below(u64::MAX), IO);
            let fill = if op == IoOp::Write { data.clone() } else { vec![0xee; IO] };
            self.rig.fill_buffer(self.queue, Tag(tag), &fill);
            let io = self.rig.request(self.queue, op, at as u64, IO as u64);
            self.rig.submit(self.queue, Tag(tag), io).expect("a free tag");
            self.asked
                .insert(tag, Asked { op, at, data, frozen: self.volume.read_only, cut: false });
        }
    }

    fn take_outcomes(&mut self) {
        for outcome in self.rig.take_outcomes() {
            let tag = outcome.tag.0;
            let Asked { op, at, data, frozen, cut } =
                self.asked.remove(&tag).expect("it was asked");
            if cut && op == IoOp::Write && outcome.result < 0 {
                // The write is refused now. An earlier attempt may have changed the disk, and was
                // written back.
                let disk = self.rig.store_mut().bytes(VOLUME);
                self.model[at..at + IO].copy_from_slice(&disk[at..at + IO]);
            }
            if outcome.result == EROFS {
                assert!(op == IoOp::Write && frozen, "a write was refused that was allowed");
                self.counts.1 += 1;
            } else if outcome.result < 0 {
                assert!(at + IO > self.shortest, "{op:?} at {at}: {}", outcome.result);
                self.counts.2 += 1;
            } else if op == IoOp::Write {
                self.model[at..at + IO].copy_from_slice(&data);
                self.counts.0 += 1;
            } else {
                let read = self.rig.buffer(self.queue, Tag(tag), IO);
                assert!(read == self.model[at..at + IO], "a read at {at} is wrong");
                self.counts.0 += 1;
            }
        }
        if self.asked.is_empty() {
            self.shortest = usize::try_from(self.volume.size_bytes()).unwrap();
        }
    }

    /// Runs `steps` steps with requests.
    fn work(&mut self, steps: usize) {
        for _ in 0..steps {
            self.submit();
            self.rig.step();
            self.take_outcomes();
        }
    }

    /// Runs a step of a change, beside requests.
    fn step(&mut self, step: VolumeStep) {
        self.step_of(&Arc::new(self.volume.clone()), step);
    }

    fn step_of(&mut self, volume: &Arc<Volume>, step: VolumeStep) {
        self.rig.begin_step(volume, step);
        for _ in 0..PATIENCE {
            if let Some(result) = self.rig.step_outcome() {
                assert_eq!(result, Ok(()), "{step:?}");
                return;
            }
            self.work(1);
        }
        panic!("{step:?} does not end: {:?}", self.rig);
    }

    fn access(&mut self) {
        let volume = Arc::new(self.volume.clone());
        self.rig.note_volume(Arc::clone(&volume));
        self.step_of(&volume, VolumeStep::Access);
    }

    fn bytes(&self) -> usize {
        usize::try_from(self.volume.size_bytes()).unwrap()
    }

    fn set_bytes(&mut self, bytes: usize) {
        self.volume.blocks = BlockCount(bytes as u64 / 512);
        self.shortest = self.shortest.min(bytes);
    }

    fn grow(&mut self) {
        let more = self.random.index((DISK - self.bytes()) / IO + 1) * IO;
        self.set_bytes(self.bytes() + more);
        self.step(VolumeStep::Grow);
        self.access();
    }

    fn freeze(&mut self) {
        self.volume.read_only = !self.volume.read_only;
        if self.volume.read_only {
            self.asked.values_mut().for_each(|asked| asked.frozen = true);
        }
        self.access();
    }

    /// Closes the volume, and checks that the disk has every acknowledged write.
    fn close(&mut self) {
        self.step(VolumeStep::Close);
        self.asked.values_mut().for_each(|asked| asked.cut = true);
        self.step(VolumeStep::WriteBack);
        let maybe: Vec<usize> =
            self.asked.values().filter(|a| a.op == IoOp::Write).map(|a| a.at).collect();
        let disk = self.rig.store_mut().durable(VOLUME);
        for at in (0..DISK).step_by(IO).filter(|at| !maybe.contains(at)) {
            assert!(disk[at..at + IO] == self.model[at..at + IO], "{at} is not on the disk");
        }
    }

    /// Lets the host in again.
    fn open_again(&mut self) {
        self.access();
        self.rig.new_epoch(self.session).expect("the old connections end");
        self.rig.reconnect(self.queue).expect("a path");
    }

    /// Changes the size or the cache mode.
    fn reshape(&mut self) {
        self.close();
        if self.random.chance(500) {
            let bytes = MIB + self.random.index(2 * MIB / IO) * IO;
            self.set_bytes(bytes.min(self.bytes()));
        } else {
            const MODES: [CacheMode; 3] =
                [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];
            self.volume.cache = MODES[self.random.index(3)];
        }
        self.step(VolumeStep::Quiet);
        self.step(VolumeStep::Reshape);
        self.open_again();
    }

    /// Removes the volume and adds it again.
    fn replace(&mut self) {
        self.close();
        self.step(VolumeStep::Quiet);
        self.step(VolumeStep::Drop);
        for group in self.rig.groups_mut() {
            assert_eq!(group.shard().slots().cached(), 0, "nothing of it is left");
        }
        // Its store is opened for writing.
        let volume = Arc::new(Volume { read_only: false, ..self.volume.clone() });
        self.step_of(&volume, VolumeStep::Add);
        self.open_again();
    }
}

#[test]
fn requests_under_way_see_no_half_of_a_change() {
    let mut counts = (0, 0, 0);
    for seed in seeds(times(24, 400)) {
        println!("seed {seed}");
        let cache = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];
        let groups = 1 + usize::try_from(seed % 3).unwrap();
        let mut w = World::new(seed, cache[usize::try_from(seed / 3 % 3).unwrap()], groups);
        for _ in 0..8 {
            let steps = w.random.index(200);
            w.work(steps);
            match w.random.below(4) {
                0 => w.grow(),
                1 => w.freeze(),
                2 => w.reshape(),
                _ => w.replace(),
            }
        }
        w.work(100);
        for _ in 0..PATIENCE {
            if w.asked.is_empty() {
                break;
            }
            w.rig.step();
            w.take_outcomes();
        }
        assert!(w.asked.is_empty(), "requests were not answered: {:?}", w.rig);
        w.close();
        assert_eq!(w.rig.store_mut().breaches(), [""; 0]);
        assert_eq!(w.rig.target_counts().protocol_errors, 0, "nobody broke a rule");
        counts = (counts.0 + w.counts.0, counts.1 + w.counts.1, counts.2 + w.counts.2);
    }
    println!("{counts:?} requests were done, refused as read-only, and beyond the end");
    assert!(counts.0 > 100 && counts.1 > 5 && counts.2 > 5, "{counts:?}");
}
