//! A real tree of files: chosen, copied, and compared by SHA-256.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::progress::Progress;
use crate::process;

/// Where files are looked for, unless a directory is named.
const CANDIDATES: &[&str] =
    &["/usr/lib/x86_64-linux-gnu", "/usr/lib", "/usr/share", "/usr", "/opt"];

/// A tree has at least this many bytes, and little more.
pub(crate) const ENOUGH: u64 = 100 << 20;

/// Larger files are left out, so that there are many.
const LARGEST: u64 = 8 << 20;

/// A tree of more files than this would take an emulated CPU too long.
const MOST_FILES: usize = 5000;

/// Threads that copy or hash.
const THREADS: usize = 2;

/// How often progress is shown.
const PAUSE: Duration = Duration::from_secs(5);

/// SHA-256 of a file.
type Sum = [u8; 32];

/// Some regular files below one directory.
#[derive(Debug)]
pub(crate) struct Tree {
    /// The directory.
    pub(crate) root: PathBuf,
    /// The files, relative to it.
    files: Vec<PathBuf>,
    /// All their bytes.
    pub(crate) bytes: u64,
}

impl Tree {
    /// The first candidate, or `named`, that has [`ENOUGH`] bytes of files.
    pub(crate) fn choose(named: Option<&Path>) -> Result<Self> {
        let candidates = match named {
            Some(dir) => vec![dir.to_owned()],
            None => CANDIDATES.iter().map(PathBuf::from).collect(),
        };
        for dir in &candidates {
            let tree = Self::gather(dir, ENOUGH);
            if tree.bytes >= ENOUGH {
                return Ok(tree);
            }
        }
        bail!(
            "there are not {} MiB of files of at most {} MiB in {candidates:?}; name another directory with --tree",
            ENOUGH >> 20,
            LARGEST >> 20
        )
    }

    /// Files below `root`, in the order of their names, until there are `enough` bytes.
    fn gather(root: &Path, enough: u64) -> Self {
        let mut tree = Tree { root: root.to_owned(), files: Vec::new(), bytes: 0 };
        let mut seen = HashSet::new();
        let mut dirs = vec![root.to_owned()];
        while let Some(dir) = dirs.pop() {
            let Ok(entries) = fs::read_dir(&dir) else { continue };
            let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
            paths.sort();
            let mut below = Vec::new();
            for path in paths {
                let Ok(meta) = fs::symlink_metadata(&path) else { continue };
                if meta.is_dir() {
                    below.push(path);
                } else if meta.is_file()
                    && meta.len() <= LARGEST
                    && seen.insert((meta.dev(), meta.ino()))
                    && let Ok(relative) = path.strip_prefix(root)
                {
                    tree.files.push(relative.to_owned());
                    tree.bytes += meta.len();
                }
                if tree.bytes >= enough || tree.files.len() >= MOST_FILES {
                    return tree;
                }
            }
            dirs.extend(below.into_iter().rev());
        }
        tree
    }

    /// How many files.
    pub(crate) fn len(&self) -> usize {
        self.files.len()
    }

    /// Copies all into `to`; gives the sums of what was read.
    pub(crate) fn copy(&self, to: &Path, progress: &Progress) -> Result<Vec<Sum>> {
        for dir in self.files.iter().filter_map(|file| file.parent()).collect::<HashSet<_>>() {
            let dir = to.join(dir);
            fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        }
        self.each("copied", progress, |file, count| {
            let (from, to) = (self.root.join(file), to.join(file));
            let mut target =
                File::create(&to).with_context(|| format!("cannot make {}", to.display()))?;
            digest(&from, |bytes| {
                count(bytes.len());
                target.write_all(bytes).with_context(|| format!("cannot write {}", to.display()))
            })
        })
    }

