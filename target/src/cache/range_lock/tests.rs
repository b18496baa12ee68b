//! The locks against a list that is searched completely.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

/// splitmix64.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

struct Entry {
    id: LockId,
    volume: u16,
    range: Range<u64>,
    owner: u32,
    held: bool,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

/// The locks, and a list of all of them in order of arrival.
struct Pair {
    locks: RangeLocks,
    entries: Vec<Entry>,
    next_owner: u32,
    /// The locks released last.
    past: VecDeque<LockId>,
}

impl Pair {
    fn new(capacity: usize) -> Self {
        Self {
            locks: RangeLocks::new(capacity),
            entries: Vec::new(),
            next_owner: 0,
            past: VecDeque::new(),
        }
    }

    fn acquire(&mut self, volume: u16, range: Range<u64>) {
        let others = || self.entries.iter().filter(|e| e.volume == volume);
        let held = !others().any(|e| overlap(&e.range, &range));
        assert_eq!(self.locks.overlaps(volume, range.clone()), !held);
        let owner = self.next_owner;
        self.next_owner += 1;
        let acquired = self.locks.acquire(volume, range.clone(), owner);
        let id = acquired.id();
        assert_eq!(acquired, if held { Acquired::Now(id) } else { Acquired::Queued(id) });
        assert!(self.entries.iter().all(|e| e.id != id));
        self.entries.push(Entry { id, volume, range, owner, held });
        assert_eq!(self.locks.len(), self.entries.len());
    }

    fn release(&mut self, at: usize) {
        let entry = self.entries.remove(at);
        let mut granted = vec![u32::MAX];
        self.locks.release(entry.id, &mut granted);
        let mut expected = vec![u32::MAX];
        for i in 0..self.entries.len() {
            let (before, rest) = self.entries.split_at_mut(i);
            let e = &mut rest[0];
            let in_way = |b: &Entry| b.volume == e.volume && overlap(&b.range, &e.range);
            if !e.held && !before.iter().any(in_way) {
                e.held = true;
                expected.push(e.owner);
            }
        }
        assert_eq!(granted, expected);
        assert_eq!(self.locks.len(), self.entries.len());
        assert_eq!(self.locks.is_empty(), self.entries.is_empty());
        // The id is invalid: a second release has no effect.
        self.locks.release(entry.id, &mut granted);
        assert_eq!((granted.len(), self.locks.len()), (expected.len(), self.entries.len()));
        assert!(!self.locks.is_held(entry.id));
        self.past.push_back(entry.id);
        if self.past.len() > 64 {
            self.past.pop_front();
        }
    }

    /// Checks the invariants, and that every link is in its chain or list.
    fn check(&self) {
        assert!(self.past.iter().all(|id| self.locks.find(*id).is_none()));
        for (i, e) in self.entries.iter().enumerate() {
            assert_eq!(self.locks.is_held(e.id), e.held);
            let before = self.entries[..i]
                .iter()
                .filter(|b| b.volume == e.volume && overlap(&b.range, &e.range));
            assert!(!e.held || before.clone().all(|b| !b.held), "two hold the same bytes");
            let index = self.locks.find(e.id).unwrap();
            assert_eq!(self.locks.locks[index].waits_for as usize, before.count());
        }
        assert_eq!(self.locks.waiting, self.entries.iter().filter(|e| !e.held).count());
        let (mut linked, mut expected) = (0, 0);
        for head in self.locks.chains.iter().chain([&self.locks.long]) {
            let mut prev = NONE;
            for link in self.locks.chain(*head) {
                assert_eq!(self.locks.links[link as usize].prev, prev);
                assert!(self.locks.locks[link as usize / STRIPES].is_alive());
                prev = link;
                linked += 1;
            }
        }
        for e in &self.entries {
            expected += match shelf(&e.range) {
                Shelf::Nowhere => 0,
                Shelf::Stripes(_, count) => count,
                Shelf::Long => 1,
            };
        }
        assert_eq!(linked, expected);
    }

