//! [`Failback`]: when a mount goes back to an address before the one in use. It probes the better
//! addresses, and goes back when one has answered several times in a row. An address that does not
//! hold is probed more and more rarely.

use std::time::{Duration, Instant};

use super::{Leaving, Loss};

/// How often in a row a better address must answer before the mount goes back to it.
const GOOD_PROBES: u32 = 2;
/// A path that the mount went back to and that lived this long is trusted again.
const STEADY: Duration = Duration::from_secs(600);
/// How often the time between two probes is doubled at most.
const FALLS_MAX: u32 = 6;

/// How long after the start of a target its better addresses are expected at any moment, and the
/// time between two probes meanwhile.
const HURRY: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(1));

/// The probes of better addresses.
#[derive(Clone, Debug)]
pub(super) struct Failback {
    // The address to probe next, and when.
    next: usize,
    at: Instant,
    under_way: Option<usize>,
    // Answers in a row, by address.
    good: Vec<u32>,
    // The address that the mount went back to last, until it has proved steady.
    back: Option<usize>,
    // How often an address that the mount went back to did not hold.
    falls: u32,
    // Until then the target has just started, and may not listen everywhere yet.
    hurry_until: Option<Instant>,
}

/// What a probe means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probed {
    /// The mount goes back to that address.
    GoBack,
    /// The next better address is probed at once.
    Next,
    /// The best address is probed again later.
    Later,
    /// It was not asked for.
    Unknown,
}

impl Failback {
    /// Of a mount with so many addresses.
    pub(super) fn new(addresses: usize, now: Instant) -> Self {
        Self {
            next: 0,
            at: now,
            under_way: None,
            good: vec![0; addresses],
            back: None,
            falls: 0,
            hurry_until: None,
        }
    }

    /// When the next probe is due, if none is under way.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.under_way.is_none().then_some(self.at)
    }

    /// Begins the probe that is due. Returns its address.
    pub(super) fn begin(&mut self) -> usize {
        self.under_way = Some(self.next);
        self.next
    }

    /// The probe under way is of no use any more.
    pub(super) fn cancel(&mut self) {
        self.under_way = None;
    }

    /// The target has just started: it is looked at more often for a while.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.hurry_until = Some(now + HURRY.0);
    }

    /// The mount begins with the best address again, after `period` or longer; sooner where the
    /// target has just started.
    pub(super) fn schedule(&mut self, period: Duration, now: Instant) {
        let hurries = self.hurry_until.is_some_and(|until| now < until);
        let period = if hurries { period.min(HURRY.1) } else { period };
        self.next = 0;
        self.under_way = None;
        self.at = now + period.saturating_mul(1 << self.falls);
    }

    /// A probe has ended, while `in_use` is the address in use.
    pub(super) fn probed(&mut self, address: usize, answers: bool, in_use: usize) -> Probed {
        if self.under_way != Some(address) {
            return Probed::Unknown;
        }
        self.under_way = None;
        let Some(good) = self.good.get_mut(address) else { return Probed::Unknown };
        *good = if answers { *good + 1 } else { 0 };
        if *good >= GOOD_PROBES {
            Probed::GoBack
        } else if !answers && address + 1 < in_use {
            self.next = address + 1;
            Probed::Next
        } else {
            Probed::Later
        }
    }

    /// The path by `address` ended after that time. `leaving` says whether the mount left it.
    pub(super) fn path_ended(
        &mut self,
        address: usize,
        lasted: Duration,
        loss: Loss,
        leaving: Option<Leaving>,
    ) {
        self.under_way = None;
        self.good.fill(0);
        if self.back == Some(address) && loss == Loss::Path {
            if lasted >= STEADY {
                self.falls = 0;
            } else if leaving.is_none() {
                self.fall();
            }
        }
        self.back = match leaving {
            Some(Leaving::Back { to }) => Some(to),
            _ => None,
        };
    }

    /// A try by that address failed.
    pub(super) fn try_failed(&mut self, address: usize) {
        if self.back == Some(address) {
            self.back = None;
            self.fall();
        }
    }

    /// The mount is connected by that address.
    pub(super) fn connected(&mut self, address: usize) {
        self.back = self.back.filter(|back| *back == address);
    }

    fn fall(&mut self) {
        self.falls = (self.falls + 1).min(FALLS_MAX);
    }
}
