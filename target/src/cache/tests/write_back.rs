//! Dirty blocks on their way to the store, flushes, and the end of a shard.

use super::*;
use crate::cache::Unsaved;

fn back() -> Case {
    Setup::new(CacheMode::WriteBack).case()
}

#[test]
fn neighbours_go_together_after_the_delay() {
    let mut case = back();
    for block in [3, 1, 2, 0, 7] {
        case.dirty(1, block * 4096, 4096);
    }
    assert_eq!(case.shard.next_deadline(), Some(DELAY));
    case.wait(DELAY - Duration::from_millis(1));
    assert_eq!(case.ops(), []);
    assert_eq!(case.shard.next_deadline(), Some(Duration::from_millis(1)));
    case.wait(Duration::from_millis(1));
    assert_eq!(case.ranges(), [(0, 4 * 4096), (7 * 4096, 4096)]);
    assert_eq!(case.shard.next_deadline(), None);
    assert_eq!(case.dirty_blocks(), 5);
    assert_eq!(case.hit(0, 4 * 4096), bytes(1, 0, 4 * 4096));
    case.finish_all();
    assert_eq!(case.dirty_blocks(), 0);
    assert_eq!(case.stored(0, 4 * 4096), bytes(1, 0, 4 * 4096));
    assert_eq!(case.hit(0, 4 * 4096), bytes(1, 0, 4 * 4096));
    let counters = case.shard.counters();
    assert_eq!((counters.write_backs, counters.write_back_bytes), (2, 5 * 4096));
    case.end();
}

#[test]
fn a_write_back_is_no_longer_than_it_may_be_and_stays_in_its_stripe() {
    let setup = Setup { write_back_max: 4 * 4096, ..Setup::new(CacheMode::WriteBack) };
    let mut case = setup.case();
    case.dirty(1, 0, 10 * 4096);
    case.wait(DELAY);
    assert_eq!(case.ranges(), [(0, 4 * 4096), (4 * 4096, 4 * 4096), (8 * 4096, 2 * 4096)]);
    case.finish_all();
    case.end();
    let mut case = back();
    case.dirty(1, STRIPE_BYTES - 2 * BLOCK, 5 * 4096);
    case.wait(DELAY);
    let seam = STRIPE_BYTES;
    assert_eq!(case.ranges(), [(seam - 2 * BLOCK, 2 * 4096), (seam, 3 * 4096)]);
    case.finish_all();
    case.end();
}

#[test]
fn a_crowd_of_dirty_blocks_does_not_wait_for_the_delay() {
    let mut case = back();
    for at in 0..32 {
        case.dirty(1, at * 2 * 4096, 4096);
    }
    case.turn();
    assert_eq!(case.ops(), []);
    case.dirty(1, 32 * 2 * 4096, 4096);
    case.turn();
    // The oldest first.
    assert_eq!(case.ranges()[0], (0, 4096));
    case.end();
    // Below the limit, the others may wait again.
    assert!(case.dirty_blocks() > 0 && case.dirty_blocks() <= 32, "{}", case.dirty_blocks());
}

#[test]
fn a_flush_waits_only_for_earlier_dirty_blocks() {
    let mut case = back();
    let nothing = case.flush();
    assert_eq!(case.done(nothing), Ok(()));
    case.dirty(1, 0, 4096);
    case.dirty(1, 2 * 4096, 4096);
    let flush = case.flush();
    assert_eq!(case.ranges(), [(0, 4096), (2 * 4096, 4096)]);
    case.dirty(2, 4 * 4096, 4096);
    case.turn();
    assert_eq!(case.ops().len(), 2);
    case.finish(1);
    assert!(!case.is_answered(flush));
    case.finish(0);
    assert_eq!(case.done(flush), Ok(()));
    assert_eq!(case.dirty_blocks(), 1);
    assert_eq!(case.stored(4 * 4096, 4096), bytes(0, 4 * 4096, 4096));
    case.end();
}

