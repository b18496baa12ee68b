//! The policy against a model that is plainly right, and on traces against LRU.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use proptest::prelude::*;

use super::ghost::CELLS;
use super::*;

/// splitmix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u32) -> u32 {
        // Below `bound`, which fits.
        u32::try_from(((self.next() >> 32) * u64::from(bound)) >> 32).unwrap()
    }

    /// From 0 to 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The policy as its description reads, with queues that are searched. Newest in front.
struct Model {
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    aside: VecDeque<u32>,
    from_main: HashSet<u32>,
    freq: HashMap<u32, u8>,
    keys: HashMap<u32, u64>,
    /// The last keys in the order in which they left; `None`: forgotten since.
    ghost: VecDeque<Option<u64>>,
    ghost_max: usize,
}

impl Model {
    fn new(slots: u32) -> Self {
        Self {
            small: VecDeque::new(),
            main: VecDeque::new(),
            aside: VecDeque::new(),
            from_main: HashSet::new(),
            freq: HashMap::new(),
            keys: HashMap::new(),
            ghost: VecDeque::new(),
            ghost_max: ((slots - slots / 10) as usize).max(1),
        }
    }

    fn ghost_take(&mut self, key: u64) -> bool {
        let found = self.ghost.iter_mut().find(|k| **k == Some(key));
        found.map(|k| *k = None).is_some()
    }

    fn ghost_remember(&mut self, key: u64, bucket: impl Fn(u64) -> usize) {
        self.ghost_take(key);
        if self.ghost.len() == self.ghost_max {
            self.ghost.pop_front();
        }
        let own = |k: &Option<u64>| k.is_some_and(|k| bucket(k) == bucket(key));
        if self.ghost.iter().filter(|k| own(k)).count() == CELLS {
            *self.ghost.iter_mut().find(|k| own(k)).unwrap() = None;
        }
        self.ghost.push_back(Some(key));
    }

    fn ghost_len(&self) -> usize {
        self.ghost.iter().flatten().count()
    }

    fn insert(&mut self, slot: u32, key: u64) {
        self.remove(slot);
        self.keys.insert(slot, key);
        self.freq.insert(slot, 0);
        if self.ghost_take(key) {
            self.from_main.insert(slot);
            self.main.push_front(slot);
        } else {
            self.small.push_front(slot);
        }
    }

    fn touch(&mut self, slot: u32) {
        if let Some(freq) = self.freq.get_mut(&slot) {
            *freq = (*freq + 1).min(3);
        }
    }

    fn remove(&mut self, slot: u32) {
        for queue in [&mut self.small, &mut self.main, &mut self.aside] {
            queue.retain(|s| *s != slot);
        }
        self.from_main.remove(&slot);
        self.freq.remove(&slot);
        self.keys.remove(&slot);
    }

    fn replace(&mut self, old: u32, new: u32) {
        let Some(&freq) = self.freq.get(&old) else { return };
        if old != new {
            self.remove(new);
            for queue in [&mut self.small, &mut self.main, &mut self.aside] {
                queue.iter_mut().filter(|s| **s == old).for_each(|s| *s = new);
            }
            self.freq.insert(new, freq);
            self.keys.insert(new, self.keys[&old]);
            if self.from_main.contains(&old) {
                self.from_main.insert(new);
            }
            self.remove(old);
        }
        self.touch(new);
    }

    fn readmit(&mut self, slot: u32) {
        if self.aside.contains(&slot) {
            self.aside.retain(|s| *s != slot);
            if self.from_main.contains(&slot) {
                self.main.push_back(slot);
            } else {
                self.small.push_back(slot);
            }
        }
    }

