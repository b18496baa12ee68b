//! Where the lab keeps what it fetched: `$XDG_CACHE_HOME/rblk-lab`, else `~/.cache/rblk-lab`.
//!
//! ```text
//! lock            held while anything below is being made
//! apt/            a private apt root: its own sources, lists and archives
//! kernels/REL/    vmlinux, lib/modules/REL, initramfs-HASH.cpio
//! accel/          verdicts of trial boots
//! logs/           consoles of the latest runs
//! ```
//!
//! A directory or file appears under its final name only when it is complete: it is made in
//! `tmp/` and renamed. Two runs at once therefore never see a half-made kernel; the lock only keeps
//! them from doing the same work twice. Removing the whole directory is always safe between runs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};
use tempfile::TempDir;

/// How many consoles of earlier runs are kept.
const LOGS_KEPT: usize = 20;

/// The cache directory, which exists.
#[derive(Debug)]
pub(crate) struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens the cache of this user and makes it if need be.
    pub(crate) fn open() -> Result<Self> {
        let base = match std::env::var_os("XDG_CACHE_HOME").filter(|value| !value.is_empty()) {
            Some(base) => PathBuf::from(base),
            None => {
                let home = std::env::var_os("HOME").context(
                    "neither XDG_CACHE_HOME nor HOME is set; set one, the lab keeps kernels there",
                )?;
                PathBuf::from(home).join(".cache")
            }
        };
        Self::at(&base.join("rblk-lab"))
    }

    /// Opens the cache at `root`.
    pub(crate) fn at(root: &Path) -> Result<Self> {
        let cache = Cache { root: root.to_owned() };
        for part in ["apt", "kernels", "accel", "logs", "tmp"] {
            let path = cache.path(part);
            fs::create_dir_all(&path).with_context(|| {
                format!("cannot make {} (the lab's cache; XDG_CACHE_HOME moves it)", path.display())
            })?;
        }
        Ok(cache)
    }

    /// A path inside the cache.
    pub(crate) fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.join(relative)
    }

    /// A directory of this run alone, on the same file system as the rest, deleted on drop.
    pub(crate) fn scratch_dir(&self) -> Result<TempDir> {
        let tmp = self.path("tmp");
        TempDir::new_in(&tmp)
            .with_context(|| format!("cannot make a directory in {}", tmp.display()))
    }

    /// Takes the lock under which the cache is filled; it is released when the file is dropped.
    pub(crate) fn lock(&self) -> Result<File> {
        let path = self.path("lock");
        let file =
            File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
        if file.try_lock().is_err() {
            eprintln!(
                "lab: waiting for another run that is filling the cache ({})",
                path.display()
            );
            file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(file)
    }

    /// Writes a small file whole or not at all.
    pub(crate) fn write(&self, path: &Path, content: &[u8]) -> Result<()> {
        let make = || -> Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(self.path("tmp"))?;
            std::io::Write::write_all(&mut file, content)?;
            file.persist(path)?;
            Ok(())
        };
        make().with_context(|| format!("cannot write {}", path.display()))
    }

    /// The path of a fresh, empty console log; the oldest logs are removed.
    pub(crate) fn new_log(&self, release: &str) -> Result<PathBuf> {
        let dir = self.path("logs");
        let mut logs: Vec<(SystemTime, PathBuf)> = fs::read_dir(&dir)?
            .flatten()
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        logs.sort();
        for (_, old) in logs.iter().take(logs.len().saturating_sub(LOGS_KEPT - 1)) {
            // Another run may have removed it first.
            let _ = fs::remove_file(old);
        }
        let (file, path) = tempfile::Builder::new()
            .prefix(&format!("{release}-"))
            .suffix(".log")
            .tempfile_in(&dir)
            .and_then(|file| file.keep().map_err(|error| error.error))
            .with_context(|| format!("cannot make a log in {}", dir.display()))?;
        drop(file);
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole() {
        let dir = TempDir::new().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let path = cache.path("accel/x");
        cache.write(&path, b"one").unwrap();
        cache.write(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(cache.path("tmp")).unwrap().count(), 0);
    }

    #[test]
    fn only_the_latest_logs_are_kept() {
        let dir = TempDir::new().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        for _ in 0..LOGS_KEPT + 5 {
            cache.new_log("7.2").unwrap();
        }
        assert_eq!(fs::read_dir(cache.path("logs")).unwrap().count(), LOGS_KEPT);
    }
}