    /// The files whose copies below `copy` do not have these sums.
    pub(crate) fn differences(
        &self,
        copy: &Path,
        sums: &[Sum],
        progress: &Progress,
    ) -> Result<Vec<PathBuf>> {
        let found = self.each("compared", progress, |file, count| {
            digest(&copy.join(file), |bytes| {
                count(bytes.len());
                Ok(())
            })
        })?;
        let pairs = self.files.iter().zip(found.iter().zip(sums));
        Ok(pairs.filter(|(_, (a, b))| a != b).map(|(file, _)| file.clone()).collect())
    }

    /// Runs `work` for every file on some threads; the results are in the files' order.
    fn each(
        &self,
        done: &str,
        progress: &Progress,
        work: impl Fn(&Path, &dyn Fn(usize)) -> Result<Sum> + Sync,
    ) -> Result<Vec<Sum>> {
        let (next, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
        let shown = Mutex::new(Instant::now());
        let count = |more: usize| {
            let sum = bytes.fetch_add(more as u64, Ordering::Relaxed) + more as u64;
            if let Ok(mut shown) = shown.try_lock()
                && shown.elapsed() >= PAUSE
            {
                *shown = Instant::now();
                progress.say(&format!("  {done} {} of {} MiB", sum >> 20, self.bytes >> 20));
            }
        };
        let worker = || -> Result<Vec<(usize, Sum)>> {
            let mut sums = Vec::new();
            loop {
                process::check_interrupt()?;
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(file) = self.files.get(index) else { return Ok(sums) };
                // The others stop when one has failed.
                let sum = work(file, &count)
                    .inspect_err(|_| next.store(self.files.len(), Ordering::Relaxed))?;
                sums.push((index, sum));
            }
        };
        let mut sums = thread::scope(|scope| -> Result<Vec<(usize, Sum)>> {
            let workers: Vec<_> = (0..THREADS).map(|_| scope.spawn(worker)).collect();
            let mut all = Vec::new();
            for worker in workers {
                all.extend(worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??);
            }
            Ok(all)
        })?;
        sums.sort_unstable_by_key(|(index, _)| *index);
        Ok(sums.into_iter().map(|(_, sum)| sum).collect())
    }
}

/// Reads a file to its end, shows its bytes to `each`, and gives their sum.
fn digest(path: &Path, mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<Sum> {
    let name = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(name)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = file.read(&mut buffer).with_context(name)?;
        if count == 0 {
            return Ok(hash.finalize().into());
        }
        hash.update(&buffer[..count]);
        each(&buffer[..count])?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("b/c")).unwrap();
        for (name, size) in [("a", 10), ("b/x", 300_000), ("b/c/y", 0), ("z", 5)] {
            fs::write(dir.path().join(name), vec![7; size]).unwrap();
        }
        std::os::unix::fs::symlink("a", dir.path().join("link")).unwrap();
        fs::hard_link(dir.path().join("a"), dir.path().join("twin")).unwrap();
        dir
    }

    #[test]
    fn only_regular_files_count_and_once() {
        let dir = sample();
        let tree = Tree::gather(dir.path(), u64::MAX);
        let names: Vec<&str> = tree.files.iter().map(|file| file.to_str().unwrap()).collect();
        assert_eq!(names, ["a", "z", "b/x", "b/c/y"]);
        assert_eq!(tree.bytes, 300_015);
        assert_eq!(Tree::gather(dir.path(), 5).len(), 1);
    }

    #[test]
    fn a_changed_copy_is_found() {
        let (dir, copy) = (sample(), tempfile::tempdir().unwrap());
        let tree = Tree::gather(dir.path(), u64::MAX);
        let progress = Progress::start();
        let sums = tree.copy(copy.path(), &progress).unwrap();
        assert!(tree.differences(copy.path(), &sums, &progress).unwrap().is_empty());
        let mut bytes = vec![7; 300_000];
        bytes[299_999] = 8;
        fs::write(copy.path().join("b/x"), bytes).unwrap();
        assert_eq!(
            tree.differences(copy.path(), &sums, &progress).unwrap(),
            [PathBuf::from("b/x")]
        );
        fs::remove_file(copy.path().join("a")).unwrap();
        assert!(tree.differences(copy.path(), &sums, &progress).is_err());
    }
}
