//! [`RangeLocks`]: fair exclusive locks on byte ranges of volumes.
//!
//! A lock waits for every earlier lock, held or waiting, that overlaps it on the same volume. So
//! two overlapping locks are never held together, and a later lock never overtakes an earlier one
//! that it overlaps. A lock waits for earlier locks only, so locks cannot wait in a circle: when
//! all holders release, all locks are held in the end. (An owner that keeps one lock until it gets
//! a second, overlapping one waits for itself: owners are only numbers here.)
//!
//! A range without bytes (`start >= end`) overlaps nothing. Its lock is held at once and blocks no
//! other lock. It must be released like any other.
//!
//! Each waiting lock counts the locks it waits for. A hash table of chains finds locks by the 1 MiB
//! stripes that they touch. Ranges over more than 5 stripes (every range above 4 MiB) are in a long
//! list that every acquire walks. An acquire looks at the locks that share a stripe with it. A
//! release looks at no other lock while none waits. A range in the long list looks at all locks.
//!
//! Invariants: the count of a lock is the number of earlier locks that overlap it; the lock is held
//! when the count is 0. A lock is linked once in the chain of each of its stripes or once in the
//! long list; a lock without bytes is linked nowhere.

#[cfg(test)]
mod tests;

use std::ops::Range;

use rblk_protocol::width::{narrow, wide, wide64};

const STRIPE_SHIFT: u32 = 20;

/// Most stripes of a lock that is found by stripe: an unaligned range of 4 MiB touches this many.
const STRIPES: usize = LINKS as usize;

/// Links of a lock: one for each of its stripes.
const LINKS: u32 = 5;

const NONE: u32 = u32::MAX;

/// Bits of a [`LockId`] that name its entry. The rest counts the uses of the entry.
const INDEX_BITS: u32 = 20;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
const USE_MASK: u32 = u32::MAX >> INDEX_BITS;

/// Names a lock from [`RangeLocks::acquire`] to [`RangeLocks::release`]. After that the name is
/// invalid until 4096 later uses of the same entry; then it could name another lock.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct LockId(u32);

/// The result of [`RangeLocks::acquire`].
#[must_use = "a lock is held or waits until it is released"]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Acquired {
    /// The lock is held.
    Now(LockId),
    /// The lock waits for earlier ones. A [`RangeLocks::release`] will name its owner.
    Queued(LockId),
}

impl Acquired {
    /// The lock, held or not.
    #[must_use]
    pub(crate) fn id(self) -> LockId {
        match self {
            Self::Now(id) | Self::Queued(id) => id,
        }
    }
}

#[derive(Clone, Copy)]
struct Lock {
    start: u64,
    end: u64,
    /// Order of acquires.
    arrival: u64,
    owner: u32,
    /// Earlier locks that overlap this one.
    waits_for: u32,
    /// Times this entry was used, in the bits of `USE_MASK`.
    uses: u32,
    /// The [`LockId`] of the lock; `NONE` in an unused entry.
    id: u32,
    /// The lock's chain, if the lock lies in one stripe; else `NONE`.
    chain: u32,
    volume: u16,
}

impl Lock {
    fn is_alive(&self) -> bool {
        self.id != NONE
    }

    fn overlaps(&self, volume: u16, range: &Range<u64>) -> bool {
        self.volume == volume && self.start < range.end && range.start < self.end
    }
}

/// One link of a lock in a chain. Lock `i` has the links `i * STRIPES + k`, `k` for its stripe
/// number `k`; the first link also serves in the long list and the free list.
#[derive(Clone, Copy)]
struct ChainLink {
    next: u32,
    /// The link before, or `NONE`.
    prev: u32,
}

/// The place where the links of a range belong.
enum Shelf {
    Nowhere,
    /// First stripe and number of stripes.
    Stripes(u64, usize),
    Long,
}

fn shelf(range: &Range<u64>) -> Shelf {
    if range.start >= range.end {
        return Shelf::Nowhere;
    }
    let first = range.start >> STRIPE_SHIFT;
    match usize::try_from(((range.end - 1) >> STRIPE_SHIFT) - first) {
        Ok(more) if more < STRIPES => Shelf::Stripes(first, more + 1),
        _ => Shelf::Long,
    }
}

/// Locks held and waiting. About 110 bytes for each lock of the capacity.
pub(crate) struct RangeLocks {
    locks: Vec<Lock>,
    links: Vec<ChainLink>,
    /// First link of each chain, by hash of volume and stripe. The length is a power of two, at
    /// least twice the locks.
    chains: Vec<u32>,
    /// First link of the locks over many stripes.
    long: u32,
    /// First of the unused entries; each names the next in `next` of its first link.
    free: u32,
    waiting: usize,
    next_arrival: u64,
    /// Locks granted by the current release: arrival and owner.
    granted: Vec<(u64, u32)>,
}

