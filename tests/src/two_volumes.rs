//! [`TwoVolumes`]: a rig with two volumes that share a small cache.

use std::sync::Arc;

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, Tag};
use rblk_rig::crash_store::CrashStore;
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_target::data::poll_group::VolumeStep;
use rblk_target::volume::ids::VolumeIndex;
use rblk_target::volume::{CacheMode, Volume};

use crate::bed::PATIENCE;

/// Bytes of one request.
const IO_BYTES: u32 = 64 << 10;
const IO: usize = IO_BYTES as usize;

/// Two volumes with an arena of 8 MiB in two poll groups, and a connected queue for each.
#[derive(Debug)]
pub struct TwoVolumes {
    /// Both ends.
    pub rig: Rig<CrashStore>,
    /// The queue of each volume, by its index.
    pub queues: [QueueId; 2],
    /// The contents of each volume.
    pub images: [Vec<u8>; 2],
}

impl TwoVolumes {
    /// Volumes that hold `images`. `first` adapts the first volume.
    ///
    /// # Panics
    /// The rig cannot be made.
    #[must_use]
    pub fn new(
        cache: CacheMode,
        images: [Vec<u8>; 2],
        first: impl FnOnce(VolumeSpec) -> VolumeSpec,
    ) -> Self {
        let spec = |image: &Vec<u8>| {
            let spec = VolumeSpec::new(VolumeKind::Store, image.len() as u64);
            VolumeSpec { cache, ..spec }
        };
        let options = RigOptions {
            groups: 2,
            arena_bytes: 8 << 20,
            dirty_max_bytes: 2 << 20,
            io_max_bytes: IO_BYTES,
            volumes: vec![first(spec(&images[0])), spec(&images[1])],
            ..RigOptions::default()
        };
        let stores = CrashStore::shared(|region| {
            let mut store = CrashStore::new(region, 7);
            for (index, image) in (0..).map(VolumeIndex).zip(&images) {
                store.set_volume(index, image.clone());
            }
            store
        });
        let mut rig = Rig::new(&options, stores).expect("a rig");
        let queues = [0, 1].map(VolumeIndex).map(|volume| {
            let session = rig.begin_session();
            rig.open(session, volume, AccessMode::Shared);
            let options = QueueOptions { depth: 2, io_max_bytes: IO_BYTES, ..Default::default() };
            let queue = rig.add_queue(session, volume, options).expect("a queue");
            rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
            queue
        });
        Self { rig, queues, images }
    }

    /// Runs one request to its end.
    ///
    /// # Panics
    /// It fails, or does not end.
    pub fn run(&mut self, volume: VolumeIndex, op: IoOp, from: usize, len: usize) {
        let queue = self.queues[usize::from(volume.0)];
        let io = self.rig.request(queue, op, from as u64, len as u64);
        self.rig.submit(queue, Tag(0), io).expect("a free tag");
        let mut all = Vec::new();
        let done = self.rig.run(PATIENCE, |rig| {
            all.extend(rig.take_outcomes());
            !all.is_empty()
        });
        assert!(done.is_ok() && all[0].result >= 0, "{op:?} at {from}: {all:?}");
    }

    /// Reads the first bytes of a volume. Returns the number of ops at the store.
    ///
    /// # Panics
    /// A read fails, or returns other bytes.
    pub fn read(&mut self, volume: VolumeIndex, bytes: usize) -> u64 {
        let (at, before) = (usize::from(volume.0), self.rig.store_mut().ops());
        for from in (0..bytes).step_by(IO) {
            self.run(volume, IoOp::Read, from, IO);
            let got = self.rig.buffer(self.queues[at], Tag(0), IO);
            assert!(got == self.images[at][from..from + IO], "at {from} of {at}");
        }
        self.rig.store_mut().ops() - before
    }

    /// Writes bytes to the beginning of a volume.
    ///
    /// # Panics
    /// A write fails.
    pub fn write(&mut self, volume: VolumeIndex, bytes: &[u8]) {
        let at = usize::from(volume.0);
        for (from, part) in (0..).step_by(IO).zip(bytes.chunks(IO)) {
            self.rig.fill_buffer(self.queues[at], Tag(0), part);
            self.run(volume, IoOp::Write, from, part.len());
        }
        self.images[at][..bytes.len()].copy_from_slice(bytes);
    }

    /// Changes the first volume in all poll groups.
    ///
    /// # Panics
    /// The poll groups refuse it.
    pub fn change(&mut self, change: impl FnOnce(&mut Volume)) {
        let mut volume = Volume::clone(&self.rig.volumes()[0]);
        change(&mut volume);
        let volume = Arc::new(volume);
        self.rig.begin_step(&volume, VolumeStep::Access);
        let mut outcome = None;
        let stepped = self.rig.run(PATIENCE, |rig| {
            outcome = rig.step_outcome();
            outcome.is_some()
        });
        assert!(stepped.is_ok() && outcome == Some(Ok(())), "{outcome:?}");
        self.rig.note_volume(volume);
    }
}
