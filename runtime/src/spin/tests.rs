//! The policy in virtual time.

use super::*;

const US: Duration = Duration::from_micros(1);
const ANSWER: Hint = Hint { wire_bytes: 4096, outstanding: 1 };
const REQUEST: Hint = Hint { wire_bytes: 0, outstanding: 0 };

/// A thread in virtual time: how long it looked, and how often it slept.
struct Bed {
    policy: SpinPolicy,
    now: Instant,
    wake_cost: Duration,
    looked: Duration,
    sleeps: u32,
    longest_look: Duration,
}

impl Bed {
    fn new(mode: SpinMode, wake_cost: Duration) -> Self {
        Self {
            policy: SpinPolicy::new(mode, wake_cost),
            now: Instant::now(),
            wake_cost,
            looked: Duration::ZERO,
            sleeps: 0,
            longest_look: Duration::ZERO,
        }
    }

    fn adaptive(wake_cost: Duration) -> Self {
        Self::new(SpinMode::ADAPTIVE, wake_cost)
    }

    /// One wait for I/O that comes after so long. Returns whether it was slept through.
    fn wait(&mut self, hint: Hint, after: Duration) -> bool {
        let (began, mut look) = (self.now, Duration::ZERO);
        let slept = loop {
            let left = (began + after).saturating_duration_since(self.now);
            if left.is_zero() {
                break false;
            }
            match self.policy.next(self.now, hint) {
                Idle::Look => {
                    let step = left.min(US);
                    self.now += step;
                    look += step;
                }
                Idle::Sleep => {
                    self.now += left + self.wake_cost;
                    self.policy.slept(self.now);
                    self.sleeps += 1;
                    break true;
                }
            }
        };
        self.policy.worked(self.now, true);
        self.looked += look;
        self.longest_look = self.longest_look.max(look);
        slept
    }

    fn settle(&mut self) {
        (self.sleeps, self.looked, self.longest_look) = (0, Duration::ZERO, Duration::ZERO);
    }
}

#[test]
fn waits_that_are_short_are_looked_through() {
    for (wake_cost, wait) in [(5 * US, 10 * US), (5 * US, 150 * US), (150 * US, 390 * US)] {
        let mut bed = Bed::adaptive(wake_cost);
        for _ in 0..4 {
            bed.wait(ANSWER, wait);
        }
        bed.settle();
        for _ in 0..1000 {
            assert!(!bed.wait(ANSWER, wait), "{wake_cost:?} {wait:?}");
        }
    }
}

#[test]
fn waits_that_are_long_are_slept_through_at_once() {
    for (wake_cost, wait) in [(5 * US, 330 * US), (5 * US, 1000 * US), (150 * US, 5100 * US)] {
        let mut bed = Bed::adaptive(wake_cost);
        for _ in 0..1000 {
            bed.wait(ANSWER, wait);
        }
        assert_eq!((bed.sleeps, bed.looked), (1000, Duration::ZERO), "{wake_cost:?} {wait:?}");
    }
}

#[test]
fn of_two_kinds_mixed_the_short_ones_are_looked_through() {
    let mut bed = Bed::adaptive(5 * US);
    for round in 0..1000 {
        let long = round % 2 == 0;
        let slept = bed.wait(ANSWER, if long { 5000 * US } else { 10 * US });
        assert!(round < 16 || slept == long, "{round}");
    }
    // Twice the short wait for each that was long.
    assert!(bed.looked < 1000 * 16 * US, "{:?}", bed.looked);
}

#[test]
fn the_kinds_do_not_disturb_each_other() {
    let mut bed = Bed::adaptive(5 * US);
    let bulk = Hint { wire_bytes: 16 << 17, outstanding: 16 };
    for round in 0..200 {
        let slept = [
            bed.wait(ANSWER, 20 * US),
            bed.wait(REQUEST, 3000 * US),
            // Worth a look if it were no bulk data.
            bed.wait(bulk, 30 * US),
        ];
        assert!(round < 8 || slept == [false, true, true], "{round}: {slept:?}");
    }
}

#[test]
fn after_a_burst_it_looks_once_and_never_again() {
    let mut bed = Bed::adaptive(5 * US);
    for _ in 0..100 {
        bed.wait(ANSWER, 10 * US);
    }
    bed.settle();
    // An hour without I/O, with mail and beats each second: one look at its beginning.
    let began = bed.now;
    let mut looked = Duration::ZERO;
    while bed.now < began + Duration::from_secs(3600) {
        match bed.policy.next(bed.now, REQUEST) {
            Idle::Look => {
                bed.now += US;
                looked += US;
            }
            Idle::Sleep => {
                bed.now += Duration::from_secs(1);
                bed.policy.slept(bed.now);
                bed.policy.worked(bed.now, false);
            }
        }
    }
    assert!(looked <= 50 * US, "{looked:?}");
}

