//! [`Liveness`]: whether the peer speaks, and takes the data sent to it. Pure: the caller has the
//! clock.

use std::time::{Duration, Instant};

/// A peer that keeps memory moves at least this many bytes in a second, or all that it keeps.
pub(super) const RATE_MIN: u64 = 1 << 20;
/// The interval of the pace checks: a peer may pause, and then hurry.
const PACE_TIME: Duration = Duration::from_secs(20);

/// The last signs of life of a peer, and its progress.
#[derive(Debug)]
pub(super) struct Liveness {
    // Deadline for the peer's proof of identity, regardless of its messages.
    prove_by: Option<Instant>,
    // Time of the last command, and the silence that ends the connection.
    heard: Instant,
    silence_max: Option<Duration>,
    // Successful completions of send WRs so far.
    completed: u64,
    // Bytes of our memory that the peer had to take or fill so far.
    kept_ever: u64,
    // The value of `completed` when it last changed, or when no WR was on its way; and the time of
    // that.
    progress: (u64, Instant),
    // Time of the next pace check, and the total of bytes that the peer must have moved by then.
    pace: Option<(Instant, u64)>,
    // Longest time without progress.
    progress_max: Duration,
}

impl Liveness {
    pub(super) fn new(prove_by: Option<Instant>, progress_max: Duration, now: Instant) -> Self {
        let progress = (0, now);
        Self {
            prove_by,
            heard: now,
            silence_max: None,
            completed: 0,
            kept_ever: 0,
            progress,
            pace: None,
            progress_max,
        }
    }

    /// Sets the longest silence of a peer that has proven its identity.
    pub(super) fn set_silence_max(&mut self, silence: Duration) {
        self.silence_max = Some(silence);
    }

    /// The peer proved its identity.
    pub(super) fn is_known(&mut self) {
        self.prove_by = None;
    }

    /// The peer failed its proof: its deadline is over.
    pub(super) fn is_not_trusted(&mut self, now: Instant) {
        self.prove_by = Some(now);
    }

    /// Whether the peer missed the deadline for its proof of identity.
    pub(super) fn is_stranger(&self, now: Instant) -> bool {
        self.prove_by.is_some_and(|by| now > by)
    }

    /// A command came.
    #[inline]
    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// A send WR completed without error.
    #[inline]
    pub(super) fn completed(&mut self) {
        self.completed += 1;
    }

    /// The peer keeps this many more bytes of our memory, until it has taken or filled them.
    #[inline]
    pub(super) fn keeps(&mut self, bytes: u32) {
        self.kept_ever += u64::from(bytes);
    }

    /// Whether the peer has been silent too long.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        let silence = now.saturating_duration_since(self.heard);
        self.silence_max.is_some_and(|most| silence > most)
    }

    /// Whether [`Self::is_stuck`] needs the number of bytes that the peer keeps.
    pub(super) fn judges_pace(&self, waits: bool, now: Instant) -> bool {
        waits && self.pace.is_none_or(|(due, _)| now > due)
    }

    /// Whether WRs should have completed long ago. `waits`: some are on their way. `kept`: bytes of
    /// our memory that the peer keeps, needed if [`Self::judges_pace`]. A peer that takes no data
    /// would hold memory forever; a peer that takes a little at intervals, almost as long.
    pub(super) fn is_stuck(&mut self, waits: bool, kept: u64, now: Instant) -> bool {
        if !waits || self.completed != self.progress.0 {
            self.progress = (self.completed, now);
        }
        now.saturating_duration_since(self.progress.1) > self.progress_max
            || self.is_slow(waits, kept, now)
    }

    // Whether the peer moved too few bytes since the last pace check.
    fn is_slow(&mut self, waits: bool, kept: u64, now: Instant) -> bool {
        if !waits {
            self.pace = None;
        }
        if !self.judges_pace(waits, now) {
            return false;
        }
        let moved = self.kept_ever.saturating_sub(kept);
        if self.pace.is_some_and(|(_, wanted)| moved < wanted) {
            return true;
        }
        let most = PACE_TIME.as_secs() * RATE_MIN;
        self.pace = Some((now + PACE_TIME, moved + kept.min(most)));
        false
    }

    /// Excludes a time in which this thread did not run.
    pub(super) fn forgive(&mut self, paused: Duration) {
        self.prove_by = self.prove_by.map(|by| by + paused);
        self.heard += paused;
        self.progress.1 += paused;
        if let Some((due, _)) = &mut self.pace {
            *due += paused;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_secs(5);
    const MIB: u32 = 1 << 20;

    /// A peer that keeps `kept` bytes and moves `step` of them in each second, by one WR. Returns
    /// the second in which it counts as stuck.
    fn stuck_after(kept: u32, step: u32) -> Option<u64> {
        let begun = Instant::now();
        let mut peer = Liveness::new(None, MAX, begun);
        peer.keeps(kept);
        (0..200).find(|second| {
            if step > 0 && *second > 0 {
                peer.completed();
                peer.keeps(step);
            }
            peer.is_stuck(true, kept.into(), begun + Duration::from_secs(*second))
        })
    }

    #[test]
    fn a_peer_that_keeps_much_must_move_much() {
        assert_eq!(stuck_after(64 * MIB, 0), Some(6));
        assert_eq!(stuck_after(64 * MIB, 4096), Some(21));
        assert_eq!(stuck_after(64 * MIB, MIB - 65536), Some(21));
        assert_eq!(stuck_after(64 * MIB, MIB), None);
        // A peer that moves all that it keeps is fast enough.
        assert_eq!(stuck_after(20 * 4096, 4096), None);
        assert_eq!(stuck_after(22 * 4096, 4096), Some(21));
    }

    #[test]
    fn a_peer_that_pauses_and_hurries_lives() {
        let begun = Instant::now();
        let mut peer = Liveness::new(None, MAX, begun);
        peer.keeps(64 * MIB);
        for second in 0..200 {
            if second % 5 == 4 {
                peer.completed();
                peer.keeps(6 * MIB);
            }
            let at = begun + Duration::from_secs(second);
            assert!(!peer.is_stuck(true, u64::from(64 * MIB), at), "{second}");
        }
    }

    #[test]
    fn time_without_waiting_work_does_not_count() {
        let begun = Instant::now();
        let mut peer = Liveness::new(None, MAX, begun);
        for second in 0..100 {
            let waits = second % 20 != 19;
            peer.completed();
            assert!(!peer.is_stuck(waits, MIB.into(), begun + Duration::from_secs(second)));
        }
        // A time without a check does not count either.
        peer.forgive(Duration::from_secs(50));
        peer.completed();
        assert!(!peer.is_stuck(true, MIB.into(), begun + Duration::from_secs(130)));
    }
}
