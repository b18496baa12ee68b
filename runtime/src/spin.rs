//! [`SpinPolicy`]: how long a data thread looks for work before it sleeps.
//!
//! To look costs CPU time, to sleep costs a wake-up. The length of the next wait decides which is
//! cheaper. That is not known, but a wait resembles the waits before it. So the policy keeps the
//! last 16 waits of each kind, and the thread looks for as long as would have cost least in them. A
//! wait shorter than the look costs what it took; a longer one costs the look and a wake-up. A
//! wake-up counts as a multiple of its measured time ([`measure_wake_cost`]), because the client
//! waits for it, too.
//!
//! To look pays only on a CPU that no other thread wants for long. The threads that do the awaited
//! work (those of a software device, the peer on the same host) may run on the same CPU; then a
//! look keeps the answer from coming. The thread yields at times while it looks, and a yield that
//! comes back late tells of this ([`SpinPolicy::yielded`]): then the thread sleeps, now and for
//! some waits to come. Only a long absence counts. A thread that ran for a short time did the
//! awaited work, and that time was needed in any case.
//!
//! With many requests under way, several requests share one wake-up, and those that come meanwhile
//! are served with them. Then the thread does not look. (Tried: at depth 32 the same I/O per
//! second, and twice the system calls.)
//!
//! Invariants:
//!
//! - After the last I/O the thread looks at most once, for at most `most`, and then sleeps until
//!   there is I/O again: beats, mail and time-outs start no new look.
//! - Waits count alike whether the thread looked or slept, so that a thread that sleeps finds out
//!   when looking pays again.
//! - Pure: no clock, no allocation.
//!
//! [`measure_wake_cost`]: crate::wake_cost::measure_wake_cost

use std::time::{Duration, Instant};

/// Waits of one kind that are remembered.
const WINDOW: usize = 16;
/// New waits after which the plan is recomputed. A wait longer than planned has it recomputed at
/// once.
const PLAN_EVERY: u8 = 4;
/// A look is never planned for less than this, nor is a wake-up worth less.
const LEAST: Duration = Duration::from_micros(50);
/// The cost of a wake-up as a multiple of its time: the other end, which sleeps because this end
/// does, and the client pay for it, too.
const WORTH: u32 = 64;
/// More requests than these are many.
const FEW: u32 = 8;
/// Requests of at least this size wait for the wire, and the CPU may have to do the work of the
/// wire.
const BULK_BYTES: u64 = 32 << 10;
/// A yield of this length let an unrelated thread run for a time slice. A yield without another
/// thread is far shorter.
const CONTENDED: Duration = Duration::from_millis(1);
/// The limit in multiples of a wake-up, for slow hosts.
const CONTENDED_WAKES: u32 = 32;
/// A yield longer than this multiple of the shortest one let others run.
const CONTENDED_TIMES: u32 = 4;
/// After others wanted the CPU: waits that are slept through at once. The number is doubled each
/// time, up to `REST_MOST`, and halved when no other thread wanted the CPU.
const REST: u32 = 8;
const REST_MOST: u32 = 256;

/// Whether and how a thread looks for work before it sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpinMode {
    /// Sleeps at once.
    Never,
    /// Looks for a fixed time.
    Fixed(Duration),
    /// Looks for as long as looking paid lately, within a bound.
    Adaptive {
        /// The longest look.
        most: Duration,
    },
    /// Never sleeps while it may have work.
    Always,
}

impl SpinMode {
    /// [`SpinMode::Adaptive`] with the longest look that is sensible.
    pub const ADAPTIVE: Self = Self::Adaptive { most: Duration::from_millis(5) };
}

/// The facts known at the start of a wait: the I/O under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Hint {
    /// Bytes of the requests that are under way.
    pub wire_bytes: u64,
    /// Those requests; none when the wait is for a request.
    pub outstanding: u32,
}

/// The next step without work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Idle {
    /// Look again. If the thread gives the CPU up before, it [says](SpinPolicy::yielded) how long
    /// that took.
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

/// The wait that the thread is in.
#[derive(Clone, Copy, Debug)]
struct CurrentWait {
    since: Instant,
    // None while many requests are under way: such waits are not looked through, and teach nothing.
    kind: Option<usize>,
    // The longest look in it.
    budget: Duration,
    // The thread slept in this wait, the last time until then.
    woke: Option<Instant>,
}

/// Whether other threads want the CPU.
#[derive(Clone, Copy, Debug)]
struct Contention {
    // Another thread wanted the CPU in this wait, or in one shortly before.
    now: bool,
    shortest_yield: Duration,
    // Waits to sleep through, because others want the CPU, and how many the next time.
    rest: u32,
    next_rest: u32,
}

impl Contention {
    const NONE: Self = Self { now: false, shortest_yield: Duration::MAX, rest: 0, next_rest: REST };

