//! Survivors of a crash of the store, and breaches that it notices.

use rblk_fabric::PageKind;
use rblk_target::store::OpToken;

use super::*;

const V: VolumeIndex = VolumeIndex(1);

fn store(seed: u64) -> CrashStore {
    let region = Arc::new(Region::allocate(4096, PageKind::Normal).unwrap());
    let mut store = CrashStore::new(&region, seed);
    store.set_volume(V, vec![0; 4096]);
    store
}

fn submit(store: &mut CrashStore, kind: OpKind, memory: &[Segment]) {
    store.submit(Op { token: OpToken(1), volume: V, kind }, memory).unwrap();
}

fn finish(store: &mut CrashStore) -> Vec<OpDone> {
    let mut out = Vec::new();
    while store.in_flight() > 0 {
        store.reap(&mut out);
    }
    out
}

fn write(store: &mut CrashStore, byte: u8, fua: bool) {
    store.region.write(0, &[byte; 1024]);
    let kind = OpKind::Write { offset: 512, len: 1024, fua };
    let memory = [Segment { offset: 512, len: 512 }, Segment { offset: 0, len: 512 }];
    submit(store, kind, &memory);
    assert!(finish(store).iter().all(|done| done.result.is_ok()));
}

/// Values that two sectors have after crashes by many seeds.
fn outcomes(store: &CrashStore) -> Vec<(u8, u8)> {
    let mut all: Vec<_> = (0..400).map(|seed| store.crash(V, seed)).collect();
    for image in &all {
        assert!(image[512..1024].iter().all(|b| *b == image[512]), "a torn sector");
        assert!(image[..512].iter().chain(&image[1536..]).all(|b| *b == 0), "elsewhere");
    }
    let mut pairs: Vec<_> = all.drain(..).map(|image| (image[512], image[1024])).collect();
    pairs.sort_unstable();
    pairs.dedup();
    pairs
}

#[test]
fn unflushed_writes_are_kept_dropped_or_torn() {
    let mut store = store(1);
    write(&mut store, 1, false);
    assert_eq!(store.bytes(V)[512], 1);
    assert_eq!(outcomes(&store), [(0, 0), (0, 1), (1, 0), (1, 1)]);
    write(&mut store, 2, false);
    assert_eq!(outcomes(&store).len(), 9);
    assert_eq!(store.kill(V, 1)[512], 2);
}

#[test]
fn a_flush_covers_what_was_done_before_it() {
    let mut store = store(2);
    write(&mut store, 1, false);
    submit(&mut store, OpKind::Flush, &[]);
    assert_eq!(outcomes(&store).len(), 4, "the flush is not done");
    // Submitted after the flush, so not covered.
    write(&mut store, 2, false);
    finish(&mut store);
    assert_eq!(outcomes(&store), [(1, 1), (1, 2), (2, 1), (2, 2)]);
    write(&mut store, 3, true);
    assert_eq!(outcomes(&store), [(3, 3)]);
    submit(&mut store, OpKind::Discard { offset: 512, len: 512 }, &[]);
    assert_eq!(outcomes(&store), [(0, 3), (3, 3)]);
    store.set_faults(vec![Fault { kind: Kind::Flush, volume: V, range: 0..0, errno: Errno::EIO }]);
    finish(&mut store);
    submit(&mut store, OpKind::Flush, &[]);
    assert_eq!(finish(&mut store)[0].result, Err(Errno::EIO));
    assert_eq!(outcomes(&store), [(0, 3), (3, 3)], "a failed flush covers nothing");
}

#[test]
fn lent_memory_is_watched() {
    let mut store = store(3);
    let memory = [Segment { offset: 0, len: 512 }];
    store.set_conditions(StoreConditions { stalled: true, ..StoreConditions::default() });
    submit(&mut store, OpKind::Read { offset: 0, len: 512 }, &memory);
    let mut bytes = [0; 512];
    store.region.read(0, &mut bytes);
    assert_eq!(bytes, [POISON; 512]);
    store.set_conditions(StoreConditions::default());
    finish(&mut store);
    assert!(store.breaches().is_empty());
    store.set_conditions(StoreConditions { stalled: true, ..StoreConditions::default() });
    submit(&mut store, OpKind::Write { offset: 0, len: 512, fua: false }, &memory);
    store.region.write(0, &[9; 512]);
    store.set_conditions(StoreConditions::default());
    finish(&mut store);
    assert_eq!(store.breaches().len(), 1);
}

#[test]
fn held_ops_are_overtaken() {
    let mut store = store(6);
    let memory = [Segment { offset: 0, len: 512 }];
    store.region.write(0, &[1; 512]);
    store.set_conditions(StoreConditions { delay_min: 2, ..StoreConditions::default() });
    submit(&mut store, OpKind::Write { offset: 0, len: 512, fua: false }, &memory);
    let early = store.bytes(V)[0] == 1;
    store.hold();
    submit(&mut store, OpKind::Discard { offset: 0, len: 512 }, &[]);
    let mut done = Vec::new();
    for _ in 0..10 {
        store.reap(&mut done);
    }
    assert_eq!((done.len(), store.in_flight(), store.disk_busy()), (1, 1, 0));
    assert_eq!(store.bytes(V)[0], 0);
    store.release();
    store.reap(&mut done);
    assert_eq!((done.len(), store.in_flight()), (2, 0));
    assert_eq!(store.bytes(V)[0], u8::from(!early), "it took effect last");
}

#[test]
fn overlaps_are_breaches_when_they_are_forbidden() {
    for (exclusive, offset, breaches) in [(false, 512, 0), (true, 512, 1), (true, 1024, 0)] {
        let mut store = store(5);
        if exclusive {
            store.set_exclusive();
        }
        submit(&mut store, OpKind::Discard { offset: 0, len: 1024 }, &[]);
        let mut other = store.another();
        submit(&mut store, OpKind::Flush, &[]);
        submit(&mut other, OpKind::Discard { offset, len: 512 }, &[]);
        assert_eq!(store.breaches().len(), breaches);
    }
}

#[test]
fn faults_are_in_their_range_only() {
    let mut store = store(4);
    let errno = Errno::ENOSPC;
    store.set_faults(vec![Fault { kind: Kind::Write, volume: V, range: 512..1024, errno }]);
    let memory = [Segment { offset: 0, len: 512 }];
    for (offset, result) in [(0, Ok(512)), (512, Err(errno)), (1024, Ok(512))] {
        submit(&mut store, OpKind::Write { offset, len: 512, fua: false }, &memory);
        assert_eq!(finish(&mut store)[0].result, result);
        submit(&mut store, OpKind::Read { offset, len: 512 }, &memory);
        assert_eq!(finish(&mut store)[0].result, Ok(512));
    }
}
