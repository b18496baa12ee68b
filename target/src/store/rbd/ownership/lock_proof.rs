//! [`LockProof`]: the last moment at which the cluster proved that an image is this target's. Pure:
//! times are milliseconds of a clock that goes on while a machine is suspended.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rblk_protocol::Mutation;

/// How long after the last proof of the lock the volume is still served. Another client can break
/// the lock of one that the cluster has not heard of for 30 s.
pub(crate) const PROVEN: Duration = Duration::from_secs(10);
/// How long a former owner may answer hosts from its cache after another client took the lock, and
/// some more: its last proof of the lock is older.
const FORMER_ANSWERS: Duration = PROVEN.saturating_add(Duration::from_secs(1));

/// See the module.
#[derive(Debug)]
pub struct LockProof(AtomicU64);

impl LockProof {
    /// The lock was proven then.
    #[must_use]
    pub fn at(then: u64) -> Self {
        Self(AtomicU64::new(then))
    }

    /// A look that began then has found the lock in place.
    pub fn proven(&self, then: u64) {
        self.0.store(then, Ordering::Relaxed);
    }

    /// Whether another client may have the image by now, since nothing has proven the lock for so
    /// long.
    #[must_use]
    pub fn is_stale(&self, now: u64) -> bool {
        let since = self.0.load(Ordering::Relaxed);
        let is_old = Duration::from_millis(now.saturating_sub(since)) > PROVEN;
        is_old && !Mutation::GroupHitAfterLoss.is_on()
    }
}

/// The moment from which no former owner answers a host from its cache any more, for a client that
/// took the lock then.
#[must_use]
pub fn former_answers_until(took: u64) -> u64 {
    let answers = u64::try_from(FORMER_ANSWERS.as_millis()).unwrap_or(u64::MAX);
    took.saturating_add(answers)
}

/// What the owner of an image does before it closes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BeforeClose {
    /// It notes that nobody owns the image. Every write of it has ended, and its hosts go on at the
    /// next owner.
    GiveBack,
    /// It looks at the lock first: after a pause of this machine, or of the way to the cluster, a
    /// loss may not be known yet. With the lock that it took, it gives the image back.
    Look,
    /// Nothing: another client may have the image. The next owner finds the note of one that has
    /// not the lock any more, and lets no host resume.
    Nothing,
}

impl BeforeClose {
    /// That of an image that is lost, or whose last proof of the lock is too old.
    #[must_use]
    pub fn of(is_lost: bool, is_stale: bool) -> Self {
        match (is_lost, is_stale) {
            (true, _) => Self::Nothing,
            (false, true) => Self::Look,
            (false, false) => Self::GiveBack,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_gives_back_only_what_it_may_still_have() {
        assert_eq!(BeforeClose::of(true, false), BeforeClose::Nothing);
        assert_eq!(BeforeClose::of(true, true), BeforeClose::Nothing);
        assert_eq!(BeforeClose::of(false, true), BeforeClose::Look);
        assert_eq!(BeforeClose::of(false, false), BeforeClose::GiveBack);
    }

    #[test]
    fn a_lock_is_proven_for_ten_seconds() {
        let proof = LockProof::at(5_000);
        assert!(!proof.is_stale(5_000) && !proof.is_stale(15_000));
        assert!(proof.is_stale(15_001));
        assert!(!proof.is_stale(4_000), "a look that another thread noted meanwhile");
        proof.proven(5_002);
        assert!(!proof.is_stale(15_001));
    }

    #[test]
    fn a_new_owner_waits_for_longer_than_a_former_one_answers() {
        let took = 7_000;
        let former = LockProof::at(took);
        assert!(former.is_stale(former_answers_until(took)));
        assert!(former_answers_until(took) > took + 10_000);
    }
}
