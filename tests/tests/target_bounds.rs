//! What one volume, peer or dead QP may keep from the others: a store that forgets a volume, peers that take
//! nothing, QPs that do not flush, long zeroing.

use std::time::Duration;

use rblk_bench::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_bench::ram_store::{RamStore, StoreConditions};
use rblk_bench::seed::Random;
use rblk_fabric::soft::memory::{Conditions, End};
use rblk_initiator::io::{Io, IoOp};
use rblk_protocol::{AccessMode, Opcode, Tag};
use rblk_target::cache::slots::{Holders, State};
use rblk_target::connection::SessionSlot;
use rblk_target::poll_group::ToGroup;
use rblk_target::store::{Op, OpDone, Segment, Store, VolumeIndex};
use rblk_target::volume::CacheMode;
use rblk_tests::bed::{Bed, MEMORY, PATIENCE, STORE, VOLUME_BYTES, pattern};
use rblk_tests::raw::{Heard, RawPeer};

const MIB: usize = 1 << 20;
const MODES: [CacheMode; 3] = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];
/// Whose store may be stuck.
const STUCK: VolumeIndex = VolumeIndex(0);
const WELL: VolumeIndex = VolumeIndex(1);

/// A store that keeps the ops of one volume while it is told to, and takes so many in all.
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

/// Two volumes at a store that has forgotten the first, and a queue of each.
struct Two {
    rig: Rig<PartlyStuck>,
    sessions: [SessionSlot; 2],
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

    /// The well volume does everything that it ever did, with the longest requests too.
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

