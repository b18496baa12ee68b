//! [`Failback`]: decides when a mount goes back to a better address than the one in use. It probes
//! the better addresses, and goes back after several good probes in a row. An address that failed
//! again after a return is probed more and more rarely.

use std::time::{Duration, Instant};

use super::{Leaving, LossKind};

/// Good probes in a row before the mount goes back to an address.
const GOOD_PROBES: u32 = 2;
/// The life of a path after which a return to its address counts as steady.
const STEADY: Duration = Duration::from_secs(600);
/// Limit of the doublings of the time between two probes.
const FALLS_MAX: u32 = 6;

/// The time after a target's start in which its better addresses may appear, and the time between
/// two probes meanwhile.
const HURRY: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(1));

/// The probes of better addresses.
#[derive(Clone, Debug)]
pub(super) struct Failback {
    // The address to probe next, and when.
    next: usize,
    at: Instant,
    under_way: Option<usize>,
    // Good probes in a row, by address.
    good: Vec<u32>,
    // The address of the last return, until it has proved steady.
    back: Option<usize>,
    // Returns to an address that did not hold.
    falls: u32,
    // The end of that time after a start of the target.
    hurry_until: Option<Instant>,
}

/// The result of a probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probed {
    /// Go back to that address.
    GoBack,
    /// Probe the next better address at once.
    Next,
    /// Probe the best address again later.
    Later,
    /// No probe was requested.
    Unknown,
}

impl Failback {
    /// For a mount with so many addresses.
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

    /// The time of the next probe, if none is under way.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.under_way.is_none().then_some(self.at)
    }

    /// Starts the due probe. Returns its address.
    pub(super) fn begin(&mut self) -> usize {
        self.under_way = Some(self.next);
        self.next
    }

    /// Drops the probe under way.
    pub(super) fn cancel(&mut self) {
        self.under_way = None;
    }

    /// The target has just started: probes more often for a while.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.hurry_until = Some(now + HURRY.0);
    }

    /// Schedules the best address after `period` or longer; sooner if the target has just started.
    pub(super) fn schedule(&mut self, period: Duration, now: Instant) {
        let hurries = self.hurry_until.is_some_and(|until| now < until);
        let period = if hurries { period.min(HURRY.1) } else { period };
        self.next = 0;
        self.under_way = None;
        self.at = now + period.saturating_mul(1 << self.falls);
    }

    /// Takes the result of a probe. `in_use` is the address in use.
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

    /// The path by `address` ended after that time. `leaving`: the mount left it.
    pub(super) fn path_ended(
        &mut self,
        address: usize,
        lasted: Duration,
        loss: LossKind,
        leaving: Option<Leaving>,
    ) {
        self.under_way = None;
        self.good.fill(0);
        if self.back == Some(address) && loss == LossKind::Path {
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
