//! [`Slots`]: the memory of a shard: which slot holds which block, which slots are pinned, and
//! which are dirty. A slot is a page of the arena.
//!
//! No I/O and no clock. A slot is in one of these states:
//!
//! ```text
//! Free -> Private -> Clean <-> Dirty -> Writing -> Clean
//!            | ^        `--------'---------'--> Detached -> Free
//!            | `-> Landing -> Free
//!            `-> Free
//! ```
//!
//! A volume with a maximum has `Bounded` slots where others have `Clean` ones (`maximum.rs`).
//!
//! A `Private` slot belongs to one job: data lands there. A `Landing` slot belongs to a connection
//! (`landing_slots.rs`). `Clean`, `Dirty` and `Writing` slots are in the index; a `Writing` slot is
//! dirty and with a write-back. A `Detached` slot left the index while RDMA or the store still read
//! it; it is free when the last pin is gone.
//!
//! Invariants: a block has at most one slot in the index; bytes of a slot in the index never
//! change; a slot with pins is never reused; a dirty slot leaves the index only for newer data, or
//! because its range of the volume was discarded. Per slot: 48 bytes here, 4 to 8 of buckets, and
//! what the policy takes.

mod chunk;
mod dirty;
mod evacuation;
mod free;
mod maximum;
mod meta;
mod minimum;
mod ranges;

use rblk_fabric::Region;
use rblk_protocol::width::wide;

use self::free::FreeSlots;
use self::maximum::Trim;
pub use self::meta::{Install, SlotCounts, SlotHolders, SlotState};
use self::meta::{Meta, VolumeSlots};
use super::SLOT_BYTES;
use super::policy::{Policy, Slot};
use crate::memory::arena::Arena;
use crate::volume::ids::VolumeIndex;

const NONE: u32 = u32::MAX;
/// At most this part of the slots stays free in chunks for runs while single slots are wanted.
const HOLES: usize = 64;
/// Most blocks of runs that leave for one single slot.
const LEAVE_FOR_ONE: usize = 4;
/// Steps of the policy for one allocation: a fraction of a millisecond. Four times the blocks of
/// the longest request, since each try may meet the slots that the request itself has.
const STEPS: u32 = 4096;

/// The slots of one shard.
#[derive(Debug)]
pub struct Slots {
    free: FreeSlots,
    metas: Box<[Meta]>,
    // The first slot of each chain of the index, by hash.
    buckets: Box<[u32]>,
    seed: u64,
    policy: Policy,
    lists: Vec<VolumeSlots>,
    totals: Totals,
    // A slot was freed since the last failed allocation.
    freed: bool,
    // The last search for a victim used up its steps.
    cut: bool,
    trim: Trim,
    // The search for a chunk to empty continues at this chunk.
    looked_at: usize,
    // Blocks copied to another slot, since the start.
    moved: u64,
}

// Slots of all volumes.
#[derive(Debug, Default)]
struct Totals {
    // Slots in the state Landing.
    set_apart: usize,
    // Lent slots, each counted once.
    pinned: usize,
    // Slots in the states Dirty and Writing.
    dirty: usize,
    // Detached slots that a write-back reads.
    outdated: usize,
    // Lends: a slot lent twice counts twice.
    lent: usize,
    // Slots evicted to make room, since the start.
    evictions: u64,
}

impl Slots {
    /// The slots of an arena. `seed` makes the hash unpredictable to peers.
    #[must_use]
    pub(crate) fn new(arena: Arena, seed: u64) -> Self {
        let count = arena.capacity_bytes() / SLOT_BYTES;
        // Slot numbers are 32 bits: an arena share of 16 TiB.
        let slots = u32::try_from(count).unwrap_or(u32::MAX - 1);
        Self {
            metas: vec![Meta::FREE; wide(slots)].into_boxed_slice(),
            buckets: vec![NONE; wide(slots).next_power_of_two()].into_boxed_slice(),
            seed: seed | 1,
            policy: Policy::new(slots),
            lists: Vec::new(),
            totals: Totals::default(),
            freed: false,
            cut: false,
            trim: Trim::default(),
            looked_at: 0,
            moved: 0,
            free: FreeSlots::new(arena),
        }
    }

    /// The memory.
    #[must_use]
    pub fn region(&self) -> &Region {
        self.free.region()
    }

    /// Makes room for the lists and counts of a volume.
    pub(crate) fn add_volume(&mut self, volume: VolumeIndex) {
        let at = usize::from(volume.0);
        if self.lists.len() <= at {
            self.lists.resize_with(at + 1, VolumeSlots::default);
        }
    }