    /// Every connection ends, and then nobody has anything.
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
                // Whole blocks, which may be dirty at once, and others.
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
            // From memory, as many as may be dirty.
            let written = two.rig.take_outcomes();
            assert_eq!(!written.is_empty(), stuck == CacheMode::WriteBack, "{what}: {written:?}");
            let (of_reader, of_writer) = (two.rig.outstanding(reader), two.rig.outstanding(writer));
            assert!(of_reader > 16 && of_writer > 8, "{what}: {of_reader}, {of_writer}");
            assert!(two.rig.target_counts().memory_waits > 0);
            for _ in 0..3 {
                two.goes_on(&mut random, &what);
            }
            // The store comes back, and everything that waits with it.
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
                // Not each other's neighbours, and not of the same block.
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
fn a_dead_connection_of_a_stuck_volume_is_buried_in_the_end() {
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
fn a_volume_alone_may_use_everything() {
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
        let session = rig.begin_session();
        rig.open(session, STUCK, AccessMode::Exclusive);
        let queue = rig.add_queue(session, STUCK, QueueOptions::default()).expect("a queue");
        rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
        for tag in 0..32u16 {
            let io = rig.request(queue, IoOp::Read, u64::from(tag) << 20, 1 << 20);
            rig.submit(queue, Tag(tag), io).expect("a free tag");
        }
        // Sixteen of them are all there is.
        let all = rig.run(PATIENCE, |rig| rig.store_mut().in_flight() == 16);
        assert!(all.is_ok(), "{mode:?}: {rig:?}");
        rig.store_mut().set_conditions(StoreConditions::default());
        rig.run(PATIENCE, |rig| rig.outstanding(queue) == 0).expect("reads that end");
    }
}

/// A step of these beds: long enough that seconds pass.
const TICK: Duration = Duration::from_millis(10);
const SECOND: u64 = 100;

fn slow_clock() -> RigOptions {
    RigOptions { tick: TICK, ..RigOptions::default() }
}

/// Many answers between two that tell of their completion.
fn raw_options() -> QueueOptions {
    QueueOptions { depth: 32, io_max_bytes: 64 << 10, ..QueueOptions::default() }
}

/// A bed with an honest queue, and a session with a connection that is driven by hand.
fn suspected() -> (Bed, QueueId, SessionSlot, RawPeer) {
    let mut bed = Bed::new(&slow_clock());
    // It has no memory of the arena.
    let bystander = bed.queue(MEMORY, raw_options());
    let suspect = bed.rig.begin_session();
    bed.open_all(suspect);
    let peer = RawPeer::tested(&mut bed, suspect, STORE, raw_options());
    (bed, bystander, suspect, peer)
}

fn ask_all(peer: &mut RawPeer, opcode: Opcode) {
    for tag in 0..32 {
        let command = peer.transfer(opcode, tag, u64::from(tag) * 128, 128);
        peer.send(&command.to_wire());
    }
}

fn held(bed: &mut Bed) -> usize {
    bed.rig.group_mut().shard().slots().held().count()
}

#[test]
fn a_peer_that_neither_takes_nor_gives_is_ended() {
    for opcode in [Opcode::Read, Opcode::Write] {
        let (mut bed, bystander, suspect, mut peer) = suspected();
        ask_all(&mut peer, opcode);
        // Nobody listens at the other end from now on.
        let stalls = if opcode == Opcode::Read { End::B } else { End::A };
        bed.rig.step();
        peer.wire.stall(stalls, true);
        let begun = bed.rig.elapsed();
        for _ in 0..19 * SECOND / 10 {
            for _ in 0..10 {
                bed.rig.step();
            }
            // Others are served.
            let data = bed.read(bystander, 0, 4096);
            assert_eq!(data.len(), 4096);
            if bed.rig.elapsed() - begun > Duration::from_secs(19) {
                break;
            }
        }
        assert_eq!(bed.rig.connections(suspect), 1, "{opcode:?}: ended too soon");
        assert!(held(&mut bed) > 0, "{opcode:?}: nothing was lent");
        let lost = bed.rig.target_counts().lost_connections;
        let gone = bed.rig.run(10 * SECOND, |rig| rig.connections(suspect) == 0);
        assert!(gone.is_ok(), "{opcode:?}: {:?}", bed.rig);
        let took = bed.rig.elapsed() - begun;
        assert!((20..=23).contains(&took.as_secs()), "{opcode:?}: after {took:?}");
        assert_eq!(bed.rig.target_counts().lost_connections, lost + 1);
        // What it had is everybody's.
        bed.rig.run(100, |rig| rig.group_mut().shard().slots().held().next().is_none()).unwrap();
        bed.write(bystander, 4096, &pattern(1, 16384));
        assert!(bed.read(bystander, 4096, 16384) == pattern(1, 16384));
        assert_eq!(bed.rig.take_path_ends(bystander), []);
        bed.assert_arena_is_whole(&slow_clock());
    }
}

#[test]
fn a_slow_peer_that_moves_is_not_ended() {
    for opcode in [Opcode::Read, Opcode::Write] {
        let (mut bed, _, suspect, mut peer) = suspected();
        ask_all(&mut peer, opcode);
        let mut answered = 0;
        for round in 0..8 {
            // Deaf for long, but not for too long.
            bed.rig.step();
            peer.wire.stall(End::A, true);
            peer.wire.stall(End::B, true);
            for _ in 0..15 * SECOND {
                bed.rig.step();
            }
            assert!(held(&mut bed) > 0, "{opcode:?}, {round}: nothing waits for it");
            assert_eq!(bed.rig.connections(suspect), 1, "{opcode:?}, {round}");
            peer.wire.stall(End::A, false);
            peer.wire.stall(End::B, false);
            for _ in 0..50 {
                bed.rig.step();
                let heard = peer.listen();
                assert!(!heard.iter().any(|heard| matches!(heard, Heard::End(_))), "{round}");
                answered += heard.len();
                if answered >= 32 * (round + 1) {
                    ask_all(&mut peer, opcode);
                    break;
                }
            }
        }
        assert!(answered >= 32 * 4, "{opcode:?}: it was deaf: {answered}");
        assert_eq!(bed.rig.take_gone().len(), 0);
    }
}

#[test]
fn a_peer_that_wants_nothing_is_not_ended() {
    let (mut bed, bystander, suspect, mut peer) = suspected();
    // Answers that do not tell of their completion are on their way, as far as the target knows.
    let command = peer.transfer(Opcode::Read, 1, 0, 128);
    peer.send(&command.to_wire());
    assert!(!matches!(peer.hear(&mut bed), Heard::End(_)));
    assert!(held(&mut bed) > 0, "the answer told of its completion");
    for _ in 0..100 * SECOND {
        bed.rig.step();
    }
    assert_eq!(bed.rig.connections(suspect), 1);
    assert_eq!(bed.rig.take_path_ends(bystander), []);
    // A while without anything on its way does not count.
    ask_all(&mut peer, Opcode::Write);
    peer.wire.stall(End::A, true);
    for _ in 0..15 * SECOND {
        bed.rig.step();
    }
    assert_eq!(bed.rig.connections(suspect), 1);
    peer.wire.stall(End::A, false);
    let mut answered = 0;
    let all = bed.rig.run(10 * SECOND, |_| {
        answered += peer.listen().iter().filter(|h| !matches!(h, Heard::End(_))).count();
        answered == 32
    });
    assert!(all.is_ok(), "{answered} answers");
}

/// Slots that are held, with their bytes.
fn lent(rig: &mut Rig<RamStore>) -> Vec<(usize, Holders, Vec<u8>)> {
    let mut all = Vec::new();
    for (at, group) in rig.groups_mut().enumerate() {
        let slots = group.shard().slots();
        for (slot, holders) in slots.held() {
            let mut bytes = vec![0; 4096];
            slots.region().read(slots.offset(slot), &mut bytes);
            all.push((at << 20 | slot.0 as usize, holders, bytes));
        }
    }
    all
}

/// A target of so many groups, whose arena is eight requests for each, two sessions, and a queue of each.
struct Jam {
    rig: Rig<RamStore>,
    image: Vec<u8>,
    mortal: SessionSlot,
    dying: QueueId,
    well: QueueId,
}

const IO: usize = 64 << 10;

impl Jam {
    fn new(groups: usize, cache: CacheMode) -> Self {
        let volume = VolumeSpec { cache, ..VolumeSpec::new(VolumeKind::Store, 4 << 20) };
        let options = RigOptions {
            tick: TICK,
            groups,
            arena_bytes: groups * 8 * IO,
            dirty_max_bytes: groups * 2 * IO,
            io_max_bytes: 64 << 10,
            volumes: vec![volume],
            ..RigOptions::default()
        };
        let image = pattern(9, 4 * MIB);
        let mut rig = Rig::new(&options, |region| {
            let mut store = RamStore::new(region, 1);
            store.set_volume(STUCK, image.clone());
            store
        })
        .expect("a rig");
        let options = QueueOptions { depth: 8, io_max_bytes: 64 << 10, ..QueueOptions::default() };
        let [(mortal, dying), (_, well)] = [(); 2].map(|()| {
            let session = rig.begin_session();
            rig.open(session, STUCK, AccessMode::Shared);
            let queue = rig.add_queue(session, STUCK, options).expect("a queue");
            rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
            (session, queue)
        });
        Self { rig, image, mortal, dying, well }
    }

