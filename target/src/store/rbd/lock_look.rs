//! [`LockLooks`]: the looks at the lock of an image, and their verdict.
//!
//! A look asks the cluster for the owner, and librbd whether it believes to be the owner. librbd
//! may give the lock up for a moment, when an OSD comes back, and take it again. So only the second
//! look in a row at which librbd is not the owner is a loss, whatever the cluster says meanwhile.
//!
//! Between two looks the lock may have been lost, taken by another client, and taken again: the
//! cache would be older than the image. librbd takes a lost lock again only with a new watch, which
//! gives it a new cookie. It also renames a lock that it held all the time, when its watch broke.
//! That is one change of the header, and a lock that is removed and taken again is at least two. So
//! a new cookie is no loss where the header has changed once, and a loss otherwise. The versions of
//! a header also count changes of other objects, so some locks that were held are lost to this.

use nix::errno::Errno;

use super::header_lock::LockOwner;

/// What a look says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// This client has the lock.
    Held,
    /// Nothing is known now.
    Unknown,
    /// The cluster has fenced this client.
    Fenced,
    /// The image is lost, for this reason.
    Lost(String),
}

/// See the module.
#[derive(Debug)]
pub(super) struct LockLooks {
    // This client, as it was seen last.
    own: LockOwner,
    // librbd did not hold the lock at the last look.
    is_doubtful: bool,
    // The error of the last look, which is in the log.
    told: Option<Errno>,
}

impl LockLooks {
    /// Looks by this client, which has just taken the lock.
    pub(super) fn since(own: LockOwner) -> Self {
        Self { own, is_doubtful: false, told: None }
    }

    /// Judges a look. Returns an error to log, if it is new.
    pub(super) fn judge(
        &mut self,
        owner: Result<Option<LockOwner>, Errno>,
        is_owner: Result<bool, Errno>,
    ) -> (Verdict, Option<Errno>) {
        let failed = owner.as_ref().err().or(is_owner.as_ref().err()).copied();
        let news = failed.filter(|_| failed != self.told);
        self.told = failed;
        let doubted = std::mem::replace(&mut self.is_doubtful, is_owner == Ok(false));
        let verdict = match (owner, is_owner) {
            (Err(Errno::ESHUTDOWN), _) | (_, Err(Errno::ESHUTDOWN)) => Verdict::Fenced,
            // librbd says so of a lock that none of its clients made.
            (Err(Errno::EBUSY), _) => Verdict::Lost(
                "another client has its exclusive lock, and did not take it by librbd".to_owned(),
            ),
            (Ok(Some(owner)), _) if owner.address != self.own.address => {
                Verdict::Lost(format!("another client has its exclusive lock: {}", owner.address))
            }
            (Ok(Some(owner)), _) if self.may_be_taken_anew(&owner) => Verdict::Lost(
                "its exclusive lock was not held all the time, and another client may have written to it".to_owned(),
            ),
            (Ok(None), _) => Verdict::Lost("its exclusive lock is gone".to_owned()),
            (_, Ok(false)) if doubted => {
                Verdict::Lost("librbd does not hold its exclusive lock any more".to_owned())
            }
            (Ok(Some(owner)), is_owner) => {
                self.own = owner;
                if is_owner == Ok(true) { Verdict::Held } else { Verdict::Unknown }
            }
            (Err(_), _) => Verdict::Unknown,
        };
        (verdict, news)
    }

    /// Whether this client may have lost the lock and taken it again since the last look.
    fn may_be_taken_anew(&self, now: &LockOwner) -> bool {
        now.cookie != self.own.cookie && now.version != self.own.version + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "127.0.0.1:0/7";

    fn owner(address: &str, cookie: &str, version: u64) -> LockOwner {
        LockOwner { address: address.to_owned(), cookie: cookie.to_owned(), version }
    }

    fn looks() -> LockLooks {
        LockLooks::since(owner(OWN, "auto 1", 5))
    }

    fn own() -> Result<Option<LockOwner>, Errno> {
        Ok(Some(owner(OWN, "auto 1", 5)))
    }

    fn is_lost(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Lost(_))
    }

    #[test]
    fn whoever_else_has_the_lock_has_the_image() {
        let judge = |owner, is_owner| looks().judge(owner, is_owner).0;
        assert_eq!(judge(own(), Ok(true)), Verdict::Held);
        assert!(is_lost(&judge(Ok(Some(owner("127.0.0.1:0/8", "auto 1", 5))), Ok(true))));
        assert!(is_lost(&judge(Ok(None), Ok(true))));
        assert!(is_lost(&judge(Err(Errno::EBUSY), Ok(true))));
        assert_eq!(judge(Err(Errno::ESHUTDOWN), Ok(true)), Verdict::Fenced);
        assert_eq!(judge(own(), Err(Errno::ESHUTDOWN)), Verdict::Fenced);
        assert_eq!(judge(Err(Errno::ETIMEDOUT), Ok(true)), Verdict::Unknown);
        assert_eq!(judge(own(), Err(Errno::EIO)), Verdict::Unknown);
    }

    #[test]
    fn librbd_may_be_without_the_lock_at_one_look_and_not_at_two() {
        for second in [own(), Err(Errno::EIO)] {
            let mut looks = looks();
            assert_eq!(looks.judge(own(), Ok(false)).0, Verdict::Unknown);
            assert_eq!(looks.judge(own(), Ok(true)).0, Verdict::Held);
            assert_eq!(looks.judge(Err(Errno::EIO), Ok(false)).0, Verdict::Unknown);
            assert!(is_lost(&looks.judge(second, Ok(false)).0));
        }
    }

    #[test]
    fn a_lock_that_was_lost_and_taken_again_is_lost() {
        // Other changes of the header, as by a snapshot.
        let same = |version| Ok(Some(owner(OWN, "auto 1", version)));
        // A new watch: renamed in one change, or taken anew in two or more.
        let new = |version| Ok(Some(owner(OWN, "auto 2", version)));
        let mut looks = looks();
        assert_eq!(looks.judge(same(5), Ok(true)).0, Verdict::Held);
        assert_eq!(looks.judge(same(9), Ok(true)).0, Verdict::Held);
        assert_eq!(looks.judge(new(10), Ok(true)).0, Verdict::Held, "renamed");
        assert_eq!(looks.judge(new(14), Ok(true)).0, Verdict::Held);
        assert_eq!(looks.judge(Err(Errno::ETIMEDOUT), Ok(true)).0, Verdict::Unknown);
        assert!(is_lost(&looks.judge(same(16), Ok(true)).0), "removed, and taken again");
        let mut looks = self::looks();
        // By another client in between.
        assert!(is_lost(&looks.judge(new(9), Ok(true)).0));
    }

    #[test]
    fn an_error_is_told_once() {
        let mut looks = looks();
        let mut told = |owner| looks.judge(owner, Ok(true)).1;
        assert_eq!(told(Err(Errno::EIO)), Some(Errno::EIO));
        assert_eq!(told(Err(Errno::EIO)), None);
        assert_eq!(told(Err(Errno::EACCES)), Some(Errno::EACCES));
        assert_eq!(told(own()), None);
        assert_eq!(told(Err(Errno::EACCES)), Some(Errno::EACCES));
    }
}
