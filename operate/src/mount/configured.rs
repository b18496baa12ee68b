//! [`Configured`]: the configuration of a mount, and the part of it that a reload reads again.

use std::path::{Path, PathBuf};

use rblk_config::MountConfig;
use serde::{Deserialize, Serialize};

/// The configuration of a mount and its source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Configured {
    /// The values of file and flags, merged.
    pub config: MountConfig,
    /// The file that says which keys the target may prove. `None` where flags name the keys, or no
    /// keys are set.
    pub keys_file: Option<KeysFile>,
}

/// The file with the keys that the target may prove.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeysFile {
    path: PathBuf,
    by_flags: ByFlags,
}

/// The values that flags set beside the mount's file. Flags win at every reload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ByFlags {
    /// The volume.
    pub volume: bool,
    /// The key file of this host.
    pub key_file: bool,
}

impl ByFlags {
    /// Whether flags set nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl KeysFile {
    /// A file with that absolute path.
    #[must_use]
    pub fn new(path: PathBuf, by_flags: ByFlags) -> Self {
        Self { path, by_flags }
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The values that flags set beside the file.
    pub fn by_flags(&self) -> ByFlags {
        self.by_flags
    }
}
