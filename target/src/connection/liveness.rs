//! [`Liveness`]: whether the peer speaks, and takes what is sent to it. Pure: the caller has the
//! clock.

use std::time::{Duration, Instant};

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
    // What `completed` was when it was last seen to change, or when nothing was on its way; and
    // when that was.
    progress: (u64, Instant),
    // Longest time without progress.
    progress_max: Duration,
}

impl Liveness {
    pub(super) fn new(prove_by: Option<Instant>, progress_max: Duration, now: Instant) -> Self {
        let (silence_max, progress) = (None, (0, now));
        Self { prove_by, heard: now, silence_max, completed: 0, progress, progress_max }
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

    /// Whether the peer has been silent for longer than it may.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        let silence = now.saturating_duration_since(self.heard);
        self.silence_max.is_some_and(|most| silence > most)
    }

    /// Whether WRs should have completed long ago; `waits` says that some are on their way. A peer
    /// that takes no data would hold memory indefinitely.
    pub(super) fn is_stuck(&mut self, waits: bool, now: Instant) -> bool {
        if !waits || self.completed != self.progress.0 {
            self.progress = (self.completed, now);
        }
        now.saturating_duration_since(self.progress.1) > self.progress_max
    }

    /// Does not count a time in which this thread did not run.
    pub(super) fn forgive(&mut self, paused: Duration) {
        self.prove_by = self.prove_by.map(|by| by + paused);
        self.heard += paused;
        self.progress.1 += paused;
    }
}
