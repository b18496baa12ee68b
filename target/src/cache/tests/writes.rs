//! Writes: through to the store, into memory, of parts of blocks.

use super::*;

/// How a write reaches the store.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    None,
    Through,
    ThroughFua,
    Back,
    BackFua,
    /// Write-back without room for dirty blocks.
    BackLimited,
}

const WAYS: [Way; 6] =
    [Way::None, Way::Through, Way::ThroughFua, Way::Back, Way::BackFua, Way::BackLimited];

/// Every way, by a request or by the direct way of the shard's own poll group.
fn ways() -> impl Iterator<Item = (Way, bool)> {
    WAYS.into_iter().flat_map(|way| [(way, false), (way, true)])
}

impl Way {
    fn case_at(self, at_home: bool) -> Case {
        Case { at_home, ..self.case() }
    }

    fn case(self) -> Case {
        let cache = match self {
            Self::None => CacheMode::None,
            Self::Through | Self::ThroughFua => CacheMode::WriteThrough,
            _ => CacheMode::WriteBack,
        };
        Setup { slots: 32, dirty_max: 4 * SLOT_BYTES, ..Setup::new(cache) }.case()
    }

    fn fua(self) -> bool {
        matches!(self, Self::ThroughFua | Self::BackFua)
    }

    /// Uses up the room for dirty blocks, if the way needs that.
    fn prepare(self, case: &mut Case) {
        if self == Self::BackLimited {
            let room = 4 - case.dirty_blocks();
            case.dirty(9, STRIPE_BYTES, room * 4096);
        }
    }
}

#[test]
fn a_write_through_is_seen_when_it_is_acknowledged() {
    for fua in [false, true] {
        let mut case = Setup::new(CacheMode::WriteThrough).case();
        case.warm(0, 4 * 4096);
        let before = case.read(0, 4 * 4096);
        let before = case.lent(before).unwrap();
        let write = case.write_bytes(4096, &bytes(1, 4096, 2 * 4096), fua);
        assert_eq!(case.ops(), [OpKind::Write { offset: 4096, len: 2 * 4096, fua }]);
        assert_eq!(case.hit(0, 4 * 4096), bytes(0, 0, 4 * 4096));
        assert!(!case.is_answered(write));
        case.finish(0);
        assert_eq!(case.done(write), Ok(()));
        assert_eq!(case.hit(4096, 2 * 4096), bytes(1, 4096, 2 * 4096));
        assert_eq!(case.hit(0, 4096), bytes(0, 0, 4096));
        // A reader of the old slots is not disturbed.
        case.warm(STRIPE_BYTES, 128 * 4096);
        assert_eq!(case.copy(&before), bytes(0, 0, 4 * 4096));
        case.release(before);
        assert_eq!(case.shard.counters().copied_bytes, 0);
        case.end();
    }
}

#[test]
fn a_read_of_a_cold_block_waits_for_the_write() {
    let mut case = Setup::new(CacheMode::WriteThrough).case();
    let write = case.write(1, 0, 4096);
    let read = case.read(0, 4096);
    assert_eq!(case.ranges(), [(0, 4096)]);
    case.finish(0);
    assert_eq!(case.done(write), Ok(()));
    assert_eq!(case.got(read), Ok(bytes(1, 0, 4096)));
    assert_eq!(case.shard.core.store.store().accepted, 1);
    case.end();
}

#[test]
fn a_write_waits_for_the_fill_and_wins() {
    for (way, at_home) in ways() {
        if way == Way::None {
            continue;
        }
        let mut case = way.case_at(at_home);
        way.prepare(&mut case);
        let read = case.read(0, 4096);
        let write = case.write_bytes(0, &bytes(1, 0, 4096), way.fua());
        let late = case.read(0, 4096);
        case.finish_all();
        assert_eq!(case.done(write), Ok(()), "{way:?}");
        for tag in [read, late] {
            let got = case.got(tag).unwrap();
            assert!(got == bytes(0, 0, 4096) || got == bytes(1, 0, 4096), "{way:?}: a mix");
        }
        assert_eq!(case.hit(0, 4096), bytes(1, 0, 4096), "{way:?}");
        case.wait(DELAY);
        case.end();
        assert_eq!(case.stored(0, 4096), bytes(1, 0, 4096), "{way:?}");
    }
}

