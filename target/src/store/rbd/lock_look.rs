//! [`LockLooks`]: the looks at the lock of an image, and their verdict.
//!
//! A look asks the cluster for the owner, and librbd whether it believes to be the owner. librbd
//! may give the lock up for a moment, when an OSD comes back, and take it again. So only the second
//! look in a row at which librbd is not the owner is a loss, whatever the cluster says meanwhile.

use nix::errno::Errno;

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
#[derive(Debug, Default)]
pub(super) struct LockLooks {
    // librbd did not hold the lock at the last look.
    is_doubtful: bool,
    // The error of the last look, which is in the log.
    told: Option<Errno>,
}

impl LockLooks {
    /// Judges a look by the client at the address `own`. Returns an error to log, if it is new.
    pub(super) fn judge(
        &mut self,
        own: &str,
        owner: Result<Option<String>, Errno>,
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
            (Ok(Some(owner)), _) if owner != own => {
                Verdict::Lost(format!("another client has its exclusive lock: {owner}"))
            }
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

    fn own() -> Result<Option<String>, Errno> {
        Ok(Some(OWN.to_owned()))
    }

    fn is_lost(verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Lost(_))
    }

    #[test]
    fn whoever_else_has_the_lock_has_the_image() {
        let judge = |owner, is_owner| LockLooks::default().judge(OWN, owner, is_owner).0;
        assert_eq!(judge(own(), Ok(true)), Verdict::Held);
        assert!(is_lost(&judge(Ok(Some("127.0.0.1:0/8".to_owned())), Ok(true))));
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
            let mut looks = LockLooks::default();
            assert_eq!(looks.judge(OWN, own(), Ok(false)).0, Verdict::Unknown);
            assert_eq!(looks.judge(OWN, own(), Ok(true)).0, Verdict::Held);
            assert_eq!(looks.judge(OWN, Err(Errno::EIO), Ok(false)).0, Verdict::Unknown);
            assert!(is_lost(&looks.judge(OWN, second, Ok(false)).0));
        }
    }

    #[test]
    fn an_error_is_told_once() {
        let mut looks = LockLooks::default();
        let mut told = |owner| looks.judge(OWN, owner, Ok(true)).1;
        assert_eq!(told(Err(Errno::EIO)), Some(Errno::EIO));
        assert_eq!(told(Err(Errno::EIO)), None);
        assert_eq!(told(Err(Errno::EACCES)), Some(Errno::EACCES));
        assert_eq!(told(own()), None);
        assert_eq!(told(Err(Errno::EACCES)), Some(Errno::EACCES));
    }
}
