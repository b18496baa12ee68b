//! [`BlockDevice`]: a disk and its partitions in sysfs.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A disk, or a partition of one.
#[derive(Debug)]
pub(super) struct BlockDevice {
    /// The kernel's name.
    pub(super) name: String,
    /// The directory in sysfs.
    pub(super) sys: PathBuf,
    /// `MAJOR:MINOR`.
    pub(super) number: String,
}

impl BlockDevice {
    /// A disk and its partitions.
    pub(super) fn all(root: &Path, disk: &str) -> Vec<Self> {
        let sys = root.join("sys/block").join(disk);
        let of = |name: &str, sys: PathBuf| {
            let number = fs::read_to_string(sys.join("dev")).unwrap_or_default();
            Self { name: name.to_owned(), sys, number: number.trim().to_owned() }
        };
        let names = entries(&sys).into_iter();
        let parts = names.filter(|name| sys.join(name).join("partition").exists());
        std::iter::once(of(disk, sys.clone()))
            .chain(parts.map(|name| of(&name, sys.join(&name))))
            .collect()
    }

    /// The path of the device.
    pub(super) fn node(&self) -> String {
        format!("/dev/{}", self.name)
    }

    /// Whether a path is one of the device. A device may have several: `/dev/mapper/NAME`.
    pub(super) fn is_at(&self, path: &str) -> bool {
        let number = || {
            let device =
                fs::metadata(path).ok().filter(|meta| meta.file_type().is_block_device())?;
            let device = device.rdev();
            Some(format!("{}:{}", libc::major(device), libc::minor(device)))
        };
        path == self.node()
            || path.starts_with("/dev/") && number().is_some_and(|number| number == self.number)
    }
}

/// The names in a directory, sorted; none if it cannot be read.
pub(super) fn entries(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}