    /// Releases one holder after the other, the newest or the oldest first: in the end all locks
    /// were held.
    fn drain(&mut self, newest_first: bool) {
        while !self.entries.is_empty() {
            let held = |e: &Entry| e.held;
            let at = if newest_first {
                self.entries.iter().rposition(held)
            } else {
                self.entries.iter().position(held)
            };
            self.release(at.expect("all wait and none is held"));
            self.check();
        }
        assert_eq!(self.locks.waiting, 0);
    }
}

/// Typical ranges: mostly small, some up to 4 MiB, a few without end or bytes.
fn random_range(rng: &mut Rng, blocks: u64) -> Range<u64> {
    let start = rng.below(blocks) * 4096;
    let len = match rng.below(100) {
        0..60 => 4096 * (1 + rng.below(4)),
        60..80 => 4096 * (1 + rng.below(256)),
        80..92 => 4096 * (1 + rng.below(1024)),
        92..95 => rng.below(64) * MIB,
        95..96 => return start..u64::MAX,
        96..97 => return 0..u64::MAX,
        97..98 => return u64::MAX - rng.below(9 * MIB)..u64::MAX,
        98..99 => 0,
        _ => return start..start / 2,
    };
    start..start + len
}

#[test]
fn many_operations_agree_with_the_model() {
    // Few blocks: much waiting. Many: much in flight. A small capacity grows and has long chains.
    for (seed, capacity, in_flight, blocks, volumes) in [
        (1, 0, 10, 3_000, 1),
        (2, 8, 100, 30_000, 2),
        (3, 64, 300, 3_000_000, 3),
        (4, 512, 300, 300_000_000, 2),
        (5, 16, 40, 1_000, 3),
    ] {
        println!("seed {seed}");
        let mut rng = Rng(seed);
        let mut pair = Pair::new(capacity);
        let mut waited = 0;
        for n in 0..20_000u32 {
            let len = pair.entries.len() as u64;
            if len < in_flight && (len == 0 || rng.below(in_flight) >= len / 2) {
                let volume = u16::try_from(rng.below(volumes)).unwrap() * 777;
                pair.acquire(volume, random_range(&mut rng, blocks));
                waited += u32::from(!pair.entries.last().unwrap().held);
            } else {
                // Mostly releases a held lock; sometimes withdraws a waiting one.
                let at = usize::try_from(rng.below(len)).unwrap();
                let held = pair.entries[at..].iter().position(|e| e.held);
                let at = if rng.below(20) == 0 { at } else { held.map_or(0, |more| at + more) };
                pair.release(at);
            }
            if u64::from(n) % in_flight == 0 {
                pair.check();
            }
        }
        assert!(waited > 500, "seed {seed}: {waited} waited, too few to tell");
        pair.drain(seed % 2 == 0);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Acquire(u16, Range<u64>),
    Release(prop::sample::Index),
}

fn op() -> impl Strategy<Value = Op> {
    // Quarters of a stripe: ends and starts meet, on stripes and inside.
    let quarter = MIB / 4;
    let range = prop_oneof![
        8 => (0u64..24, 0u64..24).prop_map(move |(s, l)| s * quarter..(s + l) * quarter),
        2 => (0u64..64).prop_map(|s| s..s + 1),
        1 => Just(0..u64::MAX),
        1 => (0u64..24).prop_map(move |s| s * quarter + 1..u64::MAX),
        1 => any::<(u64, u64)>().prop_map(|(s, e)| s..e),
    ];
    prop_oneof![
        3 => (0u16..2, range).prop_map(|(v, r)| Op::Acquire(v, r)),
        2 => any::<prop::sample::Index>().prop_map(Op::Release),
    ]
}

proptest! {
    #[test]
    fn few_operations_agree_with_the_model(
        ops in proptest::collection::vec(op(), 0..60),
        newest_first: bool,
    ) {
        let mut pair = Pair::new(1);
        for op in ops {
            match op {
                Op::Acquire(volume, range) => pair.acquire(volume, range),
                Op::Release(at) if !pair.entries.is_empty() => {
                    pair.release(at.index(pair.entries.len()));
                }
                Op::Release(_) => {}
            }
            pair.check();
        }
        pair.drain(newest_first);
    }
}

#[test]
fn waiters_take_turns_in_the_order_they_came() {
    let mut locks = RangeLocks::new(4);
    let mut granted = Vec::new();
    let Acquired::Now(first) = locks.acquire(1, 0..4096, 10) else {
        panic!("there was no other lock")
    };
    let Acquired::Queued(wide) = locks.acquire(1, 0..u64::MAX, 11) else { panic!("overtook") };
    // Overlaps no held lock, but a waiting one.
    let Acquired::Queued(far) = locks.acquire(1, MIB..MIB + 1, 12) else { panic!("overtook") };
    let Acquired::Queued(near) = locks.acquire(1, 0..1, 13) else { panic!("overtook") };
    let Acquired::Now(_) = locks.acquire(2, 0..u64::MAX, 14) else { panic!("other volume") };
    locks.release(first, &mut granted);
    assert_eq!(granted, [11]);
    locks.release(wide, &mut granted);
    assert_eq!(granted, [11, 12, 13]);
    assert!(locks.is_held(far) && locks.is_held(near));
}

#[test]
fn a_withdrawn_lock_lets_others_pass() {
    let mut locks = RangeLocks::new(4);
    let mut granted = Vec::new();
    let _held = locks.acquire(0, 0..10, 1);
    let waits = locks.acquire(0, 5..20, 2).id();
    let behind = locks.acquire(0, 15..30, 3).id();
    assert!(!locks.is_held(waits) && !locks.is_held(behind));
    locks.release(waits, &mut granted);
    assert_eq!(granted, [3]);
    assert!(locks.is_held(behind));
    assert_eq!(locks.len(), 2);
}

#[test]
fn a_range_without_bytes_blocks_no_lock() {
    let mut locks = RangeLocks::new(4);
    let _all = locks.acquire(0, 0..u64::MAX, 1);
    for range in [5..5, Range { start: 9, end: 3 }, u64::MAX..u64::MAX, 0..0] {
        assert!(!locks.overlaps(0, range.clone()));
        let Acquired::Now(id) = locks.acquire(0, range, 2) else { panic!("waits for nothing") };
        assert!(locks.is_held(id));
        let mut granted = Vec::new();
        locks.release(id, &mut granted);
        assert_eq!((granted.len(), locks.len()), (0, 1));
    }
}

#[test]
fn memory_is_reserved_at_first_and_doubles_only_beyond_it() {
    let mut locks = RangeLocks::new(100);
    let ids: Vec<_> = (0..100).map(|n| locks.acquire(0, 0..1, n).id()).collect();
    assert_eq!(locks.locks.len(), 100);
    let scratch = locks.granted.capacity();
    let _more = locks.acquire(0, 0..1, 100);
    assert_eq!((locks.locks.len(), locks.len()), (200, 101));
    let mut granted = Vec::new();
    for (n, id) in ids.into_iter().enumerate() {
        granted.clear();
        locks.release(id, &mut granted);
        assert_eq!(granted, [u32::try_from(n).unwrap() + 1]);
    }
    assert!(scratch >= 100);
}

#[test]
fn a_released_id_names_no_other_lock() {
    let mut locks = RangeLocks::new(1);
    let mut last = None;
    for n in 0..10_000 {
        let id = locks.acquire(0, 0..1, n).id();
        if let Some(last) = last.replace(id) {
            assert!(!locks.is_held(last));
            locks.release(last, &mut Vec::new());
        }
        assert!(locks.is_held(id));
        locks.release(id, &mut Vec::new());
        assert!(locks.is_empty());
    }
}

#[test]
fn requests_of_4_mib_are_found_by_stripe() {
    let stripes = |range: Range<u64>| match shelf(&range) {
        Shelf::Nowhere => 0,
        Shelf::Stripes(_, count) => count,
        Shelf::Long => usize::MAX,
    };
    assert_eq!(stripes(MIB - 4096..MIB), 1);
    assert_eq!(stripes(MIB - 1..MIB + 1), 2);
    assert_eq!(stripes(0..4 * MIB), 4);
    assert_eq!(stripes(4096..4 * MIB + 4096), 5);
    assert_eq!(stripes(0..5 * MIB), 5);
    assert_eq!(stripes(0..5 * MIB + 1), usize::MAX);
    assert_eq!(stripes(u64::MAX - 4 * MIB..u64::MAX), 5);
}
