//! The contents of a snapshot: writers over several queues, in several poll groups, while the steps
//! of a snapshot are ordered over the in-memory network. A copy of the disk replaces the clone.
//!
//! Each place of the volume has one writer, which sends the next write after the answer to the last
//! one. So for two writes of any places the order is known if one was answered before the other was
//! sent. A snapshot with the second one must have the first one.
//!
//! Between the steps the test computes the contents after a crash of the machine and of the
//! program, and checks them; then the snapshot goes on. While the file is cloned, a crash changes
//! nothing.

use std::sync::Arc;

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::crash_store::CrashStore;
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::StoreConditions;
use rblk_rig::seed::Random;
use rblk_target::data::poll_group::VolumeStep;
use rblk_target::volume::CacheMode;
use rblk_tests::bed::PATIENCE;
use rblk_tests::long::times;
use rblk_tests::storm::{VOLUME, seeds};

const MIB: usize = 1 << 20;
const DISK: usize = 4 * MIB;
const QUEUES: usize = 5;
const PLACES: usize = 20;
/// Bytes that a crash leaves whole.
const SECTOR: usize = 512;
/// Bytes between two places. No fraction of a stripe, so that some writes span two stripes.
const STRIDE: usize = 196 << 10;

/// A write: when it was sent and when it was answered, in steps of the rig.
#[derive(Clone, Copy)]
struct Sent {
    at: u64,
    answered: Option<u64>,
}

/// A place with its writes. The bytes of write N are all N.
struct Place {
    offset: usize,
    len: usize,
    // Write 0 is the contents at the beginning.
    writes: Vec<Sent>,
    under_way: Option<(usize, u16)>,
}

impl Place {
    /// The number of the write that an image has here, which must be complete.
    fn number_in(&self, image: &[u8]) -> usize {
        let bytes = &image[self.offset..self.offset + self.len];
        let number = bytes[0];
        assert!(bytes.iter().all(|byte| *byte == number), "a write is there in part");
        // Numbers wrap. The last match counts.
        let last = self.writes.len() - 1;
        (0..=last).rev().find(|at| at % 251 == usize::from(number)).expect("it was sent")
    }
}

struct World {
    rig: Rig<CrashStore>,
    queues: Vec<QueueId>,
    random: Random,
    places: Vec<Place>,
    now: u64,
    answers: usize,
}

impl World {
    fn new(seed: u64, cache: CacheMode, groups: usize) -> Self {
        let spec = VolumeSpec { cache, ..VolumeSpec::new(VolumeKind::Store, DISK as u64) };
        let options = RigOptions {
            seed,
            groups,
            volumes: vec![spec],
            arena_bytes: groups * 2 * MIB,
            dirty_max_bytes: groups * MIB,
            io_max_bytes: 64 << 10,
            skipped_turns_per_mille: 300,
            ..RigOptions::default()
        };
        let conditions = StoreConditions { delay_min: 1, delay_max: 60, ..Default::default() };
        let stores = CrashStore::shared(|region| {
            let mut store = CrashStore::new(region, seed);
            store.set_volume(VOLUME, vec![0; DISK]);
            store.set_conditions(conditions);
            store
        });
        let mut rig = Rig::new(&options, stores).expect("a rig");
        let session = rig.begin_session();
        rig.open(session, VOLUME, AccessMode::Exclusive);
        let options = QueueOptions { depth: 8, io_max_bytes: 64 << 10, ..Default::default() };
        let queue = |_| rig.add_queue(session, VOLUME, options).expect("a queue");
        let queues = (0..QUEUES).map(queue).collect();
        let mut random = Random::new(seed ^ 0x736e_6170);
        let before = Sent { at: 0, answered: Some(0) };
        let place = |at| {
            let len = [4096, 16 << 10, 64 << 10][random.index(3)];
            Place { offset: at * STRIDE, len, writes: vec![before], under_way: None }
        };
        let places = (0..PLACES).map(place).collect();
        Self { rig, queues, random, places, now: 1, answers: 0 }
    }

    /// Sends writes to places without one, by any queue.
    fn submit(&mut self) {
        for at in 0..PLACES {
            if self.places[at].under_way.is_some() || self.random.chance(800) {
                continue;
            }
            let queue = self.random.index(QUEUES);
            let place = &self.places[at];
            let taken = |tag| self.places.iter().any(|p| p.under_way == Some((queue, tag)));
            let Some(tag) = (0..7).find(|tag| !taken(*tag)) else { continue };
            let (number, id) = (place.writes.len(), self.queues[queue]);
            let data = vec![u8::try_from(number % 251).unwrap(); place.len];
            self.rig.fill_buffer(id, Tag(tag), &data);
            let io = self.rig.request(id, IoOp::Write, place.offset as u64, place.len as u64);
            self.rig.submit(id, Tag(tag), io).expect("a free tag");
            self.places[at].writes.push(Sent { at: self.now, answered: None });
            self.places[at].under_way = Some((queue, tag));
        }
    }

    /// One step of everything. Returns how many reads were answered.
    fn step(&mut self) -> usize {
        self.submit();
        self.rig.step();
        self.now += 1;
        let mut reads = 0;
        for outcome in self.rig.take_outcomes() {
            assert!(outcome.result >= 0, "{}", outcome.result);
            let queue = self.queues.iter().position(|id| *id == outcome.queue).unwrap();
            let whose = Some((queue, outcome.tag.0));
            let Some(place) = self.places.iter_mut().find(|place| place.under_way == whose) else {
                reads += 1;
                continue;
            };
            place.under_way = None;
            place.writes.last_mut().unwrap().answered = Some(self.now);
            self.answers += 1;
        }
        reads
    }

