//! [`Stopping`]: how far the end of a shard is. Pure.
//!
//! A shard that stops flushes its write-back volumes, then syncs every store that may be written.

use super::answers::OwnEnded;

/// How far the end of a shard is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stopping {
    // Flushes, then syncs, that have not ended.
    jobs: usize,
    syncing: bool,
    // None has failed.
    clean: bool,
}

impl Stopping {
    /// So many flushes begin.
    pub(super) fn new(flushes: usize) -> Self {
        Self { jobs: flushes, syncing: false, clean: true }
    }

    /// Flushes or syncs ended. Returns whether the syncs are to begin now.
    pub(super) fn ended(&mut self, own: OwnEnded) -> bool {
        debug_assert!(own.jobs <= self.jobs, "{own:?} of {self:?}");
        self.jobs = self.jobs.saturating_sub(own.jobs);
        self.clean &= own.failed == 0;
        self.jobs == 0 && !self.syncing
    }

    /// So many syncs begin.
    pub(super) fn sync(&mut self, syncs: usize) {
        (self.syncing, self.jobs) = (true, syncs);
    }

    /// Whether all flushes and syncs went well. `None`: some have not ended.
    pub(super) fn outcome(&self) -> Option<bool> {
        (self.syncing && self.jobs == 0).then_some(self.clean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WELL: OwnEnded = OwnEnded { jobs: 1, failed: 0 };
    const FAILED: OwnEnded = OwnEnded { jobs: 1, failed: 1 };

    #[test]
    fn syncs_begin_once_when_the_flushes_have_ended() {
        for (last, clean) in [(WELL, true), (FAILED, false)] {
            let mut stopping = Stopping::new(2);
            assert!(!stopping.ended(WELL) && stopping.ended(last));
            stopping.sync(2);
            assert_eq!((stopping.ended(WELL), stopping.outcome()), (false, None));
            assert_eq!((stopping.ended(WELL), stopping.outcome()), (false, Some(clean)));
        }
    }

    #[test]
    fn nothing_to_flush_is_no_reason_to_wait() {
        let mut stopping = Stopping::new(0);
        assert!(stopping.ended(OwnEnded::default()));
        stopping.sync(0);
        assert_eq!((stopping.ended(OwnEnded::default()), stopping.outcome()), (false, Some(true)));
    }
}
