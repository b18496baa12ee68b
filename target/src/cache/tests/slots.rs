//! [`Slots`] against a model that is plainly right.

use std::collections::BTreeMap;

use rblk_fabric::{PageKind, Region};

use super::super::SLOT_BYTES;
use super::super::policy::Slot;
use super::super::slots::{Install, SlotState, Slots};
use super::Rng;
use crate::memory::arena::Arena;
use crate::store::Segment;
use crate::volume::ids::VolumeIndex;

const SLOTS: usize = 64;
const VOLUMES: u16 = 2;
const BLOCKS: u64 = 40;
/// Slots of a chunk: the largest extents of the arena are as long.
const CHUNK: usize = 4;

#[derive(Clone, Copy)]
struct Kept {
    state: SlotState,
    at: (u16, u64),
    since: (u64, u32),
    sends: u32,
    stores: u16,
    failed: bool,
}

/// The expected state of every slot.
struct Model {
    slots: Vec<Kept>,
    index: BTreeMap<(u16, u64), usize>,
    mins: [usize; VOLUMES as usize],
}

impl Model {
    fn new() -> Self {
        let free = Kept {
            state: SlotState::Free,
            at: (0, 0),
            since: (0, 0),
            sends: 0,
            stores: 0,
            failed: false,
        };
        Self { slots: vec![free; SLOTS], index: BTreeMap::new(), mins: [0; VOLUMES as usize] }
    }

    fn all(&self, is: impl Fn(&Kept) -> bool) -> Vec<usize> {
        (0..SLOTS).filter(|at| is(&self.slots[*at])).collect()
    }

    fn may_leave(kept: &Kept) -> bool {
        kept.state == SlotState::Clean && kept.sends == 0 && kept.stores == 0
    }

    fn clean(&self, volume: u16) -> usize {
        self.all(|kept| kept.state == SlotState::Clean && kept.at.0 == volume).len()
    }

    /// Number of slots that may leave, one after the other.
    fn spare(&self) -> usize {
        let of = |volume: u16| {
            let may = |kept: &Kept| kept.at.0 == volume && Self::may_leave(kept);
            let above = self.clean(volume).saturating_sub(self.mins[usize::from(volume)]);
            self.all(may).len().min(above)
        };
        (0..VOLUMES).map(of).sum()
    }

    fn unpin(&mut self, at: usize) {
        let kept = &mut self.slots[at];
        if kept.state == SlotState::Detached && kept.sends == 0 && kept.stores == 0 {
            kept.state = SlotState::Free;
        }
    }

    fn forget(&mut self, at: usize) {
        self.index.remove(&self.slots[at].at);
        self.slots[at].state = SlotState::Detached;
        self.unpin(at);
    }

    fn install(&mut self, at: usize, place: (u16, u64), how: Install) {
        let old = self.index.get(&place).copied();
        let was = old.map(|old| self.slots[old]);
        if let Some(old) = old {
            self.forget(old);
        }
        let old_since = was.filter(|old| old.state == SlotState::Dirty).map(|old| old.since);
        let any_since = was.filter(|old| old.state == SlotState::Writing).map(|old| old.since);
        let since = match how {
            Install::Clean => None,
            Install::Dirty { order, now_ms } => Some(old_since.unwrap_or((order, now_ms))),
            Install::Merged => old_since.or(any_since),
        };
        self.index.insert(place, at);
        let kept = &mut self.slots[at];
        (kept.at, kept.failed) = (place, false);
        kept.state = if since.is_some() { SlotState::Dirty } else { SlotState::Clean };
        kept.since = since.unwrap_or(kept.since);
    }

    fn not_written(&mut self, at: usize, failed: bool) {
        self.slots[at].stores -= 1;
        let Kept { since, at: place, state, .. } = self.slots[at];
        let current = match state {
            SlotState::Writing => Some(at),
            _ => self.index.get(&place).copied(),
        };
        let is_dirty = |at: &usize| {
            *at == current.unwrap_or(SLOTS) && state == SlotState::Writing
                || self.slots[*at].state == SlotState::Dirty
        };
        if let Some(current) = current.filter(is_dirty) {
            let current = &mut self.slots[current];
            current.since = current.since.min(since);
            current.failed |= failed;
            current.state = SlotState::Dirty;
        }
        self.unpin(at);
    }
}

