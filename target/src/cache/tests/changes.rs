//! Discards, zeroing and locked ranges, over blocks in every state.

use super::*;

fn zeroes(offset: u64, len: u64) -> OpKind {
    OpKind::WriteZeroes { offset, len, may_unmap: false }
}

fn kinds(offset: u64, len: u64) -> [OpKind; 2] {
    [OpKind::Discard { offset, len }, zeroes(offset, len)]
}

/// A shard with blocks 0 and 1 clean, 2 and 3 dirty, 4 and 5 being written back, 6 and 7 absent, 8
/// and 9 lent; and the contents of these blocks.
fn mixed() -> (Case, Data, Segments) {
    let mut case = Setup::new(CacheMode::WriteBack).case();
    case.warm(0, 2 * 4096);
    case.dirty(1, 4 * 4096, 2 * 4096);
    case.wait(DELAY);
    case.dirty(1, 2 * 4096, 2 * 4096);
    case.warm_beside(8 * 4096, 2 * 4096);
    let tag = case.read(8 * 4096, 2 * 4096);
    let lent = case.lent(tag).unwrap();
    assert_eq!(case.ranges(), [(4 * 4096, 2 * 4096)]);
    let mut all = bytes(0, 0, 10 * 4096);
    all[2 * 4096..6 * 4096].copy_from_slice(&bytes(1, 2 * 4096, 4 * 4096));
    (case, all, lent)
}

impl Case {
    /// Like `warm`, without effect on the store's other ops.
    fn warm_beside(&mut self, offset: u64, len: u32) {
        let tag = self.read(offset, len);
        let last = self.ops().len() - 1;
        self.finish(last);
        assert_eq!(self.got(tag), Ok(bytes(0, offset, len as usize)));
    }
}

#[test]
fn the_range_reads_as_zeroes_and_the_rest_as_before() {
    let ranges = [
        (0, 10 * 4096),
        (2 * 4096, 4096),
        (4 * 4096, 4096),
        (512, 1024),
        (2 * 4096 + 512, 1024),
        (4 * 4096 + 512, 1024),
        (3 * 4096 + 3584, 1024),
        (3 * 4096 + 512, 6 * 4096),
        (512, 9 * 4096 + 512),
        (0, 4 << 20),
    ];
    for (offset, len) in ranges {
        for kind in kinds(offset, len) {
            let (mut case, mut all, lent) = mixed();
            let change = case.change(kind);
            case.finish_all();
            assert_eq!(case.done(change), Ok(()), "{kind:?}");
            let start = usize::try_from(offset).unwrap();
            let end = usize::try_from(offset + len).unwrap().min(all.len());
            all[start..end].fill(0);
            assert!(case.read_all(0, 10 * 4096) == all, "{kind:?}: a read");
            let flush = case.flush();
            case.finish_all();
            assert_eq!(case.done(flush), Ok(()), "{kind:?}");
            assert!(case.stored(0, 10 * 4096) == all, "{kind:?}: the store");
            assert!(case.read_all(0, 10 * 4096) == all, "{kind:?}: a read after a flush");
            assert_eq!(case.dirty_blocks(), 0, "{kind:?}");
            // A reader of dropped slots is not disturbed.
            assert_eq!(case.copy(&lent), bytes(0, 8 * 4096, 2 * 4096));
            case.release(lent);
            case.end();
        }
    }
}

#[test]
fn discarded_blocks_are_not_written_back() {
    let mut case = Setup::new(CacheMode::WriteBack).case();
    case.dirty(1, 0, 8 * 4096);
    let flush = case.flush();
    let change = case.discard(0, 8 * 4096);
    // The write-back came first.
    assert_eq!(case.ranges(), [(0, 8 * 4096)]);
    case.finish(0);
    assert_eq!(case.done(flush), Ok(()));
    case.finish(0);
    assert_eq!(case.done(change), Ok(()));
    case.dirty(2, 0, 8 * 4096);
    let change = case.discard(0, 8 * 4096);
    case.finish(0);
    assert_eq!(case.done(change), Ok(()));
    assert_eq!(case.dirty_blocks(), 0);
    let accepted = case.shard.core.store.store().accepted;
    case.wait(DELAY);
    let flush = case.flush();
    assert_eq!(case.done(flush), Ok(()));
    assert_eq!(case.shard.core.store.store().accepted, accepted);
    case.end();
}

