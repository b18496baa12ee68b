//! [`Spent`]: the time and the CPU time of a piece of work.

use std::time::{Duration, Instant};

use nix::sys::resource::{Usage, UsageWho, getrusage};

/// The time and the CPU time of a piece of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    /// Time on the clock.
    pub(crate) wall: Duration,
    /// CPU time of this process and of the children that ended: user and system.
    pub(crate) cpu: Duration,
}

/// Measures a piece of work from its construction on.
#[derive(Debug)]
pub(crate) struct Meter {
    begun: Instant,
    cpu: Duration,
}

impl Meter {
    /// Begins to measure.
    pub(crate) fn start() -> Self {
        Self { begun: Instant::now(), cpu: cpu() }
    }

    /// The cost of the work so far. A child counts when it has ended and its parent has waited for
    /// it.
    pub(crate) fn spent(&self) -> Spent {
        Spent { wall: self.begun.elapsed(), cpu: cpu().saturating_sub(self.cpu) }
    }
}

impl Spent {
    /// The sum of both.
    #[must_use]
    pub(crate) fn plus(self, other: Spent) -> Self {
        Self { wall: self.wall + other.wall, cpu: self.cpu + other.cpu }
    }
}

fn cpu() -> Duration {
    let of = |who| getrusage(who).map_or(Duration::ZERO, |usage| of_usage(&usage));
    of(UsageWho::RUSAGE_SELF) + of(UsageWho::RUSAGE_CHILDREN)
}

fn of_usage(usage: &Usage) -> Duration {
    let micros = |time: nix::sys::time::TimeVal| {
        let micros = time.tv_sec().saturating_mul(1_000_000).saturating_add(time.tv_usec());
        Duration::from_micros(u64::try_from(micros).unwrap_or(0))
    };
    micros(usage.user_time()) + micros(usage.system_time())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_child_that_ended_counts() {
        let meter = Meter::start();
        let mut command = Command::new("sh");
        command.args(["-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"]);
        assert!(command.status().unwrap().success());
        let spent = meter.spent();
        assert!(spent.cpu >= Duration::from_millis(20), "{spent:?}");
        assert_eq!(spent.plus(Spent::default()), spent);
    }
}