fn agree(slots: &mut Slots, model: &Model, seed: u64) {
    for at in 0..SLOTS {
        let (kept, slot) = (&model.slots[at], Slot(u32::try_from(at).unwrap()));
        let is = slots.holders(slot);
        assert_eq!(is.state, kept.state, "seed {seed}: {slot:?}");
        assert_eq!((is.sends, is.stores), (kept.sends, kept.stores), "seed {seed}: {slot:?}");
        if matches!(kept.state, SlotState::Clean | SlotState::Dirty | SlotState::Writing) {
            assert_eq!((is.block.0.0, is.block.1), kept.at, "seed {seed}: {slot:?}");
        }
        if matches!(kept.state, SlotState::Dirty | SlotState::Writing) {
            assert_eq!(slots.since(slot), kept.since, "seed {seed}: {slot:?}");
        }
    }
    for volume in 0..VOLUMES {
        for block in 0..BLOCKS {
            let found = slots.find(VolumeIndex(volume), block).map(|slot| slot.index());
            let kept = model.index.get(&(volume, block)).copied();
            assert_eq!(found, kept, "seed {seed}: block {block} of {volume}");
        }
        let dirty = |kept: &Kept| matches!(kept.state, SlotState::Dirty | SlotState::Writing);
        let of = |kept: &Kept| kept.at.0 == volume;
        let failed = model.all(|kept| dirty(kept) && of(kept) && kept.failed).len();
        assert_eq!(slots.failed(VolumeIndex(volume)) as usize, failed, "seed {seed}");
        // Empties the list, oldest first, and then rebuilds it.
        let mut list = Vec::new();
        while let Some(slot) = slots.oldest_dirty(VolumeIndex(volume)) {
            list.push((slots.since(slot).0, slot));
            slots.begin_writing(slot);
        }
        assert!(list.is_sorted_by_key(|(since, _)| *since), "seed {seed}: {list:?}");
        list.iter().for_each(|(_, slot)| slots.not_written(*slot, false));
        let mut listed: Vec<_> = list.iter().map(|(_, slot)| slot.index()).collect();
        listed.sort_unstable();
        let expected = model.all(|kept| kept.state == SlotState::Dirty && of(kept));
        assert_eq!(listed, expected, "seed {seed}: dirty list of {volume}");
    }
    let dirty = model.all(|kept| matches!(kept.state, SlotState::Dirty | SlotState::Writing)).len();
    assert_eq!(slots.dirty(), dirty, "seed {seed}");
    let outdated = model.all(|kept| kept.state == SlotState::Detached && kept.stores > 0).len();
    assert_eq!(slots.outdated(), outdated, "seed {seed}");
    assert_eq!(slots.cached(), model.index.len(), "seed {seed}");
    let lent: u32 = model.slots.iter().map(|kept| kept.sends).sum();
    assert_eq!(slots.lent(), lent as usize, "seed {seed}");
}

/// Blocks that were moved to other slots move in the model, too. Only unpinned ones move.
fn follow_moves(slots: &Slots, model: &mut Model, seed: u64) {
    let mut moved = Vec::new();
    for (place, at) in &model.index {
        let Some(to) = slots.find(VolumeIndex(place.0), place.1) else { continue };
        if to.index() != *at {
            moved.push((*place, *at, to.index()));
        }
    }
    let kept: Vec<_> = moved.iter().map(|(_, from, _)| model.slots[*from]).collect();
    for (_, from, _) in &moved {
        model.slots[*from].state = SlotState::Free;
    }
    for ((place, from, to), kept) in moved.into_iter().zip(kept) {
        let is_movable = matches!(kept.state, SlotState::Clean | SlotState::Dirty);
        assert!(is_movable && kept.sends == 0 && kept.stores == 0, "seed {seed}: slot {from}");
        let was = model.slots[to].state;
        assert_eq!(was, SlotState::Free, "seed {seed}: slot {from} moved to {to}");
        model.slots[to] = kept;
        model.index.insert(place, to);
    }
}

