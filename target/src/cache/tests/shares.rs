//! Two volumes, and a store that ignores the ops of one: the other goes on.

use super::*;

/// The volume with the stuck store, which takes ops and ends none.
const STUCK: VolumeIndex = VOLUME;
const WELL: VolumeIndex = VolumeIndex(1);
const MODES: [CacheMode; 3] = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];

/// A shard of this many slots, half of which may be dirty, with these volumes.
fn shard(slots: usize, modes: &[CacheMode]) -> Case {
    let setup = Setup { slots, dirty_max: slots * SLOT_BYTES / 2, ..Setup::new(modes[0]) };
    let mut case = setup.case();
    for (index, mode) in (1u16..).zip(&modes[1..]) {
        case.shard.store_mut().add_volume(bytes(0, 0, usize::try_from(setup.size).unwrap()).0);
        case.shard.add_volume(VolumeIndex(index), *mode, setup.size, false, Arc::default());
    }
    case
}

impl Case {
    fn ask(&mut self, request: impl FnOnce(PartToken) -> ShardRequest) -> Tag {
        let from = self.token();
        self.request(request(from));
        from.tag
    }

    fn read_of(&mut self, volume: VolumeIndex, offset: u64, len: u32) -> Tag {
        self.ask(|from| ShardRequest::Read { from, volume, offset, len })
    }

    fn reserve_of(&mut self, volume: VolumeIndex, offset: u64, len: u32) -> Tag {
        self.ask(|from| ShardRequest::Reserve { from, volume, offset, len })
    }

    /// Ends all ops of the well volume, and those that follow from them, and none of the other
    /// volume.
    fn work(&mut self) {
        self.turn();
        while let Some(at) = self.shard.core.store.store().volumes().iter().position(|v| *v == WELL)
        {
            self.finish(at);
        }
    }

    /// Lets time pass while the store works for the well volume.
    fn idle(&mut self) {
        for _ in 0..4 {
            self.wait(DELAY);
            self.work();
        }
    }

    /// Reads, writes, flushes and discards of the well volume: one of each kind, answered.
    fn goes_on(&mut self, version: u8, what: &str) {
        let (at, len) = (u64::from(version) * 16 * BLOCK, 16 * 4096);
        let write = self.reserve_of(WELL, at, len);
        self.work();
        assert!(self.is_answered(write), "{what}: no memory for a write");
        let write = self.land(write, &bytes(version, at, len as usize), version.is_multiple_of(2));
        self.work();
        assert_eq!(self.done(write), Ok(()), "{what}");
        for _ in 0..2 {
            let read = self.read_of(WELL, at, len);
            self.work();
            assert!(self.is_answered(read), "{what}: a read does not end");
            assert_eq!(self.got(read), Ok(bytes(version, at, len as usize)), "{what}");
        }
        let cold = self.read_of(WELL, (2 << 20) + at, len);
        self.work();
        assert!(self.is_answered(cold), "{what}: a cold read does not end");
        assert_eq!(self.got(cold), Ok(bytes(0, (2 << 20) + at, len as usize)), "{what}");
        let flush = self.ask(|from| ShardRequest::Flush { from, volume: WELL });
        self.work();
        assert!(self.is_answered(flush), "{what}: a flush does not end");
        assert_eq!(self.done(flush), Ok(()), "{what}");
        let sync = self.ask(|from| ShardRequest::Sync { from, volume: WELL });
        self.work();
        assert!(self.is_answered(sync), "{what}: the store is not asked");
        assert_eq!(self.done(sync), Ok(()), "{what}");
        let kind = OpKind::WriteZeroes { offset: at + 512, len: 4096, may_unmap: true };
        let change =
            self.ask(|from| ShardRequest::Change { from, volume: WELL, kind, locked: false });
        self.work();
        assert!(self.is_answered(change), "{what}: a change does not end");
        assert_eq!(self.done(change), Ok(()), "{what}");
    }