#[test]
fn it_never_looks_longer_than_allowed() {
    let mut random = 1u64;
    for most in [0, 20, 1000] {
        let mut bed = Bed::new(SpinMode::Adaptive { most: most * US }, 400 * US);
        for _ in 0..5000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let wait = u32::try_from(random >> 52).unwrap();
            bed.wait(if random & 1 << 40 == 0 { ANSWER } else { REQUEST }, wait * US);
        }
        assert!(bed.longest_look <= most * US, "{most}: {:?}", bed.longest_look);
        assert_eq!(bed.looked.is_zero(), most == 0, "{most}");
    }
}

#[test]
fn it_comes_back_after_a_pause() {
    let mut bed = Bed::adaptive(5 * US);
    for _ in 0..50 {
        bed.wait(ANSWER, 10 * US);
    }
    bed.wait(ANSWER, Duration::from_secs(100));
    bed.settle();
    for _ in 0..50 {
        bed.wait(ANSWER, 10 * US);
    }
    assert_eq!(bed.sleeps, 0);
    // Rare I/O is not worth a look.
    for _ in 0..20 {
        bed.wait(ANSWER, Duration::from_secs(1));
    }
    bed.settle();
    for _ in 0..20 {
        bed.wait(ANSWER, Duration::from_secs(1));
    }
    assert_eq!((bed.sleeps, bed.looked), (20, Duration::ZERO));
}

#[test]
fn where_others_want_the_cpu_it_sleeps_and_tries_again_rarely() {
    let mut bed = Bed::adaptive(40 * US);
    bed.policy.yielded(US);
    for _ in 0..50 {
        bed.wait(ANSWER, 100 * US);
    }
    assert!(bed.policy.budget(ANSWER) > Duration::ZERO);
    bed.settle();
    // Each look finds that others run.
    let mut looks = 0;
    for _ in 0..10_000 {
        if bed.policy.next(bed.now, ANSWER) == Idle::Look {
            looks += 1;
            bed.policy.yielded(3000 * US);
            assert_eq!(bed.policy.next(bed.now, ANSWER), Idle::Sleep);
        }
        bed.wait(ANSWER, 100 * US);
    }
    assert_eq!(bed.sleeps, 10_000);
    assert!((10..60).contains(&looks), "{looks}");
    // The others are gone: soon it looks all the time.
    bed.settle();
    for _ in 0..1000 {
        bed.wait(ANSWER, 100 * US);
    }
    assert!(bed.sleeps <= REST_MOST + 1, "{}", bed.sleeps);
}

#[test]
fn with_many_requests_it_sleeps() {
    let many = Hint { wire_bytes: 32 << 12, outstanding: 32 };
    let mut bed = Bed::adaptive(40 * US);
    for _ in 0..100 {
        bed.wait(many, 5 * US);
    }
    assert_eq!((bed.sleeps, bed.looked), (100, Duration::ZERO));
    // Most of them are elsewhere just now.
    for hint in [ANSWER, REQUEST, ANSWER] {
        assert!(bed.wait(hint, 5 * US));
    }
    // The many requests are gone.
    for _ in 0..30 {
        bed.wait(ANSWER, 5 * US);
    }
    bed.settle();
    for _ in 0..30 {
        bed.wait(ANSWER, 5 * US);
    }
    assert_eq!(bed.sleeps, 0);
    // A thread that is told to look does so.
    let mut bed = Bed::new(SpinMode::Fixed(50 * US), 40 * US);
    for _ in 0..100 {
        bed.wait(many, 5 * US);
    }
    assert_eq!(bed.sleeps, 0);
}

#[test]
fn only_a_long_absence_counts() {
    let mut bed = Bed::adaptive(40 * US);
    for _ in 0..50 {
        bed.wait(ANSWER, 300 * US);
    }
    bed.settle();
    // The thread that does the awaited work runs in each look.
    for _ in 0..1000 {
        assert_eq!(bed.policy.next(bed.now, ANSWER), Idle::Look);
        bed.policy.yielded(150 * US);
        bed.wait(ANSWER, 300 * US);
    }
    assert_eq!(bed.sleeps, 0);
    // Another thread takes the CPU for a time slice.
    assert_eq!(bed.policy.next(bed.now, ANSWER), Idle::Look);
    bed.policy.yielded(3000 * US);
    assert_eq!(bed.policy.next(bed.now, ANSWER), Idle::Sleep);
}

#[test]
fn modes_do_what_they_say() {
    for (mode, looked, sleeps) in
        [(SpinMode::Never, 0, 3), (SpinMode::Fixed(30 * US), 90, 3), (SpinMode::Always, 300, 0)]
    {
        let mut bed = Bed::new(mode, 5 * US);
        for _ in 0..3 {
            bed.wait(ANSWER, 100 * US);
        }
        assert_eq!((bed.looked, bed.sleeps), (looked * US, sleeps), "{mode:?}");
    }
}
