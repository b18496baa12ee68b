//! [`GroupLooker`]: reads what the cluster knows of the images of a group, and changes nothing: it
//! takes no lock, and opens no image.

use std::ffi::c_char;

use nix::errno::Errno;
use rblk_config::ImageName;

use super::cluster::{Cluster, ClusterPlace, Pool, checked, text};
use super::error::ImageError;
use super::fencing::fenced_client::FencedClient;
use super::header_lock::HeaderLock;
use super::library::Library;
use super::ownership::owner_note::OwnerNote;
use super::state_object::StateObject;
use crate::record::holders::HolderRecord;
use crate::record::parse_record;

/// How long an OSD may take to answer, in seconds.
const OSD_DEADLINE: &str = "10";
/// The longest id of an image that is read, in bytes.
const ID_MAX: usize = 256;

/// An image of a group.
#[derive(Debug)]
pub(crate) struct GroupLook {
    /// The member that owns it, or owned it last.
    pub owner: OwnerNote,
    /// The address of the client that has its lock.
    pub lock: Option<String>,
    /// The host that may write to its volume.
    pub holder: Option<HolderRecord>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct GroupLooker {
    cluster: Cluster,
    library: &'static Library,
    user: String,
}

impl GroupLooker {
    /// A client of this cluster, which first reads this image.
    ///
    /// # Errors
    /// The libraries of Ceph are missing, or the cluster does not let the client in.
    pub(crate) fn connect(place: &ClusterPlace, image: &ImageName) -> Result<Self, ImageError> {
        let library = Library::get()?;
        let cluster = Cluster::connect(library, place, image)?;
        // A version without the setting waits as long as the cluster does not answer.
        let _ = cluster.set("rados_osd_op_timeout", OSD_DEADLINE);
        Ok(Self { cluster, library, user: place.user.clone() })
    }

    /// Reads an image.
    ///
    /// # Errors
    /// It does not exist, or the cluster does not let the client read it.
    pub(crate) fn look(&self, image: &ImageName) -> Result<GroupLook, ImageError> {
        let fail = |what| move |errno| self.failed(image, what, errno);
        let (name, pool_name) = (image.to_string(), image.pool.clone());
        let pool = self.cluster.pool(image).map_err(|errno| match errno {
            Errno::ENOENT => ImageError::NoPool { image: name.clone(), pool: pool_name.clone() },
            errno => self.failed(image, "open its pool", errno),
        })?;
        let id = self.id_of(&pool, image).map_err(|errno| match errno {
            Errno::ENOENT => ImageError::NoImage { image: name.clone(), pool: pool_name.clone() },
            errno => self.failed(image, "read its id", errno),
        })?;
        let lock = HeaderLock::of(&self.cluster, image, &id).and_then(|lock| lock.owner());
        let lock = lock.map_err(fail("look at its exclusive lock"))?;
        let state = StateObject::of(&self.cluster, image, &id).map_err(fail("open its pool"))?;
        let owner = state.owner().map_err(fail("read its owner"))?;
        let record = state.record().map_err(fail("read the record of its volume"))?;
        let record = record.and_then(|(text, _)| parse_record(&text).ok());
        Ok(GroupLook {
            owner,
            lock: lock.map(|lock| lock.address),
            holder: record.and_then(|(record, _)| record.holder().cloned()),
        })
    }

    /// The object that a member of a target watches, in the pool of an image.
    pub(super) fn object_of(
        &self,
        image: &ImageName,
        (target, member): (&str, &str),
    ) -> Result<StateObject, Errno> {
        StateObject::named(&self.cluster, image, &format!("rblk.member.{target}/{member}"))
    }

    fn failed(&self, image: &ImageName, what: &'static str, errno: Errno) -> ImageError {
        let (image, user, pool) = (image.to_string(), self.user.clone(), image.pool.clone());
        match errno {
            Errno::EPERM | Errno::EACCES => {
                ImageError::Capability { image, user, pool, what, errno }
            }
            errno => ImageError::Other { image, what, errno },
        }
    }

    /// The id of an image, which the object of its name has.
    fn id_of(&self, pool: &Pool, image: &ImageName) -> Result<String, Errno> {
        let object = text(&format!("rbd_id.{}", image.image));
        let mut bytes = vec![0_u8; ID_MAX];
        // SAFETY: an open pool; the call writes at most as many bytes as the buffer has.
        let len = checked(unsafe {
            let buffer = bytes.as_mut_ptr().cast::<c_char>();
            (self.library.rados_read)(pool.handle(), object.as_ptr(), buffer, bytes.len(), 0)
        })?;
        bytes.truncate(usize::try_from(len).unwrap_or(0));
        id_in(&bytes).ok_or(Errno::EBADMSG)
    }

    /// The clients that the cluster has fenced.
    ///
    /// # Errors
    /// The monitors do not answer, or do not let the client read the list.
    pub(crate) fn fenced(&self, image: &ImageName) -> Result<Vec<FencedClient>, ImageError> {
        FencedClient::list(&self.cluster)
            .map_err(|errno| self.failed(image, "list the fenced clients", errno))
    }
}

/// The id in the object of the name of an image: its length, and its text.
fn id_in(bytes: &[u8]) -> Option<String> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let id = rest.get(..usize::try_from(u32::from_le_bytes(*len)).ok()?)?;
    String::from_utf8(id.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_its_length_before_it() {
        let bytes = b"\x04\x00\x00\x00100dX";
        assert_eq!(id_in(bytes).as_deref(), Some("100d"));
        for len in 0..8 {
            assert_eq!(id_in(&bytes[..len]), None, "{len}");
        }
        assert_eq!(id_in(b"\xff\xff\xff\xff100d"), None);
    }
}