/// As many slots can be allocated as are free or may leave, and only those that may leave do.
fn allocate(slots: &mut Slots, model: &mut Model, count: usize, seed: u64) {
    let free = model.all(|kept| kept.state == SlotState::Free).len();
    let leave = model.spare();
    let clean = [0, 1].map(|volume| model.clean(volume));
    let (evictions, mut out) = (slots.evictions(), Vec::new());
    let got = slots.allocate(count, &mut out);
    assert_eq!(got, count <= free + leave, "seed {seed}: {count} of {free} and {leave}");
    assert_eq!(out.len(), if got { count } else { 0 });
    let gone = |kept: &Kept| slots.find(VolumeIndex(kept.at.0), kept.at.1).is_none();
    let mut left = 0usize;
    for at in model.all(Model::may_leave) {
        if gone(&model.slots[at]) {
            model.forget(at);
            left += 1;
        }
    }
    follow_moves(slots, model, seed);
    assert_eq!(slots.evictions() - evictions, left as u64, "seed {seed}");
    for volume in [0, 1] {
        let (at, is) = (usize::from(volume), model.clean(volume));
        assert!(is >= clean[at].min(model.mins[at]), "seed {seed}: {is} of {clean:?} are left");
    }
    // An emptied chunk needs as many free slots elsewhere, and one slot may need a chunk.
    let needed = count.saturating_sub(free);
    assert!(
        (needed..=needed + count + 2 * CHUNK).contains(&left) || !got,
        "seed {seed}: {left} left"
    );
    for slot in out {
        let kept = &mut model.slots[slot.index()];
        assert_eq!(
            kept.state,
            SlotState::Free,
            "seed {seed}: {slot:?} was handed out while in use"
        );
        kept.state = SlotState::Private;
    }
}

