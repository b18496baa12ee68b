//! The directory of the mounts: each has a lock, a socket and a note there, by its name.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::NotRoot;

/// Where locks, sockets and notes are.
pub(crate) const RUN_DIR: &str = "/run/rblk/mounts";

/// Makes the directory. Only root may read it: a note there has what it takes to join a session.
pub(super) fn make() -> io::Result<()> {
    make_private(Path::new(RUN_DIR))
}

/// Makes a directory below `/run/rblk` that only its owner may use. An older release may have made
/// it wider. `/run/rblk` itself is for all to pass: the target, which is not root, has its socket
/// below it.
///
/// # Errors
/// The system's.
pub fn make_private(dir: &Path) -> io::Result<()> {
    if let Some(parent) = dir.parent()
        && !parent.exists()
    {
        std::fs::create_dir_all(parent)?;
        // Whatever the umask is.
        std::fs::set_permissions(parent, std::fs::Permissions::from_mode(0o755))?;
    }
    match std::fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700))
}

/// Whether this process may see the mounts. Without that right, no mount would look like none.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_below_is_private_and_the_way_there_is_not() {
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
