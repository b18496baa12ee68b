//! [`Slowness`]: which living ways are set aside because they are much slower than the others, or
//! damage data.
//!
//! A slow way is not dead: its heart-beats are answered in time. But requests that go by it delay
//! their users, and it answers so rarely that it seems to have little to do. So it is set aside
//! while another way does the work. No request of a user is spent to find out whether it is well
//! again: its own KEEP_ALIVEs are timed for that.
//!
//! Queues send their small requests by different home ways. So the comparison is made here, over
//! all queues, and not in a queue.

use std::time::{Duration, Instant};

use crate::engine::ways::WayIndex;
use crate::engine::ways::way_set::WaySet;

/// A way is slow above so many times of the best, and this time more.
const SLOW: (u32, Duration) = (4, Duration::from_micros(200));
/// The requests of a judgement, at least.
const SAMPLES_MIN: u64 = 64;
/// Good KEEP_ALIVEs in a row after which a way comes back.
const GOOD_BEATS: u8 = 3;
/// So many requests with damaged data, and the time for them.
const DAMAGES: (usize, Duration) = (3, Duration::from_secs(60));

/// The small requests of all queues by one way, since the last judgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SmallRequests {
    /// Their number.
    pub count: u64,
    /// The median of their times.
    pub median: Duration,
}

/// The record of a way.
#[derive(Clone, Copy, Debug, Default)]
struct Repute {
    beat: Option<Duration>,
    good_beats: u8,
    // The newest damages, the oldest first.
    damages: [Option<Instant>; DAMAGES.0],
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Slowness {
    live: WaySet,
    aside: WaySet,
    of: [Repute; 8],
}

impl Slowness {
    /// The ways that are set aside.
    #[must_use]
    pub fn aside(&self) -> WaySet {
        self.aside
    }

    /// A way lives, in good repute.
    pub fn lives(&mut self, way: WayIndex) {
        self.of[way.get()] = Repute::default();
        self.live.insert(way);
        self.aside.remove(way);
    }

    /// A way died. If all others are set aside, they are used.
    pub fn died(&mut self, way: WayIndex) {
        self.live.remove(way);
        self.aside.remove(way);
        if self.live.without(self.aside).is_empty() {
            self.aside = WaySet::NONE;
        }
    }

    /// Compares the ways. Call it every five seconds or so. Returns whether one is set aside now.
    pub fn judge(&mut self, times: impl Fn(WayIndex) -> SmallRequests) -> bool {
        let judged = |way: &WayIndex| times(*way).count >= SAMPLES_MIN;
        let used = self.live.without(self.aside);
        let Some(best) = used.iter().filter(judged).map(|way| times(way).median).min() else {
            return false;
        };
        let is_slow = |way: &WayIndex| is_slow(times(*way).median, best);
        let slow: Vec<WayIndex> = used.iter().filter(judged).filter(is_slow).collect();
        // Each of them, until one is left.
        slow.into_iter().filter(|way| self.set_aside(*way)).count() > 0
    }

    /// A KEEP_ALIVE of a way was answered after that time. Returns whether the way is back.
    pub fn beat(&mut self, way: WayIndex, took: Duration) -> bool {
        self.of[way.get()].beat = Some(took);
        if !self.aside.has(way) {
            return false;
        }
        let used = self.live.without(self.aside);
        let best = used.iter().filter_map(|way| self.of[way.get()].beat).min();
        let repute = &mut self.of[way.get()];
        let is_good = best.is_some_and(|best| !is_slow(took, best));
        repute.good_beats = if is_good { repute.good_beats + 1 } else { 0 };
        if repute.good_beats < GOOD_BEATS {
            return false;
        }
        repute.good_beats = 0;
        self.aside.remove(way);
        true
    }

    /// A request by a way had damaged data. Returns whether the way is set aside now.
    pub fn damaged(&mut self, way: WayIndex, now: Instant) -> bool {
        let damages = &mut self.of[way.get()].damages;
        damages.rotate_left(1);
        damages[DAMAGES.0 - 1] = Some(now);
        let oldest = damages[0];
        let is_often = oldest.is_some_and(|at| now.saturating_duration_since(at) <= DAMAGES.1);
        is_often && self.live.has(way) && !self.aside.has(way) && self.set_aside(way)
    }

