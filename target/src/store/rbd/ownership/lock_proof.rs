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

/// How long a client that took the lock then has to wait until no former owner answers a host from
/// its cache any more.
#[must_use]
pub fn former_answers_for(took: u64, now: u64) -> Duration {
    (Duration::from_millis(took) + FORMER_ANSWERS).saturating_sub(Duration::from_millis(now))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let ends = took + u64::try_from(former_answers_for(took, took).as_millis()).unwrap();
        assert!(former.is_stale(ends));
        assert_eq!(former_answers_for(took, ends + 1), Duration::ZERO);
    }
}
