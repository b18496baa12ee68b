//! [`replace`]: a small file that is either the old one or the new one after a crash, never a part.
//!
//! The files of the state directory name the holder of each volume: they and their directory are
//! for the target's own user. [`directory`] also narrows the rights that an older release left.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

/// Rights of a file: the owner's.
pub(crate) const FILE_MODE: u32 = 0o600;
/// Rights of the directory.
const DIRECTORY_MODE: u32 = 0o700;
/// The rights of a group and of others, which no file here has.
const OF_OTHERS: u32 = 0o077;

/// The endings of the names of the files here.
const SUFFIXES: [&str; 6] =
    [".volume", ".renounced", ".new", ".lineage.lock", ".lineage", ".holders"];

/// Makes the directory, if it does not exist, and takes away the rights of others on it and on the
/// files of the target `name` in it. A directory that holds other files than those of targets keeps
/// its mode: it may be `/srv`. If rights cannot be taken away (another user's directory), that is
/// logged.
///
/// # Errors
/// The directory does not exist and cannot be made.
pub(crate) fn directory(path: &Path, name: &str) -> io::Result<()> {
    if !path.is_dir() {
        return fs::DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path);
    }
    let prefix = format!("{name}.");
    let (mut ours, mut others) = (0, 0);
    for entry in fs::read_dir(path)?.flatten() {
        let file = entry.file_name();
        let file = file.to_string_lossy();
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if !is_file || !SUFFIXES.iter().any(|suffix| file.ends_with(suffix)) {
            others += 1;
            continue;
        }
        ours += 1;
        if file.starts_with(&prefix) {
            narrow(&entry.path());
        }
    }
    if ours > 0 && others == 0 {
        narrow(path);
    }
    Ok(())
}

/// Takes away the rights of others on a file or directory.
fn narrow(path: &Path) {
    let Ok(meta) = fs::metadata(path) else { return };
    let mode = meta.permissions().mode() & 0o7777;
    if mode & OF_OTHERS == 0 {
        return;
    }
    let path_shown = path.display();
    match fs::set_permissions(path, fs::Permissions::from_mode(mode & !OF_OTHERS)) {
        Ok(()) => tracing::warn!(
            path = %path_shown,
            "had mode {mode:04o}, which others could use: now {:04o}",
            mode & !OF_OTHERS
        ),
        Err(error) => tracing::warn!(
            path = %path_shown, %error,
            "others may use it (mode {mode:04o}), and it cannot be changed: give it to the user of the target, or set \
             state_dir to a directory of that user"
        ),
    }
}

/// Replaces the file at `path` by one with this text, or makes it. When this returns, the new file
/// is durable: its data is synced before the rename, and its directory after the rename.
///
/// # Errors
/// The system's. Then the old file or the new one is at `path`.
pub(crate) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let new = beside(path);
    // A file that a crash left there may have been made with other rights.
    let _ = fs::remove_file(&new);
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(FILE_MODE).open(&new)?;
    file.write_all(text)?;
    // Not `sync_all`, which goes on after EINTR, and then may miss the one report of an error.
    nix::unistd::fsync(&file)?;
    fs::rename(&new, path)?;
    sync_directory(path)
}

/// Reads a file of the state directory, of `most` bytes at most. `None`: there is none.
///
/// # Errors
/// The system's: the content of the file is unknown.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    // A pipe in the place of the file would never be opened.
    let mut options = fs::OpenOptions::new();
    let file = match options.read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path) {
        // A link that leads nowhere may be a mount that is missing.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !path.is_symlink() => {
            return Ok(None);
        }
        file => file?,
    };
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text)?;
    Ok(Some(text))
}

/// Removes the file at `path`, durably, and the new file that a failed [`replace`] left. A missing
/// file is no error.
///
/// # Errors
/// The system's.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // A part of a new file only takes space, which may be scarce.
    let _ = fs::remove_file(beside(path));
    sync_directory(path)
}

/// The path of the new file before it takes the place of the old one.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Makes the names in the directory of `path` durable.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn only_the_owner_may_read_the_state() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("a/state");
        directory(&state, "t").unwrap();
        assert_eq!(mode(&state), 0o700);
        let path = state.join("t.holders");
        // A crash left a part that every user may read.
        fs::write(beside(&path), "half").unwrap();
        fs::set_permissions(beside(&path), fs::Permissions::from_mode(0o666)).unwrap();
        replace(&path, b"whole").unwrap();
        assert_eq!(mode(&path), 0o600);

        // An older release left a wider directory and wider files.
        let (other, link) = (state.join("u.holders"), state.join("t.link"));
        let passwd = dir.path().join("passwd");
        for file in [&other, &passwd] {
            fs::write(file, "").unwrap();
            fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).unwrap();
        directory(&state, "t").unwrap();
        assert_eq!((mode(&state), mode(&path)), (0o700, 0o600));
        assert_eq!(mode(&other), 0o644, "another target's");

        // The directory holds another file: it may be a directory of others, too.
        std::os::unix::fs::symlink(&passwd, &link).unwrap();
        fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).unwrap();
        directory(&state, "t").unwrap();
        assert_eq!(mode(&state), 0o755);
        assert_eq!(mode(&passwd), 0o644, "what a link names");
        let empty = dir.path().join("empty");
        fs::create_dir(&empty).unwrap();
        fs::set_permissions(&empty, fs::Permissions::from_mode(0o755)).unwrap();
        directory(&empty, "t").unwrap();
        assert_eq!(mode(&empty), 0o755);
    }

    #[test]
    fn a_file_is_replaced_whole_and_removed_with_its_new_part() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.state");
        for text in ["first", "second, longer", ""] {
            replace(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        }
        fs::write(dir.path().join("t.state.new"), "half").unwrap();
        for _ in 0..2 {
            remove(&path).unwrap();
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
        assert!(replace(&dir.path().join("missing/t.state"), b"").is_err());
    }
}