#[expect(clippy::too_many_lines, reason = "one arm for each event")]
fn run(seed: u64, steps: usize) {
    // Few blocks are rewritten often; many fill the memory.
    let blocks = [5, 12, 40][usize::try_from(seed % 3).unwrap()];
    let region = Region::allocate(SLOTS * SLOT_BYTES, PageKind::Normal).unwrap();
    let arena = Arena::new(region, 16 << 10).unwrap();
    let mut slots = Slots::new(arena, seed);
    (0..VOLUMES).for_each(|volume| slots.add_volume(VolumeIndex(volume)));
    let (mut model, mut random, mut order) = (Model::new(), Rng(seed), 0);
    let any = |random: &mut Rng, from: &[usize]| {
        (!from.is_empty()).then(|| from[random.below(from.len().max(1))])
    };
    let name = |at: usize| Slot(u32::try_from(at).unwrap());
    for step in 0..steps {
        match random.below(21) {
            0..3 => allocate(&mut slots, &mut model, 1 + random.below(6), seed),
            3 => allocate(&mut slots, &mut model, 1 + random.below(SLOTS + 4), seed),
            4..10 => {
                let private = model.all(|kept| kept.state == SlotState::Private);
                let Some(at) = any(&mut random, &private) else { continue };
                let volume = u16::try_from(random.below(VOLUMES.into())).unwrap();
                let place = (volume, random.below(blocks) as u64);
                order += 1;
                let how = match random.below(5) {
                    0 => Install::Clean,
                    1 => Install::Merged,
                    _ => Install::Dirty { order, now_ms: u32::try_from(step).unwrap() },
                };
                slots.install(name(at), VolumeIndex(volume), place.1, how);
                model.install(at, place, how);
            }
            10 => {
                let private = model.all(|kept| kept.state == SlotState::Private);
                let Some(at) = any(&mut random, &private) else { continue };
                if random.below(2) == 0 {
                    slots.give_back(name(at));
                    model.slots[at].state = SlotState::Free;
                } else {
                    slots.lend_private(name(at));
                    model.slots[at].state = SlotState::Detached;
                    model.slots[at].sends += 1;
                }
            }
            11 | 12 => {
                let indexed: Vec<_> = model.index.values().copied().collect();
                let Some(at) = any(&mut random, &indexed) else { continue };
                slots.touch(name(at));
                slots.lend(name(at));
                model.slots[at].sends += 1;
            }
            13 | 14 => {
                let lent = model.all(|kept| kept.sends > 0);
                let Some(at) = any(&mut random, &lent) else { continue };
                slots.unlend(name(at));
                model.slots[at].sends -= 1;
                model.unpin(at);
            }
            15 | 16 => {
                let volume = VolumeIndex(u16::try_from(random.below(VOLUMES.into())).unwrap());
                let dirty = model.all(|k| k.state == SlotState::Dirty && k.at.0 == volume.0);
                let oldest = slots.oldest_dirty(volume).map(|slot| slot.index());
                let Some(other) = any(&mut random, &dirty) else { continue };
                let at = oldest.filter(|_| random.below(2) == 0).unwrap_or(other);
                slots.begin_writing(name(at));
                model.slots[at].state = SlotState::Writing;
                model.slots[at].stores += 1;
            }
            20 => {
                let at = random.below(VOLUMES.into());
                let min = [0, random.below(SLOTS / 2)][random.below(2)];
                slots.set_min(VolumeIndex(u16::try_from(at).unwrap()), u32::try_from(min).unwrap());
                model.mins[at] = min;
            }
            17 | 18 => {
                let writing = model.all(|kept| kept.stores > 0);
                let Some(at) = any(&mut random, &writing) else { continue };
                if random.below(2) == 0 {
                    slots.written(name(at));
                    let kept = &mut model.slots[at];
                    kept.stores -= 1;
                    if kept.state == SlotState::Writing {
                        (kept.state, kept.failed) = (SlotState::Clean, false);
                    }
                    model.unpin(at);
                } else {
                    let failed = random.below(2) == 0;
                    slots.not_written(name(at), failed);
                    model.not_written(at, failed);
                }
            }
            _ => {
                let (first, width) = (random.below(blocks) as u64, random.below(6));
                // Half of the ranges have more blocks than there are slots.
                let last = first + [width as u64, 1 << 40][random.below(2)];
                let mut seen = Vec::new();
                let forget = random.below(4) == 0;
                slots.for_each_in(VolumeIndex(0), first, last, |slots, slot| {
                    seen.push(slot.index());
                    if forget {
                        slots.forget(slot);
                    }
                });
                let mut expected: Vec<_> =
                    model.index.range((0, first)..=(0, last)).map(|(_, at)| *at).collect();
                if forget {
                    expected.iter().for_each(|at| model.forget(*at));
                }
                expected.sort_unstable();
                seen.sort_unstable();
                assert_eq!(seen, expected, "seed {seed}: blocks {first} to {last}");
            }
        }
        if step % 8 == 0 {
            agree(&mut slots, &model, seed);
        }
    }
    // Returns everything that is held; then all memory can be allocated at once.
    for at in 0..SLOTS {
        while model.slots[at].sends > 0 {
            slots.unlend(name(at));
            model.slots[at].sends -= 1;
            model.unpin(at);
        }
        while model.slots[at].stores > 0 {
            slots.not_written(name(at), true);
            model.not_written(at, true);
        }
        if model.slots[at].state == SlotState::Private {
            slots.give_back(name(at));
            model.slots[at].state = SlotState::Free;
        }
    }
    agree(&mut slots, &model, seed);
    (0..VOLUMES).for_each(|volume| slots.set_min(VolumeIndex(volume), 0));
    model.mins = [0; VOLUMES as usize];
    assert_eq!(slots.held().collect::<Vec<_>>(), [], "seed {seed}");
    model.all(|kept| kept.state == SlotState::Dirty).into_iter().for_each(|at| {
        slots.forget(name(at));
        model.forget(at);
    });
    allocate(&mut slots, &mut model, SLOTS, seed);
    agree(&mut slots, &model, seed);
    assert_eq!((slots.dirty(), slots.cached(), slots.lent()), (0, 0, 0));
}

