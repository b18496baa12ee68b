//! [`Patience`]: how long a data thread looks for work before it sleeps.
//!
//! Looking costs CPU time, sleeping a wake-up. What is right depends on how long the next wait
//! takes, which nobody knows; but waits resemble those before them. So the last 16 waits of each
//! kind are kept, and the thread looks for as long as would have cost least in them: a wait shorter
//! than that costs what it took, a longer one the look and a wake-up. What a wake-up is worth is a
//! multiple of what it takes here ([`measure_wake_cost`]): whoever waits for the I/O waits for it
//! too.
//!
//! Looking pays only on a CPU that nobody else wants for long: where those that do the awaited work
//! run on it too (the threads of a software device, the peer on the same host), a look keeps the
//! answer from coming. The thread yields while it looks, and a yield that comes back late tells
//! ([`Patience::yielded`]): then it sleeps, now and for some waits to come. Only a long absence
//! counts: who ran shortly did the awaited work, and would have had to be waited for in any case.
//!
//! With many requests under way, nothing waits for one wake-up alone: several share it, and those
//! that come meanwhile are served with them. Then nobody looks. (Tried: at depth 32 the same I/O
//! per second, and twice the system calls.)
//!
//! Invariants:
//!
//! - After the last I/O the thread looks at most once, for at most `most`, and then sleeps until
//!   there is I/O again: beats, mail and time-outs start no new look.
//! - Waits count alike whether they were looked or slept through, so that a thread that sleeps
//!   finds out when looking pays again.
//! - Pure: no clock, no allocation.

use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Waits of one kind that are remembered.
const WINDOW: usize = 16;
/// New waits after which the plan is made anew; one that took longer than planned has it made at
/// once.
const PLAN_EVERY: u8 = 4;
/// Looking is never worth less than this, nor is it done for less.
const LEAST: Duration = Duration::from_micros(50);
/// What a wake-up is worth, in times of what it takes: the other end, which sleeps because this one
/// does, and the client pay for it, too.
const WORTH: u32 = 64;
/// More requests than these are many.
const FEW: u32 = 8;
/// Requests of at least so many bytes each wait for the wire, whose work the CPU may have to do.
const BULK_BYTES: u64 = 32 << 10;
/// A yield that takes so long let somebody run who does not work for us, whatever a yield takes
/// alone: a time slice.
const CONTENDED: Duration = Duration::from_millis(1);
/// The same in times of a wake-up, where everything takes long.
const CONTENDED_WAKES: u32 = 32;
/// A yield that takes so many times as long as the shortest one let others run.
const CONTENDED_TIMES: u32 = 4;
/// After others wanted the CPU: waits that are slept through at once, doubled each time up to the
/// other, and halved when nobody did.
const REST: u32 = 8;
const REST_MOST: u32 = 256;
/// Rounds of [`measure_wake_cost`].
const ROUNDS: usize = 16;

/// Whether and how a thread looks for work before it sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpinMode {
    /// It sleeps at once.
    Never,
    /// It looks for so long.
    Fixed(Duration),
    /// It looks for as long as that paid lately, at most so long.
    Adaptive {
        /// The longest look.
        most: Duration,
    },
    /// It never sleeps while it may have work.
    Always,
}

impl SpinMode {
    /// [`SpinMode::Adaptive`] with the longest look that is sensible.
    pub const ADAPTIVE: Self = Self::Adaptive { most: Duration::from_millis(5) };
}

/// What is known about a wait when it begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Hint {
    /// Bytes of the requests that are under way.
    pub wire_bytes: u64,
    /// Those requests; none when the wait is for a request.
    pub outstanding: u32,
}

/// What to do when there is no work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Idle {
    /// Give the CPU up, [say](Patience::yielded) how long that took, and look again.
    Look,
    /// Sleep.
    Sleep,
}

/// The waits of one kind.
#[derive(Clone, Copy, Debug)]
struct Waits {
    // Nanoseconds, none above `4 * worth`.
    window: [u32; WINDOW],
    len: usize,
    at: usize,
    fresh: u8,
    // Nanoseconds.
    budget: u32,
}