    /// `asked`: the slots asked about, in order.
    fn evict(
        &mut self,
        stuck: &HashSet<u32>,
        asked: &mut Vec<u32>,
        bucket: impl Fn(u64) -> usize,
    ) -> Option<u32> {
        let look = |model: &mut Self, asked: &mut Vec<u32>| {
            let slot = *model.aside.back().unwrap();
            asked.push(slot);
            if stuck.contains(&slot) {
                model.aside.rotate_right(1);
            } else {
                model.readmit(slot);
            }
        };
        for _ in 0..self.aside.len().min(2) {
            look(self, asked);
        }
        let mut left = self.aside.len().min(64);
        loop {
            if self.small.is_empty() && self.main.is_empty() {
                if left == 0 || self.aside.is_empty() {
                    return None;
                }
                left -= 1;
                look(self, asked);
                continue;
            }
            let from_small = self.small.len() * 10 >= self.small.len() + self.main.len();
            let queue = if from_small { &mut self.small } else { &mut self.main };
            let slot = queue.pop_back().unwrap();
            let freq = self.freq.get_mut(&slot).unwrap();
            if from_small && *freq > 1 {
                *freq = 0;
                self.from_main.insert(slot);
                self.main.push_front(slot);
                continue;
            }
            if !from_small && *freq > 0 {
                *freq -= 1;
                self.main.push_front(slot);
                continue;
            }
            asked.push(slot);
            if stuck.contains(&slot) {
                self.aside.push_front(slot);
                continue;
            }
            let key = self.keys[&slot];
            self.remove(slot);
            if from_small {
                self.ghost_remember(key, bucket);
            }
            return Some(slot);
        }
    }
}

/// Slots of a list, newest first.
fn order(policy: &Policy, list: u32) -> VecDeque<u32> {
    let sentinel = policy.sentinel(list);
    let mut order = VecDeque::new();
    let mut at = policy.links[sentinel as usize].older;
    while at != sentinel {
        order.push_back(at);
        assert!(order.len() <= policy.state.len(), "a list that does not end");
        at = policy.links[at as usize].older;
    }
    order
}

struct Pair {
    policy: Policy,
    model: Model,
    stuck: HashSet<u32>,
    slots: u32,
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Insert(u32, u64),
    Touch(u32),
    Replace(u32, u32),
    Remove(u32),
    Evict,
    Stick(u32),
    /// Free again, with or without a `readmit`.
    Unstick(u32, bool),
}

impl Pair {
    fn new(slots: u32) -> Self {
        Self { policy: Policy::new(slots), model: Model::new(slots), stuck: HashSet::new(), slots }
    }

    fn run(&mut self, op: Op) {
        let slots = self.slots;
        match op {
            Op::Insert(slot, key) => {
                self.policy.insert(Slot(slot), key);
                self.model.insert(slot, key);
            }
            Op::Touch(slot) => {
                self.policy.touch(Slot(slot));
                self.model.touch(slot);
            }
            Op::Replace(old, new) => {
                self.policy.replace(Slot(old), Slot(new));
                self.model.replace(old, new);
            }
            Op::Remove(slot) => {
                self.policy.remove(Slot(slot));
                self.model.remove(slot);
            }
            Op::Evict => {
                let (mut asked, mut expected) = (Vec::new(), Vec::new());
                let victim = self.policy.evict(&mut { u32::MAX }, |slot| {
                    asked.push(slot.0);
                    assert!(asked.len() <= slots as usize * 2 + 66, "no end in sight");
                    !self.stuck.contains(&slot.0)
                });
                let ghost = &self.policy.ghost;
                let wanted = self.model.evict(&self.stuck, &mut expected, |key| ghost.bucket(key));
                assert_eq!(asked, expected);
                assert_eq!(victim.map(|slot| slot.0), wanted);
                assert!(victim.is_none_or(|slot| !self.stuck.contains(&slot.0)));
                assert!(victim.is_none_or(|slot| !self.policy.is_resident(slot)));
            }
            Op::Stick(slot) => {
                self.stuck.insert(slot);
            }
            Op::Unstick(slot, told) => {
                self.stuck.remove(&slot);
                if told {
                    self.policy.readmit(Slot(slot));
                    self.model.readmit(slot);
                }
            }
        }
        assert_eq!(self.policy.small_len() as usize, self.model.small.len());
        assert_eq!(self.policy.main_len() as usize, self.model.main.len());
        assert_eq!(self.policy.aside_len() as usize, self.model.aside.len());
        assert_eq!(self.policy.len() as usize, self.model.freq.len());
    }

