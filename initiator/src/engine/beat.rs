//! [`Beat`]: whether the target still answers on a queue's own path while requests wait for it.
//! Pure.
//!
//! The heart-beat of the admin connection shows that one data thread of the target runs, and a
//! queue may be on another data thread. So when requests are outstanding on a path and no answer
//! came for the pulse's period, a KEEP_ALIVE is sent, which the data thread answers whatever its
//! store does. When no answer came for the timeout after that was noticed, the path is given up.
//!
//! The silence of a target that was not asked says nothing. A program may not drive its queue for
//! as long as it likes, and a thread may be stopped. So who comes back asks first, and the target
//! has the whole timeout from then on. A poller does not look at every call, so before the path
//! ends the poller is told to look ([`Due::Look`]): answers that came in that time count. An idle
//! path asks nothing.

use std::time::Instant;

use rblk_protocol::Sequence;

use super::pulse::Pulse;

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Due {
    Nothing,
    /// Send a KEEP_ALIVE and [note](Beat::asked) it.
    Ask,
    /// The target is silent for too long, or its answers were not read: read what came.
    Look,
    /// The target is silent for too long: the path has ended.
    Dead,
}

/// The beat of one path.
#[derive(Debug, Default)]
pub(super) struct Beat {
    // Since when answers are awaited and no answer came.
    silent_since: Option<Instant>,
    // When it was noticed that this lasts longer than the period: from then on the target is asked.
    noticed: Option<Instant>,
    // There was no room for a KEEP_ALIVE when it was noticed, and nobody looked for the timeout.
    noticed_again: bool,
    // The KEEP_ALIVE that is not answered. It is not sent again: there is one tag for it.
    asked: Option<Sequence>,
    // `Due::Look` was returned for this silence: what came since was read.
    looked: bool,
}

impl Beat {
    /// The target answered something.
    pub(super) fn heard(&mut self) {
        self.silent_since = None;
        self.noticed = None;
        self.noticed_again = false;
        self.looked = false;
    }

    /// A KEEP_ALIVE was sent.
    pub(super) fn asked(&mut self, sequence: Sequence) {
        self.asked = Some(sequence);
    }

    /// An answer with these bits of its sequence is that of the KEEP_ALIVE.
    pub(super) fn take_answer(&mut self, check: u16) -> bool {
        let fits = self.asked.is_some_and(|sequence| check == (sequence.0 & 0xffff) as u16);
        if fits {
            self.asked = None;
        }
        fits
    }

    /// What to do, after everything that came was taken. `waits` says whether requests are
    /// outstanding.
    #[inline]
    pub(super) fn check(&mut self, pulse: Pulse, now: Instant, waits: bool) -> Due {
        if !waits {
            self.heard();
            return Due::Nothing;
        }
        let silent = now.saturating_duration_since(*self.silent_since.get_or_insert(now));
        if silent <= pulse.period { Due::Nothing } else { self.overdue(pulse, now) }
    }

    #[cold]
    fn overdue(&mut self, pulse: Pulse, now: Instant) -> Due {
        let noticed = *self.noticed.get_or_insert(now);
        let is_late = now.saturating_duration_since(noticed) > pulse.timeout;
        if is_late && self.asked.is_none() && !self.noticed_again {
            self.noticed_again = true;
            self.noticed = Some(now);
            Due::Ask
        } else if is_late {
            if std::mem::replace(&mut self.looked, true) { Due::Dead } else { Due::Look }
        } else if self.asked.is_none() {
            Due::Ask
        } else {
            Due::Nothing
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const PULSE: Pulse = Pulse {
        period: Duration::from_millis(500),
        idle_period: Duration::from_secs(4),
        timeout: Duration::from_millis(1250),
    };

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn it_asks_only_of_a_target_that_owes_an_answer() {
        let now = Instant::now();
        let mut beat = Beat::default();
        assert_eq!(beat.check(PULSE, now, false), Due::Nothing);
        // An hour without requests, then one: the silence begins with it.
        let now = now + ms(3_600_000);
        assert_eq!(beat.check(PULSE, now, true), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(500), true), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(501), true), Due::Ask);
        beat.asked(Sequence(0x1_0007));
        assert_eq!(beat.check(PULSE, now + ms(1000), true), Due::Nothing, "once");
        assert!(!beat.take_answer(6), "of something else");
        assert!(beat.take_answer(7));
        assert!(!beat.take_answer(7), "answered twice");
        beat.heard();
        // A store that takes its time: the next question comes a period later.
        let now = now + ms(1200);
        assert_eq!(beat.check(PULSE, now, true), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(501), true), Due::Ask);
        beat.asked(Sequence(8));
        // Everything was answered but the KEEP_ALIVE: no request waits for that.
        assert_eq!(beat.check(PULSE, now + ms(60_000), false), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(60_001), true), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(60_600), true), Due::Nothing, "it is under way");
    }

    #[test]
    fn silence_ends_the_path_in_a_bounded_time() {
        let now = Instant::now();
        let mut beat = Beat::default();
        beat.check(PULSE, now, true);
        assert_eq!(beat.check(PULSE, now + ms(600), true), Due::Ask);
        beat.asked(Sequence(1));
        // Another answer is as good as that of the beat.
        beat.heard();
        let now = now + ms(700);
        assert_eq!(beat.check(PULSE, now, true), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(501), true), Due::Nothing, "it is noticed");
        assert_eq!(beat.check(PULSE, now + ms(1751), true), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(1752), true), Due::Look);
        assert_eq!(beat.check(PULSE, now + ms(1752), true), Due::Dead);
    }

    #[test]
    fn a_thread_that_was_stopped_asks_first() {
        let now = Instant::now();
        let mut beat = Beat::default();
        beat.check(PULSE, now, true);
        // Nobody looked for a minute.
        let now = now + ms(60_000);
        assert_eq!(beat.check(PULSE, now, true), Due::Ask);
        beat.asked(Sequence(1));
        assert_eq!(beat.check(PULSE, now + ms(1250), true), Due::Nothing, "its time is not over");
        assert_eq!(beat.check(PULSE, now + ms(1251), true), Due::Look);
        assert_eq!(beat.check(PULSE, now + ms(1251), true), Due::Dead);
        // Unless answers came meanwhile.
        beat.heard();
        assert_eq!(beat.check(PULSE, now + ms(60_000), true), Due::Nothing);
        // Nobody looked for a minute, and the question of before is not answered: as if it had
        // been asked now.
        assert_eq!(beat.check(PULSE, now + ms(120_000), true), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(121_250), true), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(121_251), true), Due::Look);
    }

    #[test]
    fn a_question_without_room_is_asked_later_and_not_for_ever() {
        let now = Instant::now();
        let mut beat = Beat::default();
        beat.check(PULSE, now, true);
        assert_eq!(beat.check(PULSE, now + ms(501), true), Due::Ask, "there is no room");
        // Nobody looks for a minute: it was never asked.
        let now = now + ms(60_000);
        assert_eq!(beat.check(PULSE, now, true), Due::Ask);
        assert_eq!(beat.check(PULSE, now + ms(1250), true), Due::Ask);
        assert_eq!(beat.check(PULSE, now + ms(1251), true), Due::Look, "nothing is ever sent");
        assert_eq!(beat.check(PULSE, now + ms(1251), true), Due::Dead);
    }
}