#[test]
fn agrees_with_the_model() {
    for seed in 0..6 {
        run(seed, 100_000);
    }
}

/// The expected long list of dirty blocks: order of the oldest write and block, oldest first.
struct Line(Vec<(u64, u64)>);

impl Line {
    fn at(&self, block: u64) -> Option<usize> {
        self.0.iter().position(|(_, other)| *other == block)
    }

    /// Behind all blocks of at least this age.
    fn put(&mut self, order: u64, block: u64) {
        let at = self.0.partition_point(|(other, _)| *other <= order);
        self.0.insert(at, (order, block));
    }
}

/// The exact places in a long list of dirty blocks. A block that is written again, in the middle or
/// at an end, keeps its place. A block that comes back from a write-back goes behind those of its
/// age.
#[expect(clippy::too_many_lines, reason = "one arm for each event")]
fn keeps_its_places(seed: u64) {
    const BLOCKS: usize = 300;
    const VOLUME: VolumeIndex = VolumeIndex(0);
    let region = Region::allocate(1024 * SLOT_BYTES, PageKind::Normal).unwrap();
    let mut slots = Slots::new(Arena::new(region, 16 << 10).unwrap(), seed);
    slots.add_volume(VOLUME);
    let (mut random, mut order, mut line) = (Rng(seed), 0, Line(Vec::new()));
    let mut writing: Vec<(u64, u64, Slot)> = Vec::new();
    let block_at = |slots: &Slots, block| slots.find(VOLUME, block).unwrap();
    for step in 0..4000 {
        let block = random.below(BLOCKS) as u64;
        let at = line.at(block);
        let is_writing = writing
            .iter()
            .any(|(_, other, slot)| *other == block && slots.state(*slot) == SlotState::Writing);
        match random.below(8) {
            // Sometimes several blocks have one order, and so one age.
            0..4 => {
                order += u64::from(random.below(3) > 0);
                let mut slot = Vec::new();
                assert!(slots.allocate(1, &mut slot));
                let how = Install::Dirty { order, now_ms: step };
                slots.install(slot[0], VOLUME, block, how);
                if at.is_none() {
                    line.put(order, block);
                }
            }
            4 if at.is_some() || is_writing => {
                let since = slots.since(block_at(&slots, block)).0;
                let mut slot = Vec::new();
                assert!(slots.allocate(1, &mut slot));
                slots.install(slot[0], VOLUME, block, Install::Merged);
                if at.is_none() {
                    line.put(since, block);
                }
            }
            5 => {
                let Some(at) = at else { continue };
                let (order, _) = line.0.remove(at);
                let slot = block_at(&slots, block);
                slots.begin_writing(slot);
                writing.push((order, block, slot));
            }
            6 if !writing.is_empty() => {
                let (order, block, slot) = writing.swap_remove(random.below(writing.len()));
                if random.below(2) == 0 {
                    slots.written(slot);
                } else {
                    let was_writing = slots.state(slot) == SlotState::Writing;
                    slots.not_written(slot, random.below(2) == 0);
                    // The newer data takes over this slot's age.
                    if let Some(at) = line.at(block) {
                        let (other, _) = line.0.remove(at);
                        line.put(order.min(other), block);
                    } else if was_writing {
                        line.put(order, block);
                    }
                }
            }
            7 if random.below(4) == 0 => {
                let Some(at) = at else { continue };
                line.0.remove(at);
                slots.forget(block_at(&slots, block));
            }
            _ => {}
        }
        let oldest = slots.oldest_dirty(VOLUME).map(|slot| slots.block(slot));
        assert_eq!(oldest, line.0.first().map(|(_, block)| *block), "seed {seed}, step {step}");
    }
    assert!(line.0.len() > BLOCKS / 2, "seed {seed}: a short list: {}", line.0.len());
    // Removes from anywhere, so both directions of the list are checked. Then the rest, in order.
    for _ in 0..line.0.len() / 2 {
        let (_, block) = line.0.remove(random.below(line.0.len()));
        slots.begin_writing(block_at(&slots, block));
        let oldest = slots.oldest_dirty(VOLUME).map(|slot| slots.block(slot));
        assert_eq!(oldest, line.0.first().map(|(_, block)| *block), "seed {seed}");
    }
    let mut rest = Vec::new();
    while let Some(slot) = slots.oldest_dirty(VOLUME) {
        rest.push((slots.since(slot).0, slots.block(slot)));
        slots.begin_writing(slot);
    }
    assert_eq!(rest, line.0, "seed {seed}");
}

