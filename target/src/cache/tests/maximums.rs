//! The most cache that a volume may have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rblk_fabric::{PageKind, Region};

use super::super::policy::Slot;
use super::super::slots::{Install, SlotState, Slots};
use super::*;
use crate::memory::arena::Arena;

const OTHER: VolumeIndex = VolumeIndex(1);

/// A plain model: which slot has which block, and which blocks the store does not have.
struct Model {
    slots: Slots,
    index: BTreeMap<(u16, u64), Slot>,
    dirty: BTreeSet<(u16, u64)>,
    writing: Vec<(Slot, (u16, u64))>,
    lent: Vec<Slot>,
}

impl Model {
    const SLOTS: usize = 200;
    const BLOCKS: usize = 150;

    fn new(seed: u64) -> Self {
        let region = Region::allocate(Self::SLOTS * SLOT_BYTES, PageKind::Normal).unwrap();
        let mut slots = Slots::new(Arena::new(region, 16 << 10).unwrap(), seed);
        [VOLUME, OTHER].iter().for_each(|volume| slots.add_volume(*volume));
        let (index, dirty) = (BTreeMap::new(), BTreeSet::new());
        Self { slots, index, dirty, writing: Vec::new(), lent: Vec::new() }
    }

    /// The cache need not keep a block that the store has. Its older slot is outdated in any case.
    fn enter(&mut self, slot: Slot, at: (u16, u64), dirty: bool) {
        self.index.insert(at, slot);
        if self.slots.find(VolumeIndex(at.0), at.1).is_none() {
            assert!(!dirty && self.slots.state(slot) == SlotState::Free, "{at:?} was not kept");
            self.index.remove(&at);
        }
        if dirty {
            self.dirty.insert(at)
        } else {
            self.dirty.remove(&at)
        };
    }

    /// Takes a slot for a block, as reads, writes and their jobs do.
    fn put(&mut self, random: &mut Rng, at: (u16, u64), order: u64) {
        let Some(slot) = self.slots.allocate_one() else { return };
        let (volume, block) = (VolumeIndex(at.0), at.1);
        match random.below(4) {
            0 | 1 if self.slots.dirty() < Self::SLOTS / 2 => {
                if !self.slots.may_be_dirty(volume, 1) {
                    return self.slots.give_back(slot);
                }
                let how = Install::Dirty { order, now_ms: 0 };
                self.slots.install(slot, volume, block, how);
                self.enter(slot, at, true);
            }
            2 => {
                if !self.slots.has_place(volume, block) {
                    return self.slots.give_back(slot);
                }
                self.slots.install(slot, volume, block, Install::Clean);
                self.enter(slot, at, false);
            }
            _ => {
                self.slots.install_clean(slot, volume, block);
                self.enter(slot, at, false);
            }
        }
    }

    fn begin_write_back(&mut self, volume: u16) {
        let Some(slot) = self.slots.oldest_dirty(VolumeIndex(volume)) else { return };
        self.writing.push((slot, (volume, self.slots.block(slot))));
        self.slots.begin_writing(slot);
    }

    fn end_write_back(&mut self, which: usize, done: bool) {
        let (slot, at) = self.writing.swap_remove(which);
        let current = self.index.get(&at) == Some(&slot);
        if done {
            self.slots.written(slot);
            if current {
                self.dirty.remove(&at);
            }
        } else {
            self.slots.not_written(slot, false);
        }
    }

    fn lend(&mut self, random: &mut Rng) {
        let all: Vec<((u16, u64), Slot)> =
            self.index.iter().map(|(at, slot)| (*at, *slot)).collect();
        if all.is_empty() {
            return;
        }
        let ((volume, block), slot) = all[random.below(all.len())];
        // The slot may have left.
        if self.slots.find(VolumeIndex(volume), block) == Some(slot) {
            self.slots.touch(slot);
            self.slots.lend(slot);
            self.lent.push(slot);
        }
    }

