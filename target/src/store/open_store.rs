//! [`OpenStore`]: the open store of a volume, of any kind.

use std::fmt;
use std::sync::Arc;

use nix::errno::Errno;
use rblk_operate::target::store_fault::StoreFault;
use rblk_operate::target::store_room::StoreRoom;

use super::at_path::AtPath;
use super::{Attachment, Backing, Image, StoreError, StoreIdentity};

/// The open store of a volume. Control and all poll groups share it.
#[derive(Clone, Debug)]
pub enum OpenStore {
    /// A file or a block device.
    Local(Arc<Backing>),
    /// An image of a Ceph cluster.
    Image(Arc<Image>),
}

impl OpenStore {
    /// The file or device.
    #[must_use]
    pub(crate) fn local(&self) -> Option<&Arc<Backing>> {
        match self {
            Self::Local(backing) => Some(backing),
            Self::Image(_) => None,
        }
    }

    /// The image.
    #[must_use]
    pub(crate) fn image(&self) -> Option<&Arc<Image>> {
        match self {
            Self::Local(_) => None,
            Self::Image(image) => Some(image),
        }
    }

    /// The identity, which distinguishes the store from another one of its name; `None` if it has
    /// none.
    #[must_use]
    pub(crate) fn identity(&self) -> Option<StoreIdentity> {
        match self {
            Self::Local(backing) => backing.identity().cloned(),
            Self::Image(image) => image.identity(),
        }
    }

    /// The attachment of the disk below, when the store was opened; `None` if nobody counts it.
    #[must_use]
    pub(crate) fn attachment(&self) -> Option<Attachment> {
        self.local().and_then(|backing| backing.attachment())
    }

    /// Current size of the store in bytes. The size in force does not change. Does not block.
    ///
    /// # Errors
    /// The size is 0 or not a multiple of the block size.
    pub(crate) fn measured(&self) -> Result<u64, StoreError> {
        match self {
            Self::Local(backing) => backing.measured(),
            Self::Image(image) => Ok(image.measured()?),
        }
    }

    /// Sets the size in force, and that of a file or image. Returns the former length of a file
    /// that was made longer. May block as long as the store does.
    ///
    /// # Errors
    /// The store refuses, or is too short and cannot be made longer.
    pub(crate) fn resize(&self, to: u64) -> Result<Option<u64>, StoreError> {
        match self {
            Self::Local(backing) => backing.resize(to),
            Self::Image(image) => Ok(image.resize(to).map(|()| None)?),
        }
    }

    /// Whether the store can be made longer.
    #[must_use]
    pub(crate) fn can_grow(&self) -> bool {
        match self {
            Self::Local(backing) => backing.is_file() && !backing.read_only(),
            Self::Image(image) => !image.read_only(),
        }
    }

    /// Whether the store was opened for reading only.
    #[must_use]
    pub(crate) fn read_only(&self) -> bool {
        match self {
            Self::Local(backing) => backing.read_only(),
            Self::Image(image) => image.read_only(),
        }
    }

    /// Bytes to which the address of every segment of I/O must be aligned.
    #[must_use]
    pub(crate) fn memory_alignment(&self) -> u32 {
        match self {
            Self::Local(backing) => backing.memory_alignment(),
            Self::Image(_) => 1,
        }
    }

    /// The fault of a store that has not answered a look for long.
    #[must_use]
    pub(crate) fn silence(&self) -> Option<StoreFault> {
        match self {
            Self::Local(backing) => AtPath::CannotSee(Errno::ETIMEDOUT).told(backing),
            Self::Image(image) => image.look(),
        }
    }

    /// The fault of the store now, if it has one. May block as long as a file system does.
    #[must_use]
    pub(crate) fn fault(&self) -> Option<StoreFault> {
        match self {
            Self::Local(backing) => AtPath::look(backing).told(backing),
            Self::Image(image) => image.look(),
        }
    }

    /// The space of a file and of its file system. May block as long as the file system does.
    pub(crate) fn room(&self) -> Option<StoreRoom> {
        self.local().and_then(|backing| backing.room())
    }
}

impl fmt::Display for OpenStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(backing) => backing.path().display().fmt(f),
            Self::Image(image) => f.write_str(&image.name()),
        }
    }
}

impl From<Arc<Backing>> for OpenStore {
    fn from(backing: Arc<Backing>) -> Self {
        Self::Local(backing)
    }
}

impl From<Arc<Image>> for OpenStore {
    fn from(image: Arc<Image>) -> Self {
        Self::Image(image)
    }
}
