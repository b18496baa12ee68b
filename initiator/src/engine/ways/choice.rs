//! [`Choice`]: the way of a request. One queue decides by its own requests alone: the threads of a
//! mount share nothing, and each sees how the ways serve it.
//!
//! - Large requests go by the way that will have moved its data first: the bytes that it owes, and
//!   those of the request, by the speed of the port where all speeds are known.
//! - Small requests go by the *home* way of the queue, so that they share messages. The homes of
//!   the queues are spread over the ways. A queue leaves its home for a request when the home owes
//!   many answers and another way owes few.
//! - A way of a lower [tier](WayTerms::tier) is used while no way of a higher one lives.

use rblk_protocol::limits::LANE_BYTES;

use super::WayIndex;
use super::way_set::WaySet;

/// From so many unanswered requests on, a queue may leave its home way for a small request.
const CROWDED: u32 = 8;

/// The fixed facts of a way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct WayTerms {
    /// Ways of the lowest number are used first.
    pub tier: u8,
    /// The speed of its port in Mbit/s; 0 if unknown.
    pub speed: u32,
}

/// The load of a way, by this queue.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct WayLoad {
    /// Requests without an answer.
    pub unanswered: u32,
    /// Bytes of their data, on the lane with the least.
    pub awaited_bytes: u64,
}

/// How requests are spread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ChoicePolicy {
    /// By the load.
    #[default]
    Least,
    /// In turn.
    RoundRobin,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Choice {
    policy: ChoicePolicy,
    // The number of the queue, which spreads the homes.
    queue: usize,
    terms: [WayTerms; 8],
    live: WaySet,
    // The ways in use: those of `live` in the best tier.
    used: WaySet,
    home: Option<WayIndex>,
    // The speeds of all ways in use are known.
    by_speed: bool,
    turn: usize,
}

impl Choice {
    /// For the queue of that number; no way lives.
    #[must_use]
    pub fn new(queue: u16, policy: ChoicePolicy) -> Self {
        Self {
            policy,
            queue: usize::from(queue),
            terms: [WayTerms::default(); 8],
            live: WaySet::NONE,
            used: WaySet::NONE,
            home: None,
            by_speed: false,
            turn: 0,
        }
    }

    /// A way lives: its path has passed the self-test.
    pub fn lives(&mut self, way: WayIndex, terms: WayTerms) {
        self.terms[way.get()] = terms;
        self.live.insert(way);
        self.decide();
    }

    /// A way died.
    pub fn died(&mut self, way: WayIndex) {
        self.live.remove(way);
        self.decide();
    }

    /// The ways that live.
    #[must_use]
    pub fn live(&self) -> WaySet {
        self.live
    }

    /// The ways in use.
    #[must_use]
    pub fn used(&self) -> WaySet {
        self.used
    }

    #[cold]
    fn decide(&mut self) {
        let tier = |way: WayIndex| self.terms[way.get()].tier;
        let best = self.live.iter().map(tier).min();
        self.used = self.live.iter().filter(|way| Some(tier(*way)) == best).collect();
        self.home = self.used.nth(self.queue);
        self.by_speed = self.used.iter().all(|way| self.terms[way.get()].speed > 0);
    }

    /// The way of a request with so many bytes for the target to move. `load` has the load of a way
    /// in use. `None`: no way lives.
    #[must_use]
    #[inline]
    pub fn choose(&mut self, bytes: u32, load: impl Fn(WayIndex) -> WayLoad) -> Option<WayIndex> {
        let home = self.home?;
        if self.used.len() == 1 {
            return Some(home);
        }
        Some(match self.policy {
            ChoicePolicy::RoundRobin => self.next_in_turn(home),
            ChoicePolicy::Least if bytes < LANE_BYTES => self.of_small(home, load),
            ChoicePolicy::Least => self.of_large(home, bytes, load),
        })
    }