    fn forget(&mut self, volume: u16, first: u64) {
        self.slots
            .for_each_in(VolumeIndex(volume), first, first + 3, |slots, slot| slots.forget(slot));
        for block in first..=first + 3 {
            self.index.remove(&(volume, block));
            self.dirty.remove(&(volume, block));
        }
    }

    /// No block has data of an older slot, no dirty block is lost, counts are right, and no volume
    /// has more than its maximum. Returns whether a volume is at its maximum.
    fn check(&mut self, what: &str) -> bool {
        let slots = &self.slots;
        self.index.retain(|(volume, block), slot| {
            let found = slots.find(VolumeIndex(*volume), *block);
            assert!(found.is_none_or(|found| found == *slot), "{what}: an older slot of {block}");
            found.is_some()
        });
        for at in &self.dirty {
            let slot = self.index.get(at);
            let is_dirty = slot.is_some_and(|slot| slots.state(*slot).is_dirty());
            let holders = slot.map(|slot| slots.holders(*slot));
            assert!(is_dirty, "{what}: block {at:?} was lost: {holders:?}");
        }
        let mut is_full = false;
        for volume in [VOLUME, OTHER] {
            let counts = slots.counts(volume);
            let of = |is: fn(SlotState) -> bool| {
                let mine = self.index.iter().filter(|((of, _), _)| *of == volume.0);
                mine.filter(|(_, slot)| is(slots.state(**slot))).count()
            };
            let (all, dirty) = (of(SlotState::is_in_index), of(SlotState::is_dirty));
            assert_eq!((counts.cached as usize, counts.dirty as usize), (all, dirty), "{what}");
            let Some(max) = slots.max(volume).map(|max| max as usize) else { continue };
            // Dirty blocks stay, and blocks from before the maximum leave a few at a time.
            let has = format!("{what}: volume {} has {all} of {max}, {dirty} dirty", volume.0);
            assert!(all <= max.max(dirty) || slots.is_trim_due(), "{has}");
            is_full |= all == max;
        }
        is_full
    }

    /// Returns all held slots; then all memory can be allocated.
    fn end(mut self, what: &str) {
        while let Some(slot) = self.lent.pop() {
            self.slots.unlend(slot);
        }
        while !self.writing.is_empty() {
            self.end_write_back(0, true);
        }
        for volume in [0, 1] {
            while self.slots.oldest_dirty(VolumeIndex(volume)).is_some() {
                self.begin_write_back(volume);
                self.end_write_back(0, true);
            }
        }
        let mut turns = 0;
        [VOLUME, OTHER].iter().for_each(|volume| self.slots.set_min(*volume, 0));
        while self.slots.is_trim_due() {
            self.slots.trim();
            turns += 1;
            assert!(turns < 10, "{what}: no end of it");
        }
        self.check(what);
        let mut all = Vec::new();
        assert!(self.slots.allocate(Self::SLOTS, &mut all), "{what}: memory was lost");
        assert_eq!(self.slots.cached(), 0);
    }
}

fn stays_within_its_maximum(seed: u64) {
    let (mut model, mut random) = (Model::new(seed), Rng(seed));
    let (mut full, mut refused) = (0, 0);
    for step in 0..20_000u64 {
        let what = format!("seed {seed}, step {step}");
        let volume = u16::try_from(random.below(2)).unwrap();
        match random.below(60) {
            0 => {
                let most = u32::try_from(1 + random.below(Model::SLOTS)).unwrap();
                let most = (random.below(4) > 0).then_some(most);
                model.slots.set_max(VolumeIndex(volume), most);
            }
            1 => {
                let min = u32::try_from(random.below(Model::SLOTS / 4)).unwrap();
                model.slots.set_min(VolumeIndex(volume), min);
            }
            2..6 => model.slots.trim(),
            6..14 => model.begin_write_back(volume),
            14..22 if !model.writing.is_empty() => {
                let which = random.below(model.writing.len());
                model.end_write_back(which, random.below(5) > 0);
            }
            22..28 => model.lend(&mut random),
            28..34 if !model.lent.is_empty() => {
                let slot = model.lent.swap_remove(random.below(model.lent.len()));
                model.slots.unlend(slot);
            }
            34 => model.forget(volume, random.below(Model::BLOCKS) as u64),
            _ => {
                let at = (volume, random.below(Model::BLOCKS) as u64);
                model.put(&mut random, at, step);
                refused += u32::from(!model.slots.may_be_dirty(VolumeIndex(volume), 1));
            }
        }
        full += u32::from(model.check(&what));
    }
    assert!(full > 2000 && refused > 100, "seed {seed}: {full} times full, {refused} refused");
    model.end(&format!("seed {seed}, the end"));
}

