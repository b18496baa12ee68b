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

use super::cluster::{Cluster, Pool, checked, text};
use super::library::{ATTRIBUTE_EQUALS, CREATE_EXCLUSIVE, Handle, Library};
use super::ownership::owner_note::OwnerNote;
use super::ownership::state_change::{KeptText, OWNER, REVISION, StateChange, StatePlace};

/// Longest record and longest attribute that is read, in bytes.
const TEXT_MAX: usize = 16 << 10;

/// See the module. Dropped before its cluster.
#[derive(Debug)]
pub(super) struct StateObject {
    cluster: Handle,
    pool: Pool,
    name: CString,
}

// SAFETY: the functions of librados may be called with one handle by several threads.
unsafe impl Send for StateObject {}

impl StateObject {
    /// The object of the image with this id.
    pub(super) fn of(cluster: &Cluster, image: &ImageName, id: &str) -> Result<Self, Errno> {
        Self::named(cluster, image, &format!("rblk.state.{id}"))
    }

    /// The object of this name, in the pool and namespace of an image.
    pub(super) fn named(cluster: &Cluster, image: &ImageName, name: &str) -> Result<Self, Errno> {
        Ok(Self { cluster: cluster.handle(), pool: cluster.pool(image)?, name: text(name) })
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

    fn attribute(&self, name: &str) -> Result<Option<String>, Errno> {
        let (mut bytes, name) = (vec![0_u8; TEXT_MAX], text(name));
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
}

impl StatePlace for StateObject {
    fn carry_out(&self, change: &StateChange) -> Result<bool, Errno> {
        let operation = Operation::of(self);
        if change.creates {
            operation.create();
        }
        for (name, value) in &change.only_if {
            operation.only_if(&text(name), value);
        }
        if let Some(record) = &change.text {
            operation.write(record);
        }
        for (name, value) in &change.sets {
            operation.set(&text(name), value);
        }
        operation.carry_out()
    }
}

/// An operation that compares and writes.
struct Operation<'o> {
    object: &'o StateObject,
    op: Handle,
}

impl<'o> Operation<'o> {
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

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing uses the operation any more.
        unsafe { (self.object.library().rados_release_write_op)(self.op) }
    }
}