    fn order(&mut self, step: VolumeStep) {
        let volume = Arc::clone(&self.rig.volumes()[0]);
        self.rig.begin_step(&volume, step);
        for _ in 0..PATIENCE {
            if let Some(result) = self.rig.step_outcome() {
                return assert_eq!(result, Ok(()), "{step:?}");
            }
            self.step();
        }
        panic!("{step:?} does not end: {:?}", self.rig);
    }

    /// Checks that reads are answered, and that no write is.
    fn look_while_held(&mut self) {
        let (id, answers) = (self.queues[0], self.answers);
        let io = self.rig.request(id, IoOp::Read, (DISK - 4096) as u64, 4096);
        self.rig.submit(id, Tag(7), io).expect("a free tag");
        let mut reads = 0;
        for _ in 0..400 {
            reads += self.step();
        }
        assert_eq!((reads, self.answers), (1, answers));
    }

    /// Takes a snapshot beside active writers. Returns its beginning, and its contents.
    fn snapshot(&mut self) -> (u64, Vec<u8>) {
        let begins = self.now;
        self.order(VolumeStep::WriteBack);
        self.check_crashes(begins);
        let began = self.now;
        self.order(VolumeStep::Hold);
        self.check_crashes(begins);
        self.order(VolumeStep::WriteBack);
        self.look_while_held();
        let image = self.rig.store_mut().durable(VOLUME);
        for crashed in self.crashes() {
            // So the file system's clone sees one state, and a crash before or after it changes
            // nothing of the volume.
            assert!(crashed == image, "something of the volume is in flight while it is cloned");
        }
        let held = self.now;
        self.order(VolumeStep::Access);
        self.check_crashes(held);
        (began, image)
    }

    /// The contents after a crash of the machine now, and after one of the program.
    fn crashes(&mut self) -> [Vec<u8>; 2] {
        let seed = self.random.bits();
        let store = self.rig.store_mut();
        [store.crash(VOLUME, seed), store.kill(VOLUME, seed)]
    }

    /// After any crash: writes answered before `since` are there, or later ones. At `since` a step
    /// began that makes them durable.
    fn check_crashes(&mut self, since: u64) {
        for image in self.crashes() {
            for place in &self.places {
                let answered = |sent: &Sent| sent.answered.is_some_and(|at| at < since);
                let floor = place.writes.iter().rposition(answered).expect("what was before");
                let bytes = &image[place.offset..place.offset + place.len];
                for sector in bytes.chunks(SECTOR) {
                    let number = sector[0];
                    let is_whole = sector.iter().all(|byte| *byte == number);
                    let is_there =
                        (floor..place.writes.len()).any(|at| at % 251 == usize::from(number));
                    assert!(
                        is_whole && is_there,
                        "{number} at {}, and write {floor} was durable",
                        place.offset
                    );
                }
            }
        }
    }

    /// Checks the contents of a snapshot.
    fn check(&self, began: u64, image: &[u8]) {
        let held: Vec<usize> = self.places.iter().map(|place| place.number_in(image)).collect();
        let newest = self.places.iter().zip(&held).map(|(place, number)| place.writes[*number].at);
        // Writes answered before its newest write was sent must be in it.
        let newest = newest.max().unwrap().max(began);
        for (place, number) in self.places.iter().zip(held) {
            for (later, write) in place.writes.iter().enumerate().skip(number + 1) {
                let is_before = write.answered.is_some_and(|answered| answered < newest);
                assert!(!is_before, "write {later} at {} is not in it", place.offset);
            }
        }
    }
}

#[test]
fn a_snapshot_has_every_write_that_was_answered_before_another_of_its_writes() {
    let mut answers = 0;
    for seed in seeds(times(24, 400)) {
        println!("seed {seed}");
        let cache = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];
        let groups = 1 + usize::try_from(seed % 3).unwrap();
        let mut w = World::new(seed, cache[usize::try_from(seed / 3 % 3).unwrap()], groups);
        for _ in 0..3 {
            for _ in 0..w.random.index(300) {
                w.step();
            }
            let (began, image) = w.snapshot();
            w.check(began, &image);
            // The held writes are done in the end.
            let before = w.answers;
            for _ in 0..PATIENCE {
                if w.answers >= before + PLACES {
                    break;
                }
                w.step();
            }
            assert!(w.answers >= before + PLACES, "writes stay held: {:?}", w.rig);
        }
        assert_eq!(w.rig.store_mut().breaches(), [""; 0]);
        answers += w.answers;
    }
    assert!(answers > 1000, "{answers}");
}

#[test]
fn a_write_that_is_held_ends_with_its_connection() {
    let mut w = World::new(7, CacheMode::WriteBack, 2);
    w.order(VolumeStep::Hold);
    for _ in 0..100 {
        w.step();
    }
    assert!(w.places.iter().any(|place| place.under_way.is_some()), "none is held");
    w.rig.drop_queue(w.queues[0], true);
    for _ in 0..2000 {
        w.rig.step();
    }
    w.order_alone(VolumeStep::Access);
    for _ in 0..2000 {
        w.rig.step();
    }
    let done = w.rig.take_outcomes();
    assert!(done.iter().any(|outcome| outcome.queue != w.queues[0] && outcome.result >= 0));
    assert_eq!(w.rig.store_mut().breaches(), [""; 0]);
}

impl World {
    /// Runs a step without new writes.
    fn order_alone(&mut self, step: VolumeStep) {
        let volume = Arc::clone(&self.rig.volumes()[0]);
        self.rig.begin_step(&volume, step);
        for _ in 0..PATIENCE {
            if let Some(result) = self.rig.step_outcome() {
                return assert_eq!(result, Ok(()), "{step:?}");
            }
            self.rig.step();
        }
        panic!("{step:?} does not end");
    }
}
