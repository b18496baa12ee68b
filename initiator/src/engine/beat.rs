//! [`Beat`]: checks that the target still answers on a queue's own path while requests wait for it.
//! Pure.
//!
//! The heart-beat of the admin connection shows that one data thread of the target runs, and a
//! queue may be on another data thread. So when requests are outstanding on a path and no answer
//! came for the pulse's period, a KEEP_ALIVE is sent. The data thread answers it even while its
//! store is stuck. If no answer comes within the timeout after the silence was noticed, the path is
//! given up.
//!
//! The silence of a target that was not asked proves nothing. A program may leave its queue
//! undriven for any time, and a thread may be stopped. So the queue asks first when it is driven
//! again, and the target has the whole timeout from then. A poller does not look at every call, so
//! before the path ends the poller is made to look ([`Due::Look`]): answers that came in that time
//! count. An idle path asks nothing.

use std::time::Instant;

use rblk_protocol::Sequence;

use super::pulse::Pulse;

/// The action that is due.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Due {
    Nothing,
    /// Send a KEEP_ALIVE and [note](Beat::asked) it.
    Ask,
    /// The silence lasts too long, or answers were not read: poll for real.
    Look,
    /// The silence lasts too long: the path has ended.
    Dead,
}

/// The beat of one path.
#[derive(Debug, Default)]
pub(super) struct Beat {
    // The start of the present silence, while answers are awaited.
    silent_since: Option<Instant>,
    // The time when the silence exceeded the period and was noticed: the target is asked from then
    // on.
    noticed: Option<Instant>,
    // No slot was free for a KEEP_ALIVE when the silence was noticed, and the beat was not checked
    // for the timeout.
    noticed_again: bool,
    // The unanswered KEEP_ALIVE. It is not repeated: there is one tag for it.
    asked: Option<Sequence>,
    // `Due::Look` was returned for this silence: the arrived answers were read.
    looked: bool,
}

impl Beat {
    /// Records an answer of the target.
    pub(super) fn heard(&mut self) {
        self.silent_since = None;
        self.noticed = None;
        self.noticed_again = false;
        self.looked = false;
    }

    /// Records a sent KEEP_ALIVE.
    pub(super) fn asked(&mut self, sequence: Sequence) {
        self.asked = Some(sequence);
    }

    /// Whether an answer with these bits of its sequence is that of the KEEP_ALIVE.
    pub(super) fn take_answer(&mut self, check: u16) -> bool {
        let fits = self.asked.is_some_and(|sequence| check == (sequence.0 & 0xffff) as u16);
        if fits {
            self.asked = None;
        }
        fits
    }

    /// The action due, after every arrived completion was taken. `waits`: requests are outstanding.
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
        // An hour without requests, then one: the silence begins with that request.
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
        // A slow store: the next question comes a period later.
        let now = now + ms(1200);
        assert_eq!(beat.check(PULSE, now, true), Due::Nothing);
        assert_eq!(beat.check(PULSE, now + ms(501), true), Due::Ask);
        beat.asked(Sequence(8));
        // Only the KEEP_ALIVE is unanswered: no request waits for it.
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
        // Any answer ends the silence.
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
        // No check for a minute.
        let now = now + ms(60_000);
        assert_eq!(beat.check(PULSE, now, true), Due::Ask);
        beat.asked(Sequence(1));
        assert_eq!(beat.check(PULSE, now + ms(1250), true), Due::Nothing, "its time is not over");
        assert_eq!(beat.check(PULSE, now + ms(1251), true), Due::Look);
        assert_eq!(beat.check(PULSE, now + ms(1251), true), Due::Dead);
        // Answers that came meanwhile end the silence.
        beat.heard();
        assert_eq!(beat.check(PULSE, now + ms(60_000), true), Due::Nothing);
        // No check for a minute, and the earlier KEEP_ALIVE is unanswered: its time starts now.
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
        // No check for a minute: the KEEP_ALIVE was never sent.
        let now = now + ms(60_000);
        assert_eq!(beat.check(PULSE, now, true), Due::Ask);
        assert_eq!(beat.check(PULSE, now + ms(1250), true), Due::Ask);
        assert_eq!(beat.check(PULSE, now + ms(1251), true), Due::Look, "nothing is ever sent");
        assert_eq!(beat.check(PULSE, now + ms(1251), true), Due::Dead);
    }
}
