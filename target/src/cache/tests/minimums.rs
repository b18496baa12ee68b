//! The cache that a volume keeps when others need memory.

use std::sync::Arc;

use rblk_fabric::{PageKind, Region};

use super::super::policy::Slot;
use super::super::slots::{Install, SlotState, Slots};
use super::*;
use crate::memory::arena::Arena;

/// More slots than one search for a victim looks at.
const SLOTS: usize = 600;
const VOLUMES: u16 = 3;
const OTHER: VolumeIndex = VolumeIndex(1);

fn all(slots: &Slots, is: impl Fn(SlotState, u16) -> bool) -> Vec<Slot> {
    let all = (0..u32::try_from(SLOTS).unwrap()).map(Slot);
    let holds = |slot: &Slot| {
        let holders = slots.holders(*slot);
        is(holders.state, holders.block.0.0)
    };
    all.filter(holds).collect()
}

/// Number of clean slots that volumes have above their minimums.
fn spare(slots: &Slots) -> usize {
    let of = |volume: u16| {
        let clean = all(slots, |state, of| state == SlotState::Clean && of == volume).len();
        clean.saturating_sub(slots.min(VolumeIndex(volume)) as usize)
    };
    (0..VOLUMES).map(of).sum()
}

/// Memory is found exactly while a volume is above its minimum, however many slots of others are
/// aside, and no volume falls below its minimum for another.
fn finds_what_may_leave(seed: u64) {
    let region = Region::allocate(SLOTS * SLOT_BYTES, PageKind::Normal).unwrap();
    let mut slots = Slots::new(Arena::new(region, 16 << 10).unwrap(), seed);
    (0..VOLUMES).for_each(|volume| slots.add_volume(VolumeIndex(volume)));
    let (mut random, mut order, mut refused, mut found) = (Rng(seed), 0, 0, 0);
    for step in 0..30_000 {
        let volume = VolumeIndex(u16::try_from(random.below(VOLUMES.into())).unwrap());
        match random.below(40) {
            0 => slots.set_min(volume, u32::try_from(random.below(SLOTS / 2)).unwrap()),
            1..6 => {
                if let Some(slot) = slots.oldest_dirty(volume) {
                    slots.begin_writing(slot);
                    slots.written(slot);
                }
            }
            6..9 => {
                let cached = all(&slots, |state, of| state == SlotState::Clean && of == volume.0);
                if !cached.is_empty() {
                    let slot = cached[random.below(cached.len())];
                    slots.touch(slot);
                    slots.lend(slot);
                    slots.unlend(slot);
                }
            }
            9 => {
                let first = random.below(SLOTS) as u64;
                slots.for_each_in(volume, first, first + 3, |slots, slot| slots.forget(slot));
            }
            _ => {
                let free = all(&slots, |state, _| state == SlotState::Free).len();
                let spare = spare(&slots);
                let slot = slots.allocate_one();
                let what = format!("seed {seed}, step {step}: {free} are free, {spare} may leave");
                assert_eq!(slot.is_some(), free + spare > 0, "{what}");
                (refused, found) = match free {
                    0 => (refused + usize::from(spare == 0), found + usize::from(spare > 0)),
                    _ => (refused, found),
                };
                let Some(slot) = slot else { continue };
                order += 1;
                // Some blocks are written again and again, and others are new.
                let blocks = [40, SLOTS][random.below(2)];
                let block = random.below(blocks) as u64;
                let how = match random.below(3) {
                    0 if slots.dirty() < SLOTS / 2 => Install::Dirty { order, now_ms: step },
                    _ => Install::Clean,
                };
                slots.install(slot, volume, block, how);
            }
        }
    }
    assert!(refused > 20 && found > 2000, "seed {seed}: {refused} refused, {found} found");
}

#[test]
fn a_search_finds_a_slot_of_a_volume_above_its_minimum() {
    (1..4).for_each(finds_what_may_leave);
}

/// The first search for a victim after a volume reached its minimum, and the first after many of
/// its slots were lent, take many short calls: no other request waits for the whole search.
#[test]
fn one_call_looks_at_few_slots() {
    const SLOTS: u32 = 10_000;
    const MOST: u32 = 4096;
    let region = Region::allocate(SLOTS as usize * SLOT_BYTES, PageKind::Normal).unwrap();
    let mut slots = Slots::new(Arena::new(region, 16 << 10).unwrap(), 7);
    [VOLUME, OTHER].iter().for_each(|volume| slots.add_volume(*volume));
    slots.set_min(VOLUME, SLOTS - 1);
    let kept: Vec<Slot> = (0..u64::from(SLOTS) - 1)
        .map(|block| {
            let slot = slots.allocate_one().unwrap();
            slots.install(slot, VOLUME, block, Install::Clean);
            slot
        })
        .collect();
    let last = slots.allocate_one().unwrap();
    slots.install(last, OTHER, 0, Install::Clean);
    let search = |slots: &mut Slots| {
        let mut calls = 0;
        loop {
            let before = slots.aside();
            calls += 1;
            let found = slots.allocate_one();
            let looks = slots.aside() - before;
            assert!(looks <= MOST, "call {calls} looked at {looks} slots");
            match found {
                Some(slot) => return (calls, slot),
                None => assert!(slots.is_cut(), "call {calls} gave up"),
            }
        }
    };
    let (calls, found) = search(&mut slots);
    assert!((3..10).contains(&calls), "{calls} calls");
    assert_eq!(found, last);
    assert!(slots.allocate_one().is_none() && !slots.is_cut(), "nothing may leave");
    // Each kept slot is lent and comes back: the search does not look at it again.
    for slot in kept {
        slots.touch(slot);
        slots.lend(slot);
        slots.unlend(slot);
    }
    assert_eq!(slots.aside(), SLOTS - 1);
    slots.install(found, OTHER, 0, Install::Clean);
    assert_eq!(search(&mut slots), (1, found));
    // After a lower minimum, the slots above it are found, a few in each call.
    slots.set_min(VOLUME, SLOTS - 101);
    for left in (0..100).rev() {
        assert!(slots.allocate_one().is_some(), "{left} more may leave");
    }
    assert!(slots.allocate_one().is_none());
}

