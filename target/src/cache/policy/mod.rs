//! [`Policy`]: the choice of the slot to evict next. S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO
//! queues are all you need for cache eviction", SOSP 2023) over slot numbers.
//!
//! New blocks enter a small queue, about a tenth of the resident slots. At its end, blocks hit more
//! than once move to the main queue; the others leave, and the ghost remembers their keys. A block
//! that comes back while the ghost remembers it enters the main queue at once. At the main queue's
//! end, a block that was hit goes round again with its count (0 to 3) lowered by one; a block
//! without a hit leaves. So a scan runs through the small queue and leaves the main queue alone.
//!
//! **Slots that may not leave.** Some slots are dirty or pinned; the policy asks the caller about
//! each. The policy takes a refused slot out of its queue and puts it *aside*, so that it does not
//! ask about the slot again and again. The slot comes back to the end of its queue, as the next
//! candidate, in one of two ways:
//!
//! - the caller reports the slot: [`Policy::readmit`], when a slot becomes clean or loses its last
//!   pin;
//! - each [`Policy::evict`] asks about a few slots aside, in turn: [`ASIDE_LOOKS`], and
//!   [`DRY_LOOKS`] more if the queues have no victim. So a forgotten `readmit` costs time and never
//!   the slot. After [`Policy::ask_again`], `evict` asks about all slots aside once more before it
//!   gives up.
//!
//! **Cost.** Every operation but `evict` is a fixed number of steps. A step of `evict` that does
//! not find the victim moves a slot to the main queue or lowers its count (paid for by a hit), or
//! puts the slot aside (paid for by the change to dirty or pinned since the last look, or by a
//! `readmit` that came too early), or is one of the looks above. So over any run of calls the steps
//! are at most (inserts + hits + slots that became unable to leave + readmits) + (`ASIDE_LOOKS` +
//! `DRY_LOOKS`) per call of `evict`, however many slots are stuck: when all are, a call asks about
//! at most 66 of them. These steps may all be due at once, up to 5 per resident slot. So the caller
//! limits the steps of a call. The work of a call is not lost: the next call continues it.
//!
//! Pure bookkeeping: no operation allocates after [`Policy::new`]. Invariants: a resident slot is
//! in exactly one of small, main and aside; small and main count the slots linked in them, without
//! slots aside.

mod ghost;
#[cfg(test)]
mod tests;

use ghost::Ghost;
use rblk_protocol::width::{narrow, wide};

/// Number of slots aside that each [`Policy::evict`] asks about again.
pub(crate) const ASIDE_LOOKS: u32 = 2;

/// Number of slots aside that an [`Policy::evict`] asks about again when the queues have no victim.
pub(crate) const DRY_LOOKS: u32 = 64;

/// Most slots a policy can have: lists and ghost count in 32 bits.
pub(crate) const MAX_SLOTS: u32 = 1 << 30;

/// A slot: the number of a page of the shard's part of the arena.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Slot(pub u32);

impl Slot {
    /// The slot's number, as an index.
    #[inline(always)]
    pub(crate) fn index(self) -> usize {
        wide(self.0)
    }
}

/// Mask and maximum of the hit count. An absent slot has the maximum, so that [`Policy::touch`]
/// tests one value only.
const FREQ: u8 = 3;
/// The queue of the slot; for a slot aside, the queue to which it returns.
const SMALL: u8 = 4;
const MAIN: u8 = 8;
/// Aside: out of its queue, because the caller refused it.
const ASIDE: u8 = 16;
/// State of a slot that is not resident.
const ABSENT: u8 = FREQ;

/// Numbers of the lists: index into `lens`, and distance of the sentinel behind the slots' links.
const LIST_SMALL: u32 = 0;
const LIST_MAIN: u32 = 1;
const LIST_ASIDE: u32 = 2;

#[derive(Clone, Copy)]
struct Links {
    newer: u32,
    older: u32,
    /// The key of the block. A sentinel has none.
    key: u64,
}

