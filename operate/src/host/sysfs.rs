//! Small files and directories of the kernel and of systemd, read without a fault: an absent file
//! reads as empty.

use std::path::{Path, PathBuf};

/// Most entries of a directory that are looked at: devices, ports of a device, GIDs of a port.
const ENTRIES_MAX: usize = 1024;

/// Names in a directory, in order; none without the directory.
#[must_use]
pub fn names_in(path: &Path) -> Vec<String> {
    let Ok(dir) = std::fs::read_dir(path) else { return Vec::new() };
    let names = dir.flatten().take(ENTRIES_MAX);
    let mut names: Vec<String> =
        names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The text of a file, without the space around it.
#[must_use]
pub fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The directory of the RDMA devices of a host, below `root`.
#[must_use]
pub fn rdma_class(root: &Path) -> PathBuf {
    root.join("sys/class/infiniband")
}