    /// Number of all slots.
    #[must_use]
    pub(crate) fn capacity(&self) -> usize {
        self.metas.len()
    }

    /// Slots in the index.
    #[must_use]
    pub fn cached(&self) -> usize {
        self.policy.len() as usize
    }

    /// Slots with data that the store does not have.
    #[must_use]
    pub fn dirty(&self) -> usize {
        self.totals.dirty
    }

    /// Slots that left the index while a write-back reads them: their memory comes back when the
    /// store ends the write-back.
    #[must_use]
    pub(crate) fn outdated(&self) -> usize {
        self.totals.outdated
    }

    /// Number of current lends: a slot lent twice counts twice.
    #[must_use]
    pub fn lent(&self) -> usize {
        self.totals.lent
    }

    /// Lent slots, each counted once.
    #[must_use]
    #[inline]
    pub(crate) fn pinned(&self) -> usize {
        self.totals.pinned
    }

    /// Slots evicted to make room, since the start.
    #[must_use]
    pub(crate) fn evictions(&self) -> u64 {
        self.totals.evictions
    }

    /// Slots of a volume with a failed last write-back.
    #[must_use]
    pub(crate) fn failed(&self, volume: VolumeIndex) -> u32 {
        self.counts(volume).failed
    }

    /// The slot counts of a volume.
    #[must_use]
    pub(crate) fn counts(&self, volume: VolumeIndex) -> SlotCounts {
        let counts = |list: &VolumeSlots| SlotCounts { failed: list.failed(), ..list.counts };
        self.lists.get(usize::from(volume.0)).map_or_else(SlotCounts::default, counts)
    }

    /// Whether memory was freed since the last call. Resets this.
    pub(crate) fn take_freed(&mut self) -> bool {
        std::mem::take(&mut self.freed)
    }

    /// Whether an allocation found too little only because a search for a victim used up its steps.
    /// The next allocation continues the search.
    #[must_use]
    pub(crate) fn is_cut(&self) -> bool {
        self.cut
    }

    /// The state, block and pins of a slot.
    #[must_use]
    pub(crate) fn holders(&self, slot: Slot) -> SlotHolders {
        let meta = &self.metas[slot.index()];
        SlotHolders {
            state: meta.state,
            block: (VolumeIndex(meta.volume), meta.block),
            sends: meta.sends,
            stores: meta.stores,
        }
    }

    /// Slots that are pinned or private: none while no request is running. Slow.
    pub fn held(&self) -> impl Iterator<Item = (Slot, SlotHolders)> {
        (0u32..).map(Slot).take(self.metas.len()).map(|slot| (slot, self.holders(slot))).filter(
            |(_, h)| {
                h.sends > 0
                    || h.stores > 0
                    || matches!(h.state, SlotState::Private | SlotState::Detached)
            },
        )
    }

    /// First byte of a slot in the region.
    #[must_use]
    #[inline]
    pub fn offset(&self, slot: Slot) -> usize {
        self.free.offset(slot)
    }

    // The counts of the volume to which a slot's block belongs.
    fn counts_of(&mut self, slot: Slot) -> &mut SlotCounts {
        &mut self.lists[usize::from(self.metas[slot.index()].volume)].counts
    }

    #[inline]
    fn hash(&self, volume: u16, block: u64) -> u64 {
        let mixed = (block ^ u64::from(volume).rotate_right(16) ^ self.seed)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(self.seed);
        mixed ^ (mixed >> 29)
    }

    #[inline]
    fn bucket(&self, hash: u64) -> usize {
        wide(hash) & (self.buckets.len() - 1)
    }

    /// The slot of a block.
    #[must_use]
    #[inline(always)]
    pub(crate) fn find(&self, volume: VolumeIndex, block: u64) -> Option<Slot> {
        let mut at = self.buckets[self.bucket(self.hash(volume.0, block))];
        let metas = &self.metas[..];
        loop {
            // No slot has the number `NONE`.
            let meta = metas.get(at as usize)?;
            if meta.holds(volume.0, block) {
                return Some(Slot(at));
            }
            at = meta.chain;
        }
    }

    /// The state of a slot.
    #[must_use]
    #[inline]
    pub(crate) fn state(&self, slot: Slot) -> SlotState {
        self.metas[slot.index()].state
    }

    /// The block in a slot of the index.
    #[must_use]
    pub(crate) fn block(&self, slot: Slot) -> u64 {
        self.metas[slot.index()].block
    }