    fn check(&self) {
        assert_eq!(order(&self.policy, LIST_SMALL), self.model.small);
        assert_eq!(order(&self.policy, LIST_MAIN), self.model.main);
        assert_eq!(order(&self.policy, LIST_ASIDE), self.model.aside);
        for slot in 0..self.slots {
            let resident = self.policy.is_resident(Slot(slot));
            assert_eq!(resident, self.model.freq.contains_key(&slot));
            if resident {
                assert_eq!(self.policy.state[slot as usize] & FREQ, self.model.freq[&slot]);
                assert_eq!(self.policy.links[slot as usize].key, self.model.keys[&slot]);
            }
        }
        assert_eq!(self.policy.ghost_len() as usize, self.model.ghost_len());
        assert!(self.policy.ghost_len() <= (self.slots - self.slots / 10).max(1));
        self.policy.ghost.check();
    }
}

fn random_op(rng: &mut Rng, slots: u32, keys: u32) -> Op {
    let slot = rng.below(slots);
    match rng.below(100) {
        0..30 => Op::Insert(slot, u64::from(rng.below(keys))),
        30..60 => Op::Touch(slot),
        60..65 => Op::Replace(slot, rng.below(slots)),
        65..67 => Op::Remove(slot),
        67..92 => Op::Evict,
        92..96 => Op::Stick(slot),
        96..99 => Op::Unstick(slot, true),
        _ => Op::Unstick(slot, false),
    }
}

#[test]
fn a_million_operations_agree_with_the_model() {
    let mut operations = 0;
    for (slots, count) in [
        (1, 60_000),
        (2, 100_000),
        (3, 100_000),
        (9, 150_000),
        (10, 150_000),
        (11, 150_000),
        (64, 150_000),
        (257, 100_000),
        (1000, 30_000),
        (3000, 30_000),
    ] {
        for seed in [1, 2] {
            println!("slots {slots}, seed {seed}");
            let mut rng = Rng(seed << 32 | u64::from(slots));
            let mut pair = Pair::new(slots);
            // Full at first, then as the operations leave it.
            for slot in 0..slots {
                pair.run(Op::Insert(slot, u64::from(slot)));
            }
            for n in 0..count / 2 {
                pair.run(random_op(&mut rng, slots, slots * 3));
                if n % (8 * u64::from(slots)) == 0 {
                    pair.check();
                }
            }
            pair.check();
            operations += count / 2;
        }
    }
    assert!(operations >= 1_000_000);
}

fn op(slots: u32) -> impl Strategy<Value = Op> {
    let slot = 0..slots;
    prop_oneof![
        6 => (slot.clone(), 0..u64::from(slots) * 2).prop_map(|(s, k)| Op::Insert(s, k)),
        6 => slot.clone().prop_map(Op::Touch),
        1 => (slot.clone(), slot.clone()).prop_map(|(o, n)| Op::Replace(o, n)),
        1 => slot.clone().prop_map(Op::Remove),
        6 => Just(Op::Evict),
        1 => slot.clone().prop_map(Op::Stick),
        1 => (slot, any::<bool>()).prop_map(|(s, told)| Op::Unstick(s, told)),
    ]
}

proptest! {
    #[test]
    fn few_operations_agree_with_the_model(
        ops in (1u32..14).prop_flat_map(|slots| {
            (Just(slots), proptest::collection::vec(op(slots), 0..120))
        })
    ) {
        let mut pair = Pair::new(ops.0);
        for op in ops.1 {
            pair.run(op);
            pair.check();
        }
    }
}

#[test]
fn a_policy_without_slots_has_no_victim() {
    let mut policy = Policy::new(0);
    policy.touch(Slot(0));
    policy.readmit(Slot(0));
    policy.remove(Slot(7));
    assert!(!policy.is_resident(Slot(0)));
    assert!(policy.is_empty());
    assert_eq!(policy.evict(&mut { u32::MAX }, |_| true), None);
}