    fn next_in_turn(&mut self, home: WayIndex) -> WayIndex {
        self.turn = self.turn.wrapping_add(1);
        self.used.nth(self.queue.wrapping_add(self.turn)).unwrap_or(home)
    }

    fn of_small(&self, home: WayIndex, load: impl Fn(WayIndex) -> WayLoad) -> WayIndex {
        let owed = load(home).unanswered;
        if owed < CROWDED {
            return home;
        }
        let others = self.used.iter().filter(|way| *way != home);
        let least = others.map(|way| (load(way).unanswered, way)).min();
        least.filter(|(other, _)| *other < owed / 2).map_or(home, |(_, way)| way)
    }

    fn of_large(&self, home: WayIndex, bytes: u32, load: impl Fn(WayIndex) -> WayLoad) -> WayIndex {
        // The home first: it wins if all are equal, and queues have different homes.
        let all = std::iter::once(home).chain(self.used.iter().filter(|way| *way != home));
        let due = |way: WayIndex| {
            let owed = load(way).awaited_bytes.saturating_add(u64::from(bytes));
            let speed = if self.by_speed { self.terms[way.get()].speed } else { 1 };
            (u128::from(owed) << 32) / u128::from(speed.max(1))
        };
        all.min_by_key(|way| due(*way)).unwrap_or(home)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn way(place: usize) -> WayIndex {
        WayIndex::new(place).unwrap()
    }

    fn of(queue: u16, ways: &[(usize, WayTerms)]) -> Choice {
        let mut choice = Choice::new(queue, ChoicePolicy::Least);
        ways.iter().for_each(|(place, terms)| choice.lives(way(*place), *terms));
        choice
    }

    fn equal(queue: u16, ways: usize) -> Choice {
        of(queue, &(0..ways).map(|at| (at, WayTerms::default())).collect::<Vec<_>>())
    }

    /// A queue that keeps `depth` requests of one size under way. The ways answer in turn, each as
    /// often as its weight says. Returns the requests of each way.
    fn served(choice: &mut Choice, bytes: u32, depth: usize, weights: &[usize]) -> Vec<usize> {
        let mut owed = vec![0u32; weights.len()];
        let mut sent = vec![0; weights.len()];
        let order: Vec<usize> =
            weights.iter().enumerate().flat_map(|(at, n)| std::iter::repeat_n(at, *n)).collect();
        let (mut total, mut at) = (0, 0);
        while total < 3000 {
            while owed.iter().sum::<u32>() < u32::try_from(depth).unwrap() {
                let load = |way: WayIndex| WayLoad {
                    unanswered: owed[way.get()],
                    awaited_bytes: u64::from(owed[way.get()]) * u64::from(bytes),
                };
                let chosen = choice.choose(bytes, load).unwrap().get();
                owed[chosen] += 1;
                sent[chosen] += 1;
                total += 1;
            }
            owed[order[at % order.len()]] = owed[order[at % order.len()]].saturating_sub(1);
            at += 1;
        }
        sent
    }

    #[test]
    fn two_equal_ways_have_equal_halves_of_large_requests() {
        for queue in 0..3 {
            let sent = served(&mut equal(queue, 2), 128 << 10, 32, &[1, 1]);
            assert!(sent.iter().all(|part| (1400..=1601).contains(part)), "{sent:?}");
        }
    }

    #[test]
    fn a_slow_way_gets_what_it_can_serve() {
        let sent = served(&mut equal(0, 2), 128 << 10, 32, &[9, 1]);
        assert!(sent[1] < 500 && sent[1] > 150, "{sent:?}");
    }

    #[test]
    fn small_requests_stay_at_home_until_it_is_crowded() {
        for (queue, home) in [(0, 0), (1, 1), (2, 2), (3, 0)] {
            let sent = served(&mut equal(queue, 3), 4096, 7, &[1, 1, 1]);
            assert_eq!(sent.iter().position(|n| *n > 0), Some(home));
            assert_eq!(sent.iter().filter(|n| **n > 0).count(), 1, "{sent:?}");
        }
        let mut choice = equal(0, 2);
        let mut chosen = |home: u32, other: u32| {
            let load = |way: WayIndex| WayLoad {
                unanswered: if way.get() == 0 { home } else { other },
                awaited_bytes: 0,
            };
            choice.choose(4096, load).unwrap().get()
        };
        assert_eq!([chosen(7, 0), chosen(8, 4), chosen(8, 3), chosen(64, 31)], [0, 0, 1, 1]);
    }

    #[test]
    fn the_speeds_of_ports_count_if_all_are_known() {
        let fast = WayTerms { tier: 0, speed: 100_000 };
        let slow = WayTerms { tier: 0, speed: 25_000 };
        let load = |way: WayIndex| WayLoad {
            unanswered: 0,
            awaited_bytes: if way.get() == 0 { 2 << 20 } else { 1 << 20 },
        };
        assert_eq!(of(0, &[(0, fast), (1, slow)]).choose(128 << 10, load), Some(way(0)));
        let unknown = WayTerms { speed: 0, ..slow };
        assert_eq!(of(0, &[(0, fast), (1, unknown)]).choose(128 << 10, load), Some(way(1)));
    }

    #[test]
    fn a_lower_tier_is_used_while_no_better_one_lives() {
        let tcp = WayTerms { tier: 1, speed: 0 };
        let mut choice = of(0, &[(0, tcp), (1, WayTerms::default()), (2, WayTerms::default())]);
        let used = |choice: &Choice| choice.used().iter().map(WayIndex::get).collect::<Vec<_>>();
        assert_eq!(used(&choice), [1, 2]);
        choice.died(way(1));
        assert_eq!(used(&choice), [2]);
        choice.died(way(2));
        assert_eq!(used(&choice), [0]);
        choice.lives(way(1), WayTerms::default());
        assert_eq!(used(&choice), [1]);
        choice.lives(way(3), WayTerms::default());
        assert_eq!(used(&choice), [1, 3]);
    }

    #[test]
    fn in_turn() {
        let mut choice = Choice::new(0, ChoicePolicy::RoundRobin);
        [1, 4, 6].iter().for_each(|at| choice.lives(way(*at), WayTerms::default()));
        let mut counts = [0; 8];
        for bytes in [4096, 128 << 10].into_iter().cycle().take(300) {
            counts[choice.choose(bytes, |_| WayLoad::default()).unwrap().get()] += 1;
        }
        assert_eq!(counts, [0, 100, 0, 0, 100, 0, 100, 0]);
    }

    proptest! {
        /// Whatever happens, a request goes by a live way of the best tier, if there is one.
        #[test]
        fn the_chosen_way_lives(
            steps in proptest::collection::vec((0usize..8, 0u8..3, 0u8..3, 0u32..3), 1..60),
            loads in proptest::collection::vec((0u32..40, 0u64..1 << 22), 8),
            queue in 0u16..64,
            in_turn in any::<bool>(),
        ) {
            let policy = if in_turn { ChoicePolicy::RoundRobin } else { ChoicePolicy::Least };
            let mut choice = Choice::new(queue, policy);
            let mut tiers = [None; 8];
            for (at, act, tier, speed) in steps {
                match act {
                    0 | 1 => {
                        choice.lives(way(at), WayTerms { tier, speed });
                        tiers[at] = Some(tier);
                    }
                    _ => {
                        choice.died(way(at));
                        tiers[at] = None;
                    }
                }
                let best = tiers.iter().flatten().min().copied();
                for bytes in [0, 4096, 32 << 10, 1 << 20] {
                    let load = |way: WayIndex| {
                        let (unanswered, awaited_bytes) = loads[way.get()];
                        WayLoad { unanswered, awaited_bytes }
                    };
                    let chosen = choice.choose(bytes, load);
                    prop_assert_eq!(chosen.and_then(|way| tiers[way.get()]), best);
                    prop_assert_eq!(chosen.is_some(), best.is_some());
                }
            }
        }
    }
}