impl Waits {
    const NONE: Self = Self { window: [0; WINDOW], len: 0, at: 0, fresh: 0, budget: 0 };

    fn record(&mut self, wait: u32, worth: u32, limit: u32) {
        self.window[self.at] = wait.min(worth.saturating_mul(4));
        self.at = (self.at + 1) % WINDOW;
        self.len = (self.len + 1).min(WINDOW);
        self.fresh += 1;
        if self.fresh >= PLAN_EVERY || wait > self.budget {
            self.fresh = 0;
            self.budget = self.plan(worth, limit);
        }
    }

    /// The look that would have cost least, doubled: the next wait is like those, not the same.
    fn plan(&self, worth: u32, limit: u32) -> u32 {
        let mut sorted = self.window;
        let sorted = &mut sorted[..self.len];
        sorted.sort_unstable();
        // Not looking at all: every wait ends with a wake-up.
        let mut least = u64::from(worth) * sorted.len() as u64;
        let (mut best, mut shorter) = (0, 0);
        for (at, wait) in sorted.iter().enumerate() {
            if *wait > limit {
                break;
            }
            shorter += u64::from(*wait);
            let longer = (sorted.len() - at - 1) as u64;
            let cost = shorter + longer * (u64::from(*wait) + u64::from(worth));
            if cost < least {
                (least, best) = (cost, *wait);
            }
        }
        if best == 0 { 0 } else { best.saturating_mul(2).min(limit) }
    }
}

/// The patience of one thread. See the module.
#[derive(Clone, Debug)]
pub struct Patience {
    mode: SpinMode,
    wake_cost: Duration,
    // By kind of wait.
    kinds: [Waits; 3],
    // None while many requests are under way: their waits are not looked through, and teach
    // nothing.
    kind: Option<usize>,
    idle: Option<Instant>,
    budget: Duration,
    // The thread slept in this wait, the last time until then.
    woke: Option<Instant>,
    // The shortest yield.
    yields: Duration,
    // Waits to sleep through, because others want the CPU, and how many the next time.
    rest: u32,
    next_rest: u32,
    // In this wait others wanted the CPU.
    contended: bool,
    // The most requests under way lately, bulk data apart, a tenth less with every wait: those of a
    // burst are seldom all here.
    peak: u32,
}

impl Patience {
    /// With what a wake-up takes here.
    #[must_use]
    pub fn new(mode: SpinMode, wake_cost: Duration) -> Self {
        Self {
            mode,
            wake_cost,
            kinds: [Waits::NONE; 3],
            kind: None,
            idle: None,
            budget: Duration::ZERO,
            woke: None,
            yields: Duration::MAX,
            rest: 0,
            next_rest: REST,
            contended: false,
            peak: 0,
        }
    }

    /// There is no work: what to do. `hint` counts when the wait begins.
    pub fn next(&mut self, now: Instant, hint: Hint) -> Idle {
        let since = match self.idle {
            Some(since) => since,
            None => {
                self.begin(now, hint);
                now
            }
        };
        let looks = match self.mode {
            SpinMode::Never => false,
            SpinMode::Always => true,
            // Who slept in this wait looks no more in it.
            SpinMode::Fixed(_) | SpinMode::Adaptive { .. } => {
                self.woke.is_none()
                    && !self.contended
                    && now.saturating_duration_since(since) < self.budget
            }
        };
        if looks { Idle::Look } else { Idle::Sleep }
    }

    /// There was work. `was_io`: it was what clients wait for, and not a beat or mail.
    pub fn worked(&mut self, now: Instant, was_io: bool) {
        if !was_io {
            return;
        }
        let Some(since) = self.idle.take() else { return };
        if self.woke.is_none() && !self.contended {
            // Looked through, and nobody else wanted the CPU. That may have been luck.
            self.next_rest = (self.next_rest / 2).max(REST);
        }
        let woke = self.woke.take();
        let Some(kind) = self.kind else { return };
        // Had it looked, it would have seen this a wake-up earlier.
        let seen = woke.map_or(now, |woke| woke.checked_sub(self.wake_cost).unwrap_or(woke));
        let wait = nanos(seen.saturating_duration_since(since));
        let (worth, limit) = (self.worth(kind), self.limit(kind));
        self.kinds[kind].record(wait, nanos(worth), nanos(limit));
    }