/// The algorithm by hand: finds errors that the model and the policy may share.
#[test]
fn follows_the_paper() {
    let mut policy = Policy::new(20);
    for slot in 0..20 {
        policy.insert(Slot(slot), 100 + u64::from(slot));
    }
    assert_eq!((policy.small_len(), policy.main_len()), (20, 0));
    // Hit once: not enough for the main queue. Hit twice: enough.
    policy.touch(Slot(0));
    policy.touch(Slot(1));
    policy.touch(Slot(1));
    assert_eq!(policy.evict(&mut { u32::MAX }, |_| true), Some(Slot(0)));
    assert_eq!(policy.evict(&mut { u32::MAX }, |_| true), Some(Slot(2)));
    assert_eq!((policy.small_len(), policy.main_len(), policy.ghost_len()), (17, 1, 2));
    // The ghost remembers the block of slot 0, in any new slot, and only once.
    policy.insert(Slot(2), 100);
    assert_eq!((policy.small_len(), policy.main_len(), policy.ghost_len()), (17, 2, 1));
    policy.remove(Slot(2));
    policy.insert(Slot(2), 100);
    assert_eq!((policy.small_len(), policy.main_len(), policy.ghost_len()), (18, 1, 1));
    // A moved block keeps its place and key: slot 3 is next to leave the small queue.
    policy.replace(Slot(3), Slot(0));
    assert!(policy.is_resident(Slot(0)) && !policy.is_resident(Slot(3)));
    assert_eq!(policy.evict(&mut { u32::MAX }, |_| true), Some(Slot(0)));
    policy.insert(Slot(0), 103);
    assert_eq!(policy.main_len(), 2);
    // All of the small queue is hit: it shrinks below a tenth. Then the main queue gives its oldest
    // first (slot 1, with hits that do not count any more). The ghost does not remember a block of
    // the main queue.
    let ghost = policy.ghost_len();
    for slot in 2..20 {
        policy.touch(Slot(slot));
        policy.touch(Slot(slot));
    }
    assert_eq!(policy.evict(&mut { u32::MAX }, |_| true), Some(Slot(1)));
    assert_eq!((policy.small_len(), policy.ghost_len()), (1, ghost));
    policy.insert(Slot(1), 101);
    assert_eq!((policy.small_len(), policy.main_len()), (2, 17));
}

#[test]
fn a_block_in_the_main_queue_stays_for_as_many_rounds_as_it_was_hit() {
    for hits in 0..6u32 {
        let mut policy = Policy::new(2);
        let insert_in_main = |policy: &mut Policy, slot: u32| {
            policy.ghost.remember(u64::from(slot));
            policy.insert(Slot(slot), u64::from(slot));
        };
        insert_in_main(&mut policy, 0);
        for _ in 0..hits {
            policy.touch(Slot(0));
        }
        for _ in 0..hits.min(3) {
            insert_in_main(&mut policy, 1);
            assert_eq!(policy.main_len(), 2);
            assert_eq!(policy.evict(&mut { u32::MAX }, |_| true), Some(Slot(1)), "{hits} hits");
        }
        insert_in_main(&mut policy, 1);
        assert_eq!(policy.evict(&mut { u32::MAX }, |_| true), Some(Slot(0)), "{hits} hits");
    }
}

#[test]
fn stuck_slots_stay_and_the_rest_can_leave() {
    const SLOTS: u32 = 1000;
    let mut policy = Policy::new(SLOTS);
    for slot in 0..SLOTS {
        policy.insert(Slot(slot), u64::from(slot));
        if slot % 3 == 0 {
            policy.touch(Slot(slot));
            policy.touch(Slot(slot));
        }
    }
    let stuck = |slot: Slot| !slot.0.is_multiple_of(7);
    let mut left = HashSet::new();
    while let Some(victim) = policy.evict(&mut { u32::MAX }, |slot| !stuck(slot)) {
        assert!(!stuck(victim));
        assert!(left.insert(victim), "left twice");
    }
    assert_eq!(left.len(), SLOTS.div_ceil(7) as usize);
    assert!((0..SLOTS).all(|slot| policy.is_resident(Slot(slot)) == stuck(Slot(slot))));
    // After a `readmit`, the slot is the next victim.
    policy.readmit(Slot(500));
    assert_eq!(policy.evict(&mut { u32::MAX }, |slot| slot == Slot(500)), Some(Slot(500)));
    assert_eq!(policy.evict(&mut { u32::MAX }, |_| false), None);
    // Without a `readmit`, a bounded number of calls finds the slot.
    let calls = policy.len().div_ceil(DRY_LOOKS) as usize;
    let found = (0..calls).find_map(|_| policy.evict(&mut { u32::MAX }, |slot| slot == Slot(501)));
    assert_eq!(found, Some(Slot(501)));
}

