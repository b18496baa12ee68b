//! [`Liveness`]: whether the peer speaks, and takes what is sent to it. Pure: the caller has the
//! clock.

use std::time::{Duration, Instant};

/// A peer that keeps memory moves at least so many bytes in a second, or all that it keeps.
pub(super) const RATE_MIN: u64 = 1 << 20;
/// The time over which the pace of a peer is judged: a peer may pause, and then hurry.
const PACE_TIME: Duration = Duration::from_secs(20);

/// What a peer was last heard to say, and seen to take.
#[derive(Debug)]
pub(super) struct Liveness {
    // Until when the peer must have shown who it is, whatever it says meanwhile.
    prove_by: Option<Instant>,
    // When a command came last, and how long a silence ends the connection.
    heard: Instant,
    silence_max: Option<Duration>,
    // Send WRs that completed without error so far.
    completed: u64,
    // Bytes of our memory that the peer was to take or to fill so far.
    kept_ever: u64,
    // What `completed` was when it was last seen to change, or when nothing was on its way; and
    // when that was.
    progress: (u64, Instant),
    // When its pace is judged, and how many bytes it must have moved by then since ever.
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

    /// The longest silence from now on, of a peer that showed who it is.
    pub(super) fn set_silence_max(&mut self, silence: Duration) {
        self.silence_max = Some(silence);
    }

    /// The peer showed who it is.
    pub(super) fn is_known(&mut self) {
        self.prove_by = None;
    }

    /// The peer has shown that it is not who it must be: its time is over.
    pub(super) fn is_not_trusted(&mut self, now: Instant) {
        self.prove_by = Some(now);
    }

    /// Whether the peer has not shown in time who it is.
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

    /// The peer keeps so many bytes more of our memory, until it has taken or filled them.
    #[inline]
    pub(super) fn keeps(&mut self, bytes: u32) {
        self.kept_ever += u64::from(bytes);
    }

    /// Whether the peer has been silent for longer than it may.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        let silence = now.saturating_duration_since(self.heard);
        self.silence_max.is_some_and(|most| silence > most)
    }

    /// Whether [`Self::is_stuck`] needs to know what the peer keeps.
    pub(super) fn judges_pace(&self, waits: bool, now: Instant) -> bool {
        waits && self.pace.is_none_or(|(due, _)| now > due)
    }

    /// Whether WRs should have completed long ago. `waits` says that some are on their way, and
    /// `kept`, where [`Self::judges_pace`], how many bytes of our memory the peer keeps. A peer
    /// that takes no data would hold memory indefinitely; one that takes a little now and then,
    /// nearly so.
    pub(super) fn is_stuck(&mut self, waits: bool, kept: u64, now: Instant) -> bool {
        if !waits || self.completed != self.progress.0 {
            self.progress = (self.completed, now);
        }
        now.saturating_duration_since(self.progress.1) > self.progress_max
            || self.is_slow(waits, kept, now)
    }

    // Whether it moved less than it should since its pace was last judged.
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

    /// Does not count a time in which this thread did not run.
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

    /// A peer that keeps `kept` bytes and moves `step` of them in each second, by one WR: the
    /// second in which it is seen to be stuck.
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
        // What it keeps is enough.
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
    fn what_it_does_while_nothing_waits_does_not_count() {
        let begun = Instant::now();
        let mut peer = Liveness::new(None, MAX, begun);
        for second in 0..100 {
            let waits = second % 20 != 19;
            peer.completed();
            assert!(!peer.is_stuck(waits, MIB.into(), begun + Duration::from_secs(second)));
        }
        // Nor does a time in which nobody looked.
        peer.forgive(Duration::from_secs(50));
        peer.completed();
        assert!(!peer.is_stuck(true, MIB.into(), begun + Duration::from_secs(130)));
    }
}