#[test]
fn a_change_takes_its_blocks_from_a_waiting_write_back() {
    for (offset, len) in [(0, 8 * 4096), (2 * 4096, 2 * 4096), (2 * 4096 + 512, 2 * 4096)] {
        let mut case = Setup::new(CacheMode::WriteBack).case();
        case.dirty(1, 0, 8 * 4096);
        let change = case.discard(offset, len);
        let flush = case.flush();
        assert_eq!(case.ops(), [OpKind::Discard { offset, len }]);
        assert_eq!(case.shard.write_backs.counts().0, 1);
        case.finish(0);
        assert_eq!(case.done(change), Ok(()));
        let mut all = bytes(1, 0, 8 * 4096);
        all[usize::try_from(offset).unwrap()..][..usize::try_from(len).unwrap()].fill(0);
        assert!(case.read_all(0, 8 * 4096) == all);
        case.finish_all();
        assert_eq!(case.done(flush), Ok(()));
        assert!(case.stored(0, 8 * 4096) == all, "{offset}+{len}");
        assert_eq!(case.dirty_blocks(), 0);
        case.end();
    }
}

#[test]
fn a_failed_change_drops_clean_blocks_and_keeps_dirty_ones() {
    for kind in kinds(512, 9 * 4096) {
        let (mut case, all, lent) = mixed();
        case.finish_all();
        let change = case.change(kind);
        case.finish_with(0, Err(Errno::EIO));
        assert_eq!(case.done(change), Err(Errno::EIO));
        let cached = [0, 1, 2, 3, 4, 5, 8].map(|block| case.is_cached(block));
        assert_eq!(cached, [false, false, true, true, false, false, false]);
        assert!(case.read_all(0, 10 * 4096) == all);
        case.wait(DELAY);
        case.finish_all();
        assert!(case.stored(0, 10 * 4096) == all);
        case.release(lent);
        case.end();
    }
}

#[test]
fn reads_and_writes_wait_for_a_change_in_their_order() {
    for mode in [CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut case = Setup::new(mode).case();
        let change = case.discard(0, 8 * 4096);
        let read = case.read(4096, 4096);
        let write = case.write_bytes(2 * 4096, &bytes(1, 2 * 4096, 4096), true);
        let apart = case.read(8 * 4096, 4096);
        assert_eq!(case.ranges(), [(0, 8 * 4096), (8 * 4096, 4096)]);
        case.finish(1);
        assert_eq!(case.got(apart), Ok(bytes(0, 8 * 4096, 4096)));
        case.finish(0);
        assert_eq!(case.done(change), Ok(()));
        case.finish_all();
        assert_eq!(case.got(read), Ok(Data(vec![0; 4096])));
        assert_eq!(case.done(write), Ok(()));
        assert_eq!(case.hit(2 * 4096, 4096), bytes(1, 2 * 4096, 4096));
        assert_eq!(case.stored(2 * 4096, 4096), bytes(1, 2 * 4096, 4096));
        case.end();
    }
}

#[test]
fn a_change_waits_for_memory_for_its_edges() {
    let mut case = Setup { slots: 16, ..Setup::new(CacheMode::WriteBack) }.case();
    case.dirty(1, 0, 2 * 4096);
    let lend = |at: u64| {
        let tag = case.read(STRIPE_BYTES + at * BLOCK, 4096);
        case.finish_all();
        case.lent(tag).unwrap()
    };
    let lent: Vec<_> = (0..14).map(lend).collect();
    let change = case.discard(512, 4096);
    assert_eq!(case.ops(), []);
    assert!(case.shard.is_short());
    lent.into_iter().for_each(|memory| case.release(memory));
    case.turn();
    assert_eq!(case.ranges(), [(512, 4096)]);
    case.finish(0);
    assert_eq!(case.done(change), Ok(()));
    let mut all = bytes(1, 0, 2 * 4096);
    all[512..512 + 4096].fill(0);
    assert_eq!(case.hit(0, 2 * 4096), all);
    case.wait(DELAY);
    case.end();
    assert_eq!(case.stored(0, 2 * 4096), all);
}

#[test]
fn without_a_cache_changes_only_go_to_the_store() {
    let mut case = Setup::new(CacheMode::None).case();
    let first = case.discard(512, 1024);
    let second = case.change(zeroes(4096, 4096));
    assert_eq!(case.ranges(), [(512, 1024), (4096, 4096)]);
    case.finish_with(0, Err(Errno::EOPNOTSUPP));
    case.finish(0);
    assert_eq!(case.done(first), Err(Errno::EOPNOTSUPP));
    assert_eq!(case.done(second), Ok(()));
    case.end();
}

