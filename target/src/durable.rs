//! [`replace`]: a small file that is either the old one or the new one after a crash, never a part.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Replaces the file at `path` by one with this text, or makes it. When this returns, the new file
/// is durable: its data is synced before the rename, and its directory after the rename.
///
/// # Errors
/// The system's. Then the old file or the new one is at `path`.
pub(crate) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let new = beside(path);
    let mut file = File::create(&new)?;
    file.write_all(text)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    sync_directory(path)
}

/// Removes the file at `path`, durably, and what a [`replace`] that failed left of a new one. That
/// there is no file is no error.
///
/// # Errors
/// The system's.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Part of a new file only takes space, which may be what is missing.
    let _ = fs::remove_file(beside(path));
    sync_directory(path)
}

/// Where the new file is written before it takes the place of the old one.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

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
