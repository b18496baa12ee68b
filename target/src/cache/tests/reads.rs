//! Reads, fills, prefetches, and the order in which jobs get memory.

use super::*;

fn cached() -> [Case; 2] {
    [CacheMode::WriteThrough, CacheMode::WriteBack].map(|mode| Setup::new(mode).case())
}

#[test]
fn readers_of_a_cold_block_share_one_fill() {
    for mut case in cached() {
        let tags: Vec<_> = (0..8).map(|at| case.read(at * 512, 512)).collect();
        assert_eq!(case.ranges(), [(0, 4096)]);
        case.finish(0);
        for (at, tag) in (0..).zip(tags) {
            assert_eq!(case.got(tag), Ok(bytes(0, at * 512, 512)));
        }
        assert_eq!(case.shard.core.store.store().accepted, 1);
        assert_eq!(case.shard.counters().copied_bytes, 0);
        assert_eq!(case.shard.counters().fill_bytes, 4096);
        case.end();
    }
}

#[test]
fn a_read_that_overlaps_a_fill_reads_only_the_rest() {
    for mut case in cached() {
        let first = case.read(0, 2 * 4096);
        let second = case.read(4096, 2 * 4096);
        assert_eq!(case.ranges(), [(0, 2 * 4096)]);
        case.finish(0);
        assert!(case.is_answered(first) && !case.is_answered(second));
        assert_eq!(case.ranges(), [(2 * 4096, 4096)]);
        case.finish(0);
        assert_eq!(case.got(first), Ok(bytes(0, 0, 2 * 4096)));
        assert_eq!(case.got(second), Ok(bytes(0, 4096, 2 * 4096)));
        case.end();
    }
}

#[test]
fn a_hit_lends_the_slot_itself() {
    for mut case in cached() {
        case.warm(0, 4 * 4096);
        let first = case.read(512, 3 * 4096);
        let second = case.read(512, 3 * 4096);
        let (first, second) = (case.lent(first).unwrap(), case.lent(second).unwrap());
        assert_eq!(first.as_slice(), second.as_slice());
        assert_eq!(case.copy(&first), bytes(0, 512, 3 * 4096));
        assert_eq!(case.shard.core.store.store().accepted, 1);
        assert_eq!(case.shard.counters().copied_bytes, 0);
        case.release(first);
        assert_eq!(case.shard.core.slots.lent(), 4);
        case.release(second);
        case.end();
    }
}

#[test]
fn a_fill_reads_only_missing_blocks() {
    for mut case in cached() {
        case.warm(0, 4096);
        case.warm(3 * 4096, 4096);
        let tag = case.read(0, 6 * 4096);
        assert_eq!(case.ranges(), [(4096, 2 * 4096), (4 * 4096, 2 * 4096)]);
        case.finish(1);
        assert!(!case.is_answered(tag));
        case.finish(0);
        assert_eq!(case.got(tag), Ok(bytes(0, 0, 6 * 4096)));
        let counters = case.shard.counters();
        assert_eq!((counters.hits, counters.misses), (2, 6));
        case.end();
    }
}

#[test]
fn a_failed_or_short_operation_is_an_error_and_not_cached() {
    let early = [Ok(4096 * 2 - 512), Ok(0), Ok(4096 * 3), Err(Errno::ENODATA)];
    for mut case in cached() {
        for result in early {
            let first = case.read(0, 2 * 4096);
            let second = case.read(4096, 4096);
            case.finish_with(0, result);
            assert_eq!(case.got(first), Err(result.err().unwrap_or(Errno::EIO)));
            assert!(!case.is_cached(0) && !case.is_cached(1));
            // The waiting read tries on its own.
            assert_eq!(case.ranges(), [(4096, 4096)]);
            case.finish(0);
            assert_eq!(case.got(second), Ok(bytes(0, 4096, 4096)));
            let discard = case.discard(0, 0x10000);
            case.shard.store_mut().finish_with(0, Ok(0));
            case.turn();
            assert_eq!(case.done(discard), Ok(()));
        }
        assert_eq!(case.shard.counters().store_errors, early.len() as u64);
        case.end();
    }
}

#[test]
fn one_bad_fill_of_two_fails_the_read() {
    for mut case in cached() {
        case.warm(4096, 4096);
        let tag = case.read(0, 3 * 4096);
        assert_eq!(case.ranges(), [(0, 4096), (2 * 4096, 4096)]);
        case.finish(1);
        case.finish_with(0, Err(Errno::EIO));
        assert_eq!(case.got(tag), Err(Errno::EIO));
        assert_eq!([0, 1, 2].map(|block| case.is_cached(block)), [false, true, false]);
        case.end();
    }
}

