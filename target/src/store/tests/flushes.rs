//! Failed flushes: the system reports lost writes once and to one caller, the backing to all.

use std::fs;

use super::device::LoopDevice;
use super::errors::SmallDisk;
use super::*;

/// A disk that is too small for its page cache: a loop device over a file with holes, on a full
/// file system. The system reports that once, and then forgets it.
struct Overcommitted {
    // In front of the disk, so that it is dropped first.
    backing: Arc<Backing>,
    device: LoopDevice,
    disk: SmallDisk,
}

/// An offset with room on the disk.
const GOOD: u64 = 0;
/// An offset without room.
const BAD: u64 = MIB as u64;

impl Overcommitted {
    fn make(losses: Losses) -> Self {
        let disk = SmallDisk::mount();
        let path = file(disk.0.path(), "disk", 8 * MIB as u64);
        let device = LoopDevice::attach(&path, "4096");
        let options = OpenOptions { losses, ..options(4096, Direct::Off) };
        let backing = Arc::new(Backing::open(&device.0, &options).unwrap());
        Self { backing, device, disk }
    }

    /// Makes the page cache take data that does not fit on the disk.
    fn overcommit(&self, store: &mut dyn Engine) {
        assert_eq!(store.run_one(write(GOOD, 0, 4096)), Ok(4096));
        assert_eq!(store.run_one(flush()), Ok(0));
        // Another file takes the rest of the space.
        let _ = fs::write(self.disk.0.path().join("filler"), vec![1; 2 * MIB]);
        assert_eq!(store.run_one(write(BAD, 0, MIB32)), Ok(MIB32), "in the page cache");
        assert!(!self.backing.has_lost_writes());
    }

    /// Makes room, so that later writes succeed.
    fn make_room(&self) {
        fs::remove_file(self.disk.0.path().join("filler")).unwrap();
    }

    /// The page cache is written out for another process: the next sync of the backing gets the
    /// error.
    fn write_out(&self) {
        assert!(File::open(&self.device.0).unwrap().sync_data().is_err(), "the disk took it");
    }
}

/// Submits to a ring store and hands it to the kernel.
fn begin(store: &mut UringStore, token: u64, io: &Io) {
    store.start(token, io).unwrap();
    store.turn(TurnSleep::No, &mut WatchSet::default()).unwrap();
}

/// The result of the single running op.
fn result_of(store: &mut UringStore) -> Result<u32, Errno> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut done = Vec::new();
    while done.is_empty() {
        assert!(Instant::now() < deadline, "it never ended");
        store.work();
        store.reap(&mut done);
    }
    assert_eq!((done.len(), store.in_flight()), (1, 0));
    done[0].result
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_flush_beside_a_failed_one_fails_too() {
    for round in 0..8 {
        let disk = Overcommitted::make(Losses::ToldAtOnce);
        let region = region(8 * MIB);
        let mut stores: Vec<_> = (0..4).map(|_| uring(&region, 16, &disk.backing)).collect();
        disk.overcommit(&mut stores[0]);
        // Like the data threads of a target: each has its own ring, and all flush at once.
        for store in &mut stores {
            begin(store, 1, &flush());
        }
        for (at, store) in stores.iter_mut().enumerate() {
            let result = result_of(store);
            assert!(result.is_err(), "round {round}: flush {at} was told that all is durable");
        }
        let syncs: u64 = stores.iter().map(|store| store.counters().syncs).sum();
        assert!(syncs <= 3, "{syncs}: those that wait share one");
    }
}

#[test]
fn flushes_of_threads_share_syncs_and_all_end() {
    const FLUSHES: usize = 500;
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Off)).unwrap());
    let syncs: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut store = uring(&region(MIB), 16, &backing);
                    let fua = write_from(0, &[segment(0, 4096)], true);
                    for _ in 0..FLUSHES / 4 {
                        let results = store.run(&[flush(), fua.clone(), flush()]);
                        assert_eq!(results, [Ok(0), Ok(4096), Ok(0)]);
                    }
                    store.counters().syncs
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    // A store alone needs at most two syncs for each round of three.
    assert!(syncs > 0 && syncs <= 2 * FLUSHES as u64, "{syncs}");
}