    /// Sets a way aside, unless it is the last in use.
    fn set_aside(&mut self, way: WayIndex) -> bool {
        let mut others = self.live.without(self.aside);
        others.remove(way);
        if others.is_empty() {
            return false;
        }
        let repute = &mut self.of[way.get()];
        (repute.good_beats, repute.damages) = (0, [None; DAMAGES.0]);
        self.aside.insert(way);
        true
    }
}

fn is_slow(time: Duration, best: Duration) -> bool {
    time > best.saturating_mul(SLOW.0).saturating_add(SLOW.1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn way(place: usize) -> WayIndex {
        WayIndex::new(place).unwrap()
    }

    fn living(ways: usize) -> Slowness {
        let mut all = Slowness::default();
        (0..ways).for_each(|at| all.lives(way(at)));
        all
    }

    fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    fn small(count: u64, median_us: u64) -> SmallRequests {
        SmallRequests { count, median: us(median_us) }
    }

    fn aside(all: &Slowness) -> Vec<usize> {
        all.aside().iter().map(WayIndex::get).collect()
    }

    #[test]
    fn a_much_slower_way_is_set_aside_and_its_beats_bring_it_back() {
        let mut all = living(2);
        let times = |second: SmallRequests| {
            move |way: WayIndex| if way.get() == 0 { small(1000, 50) } else { second }
        };
        assert!(!all.judge(times(small(1000, 400))), "not above four times and 200 us");
        assert!(!all.judge(times(small(63, 9000))), "too few requests");
        assert!(all.judge(times(small(64, 401))));
        assert_eq!(aside(&all), [1]);
        all.beat(way(0), us(30));
        let mut beats = |times: &[u64]| times.iter().map(|t| all.beat(way(1), us(*t))).collect();
        let back: Vec<bool> = beats(&[300, 300, 400, 300, 300, 320]);
        assert_eq!(back, [false, false, false, false, false, true], "three in a row");
        assert!(all.aside().is_empty());
    }

    #[test]
    fn the_last_way_in_use_stays_in_use() {
        let mut all = living(3);
        let now = Instant::now();
        for at in 0..3 {
            (0..2).for_each(|_| assert!(!all.damaged(way(at), now)));
            assert_eq!(all.damaged(way(at), now), at < 2);
        }
        assert_eq!(aside(&all), [0, 1]);
        all.died(way(2));
        assert_eq!(aside(&all), [] as [usize; 0], "they are better than nothing");
        // A new life has no past.
        all.lives(way(2));
        assert!(!all.damaged(way(2), now) && !all.damaged(way(2), now));
        let later = now + DAMAGES.1 + us(1);
        assert!(!all.damaged(way(2), later), "in more than a minute");
        assert!(!all.damaged(way(2), later) && all.damaged(way(2), later));
    }

    proptest! {
        /// Whatever is reported: while a way lives, one is in use, and only living ways are aside.
        #[test]
        fn one_is_always_in_use(
            steps in proptest::collection::vec((0usize..8, 0u8..6, 1u64..10_000), 0..100),
        ) {
            let (mut all, mut live) = (Slowness::default(), WaySet::NONE);
            let mut now = Instant::now();
            for (at, act, time) in steps {
                let way = way(at);
                match act {
                    0 | 1 => {
                        all.lives(way);
                        live.insert(way);
                    }
                    2 => {
                        all.died(way);
                        live.remove(way);
                    }
                    3 => {
                        let times = |way: WayIndex| small(100, time * (1 + way.get() as u64) % 9000);
                        all.judge(times);
                    }
                    4 => {
                        all.beat(way, us(time));
                    }
                    _ => {
                        now += us(time * 1000);
                        all.damaged(way, now);
                    }
                }
                prop_assert!(all.aside().without(live).is_empty());
                prop_assert!(live.is_empty() || !live.without(all.aside()).is_empty());
            }
        }
    }
}
