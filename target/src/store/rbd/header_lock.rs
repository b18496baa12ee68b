//! [`HeaderLock`]: the exclusive lock of an image as the cluster has it, with its owner.
//!
//! librbd keeps the lock at the header object of the image, by the class `lock` of the OSDs. Its
//! own function returns the owner's address, and not the cookie, by which a lock that was lost and
//! taken again differs from one that was held all the time.

use std::ffi::{CString, c_char, c_int};

use nix::errno::Errno;
use rblk_config::ImageName;

use super::cluster::{Cluster, Pool, checked, text};

/// The name of the lock (RBD_LOCK_NAME of librbd), and the tag that librbd gives it.
const NAME: &std::ffi::CStr = c"rbd_lock";
const TAG: &str = "internal";
/// Bytes for the texts of all owners. An exclusive lock has one.
const TEXTS: usize = 512;

/// The owner of a lock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LockOwner {
    /// The address of the client.
    pub address: String,
    /// The owner's name for the lock. librbd derives it from the watch that it has then.
    pub cookie: String,
}

/// See the module. Dropped before its cluster.
#[derive(Debug)]
pub(super) struct HeaderLock {
    pool: Pool,
    object: CString,
}

impl HeaderLock {
    /// The lock of the image with this id.
    pub(super) fn of(cluster: &Cluster, image: &ImageName, id: &str) -> Result<Self, Errno> {
        Ok(Self { pool: cluster.pool(image)?, object: text(&format!("rbd_header.{id}")) })
    }

    /// The owner now. `EBUSY`: somebody has the lock by other means than librbd. Blocks as long as
    /// the cluster does.
    pub(super) fn owner(&self) -> Result<Option<LockOwner>, Errno> {
        let (library, pool) = (self.pool.library(), self.pool.handle());
        let mut is_exclusive: c_int = 0;
        let mut texts = [[0_u8; TEXTS]; 4];
        let mut lens = [TEXTS; 4];
        let [tag, clients, cookies, addresses] = &mut texts;
        let [tag_len, clients_len, cookies_len, addresses_len] = &mut lens;
        // SAFETY: an open pool; the call writes a number, and into each buffer at most as many
        // bytes as its length says.
        let owners = unsafe {
            (library.rados_list_lockers)(
                pool,
                self.object.as_ptr(),
                NAME.as_ptr(),
                &raw mut is_exclusive,
                tag.as_mut_ptr().cast::<c_char>(),
                tag_len,
                clients.as_mut_ptr().cast::<c_char>(),
                clients_len,
                cookies.as_mut_ptr().cast::<c_char>(),
                cookies_len,
                addresses.as_mut_ptr().cast::<c_char>(),
                addresses_len,
            )
        };
        match checked(i32::try_from(owners).unwrap_or(i32::MAX)) {
            Ok(0) | Err(Errno::ENOENT) => return Ok(None),
            Ok(1) if is_exclusive != 0 && first(tag) == TAG => {}
            // Many owners, whose texts do not fit, share a lock that librbd does not share.
            Ok(_) | Err(Errno::ERANGE) => return Err(Errno::EBUSY),
            Err(errno) => return Err(errno),
        }
        // librbd, and the list of fenced clients for people, leave the kind of the address out.
        let address = first(addresses);
        let address = address.strip_prefix("v1:").unwrap_or(&address).to_owned();
        Ok(Some(LockOwner { address, cookie: first(cookies) }))
    }
}

/// The first text in a buffer of texts that end with zeros.
fn first(texts: &[u8]) -> String {
    let end = texts.iter().position(|byte| *byte == 0).unwrap_or(texts.len());
    String::from_utf8_lossy(&texts[..end]).into_owned()
}