#[test]
fn a_block_that_is_rewritten_before_its_write_back_keeps_its_age() {
    let mut case = back();
    case.dirty(1, 0, 4096);
    case.wait(DELAY / 2);
    case.dirty(2, 0, 4096);
    case.dirty(2, 2 * 4096, 4096);
    case.wait(DELAY / 2);
    assert_eq!(case.ranges(), [(0, 4096)]);
    case.finish(0);
    assert_eq!(case.stored(0, 4096), bytes(2, 0, 4096));
    case.wait(DELAY / 2);
    assert_eq!(case.ranges(), [(2 * 4096, 4096)]);
    case.end();
}

#[test]
fn a_block_that_is_rewritten_during_its_write_back_goes_again() {
    let mut case = back();
    case.dirty(1, 0, 4096);
    let first = case.flush();
    case.dirty(2, 0, 4096);
    assert_eq!(case.hit(0, 4096), bytes(2, 0, 4096));
    let second = case.flush();
    // A block is never in two running write-backs.
    assert_eq!(case.ranges(), [(0, 4096)]);
    case.finish(0);
    assert_eq!(case.done(first), Ok(()));
    assert!(!case.is_answered(second));
    assert_eq!(case.stored(0, 4096), bytes(1, 0, 4096));
    assert_eq!(case.hit(0, 4096), bytes(2, 0, 4096));
    assert_eq!(case.ranges(), [(0, 4096)]);
    case.finish(0);
    assert_eq!(case.done(second), Ok(()));
    assert_eq!(case.stored(0, 4096), bytes(2, 0, 4096));
    assert_eq!(case.dirty_blocks(), 0);
    case.end();
}

#[test]
fn a_failed_write_back_fails_every_flush_until_it_succeeds() {
    let mut case = back();
    case.dirty(1, 0, 2 * 4096);
    for result in [Err(Errno::EIO), Ok(4096), Err(Errno::ENOSPC)] {
        let flush = case.flush();
        assert_eq!(case.ranges(), [(0, 2 * 4096)]);
        case.finish_with(0, result);
        assert_eq!(case.done(flush), Err(result.err().unwrap_or(Errno::EIO)));
        assert_eq!(case.hit(0, 2 * 4096), bytes(1, 0, 2 * 4096));
        assert_eq!(case.shard.core.slots.failed(VOLUME), 2);
        // The store itself answers new writes.
        let write = case.write(2, 8 * 4096, 4096);
        assert_eq!(case.ranges(), [(8 * 4096, 4096)]);
        case.finish_with(0, Err(Errno::EROFS));
        assert_eq!(case.done(write), Err(Errno::EROFS));
    }
    let flush = case.flush();
    case.finish_all();
    assert_eq!(case.done(flush), Ok(()));
    assert_eq!(case.stored(0, 2 * 4096), bytes(1, 0, 2 * 4096));
    assert_eq!((case.dirty_blocks(), case.shard.core.slots.failed(VOLUME)), (0, 0));
    case.dirty(2, 8 * 4096, 4096);
    case.wait(DELAY);
    case.end();
}

#[test]
fn control_learns_of_the_first_failure_of_a_burst() {
    let mut case = back();
    case.dirty(1, 0, 4096);
    assert_eq!(case.shard.take_failure(), None);
    for errno in [Errno::ENOSPC, Errno::EIO] {
        let flush = case.flush();
        case.finish_with(0, Err(errno));
        assert_eq!(case.done(flush), Err(errno));
    }
    let failure = case.shard.take_failure().expect("the first");
    assert_eq!((failure.volume, failure.errno), (VOLUME, Errno::ENOSPC));
    assert_eq!(case.shard.take_failure(), None, "the second is of the same burst");
    let flush = case.flush();
    case.finish_all();
    assert_eq!(case.done(flush), Ok(()));
    case.end();
}