impl std::fmt::Debug for RangeLocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RangeLocks")
            .field("capacity", &self.locks.len())
            .field("len", &self.len())
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

impl RangeLocks {
    /// Memory for `capacity` locks, held or waiting. More locks at a time double it, which
    /// allocates.
    #[must_use]
    pub(crate) fn new(capacity: usize) -> Self {
        let mut new = Self {
            locks: Vec::new(),
            links: Vec::new(),
            chains: Vec::new(),
            long: NONE,
            free: NONE,
            waiting: 0,
            next_arrival: 0,
            granted: Vec::new(),
        };
        new.grow(capacity.max(8));
        new
    }

    /// Asks for `range` (bytes) of `volume`. The lock is held at once, or later, when
    /// [`RangeLocks::release`] names its `owner`. A waiting lock blocks later locks like a held
    /// one.
    ///
    /// # Panics
    ///
    /// At 2^20 locks.
    #[inline(always)]
    pub(crate) fn acquire(&mut self, volume: u16, range: Range<u64>, owner: u32) -> Acquired {
        let stripe = range.start >> STRIPE_SHIFT;
        if range.start >= range.end || (range.end - 1) >> STRIPE_SHIFT != stripe {
            return self.acquire_long(volume, range, owner);
        }
        // The usual case: a range in one stripe.
        if self.free == NONE {
            self.grow(self.locks.len() * 2);
        }
        let chain = self.bucket(volume, stripe);
        let waits_for =
            if self.is_alone(chain) { 0 } else { self.count_overlapping(volume, &range) };
        self.enter_chain(chain, volume, range, owner, waits_for)
    }

    /// The lock on `range`, which has bytes and lies in one stripe, if no other lock overlaps it;
    /// the lock is then held. `None`: another lock overlaps the range, and nothing changed.
    ///
    /// # Panics
    ///
    /// At 2^20 locks.
    #[inline(always)]
    pub(crate) fn try_acquire(&mut self, volume: u16, range: Range<u64>) -> Option<LockId> {
        let stripe = range.start >> STRIPE_SHIFT;
        debug_assert!(range.start < range.end && (range.end - 1) >> STRIPE_SHIFT == stripe);
        if self.free == NONE {
            self.grow(self.locks.len() * 2);
        }
        let chain = self.bucket(volume, stripe);
        if !self.is_alone(chain) && self.count_overlapping(volume, &range) > 0 {
            return None;
        }
        Some(self.enter_chain(chain, volume, range, NONE, 0).id())
    }

    /// Whether a range of one stripe has no other lock to compare with.
    #[inline(always)]
    fn is_alone(&self, chain: usize) -> bool {
        self.chains[chain] == NONE && self.long == NONE
    }

    /// Takes a free entry for a lock of one stripe. The caller ensures that one exists.
    #[inline(always)]
    fn enter_chain(
        &mut self,
        chain: usize,
        volume: u16,
        range: Range<u64>,
        owner: u32,
        waits_for: u32,
    ) -> Acquired {
        let (index, link) = (wide(self.free), self.free * LINKS);
        // Like `push`, but looks each entry up once: every write passes here.
        let (head, own) = (&mut self.chains[chain], &mut self.links[wide(link)]);
        let next = std::mem::replace(head, link);
        self.free = own.next;
        *own = ChainLink { next, prev: NONE };
        if next != NONE {
            self.links[wide(next)].prev = link;
        }
        self.enter(index, volume, range, owner, waits_for, number(chain))
    }

    /// Acquires a lock of no stripe or of several stripes.
    #[inline(never)]
    fn acquire_long(&mut self, volume: u16, range: Range<u64>, owner: u32) -> Acquired {
        // A range without bytes moves to a place where no lock can overlap it, not even one that
        // covers the whole volume.
        let range = if range.start < range.end { range } else { u64::MAX..u64::MAX };
        if self.free == NONE {
            self.grow(self.locks.len() * 2);
        }
        let waits_for = self.count_overlapping(volume, &range);
        let index = wide(self.free);
        self.free = self.links[index * STRIPES].next;
        self.link(index, volume, &range);
        self.enter(index, volume, range, owner, waits_for, NONE)
    }

    /// Writes the entry of a linked lock.
    #[inline(always)]
    fn enter(
        &mut self,
        index: usize,
        volume: u16,
        range: Range<u64>,
        owner: u32,
        waits_for: u32,
        chain: u32,
    ) -> Acquired {
        let lock = &mut self.locks[index];
        let uses = lock.uses;
        let id = uses << INDEX_BITS | number(index);
        *lock = Lock {
            start: range.start,
            end: range.end,
            arrival: self.next_arrival,
            owner,
            waits_for,
            uses,
            id,
            chain,
            volume,
        };
        self.next_arrival += 1;
        if waits_for == 0 {
            Acquired::Now(LockId(id))
        } else {
            self.waiting += 1;
            Acquired::Queued(LockId(id))
        }
    }