#[test]
fn the_last_block_of_a_volume_may_be_short() {
    for mode in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
        let size = 3 * 4096 + 1536;
        let mut case = Setup { size, ..Setup::new(mode) }.case();
        let tag = case.read(2 * 4096, 4096 + 1536);
        assert_eq!(case.ranges(), [(2 * 4096, 4096 + 1536)]);
        case.finish(0);
        assert_eq!(case.got(tag), Ok(bytes(0, 2 * 4096, 4096 + 1536)));
        assert_eq!(case.read_all(size - 512, 512), bytes(0, size - 512, 512));
        // The whole block, and a part of it.
        for (version, offset) in [(1, 3 * 4096), (2, 3 * 4096 + 512)] {
            let len = usize::try_from(size - offset).unwrap();
            let tag = case.write(version, offset, len);
            case.finish_all();
            assert_eq!(case.done(tag), Ok(()));
            let flush = case.flush();
            case.finish_all();
            assert_eq!(case.done(flush), Ok(()));
            assert_eq!(case.stored(offset, len), bytes(version, offset, len), "{mode:?}");
            let read = case.read_all(offset, u32::try_from(len).unwrap());
            assert_eq!(read, bytes(version, offset, len));
        }
        assert_eq!(case.stored(3 * 4096, 512), bytes(1, 3 * 4096, 512));
        case.end();
    }
}

#[test]
fn without_a_cache_every_read_goes_to_the_store() {
    let mut case = Setup::new(CacheMode::None).case();
    let tags = [(512, 4096), (512, 4096), (0, 8 * 4096)].map(|(at, len)| case.read(at, len));
    assert_eq!(case.ranges(), [(512, 4096), (512, 4096), (0, 8 * 4096)]);
    case.finish_with(1, Ok(512));
    case.finish(1);
    case.finish(0);
    assert_eq!(case.got(tags[0]), Ok(bytes(0, 512, 4096)));
    assert_eq!(case.got(tags[1]), Err(Errno::EIO));
    assert_eq!(case.got(tags[2]), Ok(bytes(0, 0, 8 * 4096)));
    assert_eq!(case.shard.core.slots.cached(), 0);
    case.end();
}

#[test]
fn a_block_that_is_rewritten_while_a_read_waits_is_old_or_new() {
    let mut case = Setup::new(CacheMode::WriteBack).case();
    case.warm(0, 4096);
    let tag = case.read(0, 2 * 4096);
    case.dirty(1, 0, 4096);
    case.finish(0);
    let got = case.got(tag).unwrap();
    assert!([&bytes(0, 0, 4096)[..], &bytes(1, 0, 4096)].contains(&&got[..4096]));
    assert_eq!(got[4096..], bytes(0, 4096, 4096)[..]);
    assert_eq!(case.hit(0, 4096), bytes(1, 0, 4096));
    case.end();
}

#[test]
fn a_fill_gives_way_to_a_write_that_came_meanwhile() {
    let mut case = Setup::new(CacheMode::WriteBack).case();
    let first = case.read(0, 3 * 4096);
    let second = case.read(0, 3 * 4096);
    case.dirty(1, 4096, 4096);
    assert_eq!(case.hit(4096, 4096), bytes(1, 4096, 4096));
    case.finish(0);
    let mut newer = bytes(0, 0, 3 * 4096);
    newer[4096..2 * 4096].copy_from_slice(&bytes(1, 4096, 4096));
    assert_eq!(case.got(first), Ok(newer.clone()));
    assert_eq!(case.got(second), Ok(newer.clone()));
    assert_eq!(case.hit(0, 3 * 4096), newer);
    assert_eq!(case.dirty_blocks(), 1);
    case.wait(DELAY);
    assert_eq!(case.ranges(), [(4096, 4096)]);
    case.finish_all();
    assert_eq!(case.stored(4096, 4096), bytes(1, 4096, 4096));
    case.end();
}

#[test]
fn a_full_store_gets_its_ops_later_and_in_order() {
    for mut case in cached() {
        case.shard.store_mut().capacity = 1;
        let tags: Vec<_> = (0..4).map(|at| case.read(at * 8192, 4096)).collect();
        for (at, tag) in (0..).zip(tags) {
            assert_eq!(case.ranges(), [(at * 8192, 4096)]);
            assert!(!case.shard.is_idle());
            case.finish(0);
            assert_eq!(case.got(tag), Ok(bytes(0, at * 8192, 4096)));
        }
        case.end();
    }
}

