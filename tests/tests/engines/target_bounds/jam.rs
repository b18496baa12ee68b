//! QPs that are not destroyed: memory that they may still touch is not reused until they are.

use rblk_fabric::soft::network::{Conditions, End};
use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::RamStore;
use rblk_target::cache::slots::{SlotHolders, SlotState};
use rblk_target::data::poll_group::ToGroup;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::SessionIndex;
use rblk_tests::bed::{PATIENCE, pattern};

use super::{MIB, MODES, SECOND, STUCK, TICK};

/// The held slots, with their bytes.
fn lent(rig: &mut Rig<RamStore>) -> Vec<(usize, SlotHolders, Vec<u8>)> {
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

/// A target with `groups` poll groups and an arena of 16 requests for each, two sessions, and a
/// queue in each.
struct Jam {
    rig: Rig<RamStore>,
    image: Vec<u8>,
    mortal: SessionIndex,
    dying: QueueId,
    well: QueueId,
}

const IO: usize = 64 << 10;
/// The data of READs that land after their QP's end.
const LATE: u8 = 0xdb;

impl Jam {
    fn new(groups: usize, cache: CacheMode) -> Self {
        let volume = VolumeSpec { cache, ..VolumeSpec::new(VolumeKind::Store, 4 << 20) };
        let options = RigOptions {
            tick: TICK,
            groups,
            late_rdma: true,
            arena_bytes: groups * 16 * IO,
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

    /// The first queue dies while the target sends to it and reads from it. Its QP is not
    /// destroyed.
    fn jam(&mut self) {
        let wire = self.rig.wire(self.dying).expect("a path").clone();
        wire.stall(End::B, true);
        // The wire is full, too: a QP that has sent everything would not touch its memory any more.
        self.rig.network().set_conditions(Conditions { buffer: 4096, ..Conditions::default() });
        for tag in 0..3u16 {
            let io = self.rig.request(self.dying, IoOp::Read, u64::from(tag) << 20, IO as u64);
            self.rig.submit(self.dying, Tag(tag), io).expect("a free tag");
            // A partial block is merged before it is dirty.
            let io =
                self.rig.request(self.dying, IoOp::Write, 2 << 20 | u64::from(tag) << 17, 32768);
            self.rig.submit(self.dying, Tag(3 + tag), io).expect("a free tag");
        }
        for _ in 0..200 {
            self.rig.step();
        }
        self.rig.hold_destroys(true);
        wire.cut();
        self.rig.network().set_conditions(Conditions::default());
        self.rig.run(SECOND, |rig| rig.undestroyed() == 1).expect("it ends");
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
fn memory_of_a_dead_qp_is_not_reused() {
    for groups in [1, 2] {
        for cache in MODES {
            let what = format!("{groups} groups, {cache:?}");
            let mut jam = Jam::new(groups, cache);
            jam.jam();
            let before = lent(&mut jam.rig);
            let of = |is: fn(&SlotHolders) -> bool| before.iter().filter(|(_, h, _)| is(h)).count();
            assert!(of(|h| h.sends > 0) > 16, "{what}: to send: {before:?}");
            assert!(of(|h| h.state == SlotState::Private) >= 8, "{what}: to read");
            // The other queue uses all other memory, again and again.
            for round in 0..3 {
                for at in (0..4 * MIB).step_by(IO) {
                    jam.read(at);
                }
                let well = jam.well;
                jam.rig.fill_buffer(well, Tag(1), &jam.image[..IO]);
                let io = jam.rig.request(well, IoOp::Write, 0, IO as u64);
                jam.rig.submit(well, Tag(1), io).expect("a free tag");
                jam.rig.run(PATIENCE, |rig| rig.outstanding(well) == 0).expect("a write");
                // The QP sends from the same memory as before, and reads into no memory of another
                // request.
                let now = lent(&mut jam.rig);
                for (slot, holders, bytes) in &before {
                    let same = now.iter().find(|(other, ..)| other == slot);
                    let Some((_, is, has)) = same else {
                        panic!("{what}, {round}: {slot} is free")
                    };
                    assert_eq!(is.state == SlotState::Private, holders.state == SlotState::Private);
                    assert!(is.sends >= holders.sends, "{what}: {is:?}, was {holders:?}");
                    // Only data of the QP's READs may have landed by now.
                    let late =
                        holders.state == SlotState::Private && has.iter().all(|byte| *byte == LATE);
                    assert!(has == bytes || late, "{what}, {round}: {slot} has other bytes");
                }
            }
            // The QP is destroyed at last.
            jam.rig.hold_destroys(false);
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
fn the_end_waits_for_the_memory_of_a_dead_qp() {
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
            // The QP of the other queue is not destroyed, either.
            assert_eq!(jam.rig.undestroyed(), 2, "{what}");
            assert!(!lent(&mut jam.rig).is_empty(), "{what}");
            jam.rig.hold_destroys(false);
            let stopped = jam.rig.run(PATIENCE, |rig| rig.stopped().is_some());
            assert!(stopped.is_ok(), "{what}: {:?}", jam.rig);
            assert_eq!(jam.rig.stopped(), Some(true), "{what}");
            assert_eq!(lent(&mut jam.rig), [], "{what}");
        }
    }
}
