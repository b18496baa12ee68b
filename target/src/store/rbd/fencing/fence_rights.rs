//! [`FenceRights`]: the users of clusters that may fence other clients.
//!
//! A member of a group that cannot fence an owner takes no image over: its hosts would wait for
//! ever, and nobody would know before the owner is gone. So it serves no image of a group. A
//! cluster lists the capabilities of a user to its administrators alone, and the user finds out by
//! an entry for an address that nobody has. It lasts a second, and each entry makes a new map of
//! OSDs: a user that may fence is not asked again while this process lives.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rblk_config::ImageName;

use crate::store::rbd::cluster::{Cluster, ClusterPlace};
use crate::store::rbd::error::ImageError;
use crate::store::rbd::library::Library;

/// An address that no client has (RFC 5737), as Ceph writes it.
const NOBODY: &str = "192.0.2.1:0/1";
/// How long nobody is fenced.
const SECONDS: u32 = 1;

/// The configuration file of a cluster, the user, and the file with its key.
type KnownUser = (Option<PathBuf>, String, Option<PathBuf>);

/// See the module.
#[derive(Debug)]
pub(in crate::store::rbd) struct FenceRights(Mutex<BTreeSet<KnownUser>>);

impl FenceRights {
    /// Those that this process has found.
    pub(in crate::store::rbd) fn of_process() -> &'static Self {
        static FOUND: FenceRights = FenceRights(Mutex::new(BTreeSet::new()));
        &FOUND
    }

    /// Refuses an image whose user may not fence.
    pub(in crate::store::rbd) fn require(
        &self,
        cluster: &Cluster,
        place: &ClusterPlace,
        image: &ImageName,
    ) -> Result<(), ImageError> {
        let user = (place.conf.clone(), place.user.clone(), place.keyring.clone());
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known().contains(&user) {
            return Ok(());
        }
        try_to_fence(cluster, &place.user, image)?;
        known().insert(user);
        Ok(())
    }
}

/// Finds out whether users may fence, before a program of this version takes the place of another
/// one: it would serve no image of a user that may not. Users of clusters that do not answer in
/// time are not known to lack anything: their images wait for the cluster in any case.
///
/// # Errors
/// A user may not fence, with the command that lets it.
pub(crate) fn require_fencing(
    users: Vec<(ClusterPlace, ImageName)>,
    within: Duration,
) -> Result<(), ImageError> {
    let deadline = Instant::now() + within;
    let (sender, found) = mpsc::channel();
    for (place, image) in users {
        let (sender, name) = (sender.clone(), image.to_string());
        let asked = thread::Builder::new().name("rblk-rights".to_owned()).spawn(move || {
            // An error means that nobody waits any more.
            let _ = sender.send(may_fence_at(&place, &image));
        });
        asked.map_err(|source| ImageError::System { image: name, source })?;
    }
    drop(sender);
    first_lack(&found, deadline)
}

fn may_fence_at(place: &ClusterPlace, image: &ImageName) -> Result<(), ImageError> {
    let cluster = Cluster::connect(Library::get()?, place, image)?;
    try_to_fence(&cluster, &place.user, image)
}

fn first_lack(
    found: &Receiver<Result<(), ImageError>>,
    deadline: Instant,
) -> Result<(), ImageError> {
    while let Ok(one) = found.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        match one {
            Err(lack @ ImageError::NoFencing { .. }) => return Err(lack),
            Err(error) => tracing::debug!(%error, "cannot find out whether a user may fence"),
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Fences nobody, to find out whether the user may fence.
pub(in crate::store::rbd) fn try_to_fence(
    cluster: &Cluster,
    user: &str,
    image: &ImageName,
) -> Result<(), ImageError> {
    cluster.fence(NOBODY, SECONDS).map_err(|errno| {
        let (user, pool) = (user.to_owned(), image.pool.clone());
        let image = image.to_string();
        match errno {
            Errno::EPERM | Errno::EACCES => ImageError::NoFencing { image, user, pool, errno },
            errno => ImageError::Other { image, what: "fence a client", errno },
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_user_that_may_not_fence_is_a_reason_to_refuse() {
        let said = |answers: Vec<Result<(), ImageError>>| {
            let (sender, found) = mpsc::channel();
            answers.into_iter().for_each(|answer| sender.send(answer).unwrap());
            // One user's cluster does not answer.
            let found = first_lack(&found, Instant::now() + Duration::from_millis(10));
            drop(sender);
            found
        };
        let image = || "rbd/v".to_owned();
        let (within, errno) = (Duration::from_secs(10), Errno::EACCES);
        let silent = || Err(ImageError::NoMonitor { image: image(), within });
        assert!(said(vec![]).is_ok() && said(vec![Ok(()), silent()]).is_ok());
        let (user, pool) = ("weak".to_owned(), "rbd".to_owned());
        let lack = ImageError::NoFencing { image: image(), user, pool, errno };
        let error = said(vec![silent(), Ok(()), Err(lack)]).unwrap_err().to_string();
        assert!(error.contains("ceph auth caps client.weak"), "{error}");
    }
}