#[test]
fn slots_that_are_stuck_are_not_asked_about_again_and_again() {
    const SLOTS: u32 = 50_000;
    let mut policy = Policy::new(SLOTS);
    for slot in 0..SLOTS {
        policy.insert(Slot(slot), u64::from(slot));
    }
    // All are stuck.
    let mut asked = 0u32;
    for _ in 0..1000 {
        let none = policy.evict(&mut { u32::MAX }, |_| {
            asked += 1;
            false
        });
        assert_eq!(none, None);
    }
    assert!(asked <= SLOTS + 1000 * (ASIDE_LOOKS + DRY_LOOKS), "{asked} questions");
    // All but one slot, which comes and goes.
    asked = 0;
    for key in 0..1000 {
        policy.remove(Slot(9));
        policy.insert(Slot(9), u64::from(SLOTS) + key);
        let victim = policy.evict(&mut { u32::MAX }, |slot| {
            asked += 1;
            slot == Slot(9)
        });
        assert_eq!(victim, Some(Slot(9)));
    }
    assert!(asked <= 1000 * (1 + ASIDE_LOOKS), "{asked} questions");
    // A `readmit` of each in turn: two questions about slots aside, and one that is answered with
    // yes.
    asked = 0;
    for slot in 10..1010 {
        policy.readmit(Slot(slot));
        let victim = policy.evict(&mut { u32::MAX }, |other| {
            asked += 1;
            other == Slot(slot)
        });
        assert_eq!(victim, Some(Slot(slot)));
    }
    assert!(asked <= 1000 * (1 + ASIDE_LOOKS), "{asked} questions");
}

#[test]
fn the_ghost_forgets_few_keys_early() {
    for keys in [1u32, 7, 100, 10_000] {
        let mut policy = Policy::new(keys);
        let ghost = &mut policy.ghost;
        let most = (keys - keys / 10).max(1);
        // Very regular keys.
        for key in 0..u64::from(keys) * 4 {
            ghost.remember(key << 12);
            assert!(ghost.len() <= most);
        }
        assert!(ghost.len() * 100 >= most * 98, "{} of {most}", ghost.len());
        let last = u64::from(keys) * 4 - 1;
        assert!(ghost.take(last << 12));
        assert!(!ghost.take(last << 12));
        assert!(!ghost.take((last - u64::from(most)) << 12));
        ghost.check();
    }
}

/// A cache under a trace. True: a hit.
trait Cache {
    fn access(&mut self, block: u64) -> bool;
}

struct S3Fifo {
    policy: Policy,
    index: HashMap<u64, Slot>,
    blocks: Vec<u64>,
    free: Vec<Slot>,
}

impl S3Fifo {
    fn new(slots: u32) -> Self {
        Self {
            policy: Policy::new(slots),
            index: HashMap::new(),
            blocks: vec![0; slots as usize],
            free: (0..slots).map(Slot).collect(),
        }
    }
}

impl Cache for S3Fifo {
    fn access(&mut self, block: u64) -> bool {
        if let Some(&slot) = self.index.get(&block) {
            self.policy.touch(slot);
            return true;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            let slot = self.policy.evict(&mut { u32::MAX }, |_| true).unwrap();
            self.index.remove(&self.blocks[slot.index()]).unwrap();
            slot
        });
        self.policy.insert(slot, block);
        self.blocks[slot.index()] = block;
        self.index.insert(block, slot);
        false
    }
}

struct Lru {
    slots: usize,
    last_use: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
    clock: u64,
}

