//! Large reads whose blocks came one by one: their memory becomes a run, and no byte changes.

use super::*;

const BLOCKS: u64 = 16;
const LEN: u32 = 16 * 4096;

/// A case with some blocks of the range in the index, in no order of their memory.
fn scattered(mode: CacheMode, blocks: impl Fn(u64) -> bool) -> Case {
    let mut case = Setup::new(mode).case();
    for block in (0..BLOCKS).map(|at| at * 7 % BLOCKS).filter(|block| blocks(*block)) {
        case.warm(block * 4096, 4096);
    }
    case
}

fn with(mut data: Data, version: u8, blocks: &[u64]) -> Data {
    for block in blocks {
        let at = usize::try_from(block * 4096).unwrap();
        data[at..at + 4096].copy_from_slice(&bytes(version, block * 4096, 4096));
    }
    data
}

#[test]
fn a_scattered_hit_is_copied_to_one_run_once() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut case = scattered(mode, |_| true);
        let expected = bytes(0, 0, LEN as usize);
        let before = case.shard.core.slots.moved();
        let held = case.read(0, 4 * 4096);
        let tag = case.read(0, LEN);
        assert!(case.is_answered(tag) && case.ops().is_empty(), "a hit went to the store");
        let memory = case.lent(tag).unwrap();
        assert_eq!((memory.as_slice().len(), case.copy(&memory)), (1, expected.clone()));
        assert_eq!(case.shard.core.slots.moved() - before, BLOCKS);
        // The old slots of the first read are still lent.
        assert_eq!(case.got(held), Ok(bytes(0, 0, 4 * 4096)));
        let again = case.read(0, LEN);
        let again = case.lent(again).unwrap();
        assert_eq!(again.as_slice(), memory.as_slice());
        assert_eq!(case.shard.core.slots.moved() - before, BLOCKS, "copied again");
        case.release(memory);
        case.release(again);
        assert_eq!(case.shard.core.slots.cached(), 16);
        case.end();
    }
}

#[test]
fn dirty_blocks_of_a_scattered_hit_stay_dirty_and_in_order() {
    let mut case = scattered(CacheMode::WriteBack, |_| true);
    for block in [9, 3, 12] {
        case.dirty(1, block * 4096, 4096);
    }
    let expected = with(bytes(0, 0, LEN as usize), 1, &[9, 3, 12]);
    let tag = case.read(0, LEN);
    let memory = case.lent(tag).unwrap();
    assert_eq!((memory.as_slice().len(), case.copy(&memory)), (1, expected.clone()));
    case.release(memory);
    assert_eq!(case.dirty_blocks(), 3);
    let flush = case.flush();
    assert_eq!(case.ranges(), [9, 3, 12].map(|block| (block * 4096, 4096)));
    // With write-backs under way, their slots stay.
    let tag = case.read(0, LEN);
    assert_eq!(case.got(tag), Ok(expected.clone()));
    case.finish_all();
    assert_eq!(case.done(flush), Ok(()));
    assert_eq!(case.stored(0, LEN as usize), expected);
    assert_eq!(case.hit(0, LEN), expected);
    case.end();
}

#[test]
fn a_large_read_with_scattered_hits_is_one_operation() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut case = scattered(mode, |block| block % 3 == 1);
        let held = case.read(4096, 4096);
        let tag = case.read(0, LEN);
        assert_eq!(case.ranges(), [(0, LEN.into())]);
        case.finish(0);
        let memory = case.lent(tag).unwrap();
        assert_eq!((memory.as_slice().len(), case.copy(&memory)), (1, bytes(0, 0, LEN as usize)));
        assert_eq!(case.got(held), Ok(bytes(0, 4096, 4096)));
        case.release(memory);
        let (counters, cached) = (case.shard.counters(), case.shard.core.slots.cached());
        assert_eq!((counters.hits, counters.misses, cached), (5 + 1, 5 + 11, 16));
        assert_eq!(case.hit(0, LEN), bytes(0, 0, LEN as usize));
        case.end();
    }
}

#[test]
fn newer_blocks_of_a_large_read_are_kept() {
    let mut case = scattered(CacheMode::WriteBack, |block| block % 3 == 1);
    case.dirty(1, 4 * 4096, 4096);
    case.dirty(1, 7 * 4096, 4096);
    let tag = case.read(0, LEN);
    assert_eq!(case.ranges(), [(0, LEN.into())]);
    // One block becomes dirty meanwhile, one more is written again, and all wait for write-back.
    case.dirty(2, 2 * 4096, 4096);
    case.dirty(2, 7 * 4096, 4096);
    let flush = case.flush();
    case.dirty(3, 10 * 4096, 4096);
    let expected = with(bytes(0, 0, LEN as usize), 1, &[4]);
    let expected = with(with(expected, 2, &[2, 7]), 3, &[10]);
    case.finish(0);
    assert_eq!(case.got(tag), Ok(expected.clone()));
    assert_eq!(case.hit(0, 8 * 4096)[..], expected[..8 * 4096]);
    case.finish_all();
    assert_eq!(case.done(flush), Ok(()));
    let flush = case.flush();
    case.finish_all();
    assert_eq!(case.done(flush), Ok(()));
    assert_eq!(case.stored(0, LEN as usize), expected);
    case.end();
}

#[test]
fn a_failed_large_read_changes_nothing() {
    let mut case = scattered(CacheMode::WriteBack, |block| block % 3 == 1);
    case.dirty(1, 4 * 4096, 4096);
    let tag = case.read(0, LEN);
    case.finish_with(0, Err(Errno::EIO));
    assert_eq!(case.got(tag), Err(Errno::EIO));
    let cached: Vec<_> = (0..BLOCKS).filter(|block| case.is_cached(*block)).collect();
    assert_eq!((cached, case.dirty_blocks()), (vec![1, 4, 7, 10, 13], 1));
    assert_eq!(case.hit(4 * 4096, 4096), bytes(1, 4 * 4096, 4096));
    case.end();
}

#[test]
fn a_second_large_read_finds_the_blocks_of_the_first() {
    let mut case = scattered(CacheMode::WriteThrough, |block| block % 3 == 1);
    let tags = [case.read(0, LEN), case.read(0, LEN)];
    assert_eq!(case.ranges(), [(0, LEN.into())]);
    case.finish(0);
    assert!(case.ops().is_empty(), "the second read went to the store");
    for tag in tags {
        assert_eq!(case.got(tag), Ok(bytes(0, 0, LEN as usize)));
    }
    assert_eq!(case.shard.core.slots.cached(), 16);
    case.end();
}

#[test]
fn a_prefetch_over_cached_blocks_makes_one_run() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut case = scattered(mode, |block| block % 3 == 1);
        case.prefetch(0, LEN);
        assert_eq!(case.ranges(), [(0, LEN.into())]);
        case.finish(0);
        let before = case.shard.core.slots.moved();
        let tag = case.read(0, LEN);
        let memory = case.lent(tag).unwrap();
        assert_eq!((memory.as_slice().len(), case.copy(&memory)), (1, bytes(0, 0, LEN as usize)));
        assert_eq!(case.shard.core.slots.moved(), before);
        case.release(memory);
        case.end();
    }
}