#[test]
fn writes_of_a_block_reach_the_store_one_after_the_other() {
    for (way, at_home) in ways() {
        if way == Way::None || way == Way::Back {
            continue;
        }
        let mut case = way.case_at(at_home);
        way.prepare(&mut case);
        let tags: Vec<_> = (1..=4)
            .map(|version| case.write_bytes(0, &bytes(version, 0, 4096), way.fua()))
            .collect();
        let ours = |case: &Case| case.ranges().iter().filter(|(at, _)| *at == 0).count();
        assert_eq!(ours(&case), 1, "{way:?}");
        case.finish_all();
        tags.into_iter().for_each(|tag| assert_eq!(case.done(tag), Ok(())));
        assert_eq!(case.hit(0, 4096), bytes(4, 0, 4096), "{way:?}");
        case.wait(DELAY);
        case.end();
        assert_eq!(case.stored(0, 4096), bytes(4, 0, 4096), "{way:?}");
    }
}

#[test]
fn a_failed_write_leaves_nothing_clean() {
    for result in [Err(Errno::ENOSPC), Ok(512)] {
        for way in WAYS {
            if way == Way::None || way == Way::Back {
                continue;
            }
            let mut case = way.case();
            case.warm(0, 4 * 4096);
            way.prepare(&mut case);
            let write = case.write_bytes(4096, &bytes(1, 4096, 2 * 4096), way.fua());
            let read = case.read(4096, 4096);
            assert_eq!(case.got(read), Ok(bytes(0, 4096, 4096)));
            case.finish_with(case.op_at(4096), result);
            assert_eq!(case.done(write), Err(result.err().unwrap_or(Errno::EIO)), "{way:?}");
            let cached = [0, 1, 2, 3].map(|block| case.is_cached(block));
            assert_eq!(cached, [true, false, false, true], "{way:?}");
            case.wait(DELAY);
            case.end();
        }
    }
}

#[test]
fn a_failed_write_keeps_dirty_blocks() {
    let mut case = Way::BackFua.case();
    case.warm(0, 4096);
    case.dirty(1, 4096, 4096);
    let write = case.write_bytes(0, &bytes(2, 0, 2 * 4096), true);
    case.finish_with(0, Err(Errno::EIO));
    assert_eq!(case.done(write), Err(Errno::EIO));
    assert!(!case.is_cached(0));
    assert_eq!(case.hit(4096, 4096), bytes(1, 4096, 4096));
    case.wait(DELAY);
    case.end();
    assert_eq!(case.stored(4096, 4096), bytes(1, 4096, 4096));
}

#[test]
fn a_failed_write_of_one_block_leaves_nothing_clean() {
    for result in [Err(Errno::ENOSPC), Ok(512)] {
        for (way, at_home) in ways() {
            if way == Way::Back {
                continue;
            }
            let mut case = way.case_at(at_home);
            if way != Way::None {
                case.warm(0, 2 * 4096);
            }
            way.prepare(&mut case);
            let write = case.write_bytes(4096, &bytes(1, 4096, 4096), way.fua());
            case.finish_with(case.op_at(4096), result);
            assert_eq!(case.done(write), Err(result.err().unwrap_or(Errno::EIO)), "{way:?}");
            assert!(!case.is_cached(1), "{way:?}");
            case.wait(DELAY);
            case.end();
        }
    }
}

/// A write that the shard cannot take directly leaves no trace, nor does its data.
#[test]
fn a_write_that_needs_a_reservation_is_not_written_at_once() {
    for way in WAYS {
        let mut case = way.case();
        way.prepare(&mut case);
        let declines = |case: &mut Case, offset: u64, len: usize| {
            let (from, ops) = (case.token(), case.ops());
            let held = case.shard.core.slots.held().count();
            let data = bytes(1, offset, len);
            assert_eq!(
                case.write_one(from, offset, &data, way.fua()),
                OneWrite::Declined,
                "{way:?}"
            );
            assert_eq!(case.ops(), ops, "{way:?}");
            assert_eq!(case.shard.core.slots.held().count(), held, "{way:?}");
        };
        declines(&mut case, 0, 2 * 4096);
        if way != Way::None {
            declines(&mut case, 0, 512);
            declines(&mut case, 512, 4096);
        }
        if way == Way::BackLimited {
            declines(&mut case, 0, 4096);
        }
        // Other jobs wait for memory: a direct write does not overtake them.
        let all = case.reserve(STRIPE_BYTES / 2, 16 * 4096);
        let waits = case.reserve(STRIPE_BYTES / 4, 32 * 4096);
        assert!(!case.is_answered(waits));
        declines(&mut case, 0, 4096);
        let (job, memory) = case.reserved(all);
        case.request(ShardRequest::Cancel { job, memory });
        case.wait(DELAY);
        case.finish_all();
        let (job, memory) = case.reserved(waits);
        declines(&mut case, 0, 4096);
        case.request(ShardRequest::Cancel { job, memory });
        case.end();
        let written = case.stored(0, 4096) != bytes(0, 0, 4096);
        assert!(!written, "{way:?}: what was declined is in the store");
    }
}

