//! [`StuckData`]: detects a target that is lost again and again as soon as data is sent, although
//! every connection succeeds. The network drops large packets then: a switch or an interface has a
//! smaller MTU. Pure.

use std::time::{Duration, Instant};

/// The time after which a session counts as able to move data.
const SHORT: Duration = Duration::from_secs(30);
/// The number of short sessions in a row that justifies the hint.
const TIMES: u32 = 3;

/// The last sessions of a mount.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct StuckData {
    connected_at: Option<Instant>,
    in_a_row: u32,
}

impl StuckData {
    /// Records the start of a session.
    pub(super) fn connected(&mut self, now: Instant) {
        self.connected_at = Some(now);
    }

    /// Records the end of the session. Only the first call counts. `is_silent`: requests waited for
    /// the target, which did not answer for about the time of `detect`.
    pub(super) fn lost(&mut self, is_silent: bool, detect: Duration, now: Instant) {
        let Some(at) = self.connected_at.take() else { return };
        let is_short = (detect / 2..SHORT).contains(&now.saturating_duration_since(at));
        self.in_a_row = if is_silent && is_short { self.in_a_row.saturating_add(1) } else { 0 };
    }

    /// Records a failed connect: the target itself is away.
    pub(super) fn failed(&mut self) {
        self.in_a_row = 0;
    }

    /// Whether the hint has just become justified.
    pub(super) fn is_news(&self) -> bool {
        self.in_a_row == TIMES
    }

    /// The hint, if the losses justify one.
    pub(super) fn hint(&self, now: Instant) -> Option<&'static str> {
        let lasts = self.connected_at.is_some_and(|at| now.saturating_duration_since(at) >= SHORT);
        (self.in_a_row >= TIMES && !lasts).then_some(
            "logins pass, data does not: MTU? Compare it on both hosts and on every switch between them",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_silent_sessions_in_a_row_give_the_hint() {
        let detect = Duration::from_secs(5);
        let mut now = Instant::now();
        let mut data = StuckData::default();
        let mut session = |data: &mut StuckData, seconds, is_silent| {
            data.connected(now);
            now += Duration::from_secs(seconds);
            data.lost(is_silent, detect, now);
            data.hint(now).is_some()
        };
        assert!(![5, 6].map(|seconds| session(&mut data, seconds, true)).contains(&true));
        assert!(session(&mut data, 5, true));
        assert!(!session(&mut data, 0, true), "a reset comes at once");
        assert!(![5, 5].map(|seconds| session(&mut data, seconds, true)).contains(&true));
        data.failed();
        assert!(!session(&mut data, 5, true), "the target was away meanwhile");
        assert!(!session(&mut data, 5, false), "nothing waited");
        assert!(![5, 5, 31].map(|seconds| session(&mut data, seconds, true)).contains(&true));
        assert!(
            session(&mut data, 5, true) | session(&mut data, 5, true) | session(&mut data, 5, true)
        );
        data.connected(now);
        assert!(data.hint(now + Duration::from_secs(29)).is_some());
        assert!(data.hint(now + Duration::from_secs(30)).is_none(), "this one moves data");
    }
}
