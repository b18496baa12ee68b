//! [`StateObject`]: the object beside an image that has the facts of a group of targets: the record
//! of the volume, and the member that owns the image.
//!
//! It is an object of its own, `rblk.state.ID` in the pool and namespace of the image: to write the
//! metadata of an image can take its lock. Each change is one operation of an OSD, which compares
//! and writes at once. A fenced client changes nothing.
//!
//! The record has a revision, and the owner an epoch, which each change of owner raises. A record
//! is replaced only in the epoch of the member that replaces it, so a former owner cannot write,
//! fenced or not.

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use nix::errno::Errno;
use rblk_config::ImageName;
use serde::{Deserialize, Serialize};

use super::cluster::{Cluster, Pool, checked, text};
use super::library::{ATTRIBUTE_EQUALS, CREATE_EXCLUSIVE, Handle, Library};

/// The attribute with the revision of the record.
const REVISION: &CStr = c"rblk.revision";
/// The attribute with the epoch of the owner.
const EPOCH: &CStr = c"rblk.epoch";
/// The attribute with the owner.
const OWNER: &CStr = c"rblk.owner";
/// Longest record and longest attribute that is read, in bytes.
const TEXT_MAX: usize = 16 << 10;

/// The member of a group that owns an image, or gave it back last.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct OwnerNote {
    /// Its name in the group.
    pub member: String,
    /// The addresses that it listens on.
    pub addresses: Vec<String>,
    /// The address of its client of the cluster, as the lock names it. Empty: the image was given
    /// back, and nobody owns it.
    pub client: String,
    /// The client that gave the image back. No write of it is under way, and it closes the image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub closing: String,
    /// The number of the change of owner.
    pub epoch: u64,
    /// How often another client than a member may have written to the image between two members.
    #[serde(default)]
    pub lineage: u64,
}

impl OwnerNote {
    /// Whether the owner of the lock has given the image back, and is about to close it.
    pub(super) fn is_closing(&self, lock: Option<&str>) -> bool {
        self.client.is_empty() && lock.is_some_and(|client| client == self.closing)
    }

    /// Whether the owner is a target that is in no group.
    pub(super) fn is_alone(&self) -> bool {
        self.epoch > 0 && self.member.is_empty()
    }

    /// The note of a target in no group that is the owner now, as this client. None: no member of a
    /// group ever had the image, and nothing is noted.
    pub(super) fn of_alone(&self, client: &str) -> Option<Self> {
        let lineage = self.lineage + u64::from(!self.is_alone());
        let (client, epoch) = (client.to_owned(), self.epoch + 1);
        let note = Self { client, epoch, lineage, ..Self::default() };
        (self.epoch > 0).then_some(note)
    }
}

/// See the module. Dropped before its cluster.
#[derive(Debug)]
pub(super) struct StateObject {
    cluster: Handle,
    pool: Pool,
    name: CString,
}

// SAFETY: the functions of librados may be called with one handle by several threads.
unsafe impl Send for StateObject {}

/// The kept record, if there is one, and its revision.
pub(super) type KeptText = Option<(Vec<u8>, u64)>;

impl StateObject {
    /// The object of the image with this id.
    pub(super) fn of(cluster: &Cluster, image: &ImageName, id: &str) -> Result<Self, Errno> {
        let name = text(&format!("rblk.state.{id}"));
        Ok(Self { cluster: cluster.handle(), pool: cluster.pool(image)?, name })
    }

    /// Waits until no callback of a watch runs any more that has ended.
    pub(super) fn flush_watches(&self) {
        // SAFETY: an open cluster, which outlives this.
        unsafe { (self.library().rados_watch_flush)(self.cluster) };
    }

    /// Its name, for people.
    pub(super) fn name(&self) -> String {
        self.name.to_string_lossy().into_owned()
    }

