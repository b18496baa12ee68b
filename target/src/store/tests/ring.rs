//! The ring: capacity, volumes, sleep and wake-up, threads, end, registered memory.

use std::os::fd::AsRawFd;

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::*;

fn small_store(capacity: u32) -> (TempDir, Arc<Region>, UringStore) {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Preferred)).unwrap());
    let region = region(MIB);
    let store = uring(&region, capacity, &backing);
    (directory, region, store)
}

#[test]
fn full_store_gives_the_op_back() {
    let (_directory, _region, mut store) = small_store(2);
    let io = read(0, 0, 512);
    let unknown = Op { volume: VolumeIndex(99), ..io.named(2) };
    store.start(1, &io).unwrap();
    store.submit(unknown, &io.memory).unwrap();
    assert_eq!(store.start(3, &io), Err(io.named(3)));
    assert_eq!(store.in_flight(), 2);
    let mut done = Vec::new();
    while store.in_flight() > 0 {
        store.work();
        store.reap(&mut done);
    }
    done.sort_by_key(|done| done.token);
    let results: Vec<_> = done.iter().map(|done| done.result).collect();
    assert_eq!(results, [Ok(512), Err(Errno::ENXIO)]);
    store.start(3, &io).unwrap();
}

#[test]
fn volumes_come_and_go() {
    let (directory, region, mut store) = small_store(4);
    let other = file(directory.path(), "other", MIB as u64);
    let other = Arc::new(Backing::open(&other, &options(512, Direct::Preferred)).unwrap());
    let add =
        |store: &mut UringStore, index| store.add_volume(VolumeIndex(index), Arc::clone(&other));
    assert!(matches!(add(&mut store, 3), Err(StoreError::Taken { index: 3, .. })));
    assert!(matches!(add(&mut store, 4), Err(StoreError::TableFull { index: 4, volumes: 4 })));
    assert!(matches!(store.remove_volume(VolumeIndex(0)), Err(StoreError::NoVolume { index: 0 })));
    region.write(0, &[5; 512]);
    store.start(0, &write(0, 0, 512)).unwrap();
    assert!(matches!(store.remove_volume(VOLUME), Err(StoreError::Busy { ops: 1, .. })));
    let mut done = Vec::new();
    while done.is_empty() {
        store.work();
        store.reap(&mut done);
    }
    let path = store.remove_volume(VOLUME).unwrap().path().to_owned();
    // Out of the table and dropped, so the lock is free.
    drop(Backing::open(&path, &options(512, Direct::Off)).unwrap());
    assert_eq!(store.run_one(read(0, 0, 512)), Err(Errno::ENXIO));
    add(&mut store, 3).unwrap();
    assert_eq!(store.run_one(read(0, 0, 512)), Ok(512));
    let mut got = [9; 512];
    region.read(0, &mut got);
    assert_eq!(got, [0; 512]);
}

#[test]
fn turns_without_work_do_not_enter_the_kernel() {
    let (_directory, _region, mut store) = small_store(4);
    let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
    store.watch(event.as_raw_fd(), FdToken(0)).unwrap();
    let mut woken = WatchSet::default();
    store.turn(TurnSleep::No, &mut woken).unwrap();
    assert_eq!(store.counters().enters, 1);
    for _ in 0..1000 {
        store.turn(TurnSleep::No, &mut woken).unwrap();
    }
    assert_eq!(store.counters().enters, 1);
    // Polling alone finds a completion that comes later from another kernel thread, with one enter
    // to submit and at most a few to collect.
    store.start(1, &flush()).unwrap();
    let mut done = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while done.is_empty() && Instant::now() < deadline {
        store.turn(TurnSleep::No, &mut woken).unwrap();
        store.reap(&mut done);
    }
    assert_eq!(done.len(), 1);
    assert!(store.counters().enters <= 4, "{:?}", store.counters());
    assert_eq!(store.counters().sleeps, 0);
}

