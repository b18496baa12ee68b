//! Slots set apart for landing data.

use super::super::slots::SlotState;
use super::*;

const SLOT_LEN: u32 = 4096;
const _: () = assert!(SLOT_LEN as usize == SLOT_BYTES);

/// Data that landed in a slot set apart.
struct InSlot<'a> {
    from: PartToken,
    // The slot, by its offset; then the slot that took its place.
    at: &'a mut usize,
}

impl Landed for InSlot<'_> {
    fn land(&mut self, slots: &mut Slots, slot: Slot) -> Slot {
        let landed = std::mem::replace(self.at, slots.offset(slot));
        slots.exchange(slot, landed)
    }

    fn from(&self) -> PartToken {
        self.from
    }
}

fn all_landing(case: &Case, offsets: &[usize]) {
    let slots = &case.shard.core.slots;
    let mut sorted = offsets.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!((sorted.len(), slots.set_apart()), (offsets.len(), offsets.len()));
    let landing = (0..256)
        .map(Slot)
        .filter(|slot| slots.holders(*slot).state == SlotState::Landing)
        .map(|slot| slots.offset(slot));
    assert_eq!(landing.collect::<Vec<_>>(), sorted);
}

#[test]
fn a_landed_slot_becomes_the_block_and_another_replaces_it() {
    for cache in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
        let mut random = Rng(5);
        let mut case = Setup::new(cache).case();
        let mut offsets = case.shard.take_landing(20).expect("memory").into_vec();
        all_landing(&case, &offsets);
        let mut versions = [0u8; 40];
        for round in 1..200u8 {
            let block = random.below(versions.len());
            let offset = block as u64 * BLOCK;
            // Writes like a device.
            let at = &mut offsets[random.below(20)];
            case.region.write(*at, &bytes(round, offset, SLOT_BYTES));
            let (from, fua) = (case.token(), random.below(4) == 0);
            let write = OneBlock { volume: VOLUME, offset, len: SLOT_LEN, fua };
            let done = case.shard.write_one(write, InSlot { from, at });
            if done != OneWrite::Declined {
                versions[block] = round;
            }
            // Two concurrent writes of a block leave one or the other.
            if cache == CacheMode::None || fua || random.below(3) == 0 {
                case.finish_all();
                case.replies.clear();
            }
            all_landing(&case, &offsets);
        }
        case.finish_all();
        case.replies.clear();
        for (block, version) in versions.into_iter().enumerate() {
            let offset = block as u64 * BLOCK;
            let tag = case.read(offset, SLOT_LEN);
            case.finish_all();
            let memory = case.lent(tag).expect("a good read");
            assert!(
                *case.copy(&memory) == *bytes(version, offset, SLOT_BYTES),
                "{cache:?}, {block}"
            );
            case.request(ShardRequest::Release { memory });
        }
        case.shard.give_landing(&offsets);
        assert_eq!(case.shard.core.slots.set_apart(), 0);
        case.end();
    }
}

#[test]
fn slots_set_apart_are_bounded_and_leave_the_minimums() {
    let mut case = Setup { slots: 800, ..Setup::new(CacheMode::WriteThrough) }.case();
    assert!(case.shard.take_landing(101).is_none(), "more than an eighth");
    let first = case.shard.take_landing(60).expect("memory");
    assert!(case.shard.take_landing(41).is_none(), "more than an eighth together");
    case.shard.give_landing(&first);
    let all = case.shard.take_landing(100).expect("memory");
    case.shard.give_landing(&all);
    // A minimum of half the cache leaves no slot to set apart.
    case.shard.set_cache_min(VOLUME, 400);
    assert!(case.shard.take_landing(1).is_none(), "the volume keeps half");
    case.shard.set_cache_min(VOLUME, 380);
    assert!(case.shard.take_landing(41).is_none(), "its minimum would not fit");
    let some = case.shard.take_landing(40).expect("memory");
    assert_eq!(case.shard.core.slots.min(VOLUME), 380, "it keeps what it is to keep");
    case.shard.give_landing(&some);
    case.shard.set_cache_min(VOLUME, 0);
    case.end();
}
