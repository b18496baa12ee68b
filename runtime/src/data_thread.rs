//! [`run`]: the loop of a data thread, the same at both ends.
//!
//! ```text
//! turn ---- work was found ---------------------------------+
//!   |                                                       |
//!   +- none: look again, as long as the spin policy says ---+--> enter the kernel at most once
//!   |                                                       |         |
//!   +- none: arm, look once more, publish, sleep -----------+         +--> the next turn
//! ```
//!
//! Invariants:
//!
//! - **No event is slept through.** A thread arms its wake-ups, looks once more, and sleeps only if
//!   that look finds nothing. The look finds every event from before the arming; a later event ends
//!   the sleep.
//! - Every sleep is bounded ([`DataThread::longest_sleep`]). A sleep that took its whole time asks
//!   the devices again, in case a device lost its event.
//! - A turn enters its ring at most once, by [`DataThread::enter`]. Devices in software, yields and
//!   wake-ups of other threads make system calls of their own.
//! - Counters that others read are published before every sleep.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::moment::{Moment, MomentClock};
use crate::spin::{Hint, Idle, SpinMode, SpinPolicy};
use crate::wake_cost::measure_wake_cost;
use crate::yields::Yields;

/// The work that a turn found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// Work that no client waits for: mail, a heart-beat.
    Work,
    /// I/O, which clients wait for.
    Io,
}

impl Found {
    /// Work, if there was any; I/O, if it was that.
    #[must_use]
    pub fn of(busy: bool, io: bool) -> Self {
        match (busy, io) {
            (_, true) => Self::Io,
            (true, false) => Self::Work,
            (false, false) => Self::Nothing,
        }
    }
}

/// The result of a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// The work found.
    pub found: Found,
    /// The thread may look for work, or sleep, before its next turn. Always so when nothing was
    /// found. Where work was found, the thread may sleep if one system call can both submit the
    /// results and sleep.
    pub may_sleep: bool,
}

/// How a call of the kernel ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Woken {
    /// The thread was not allowed to sleep.
    DidNotSleep,
    /// An event ended the sleep.
    ByEvent,
    /// The sleep timed out.
    ByTime,
}

/// The thread that [`run`] drives.
pub trait DataThread {
    /// The result with which the thread ends.
    type End;
    /// The error that breaks the thread.
    type Error;

    /// Takes mail and events, does the work, and posts.
    ///
    /// # Errors
    /// The thread cannot go on.
    fn turn(&mut self, now: Moment) -> Result<ControlFlow<Self::End, Turn>, Self::Error>;

    /// The I/O under way, for the spin policy. `None`: nothing that is worth a look.
    fn awaited(&mut self) -> Option<Hint>;

    /// Asks the devices for an event at their next completion.
    fn arm(&mut self);

    /// Looks once more, after [`Self::arm`], at everything that could end a sleep.
    fn look_again(&mut self, now: Moment) -> Found;

    /// Publishes the counters: the thread is about to sleep.
    fn publish(&mut self, now: Moment);

    /// Whether a device of the thread does its work in threads of this host, as Soft-RoCE does. The
    /// thread then yields in each look.
    fn has_software_device(&mut self) -> bool;

    /// The longest sleep at this time.
    fn longest_sleep(&self, now: Instant) -> Duration;

    /// The system call of a turn, if one is needed: submits, and sleeps at most for the given time.
    ///
    /// # Errors
    /// The thread cannot go on.
    fn enter(&mut self, sleep: Option<Duration>) -> Result<Woken, Self::Error>;

    /// A sleep took its whole time: asks the devices whether they have something, in case one of
    /// them lost its event.
    fn ask_devices(&mut self);

    /// The thread yielded while it looked. For the counters.
    fn yielded(&mut self);
}

/// The loop of a data thread, turn by turn: for threads that do other things in between.
#[derive(Debug)]
pub struct Turns {
    policy: SpinPolicy,
    yields: Yields,
    clock: MomentClock,
}

impl Turns {
    /// A loop that looks for work as that mode says.
    #[must_use]
    pub fn new(mode: SpinMode) -> Self {
        let policy = SpinPolicy::new(mode, measure_wake_cost());
        Self { policy, yields: Yields::NONE, clock: MomentClock::default() }
    }

    /// The time, by the clock of the turns.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Moment {
        self.clock.now()
    }

    /// A turn, and the look or the sleep after it. Returns the result if the turn ended the loop.
    ///
    /// # Errors
    /// What broke the thread.
    #[inline]
    pub fn next<T: DataThread>(&mut self, thread: &mut T) -> Result<Option<T::End>, T::Error> {
        let now = self.clock.now();
        let turn = match thread.turn(now)? {
            ControlFlow::Continue(turn) => turn,
            ControlFlow::Break(end) => return Ok(Some(end)),
        };
        let sleep = self.sleep_after(thread, turn, now);
        let woken = thread.enter(sleep)?;
        if woken != Woken::DidNotSleep {
            self.policy.slept(Instant::now());
        }
        if woken == Woken::ByTime {
            thread.ask_devices();
        }
        Ok(None)
    }

    /// How long to sleep after a turn; `None` for not at all.
    fn sleep_after<T: DataThread>(
        &mut self,
        thread: &mut T,
        turn: Turn,
        moment: Moment,
    ) -> Option<Duration> {
        let (now, policy) = (moment.instant(), &mut self.policy);
        if turn.found != Found::Nothing {
            policy.worked(now, turn.found == Found::Io);
        }
        if !turn.may_sleep {
            return None;
        }
        let looks = thread.awaited().is_some_and(|hint| policy.next(now, hint) == Idle::Look);
        if looks {
            if turn.found == Found::Nothing
                && (self.yields.is_due(now) || thread.has_software_device())
            {
                self.yield_cpu(thread);
            }
            return None;
        }
        thread.arm();
        // Something may have come between the last look and the arming.
        match thread.look_again(moment) {
            Found::Nothing => {
                thread.publish(moment);
                Some(thread.longest_sleep(now))
            }
            found => {
                policy.worked(now, found == Found::Io);
                None
            }
        }
    }

    fn yield_cpu<T: DataThread>(&mut self, thread: &mut T) {
        let given_up = Instant::now();
        std::thread::yield_now();
        let took = given_up.elapsed();
        self.policy.yielded(took);
        self.yields.yielded(given_up, took);
        thread.yielded();
    }
}