#[test]
fn a_failed_block_that_is_rewritten_meanwhile_is_as_old_as_it_was() {
    let mut case = back();
    case.dirty(1, 0, 4096);
    let first = case.flush();
    case.dirty(2, 0, 4096);
    let order =
        case.shard.core.slots.oldest_dirty(VOLUME).map(|slot| case.shard.core.slots.since(slot).0);
    case.finish_with(0, Err(Errno::EIO));
    assert_eq!(case.done(first), Err(Errno::EIO));
    let slot = case.shard.core.slots.oldest_dirty(VOLUME).unwrap();
    assert!(Some(case.shard.core.slots.since(slot).0) < order);
    assert_eq!(case.hit(0, 4096), bytes(2, 0, 4096));
    let second = case.flush();
    case.finish_all();
    assert_eq!(case.done(second), Ok(()));
    assert_eq!(case.stored(0, 4096), bytes(2, 0, 4096));
    case.end();
}

#[test]
fn retries_become_less_and_less_frequent() {
    let mut case = back();
    case.dirty(1, 0, 4096);
    case.wait(DELAY);
    for rest in [1, 2, 4, 8, 16, 30, 30] {
        let rest = Duration::from_secs(rest);
        assert_eq!(case.ranges(), [(0, 4096)]);
        case.finish_with(0, Err(Errno::EIO));
        assert_eq!(case.shard.next_deadline(), Some(rest));
        case.wait(rest - Duration::from_millis(1));
        assert_eq!(case.ops(), []);
        case.wait(Duration::from_millis(1));
    }
    case.finish_all();
    assert_eq!(case.dirty_blocks(), 0);
    // The backoff starts again.
    case.dirty(1, 0, 4096);
    case.wait(DELAY);
    case.finish_with(0, Err(Errno::EIO));
    assert_eq!(case.shard.next_deadline(), Some(Duration::from_secs(1)));
    case.wait(Duration::from_secs(1));
    case.end();
}

/// The pause after a failure ends with the failed blocks. The shard's clock wraps after 49 days: a
/// pause that was kept would delay write-backs for weeks, weeks later.
#[test]
fn a_pause_does_not_outlive_its_failure() {
    const LATER: Duration = Duration::from_secs(25 * 24 * 3600);
    let ends: [fn(&mut Case); 3] = [
        |case| {
            let tag = case.discard(0, 4096);
            case.finish(0);
            assert_eq!(case.done(tag), Ok(()));
        },
        |case| {
            // The store takes this write.
            let tag = case.write(2, 0, 4096);
            case.finish(0);
            assert_eq!(case.done(tag), Ok(()));
        },
        |case| {
            let tag = case.flush();
            case.finish(0);
            assert_eq!(case.done(tag), Ok(()));
        },
    ];
    for (at, end) in ends.into_iter().enumerate() {
        for later in [Duration::ZERO, LATER] {
            let mut case = back();
            case.dirty(1, 0, 4096);
            case.wait(DELAY);
            case.finish_with(0, Err(Errno::EIO));
            assert_eq!(case.shard.next_deadline(), Some(Duration::from_secs(1)));
            end(&mut case);
            assert_eq!((case.dirty_blocks(), case.shard.core.slots.failed(VOLUME)), (0, 0), "{at}");
            // The shard's clock follows the thread's clock.
            case.wait(later);
            case.dirty(3, 8 * 4096, 4096);
            case.turn();
            assert_eq!(case.shard.next_deadline(), Some(DELAY), "{at}, {later:?}");
            case.wait(DELAY);
            assert_eq!(case.ranges(), [(8 * 4096, 4096)], "{at}, {later:?}");
            case.end();
        }
    }
}

/// A pause stays ended, even after weeks without a turn.
#[test]
fn a_pause_ends_even_without_turns_for_weeks() {
    let mut case = back();
    case.dirty(1, 0, 4096);
    case.wait(DELAY);
    case.finish_with(0, Err(Errno::EIO));
    case.wait(Duration::from_secs(20 * 24 * 3600));
    assert_eq!(case.ranges(), [(0, 4096)]);
    case.end();
}