#[test]
fn sleeps_until_woken_or_the_time_is_over() {
    let (_directory, _region, mut store) = small_store(4);
    let event = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap());
    let token = FdToken(MAX_WATCHES - 1);
    store.watch(event.as_raw_fd(), token).unwrap();
    assert!(store.watch(event.as_raw_fd(), token).is_err());
    assert!(store.watch(event.as_raw_fd(), FdToken(64)).is_err());
    assert!(store.watch(-1, FdToken(1)).is_err());
    let mut woken = WatchSet::default();
    let started = Instant::now();
    store.turn(TurnSleep::Until(Duration::from_millis(50)), &mut woken).unwrap();
    assert!(started.elapsed() >= Duration::from_millis(50) && woken.is_empty());
    // Many times, so that the multishot poll is really reused.
    for _ in 0..100 {
        let sender = Arc::clone(&event);
        let thread = std::thread::spawn(move || sender.write(1).unwrap());
        while !woken.contains(token) {
            store.turn(TurnSleep::Until(Duration::from_secs(10)), &mut woken).unwrap();
        }
        woken.clear();
        thread.join().unwrap();
        event.read().unwrap();
    }
    assert!(started.elapsed() < Duration::from_secs(10));
    assert_eq!(store.counters().watch_errors, 0);
    // The longest possible sleep is a valid argument.
    event.write(1).unwrap();
    store.turn(TurnSleep::Until(Duration::MAX), &mut woken).unwrap();
    assert!(woken.contains(token));
    event.read().unwrap();
    // An event from before the watch wakes, too; an unwatched token does not.
    store.unwatch(token);
    event.write(1).unwrap();
    let settle = |store: &mut UringStore| {
        let mut woken = WatchSet::default();
        store.turn(TurnSleep::Until(Duration::from_millis(20)), &mut woken).unwrap();
        store.turn(TurnSleep::Until(Duration::from_millis(20)), &mut woken).unwrap();
        woken
    };
    assert!(settle(&mut store).is_empty());
    store.watch(event.as_raw_fd(), token).unwrap();
    assert!(settle(&mut store).contains(token));
    store.unwatch(token);
    store.unwatch(token);
    // Set and removed within a turn, more often than the queue has room for.
    for _ in 0..1000 {
        store.watch(event.as_raw_fd(), token).unwrap();
        store.unwatch(token);
    }
    settle(&mut store);
    assert!(settle(&mut store).is_empty());
    assert_eq!(store.run_one(read(0, 0, 512)), Ok(512));
}

#[test]
fn a_watch_for_sleeps_costs_nothing_awake() {
    let (_directory, _region, mut store) = small_store(4);
    let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
    let token = FdToken(5);
    store.watch_asleep(event.as_raw_fd(), token).unwrap();
    assert!(store.watch(event.as_raw_fd(), token).is_err());
    let mut woken = WatchSet::default();
    for _ in 0..100 {
        event.write(1).unwrap();
        store.turn(TurnSleep::No, &mut woken).unwrap();
        event.read().unwrap();
    }
    assert!(woken.is_empty());
    assert_eq!(store.counters().enters, 0);
    // Each sleep ends while the descriptor is readable, whenever it became so.
    event.write(1).unwrap();
    for _ in 0..100 {
        store.turn(TurnSleep::Until(Duration::from_secs(10)), &mut woken).unwrap();
        assert!(woken.contains(token));
        woken.clear();
    }
    event.read().unwrap();
    store.turn(TurnSleep::Until(Duration::from_millis(20)), &mut woken).unwrap();
    assert!(woken.is_empty());
    // The poll of that sleep is still armed, and reports once.
    event.write(1).unwrap();
    store.turn(TurnSleep::No, &mut woken).unwrap();
    assert!(woken.contains(token));
    woken.clear();
    let enters = store.counters().enters;
    store.turn(TurnSleep::No, &mut woken).unwrap();
    assert!(woken.is_empty() && store.counters().enters == enters);
    store.unwatch(token);
    store.turn(TurnSleep::Until(Duration::from_millis(20)), &mut woken).unwrap();
    assert!(woken.is_empty());
    store.watch_asleep(event.as_raw_fd(), token).unwrap();
    store.turn(TurnSleep::Until(Duration::from_secs(10)), &mut woken).unwrap();
    assert!(woken.contains(token));
    assert_eq!(store.counters().watch_errors, 0);
}