/// Runs a data thread until one of its turns ends it.
///
/// # Errors
/// What broke the thread.
pub fn run<T: DataThread>(thread: &mut T, mode: SpinMode) -> Result<T::End, T::Error> {
    let mut turns = Turns::new(mode);
    loop {
        if let Some(end) = turns.next(thread)? {
            return Ok(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Follows a script, and notes the calls.
    struct Scripted {
        turns: Vec<ControlFlow<u32, Turn>>,
        look_again: Vec<Found>,
        woken: Woken,
        has_software_device: bool,
        calls: Vec<&'static str>,
    }

    impl DataThread for Scripted {
        type End = u32;
        type Error = ();

        fn turn(&mut self, _: Moment) -> Result<ControlFlow<u32, Turn>, ()> {
            self.calls.push("turn");
            Ok(self.turns.remove(0))
        }

        fn awaited(&mut self) -> Option<Hint> {
            Some(Hint::default())
        }

        fn arm(&mut self) {
            self.calls.push("arm");
        }

        fn look_again(&mut self, _: Moment) -> Found {
            self.calls.push("look");
            self.look_again.pop().unwrap_or(Found::Nothing)
        }

        fn publish(&mut self, _: Moment) {
            self.calls.push("publish");
        }

        fn has_software_device(&mut self) -> bool {
            self.has_software_device
        }

        fn longest_sleep(&self, _: Instant) -> Duration {
            Duration::from_secs(1)
        }

        fn enter(&mut self, sleep: Option<Duration>) -> Result<Woken, ()> {
            self.calls.push(if sleep.is_some() { "sleep" } else { "enter" });
            Ok(if sleep.is_some() { self.woken } else { Woken::DidNotSleep })
        }

        fn ask_devices(&mut self) {
            self.calls.push("ask");
        }

        fn yielded(&mut self) {
            self.calls.push("yield");
        }
    }

    fn turn(found: Found, may_sleep: bool) -> ControlFlow<u32, Turn> {
        ControlFlow::Continue(Turn { found, may_sleep })
    }

    fn calls(
        mode: SpinMode,
        turns: Vec<ControlFlow<u32, Turn>>,
        look_again: Vec<Found>,
        woken: Woken,
    ) -> Vec<&'static str> {
        let has_software_device = false;
        run_script(mode, Scripted { turns, look_again, woken, has_software_device, calls: vec![] })
    }

    fn run_script(mode: SpinMode, mut thread: Scripted) -> Vec<&'static str> {
        assert_eq!(run(&mut thread, mode), Ok(7));
        thread.calls
    }

    const END: ControlFlow<u32, Turn> = ControlFlow::Break(7);

    #[test]
    fn it_arms_and_looks_once_more_before_it_sleeps() {
        let turns = vec![turn(Found::Nothing, true), END];
        let calls = calls(SpinMode::Never, turns, vec![], Woken::ByEvent);
        assert_eq!(calls, ["turn", "arm", "look", "publish", "sleep", "turn"]);
    }

    #[test]
    fn what_came_before_the_arming_ends_the_way_to_a_sleep() {
        for found in [Found::Work, Found::Io] {
            let turns = vec![turn(Found::Nothing, true), END];
            let calls = calls(SpinMode::Never, turns, vec![found], Woken::ByEvent);
            assert_eq!(calls, ["turn", "arm", "look", "enter", "turn"]);
        }
    }

    #[test]
    fn a_sleep_that_took_its_whole_time_asks_the_devices() {
        let turns = vec![turn(Found::Nothing, true), END];
        let calls = calls(SpinMode::Never, turns, vec![], Woken::ByTime);
        assert_eq!(calls, ["turn", "arm", "look", "publish", "sleep", "ask", "turn"]);
    }

    #[test]
    fn work_is_followed_by_a_turn_or_joins_its_sleep() {
        let turns = vec![turn(Found::Io, false), turn(Found::Io, true), END];
        let calls = calls(SpinMode::Never, turns, vec![], Woken::ByEvent);
        assert_eq!(calls, ["turn", "enter", "turn", "arm", "look", "publish", "sleep", "turn"]);
    }

    #[test]
    fn it_yields_while_it_looks_and_only_then() {
        let turns = vec![turn(Found::Nothing, true), turn(Found::Io, true), END];
        let calls = calls(SpinMode::Always, turns, vec![], Woken::ByEvent);
        assert_eq!(calls, ["turn", "yield", "enter", "turn", "enter", "turn"]);
    }

    #[test]
    fn with_a_software_device_it_yields_in_each_look() {
        let looks = 50;
        let mut turns = vec![turn(Found::Nothing, true); looks];
        turns.push(END);
        let (look_again, woken, calls) = (Vec::new(), Woken::ByEvent, Vec::new());
        let thread = Scripted { turns, look_again, woken, has_software_device: true, calls };
        let calls = run_script(SpinMode::Always, thread);
        assert_eq!(calls.iter().filter(|call| **call == "yield").count(), looks);
    }
}