    /// The first queue dies while the target sends to it and reads from it, and its QP does not flush.
    fn jam(&mut self) {
        let wire = self.rig.wire(self.dying).expect("a path").clone();
        wire.stall(End::B, true);
        // No room on the wire either: a QP that has sent everything has nothing to do with its memory.
        self.rig.network().set_conditions(Conditions { buffer: 4096, ..Conditions::default() });
        for tag in 0..3u16 {
            let io = self.rig.request(self.dying, IoOp::Read, u64::from(tag) << 20, IO as u64);
            self.rig.submit(self.dying, Tag(tag), io).expect("a free tag");
            // Half a block is not dirty when its data has come, it would be merged.
            let io =
                self.rig.request(self.dying, IoOp::Write, 2 << 20 | u64::from(tag) << 17, 32768);
            self.rig.submit(self.dying, Tag(3 + tag), io).expect("a free tag");
        }
        for _ in 0..200 {
            self.rig.step();
        }
        self.rig.jam_failed_qps(true);
        wire.cut();
        self.rig.network().set_conditions(Conditions::default());
        self.rig.run(20 * SECOND, |rig| rig.jammed_qps() == 1).expect("it is given up");
        assert_eq!(self.rig.connections(self.mortal), 1, "its QP is not destroyed");
        self.rig.take_outcomes();
    }