#[test]
fn a_blocking_store_waits_for_the_sync_of_a_ring() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Off)).unwrap());
    let region = region(MIB);
    let mut ring = uring(&region, 16, &backing);
    begin(&mut ring, 1, &flush());
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| sync(&region, &backing).run_one(flush()));
        assert_eq!(result_of(&mut ring), Ok(0));
        assert_eq!(blocked.join().unwrap(), Ok(0));
    });
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_cached_durable_write_may_fail_for_an_earlier_loss() {
    for engine in ["ring", "calls"] {
        let disk = Overcommitted::make(Losses::ToldAtOnce);
        let region = region(8 * MIB);
        let check = |store: &mut dyn Engine| {
            disk.overcommit(store);
            disk.write_out();
            // The write itself succeeds, but the system reports the loss to its sync.
            let durable = write_from(GOOD, &[segment(0, 4096)], true);
            assert!(store.run_one(durable.clone()).is_err(), "{engine}");
            assert!(disk.backing.has_lost_writes(), "{engine}: the news went to one write only");
            disk.make_room();
            assert_eq!(store.run_one(flush()), Err(Errno::EIO), "{engine}");
            assert_eq!(store.run_one(durable), Err(Errno::EIO), "{engine}: it is not durable");
        };
        match engine {
            "ring" => check(&mut uring(&region, 16, &disk.backing)),
            _ => check(&mut sync(&region, &disk.backing)),
        }
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_an_error_of_one_write_or_read_is_no_loss() {
    let disk = SmallDisk::mount();
    let path = file(disk.0.path(), "disk", 8 * MIB as u64);
    // The file system reports the lack of room at once: an error of this write alone.
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Off)).unwrap());
    let region = region(8 * MIB);
    let mut store = uring(&region, 16, &backing);
    let durable = write_from(0, &[segment(0, 4 * MIB32)], true);
    assert_eq!(store.run_one(durable), Err(Errno::ENOSPC));
    assert_eq!(store.run_one(zeroes(0, 8 * MIB as u64, false)), Err(Errno::ENOSPC));
    File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    assert_eq!(store.run_one(read(65536, 0, 4096)), Err(Errno::EIO), "past the end");
    assert!(!backing.has_lost_writes());
    assert_eq!(store.run_one(flush()), Ok(0));
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_both_engines_report_lost_writes_forever() {
    for engine in ["ring", "calls"] {
        let disk = Overcommitted::make(Losses::ToldAtOnce);
        let region = region(8 * MIB);
        let check = |store: &mut dyn Engine| {
            disk.overcommit(store);
            let failed = store.run_one(flush());
            assert!(failed.is_err(), "{engine}: the disk took it: {failed:?}");
            assert!(disk.backing.has_lost_writes());
            disk.make_room();
            // The system has forgotten the error.
            disk.backing.file().sync_data().unwrap();
            assert_eq!(store.run(&[flush(), flush()]), [Err(Errno::EIO); 2], "{engine}");
            assert_eq!(store.run_one(write(GOOD, 0, 4096)), Ok(4096), "{engine}");
            assert_eq!(store.run_one(flush()), Err(Errno::EIO), "{engine}");
        };
        match engine {
            "ring" => {
                let mut store = uring(&region, 16, &disk.backing);
                check(&mut store);
                let (volume, backing) = store.take_lost().expect("the news for the owner");
                assert!(volume == VOLUME && Arc::ptr_eq(&backing, &disk.backing));
                assert!(store.take_lost().is_none(), "once");
            }
            _ => check(&mut sync(&region, &disk.backing)),
        }
        // A new open is a new backing: its owner knows of the loss.
        let Overcommitted { backing, device, .. } = disk;
        drop(backing);
        let again = open_released(&device.0);
        assert!(!again.has_lost_writes());
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_failed_flush_is_answered_when_the_loss_is_noted() {
    let disk = Overcommitted::make(Losses::HeldUntilNoted);
    let region = region(8 * MIB);
    let mut stores: Vec<_> = (0..2).map(|_| uring(&region, 16, &disk.backing)).collect();
    disk.overcommit(&mut stores[0]);
    for store in &mut stores {
        begin(store, 1, &flush());
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    let lost = loop {
        assert!(Instant::now() < deadline, "no store told of the loss");
        stores.iter_mut().for_each(|store| {
            store
                .turn(TurnSleep::Until(Duration::from_millis(10)), &mut WatchSet::default())
                .unwrap();
        });
        if let Some((_, lost)) = stores.iter_mut().find_map(UringStore::take_lost) {
            break lost;
        }
    };
    // Both wait, even after the next sync has ended.
    for _ in 0..20 {
        for store in &mut stores {
            store
                .turn(TurnSleep::Until(Duration::from_millis(5)), &mut WatchSet::default())
                .unwrap();
            let mut done = Vec::new();
            store.reap(&mut done);
            assert!(done.is_empty(), "answered before the loss was noted");
        }
    }
    lost.loss_noted();
    assert!(stores.iter_mut().map(result_of).all(|result| result.is_err()));
}

#[test]
fn a_dropped_store_does_not_hold_back_the_flushes_of_others() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Off)).unwrap());
    let region = region(MIB);
    let (mut first, mut second) = (uring(&region, 4, &backing), uring(&region, 4, &backing));
    begin(&mut first, 1, &flush());
    begin(&mut second, 1, &flush());
    drop(first);
    assert_eq!(result_of(&mut second), Ok(0));
}

#[test]
fn files_sync_behind_a_durable_write() {
    let directory = directory();
    let path = file(directory.path(), "disk", 4 * MIB as u64);
    for direct in [Direct::Preferred, Direct::Off] {
        let backing = Arc::new(Backing::open(&path, &options(4096, direct)).unwrap());
        assert!(!backing.has_own_fua(), "the file system may tell of others' writes");
        let mut store = uring(&region(MIB), 16, &backing);
        assert_eq!(store.run_one(write_from(0, &[segment(0, 4096)], true)), Ok(4096));
        assert_eq!((store.counters().syncs, store.counters().fua_writes), (1, 1));
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_cached_devices_sync_behind_a_durable_write() {
    let directory = directory();
    let path = file(directory.path(), "disk", 4 * MIB as u64);
    let device = LoopDevice::attach(&path, "4096");
    let backing = Arc::new(Backing::open(&device.0, &options(4096, Direct::Off)).unwrap());
    assert!(!backing.has_own_fua());
}

/// Opens a device that a store had open. The kernel releases the files of a ring some time after
/// the ring is closed.
fn open_released(device: &Path) -> Backing {
    let give_up = Instant::now() + Duration::from_secs(10);
    loop {
        match Backing::open(device, &options(4096, Direct::Off)) {
            Ok(backing) => return backing,
            Err(StoreError::Claimed { .. }) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
}