#[test]
fn a_store_belongs_to_the_thread_of_its_first_turn() {
    let (_directory, _region, mut store) = small_store(4);
    store.start(1, &read(0, 0, 512)).unwrap();
    let mut store = std::thread::spawn(move || {
        let mut done = Vec::new();
        while done.is_empty() {
            store.work();
            store.reap(&mut done);
        }
        store
    })
    .join()
    .unwrap();
    if store.warnings().contains(&Warning::NoDeferredCompletions) {
        return;
    }
    store.start(2, &read(0, 0, 512)).unwrap();
    let error = store.turn(TurnSleep::No, &mut WatchSet::default()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
}

#[test]
fn a_ring_of_an_older_kernel_works() {
    let (_directory, region, mut store) = small_store(4);
    let backing = store.remove_volume(VOLUME).unwrap();
    let ring = uring::cooperative(256).unwrap();
    let options = UringOptions { capacity: 4, volumes: 4, registered: None };
    let mut store = UringStore::with_ring(ring, region, &options).unwrap();
    assert_eq!(store.warnings(), [Warning::NoDeferredCompletions]);
    store.add_volume(VOLUME, backing).unwrap();
    let ops = [write(0, 0, 65536), flush(), read(65536, 65536, 65536)];
    assert_eq!(store.run(&ops), [Ok(65536), Ok(0), Ok(65536)]);
    // Polling finds a completion, too.
    store.start(1, &flush()).unwrap();
    let mut done = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while done.is_empty() && Instant::now() < deadline {
        store.turn(TurnSleep::No, &mut WatchSet::default()).unwrap();
        store.reap(&mut done);
    }
    assert_eq!(done.len(), 1);
}

#[test]
fn dropping_a_store_ends_its_ops() {
    let (_directory, region, mut store) = small_store(16);
    for token in 0..16 {
        let io = write(token * 4096, 0, 4096);
        store.start(token, &io).unwrap();
    }
    store.turn(TurnSleep::No, &mut WatchSet::default()).unwrap();
    drop(store);
    assert_eq!(Arc::strong_count(&region), 1, "ended, so nothing is leaked");
}

#[test]
fn dropping_a_store_that_cannot_end_its_ops_leaks_their_memory() {
    let (_directory, region, mut store) = small_store(16);
    std::thread::scope(|scope| {
        let store = &mut store;
        scope.spawn(|| store.turn(TurnSleep::No, &mut WatchSet::default()).unwrap());
    });
    if store.warnings().contains(&Warning::NoDeferredCompletions) {
        return;
    }
    // The ring belongs to another thread: this one can neither submit nor collect.
    store.start(1, &write(0, 0, 4096)).unwrap();
    drop(store);
    assert_eq!(Arc::strong_count(&region), 2);
}

/// A store that could lock its memory. The tests share the user's limit of locked memory, so this
/// may wait until some of them have ended.
fn registering(region: &Arc<Region>, options: &UringOptions) -> UringStore {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let store = UringStore::new(Arc::clone(region), options).unwrap();
        let is_short = |warning: &Warning| {
            matches!(warning, Warning::PlainBuffers { errno: Errno::ENOMEM, .. })
        };
        if !store.warnings().iter().any(is_short) || Instant::now() > until {
            return store;
        }
        drop(store);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn part_of_the_region_registered() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Preferred)).unwrap());
    let region = region(MIB);
    for registered in [0..0, 4096..65536, 0..2 * MIB] {
        let options = UringOptions { capacity: 4, volumes: 4, registered: Some(registered) };
        let mut store = registering(&region, &options);
        assert_eq!(store.warnings(), []);
        store.add_volume(VOLUME, Arc::clone(&backing)).unwrap();
        region.write(4096, &pattern(3, 0, 8192));
        // Inside the registered range, across its end, outside.
        assert_eq!(store.run_one(write(0, 4096, 8192)), Ok(8192));
        assert_eq!(store.run_one(read(0, 65536 - 4096, 8192)), Ok(8192));
        assert_eq!(store.run_one(read(0, 131_072, 8192)), Ok(8192));
        for at in [65536 - 4096, 131_072] {
            let mut got = [0; 8192];
            region.read(at, &mut got);
            assert!(got[..] == pattern(3, 0, 8192));
        }
    }
}

#[test]
#[ignore = "pins 1 GiB of memory"]
fn region_of_more_than_one_piece() {
    const PIECE: usize = 1 << 30;
    let directory = directory();
    let path = file(directory.path(), "disk", 8 * MIB as u64);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Preferred)).unwrap());
    let region = region(PIECE + 8 * MIB);
    let mut store = uring(&region, 16, &backing);
    assert_eq!(store.warnings(), []);
    let bytes = 4 * MIB32;
    // The last extent of the first piece, the first of the second, and one across the border, which
    // an arena never makes.
    for at in [PIECE - 4 * MIB, PIECE, PIECE - 4096] {
        region.write(at, &pattern(1, at, 4 * MIB));
        assert_eq!(store.run_one(write(0, at, bytes)), Ok(bytes));
        region.zero(at, 4 * MIB);
        assert_eq!(store.run_one(read(0, at, bytes)), Ok(bytes));
        let mut got = vec![0; 4 * MIB];
        region.read(at, &mut got);
        assert!(got == pattern(1, at, 4 * MIB));
    }
}