    /// Order and time of the oldest write in a dirty slot.
    #[must_use]
    pub(crate) fn since(&self, slot: Slot) -> (u64, u32) {
        let meta = &self.metas[slot.index()];
        (meta.since, meta.since_ms)
    }

    /// Allocates a private slot, evicting a block if no slot is free.
    #[inline(always)]
    pub(crate) fn allocate_one(&mut self) -> Option<Slot> {
        let slot = match self.free.take_loose() {
            Some(slot) => slot,
            None => self.find_one()?,
        };
        self.metas[slot.index()].state = SlotState::Private;
        Some(slot)
    }

    // A free slot, or an evicted one. A victim in a chunk for runs leaves a hole there, so that the
    // rest of its run can leave and come back as a run; if the holes are many, the chunk with the
    // most of them gets single slots.
    #[inline(never)]
    fn find_one(&mut self) -> Option<Slot> {
        if let Some(slot) = self.free.take_one() {
            return Some(slot);
        }
        let mut steps = STEPS;
        let holes_max = (self.metas.len() / HOLES).max(2 * self.free.chunks().slots());
        for _ in 0..LEAVE_FOR_ONE {
            if self.free.chunks().holes() >= holes_max {
                break;
            }
            let Some(victim) = self.evict(&mut steps) else { break };
            if self.free.is_single(victim) {
                return Some(victim);
            }
            self.free.give_to_chunk(victim);
            self.freed = true;
            // The chunk may be whole now.
            if let Some(slot) = self.free.take_one() {
                return Some(slot);
            }
        }
        self.free.convert();
        self.free.take_one()
    }

    /// Sets `count` slots apart for a connection, evicting blocks if needed. Returns their offsets
    /// in the region. `None`: too few slots can leave, and nothing changed.
    pub(crate) fn set_apart_more(&mut self, count: usize) -> Option<Box<[usize]>> {
        let mut slots = Vec::with_capacity(count);
        while slots.len() < count {
            let Some(slot) = self.allocate_one() else {
                slots.into_iter().for_each(|slot| self.give_back(slot));
                return None;
            };
            slots.push(slot);
        }
        for slot in &slots {
            self.metas[slot.index()].state = SlotState::Landing;
        }
        self.totals.set_apart += count;
        Some(slots.iter().map(|slot| self.offset(*slot)).collect())
    }

    /// Slots set apart for connections.
    #[must_use]
    pub fn set_apart(&self) -> usize {
        self.totals.set_apart
    }

    /// Sets a private slot apart in exchange for the slot at `landed`, which becomes private.
    #[inline(always)]
    pub(crate) fn exchange(&mut self, private: Slot, landed: usize) -> Slot {
        let landed = self.free.slot_at(landed);
        debug_assert_eq!(self.state(private), SlotState::Private, "{:?}", self.holders(private));
        debug_assert_eq!(self.state(landed), SlotState::Landing, "{:?}", self.holders(landed));
        self.metas[private.index()].state = SlotState::Landing;
        self.metas[landed.index()].state = SlotState::Private;
        landed
    }

    /// Frees a slot that was set apart.
    pub(crate) fn take_back(&mut self, offset: usize) {
        let slot = self.free.slot_at(offset);
        debug_assert_eq!(self.state(slot), SlotState::Landing, "{:?}", self.holders(slot));
        self.totals.set_apart -= 1;
        self.free_slot(slot);
    }

    /// Appends `count` private slots to `out`, neighbours where possible, evicting blocks if
    /// needed. False: too few slots can leave, and nothing was appended.
    pub(crate) fn allocate(&mut self, count: usize, out: &mut Vec<Slot>) -> bool {
        if count == 1 {
            let slot = self.allocate_one();
            out.extend(slot);
            return slot.is_some();
        }
        if count == 0 {
            return true;
        }
        let mut steps = STEPS;
        while self.free.len() < count {
            if !self.make_room(&mut steps) {
                return false;
            }
        }
        self.make_run(count, &mut steps);
        let metas = &mut self.metas;
        self.free.take(count, |slot| {
            metas[slot.index()].state = SlotState::Private;
            out.push(slot);
        });
        true
    }

    // Evicts a slot and frees its memory, if a slot can leave.
    fn make_room(&mut self, steps: &mut u32) -> bool {
        let Some(victim) = self.evict(steps) else { return false };
        self.free.give_to_chunk(victim);
        self.freed = true;
        true
    }

