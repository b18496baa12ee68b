//! Volumes that are abandoned while their stores work on them.

use super::*;

#[test]
fn operations_at_an_abandoned_store_keep_their_memory() {
    let mut case = Setup::new(CacheMode::WriteBack).case();
    case.dirty(1, 0, 8 * 4096);
    case.dirty(1, 40 * 4096, 4096);
    let flush = case.flush();
    let read = case.read(64 * 4096, 4096);
    assert_eq!(case.ops().len(), 3);
    case.dirty(2, 80 * 4096, 4096);
    // Another op does not fit.
    case.shard.store_mut().capacity = 3;
    let late = case.read(96 * 4096, 4096);
    assert_eq!((case.ops().len(), case.is_answered(late)), (3, false));

    case.shard.abandon_volume(VOLUME);
    case.collect();
    assert_eq!(case.done(flush), Err(Errno::ENXIO));
    assert_eq!((case.dirty_blocks(), case.shard.slots().cached()), (0, 0));
    case.turn();
    assert!(matches!(case.lent(late), Err(Errno::ENXIO)), "it does not wait for the store");
    assert!(!case.shard.is_left(VOLUME));
    let mut free = Vec::new();
    while let Some(slot) = case.shard.core.slots.allocate_one() {
        free.push(slot);
    }
    assert_eq!(free.len(), 256 - 8 - 1 - 1, "the store has the others");
    free.into_iter().for_each(|slot| case.shard.core.slots.give_back(slot));

    let written = case.op_at(0);
    case.finish_with(written, Err(Errno::EIO));
    assert_eq!(case.dirty_blocks(), 0, "it is not tried again");
    case.finish_all();
    assert!(!case.is_cached(40) && !case.is_cached(0));
    let lent = case.lent(read).unwrap();
    assert!(case.shard.is_left(VOLUME), "what was lent is the reader's");
    case.shard.remove_volume(VOLUME).unwrap();
    case.release(lent);
    assert_eq!(case.shard.slots().cached(), 0);
    case.end();
}
