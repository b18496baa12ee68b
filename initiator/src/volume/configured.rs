//! [`Configured`]: what a mount is made of, and what of that is read again while it goes on.

use std::path::{Path, PathBuf};

use rblk_config::MountConfig;
use serde::{Deserialize, Serialize};

/// What a mount is made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Configured {
    /// What file and flags say together.
    pub config: MountConfig,
    /// The file that says which keys the target may prove. None where flags said it, or nothing.
    pub keys_file: Option<KeysFile>,
}

/// The file that says which keys the target may prove.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeysFile {
    path: PathBuf,
    by_flags: ByFlags,
}

/// What flags said beside the file that a mount was made of. They win whenever it is read again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ByFlags {
    /// Which volume it is.
    pub volume: bool,
    /// Where the key of this host is.
    pub key_file: bool,
}

impl ByFlags {
    /// Flags said nothing.
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl KeysFile {
    /// A file with that absolute path.
    #[must_use]
    pub fn new(path: PathBuf, by_flags: ByFlags) -> Self {
        Self { path, by_flags }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What flags said beside it.
    pub(crate) fn by_flags(&self) -> ByFlags {
        self.by_flags
    }
}