/// Two write-backs of a block wait behind a write. The newer one has all the older's data, so a
/// flush from before the newer one waits for it.
#[test]
fn a_flush_does_not_lose_a_block_that_two_write_backs_wait_for() {
    let mut case = back();
    let fua = case.write_bytes(4096, &bytes(9, 4096, 512), true);
    assert_eq!(case.ranges(), [(4096, 512)]);
    case.dirty(1, 4096, 4096);
    let first = case.flush();
    case.dirty(2, 4096, 4096);
    case.wait(DELAY);
    assert_eq!(case.shard.write_backs.counts().0, 2);
    assert_eq!(case.ranges(), [(4096, 512)]);
    // The write with FUA merges into the dirty block.
    case.finish(0);
    assert_eq!(case.done(fua), Ok(()));
    let mut expected = bytes(2, 4096, 4096);
    expected[..512].copy_from_slice(&bytes(9, 4096, 512));
    assert_eq!(case.hit(4096, 4096), expected);
    assert!(!case.is_answered(first), "the store has neither version of what was flushed");
    case.finish_all();
    assert_eq!(case.done(first), Ok(()));
    assert_eq!(case.stored(4096, 4096), expected);
    case.end();
}

#[test]
fn a_write_through_overtakes_a_write_back_that_waits() {
    let mut case = back();
    let fua = case.write_bytes(0, &bytes(9, 0, 4096), true);
    case.dirty(1, 0, 2 * 4096);
    let flush = case.flush();
    assert_eq!(case.ranges(), [(0, 4096)]);
    case.finish(0);
    assert_eq!(case.done(fua), Ok(()));
    assert_eq!(case.hit(0, 4096), bytes(9, 0, 4096));
    // Only the block that was not overwritten is written.
    assert_eq!(case.ranges(), [(4096, 4096)]);
    case.finish_all();
    assert_eq!(case.done(flush), Ok(()));
    assert_eq!(case.stored(0, 4096), bytes(9, 0, 4096));
    assert_eq!(case.stored(4096, 4096), bytes(1, 4096, 4096));
    case.end();
}

#[test]
fn a_volume_without_dirty_blocks_has_nothing_to_flush() {
    for mode in [CacheMode::None, CacheMode::WriteThrough] {
        let mut case = Setup::new(mode).case();
        let write = case.write(1, 0, 4096);
        let flush = case.flush();
        assert_eq!(case.done(flush), Ok(()));
        let from = case.token();
        case.request(ShardRequest::Sync { from, volume: VOLUME });
        assert_eq!(case.ops()[1], OpKind::Flush);
        case.finish_with(1, Err(Errno::EIO));
        assert_eq!(case.done(from.tag), Err(Errno::EIO));
        case.finish_all();
        assert_eq!(case.done(write), Ok(()));
        case.end();
    }
}

#[test]
fn the_end_writes_everything_and_makes_it_durable() {
    for mode in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut case = Setup::new(mode).case();
        assert_eq!(case.shard.stopped(), None);
        let tags = [0, 8 * 4096].map(|at| case.write(1, at, 4096));
        if mode != CacheMode::WriteBack {
            case.finish_all();
        }
        tags.into_iter().for_each(|tag| assert_eq!(case.done(tag), Ok(())));
        case.shard.stop();
        case.shard.stop();
        assert_eq!(case.shard.stopped(), None);
        if mode == CacheMode::WriteBack {
            assert_eq!(case.ranges(), [(0, 4096), (8 * 4096, 4096)]);
            case.finish(1);
            assert!(!case.ops().contains(&OpKind::Flush), "made durable before it was written");
            case.finish(0);
        }
        assert_eq!(case.ops(), [OpKind::Flush]);
        assert_eq!(case.shard.stopped(), None);
        case.finish(0);
        assert_eq!(case.shard.stopped(), Some(true));
        assert_eq!(case.stored(8 * 4096, 4096), bytes(1, 8 * 4096, 4096));
        case.end();
    }
}