#[test]
fn a_read_in_more_pieces_than_one_op_may_have() {
    use crate::store::MAX_SEGMENTS;
    let count = MAX_SEGMENTS + 3;
    let mut setup = Setup { slots: 2 * count.next_multiple_of(4), ..Setup::new(CacheMode::None) };
    setup.size = 16 << 20;
    let mut case = setup.case();
    // Lends every second slot, so that no two free ones are neighbours.
    let mut lent = Vec::new();
    for at in 0..setup.slots as u64 {
        let tag = case.read(at * 4096, 4096);
        case.finish(0);
        lent.push(case.lent(tag).unwrap());
    }
    lent.sort_by_key(|memory| memory.as_slice()[0].offset);
    let mut keep = Vec::new();
    for (at, memory) in lent.into_iter().enumerate() {
        if at % 2 == 0 { keep.push(memory) } else { case.release(memory) }
    }
    let len = u32::try_from(count).unwrap() * 4096;
    let tag = case.read(512, len);
    assert_eq!(case.ranges(), [(512, 4096 * 1024), (512 + 4096 * 1024, 3 * 4096)]);
    case.finish(1);
    case.finish(0);
    assert_eq!(case.got(tag), Ok(bytes(0, 512, len as usize)));
    keep.into_iter().for_each(|memory| case.release(memory));
    case.end();
}

/// Lends all memory: clean blocks of the far end of the volume.
fn lend_all(case: &mut Case) -> Vec<Segments> {
    let slots = case.shard.core.slots.capacity() as u64 - case.dirty_blocks() as u64;
    let lend = |at| {
        let tag = case.read(2 * STRIPE_BYTES + at * BLOCK, 4096);
        case.finish_all();
        case.lent(tag).unwrap()
    };
    (0..slots).map(lend).collect()
}

#[test]
fn memory_goes_to_the_first_job() {
    let modes = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];
    for mode in modes {
        let mut case = Setup { slots: 16, ..Setup::new(mode) }.case();
        let mut lent = lend_all(&mut case);
        let large = case.read(0, 4 * 4096);
        let write = case.reserve(4 * 4096, 2 * 4096);
        let small = case.read(6 * 4096, 4096);
        assert!(case.shard.is_short());
        assert_eq!(case.ops(), []);
        assert_eq!(case.shard.counters().memory_waits, 3);
        // Enough memory for the jobs behind and for a new one, but not for the first. Time alone
        // changes nothing.
        for _ in 0..3 {
            case.release(lent.pop().unwrap());
            case.wait(Duration::from_millis(20));
        }
        let late = case.read(8 * 4096, 4096);
        assert_eq!(case.ops(), []);
        assert!(!case.is_answered(write));
        case.release(lent.pop().unwrap());
        case.turn();
        assert_eq!(case.ranges(), [(0, 4 * 4096)]);
        assert!(case.shard.is_short() && !case.is_answered(write));
        for _ in 0..4 {
            case.release(lent.pop().unwrap());
        }
        case.turn();
        assert!(!case.shard.is_short());
        assert_eq!(case.ranges(), [(0, 4 * 4096), (6 * 4096, 4096), (8 * 4096, 4096)]);
        case.finish_all();
        assert_eq!(case.got(large), Ok(bytes(0, 0, 4 * 4096)));
        assert_eq!(case.got(small), Ok(bytes(0, 6 * 4096, 4096)));
        assert_eq!(case.got(late), Ok(bytes(0, 8 * 4096, 4096)));
        let write = case.land(write, &bytes(1, 4 * 4096, 2 * 4096), false);
        case.finish_all();
        assert_eq!(case.done(write), Ok(()));
        lent.into_iter().for_each(|memory| case.release(memory));
        case.end();
    }
}

#[test]
fn a_job_that_waited_for_memory_finds_blocks_filled_meanwhile() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut case = Setup { slots: 16, ..Setup::new(mode) }.case();
        let mut lent = lend_all(&mut case);
        let tags = [(); 3].map(|()| case.read(4096, 4096));
        case.release(lent.pop().unwrap());
        case.turn();
        // One slot is enough for the first read; the others wait for a slot or for the fill.
        assert_eq!(case.ranges(), [(4096, 4096)]);
        case.finish(0);
        case.wait(Duration::from_millis(20));
        for tag in tags {
            assert_eq!(case.got(tag), Ok(bytes(0, 4096, 4096)));
        }
        assert_eq!(case.ops(), []);
        lent.into_iter().for_each(|memory| case.release(memory));
        case.end();
    }
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "has ended")]
fn a_reservation_that_is_cancelled_twice_is_a_bug() {
    let mut case = Setup::new(CacheMode::WriteThrough).case();
    let tag = case.reserve(0, 4096);
    let (job, memory) = case.reserved(tag);
    case.request(ShardRequest::Cancel { job, memory });
    case.request(ShardRequest::Cancel { job, memory: Segments::default() });
}