/// The order in which slots are evicted.
///
/// Memory, fixed by [`Policy::new`]: about 35 bytes per slot (1 state, 16 links and key, 18 ghost).
pub(crate) struct Policy {
    /// Hit count and place of every slot. A hit reads and writes nothing else.
    state: Box<[u8]>,
    /// Rings of newer and older neighbours; one sentinel per list behind the slots.
    links: Box<[Links]>,
    lens: [u32; 3],
    ghost: Ghost,
    /// This many of the slots aside, the oldest, may have become able to leave without a `readmit`.
    unasked: u32,
}

impl std::fmt::Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policy")
            .field("slots", &self.state.len())
            .field("small", &self.small_len())
            .field("main", &self.main_len())
            .field("aside", &self.aside_len())
            .field("ghost", &self.ghost_len())
            .finish_non_exhaustive()
    }
}

impl Policy {
    /// A policy for the slots `0..slots`, none of them resident. Allocates about 35 bytes per slot
    /// at once.
    ///
    /// # Panics
    ///
    /// If `slots` is above [`MAX_SLOTS`].
    #[must_use]
    pub(crate) fn new(slots: u32) -> Self {
        assert!(slots <= MAX_SLOTS, "{slots} cache slots: at most {MAX_SLOTS}");
        Self {
            state: vec![ABSENT; wide(slots)].into(),
            links: (0..slots + 3).map(|own| Links { newer: own, older: own, key: 0 }).collect(),
            lens: [0; 3],
            ghost: Ghost::new(slots - slots / 10),
            unasked: 0,
        }
    }

    /// Makes `slot` hold the block of `key`. The slot enters the small queue, or the main queue if
    /// the ghost remembers `key`; the ghost then forgets the key.
    ///
    /// Different blocks should have different keys, and one block always the same key. Keys need no
    /// good hash. If `slot` is already resident, [`Policy::remove`] is done first.
    ///
    /// # Panics
    ///
    /// If `slot` does not exist.
    pub(crate) fn insert(&mut self, slot: Slot, key: u64) {
        self.remove(slot);
        self.links[slot.index()].key = key;
        if self.ghost.take(key) {
            self.state[slot.index()] = MAIN;
            self.push_newest(LIST_MAIN, slot.0);
        } else {
            self.state[slot.index()] = SMALL;
            self.push_newest(LIST_SMALL, slot.0);
        }
    }

    /// Counts a hit. Has no effect on a slot that is not resident. Writes at most one byte, and
    /// none if the slot was already hit three times.
    #[inline]
    pub(crate) fn touch(&mut self, slot: Slot) {
        if let Some(state) = self.state.get_mut(slot.index())
            && *state & FREQ != FREQ
        {
            *state += 1;
        }
    }

    /// Lowers the hit count of a slot. False: the count was 0.
    pub(crate) fn cool(&mut self, slot: Slot) -> bool {
        match self.state.get_mut(slot.index()) {
            Some(state) if *state != ABSENT && *state & FREQ > 0 => {
                *state -= 1;
                true
            }
            _ => false,
        }
    }

    /// The block of `old` moved to `new` (copy on write), which counts as a hit: `new` takes the
    /// place and key of `old`, and `old` is no longer resident.
    ///
    /// Has no effect if `old` is not resident. If `new` is resident, it is removed first. If `old`
    /// may not leave but `new` may, the caller must call [`Policy::readmit`] for `new`.
    ///
    /// # Panics
    ///
    /// If `old` is resident and `new` does not exist.
    #[inline(always)]
    pub(crate) fn replace(&mut self, old: Slot, new: Slot) {
        if old == new {
            return self.touch(new);
        }
        self.take_place(old, new, |was| was + u8::from(was & FREQ != FREQ));
    }

    /// Like [`Self::replace`] with another slot, but counts no hit: only the bytes moved.
    pub(crate) fn move_to(&mut self, old: Slot, new: Slot) {
        debug_assert_ne!(old, new);
        self.take_place(old, new, |was| was);
    }