/// A request that finds no memory in one call gets it some turns later, although no slot was freed
/// and no time passed.
#[test]
fn a_request_waits_some_turns_for_a_long_search() {
    let mut case = two_over(10_240);
    // All but a few of the slots; the first belong to the volume.
    case.shard.set_cache_min(VOLUME, 5000);
    for volume in [VOLUME, OTHER] {
        for block in 0..5000 {
            let slot = case.shard.core.slots.allocate_one().unwrap();
            case.shard.core.slots.install(slot, volume, block, Install::Clean);
        }
    }
    let mut out = Vec::new();
    assert!(case.shard.core.slots.allocate(240, &mut out), "the rest");
    let read = case.read(6000 * BLOCK, 4096);
    assert!(!case.is_answered(read) && case.shard.is_short(), "it waits for memory");
    assert!(case.ops().is_empty());
    let mut turns = 0;
    while case.ops().is_empty() {
        let busy = case.turn_shard();
        turns += 1;
        assert!(turns < 10 && (busy || !case.ops().is_empty()), "turn {turns}: {busy}");
    }
    case.finish_all();
    case.got(read).unwrap();
    out.into_iter().for_each(|slot| case.shard.core.slots.give_back(slot));
    case.end();
}

/// Two cached volumes of 4 MiB over 256 slots.
fn two() -> Case {
    two_over(256)
}

/// Two cached volumes over this many slots.
fn two_over(slots: usize) -> Case {
    let setup = Setup::new(CacheMode::WriteThrough);
    let size = setup.size * (slots as u64).div_ceil(1024);
    let setup = Setup { slots, size, ..setup };
    let mut case = setup.case();
    case.shard.store_mut().add_volume(bytes(0, 0, usize::try_from(setup.size).unwrap()).0);
    case.shard.add_volume(OTHER, CacheMode::WriteThrough, setup.size, false, Arc::default());
    case
}

/// Reads every block of the other volume.
fn scan(case: &mut Case) {
    for block in 0..1024 {
        let from = case.token();
        let offset = block * BLOCK;
        case.request(ShardRequest::Read { from, volume: OTHER, offset, len: 4096 });
        case.finish_all();
        case.got(from.tag).unwrap();
    }
}

#[test]
fn a_scan_of_another_volume_leaves_the_minimum() {
    let mut case = two();
    case.shard.set_cache_min(VOLUME, 100);
    case.warm(0, 120 * 4096);
    scan(&mut case);
    scan(&mut case);
    let kept = (0..120).filter(|block| case.is_cached(*block)).count();
    assert_eq!(kept, 100);
    assert!(case.shard.slots().counts(OTHER).cached > 100, "the rest is for the other volume");
    // Without a minimum, the volume's blocks leave like all others.
    case.shard.set_cache_min(VOLUME, 0);
    scan(&mut case);
    scan(&mut case);
    assert_eq!((0..120).filter(|block| case.is_cached(*block)).count(), 0);
    case.end();
}

#[test]
fn a_volume_at_its_minimum_reads_on() {
    let mut case = two();
    case.shard.set_cache_min(VOLUME, 60);
    case.shard.set_cache_min(OTHER, 60);
    for block in 0..1024 {
        assert_eq!(case.read_all(block * BLOCK, 4096), bytes(0, block * BLOCK, 4096));
    }
    scan(&mut case);
    assert_eq!(case.shard.slots().counts(VOLUME).cached, 60);
    for block in 0..1024 {
        assert_eq!(case.read_all(block * BLOCK, 4096), bytes(0, block * BLOCK, 4096));
    }
    assert_eq!(case.shard.slots().counts(OTHER).cached, 60);
    case.end();
}

#[test]
fn minimums_leave_half_of_the_memory_that_is_never_dirty() {
    let mut case = two();
    case.shard.set_cache_min(VOLUME, 1000);
    let mins = |case: &Case| [VOLUME, OTHER].map(|volume| case.shard.slots().min(volume));
    assert_eq!(mins(&case), [128, 0]);
    case.shard.set_cache_min(OTHER, 3000);
    assert_eq!(mins(&case), [32, 96]);
    // 64 may be dirty.
    case.shard.reshape_volume(OTHER, CacheMode::WriteBack, 4 << 20);
    assert_eq!(mins(&case), [24, 72]);
    case.shard.reshape_volume(OTHER, CacheMode::None, 4 << 20);
    assert_eq!(mins(&case), [128, 0]);
    case.shard.remove_volume(VOLUME).unwrap();
    assert_eq!(mins(&case), [0, 0]);
}
