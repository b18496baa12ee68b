//! The directory of the mounts: each has a lock, a socket and a note there, by its name.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::not_there::NotRoot;

/// The directory of locks, sockets and notes.
pub const RUN_DIR: &str = "/run/rblk/mounts";

/// Makes the directory. Only root may read it: a note has the secrets of a session.
pub fn make() -> io::Result<()> {
    make_private(Path::new(RUN_DIR))
}

/// Makes a directory below `/run/rblk` that only its owner may use. An older release may have made
/// it with wider rights. `/run/rblk` itself is open to all: the target, which is not root, has its
/// socket below it.
///
/// # Errors
/// The system's.
pub fn make_private(dir: &Path) -> io::Result<()> {
    if let Some(parent) = dir.parent()
        && !parent.exists()
    {
        std::fs::create_dir_all(parent)?;
        // The umask may have removed bits.
        std::fs::set_permissions(parent, std::fs::Permissions::from_mode(0o755))?;
    }
    match std::fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))
}

/// Refuses if this process may not see the mounts. Without that right, the list of mounts would
/// seem empty.
///
/// # Errors
/// [`NotRoot`].
pub fn must_be_readable() -> Result<(), NotRoot> {
    readable(Path::new(RUN_DIR))
}

fn readable(dir: &Path) -> Result<(), NotRoot> {
    match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(NotRoot),
        _ => Ok(()),
    }
}

/// Names of the mounts with a socket or a note, living or dead.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directories_below_are_private_and_the_way_there_is_not() {
        let root = tempfile::tempdir().unwrap();
        let run = root.path().join("rblk");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for name in ["log", "mounts"] {
            make_private(&run.join(name)).unwrap();
        }
        assert_eq!((mode(&run), mode(&run.join("log"))), (0o755, 0o700));
        // As an older release made it.
        std::fs::set_permissions(run.join("log"), std::fs::Permissions::from_mode(0o755)).unwrap();
        make_private(&run.join("log")).unwrap();
        assert_eq!(mode(&run.join("log")), 0o700);
        std::fs::write(run.join("file"), "").unwrap();
        assert!(make_private(&run.join("file/below")).is_err());
    }
}
