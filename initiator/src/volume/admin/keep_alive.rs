//! [`KeepAlive`]: decides when the next KEEP_ALIVE is due, and whether its answer is late. Pure.

use std::time::{Duration, Instant};

use rblk_protocol::{ResponseCapsule, Sequence};

use super::host_seconds::HostSeconds;
use crate::engine::pulse::Pulse;

/// Heart-beats with at least this period fall on whole seconds of the host. A heart-beat comes
/// earlier for that, never later.
const WHOLE_SECONDS_FROM: Duration = Duration::from_secs(2);

/// The KEEP_ALIVEs of a connection: one is under way, or the next one is due later.
#[derive(Debug)]
pub(super) struct KeepAlive {
    // The one under way, and the time of its SEND.
    under_way: Option<(Sequence, Instant)>,
    // The time of the last answer.
    last: Instant,
    seconds: HostSeconds,
}

/// The KEEP_ALIVE action due now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeepAliveDue {
    /// Nothing before that time.
    Later(Instant),
    /// Send one, and call [`KeepAlive::sent`].
    Send,
    /// The answer is late: the target counts as lost.
    Late,
}

impl KeepAlive {
    /// Before the first KEEP_ALIVE, which is due in one period.
    pub(super) fn new(seconds: HostSeconds, now: Instant) -> Self {
        Self { under_way: None, last: now, seconds }
    }

    /// The action due now, with `period` between an answer and the next question.
    pub(super) fn due(&self, pulse: Pulse, period: Duration, now: Instant) -> KeepAliveDue {
        let at = match self.under_way {
            Some((_, since)) => since + pulse.timeout,
            None if period >= WHOLE_SECONDS_FROM => self.seconds.not_after(self.last + period),
            None => self.last + period,
        };
        match self.under_way {
            _ if now < at => KeepAliveDue::Later(at),
            Some(_) => KeepAliveDue::Late,
            None => KeepAliveDue::Send,
        }
    }

    /// Records a sent KEEP_ALIVE.
    pub(super) fn sent(&mut self, sequence: Sequence, now: Instant) {
        debug_assert!(self.under_way.is_none(), "one KEEP_ALIVE at a time");
        self.under_way = Some((sequence, now));
    }

    /// Takes an answer, if it is the awaited one.
    pub(super) fn answered(&mut self, response: &ResponseCapsule, now: Instant) -> bool {
        let is_it = self.under_way.is_some_and(|(sequence, _)| response.answers(sequence));
        if is_it {
            (self.under_way, self.last) = (None, now);
        }
        is_it
    }

    /// The target was not watched since the last answer: a new period starts.
    pub(super) fn begin(&mut self, now: Instant) {
        self.last = self.last.max(now);
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::{Status, Tag};

    use super::*;

    #[test]
    fn a_target_that_does_not_answer_is_late() {
        let pulse = Pulse::of(Duration::from_secs(8));
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut beat = KeepAlive::new(HostSeconds::new(Duration::ZERO, begun), begun);
        assert_eq!(beat.due(pulse, pulse.period, at(0)), KeepAliveDue::Later(at(2)));
        assert_eq!(beat.due(pulse, pulse.idle_period, at(2)), KeepAliveDue::Later(at(16)));
        assert_eq!(beat.due(pulse, pulse.period, at(2)), KeepAliveDue::Send);
        beat.sent(Sequence(7), at(2));
        assert_eq!(beat.due(pulse, pulse.period, at(6)), KeepAliveDue::Later(at(7)));
        let answer = |sequence| ResponseCapsule::new(Tag(2), Sequence(sequence), Status::Ok);
        assert!(!beat.answered(&answer(6), at(6)), "of another command");
        assert!(beat.answered(&answer(7), at(6)));
        assert!(!beat.answered(&answer(7), at(6)), "once");
        assert_eq!(beat.due(pulse, pulse.period, at(6)), KeepAliveDue::Later(at(8)));
        beat.begin(at(7));
        assert_eq!(beat.due(pulse, pulse.period, at(8)), KeepAliveDue::Later(at(9)));
        beat.sent(Sequence(8), at(9));
        assert_eq!(beat.due(pulse, pulse.period, at(14)), KeepAliveDue::Late);
    }

    #[test]
    fn rare_heart_beats_of_all_mounts_of_a_host_fall_together() {
        let pulse = Pulse::of(Duration::from_secs(5));
        let begun = Instant::now();
        let ms = |ms| begun + Duration::from_millis(ms);
        // The clock of the host shows 3.5 s at `begun`, and two mounts begin at different times.
        let seconds = HostSeconds::new(Duration::from_millis(3500), begun);
        let [first, second] = [ms(0), ms(300)].map(|now| KeepAlive::new(seconds, now));
        for mut beat in [first, second] {
            assert_eq!(beat.due(pulse, pulse.idle_period, ms(400)), KeepAliveDue::Later(ms(9500)));
            beat.sent(Sequence(1), ms(9500));
            let answer = ResponseCapsule::new(Tag(2), Sequence(1), Status::Ok);
            assert!(beat.answered(&answer, ms(9507)));
            // The next one is a whole period later.
            let due = beat.due(pulse, pulse.idle_period, ms(9507));
            assert_eq!(due, KeepAliveDue::Later(ms(19_500)));
            // A disk in use is asked after its own period.
            assert_eq!(beat.due(pulse, pulse.period, ms(9507)), KeepAliveDue::Later(ms(10_757)));
        }
    }
}
