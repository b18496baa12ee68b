//! [`measure_wake_cost`]: the time to wake a thread on this host.

use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Rounds of the measurement.
const ROUNDS: usize = 16;

/// The time from the wake-up of a sleeping thread until it runs, on this host: the median of a few
/// rounds with a helper thread, measured once in a process. At most 1 ms; 10 µs when it cannot be
/// measured.
#[must_use]
pub(crate) fn measure_wake_cost() -> Duration {
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

    #[test]
    fn a_wake_up_can_be_measured() {
        let cost = measure_wake_cost();
        assert!(cost > Duration::ZERO && cost <= Duration::from_millis(1), "{cost:?}");
        assert_eq!(cost, measure_wake_cost());
    }
}