    /// The store recovers: everything ends, and nothing is left.
    fn recovers(&mut self, reads: &[Tag], writes: &[Tag], what: &str) {
        let mut open: Vec<Tag> = writes.to_vec();
        for _ in 0..10_000 {
            let answered = |case: &Self, tag: &Tag| case.is_answered(*tag);
            // The memory of one read lets the next go on.
            for tag in reads {
                if answered(self, tag) {
                    self.got(*tag).unwrap();
                }
            }
            open.retain(|tag| {
                match self.replies.get(tag) {
                    Some(ShardReply::Reserved { .. }) => {
                        let (job, memory) = self.reserved(*tag);
                        self.request(ShardRequest::Cancel { job, memory });
                    }
                    Some(ShardReply::Done { .. }) => assert_eq!(self.done(*tag), Ok(()), "{what}"),
                    _ => return true,
                }
                false
            });
            if self.ops().is_empty() {
                self.wait(DELAY);
                if self.ops().is_empty() && self.shard.is_idle() && self.dirty_blocks() == 0 {
                    break;
                }
            } else {
                self.finish(0);
            }
        }
        assert!(open.is_empty(), "{what}: {open:?}");
        assert_eq!(
            (self.shard.memory.without_share(), self.shard.core.store.waiting()),
            (0, 0),
            "{what}"
        );
        assert!(
            self.shard.core.volumes.iter().all(|v| v.share.used() == 0 && v.ops.at_store == 0),
            "{what}"
        );
        self.end();
    }
}

/// A store has no place for more ops of the stuck volume, and some for those of the other.
#[test]
fn a_volume_that_the_store_refuses_keeps_no_other_from_it() {
    let mut case = shard(256, &[CacheMode::None; 2]);
    case.shard.store_mut().most_of_one = 1;
    let stuck: Vec<_> = (0..4).map(|at| case.read_of(STUCK, at * 16 * BLOCK, 4096)).collect();
    let well: Vec<_> = (0..4).map(|at| case.read_of(WELL, at * 16 * BLOCK, 4096)).collect();
    case.work();
    for tag in well {
        assert!(case.is_answered(tag), "a read waits behind those of the stuck volume");
        case.got(tag).unwrap();
    }
    case.recovers(&stuck, &[], "refused");
}

/// A busy poll group makes a turn in less than a microsecond.
#[test]
fn a_turn_without_news_of_the_store_asks_it_for_no_place() {
    let mut case = shard(256, &[CacheMode::None; 2]);
    case.shard.store_mut().most_of_one = 1;
    let stuck: Vec<_> = (0..4).map(|at| case.read_of(STUCK, at * 16 * BLOCK, 4096)).collect();
    case.turn();
    let refused = |case: &Case| case.shard.core.store.store().refused;
    let before = refused(&case);
    (0..100).for_each(|_| case.turn());
    assert_eq!(refused(&case), before, "it is full, and nothing has ended");
    case.finish(0);
    assert!(refused(&case) > before, "a place is free");
    case.recovers(&stuck, &[], "refused");
}

/// One place at the store becomes free at a time, and three volumes with many ops want it.
#[test]
fn a_volume_that_the_store_refuses_gives_no_other_an_advantage() {
    let mut case = shard(1024, &[CacheMode::None; 4]);
    (case.shard.store_mut().capacity, case.shard.store_mut().most_of_one) = (8, 4);
    let stuck: Vec<_> = (0..8).map(|at| case.read_of(STUCK, at * 16 * BLOCK, 4096)).collect();
    let well: Vec<Vec<Tag>> = (1..4)
        .map(VolumeIndex)
        .map(|volume| (0..60).map(|at| case.read_of(volume, at * BLOCK, 4096)).collect())
        .collect();
    case.turn();
    for _ in 0..60 {
        let volumes = case.shard.core.store.store().volumes();
        let at = volumes.iter().position(|volume| *volume != STUCK).expect("an op of the others");
        case.finish(at);
    }
    let count = |tags: &Vec<Tag>| tags.iter().filter(|tag| case.is_answered(**tag)).count();
    let answered: Vec<usize> = well.iter().map(count).collect();
    let (least, most) = (answered.iter().min().unwrap(), answered.iter().max().unwrap());
    assert!(least * 2 > *most, "answered of each volume: {answered:?}");
    case.recovers(&[stuck, well.concat()].concat(), &[], "refused");
}