    /// Ends a held lock, or withdraws a waiting one. Appends the owners of newly granted locks to
    /// `granted` in the order in which they acquired. Has no effect if the lock does not exist.
    #[inline(always)]
    pub(crate) fn release(&mut self, lock: LockId, granted: &mut Vec<u32>) {
        let Some(index) = self.find(lock) else { return };
        let lock = &mut self.locks[index];
        lock.id = NONE;
        lock.uses = (lock.uses + 1) & USE_MASK;
        let chain = lock.chain;
        if chain == NONE || self.waiting > 0 {
            self.release_slowly(index, granted);
        } else {
            self.unlink_from(wide(chain), index * STRIPES);
        }
        self.links[index * STRIPES].next = self.free;
        self.free = number(index);
    }

    /// Removes a lock that lies in several stripes, or that other locks may wait for.
    #[inline(never)]
    fn release_slowly(&mut self, index: usize, granted: &mut Vec<u32>) {
        let Lock { start, end, arrival, waits_for, volume, .. } = self.locks[index];
        self.unlink(index, volume, &(start..end));
        if waits_for > 0 {
            self.waiting -= 1;
        }
        if self.waiting > 0 {
            self.grant(volume, &(start..end), arrival, granted);
        }
    }

    /// Appends the owners of locks granted by the removal of a lock.
    #[inline(never)]
    fn grant(&mut self, volume: u16, range: &Range<u64>, arrival: u64, granted: &mut Vec<u32>) {
        let mut now = std::mem::take(&mut self.granted);
        self.for_each_overlapping(volume, range, |locks, other| {
            let other = &mut locks[other];
            if other.arrival > arrival {
                other.waits_for -= 1;
                if other.waits_for == 0 {
                    now.push((other.arrival, other.owner));
                }
            }
        });
        self.waiting -= now.len();
        now.sort_unstable();
        granted.extend(now.drain(..).map(|(_, owner)| owner));
        self.granted = now;
    }

    /// Whether the lock exists and is held.
    #[must_use]
    pub(crate) fn is_held(&self, lock: LockId) -> bool {
        self.find(lock).is_some_and(|index| self.locks[index].waits_for == 0)
    }

    /// Whether any lock, held or waiting, overlaps `range` of `volume`.
    #[must_use]
    pub(crate) fn overlaps(&self, volume: u16, range: Range<u64>) -> bool {
        match shelf(&range) {
            Shelf::Nowhere => false,
            Shelf::Long => self.locks.iter().any(|l| l.is_alive() && l.overlaps(volume, &range)),
            Shelf::Stripes(first, count) => {
                let overlaps =
                    |link: u32| self.locks[wide(link) / STRIPES].overlaps(volume, &range);
                self.chain(self.long).any(overlaps)
                    || (first..first + wide64(count))
                        .any(|s| self.chain(self.chains[self.bucket(volume, s)]).any(overlaps))
            }
        }
    }