    #[inline(always)]
    fn take_place(&mut self, old: Slot, new: Slot, count: impl FnOnce(u8) -> u8) {
        let Some(&was) = self.state.get(old.index()) else { return };
        if was == ABSENT {
            return;
        }
        if self.is_resident(new) {
            self.remove(new);
        }
        let (from, to) = (old.index(), new.index());
        let (links, state) = (&mut self.links[..], &mut self.state[..]);
        let moved = links[from];
        links[to] = moved;
        links[wide(moved.newer)].older = new.0;
        links[wide(moved.older)].newer = new.0;
        state[from] = ABSENT;
        state[to] = count(was);
    }

    /// Removes the slot of an invalidated block; the ghost does not remember its key. Has no effect
    /// if the slot is not resident.
    pub(crate) fn remove(&mut self, slot: Slot) {
        if self.is_resident(slot) {
            self.unlink(list_of(self.state[slot.index()]), slot.0);
            self.state[slot.index()] = ABSENT;
        }
    }

    /// The slot may leave again: it became clean, or lost its last pin. Call this each time. A call
    /// tests one byte unless the slot was put aside. Has no effect if the slot is not resident.
    #[inline]
    pub(crate) fn readmit(&mut self, slot: Slot) {
        if self.state.get(slot.index()).is_some_and(|state| state & ASIDE != 0) {
            self.unlink(LIST_ASIDE, slot.0);
            self.return_to_queue(slot.0);
        }
    }

    /// Like [`Policy::readmit`], if `may_leave` agrees. Asks only about a slot that was put aside.
    #[inline(always)]
    pub(crate) fn readmit_if(&mut self, slot: Slot, may_leave: impl FnOnce() -> bool) {
        if self.state.get(slot.index()).is_some_and(|state| state & ASIDE != 0) && may_leave() {
            self.readmit(slot);
        }
    }

    /// Any slot aside may have become able to leave: [`Policy::evict`] asks about all of them once
    /// more before it gives up.
    pub(crate) fn ask_again(&mut self) {
        self.unasked = self.aside_len();
    }

    /// Takes the next victim out of the queues and returns it; the ghost remembers the key of a
    /// victim from the small queue. Slots that `may_leave` refuses stay resident. Lowers `steps` by
    /// the steps taken, without the first [`ASIDE_LOOKS`].
    ///
    /// `None` if no slot of the queues may leave and none of at most 66 that were refused before
    /// (see the module's description). A caller that waits until a slot can leave must call
    /// [`Policy::readmit`] when one can. Also `None` when `steps` reaches 0: then another call may
    /// find a victim.
    pub(crate) fn evict(
        &mut self,
        steps: &mut u32,
        mut may_leave: impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        for _ in 0..ASIDE_LOOKS.min(self.aside_len()) {
            self.look_aside(&mut may_leave);
        }
        let mut dry_looks = DRY_LOOKS.max(self.unasked).min(self.aside_len());
        loop {
            if let Some(victim) = self.evict_from_queues(steps, &mut may_leave) {
                return Some(victim);
            }
            loop {
                if dry_looks == 0 || self.aside_len() == 0 {
                    return None;
                }
                *steps = steps.checked_sub(1)?;
                dry_looks -= 1;
                if self.look_aside(&mut may_leave) {
                    break;
                }
            }
        }
    }

    /// Runs until a victim is found, the queues are empty, or `steps` is used up.
    fn evict_from_queues(
        &mut self,
        steps: &mut u32,
        may_leave: &mut impl FnMut(Slot) -> bool,
    ) -> Option<Slot> {
        loop {
            // The small queue gives while it has at least a tenth of both queues.
            let list = if 9 * u64::from(self.small_len()) >= u64::from(self.main_len()) {
                LIST_SMALL
            } else {
                LIST_MAIN
            };
            let slot = self.oldest(list)?;
            *steps = steps.checked_sub(1)?;
            let state = self.state[wide(slot)];
            let freq = state & FREQ;
            self.unlink(list, slot);
            if list == LIST_SMALL && freq > 1 {
                self.state[wide(slot)] = MAIN;
                self.push_newest(LIST_MAIN, slot);
            } else if list == LIST_MAIN && freq > 0 {
                self.state[wide(slot)] = state - 1;
                self.push_newest(LIST_MAIN, slot);
            } else if may_leave(Slot(slot)) {
                self.state[wide(slot)] = ABSENT;
                if list == LIST_SMALL {
                    self.ghost.remember(self.links[wide(slot)].key);
                }
                return Some(Slot(slot));
            } else {
                self.state[wide(slot)] = state | ASIDE;
                self.push_newest(LIST_ASIDE, slot);
            }
        }
    }