/// More requests to the stuck volume than memory allows.
#[test]
fn a_stuck_store_has_half_of_the_memory() {
    for stuck in MODES {
        for well in MODES {
            let what = format!("{stuck:?} is stuck, {well:?} is not");
            let mut case = shard(256, &[stuck, well]);
            let reads: Vec<_> =
                (0..40).map(|at| case.read_of(STUCK, at * 16 * BLOCK, 16 * 4096)).collect();
            let writes: Vec<_> = (0..40)
                .map(|at| case.reserve_of(STUCK, (2 << 20) + at * 4 * BLOCK, 4 * 4096))
                .collect();
            case.turn();
            assert!(case.shard.memory.without_share() > 0, "{what}");
            for version in 1..8 {
                case.goes_on(version, &what);
                case.idle();
            }
            case.recovers(&reads, &writes, &what);
        }
    }
}

/// A write-back volume has dirty blocks on top of its jobs: both together leave room.
#[test]
fn dirty_blocks_and_waiting_jobs_leave_memory_to_others() {
    for well in MODES {
        let what = format!("{well:?}");
        let mut case = shard(256, &[CacheMode::WriteBack, well]);
        let (mut writes, mut at) = (Vec::new(), 0);
        // As many writes as are acknowledged from memory, then as many as wait. Their lengths fill
        // both parts.
        for _ in 0..16 {
            let tag = case.reserve_of(STUCK, at, 62 * 4096);
            if case.is_answered(tag) {
                case.land(tag, &bytes(1, at, 62 * 4096), false);
            }
            at += 62 * BLOCK;
            if case.is_answered(tag) {
                assert_eq!(case.done(tag), Ok(()));
            } else {
                writes.push(tag);
            }
            case.turn();
        }
        assert!(case.dirty_blocks() > 64, "{what}: {} are dirty", case.dirty_blocks());
        assert!(!writes.is_empty());
        case.idle();
        for version in 1..8 {
            case.goes_on(version, &what);
            case.idle();
        }
        case.recovers(&[], &writes, &what);
    }
}

/// Small requests use up operations, not memory. The store takes 1024, like a ring.
#[test]
fn a_stuck_store_has_half_of_the_operations() {
    for (at, stuck) in MODES.into_iter().enumerate() {
        for well in [MODES[(at + 1) % 3]] {
            let what = format!("{stuck:?} is stuck, {well:?} is not");
            let mut case = shard(4096, &[stuck, well]);
            case.shard.store_mut().capacity = 1024;
            // Every second block, so that no two are neighbours.
            let reads: Vec<_> =
                (0..300).map(|at| case.read_of(STUCK, at * 2 * BLOCK, 4096)).collect();
            let changes: Vec<_> = (0..600)
                .map(|at| {
                    let (offset, len) = (at * 512 + (3 << 20), 512);
                    let kind = OpKind::Discard { offset, len };
                    let volume = STUCK;
                    case.ask(|from| ShardRequest::Change { from, volume, kind, locked: false })
                })
                .collect();
            // Ops of a cache that share a block wait for each other; these do not.
            let syncs: Vec<_> = (0..600)
                .map(|_| case.ask(|from| ShardRequest::Sync { from, volume: STUCK }))
                .collect();
            case.turn();
            let of_stuck = |case: &Case| {
                case.shard.core.store.store().volumes().iter().filter(|v| **v == STUCK).count()
            };
            assert_eq!(of_stuck(&case), 512, "{what}");
            assert!(case.shard.core.store.waiting() > 0, "{what}");
            for version in 1..8 {
                case.goes_on(version, &what);
                assert_eq!(of_stuck(&case), 512, "{what}");
            }
            let all: Vec<_> = changes.into_iter().chain(syncs).collect();
            case.recovers(&reads, &all, &what);
        }
    }
}