    pub(super) fn library(&self) -> &'static Library {
        self.pool.library()
    }

    pub(super) fn pool(&self) -> Handle {
        self.pool.handle()
    }

    pub(super) fn object(&self) -> &CStr {
        &self.name
    }

    /// The record, as it is kept.
    pub(super) fn record(&self) -> Result<KeptText, Errno> {
        let mut bytes = vec![0_u8; TEXT_MAX];
        // SAFETY: an open pool; the call writes at most as many bytes as the buffer has.
        let read = checked(unsafe {
            let buffer = bytes.as_mut_ptr().cast::<c_char>();
            (self.library().rados_read)(self.pool(), self.name.as_ptr(), buffer, bytes.len(), 0)
        });
        match read {
            // An owner may be noted before the first record.
            Err(Errno::ENOENT) | Ok(0) => return Ok(None),
            Ok(len) => bytes.truncate(usize::try_from(len).unwrap_or(0)),
            Err(errno) => return Err(errno),
        }
        let revision = self.attribute(REVISION)?.and_then(|text| text.parse().ok());
        Ok(Some((bytes, revision.unwrap_or(0))))
    }

    /// The owner. The first one of an image has the epoch 1.
    pub(super) fn owner(&self) -> Result<OwnerNote, Errno> {
        let Some(text) = self.attribute(OWNER)? else { return Ok(OwnerNote::default()) };
        serde_json::from_str(&text).map_err(|_| Errno::EBADMSG)
    }

    fn attribute(&self, name: &CStr) -> Result<Option<String>, Errno> {
        let mut bytes = vec![0_u8; TEXT_MAX];
        // SAFETY: as for the record.
        let read = checked(unsafe {
            let buffer = bytes.as_mut_ptr().cast::<c_char>();
            let (object, name) = (self.name.as_ptr(), name.as_ptr());
            (self.library().rados_getxattr)(self.pool(), object, name, buffer, bytes.len())
        });
        match read {
            Ok(len) => bytes.truncate(usize::try_from(len).unwrap_or(0)),
            Err(Errno::ENOENT | Errno::ENODATA) => return Ok(None),
            Err(errno) => return Err(errno),
        }
        String::from_utf8(bytes).map(Some).map_err(|_| Errno::EBADMSG)
    }

    /// Replaces the record of revision `expected`, in this epoch of the owner. False: it has
    /// another revision, or the image another owner.
    pub(super) fn replace(
        &self,
        epoch: u64,
        (expected, next): (u64, u64),
        text: &[u8],
    ) -> Result<bool, Errno> {
        let change = Change::of(self);
        change.only_if(EPOCH, &number(epoch));
        change.only_if(REVISION, &number(expected));
        change.write(text);
        change.set(REVISION, &number(next));
        match change.carry_out() {
            // The note of the owner is gone with the object.
            Err(Errno::ENOENT) => Ok(false),
            replaced => replaced,
        }
    }

    /// Makes this member the owner, or (with an empty client) nobody, if the owner's epoch is
    /// `expected`. False: it is another one.
    pub(super) fn swap_owner(&self, expected: u64, note: &OwnerNote) -> Result<bool, Errno> {
        let words = serde_json::to_string(note).map_err(|_| Errno::EINVAL)?;
        let change = |prepare: &dyn Fn(&Change<'_>)| {
            let change = Change::of(self);
            prepare(&change);
            change.set(EPOCH, &number(note.epoch));
            change.set(OWNER, &words);
            change.carry_out()
        };
        if expected == 0 {
            match change(&|change| change.create()) {
                Err(Errno::EEXIST) => {}
                made => return made,
            }
        }
        match change(&|change| change.only_if(EPOCH, &number(expected))) {
            Err(Errno::ENOENT) => Ok(false),
            swapped => swapped,
        }
    }
}

/// The value of an attribute that was never set is empty.
fn number(number: u64) -> String {
    if number == 0 { String::new() } else { number.to_string() }
}

/// An operation that compares and writes.
struct Change<'o> {
    object: &'o StateObject,
    op: Handle,
}

impl<'o> Change<'o> {
    fn of(object: &'o StateObject) -> Self {
        // SAFETY: the call has no arguments; the drop releases what it makes.
        Self { object, op: unsafe { (object.library().rados_create_write_op)() } }
    }

    fn create(&self) {
        // SAFETY: an operation that is not carried out yet.
        unsafe {
            let create = self.object.library().rados_write_op_create;
            create(self.op, CREATE_EXCLUSIVE, ptr::null());
        }
    }

    fn only_if(&self, name: &CStr, value: &str) {
        let (library, value) = (self.object.library(), value.as_bytes());
        // SAFETY: as above; the call copies name and value.
        unsafe {
            (library.rados_write_op_cmpxattr)(
                self.op,
                name.as_ptr(),
                ATTRIBUTE_EQUALS,
                value.as_ptr().cast(),
                value.len(),
            );
        }
    }

    fn set(&self, name: &CStr, value: &str) {
        let (library, value) = (self.object.library(), value.as_bytes());
        // SAFETY: as above.
        unsafe {
            (library.rados_write_op_setxattr)(
                self.op,
                name.as_ptr(),
                value.as_ptr().cast(),
                value.len(),
            );
        }
    }

    fn write(&self, text: &[u8]) {
        // SAFETY: as above.
        unsafe {
            (self.object.library().rados_write_op_write_full)(
                self.op,
                text.as_ptr().cast(),
                text.len(),
            );
        }
    }

    /// Returns whether all comparisons held. Blocks as long as the cluster does.
    fn carry_out(self) -> Result<bool, Errno> {
        let object = self.object;
        // SAFETY: an open pool, and an operation that nothing else uses.
        let done = checked(unsafe {
            (object.library().rados_write_op_operate)(
                self.op,
                object.pool(),
                object.name.as_ptr(),
                ptr::null_mut(),
                0,
            )
        });
        match done {
            Ok(_) => Ok(true),
            Err(Errno::ECANCELED) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing uses the operation any more.
        unsafe { (self.object.library().rados_release_write_op)(self.op) }
    }
}