    /// Asks about the slot aside that has waited longest. True if the slot is back in its queue.
    /// There must be a slot aside.
    fn look_aside(&mut self, may_leave: &mut impl FnMut(Slot) -> bool) -> bool {
        let Some(slot) = self.oldest(LIST_ASIDE) else { return false };
        self.unasked = self.unasked.saturating_sub(1);
        self.unlink(LIST_ASIDE, slot);
        let back = may_leave(Slot(slot));
        if back {
            self.return_to_queue(slot);
        } else {
            self.push_newest(LIST_ASIDE, slot);
        }
        back
    }

    /// Moves a slot from aside (already unlinked) to the old end of its queue: its turn came when
    /// it was refused.
    fn return_to_queue(&mut self, slot: u32) {
        self.state[wide(slot)] &= !ASIDE;
        let list = list_of(self.state[wide(slot)]);
        let sentinel = self.sentinel(list);
        self.link_before(list, sentinel, slot);
    }

    /// Whether the slot holds a block. False for a number without a slot.
    #[must_use]
    #[inline]
    pub(crate) fn is_resident(&self, slot: Slot) -> bool {
        self.state.get(slot.index()).is_some_and(|&state| state != ABSENT)
    }

    /// Resident slots: small, main and aside.
    #[must_use]
    pub(crate) fn len(&self) -> u32 {
        self.lens.iter().sum()
    }

    /// Whether no slot is resident.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Slots in the small queue.
    #[must_use]
    pub(crate) fn small_len(&self) -> u32 {
        self.lens[wide(LIST_SMALL)]
    }

    /// Slots in the main queue.
    #[must_use]
    pub(crate) fn main_len(&self) -> u32 {
        self.lens[wide(LIST_MAIN)]
    }

    /// Resident slots in neither queue: refused at the last look.
    #[must_use]
    pub(crate) fn aside_len(&self) -> u32 {
        self.lens[wide(LIST_ASIDE)]
    }

    /// Remembered keys of blocks that left the small queue; at most nine tenths of the slots.
    #[must_use]
    pub(crate) fn ghost_len(&self) -> u32 {
        self.ghost.len()
    }

    /// The sentinel's neighbours are the list's ends: `older` is its newest slot, `newer` its
    /// oldest.
    fn sentinel(&self, list: u32) -> u32 {
        // `new` bounds the number of slots, so all link numbers fit in 32 bits.
        narrow::<u32, _>(self.state.len()) + list
    }

    fn oldest(&self, list: u32) -> Option<u32> {
        let sentinel = self.sentinel(list);
        let oldest = self.links[wide(sentinel)].newer;
        (oldest != sentinel).then_some(oldest)
    }

    fn push_newest(&mut self, list: u32, slot: u32) {
        let newest = self.links[self.sentinel(list) as usize].older;
        self.link_before(list, newest, slot);
    }

    /// Links `slot` on the newer side of `older`.
    fn link_before(&mut self, list: u32, older: u32, slot: u32) {
        let newer = self.links[wide(older)].newer;
        let links = &mut self.links[wide(slot)];
        (links.newer, links.older) = (newer, older);
        self.links[wide(newer)].older = slot;
        self.links[wide(older)].newer = slot;
        self.lens[wide(list)] += 1;
    }

    fn unlink(&mut self, list: u32, slot: u32) {
        let Links { newer, older, .. } = self.links[wide(slot)];
        self.links[wide(newer)].older = older;
        self.links[wide(older)].newer = newer;
        self.lens[wide(list)] -= 1;
    }
}

/// The list a resident slot with this state is linked in.
fn list_of(state: u8) -> u32 {
    if state & ASIDE != 0 {
        LIST_ASIDE
    } else if state & SMALL != 0 {
        LIST_SMALL
    } else {
        LIST_MAIN
    }
}
