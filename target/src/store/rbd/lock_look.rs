//! [`LockLooks`]: the looks at the lock of an image, and their verdict.
//!
//! A look asks the cluster for the owner, and librbd whether it believes to be the owner. librbd
//! may give the lock up for a moment, when an OSD comes back, and take it again. So only the second
//! look in a row at which librbd is not the owner is a loss, whatever the cluster says meanwhile.
//!
//! Between two looks the lock may have been lost, taken by another client, and taken again: the
//! cache would be older than the image. librbd takes a lost lock again only with a new watch, and
//! that gives the lock another cookie. So another cookie is a loss. It may be none: librbd also
//! renames a lock that it held all the time, when its watch broke, and nothing tells the two apart.
//! An OSD that dies and comes back keeps the watch, and so the cookie. An OSD that lives drops the
//! watch of a client that it has not heard of for 30 s.

use nix::errno::Errno;

use super::header_lock::LockOwner;

/// What a look says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
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
pub struct LockLooks {
    // This client, when it took the lock.
    own: LockOwner,
    // librbd did not hold the lock at the last look.
    is_doubtful: bool,
    // The error of the last look, which is in the log.
    told: Option<Errno>,
}

impl LockLooks {
    /// Looks by this client, which has just taken the lock.
    #[must_use]
    pub fn since(own: LockOwner) -> Self {
        Self { own, is_doubtful: false, told: None }
    }

    /// Judges a look. Returns an error to log, if it is new.
    pub fn judge(
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
            (Ok(Some(owner)), _) if owner.cookie != self.own.cookie => Verdict::Lost(
                "its exclusive lock may have been lost and taken again, since an OSD has dropped the watch of this \
                 target: another client may have written to it"
                    .to_owned(),
            ),
            (Ok(None), _) => Verdict::Lost("its exclusive lock is gone".to_owned()),
            (_, Ok(false)) if doubted => {
                Verdict::Lost("librbd does not hold its exclusive lock any more".to_owned())
            }
            (Ok(Some(_)), Ok(true)) => Verdict::Held,
            (Ok(Some(_)) | Err(_), _) => Verdict::Unknown,
        };
        (verdict, news)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "127.0.0.1:0/7";

    fn owner(address: &str, cookie: &str) -> LockOwner {
        LockOwner { address: address.to_owned(), cookie: cookie.to_owned() }
    }

    fn looks() -> LockLooks {
        LockLooks::since(owner(OWN, "auto 1"))
    }

    fn own() -> Result<Option<LockOwner>, Errno> {
        Ok(Some(owner(OWN, "auto 1")))
    }

    fn is_lost(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Lost(_))
    }

    #[test]
    fn whoever_else_has_the_lock_has_the_image() {
        let judge = |owner, is_owner| looks().judge(owner, is_owner).0;
        assert_eq!(judge(own(), Ok(true)), Verdict::Held);
        assert!(is_lost(&judge(Ok(Some(owner("127.0.0.1:0/8", "auto 1"))), Ok(true))));
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
        for meanwhile in [own(), Err(Errno::ETIMEDOUT)] {
            let mut looks = looks();
            assert!(!is_lost(&looks.judge(meanwhile, Ok(true)).0));
            let again = Ok(Some(owner(OWN, "auto 2")));
            assert!(is_lost(&looks.judge(again, Ok(true)).0));
        }
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