    /// The thread gave its CPU up in a look, and has it back after so long. Adaptive threads mind.
    pub fn yielded(&mut self, took: Duration) {
        self.yields = self.yields.min(took);
        let adapts = matches!(self.mode, SpinMode::Adaptive { .. });
        let slice = CONTENDED.max(self.wake_cost * CONTENDED_WAKES);
        if adapts && took > slice.max(self.yields.saturating_mul(CONTENDED_TIMES)) {
            self.contended = true;
            self.rest = self.next_rest;
            self.next_rest = (self.next_rest * 2).min(REST_MOST);
        }
    }

    /// The thread slept until now.
    pub fn slept(&mut self, now: Instant) {
        self.woke = Some(now);
    }

    /// How long the next look for that would be, at most.
    #[must_use]
    pub fn budget(&self, hint: Hint) -> Duration {
        match self.mode {
            SpinMode::Never => Duration::ZERO,
            SpinMode::Fixed(time) => time,
            SpinMode::Adaptive { .. } => kind(hint, self.peak).map_or(Duration::ZERO, |kind| {
                Duration::from_nanos(self.kinds[kind].budget.into())
            }),
            SpinMode::Always => Duration::MAX,
        }
    }

    fn begin(&mut self, now: Instant, hint: Hint) {
        (self.idle, self.woke) = (Some(now), None);
        self.peak = self.peak.saturating_sub(1 + self.peak / 10);
        if !is_bulk(hint) {
            self.peak = self.peak.max(hint.outstanding);
        }
        self.kind = kind(hint, self.peak);
        self.budget = self.budget(hint);
        self.contended = self.rest > 0;
        self.rest = self.rest.saturating_sub(1);
    }

    /// What a wake-up is worth in a wait of that kind. Bulk data comes by work that may need this
    /// CPU.
    fn worth(&self, kind: usize) -> Duration {
        match kind {
            BULK => self.wake_cost,
            _ => (self.wake_cost * WORTH).max(LEAST),
        }
    }

    /// The longest look in a wait of that kind.
    fn limit(&self, kind: usize) -> Duration {
        match self.mode {
            SpinMode::Adaptive { most } => self.worth(kind).max(LEAST).min(most),
            _ => Duration::ZERO,
        }
    }
}

// Kinds of waits: for one of few answers, for bulk data, and with nothing under way.
const ANSWERS: usize = 0;
const BULK: usize = 1;
const IDLE: usize = 2;

fn kind(hint: Hint, peak: u32) -> Option<usize> {
    match hint.outstanding {
        _ if is_bulk(hint) => Some(BULK),
        _ if peak > FEW => None,
        0 => Some(IDLE),
        _ => Some(ANSWERS),
    }
}

fn is_bulk(hint: Hint) -> bool {
    hint.wire_bytes.checked_div(hint.outstanding.into()).is_some_and(|each| each >= BULK_BYTES)
}

fn nanos(time: Duration) -> u32 {
    u32::try_from(time.as_nanos()).unwrap_or(u32::MAX)
}

/// What it takes here to wake a thread that sleeps, until it runs: the median of a few rounds with
/// a helper thread, measured once in a process. At most 1 ms; 10 µs when it cannot be measured.
#[must_use]
pub fn measure_wake_cost() -> Duration {
    static COST: OnceLock<Duration> = OnceLock::new();
    *COST.get_or_init(|| ping().unwrap_or(Duration::from_micros(10)).min(Duration::from_millis(1)))
}