    fn begin_wait(&mut self) {
        self.now = self.rest > 0;
        self.rest = self.rest.saturating_sub(1);
    }

    /// A wait was looked through, and no other thread wanted the CPU. That may have been luck.
    fn relax(&mut self) {
        self.next_rest = (self.next_rest / 2).max(REST);
    }

    fn yielded(&mut self, took: Duration, wake_cost: Duration, adapts: bool) {
        self.shortest_yield = self.shortest_yield.min(took);
        let slice = CONTENDED.max(wake_cost * CONTENDED_WAKES);
        if adapts && took > slice.max(self.shortest_yield.saturating_mul(CONTENDED_TIMES)) {
            self.now = true;
            self.rest = self.next_rest;
            self.next_rest = (self.next_rest * 2).min(REST_MOST);
        }
    }
}

/// When one thread looks and when it sleeps. See the module.
#[derive(Clone, Debug)]
pub(crate) struct SpinPolicy {
    mode: SpinMode,
    wake_cost: Duration,
    // By kind of wait.
    kinds: [Waits; 3],
    wait: Option<CurrentWait>,
    contention: Contention,
    // The most requests under way lately, bulk data apart, a tenth less with every wait: those of a
    // burst are seldom all here.
    peak: u32,
}

impl SpinPolicy {
    /// `wake_cost` is the time of a wake-up on this host.
    #[must_use]
    pub(crate) fn new(mode: SpinMode, wake_cost: Duration) -> Self {
        Self {
            mode,
            wake_cost,
            kinds: [Waits::NONE; 3],
            wait: None,
            contention: Contention::NONE,
            peak: 0,
        }
    }

    /// Decides the next step without work. `hint` counts when the wait begins.
    pub(crate) fn next(&mut self, now: Instant, hint: Hint) -> Idle {
        let wait = match self.wait {
            Some(wait) => wait,
            None => self.begin(now, hint),
        };
        let looks = match self.mode {
            SpinMode::Never => false,
            SpinMode::Always => true,
            // After a sleep there is no more look in the same wait.
            SpinMode::Fixed(_) | SpinMode::Adaptive { .. } => {
                wait.woke.is_none()
                    && !self.contention.now
                    && now.saturating_duration_since(wait.since) < wait.budget
            }
        };
        if looks { Idle::Look } else { Idle::Sleep }
    }

    /// Records work. `was_io`: clients wait for it; it was no beat and no mail.
    pub(crate) fn worked(&mut self, now: Instant, was_io: bool) {
        if !was_io {
            return;
        }
        // No wait was begun: the thread had work all the time.
        let Some(CurrentWait { since, kind, woke, .. }) = self.wait.take() else { return };
        if woke.is_none() && !self.contention.now {
            self.contention.relax();
        }
        let Some(kind) = kind else { return };
        // With a look, the thread would have seen this a wake-up earlier.
        let seen = woke.map_or(now, |woke| woke.checked_sub(self.wake_cost).unwrap_or(woke));
        let wait = nanos(seen.saturating_duration_since(since));
        let (worth, limit) = (self.worth(kind), self.limit(kind));
        self.kinds[kind].record(wait, nanos(worth), nanos(limit));
    }

    /// The thread gave its CPU up in a look, and has it back after `took`. Only the adaptive mode
    /// heeds it.
    pub(crate) fn yielded(&mut self, took: Duration) {
        let adapts = matches!(self.mode, SpinMode::Adaptive { .. });
        self.contention.yielded(took, self.wake_cost, adapts);
    }

    /// The thread slept until now.
    pub(crate) fn slept(&mut self, now: Instant) {
        if let Some(wait) = &mut self.wait {
            wait.woke = Some(now);
        }
    }

    /// How long the next look for that would be, at most.
    #[must_use]
    pub(crate) fn budget(&self, hint: Hint) -> Duration {
        match self.mode {
            SpinMode::Never => Duration::ZERO,
            SpinMode::Fixed(time) => time,
            SpinMode::Adaptive { .. } => kind(hint, self.peak).map_or(Duration::ZERO, |kind| {
                Duration::from_nanos(self.kinds[kind].budget.into())
            }),
            SpinMode::Always => Duration::MAX,
        }
    }

    fn begin(&mut self, now: Instant, hint: Hint) -> CurrentWait {
        self.peak = self.peak.saturating_sub(1 + self.peak / 10);
        if !is_bulk(hint) {
            self.peak = self.peak.max(hint.outstanding);
        }
        self.contention.begin_wait();
        let (kind, budget) = (kind(hint, self.peak), self.budget(hint));
        *self.wait.insert(CurrentWait { since: now, kind, budget, woke: None })
    }

    /// The cost of a wake-up in a wait of that kind. Bulk data comes by work that may need this
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

/// At most 4 s, which is longer than any look.
fn nanos(time: Duration) -> u32 {
    u32::try_from(time.as_nanos()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