#[test]
fn a_volume_stays_within_its_maximum() {
    (1..5).for_each(stays_within_its_maximum);
}

fn cached(case: &Case) -> u32 {
    case.shard.slots().counts(VOLUME).cached
}

#[test]
fn a_volume_reads_on_at_its_maximum() {
    let mut case = Setup::new(CacheMode::WriteThrough).case();
    case.shard.set_cache_max(VOLUME, Some(40));
    case.warm(0, 4096);
    for block in 1..1024 {
        assert_eq!(case.read_all(block * BLOCK, 4096), bytes(0, block * BLOCK, 4096));
        assert_eq!(u64::from(cached(&case)), (block + 1).min(40));
        // A used block stays.
        assert_eq!(case.hit(0, 4096), bytes(0, 0, 4096));
    }
    // One read of more blocks than the maximum.
    assert_eq!(case.read_all(BLOCK, 100 * 4096), bytes(0, BLOCK, 100 * 4096));
    assert_eq!(cached(&case), 40);
    // Read-ahead does not push out the volume's blocks either.
    let before = case.shard.counters().prefetched;
    case.prefetch(400 * BLOCK, 21 * 4096);
    assert_eq!((case.shard.counters().prefetched, case.ops()), (before, vec![]));
    case.prefetch(400 * BLOCK, 20 * 4096);
    assert_eq!(case.shard.counters().prefetched, before + 20);
    case.end();
}

#[test]
fn a_lent_slot_can_leave_and_is_free_when_it_comes_back() {
    let mut case = Setup::new(CacheMode::WriteThrough).case();
    case.shard.set_cache_max(VOLUME, Some(4));
    let tags: Vec<Tag> = (0..9).map(|at| case.read(at * BLOCK, 4096)).collect();
    case.finish_all();
    assert_eq!(cached(&case), 4);
    for (at, tag) in (0..).zip(tags) {
        assert_eq!(case.got(tag).unwrap(), bytes(0, at * BLOCK, 4096));
    }
    assert_eq!(cached(&case), 4);
    case.end();
}

/// Writes of one block each; the last ones find no place for dirty blocks.
#[test]
fn a_volume_full_of_dirty_blocks_writes_to_its_store() {
    for at_home in [false, true] {
        let mut case = Setup::new(CacheMode::WriteBack).case();
        case.at_home = at_home;
        case.shard.set_cache_max(VOLUME, Some(20));
        (0..20).for_each(|block| case.dirty(1, block * 2 * BLOCK, 4096));
        let last = case.write(1, 500 * BLOCK, 4096);
        assert_eq!(case.ranges(), [(500 * BLOCK, 4096)], "to the store, not to memory");
        let read = case.read(600 * BLOCK, 4096);
        case.finish(case.op_at(600 * BLOCK));
        assert_eq!(case.got(read).unwrap(), bytes(0, 600 * BLOCK, 4096));
        assert!(!case.is_cached(600), "served, and not kept");
        assert_eq!((cached(&case), case.dirty_blocks()), (20, 20));
        // More than half of the maximum is dirty: the blocks are written without delay.
        assert!(case.ranges().len() > 10, "{:?}", case.ranges());
        case.finish_all();
        assert_eq!(case.done(last), Ok(()));
        let flush = case.flush();
        case.finish_all();
        assert_eq!(case.done(flush), Ok(()));
        assert_eq!(case.dirty_blocks(), 0);
        for block in (0..20).map(|block| block * 2).chain([500]) {
            assert_eq!(case.stored(block * BLOCK, 4096), bytes(1, block * BLOCK, 4096));
        }
        // There is room again.
        case.dirty(2, 0, 4096);
        assert!(cached(&case) <= 20);
        case.end();
    }
}