#[test]
fn a_long_list_of_dirty_blocks_keeps_its_places() {
    for seed in 0..20 {
        keeps_its_places(seed);
    }
}

#[test]
fn segments_join_neighbours_and_name_their_slots() {
    let region = Region::allocate(2 * SLOTS * SLOT_BYTES, PageKind::Normal).unwrap();
    // The second half of the region: offsets count from its start.
    let range = SLOTS * SLOT_BYTES..2 * SLOTS * SLOT_BYTES;
    let slots = Slots::new(Arena::over(region, range.clone(), 16 << 10).unwrap(), 1);
    let list = |numbers: &[u32], skip, len| {
        let mut out = Vec::new();
        slots.segments(numbers.iter().map(|at| Slot(*at)), skip, len, &mut out);
        out
    };
    let at = |slot: usize, skip: usize, len: u32| Segment {
        offset: range.start + slot * SLOT_BYTES + skip,
        len,
    };
    assert_eq!(list(&[3, 4, 5], 0, 3 * 4096), [at(3, 0, 3 * 4096)]);
    assert_eq!(list(&[3, 5, 4], 0, 3 * 4096), [at(3, 0, 4096), at(5, 0, 4096), at(4, 0, 4096)]);
    assert_eq!(list(&[3, 4], 512, 4096), [at(3, 512, 4096)]);
    assert_eq!(list(&[4, 3], 3584, 1024), [at(4, 3584, 512), at(3, 0, 512)]);
    assert_eq!(list(&[9, 9], 4095, 1), [at(9, 4095, 1)]);
    let names = |segment| slots.slots_of(segment).map(|slot| slot.0).collect::<Vec<_>>();
    assert_eq!(names(at(3, 0, 3 * 4096)), [3, 4, 5]);
    assert_eq!(names(at(3, 512, 4096)), [3, 4]);
    assert_eq!(names(at(3, 512, 3584)), [3]);
    assert_eq!(names(at(63, 4095, 1)), [63]);
    let one = |segment| slots.slot_of(segment).map(|slot| slot.0);
    assert_eq!(
        [one(at(3, 0, 4096)), one(at(3, 512, 3584)), one(at(63, 4095, 1))],
        [Some(3), Some(3), Some(63)]
    );
    assert_eq!([one(at(3, 0, 4097)), one(at(3, 512, 4096)), one(at(3, 4095, 2))], [None; 3]);
}

#[test]
fn single_slots_join_into_a_run_again() {
    let region = Region::allocate(SLOTS * SLOT_BYTES, PageKind::Normal).unwrap();
    let mut slots = Slots::new(Arena::new(region, 256 << 10).unwrap(), 1);
    let alone: Vec<_> = (0..SLOTS).map(|_| slots.allocate_one().unwrap()).collect();
    assert_eq!(slots.allocate_one(), None);
    alone.into_iter().for_each(|slot| slots.give_back(slot));
    let (mut out, mut runs) = (Vec::new(), Vec::new());
    assert!(slots.allocate(SLOTS, &mut out));
    slots.segments(out.into_iter(), 0, u32::try_from(SLOTS * SLOT_BYTES).unwrap(), &mut runs);
    assert_eq!(runs.len(), 1, "{runs:?}");
}