#[test]
fn a_write_at_once_waits_for_a_full_store() {
    for way in [Way::None, Way::Through, Way::ThroughFua, Way::BackFua] {
        let mut case = way.case_at(true);
        case.shard.store_mut().capacity = 1;
        let first = case.write_bytes(0, &bytes(1, 0, 4096), way.fua());
        let second = case.write_bytes(STRIPE_BYTES, &bytes(1, STRIPE_BYTES, 4096), way.fua());
        assert_eq!(case.ranges(), [(0, 4096)], "{way:?}");
        case.finish_all();
        for tag in [first, second] {
            assert_eq!(case.done(tag), Ok(()), "{way:?}");
        }
        assert_eq!(case.stored(STRIPE_BYTES, 4096), bytes(1, STRIPE_BYTES, 4096), "{way:?}");
        case.end();
    }
}

/// The state of a block before a part of it is written.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Before {
    Absent,
    Clean,
    Dirty,
    /// Dirty, with a running write-back.
    Writing,
    /// Clean when the write begins, evicted before it ends.
    Evicted,
}

/// Every way, every state of the block, ranges with one edge, two edges, and none.
#[test]
fn parts_of_blocks_are_written_in_every_cache_state() {
    use Before::{Absent, Clean, Dirty, Evicted, Writing};
    let ranges = [
        (4096 + 512, 512),
        (4096, 512),
        (2 * 4096 - 512, 512),
        (2 * 4096 - 512, 1024),
        (4096 + 512, 2 * 4096),
        (4096, 4096 + 512),
        (4096 + 3584, 512 + 4096),
        (4096, 4096),
    ];
    for (way, at_home) in ways() {
        for before in [Absent, Clean, Dirty, Writing, Evicted] {
            let writes_back = matches!(way, Way::Back | Way::BackFua | Way::BackLimited);
            if matches!(before, Dirty | Writing) && !writes_back {
                continue;
            }
            for (offset, len) in ranges {
                partial(way, at_home, before, offset, len);
            }
        }
    }
}

fn partial(way: Way, at_home: bool, before: Before, offset: u64, len: usize) {
    let name = format!("{way:?} of {offset}+{len} on {before:?}, at home: {at_home}");
    let mut case = way.case_at(at_home);
    let mut expected = bytes(0, 0, 4 * 4096);
    if way != Way::None {
        match before {
            Before::Absent => {}
            Before::Clean | Before::Evicted => case.warm(4096, 2 * 4096),
            Before::Dirty | Before::Writing => {
                case.dirty(1, 4096, 2 * 4096);
                expected[4096..3 * 4096].copy_from_slice(&bytes(1, 4096, 2 * 4096));
            }
        }
    }
    way.prepare(&mut case);
    if before == Before::Writing {
        case.wait(DELAY);
        assert!(case.ranges().contains(&(4096, 2 * 4096)), "{name}");
    }
    let data = bytes(2, offset, len);
    let write = case.write_bytes(offset, &data, way.fua());
    if before == Before::Evicted {
        // The write is at the store, or waits for it, or is done.
        let mut blocks = (0..64).map(|at| 2 * STRIPE_BYTES + at * BLOCK);
        while (case.is_cached(1) || case.is_cached(2))
            && let Some(at) = blocks.next()
        {
            let tag = case.read(at, 4096);
            let last = case.ops().len() - 1;
            case.finish(last);
            case.got(tag).unwrap();
        }
    }
    case.finish_all();
    assert_eq!(case.done(write), Ok(()), "{name}");
    let start = usize::try_from(offset).unwrap();
    expected[start..start + len].copy_from_slice(&data);
    assert!(case.read_all(0, 4 * 4096) == expected, "{name}: a read");
    let flush = case.flush();
    case.finish_all();
    assert_eq!(case.done(flush), Ok(()), "{name}");
    assert!(case.stored(0, 4 * 4096) == expected, "{name}: the store");
    assert!(case.read_all(0, 4 * 4096) == expected, "{name}: a read after a flush");
    assert_eq!(case.dirty_blocks(), 0, "{name}");
    case.end();
}

#[test]
fn a_cached_edge_may_leave_while_the_other_is_read() {
    let mut case = Way::Back.case();
    case.warm(4096, 4096);
    let write = case.write(1, 4096 + 512, 4096);
    assert_eq!(case.ranges(), [(2 * 4096, 4096)]);
    for at in 0..64 {
        let tag = case.read(2 * STRIPE_BYTES + at * BLOCK, 4096);
        let last = case.ops().len() - 1;
        case.finish(last);
        case.got(tag).unwrap();
    }
    assert!(!case.is_cached(1));
    case.finish(0);
    assert_eq!(case.done(write), Ok(()));
    let mut expected = bytes(0, 4096, 2 * 4096);
    expected[512..512 + 4096].copy_from_slice(&bytes(1, 4096 + 512, 4096));
    assert_eq!(case.hit(4096, 2 * 4096), expected);
    case.wait(DELAY);
    case.end();
}