/// Half the median of the rounds: two wake-ups each.
fn ping() -> Option<Duration> {
    let event = || EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC).ok();
    let (there, back) = (event()?, event()?);
    let wait = |event: &EventFd| {
        let mut fds = [PollFd::new(event.as_fd(), PollFlags::POLLIN)];
        (poll(&mut fds, PollTimeout::from(100u8)) == Ok(1)).then(|| event.read().ok()).flatten()
    };
    std::thread::scope(|scope| {
        let helper = std::thread::Builder::new().spawn_scoped(scope, || {
            for _ in 0..ROUNDS {
                if wait(&there).is_none() || back.write(1).is_err() {
                    break;
                }
            }
        });
        helper.ok()?;
        let mut rounds = [Duration::ZERO; ROUNDS];
        for round in &mut rounds {
            let began = Instant::now();
            there.write(1).ok()?;
            wait(&back)?;
            *round = began.elapsed();
        }
        rounds.sort_unstable();
        Some(rounds[ROUNDS / 2] / 2)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);
    const ANSWER: Hint = Hint { wire_bytes: 4096, outstanding: 1 };
    const REQUEST: Hint = Hint { wire_bytes: 0, outstanding: 0 };

    /// A thread in virtual time: what it looked and how often it slept.
    struct Bed {
        patience: Patience,
        now: Instant,
        wake_cost: Duration,
        looked: Duration,
        sleeps: u32,
        longest_look: Duration,
    }

    impl Bed {
        fn new(mode: SpinMode, wake_cost: Duration) -> Self {
            Self {
                patience: Patience::new(mode, wake_cost),
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
                match self.patience.next(self.now, hint) {
                    Idle::Look => {
                        let step = left.min(US);
                        self.now += step;
                        look += step;
                    }
                    Idle::Sleep => {
                        self.now += left + self.wake_cost;
                        self.patience.slept(self.now);
                        self.sleeps += 1;
                        break true;
                    }
                }
            };
            self.patience.worked(self.now, true);
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
            match bed.patience.next(bed.now, REQUEST) {
                Idle::Look => {
                    bed.now += US;
                    looked += US;
                }
                Idle::Sleep => {
                    bed.now += Duration::from_secs(1);
                    bed.patience.slept(bed.now);
                    bed.patience.worked(bed.now, false);
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
        bed.patience.yielded(US);
        for _ in 0..50 {
            bed.wait(ANSWER, 100 * US);
        }
        assert!(bed.patience.budget(ANSWER) > Duration::ZERO);
        bed.settle();
        // Each look finds that others run.
        let mut looks = 0;
        for _ in 0..10_000 {
            if bed.patience.next(bed.now, ANSWER) == Idle::Look {
                looks += 1;
                bed.patience.yielded(3000 * US);
                assert_eq!(bed.patience.next(bed.now, ANSWER), Idle::Sleep);
            }
            bed.wait(ANSWER, 100 * US);
        }
        assert_eq!(bed.sleeps, 10_000);
        assert!((10..60).contains(&looks), "{looks}");
        // They are gone: soon it looks all the time.
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
        // Most of them are not here just now.
        for hint in [ANSWER, REQUEST, ANSWER] {
            assert!(bed.wait(hint, 5 * US));
        }
        // They are gone.
        for _ in 0..30 {
            bed.wait(ANSWER, 5 * US);
        }
        bed.settle();
        for _ in 0..30 {
            bed.wait(ANSWER, 5 * US);
        }
        assert_eq!(bed.sleeps, 0);
        // Who is told to look looks.
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
        // Who does the awaited work runs in each look.
        for _ in 0..1000 {
            assert_eq!(bed.patience.next(bed.now, ANSWER), Idle::Look);
            bed.patience.yielded(150 * US);
            bed.wait(ANSWER, 300 * US);
        }
        assert_eq!(bed.sleeps, 0);
        // Somebody else takes the CPU for a time slice.
        assert_eq!(bed.patience.next(bed.now, ANSWER), Idle::Look);
        bed.patience.yielded(3000 * US);
        assert_eq!(bed.patience.next(bed.now, ANSWER), Idle::Sleep);
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

    #[test]
    fn a_wake_up_can_be_measured() {
        let cost = measure_wake_cost();
        assert!(cost > Duration::ZERO && cost <= Duration::from_millis(1), "{cost:?}");
        assert_eq!(cost, measure_wake_cost());
    }
}
