//! [`TwoVolumes`]: a rig with two volumes that share a small cache.

use rblk_protocol::AccessMode;
use rblk_rig::crash_store::CrashStore;
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::VolumeIndex;

use crate::bed::PATIENCE;

/// Most bytes of one request.
const IO_MAX_BYTES: u32 = 64 << 10;

/// Two volumes with an arena of 8 MiB in two poll groups, and a connected queue for each.
#[derive(Debug)]
pub struct TwoVolumes {
    /// Both ends.
    pub rig: Rig<CrashStore>,
    /// The queue of each volume, by its index.
    pub queues: [QueueId; 2],
    /// The contents of each volume at the beginning.
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
            io_max_bytes: IO_MAX_BYTES,
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
            let options =
                QueueOptions { depth: 2, io_max_bytes: IO_MAX_BYTES, ..Default::default() };
            let queue = rig.add_queue(session, volume, options).expect("a queue");
            rig.run(PATIENCE, |rig| rig.is_connected(queue)).expect("a path");
            queue
        });
        Self { rig, queues, images }
    }
}
