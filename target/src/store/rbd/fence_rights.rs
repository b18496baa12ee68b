//! [`FenceRights`]: the users of clusters that may fence other clients.
//!
//! A member of a group that cannot fence an owner takes no image over: its hosts would wait for
//! ever, and nobody would know before the owner is gone. So it serves no image of a group. A
//! cluster lists the capabilities of a user to its administrators alone, and the user finds out by
//! an entry for an address that nobody has. It lasts a second, and each entry makes a new map of
//! OSDs: a user that may fence is not asked again while this process lives.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use rblk_config::ImageName;

use super::cluster::{Cluster, ClusterPlace};
use super::error::ImageError;

/// An address that no client has (RFC 5737), as Ceph writes it.
const NOBODY: &str = "192.0.2.1:0/1";
/// How long nobody is fenced.
const SECONDS: u32 = 1;

/// The configuration file of a cluster, the user, and the file with its key.
type KnownUser = (Option<PathBuf>, String, Option<PathBuf>);

/// See the module.
#[derive(Debug)]
pub(super) struct FenceRights(Mutex<BTreeSet<KnownUser>>);

impl FenceRights {
    /// Those that this process has found.
    pub(super) fn of_process() -> &'static Self {
        static FOUND: FenceRights = FenceRights(Mutex::new(BTreeSet::new()));
        &FOUND
    }

    /// Refuses an image whose user may not fence.
    pub(super) fn require(
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

/// Fences nobody, to find out whether the user may fence.
pub(super) fn try_to_fence(
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
