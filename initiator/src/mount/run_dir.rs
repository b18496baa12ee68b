//! The directory of the mounts: each has a lock, a socket and a note there, by its name.

use std::io;
use std::os::unix::fs::DirBuilderExt;

/// Where locks, sockets and notes are.
pub(crate) const RUN_DIR: &str = "/run/rblk/mounts";

/// Makes the directory. Only root may read it: a note there has what it takes to join a session.
pub(super) fn make() -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(RUN_DIR)
}

/// Names of the mounts that have a socket or a note, living or dead.
#[must_use]
pub fn names() -> Vec<String> {
    let Ok(dir) = std::fs::read_dir(RUN_DIR) else { return Vec::new() };
    let mut names: Vec<String> = dir
        .flatten()
        .filter_map(|entry| {
            let file = entry.file_name();
            let file = file.to_str()?;
            file.strip_suffix(".sock").or_else(|| file.strip_suffix(".json")).map(str::to_owned)
        })
        .collect();
    names.sort();
    names.dedup();
    names
}