#[test]
fn an_edge_that_is_written_while_it_is_read_is_newer() {
    let mut case = Way::Back.case();
    let part = case.write(1, 512, 512);
    assert_eq!(case.ranges(), [(0, 4096)]);
    case.dirty(2, 0, 4096);
    assert_eq!(case.hit(0, 4096), bytes(2, 0, 4096));
    case.finish(0);
    assert_eq!(case.done(part), Ok(()));
    let mut expected = bytes(2, 0, 4096);
    expected[512..1024].copy_from_slice(&bytes(1, 512, 512));
    assert_eq!(case.hit(0, 4096), expected);
    case.wait(DELAY);
    case.end();
    assert_eq!(case.stored(0, 4096), expected);
}

#[test]
fn an_edge_that_cannot_be_read_fails_the_write() {
    let mut case = Way::Back.case();
    let write = case.write(1, 3584, 4096 + 1024);
    assert_eq!(case.ranges(), [(0, 4096), (2 * 4096, 4096)]);
    case.finish(1);
    case.finish_with(0, Err(Errno::EIO));
    assert_eq!(case.done(write), Err(Errno::EIO));
    assert_eq!(case.dirty_blocks(), 0);
    assert_eq!(case.read_all(0, 4 * 4096), bytes(0, 0, 4 * 4096));
    case.end();
}

#[test]
fn a_write_without_room_for_dirty_blocks_goes_to_the_store() {
    let mut case = Way::Back.case();
    case.dirty(1, 0, 4 * 4096);
    let write = case.write(2, 8 * 4096, 4096);
    assert!(!case.is_answered(write));
    assert!(case.ranges().contains(&(8 * 4096, 4096)));
    assert_eq!(case.shard.counters().dirty_limited, 1);
    case.finish_all();
    assert_eq!(case.done(write), Ok(()));
    assert_eq!(case.hit(8 * 4096, 4096), bytes(2, 8 * 4096, 4096));
    case.end();
}

/// The bound always holds, even when many writes of parts of blocks read their edges at once.
#[test]
fn dirty_blocks_stay_within_their_bound() {
    let mut case = Way::Back.case();
    let writes: Vec<_> = (0..8).map(|at| case.write(1, at * 2 * 4096 + 512, 512)).collect();
    let mut most = 0;
    // Ends all reads first, before any write.
    while let Some(at) = case.ops().iter().position(|op| !op.changes()) {
        case.finish(at);
        most = most.max(case.dirty_blocks());
    }
    case.finish_all();
    assert!(most <= 4, "{most} dirty blocks, at most 4 were allowed");
    writes.into_iter().for_each(|tag| assert_eq!(case.done(tag), Ok(())));
    case.wait(DELAY);
    case.end();
    for at in 0..8 {
        assert_eq!(case.stored(at * 2 * 4096 + 512, 512), bytes(1, at * 2 * 4096 + 512, 512));
    }
}

/// Slots that were rewritten while the store reads them also count as memory: acknowledged writes
/// never take all memory.
#[test]
fn a_store_that_takes_no_writes_leaves_memory_to_others() {
    let slots = 32;
    let setup = Setup { slots, dirty_max: slots * SLOT_BYTES, ..Setup::new(CacheMode::WriteBack) };
    let mut case = setup.case();
    // Rewrites a few blocks, one after the other, as long as the writes are acknowledged; the
    // write-backs wait for the first.
    let mut writes = (0..64).map(|at| at % 8 * BLOCK);
    let waits = writes.find_map(|at| {
        let tag = case.write(2, at, 4096);
        if !case.is_answered(tag) {
            return Some(tag);
        }
        assert_eq!(case.done(tag), Ok(()));
        if at == 7 * BLOCK {
            case.wait(DELAY);
        }
        None
    });
    assert!(case.dirty_blocks() + case.shard.core.slots.outdated() <= slots / 2);
    let read = case.read(STRIPE_BYTES, 4 * 4096);
    case.wait(Duration::from_secs(1));
    case.finish(case.op_at(STRIPE_BYTES));
    assert_eq!(case.got(read), Ok(bytes(0, STRIPE_BYTES, 4 * 4096)));
    case.finish_all();
    if let Some(tag) = waits {
        assert_eq!(case.done(tag), Ok(()));
    }
    assert_eq!(case.hit(0, 8 * 4096), bytes(2, 0, 8 * 4096));
    case.wait(DELAY);
    case.end();
    assert_eq!(case.stored(0, 8 * 4096), bytes(2, 0, 8 * 4096));
}
