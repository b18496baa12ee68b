//! The logs of mounts that run in the background: `/run/rblk/log/NAME.log`.
//!
//! Contract: the logs of a mount take at most [`BYTES_MAX`] twice: a full file becomes
//! `NAME.log.1`, which replaces the one before. The logs stay after an unmount, so that people can
//! read the reason. The logs of the last [`KEPT`] ended mounts stay.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The directory of the logs.
const DIR: &str = "/run/rblk/log";
/// Limit of the length of one file: about 7000 lines.
const BYTES_MAX: u64 = 1 << 20;
/// The number of ended mounts that keep their logs.
const KEPT: usize = 16;
const SUFFIX: &str = ".log";

/// The log of the mount of a name.
#[must_use]
pub fn path_of(name: &str) -> PathBuf {
    Path::new(DIR).join(format!("{name}{SUFFIX}"))
}

/// Opens a log to append to it. Only its owner may read it.
///
/// # Errors
/// The system's.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Removes the oldest logs of ended mounts, beyond those that stay. `living` returns whether a
/// mount of that name exists.
pub fn remove_old(living: impl Fn(&str) -> bool) {
    remove_old_in(Path::new(DIR), living);
}

fn remove_old_in(dir: &Path, living: impl Fn(&str) -> bool) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    let mut dead: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .filter(|entry| {
            let name = entry.file_name();
            name.to_str().and_then(|n| n.strip_suffix(SUFFIX)).is_some_and(|name| !living(name))
        })
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    dead.sort();
    for (_, path) in dead.iter().rev().skip(KEPT) {
        let _ = fs::remove_file(path);
        let _ = fs::remove_file(older(path));
    }
}

fn older(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// The output of a daemon's log: the standard error. If that is the log file of a mount, a full
/// file is replaced by the next one.
#[derive(Debug)]
pub struct LogFile {
    file: File,
    path: PathBuf,
    bytes: u64,
    bytes_max: u64,
    /// Keep the standard error of this process on the present file.
    is_stderr: bool,
}

impl LogFile {
    /// The log behind the standard error of this process; `None` if that is a terminal, the journal
    /// or another file.
    #[must_use]
    pub fn of_stderr() -> Option<Self> {
        let path = fs::read_link("/proc/self/fd/2").ok()?;
        let is_log = path.parent() == Some(Path::new(DIR))
            && path.to_str().is_some_and(|path| path.ends_with(SUFFIX));
        is_log.then(|| Self::at(path, BYTES_MAX).ok())?.map(|log| Self { is_stderr: true, ..log })
    }

    fn at(path: PathBuf, bytes_max: u64) -> io::Result<Self> {
        let file = open(&path)?;
        Ok(Self { bytes: file.metadata()?.len(), file, path, bytes_max, is_stderr: false })
    }

    /// Begins a new file, and points the standard error to it.
    fn turn_over(&mut self) -> io::Result<()> {
        fs::rename(&self.path, older(&self.path))?;
        self.file = open(&self.path)?;
        self.bytes = 0;
        Ok(())
    }
}

impl Write for LogFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.bytes >= self.bytes_max {
            match self.turn_over() {
                Ok(()) if self.is_stderr => {
                    // If this fails, other output to the standard error goes to the older file.
                    let _ = nix::unistd::dup2_stderr(&self.file);
                }
                Ok(()) => {}
                // The directory is missing or full. The file must not grow.
                Err(_) => {
                    self.file.set_len(0)?;
                    self.bytes = 0;
                }
            }
        }
        let written = self.file.write(line)?;
        self.bytes += u64::try_from(written).unwrap_or(u64::MAX);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_stays_below_its_bound_and_keeps_its_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.log");
        fs::write(&path, "of an earlier process\n").unwrap();
        let mut log = LogFile::at(path.clone(), 1000).unwrap();
        for number in 0..500 {
            log.write_all(format!("line {number}\n").as_bytes()).unwrap();
        }
        let text = |path: &Path| fs::read_to_string(path).unwrap();
        let (now, before) = (text(&path), text(&older(&path)));
        assert!(now.len() <= 1010 && before.len() <= 1010, "{} {}", now.len(), before.len());
        assert!(now.ends_with("line 499\n"), "{now}");
        let all = before + &now;
        let first: u32 = all.split_whitespace().nth(1).unwrap().parse().unwrap();
        let expected: String = (first..500).map(|number| format!("line {number}\n")).collect();
        assert_eq!(all, expected, "no line is missing between the files");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_log_that_cannot_be_renamed_begins_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.log");
        fs::create_dir(older(&path)).unwrap();
        fs::write(older(&path).join("file"), "").unwrap();
        let mut log = LogFile::at(path.clone(), 100).unwrap();
        (0..100).for_each(|n| log.write_all(format!("line {n}\n").as_bytes()).unwrap());
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.len() <= 110 && text.ends_with("line 99\n"), "{text}");
    }

    #[test]
    fn the_newest_logs_of_mounts_that_are_gone_stay() {
        let dir = tempfile::tempdir().unwrap();
        let begin = SystemTime::now();
        for number in 0..KEPT + 4 {
            let path = dir.path().join(format!("m{number:02}.log"));
            let file = File::create(&path).unwrap();
            let age = std::time::Duration::from_secs(1000 - u64::try_from(number).unwrap());
            file.set_modified(begin - age).unwrap();
            fs::write(older(&path), "").unwrap();
        }
        remove_old_in(dir.path(), |name| name == "m00");
        let mut left: Vec<String> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(SUFFIX))
            .collect();
        left.sort();
        assert_eq!(left.len(), KEPT + 1, "{left:?}");
        assert_eq!((left[0].as_str(), left[1].as_str()), ("m00.log", "m04.log"));
        assert!(dir.path().join("m00.log.1").exists() && !dir.path().join("m03.log.1").exists());
    }
}