    /// Locks, held or waiting. Counts them: slow.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.locks.iter().filter(|lock| lock.is_alive()).count()
    }

    /// Whether there are no locks.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entry of a lock that was not released.
    fn find(&self, lock: LockId) -> Option<usize> {
        let index = wide(lock.0 & INDEX_MASK);
        let entry = self.locks.get(index)?;
        (entry.id == lock.0).then_some(index)
    }

    #[inline(never)]
    fn count_overlapping(&mut self, volume: u16, range: &Range<u64>) -> u32 {
        let mut count = 0;
        self.for_each_overlapping(volume, range, |_, _| count += 1);
        count
    }

    /// Calls `f` once for each overlapping lock.
    fn for_each_overlapping(
        &mut self,
        volume: u16,
        range: &Range<u64>,
        mut f: impl FnMut(&mut [Lock], usize),
    ) {
        match shelf(range) {
            Shelf::Nowhere => {}
            Shelf::Long => {
                for index in 0..self.locks.len() {
                    let lock = &self.locks[index];
                    if lock.is_alive() && lock.overlaps(volume, range) {
                        f(&mut self.locks, index);
                    }
                }
            }
            Shelf::Stripes(first, count) => {
                let mut link = self.long;
                while link != NONE {
                    let index = wide(link) / STRIPES;
                    if self.locks[index].overlaps(volume, range) {
                        f(&mut self.locks, index);
                    }
                    link = self.links[wide(link)].next;
                }
                for stripe in first..first + wide64(count) {
                    let mut link = self.chains[self.bucket(volume, stripe)];
                    while link != NONE {
                        let index = wide(link) / STRIPES;
                        let lock = &self.locks[index];
                        // A lock that shares several stripes, or stripes that share a chain, must
                        // count once: by the link of the first common stripe.
                        let lock_first = lock.start >> STRIPE_SHIFT;
                        let link_stripe = lock_first + wide64(wide(link) % STRIPES);
                        if lock.overlaps(volume, range)
                            && link_stripe == stripe
                            && stripe == first.max(lock_first)
                        {
                            f(&mut self.locks, index);
                        }
                        link = self.links[wide(link)].next;
                    }
                }
            }
        }
    }

    fn chain(&self, head: u32) -> impl Iterator<Item = u32> {
        let some = |link: u32| (link != NONE).then_some(link);
        std::iter::successors(some(head), move |&link| some(self.links[wide(link)].next))
    }

    /// The chain of a range that lies in one stripe, the usual case; else `NONE`.
    #[inline]
    fn chain_of(&self, volume: u16, range: &Range<u64>) -> u32 {
        let stripe = range.start >> STRIPE_SHIFT;
        let one = range.start < range.end && (range.end - 1) >> STRIPE_SHIFT == stripe;
        if one { number(self.bucket(volume, stripe)) } else { NONE }
    }

    #[inline]
    fn bucket(&self, volume: u16, stripe: u64) -> usize {
        let hash = (stripe ^ u64::from(volume) << 44).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // Scales the upper half to the number of chains.
        wide(((hash >> 32) * wide64(self.chains.len())) >> 32)
    }

    fn link(&mut self, index: usize, volume: u16, range: &Range<u64>) {
        match shelf(range) {
            Shelf::Nowhere => {}
            Shelf::Long => {
                let head = self.long;
                self.long = self.push(head, number(index * STRIPES));
            }
            Shelf::Stripes(first, count) => {
                for k in 0..count {
                    let bucket = self.bucket(volume, first + wide64(k));
                    let head = self.chains[bucket];
                    self.chains[bucket] = self.push(head, number(index * STRIPES + k));
                }
            }
        }
    }

    /// Puts `link` before `head` and returns it as the new head.
    #[inline(always)]
    fn push(&mut self, head: u32, link: u32) -> u32 {
        self.links[wide(link)] = ChainLink { next: head, prev: NONE };
        if head != NONE {
            self.links[wide(head)].prev = link;
        }
        link
    }

    fn unlink(&mut self, index: usize, volume: u16, range: &Range<u64>) {
        match shelf(range) {
            Shelf::Nowhere => {}
            Shelf::Long => {
                if let Some(head) = self.pull(index * STRIPES) {
                    self.long = head;
                }
            }
            Shelf::Stripes(first, count) => {
                for k in 0..count {
                    let bucket = self.bucket(volume, first + wide64(k));
                    self.unlink_from(bucket, index * STRIPES + k);
                }
            }
        }
    }

    /// Takes a link out of this chain.
    #[inline]
    fn unlink_from(&mut self, bucket: usize, link: usize) {
        if let Some(head) = self.pull(link) {
            self.chains[bucket] = head;
        }
    }

    /// Takes `link` out of its chain. Returns the chain's new head if `link` was the first.
    #[inline(always)]
    fn pull(&mut self, link: usize) -> Option<u32> {
        let ChainLink { next, prev } = self.links[link];
        if next != NONE {
            self.links[wide(next)].prev = prev;
        }
        if prev == NONE {
            return Some(next);
        }
        self.links[wide(prev)].next = next;
        None
    }

    /// Grows to `capacity` entries and rebuilds all chains.
    #[cold]
    fn grow(&mut self, capacity: usize) {
        // The largest index would make the last name `NONE`.
        let capacity = capacity.min(wide(INDEX_MASK));
        let old = self.locks.len();
        assert!(capacity > old, "{old} range locks at a time");
        let unused = Lock {
            start: 0,
            end: 0,
            arrival: 0,
            owner: 0,
            waits_for: 0,
            uses: 0,
            id: NONE,
            chain: NONE,
            volume: 0,
        };
        self.locks.resize(capacity, unused);
        self.links.resize(capacity * STRIPES, ChainLink { next: NONE, prev: NONE });
        self.granted.reserve(capacity);
        for index in (old..capacity).rev() {
            self.links[index * STRIPES].next = self.free;
            self.free = number(index);
        }
        self.chains.clear();
        self.chains.resize((capacity * 2).next_power_of_two(), NONE);
        self.long = NONE;
        for index in 0..old {
            let Lock { start, end, volume, .. } = self.locks[index];
            if self.locks[index].is_alive() {
                self.locks[index].chain = self.chain_of(volume, &(start..end));
                self.link(index, volume, &(start..end));
            }
        }
    }
}

/// Entries, chains and links are below 2^20 × 5: `grow` bounds them.
#[inline(always)]
fn number(index: usize) -> u32 {
    narrow(index)
}