#[test]
fn a_lock_keeps_the_store_of_its_range_quiet() {
    for outcome in [Changed::Yes, Changed::Unknown, Changed::No] {
        let mut case = Setup::new(CacheMode::WriteBack).case();
        case.warm(0, 2 * 4096);
        case.dirty(1, 2 * 4096, 2 * 4096);
        let lock = case.lock_range(512, 8 * 4096);
        let job = case.locked(lock);
        let second = case.lock_range(4096, 4096);
        let fill = case.read(6 * 4096, 4096);
        let flush = case.flush();
        let fua = case.write_bytes(7 * 4096, &bytes(2, 7 * 4096, 4096), true);
        assert_eq!(case.ops(), []);
        assert_eq!(case.hit(0, 2 * 4096), bytes(0, 0, 2 * 4096));
        assert_eq!(case.hit(2 * 4096, 2 * 4096), bytes(1, 2 * 4096, 2 * 4096));
        assert!(!case.is_answered(second));
        // The holder's change of the store.
        if outcome == Changed::Yes {
            let from = case.token();
            let kind = OpKind::Discard { offset: 512, len: 8 * 4096 };
            case.request(ShardRequest::Change { from, volume: VOLUME, kind, locked: true });
            assert_eq!(case.ops(), [kind]);
            case.finish(0);
            assert_eq!(case.done(from.tag), Ok(()));
            assert!(case.is_cached(0));
        }
        case.unlock_range(job, outcome);
        let cached = [0, 1, 2, 3].map(|block| case.is_cached(block));
        assert_eq!(
            cached,
            match outcome {
                Changed::Yes => [false; 4],
                Changed::Unknown => [false, false, true, true],
                Changed::No => [true; 4],
            }
        );
        // A second unlock: debug builds panic.
        if !cfg!(debug_assertions) {
            case.unlock_range(job, Changed::Yes);
        }
        let second = case.locked(second);
        case.finish_all();
        assert_eq!(case.done(fua), Ok(()));
        assert_eq!(case.done(flush), Ok(()));
        let zeroed = outcome == Changed::Yes;
        let expected = if zeroed { Data(vec![0; 4096]) } else { bytes(0, 6 * 4096, 4096) };
        assert_eq!(case.got(fill), Ok(expected));
        let expected = if zeroed { Data(vec![0; 4096]) } else { bytes(1, 2 * 4096, 4096) };
        assert_eq!(case.stored(2 * 4096, 4096), expected);
        assert_eq!(case.hit(7 * 4096, 4096), bytes(2, 7 * 4096, 4096));
        case.unlock_range(second, Changed::No);
        case.end();
    }
}

/// Jobs granted by one release each continue once, also when one of them ends at once.
#[test]
fn a_job_behind_a_lock_continues_once() {
    let mut case = Setup::new(CacheMode::WriteBack).case();
    let lock = case.lock_range(0, 16 * 4096);
    let job = case.locked(lock);
    let second = case.lock_range(0, 4096);
    let fill = case.read(2 * 4096, 4096);
    // The read's block is cached when it gets its lock, so it ends at once.
    let read = case.read(4 * 4096, 4096);
    case.dirty(1, 4 * 4096, 4096);
    let last = case.read(6 * 4096, 4096);
    case.unlock_range(job, Changed::No);
    assert_eq!(case.got(read), Ok(bytes(1, 4 * 4096, 4096)));
    assert_eq!(case.ranges(), [(2 * 4096, 4096), (6 * 4096, 4096)]);
    let second = case.locked(second);
    case.unlock_range(second, Changed::No);
    case.finish_all();
    assert_eq!(case.got(fill), Ok(bytes(0, 2 * 4096, 4096)));
    assert_eq!(case.got(last), Ok(bytes(0, 6 * 4096, 4096)));
    case.wait(DELAY);
    case.end();
}

/// As above, with a job that ends at once and grants locks to others.
#[test]
fn a_job_that_ends_at_once_lets_the_next_continue() {
    let mut case = Setup::new(CacheMode::WriteBack).case();
    let lock = case.lock_range(0, 16 * 4096);
    let job = case.locked(lock);
    let fill = case.read(0, 4096);
    let chain: Vec<_> = (0..8).map(|_| case.read(4 * 4096, 4096)).collect();
    let behind = case.lock_range(4 * 4096, 4096);
    case.dirty(1, 4 * 4096, 4096);
    case.unlock_range(job, Changed::No);
    assert_eq!(case.ranges(), [(0, 4096)]);
    for tag in chain {
        assert_eq!(case.got(tag), Ok(bytes(1, 4 * 4096, 4096)));
    }
    let behind = case.locked(behind);
    case.unlock_range(behind, Changed::No);
    case.finish_all();
    assert_eq!(case.got(fill), Ok(bytes(0, 0, 4096)));
    case.wait(DELAY);
    case.end();
}