    fn read(&mut self, at: usize) {
        let io = self.rig.request(self.well, IoOp::Read, at as u64, IO as u64);
        self.rig.submit(self.well, Tag(0), io).expect("a free tag");
        let well = self.well;
        let ended = self.rig.run(PATIENCE, |rig| rig.outstanding(well) == 0);
        assert!(ended.is_ok(), "a read of {at} does not end: {:?}", self.rig);
        let data = self.rig.buffer(self.well, Tag(0), IO);
        assert!(data == self.image[at..at + IO], "{at}");
    }
}

#[test]
fn what_a_dead_qp_may_still_touch_is_nobodys() {
    for groups in [1, 2] {
        for cache in MODES {
            let what = format!("{groups} groups, {cache:?}");
            let mut jam = Jam::new(groups, cache);
            jam.jam();
            let before = lent(&mut jam.rig);
            let of = |is: fn(&Holders) -> bool| before.iter().filter(|(_, h, _)| is(h)).count();
            assert!(of(|h| h.sends > 0) > 16, "{what}: to send: {before:?}");
            assert!(of(|h| h.state == State::Private) >= 8, "{what}: to read");
            // Others use everything else, again and again.
            for round in 0..3 {
                for at in (0..4 * MIB).step_by(IO) {
                    jam.read(at);
                }
                let well = jam.well;
                jam.rig.fill_buffer(well, Tag(1), &jam.image[..IO]);
                let io = jam.rig.request(well, IoOp::Write, 0, IO as u64);
                jam.rig.submit(well, Tag(1), io).expect("a free tag");
                jam.rig.run(PATIENCE, |rig| rig.outstanding(well) == 0).expect("a write");
                // Sent from nowhere else than where it was, and read into nothing that is another's.
                let now = lent(&mut jam.rig);
                for (slot, holders, bytes) in &before {
                    let same = now.iter().find(|(other, ..)| other == slot);
                    let Some((_, is, has)) = same else {
                        panic!("{what}, {round}: {slot} is free")
                    };
                    assert_eq!(is.state == State::Private, holders.state == State::Private);
                    assert!(is.sends >= holders.sends, "{what}: {is:?}, was {holders:?}");
                    assert!(has == bytes, "{what}, {round}: {slot} has other bytes");
                }
            }
            // Destroyed at last.
            jam.rig.jam_failed_qps(false);
            jam.rig.destroy_jammed();
            let well = jam.well;
            jam.rig.wire(well).expect("a path").cut();
            let free = jam.rig.run(PATIENCE, |rig| lent(rig).is_empty());
            assert!(free.is_ok(), "{what}: {:?}", jam.rig);
            jam.rig.mail(ToGroup::Stop);
            let stopped = jam.rig.run(PATIENCE, |rig| rig.stopped().is_some());
            assert!(stopped.is_ok(), "{what}: {:?}", jam.rig);
            assert_eq!(jam.rig.stopped(), Some(true), "{what}");
        }
    }
}

#[test]
fn the_end_waits_for_what_a_dead_qp_may_still_touch() {
    for groups in [1, 2] {
        for cache in MODES {
            let what = format!("{groups} groups, {cache:?}");
            let mut jam = Jam::new(groups, cache);
            jam.jam();
            jam.rig.mail(ToGroup::Stop);
            for _ in 0..10 * SECOND {
                jam.rig.step();
                assert_eq!(jam.rig.stopped(), None, "{what}");
            }
            // The other one did not flush either.
            assert_eq!(jam.rig.jammed_qps(), 2, "{what}");
            assert!(!lent(&mut jam.rig).is_empty(), "{what}");
            jam.rig.destroy_jammed();
            let stopped = jam.rig.run(PATIENCE, |rig| rig.stopped().is_some());
            assert!(stopped.is_ok(), "{what}: {:?}", jam.rig);
            assert_eq!(jam.rig.stopped(), Some(true), "{what}");
            assert_eq!(lent(&mut jam.rig), [], "{what}");
        }
    }
}

const LARGE: usize = 64 * MIB;
const LARGE_VOLUME: VolumeIndex = VolumeIndex(0);
const SMALL_VOLUME: VolumeIndex = VolumeIndex(1);

/// A large volume in memory, full of ones, another volume, and a queue of each.
fn large() -> (Rig<RamStore>, [SessionSlot; 2], [QueueId; 2]) {
    let volumes = [LARGE, MIB].map(|bytes| VolumeSpec::new(VolumeKind::Memory, bytes as u64));
    let options = RigOptions { volumes: volumes.to_vec(), ..RigOptions::default() };
    let mut rig = Rig::new(&options, |region| RamStore::new(region, 1)).expect("a rig");
    let memory = rig.memory(LARGE_VOLUME).expect("in memory");
    let ones = vec![1; MIB];
    (0..LARGE / MIB).for_each(|at| memory.write(at * MIB, &ones));
    let opened = [LARGE_VOLUME, SMALL_VOLUME].map(|volume| {
        let session = rig.begin_session();
        rig.open(session, volume, AccessMode::Exclusive);
        let queue = rig.add_queue(session, volume, QueueOptions::default()).expect("a queue");
        rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
        (session, queue)
    });
    (rig, opened.map(|(session, _)| session), opened.map(|(_, queue)| queue))
}

fn byte_at(rig: &Rig<RamStore>, at: usize) -> u8 {
    let mut byte = [0xee];
    rig.memory(LARGE_VOLUME).expect("in memory").read(at, &mut byte);
    byte[0]
}

fn is_all(rig: &Rig<RamStore>, range: std::ops::Range<usize>, byte: u8) -> bool {
    let mut bytes = vec![0xee; range.len()];
    rig.memory(LARGE_VOLUME).expect("in memory").read(range.start, &mut bytes);
    bytes.iter().all(|other| *other == byte)
}

#[test]
fn zeroing_a_large_volume_lets_others_go_on() {
    for op in [IoOp::WriteZeroes, IoOp::Discard] {
        let (mut rig, _, [large, small]) = large();
        let (from, to) = (512, LARGE - 1536);
        let io = rig.request(large, op, from as u64, (to - from) as u64);
        rig.submit(large, Tag(0), io).expect("a free tag");
        rig.run(100, |rig| byte_at(rig, from) == 0).expect("it begins");
        assert_eq!(byte_at(&rig, to - 1), 1, "{op:?}: in one go");
        // Reads and writes of another volume, a read of the same, a second zeroing behind the first.
        let mut answered = Vec::new();
        let io = rig.request(large, op, (to + 512) as u64, 512);
        rig.submit(large, Tag(1), io).expect("a free tag");
        let io = rig.request(large, IoOp::Read, 0, 512);
        rig.submit(large, Tag(2), io).expect("a free tag");
        for tag in 0..2 {
            let op = [IoOp::Read, IoOp::Write][usize::from(tag)];
            let io = rig.request(small, op, 4096, 64 << 10);
            rig.submit(small, Tag(tag), io).expect("a free tag");
        }
        let all = rig.run(PATIENCE, |rig| {
            let new = rig.take_outcomes();
            answered.extend(new.iter().map(|outcome| (outcome.queue, outcome.tag.0)));
            assert!(new.iter().all(|outcome| outcome.result >= 0), "{op:?}: {new:?}");
            answered.len() == 5
        });
        assert!(all.is_ok(), "{op:?}: {answered:?}");
        let place = |of| answered.iter().position(|other| *other == of).expect("answered");
        for other in [(small, 0), (small, 1), (large, 2)] {
            assert!(place(other) < place((large, 0)), "{op:?}: {other:?} waited: {answered:?}");
        }
        assert!(place((large, 0)) < place((large, 1)), "{op:?}: {answered:?}");
        assert!(is_all(&rig, 0..from, 1) && is_all(&rig, to..to + 512, 1), "{op:?}");
        assert!(is_all(&rig, to + 512..to + 1024, 0), "{op:?}");
        assert!(is_all(&rig, to + 1024..LARGE, 1), "{op:?}");
        for at in (0..LARGE).step_by(MIB) {
            assert!(is_all(&rig, at.max(from)..(at + MIB).min(to), 0), "{op:?}: {at}");
        }
    }
}

#[test]
fn a_connection_that_dies_while_it_zeroes_leaves_nothing_behind() {
    for waits in [0, 1, 3, 8] {
        let (mut rig, [session, _], [large, small]) = large();
        for tag in 0..2 {
            let io = rig.request(large, IoOp::WriteZeroes, 0, LARGE as u64);
            rig.submit(large, Tag(tag), io).expect("a free tag");
        }
        rig.run(100, |rig| byte_at(rig, 0) == 0).expect("it begins");
        for _ in 0..waits {
            rig.step();
        }
        assert_eq!(byte_at(&rig, LARGE - 1), 1, "{waits}: it was over already");
        rig.wire(large).expect("a path").cut();
        rig.run(PATIENCE, |rig| rig.connections(session) == 0).expect("it is buried");
        rig.take_outcomes();
        // Nobody writes to the volume who could not be told apart from its next user.
        let ones = vec![0x77; MIB];
        let memory = rig.memory(LARGE_VOLUME).expect("in memory");
        (0..LARGE / MIB).for_each(|at| memory.write(at * MIB, &ones));
        for _ in 0..100 {
            rig.step();
        }
        for at in (0..LARGE).step_by(MIB) {
            assert!(is_all(&rig, at..at + MIB, 0x77), "{waits}: zeroed at {at} by the dead");
        }
        // And others are zeroed as ever.
        rig.reconnect(large).expect("a path");
        let io = rig.request(small, IoOp::WriteZeroes, 0, MIB as u64);
        rig.submit(small, Tag(0), io).expect("a free tag");
        rig.run(PATIENCE, |rig| rig.is_connected(large) && rig.outstanding(small) == 0)
            .expect("both go on");
        let done = rig.run(PATIENCE, |rig| rig.outstanding(large) == 0);
        assert!(done.is_ok(), "what was on its way is asked again: {rig:?}");
        assert!(is_all(&rig, 0..MIB, 0) && is_all(&rig, LARGE - MIB..LARGE, 0), "{waits}");
    }
}

#[test]
fn the_end_of_a_target_waits_for_its_zeroing() {
    let (mut rig, _, [large, _]) = large();
    let io = rig.request(large, IoOp::WriteZeroes, 0, LARGE as u64);
    rig.submit(large, Tag(0), io).expect("a free tag");
    rig.run(100, |rig| byte_at(rig, 0) == 0).expect("it begins");
    rig.mail(ToGroup::Stop);
    assert_eq!(rig.stopped(), None);
    rig.run(PATIENCE, |rig| rig.stopped().is_some()).expect("it ends");
    assert_eq!(rig.stopped(), Some(true));
    assert_eq!(byte_at(&rig, LARGE - 1), 0, "it ended in the middle");
}

#[test]
fn small_zeroing_is_done_at_once() {
    let mut bed = Bed::new(&RigOptions::default());
    let queue = bed.queue(MEMORY, QueueOptions::default());
    bed.write(queue, 0, &pattern(1, 64 << 10));
    assert_eq!(bed.io(queue, IoOp::WriteZeroes, 4096, VOLUME_BYTES - 4096), 0);
    assert!(bed.read(queue, 4096, 60 << 10).iter().all(|byte| *byte == 0));
    assert!(bed.read(queue, 0, 4096) == pattern(1, 64 << 10)[..4096]);
}