#[test]
fn refused_blocks_are_retried_at_the_end_until_they_are_written() {
    let mut case = back();
    case.dirty(1, 0, 4096);
    case.dirty(1, 8 * 4096, 4096);
    case.shard.stop();
    for _ in 0..40 {
        assert_eq!(case.ranges(), [(0, 4096), (8 * 4096, 4096)], "each is tried");
        case.finish_with(1, Err(Errno::ENOSPC));
        case.finish_with(0, Err(Errno::ENOSPC));
        assert_eq!((case.shard.stopped(), case.ops().len()), (None, 0));
        let [refused] = &case.shard.refused()[..] else { panic!("one volume") };
        let cause = "No space left on device (os error 28)";
        assert_eq!((refused.dirty_bytes, refused.cause.as_str()), (8192, cause));
        case.wait(Duration::from_secs(1));
        case.shard.stop();
    }
    case.finish_all();
    assert_eq!((case.shard.stopped(), case.shard.unsaved()), (Some(true), vec![]));
    assert_eq!(case.stored(8 * 4096, 4096), bytes(1, 8 * 4096, 4096));
    case.end();
}

/// Many old blocks that the store refuses do not hold back a younger one.
#[test]
fn every_block_is_tried_at_the_end() {
    let mut case = back();
    (0..40).for_each(|at| case.dirty(1, 2 * at * 4096, 4096));
    case.shard.stop();
    assert_eq!(case.ops().len(), 40);
    case.finish_all();
    assert_eq!(case.shard.stopped(), Some(true));
    case.end();
}

#[test]
fn a_store_that_hangs_at_the_end_does_not_hold_back_others() {
    let mut case = back();
    let other = VolumeIndex(1);
    case.shard.store_mut().add_volume(vec![0; 1 << 20]);
    case.shard.add_volume(other, CacheMode::WriteThrough, 1 << 20, false, Arc::default());
    case.dirty(1, 0, 4096);
    case.shard.stop();
    assert_eq!(case.ops().len(), 2, "the sync of the other waits for nothing");
    let flush = case.ops().iter().position(|op| *op == OpKind::Flush).unwrap();
    case.finish(flush);
    let unsaved = case.shard.unsaved();
    let cause = "the store did not answer".to_owned();
    assert_eq!(unsaved, [Unsaved { volume: VOLUME, dirty_bytes: 4096, cause }]);
    assert_eq!((case.shard.stopped(), case.shard.refused()), (None, vec![]));
    case.finish_all();
    assert_eq!((case.shard.stopped(), case.shard.unsaved()), (Some(true), vec![]));
}

#[test]
fn a_write_that_the_store_still_has_leaves_its_volume_unsaved() {
    for mode in [CacheMode::None, CacheMode::WriteThrough] {
        let mut case = Setup::new(mode).case();
        case.write(1, 0, 4096);
        case.shard.stop();
        // The store hangs with the write, and answers the sync.
        let flush = case.ops().iter().position(|op| *op == OpKind::Flush).unwrap();
        case.finish(flush);
        let cause = "the store did not answer".to_owned();
        let unsaved = Unsaved { volume: VOLUME, dirty_bytes: 0, cause };
        assert_eq!((case.shard.stopped(), case.shard.unsaved()), (None, vec![unsaved]));
        case.finish_all();
        assert_eq!((case.shard.stopped(), case.shard.unsaved()), (Some(true), vec![]));
    }
}

#[test]
fn an_end_with_a_loss_is_not_clean() {
    for mode in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut case = Setup::new(mode).case();
        case.shard.stop();
        assert_eq!(case.ops(), [OpKind::Flush]);
        case.finish_with(0, Err(Errno::EIO));
        assert_eq!(case.shard.stopped(), Some(false));
    }
}

#[test]
fn at_the_end_writes_are_acknowledged_only_from_the_store() {
    let mut case = back();
    case.shard.stop();
    let write = case.write(1, 0, 4096);
    assert!(!case.is_answered(write));
    case.finish_all();
    assert_eq!(case.done(write), Ok(()));
    assert_eq!(case.stored(0, 4096), bytes(1, 0, 4096));
    assert_eq!((case.dirty_blocks(), case.shard.stopped()), (0, Some(true)));
    case.end();
}