#[test]
fn a_reservation_that_is_cancelled_leaves_nothing() {
    for mode in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut case = Setup { slots: 16, ..Setup::new(mode) }.case();
        let tags = [(0, 8 * 4096), (512, 2 * 4096)].map(|(at, len)| case.reserve(at, len));
        for tag in tags {
            let (job, memory) = case.reserved(tag);
            case.request(ShardRequest::Cancel { job, memory });
            // Twice, and too late: both are bugs, which panic in debug builds and change nothing in
            // others.
            if !cfg!(debug_assertions) {
                case.request(ShardRequest::Cancel { job, memory: Segments::default() });
                let (from, memory) = (case.token(), Segments::default());
                case.request(ShardRequest::Write { from, job, memory, fua: true });
            }
        }
        assert_eq!(case.shard.core.store.store().accepted, 0);
        case.end();
        let all = lend_all(&mut case);
        assert_eq!(all.len(), 16);
        all.into_iter().for_each(|memory| case.release(memory));
    }
}

#[test]
fn a_prefetch_fills_silently() {
    for mut case in cached() {
        case.warm(2 * 4096, 4096);
        case.prefetch(0, 4 * 4096);
        assert_eq!(case.ranges(), [(0, 2 * 4096), (3 * 4096, 4096)]);
        // A read of a part of the range waits for the prefetch.
        let tag = case.read(4096, 4096);
        assert_eq!(case.ops().len(), 2);
        case.finish_all();
        assert_eq!(case.got(tag), Ok(bytes(0, 4096, 4096)));
        assert_eq!(case.hit(0, 4 * 4096), bytes(0, 0, 4 * 4096));
        assert_eq!(case.shard.counters().prefetched, 3);
        // Ranges without work.
        case.prefetch(512, 512);
        case.prefetch(0, 0);
        assert_eq!(case.ops(), []);
        case.end();
    }
}

#[test]
fn a_failed_prefetch_is_not_reported() {
    for mut case in cached() {
        case.prefetch(0, 4 * 4096);
        let tag = case.read(4096, 4096);
        case.finish_with(0, Err(Errno::EIO));
        assert!(!case.is_answered(tag) && !case.is_cached(0));
        assert_eq!(case.ranges(), [(4096, 4096)]);
        case.finish_all();
        assert_eq!(case.got(tag), Ok(bytes(0, 4096, 4096)));
        case.end();
    }
}

#[test]
fn a_prefetch_waits_for_no_job() {
    let mut case = Setup::new(CacheMode::None).case();
    case.prefetch(0, 4096);
    assert_eq!(case.ops(), []);
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        // The range is busy.
        let mut case = Setup { slots: 16, ..Setup::new(mode) }.case();
        let read = case.read(0, 4096);
        case.prefetch(0, 2 * 4096);
        assert_eq!(case.ranges(), [(0, 4096)]);
        case.finish_all();
        assert_eq!(case.got(read), Ok(bytes(0, 0, 4096)));
        assert!(!case.is_cached(1));
        // A job waits for memory, so a returned slot is for that job.
        let mut lent = lend_all(&mut case);
        let read = case.read(0, 2 * 4096);
        case.release(lent.pop().unwrap());
        assert!(case.shard.is_short());
        case.prefetch(STRIPE_BYTES, 4096);
        assert_eq!(case.ops(), []);
        lent.into_iter().for_each(|memory| case.release(memory));
        case.turn();
        case.finish_all();
        assert_eq!(case.got(read), Ok(bytes(0, 0, 2 * 4096)));
        case.end();
    }
}

#[test]
fn a_prefetch_takes_neither_dirty_nor_lent_slots() {
    let mut case =
        Setup { slots: 16, dirty_max: 8 * SLOT_BYTES, ..Setup::new(CacheMode::WriteBack) }.case();
    case.dirty(1, 0, 4 * 4096);
    let lent = lend_all(&mut case);
    assert_eq!(lent.len(), 12);
    let evictions = case.shard.core.slots.evictions();
    case.prefetch(STRIPE_BYTES, 4096);
    assert_eq!(case.ops(), []);
    assert_eq!(case.shard.core.slots.evictions(), evictions);
    assert!(!case.shard.is_short());
    for memory in lent {
        assert_eq!(case.copy(&memory).len(), 4096);
        case.release(memory);
    }
    // Now the prefetch may start.
    case.prefetch(STRIPE_BYTES, 12 * 4096);
    assert_eq!(case.ranges(), [(STRIPE_BYTES, 12 * 4096)]);
    case.finish_all();
    assert_eq!(case.hit(0, 4 * 4096), bytes(1, 0, 4 * 4096));
    assert_eq!(case.dirty_blocks(), 4);
    case.end();
}