impl Lru {
    fn new(slots: u32) -> Self {
        Self { slots: slots as usize, last_use: HashMap::new(), by_use: BTreeMap::new(), clock: 0 }
    }
}

impl Cache for Lru {
    fn access(&mut self, block: u64) -> bool {
        self.clock += 1;
        let before = self.last_use.insert(block, self.clock);
        if let Some(before) = before {
            self.by_use.remove(&before);
        } else if self.by_use.len() == self.slots {
            let (_, oldest) = self.by_use.pop_first().unwrap();
            self.last_use.remove(&oldest);
        }
        self.by_use.insert(self.clock, block);
        before.is_some()
    }
}

/// Numbers from 0, the `n`-th with a probability proportional to 1 / n^exponent.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(count: u32, exponent: f64) -> Self {
        let mut sum = 0.0;
        let sums = (1..=count).map(|n| {
            sum += f64::from(n).powf(-exponent);
            sum
        });
        Self(sums.collect())
    }

    fn draw(&self, rng: &mut Rng) -> u64 {
        let at = rng.unit() * self.0[self.0.len() - 1];
        self.0.partition_point(|sum| *sum <= at).min(self.0.len() - 1) as u64
    }
}

/// Hits in the hot set per access to it, in percent, after a warm-up. There are 600 hot blocks. For
/// each access to them there are three accesses of a scan, which cycles over four times as many
/// blocks as there are slots.
fn hot_hits_beside_a_scan(cache: &mut dyn Cache, seed: u64) -> f64 {
    const SLOTS: u64 = 1000;
    let zipf = Zipf::new(600, 0.9);
    let mut rng = Rng(seed);
    let (mut hits, mut accesses, mut scan) = (0u32, 0u32, 0);
    for n in 0..60_000 {
        let hit = cache.access(zipf.draw(&mut rng));
        if n >= 20_000 {
            hits += u32::from(hit);
            accesses += 1;
        }
        for _ in 0..3 {
            cache.access(1_000_000 + scan % (4 * SLOTS));
            scan += 1;
        }
    }
    f64::from(hits) * 100.0 / f64::from(accesses)
}

#[test]
fn a_scan_leaves_the_hot_set_alone() {
    for seed in [11, 12] {
        let ours = hot_hits_beside_a_scan(&mut S3Fifo::new(1000), seed);
        let lru = hot_hits_beside_a_scan(&mut Lru::new(1000), seed);
        println!("seed {seed}: hot set hits beside a scan: S3-FIFO {ours:.1} %, LRU {lru:.1} %");
        assert!(ours > 95.0, "S3-FIFO {ours:.1} %");
        assert!(lru < 75.0, "LRU {lru:.1} %: the trace tests nothing");
    }
}

#[test]
fn skewed_accesses_hit_more_often_than_with_lru() {
    const BLOCKS: u32 = 10_000;
    const ACCESSES: u32 = 100_000;
    let zipf = Zipf::new(BLOCKS, 0.99);
    for seed in [21, 22] {
        for slots in [BLOCKS / 10, BLOCKS * 2] {
            let (mut ours, mut lru) = (S3Fifo::new(slots), Lru::new(slots));
            let mut rng = Rng(seed);
            let (mut our_hits, mut lru_hits) = (0, 0);
            let mut seen = HashSet::new();
            for _ in 0..ACCESSES {
                let block = zipf.draw(&mut rng);
                seen.insert(block);
                our_hits += u32::from(ours.access(block));
                lru_hits += u32::from(lru.access(block));
            }
            let percent = |hits: u32| f64::from(hits) * 100.0 / f64::from(ACCESSES);
            println!(
                "seed {seed}, {slots} slots for {BLOCKS} blocks: hits S3-FIFO {:.1} %, LRU {:.1} %",
                percent(our_hits),
                percent(lru_hits)
            );
            if slots < BLOCKS {
                assert!(percent(our_hits) > percent(lru_hits) + 3.0);
            } else {
                // Everything fits: only first accesses miss.
                assert_eq!(our_hits as usize, ACCESSES as usize - seen.len());
            }
        }
    }
}
