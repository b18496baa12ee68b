//! [`Crowded`]: the retries of a mount after the target refused an unproven connection for lack of
//! room. Each retry comes after a pause. Pure.

use std::time::{Duration, Instant};

use rblk_protocol::RejectReason;

use crate::volume::error::SessionError;

/// Time to wait for room, if that is longer than the time for a connect: the target lives, and
/// serves others, such as all other mounts of this host at boot.
const CROWDED_MAX: Duration = Duration::from_secs(30);

/// Shortest and longest pause before the next try at a crowded target. A proof takes some
/// milliseconds, and hosts that were refused together must not come back together.
const PAUSE_MS: (u64, u64) = (5, 40);

/// The time that one connection waits for room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crowded {
    until: Instant,
}

impl Crowded {
    /// For a connection with its first try now. `timeout` is the time for a connect.
    pub(super) fn new(timeout: Duration, now: Instant) -> Self {
        Self { until: now + timeout.max(CROWDED_MAX) }
    }

    /// The pause before the next try. `None`: the target had room, or the error is a different one,
    /// or it took too long.
    pub(super) fn pause_after<T>(
        self,
        tried: &Result<T, SessionError>,
        now: Instant,
    ) -> Option<Duration> {
        let Err(SessionError::Refused { reject, .. }) = tried else { return None };
        if reject.reason != Some(RejectReason::Crowded) || now >= self.until {
            return None;
        }
        // Without random numbers the pause is the shortest.
        let more = getrandom::u64().unwrap_or(0) % (PAUSE_MS.1 - PAUSE_MS.0);
        Some(Duration::from_millis(PAUSE_MS.0 + more))
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::{HelloReject, Version};

    use super::*;

    fn refused(reason: RejectReason) -> Result<(), SessionError> {
        let (newest, oldest, text) = (Version::NEWEST, Version::OLDEST, String::new());
        let reject = HelloReject { reason: Some(reason), newest, oldest, text };
        Err(SessionError::Refused { address: "tcp://192.0.2.1".to_owned(), reject })
    }

    #[test]
    fn a_crowded_target_is_asked_again_for_some_time_and_no_other() {
        let now = Instant::now();
        let crowded = Crowded::new(Duration::from_secs(1), now);
        let tried = refused(RejectReason::Crowded);
        for seconds in 0..30 {
            let now = now + Duration::from_secs(seconds);
            let pause = crowded.pause_after(&tried, now).expect("there is time");
            assert!((5..40).contains(&pause.as_millis()), "{pause:?}");
        }
        assert_eq!(crowded.pause_after(&tried, now + CROWDED_MAX), None);
        for tried in [Ok(()), refused(RejectReason::LimitReached)] {
            assert_eq!(crowded.pause_after(&tried, now), None, "{tried:?}");
        }
        let patient = Crowded::new(Duration::from_secs(60), now);
        assert!(patient.pause_after(&tried, now + Duration::from_secs(59)).is_some());
    }
}
