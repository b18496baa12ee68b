//! [`CompareVolume`]: the place of rblk's volume in `compare`.

use clap::ValueEnum;

/// Where rblk's volume is in `compare`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum CompareVolume {
    /// In registered memory of the target.
    Memory,
    /// On a RAM disk, behind the cache.
    RamDisk,
    /// In a file, behind the cache.
    File,
    /// In a file, without a cache: every request goes to the file.
    UncachedFile,
}

impl CompareVolume {
    /// Whether fio can have a file of this host beside the volume.
    pub(crate) const fn is_file(self) -> bool {
        matches!(self, Self::File | Self::UncachedFile)
    }
}