// Runs of memory in which slots lie.
fn pieces(slots: &Slots, of: &[Slot]) -> usize {
    let mut runs = Vec::new();
    let len = u32::try_from(of.len() * SLOT_BYTES).unwrap();
    slots.segments(of.iter().copied(), 0, len, &mut runs);
    runs.len()
}

/// A shard of 16 MiB, full of blocks that came one by one. Some were hit, some are dirty.
fn aged(seed: u64, dirty: bool) -> (Slots, Rng) {
    const VOLUME: VolumeIndex = VolumeIndex(0);
    let region = Region::allocate(16 << 20, PageKind::Normal).unwrap();
    let mut slots = Slots::new(Arena::new(region, 1 << 20).unwrap(), seed);
    slots.add_volume(VOLUME);
    let mut random = Rng(seed);
    for order in 0..40_000 {
        let blocks = [2000, 50_000][random.below(2)];
        let block = random.below(blocks) as u64;
        if let Some(slot) = slots.find(VOLUME, block) {
            slots.touch(slot);
        }
        if slots.find(VOLUME, block).is_none() || random.below(4) == 0 {
            let Some(slot) = slots.allocate_one() else { continue };
            let is_dirty = dirty && slots.dirty() < 2048 && random.below(3) == 0;
            let how = if is_dirty { Install::Dirty { order, now_ms: 0 } } else { Install::Clean };
            slots.install(slot, VOLUME, block, how);
        }
    }
    (slots, random)
}

#[test]
fn large_requests_find_runs_in_an_aged_memory() {
    for (seed, dirty) in [(1, false), (2, true), (3, false), (4, true)] {
        let (mut slots, mut random) = aged(seed, dirty);
        let (cached, moved) = (slots.cached(), slots.moved());
        assert!(cached > 4000, "{cached} blocks");
        let mut taken = 0;
        for turn in 0..400 {
            let count = [32, 32, 32, 8, 64, 2, 16][random.below(7)];
            let mut out = Vec::new();
            assert!(slots.allocate(count, &mut out));
            assert_eq!(pieces(&slots, &out), 1, "seed {seed}: {count} slots in turn {turn}");
            taken += count;
            for (at, slot) in out.into_iter().enumerate() {
                let block = 1_000_000 + (turn * 64 + at) as u64;
                slots.install(slot, VolumeIndex(0), block, Install::Clean);
            }
            assert!(slots.free() <= 256, "seed {seed}: {} free", slots.free());
        }
        let moved = slots.moved() - moved;
        assert!(moved < taken as u64 / 2, "seed {seed}: {moved} moved for {taken}");
    }
}

/// Requests of single slots between requests of a run and of several chunks: no memory is lost, and
/// the runs stay runs.
#[test]
fn single_slots_and_runs_take_turns() {
    for seed in 0..4 {
        let (mut slots, mut random) = aged(seed, true);
        for turn in 0..3000u64 {
            let count = [1, 1, 1, 1, 1, 1, 1, 1, 32, 200][random.below(10)];
            let mut out = Vec::new();
            assert!(slots.allocate(count, &mut out));
            // A request of more than a chunk may find parts of chunks only.
            let most = if count > 64 { 16 } else { 2 };
            let pieces = pieces(&slots, &out);
            assert!(pieces <= most, "seed {seed}: {count} slots in {pieces} pieces, turn {turn}");
            for (at, slot) in out.into_iter().enumerate() {
                let block = [turn % 1500, 1_000_000 + turn * 200 + at as u64][random.below(2)];
                slots.install(slot, VolumeIndex(0), block, Install::Clean);
            }
            assert!(slots.free() <= 512, "seed {seed}: {} free", slots.free());
        }
    }
}