    // Takes a victim out of the index, if the search finds one in `steps`. The slot then belongs to
    // the caller: it is neither in the arena nor loose.
    fn evict(&mut self, steps: &mut u32) -> Option<Slot> {
        let (metas, lists) = (&self.metas, &self.lists);
        let may_leave = |slot: Slot| {
            let meta = &metas[slot.index()];
            meta.state.is_clean()
                && meta.is_unpinned()
                && lists[usize::from(meta.volume)].has_spare()
        };
        let victim = self.policy.evict(steps, may_leave);
        self.cut = *steps == 0;
        let victim = victim?;
        if self.state(victim) == SlotState::Bounded {
            self.leave_clean(victim);
        }
        self.unlink(victim);
        self.totals.evictions += 1;
        let counts = self.counts_of(victim);
        counts.cached -= 1;
        counts.evictions += 1;
        self.metas[victim.index()].state = SlotState::Free;
        Some(victim)
    }

    /// Gives a private slot back.
    #[inline]
    pub(crate) fn give_back(&mut self, slot: Slot) {
        debug_assert_eq!(self.state(slot), SlotState::Private, "{:?}", self.holders(slot));
        self.free_slot(slot);
    }

    #[inline]
    fn free_slot(&mut self, slot: Slot) {
        let meta = &mut self.metas[slot.index()];
        debug_assert!(meta.is_unpinned(), "freed while held: {meta:?}");
        meta.state = SlotState::Free;
        self.freed = true;
        self.free.give_back(slot);
    }

    #[inline]
    fn free_if_unpinned(&mut self, slot: Slot) {
        let meta = &self.metas[slot.index()];
        if meta.state == SlotState::Detached && meta.is_unpinned() {
            self.free_slot(slot);
        }
    }

    fn unlink(&mut self, slot: Slot) {
        let Meta { volume, block, chain, .. } = self.metas[slot.index()];
        let bucket = self.bucket(self.hash(volume, block));
        if self.buckets[bucket] == slot.0 {
            self.buckets[bucket] = chain;
            return;
        }
        let mut at = self.buckets[bucket];
        while let Some(meta) = self.metas.get_mut(at as usize) {
            if meta.chain == slot.0 {
                meta.chain = chain;
                return;
            }
            at = meta.chain;
        }
        debug_assert!(false, "not in the index: {:?}", self.holders(slot));
    }

    /// Puts a private slot in the index as a block of a volume, in place of the block's old slot,
    /// if any.
    pub(crate) fn install(&mut self, slot: Slot, volume: VolumeIndex, block: u64, how: Install) {
        let was = self.put(slot, volume, block);
        let (order, now_ms) = match (how, was) {
            (Install::Clean, _) | (Install::Merged, None) => {
                // As in `install_clean`.
                self.readmit(slot);
                return self.enter_clean(slot);
            }
            (Install::Merged, Some(was)) => (was.since, was.since_ms),
            // The store does not have the older data. The newer data takes over its age.
            (_, Some(was)) if was.state == SlotState::Dirty => (was.since, was.since_ms),
            (Install::Dirty { order, now_ms }, _) => (order, now_ms),
        };
        // Into the old slot's place in the list, or to the end: a new order is the highest.
        let after = match was {
            Some(was) if was.state == SlotState::Dirty => was.prev,
            _ if how == Install::Merged => self.last_as_old(volume.0, order),
            _ => self.lists[usize::from(volume.0)].tail,
        };
        self.enter_list(slot, after, order, now_ms);
    }

    /// Like [`Self::install`] with [`Install::Clean`]. Frees the slot if the volume has no place
    /// for it.
    #[inline(always)]
    pub(crate) fn install_clean(&mut self, slot: Slot, volume: VolumeIndex, block: u64) {
        let bucket = self.bucket(self.hash(volume.0, block));
        let head = self.buckets[bucket];
        match self.metas.get(head as usize) {
            // Most writes replace a clean block, and most chains are short.
            Some(old) if old.holds(volume.0, block) && old.state == SlotState::Clean => {
                let chain = old.chain;
                self.buckets[bucket] = slot.0;
                let meta = &mut self.metas[slot.index()];
                debug_assert_eq!(meta.state, SlotState::Private);
                (meta.volume, meta.block, meta.chain) = (volume.0, block, chain);
                (meta.state, meta.failed) = (SlotState::Clean, false);
                self.policy.replace(Slot(head), slot);
                self.detach(Slot(head));
            }
            _ => self.install_clean_anywhere(slot, volume, block),
        }
        // The new slot may have replaced one that could not leave.
        self.readmit(slot);
    }