#[test]
fn a_write_of_parts_of_blocks_keeps_to_the_maximum() {
    let mut case = Setup::new(CacheMode::WriteBack).case();
    case.shard.set_cache_max(VOLUME, Some(2));
    // Each write reads its edges first; three at a time would exceed the maximum.
    let tags = [0, 10, 20].map(|block| case.write(3, block * BLOCK + 512, 512));
    case.finish_all();
    case.wait(DELAY);
    case.finish_all();
    for (block, tag) in [0, 10, 20].into_iter().zip(tags) {
        assert_eq!(case.done(tag), Ok(()));
        assert_eq!(case.stored(block * BLOCK + 512, 512), bytes(3, block * BLOCK + 512, 512));
    }
    assert!(cached(&case) <= 2, "{}", cached(&case));
    case.end();
}

#[test]
fn a_lower_maximum_is_reached_bit_by_bit() {
    let setup = Setup { slots: 8192, size: 32 << 20, ..Setup::new(CacheMode::WriteThrough) };
    let mut case = setup.case();
    for at in 0..24 {
        case.warm(at << 20, 1 << 20);
    }
    let had = cached(&case);
    assert_eq!(had, 24 * 256);
    case.shard.set_cache_max(VOLUME, Some(100));
    let (mut turns, mut before) = (0, had);
    while case.turn_shard() {
        turns += 1;
        assert!(before - cached(&case) <= 256 && turns < 100, "turn {turns}");
        before = cached(&case);
    }
    assert!(turns > 10, "{turns} turns");
    assert_eq!(cached(&case), 100);
    assert!(!case.turn_shard(), "nothing is left to do");
    // A volume that is added later has no maximum, and neither has an uncached one.
    case.shard.reshape_volume(VOLUME, CacheMode::None, 4 << 20);
    assert_eq!(case.shard.slots().max(VOLUME), None);
    case.shard.reshape_volume(VOLUME, CacheMode::WriteThrough, 4 << 20);
    assert_eq!(case.shard.slots().max(VOLUME), Some(100));
    case.shard.remove_volume(VOLUME).unwrap();
    assert_eq!(case.shard.slots().max(VOLUME), None);
    case.shard.add_volume(VOLUME, CacheMode::WriteThrough, 4 << 20, false, Arc::default());
    assert_eq!(case.shard.slots().max(VOLUME), None);
}

/// More blocks are dirty than a lower maximum allows: they are written, and then leave.
#[test]
fn dirty_blocks_above_a_lower_maximum_are_written_first() {
    let mut case = Setup::new(CacheMode::WriteBack).case();
    (0..30).for_each(|block| case.dirty(1, block * 2 * BLOCK, 4096));
    case.shard.set_cache_max(VOLUME, Some(5));
    case.turn();
    assert_eq!(cached(&case), 30, "no dirty block is dropped");
    assert!(!case.ops().is_empty(), "they are written without delay");
    case.finish_all();
    case.wait(DELAY);
    case.finish_all();
    assert_eq!((cached(&case), case.dirty_blocks()), (5, 0));
    for block in 0..30 {
        assert_eq!(case.stored(block * 2 * BLOCK, 4096), bytes(1, block * 2 * BLOCK, 4096));
    }
    case.end();
}
