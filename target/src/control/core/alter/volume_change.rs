//! [`VolumeChange`]: a change of one volume, from the client that asks for it to the steps that
//! make it.

use rblk_config::{ByteSize, VolumeConfig};

use crate::volume::ids::VolumeIndex;

/// A change of one volume.
#[derive(Clone, Debug)]
pub enum VolumeChange {
    /// Serve a volume.
    Add(VolumeConfig),
    /// Serve a volume no longer.
    Remove {
        /// The volume's name.
        name: String,
        /// The volume's index: another volume of this name is left alone.
        which: Option<VolumeIndex>,
        /// Also if hosts have it open: they lose it. Also if its store does not take the dirty
        /// blocks: they are lost.
        force: bool,
    },
    /// Serve a volume no longer, since another client has its image. Its hosts may not resume.
    Lose {
        /// The volume's name.
        name: String,
        /// The volume's index.
        which: VolumeIndex,
    },
    /// Serve a volume no longer, since another member of the group is to serve it. Its hosts go on
    /// there.
    Yield {
        /// The volume's name.
        name: String,
    },
    /// Give a volume another size.
    Resize {
        /// The volume's name.
        name: String,
        /// The size; none: that of its file or device now.
        size: Option<ByteSize>,
        /// Whether it may become smaller.
        shrink: bool,
    },
    /// Configure the volume of this name like this.
    Become(VolumeConfig),
    /// Make its dirty blocks durable. The volume is served meanwhile and does not change.
    WriteBack {
        /// The volume's name.
        name: String,
    },
    /// Clone the file of a volume. The volume stays as it is.
    Snapshot {
        /// The volume's name.
        name: String,
    },
}

impl VolumeChange {
    /// The volume's name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Add(config) | Self::Become(config) => &config.name,
            Self::Remove { name, .. }
            | Self::Lose { name, .. }
            | Self::Resize { name, .. }
            | Self::WriteBack { name }
            | Self::Yield { name }
            | Self::Snapshot { name } => name,
        }
    }

    /// The change in a word, for the log.
    pub(in crate::control) fn word(&self) -> &'static str {
        match self {
            Self::Add(_) => "add",
            Self::Remove { .. } => "remove",
            Self::Lose { .. } => "lose",
            Self::Yield { .. } => "hand over",
            Self::Resize { .. } => "resize",
            Self::Become(_) => "set",
            Self::WriteBack { .. } => "write back",
            Self::Snapshot { .. } => "snapshot",
        }
    }

    /// Whether the volume is new.
    pub(in crate::control) fn is_addition(&self) -> bool {
        matches!(self, Self::Add(_))
    }

    /// Whether the volume is served no longer when the change is done.
    pub(in crate::control) fn is_removal(&self) -> bool {
        matches!(self, Self::Remove { .. } | Self::Lose { .. } | Self::Yield { .. })
    }

    /// Whether another member of the group is to serve the volume.
    pub(in crate::control) fn yields(&self) -> bool {
        matches!(self, Self::Yield { .. })
    }

    /// Whether the volume is served in another way when the change is done.
    pub(in crate::control) fn alters(&self) -> bool {
        matches!(self, Self::Resize { .. } | Self::Become(_))
    }

    /// Whether hosts may lose the volume and data by it.
    pub(super) fn is_forced(&self) -> bool {
        matches!(self, Self::Remove { force: true, .. } | Self::Lose { .. })
    }

    /// Whether the volume may become smaller.
    pub(super) fn may_shrink(&self) -> bool {
        matches!(self, Self::Resize { shrink: true, .. })
    }
}