    #[inline(never)]
    fn install_clean_anywhere(&mut self, slot: Slot, volume: VolumeIndex, block: u64) {
        if !self.has_place(volume, block) {
            return self.give_back(slot);
        }
        self.put(slot, volume, block);
        self.enter_clean(slot);
    }

    // Puts a private slot in the index, clean. Returns the old slot's metadata if its data is not
    // in the store.
    #[inline(always)]
    fn put(&mut self, slot: Slot, volume: VolumeIndex, block: u64) -> Option<Meta> {
        debug_assert_eq!(self.state(slot), SlotState::Private, "{:?}", self.holders(slot));
        let hash = self.hash(volume.0, block);
        let bucket = self.bucket(hash);
        let (metas, head) = (&mut self.metas[..], &mut self.buckets[bucket]);
        let (mut before, mut at) = (NONE, *head);
        while let Some(meta) = metas.get(at as usize).filter(|meta| !meta.holds(volume.0, block)) {
            (before, at) = (at, meta.chain);
        }
        let old = metas.get(at as usize).map(|old| (Slot(at), old.chain, old.state));
        // Into the old slot's place in the chain, or to the end of the chain.
        match metas.get_mut(before as usize) {
            Some(before) => before.chain = slot.0,
            None => *head = slot.0,
        }
        let meta = &mut metas[slot.index()];
        (meta.volume, meta.block) = (volume.0, block);
        (meta.state, meta.failed) = (SlotState::Clean, false);
        meta.chain = old.map_or(NONE, |(_, chain, _)| chain);
        let mut was = None;
        if let Some((old, _, state)) = old {
            if state.is_dirty() {
                was = Some(metas[at as usize]);
                self.leave_list(old);
            } else if state == SlotState::Bounded {
                self.leave_clean(old);
            }
            self.policy.replace(old, slot);
            self.detach(old);
        } else {
            self.policy.insert(slot, hash);
            let list = &mut self.lists[usize::from(volume.0)];
            list.counts.cached += 1;
            if list.counts.cached > list.max {
                self.drop_clean(volume);
            }
        }
        was
    }

    /// Takes a slot out of the index, dirty or not.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.leave_list(slot);
        self.unlink(slot);
        self.policy.remove(slot);
        self.counts_of(slot).cached -= 1;
        self.detach(slot);
    }

    // A slot left the index. Its memory is freed when its last pin is gone.
    #[inline]
    fn detach(&mut self, slot: Slot) {
        let meta = &mut self.metas[slot.index()];
        if meta.is_unpinned() {
            return self.free_slot(slot);
        }
        meta.state = SlotState::Detached;
        self.totals.outdated += usize::from(meta.stores > 0);
    }

    /// Lends a slot of the index, to send from it.
    #[inline]
    pub(crate) fn lend(&mut self, slot: Slot) {
        debug_assert!(self.state(slot).is_in_index(), "{:?}", self.holders(slot));
        let sends = &mut self.metas[slot.index()].sends;
        if *sends == 0 {
            self.totals.pinned += 1;
        }
        *sends += 1;
        self.totals.lent += 1;
    }

    /// Reports a hit to the policy.
    #[inline]
    pub(crate) fn touch(&mut self, slot: Slot) {
        self.policy.touch(slot);
    }

    /// Lends a private slot, which is freed when it comes back.
    pub(crate) fn lend_private(&mut self, slot: Slot) {
        debug_assert_eq!(self.state(slot), SlotState::Private, "{:?}", self.holders(slot));
        let meta = &mut self.metas[slot.index()];
        meta.state = SlotState::Detached;
        meta.sends += 1;
        self.totals.lent += 1;
        self.totals.pinned += 1;
    }

    /// A lent slot comes back.
    #[inline(always)]
    pub(crate) fn unlend(&mut self, slot: Slot) {
        let meta = &mut self.metas[slot.index()];
        debug_assert!(meta.sends > 0, "not lent: {slot:?}");
        meta.sends = meta.sends.saturating_sub(1);
        self.totals.lent = self.totals.lent.saturating_sub(1);
        if meta.sends > 0 {
            return;
        }
        self.totals.pinned -= 1;
        if meta.state == SlotState::Detached {
            return self.free_if_unpinned(slot);
        }
        // A clean slot may leave again.
        self.freed = true;
        self.readmit(slot);
    }
}
