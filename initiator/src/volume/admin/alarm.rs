//! [`Alarm`]: one deadline that is usually seconds away, moves often and is rarely missed.
//!
//! A timer of the async runtime wakes its thread several times before a distant deadline, and once
//! more when a nearer deadline is set. That costs a host with a hundred idle mounts noticeable
//! time. The alarm is a timer of the kernel: it wakes once, at the deadline, and costs a system
//! call when the deadline changes.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use rblk_fabric::Readiness;

/// A deadline to wait for, in the tokio runtime of its creation.
#[derive(Debug)]
pub(crate) struct Alarm {
    timer: TimerFd,
    // A duplicate of the timer's descriptor.
    readiness: Readiness,
    // The time that the timer is set to, until its ring was seen.
    set: Option<Instant>,
}

impl Alarm {
    /// An alarm that is not set.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        let readiness = Readiness::new([Some(timer.as_fd()), None])?;
        Ok(Self { timer, readiness, set: None })
    }

    /// Waits until `deadline`; returns at once if it has passed. `now` is the present time. The
    /// wait may return early after a cancelled wait for a nearer deadline: check the clock. Cancel
    /// safe.
    ///
    /// # Errors
    /// The runtime is shutting down, or the system does not take the deadline.
    pub(crate) async fn until(&mut self, deadline: Instant, now: Instant) -> io::Result<()> {
        if self.set != Some(deadline) {
            // Zero would disarm the timer.
            let left = deadline.saturating_duration_since(now).max(Duration::from_nanos(1));
            let once = Expiration::OneShot(TimeSpec::from_duration(left));
            self.set = None;
            self.timer.set(once, TimerSetTimeFlags::empty())?;
            self.set = Some(deadline);
        }
        self.readiness.readable().await?;
        self.set = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Waits like a task with several reasons to wake: until the deadline.
    async fn wait(alarm: &mut Alarm, deadline: Instant) {
        loop {
            let now = Instant::now();
            if now >= deadline {
                return;
            }
            alarm.until(deadline, now).await.unwrap();
        }
    }

    #[test]
    fn it_rings_at_its_deadline_and_again_at_the_next() {
        runtime().block_on(async {
            let mut alarm = Alarm::new().unwrap();
            for step in [20, 0, 5, 30] {
                let begun = Instant::now();
                let deadline = begun + Duration::from_millis(step);
                alarm.until(deadline, begun).await.unwrap();
                assert!(Instant::now() >= deadline);
            }
            // A past deadline.
            let now = Instant::now();
            alarm.until(now.checked_sub(Duration::from_secs(1)).unwrap(), now).await.unwrap();
        });
    }

    #[test]
    fn a_deadline_that_moved_is_the_one_that_counts() {
        runtime().block_on(async {
            let mut alarm = Alarm::new().unwrap();
            let (ms, hour) = (Duration::from_millis, Duration::from_secs(3600));
            let begun = Instant::now();
            // Cancelled, and then set nearer.
            let given_up = tokio::time::timeout(ms(5), alarm.until(begun + hour, begun)).await;
            assert!(given_up.is_err());
            wait(&mut alarm, begun + ms(20)).await;
            // The alarm rang while no task waited for it, and is set later: the old ring must not
            // count for the new deadline.
            let now = Instant::now();
            let mut early = Box::pin(alarm.until(now + ms(300), now));
            let polled = std::future::poll_fn(|context| {
                std::task::Poll::Ready(early.as_mut().poll(context).is_pending())
            });
            assert!(polled.await);
            drop(early);
            std::thread::sleep(ms(310));
            tokio::task::yield_now().await;
            let deadline = Instant::now() + ms(30);
            wait(&mut alarm, deadline).await;
            // One deadline, waited for in two parts.
            let now = Instant::now();
            let deadline = now + ms(300);
            assert!(tokio::time::timeout(ms(5), alarm.until(deadline, now)).await.is_err());
            alarm.until(deadline, Instant::now()).await.unwrap();
            assert!(Instant::now() >= deadline);
        });
    }
}