/// Jobs that waited for their share, or for the store, continue in order of arrival.
#[test]
fn waiting_jobs_continue_in_order() {
    let mut case = shard(64, &[CacheMode::None, CacheMode::None]);
    let tags: Vec<_> = (0..40).map(|at| case.read_of(STUCK, at * 8 * BLOCK, 8 * 4096)).collect();
    case.goes_on(1, "order");
    assert_eq!(case.shard.memory.without_share(), 36, "half of 64 slots are four of eight");
    let mut order = Vec::new();
    let mut seen = Vec::new();
    while order.len() < tags.len() {
        let offsets = case.ranges();
        let new: Vec<_> = offsets.iter().filter(|range| !seen.contains(*range)).copied().collect();
        assert!(new.is_sorted(), "{new:?}");
        seen.extend(new);
        case.finish(0);
        let ready: Vec<_> = tags.iter().filter(|tag| case.is_answered(**tag)).copied().collect();
        for tag in ready {
            case.got(tag).unwrap();
            order.push(tag);
        }
    }
    assert_eq!(order, tags);
    assert!(seen.is_sorted(), "{seen:?}");
    // Waiting operations, too.
    let syncs: Vec<_> =
        (0..600).map(|_| case.ask(|from| ShardRequest::Sync { from, volume: STUCK })).collect();
    let last = case.read_of(STUCK, 0, 4096);
    assert_eq!(case.ops().len(), 512);
    assert!(!case.ops().contains(&OpKind::Read { offset: 0, len: 4096 }));
    let mut order = Vec::new();
    while !case.ops().is_empty() {
        case.finish(0);
        order.extend(syncs.iter().filter(|tag| case.replies.remove(tag).is_some()).copied());
    }
    assert_eq!(order, syncs);
    case.got(last).unwrap();
    case.end();
}

/// A volume alone may use all memory and all operations.
#[test]
fn a_volume_alone_has_no_share() {
    for mode in MODES {
        let mut case = shard(64, &[mode]);
        let tags: Vec<_> = (0..8).map(|at| case.read_of(STUCK, at * 8 * BLOCK, 8 * 4096)).collect();
        assert_eq!(case.shard.core.store.store().volumes().len(), 8, "{mode:?}");
        assert_eq!(
            (case.shard.memory.without_share(), case.shard.counters().memory_waits),
            (0, 0),
            "{mode:?}"
        );
        case.recovers(&tags, &[], "alone");
        let mut case = shard(64, &[mode]);
        let syncs: Vec<_> =
            (0..900).map(|_| case.ask(|from| ShardRequest::Sync { from, volume: STUCK })).collect();
        assert_eq!(case.ops().len(), 900, "{mode:?}");
        case.recovers(&[], &syncs, "alone");
    }
}

/// A request that is longer than the share is served alone.
#[test]
fn a_request_longer_than_the_share_goes_alone() {
    for mode in MODES {
        let mut case = shard(64, &[mode, mode]);
        let tags: Vec<_> =
            (0..3).map(|at| case.read_of(STUCK, at * 40 * BLOCK, 40 * 4096)).collect();
        assert_eq!(case.shard.memory.without_share(), 2, "{mode:?}");
        case.recovers(&tags, &[], &format!("{mode:?}"));
    }
}

#[test]
fn writes_at_once_stay_within_the_share() {
    for mode in [CacheMode::None, CacheMode::WriteThrough] {
        let mut case = shard(64, &[mode, CacheMode::WriteThrough]);
        let mut taken = Vec::new();
        for at in (0..64).map(|block| block * BLOCK) {
            let from = case.token();
            if case.write_one(from, at, &bytes(1, at, 4096), false) == OneWrite::AtStore {
                taken.push(from.tag);
            }
        }
        assert_eq!(taken.len(), 32, "{mode:?}");
        case.goes_on(1, "beside writes at once");
        case.finish_all();
        taken.into_iter().for_each(|tag| assert_eq!(case.done(tag), Ok(())));
        assert_eq!(case.stored(0, 32 * 4096), bytes(1, 0, 32 * 4096), "{mode:?}");
        case.end();
    }
}
