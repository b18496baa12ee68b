//! [`MountLock`]: one process per name. The process that holds the lock serves the mount, starts
//! it, or clears the leftovers of a dead process. The kernel releases the lock at any end of that
//! process.
//!
//! The lock belongs to the open file, so it outlives an exec that keeps the descriptor: an upgrade
//! does not release the name.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::dup2_stdin;

use super::run_dir::{self, RUN_DIR};

/// Limit of the tries to take the lock while its file is replaced.
const TRIES: u32 = 100;

/// The lock of a mount's name. The drop removes its file.
#[derive(Debug)]
pub struct MountLock {
    name: String,
    path: PathBuf,
    file: File,
}

impl MountLock {
    fn path(dir: &Path, name: &str) -> PathBuf {
        dir.join(format!("{name}.lock"))
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Takes the lock of a name; `None` when another process holds it.
    ///
    /// # Errors
    /// The directory cannot be made, or the file not be opened.
    pub fn take(name: &str) -> io::Result<Option<Self>> {
        run_dir::make()?;
        Self::take_in(Path::new(RUN_DIR), name)
    }

    fn take_in(dir: &Path, name: &str) -> io::Result<Option<Self>> {
        let path = Self::path(dir, name);
        for _ in 0..TRIES {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)?;
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&whole(libc::F_WRLCK))) {
                Ok(_) => {}
                Err(Errno::EAGAIN | Errno::EACCES) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
            // The last holder may have removed the file meanwhile: then this lock protects nothing.
            if is_file_at(&file, &path) {
                let name = name.to_owned();
                return Ok(Some(Self { name, path, file }));
            }
        }
        Err(io::Error::other(format!("{} is replaced again and again", path.display())))
    }

    /// The lock that this process inherited on the standard input. A process started by this one
    /// does not get it: it would hold the name after this one is dead.
    ///
    /// # Errors
    /// The standard input is not the name's lock file, or holds no lock.
    pub fn inherited(name: &str) -> io::Result<Self> {
        Self::inherited_in(Path::new(RUN_DIR), name)
    }

    fn inherited_in(dir: &Path, name: &str) -> io::Result<Self> {
        let path = Self::path(dir, name);
        // Another descriptor of the same open file, and so of its lock. It does not outlive an
        // exec.
        let file = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        if !is_file_at(&file, &path) || !Self::is_held_in(dir, name) {
            return Err(io::Error::other(format!("the standard input holds no lock of {name}")));
        }
        let lock = Self { name: name.to_owned(), path, file };
        lock.close_on_exec()?;
        Ok(lock)
    }

    /// Whether some process holds the lock of a name.
    #[must_use]
    pub fn is_held(name: &str) -> bool {
        Self::is_held_in(Path::new(RUN_DIR), name)
    }

    fn is_held_in(dir: &Path, name: &str) -> bool {
        let Ok(file) = File::open(Self::path(dir, name)) else { return false };
        let mut probe = whole(libc::F_WRLCK);
        let asked = fcntl(&file, FcntlArg::F_OFD_GETLK(&mut probe));
        // If the kernel does not answer, the lock counts as held.
        asked.is_err() || i32::from(probe.l_type) != libc::F_UNLCK
    }

    /// Keeps the lock over an exec, as the standard input.
    ///
    /// # Errors
    /// The system's.
    pub fn keep_over_exec(&self) -> io::Result<()> {
        Ok(dup2_stdin(&self.file)?)
    }

    /// Stops keeping the lock over an exec.
    ///
    /// # Errors
    /// The system's.
    pub fn close_on_exec(&self) -> io::Result<()> {
        Ok(dup2_stdin(File::open("/dev/null")?)?)
    }
}

impl Drop for MountLock {
    fn drop(&mut self) {
        // While the lock is still held: see `take_in`.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn is_file_at(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(there)) = (file.metadata(), std::fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (there.dev(), there.ino())
}

fn whole(kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: libc::c_short::try_from(kind).unwrap_or(libc::c_short::MAX),
        l_whence: 0,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_holder() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!MountLock::is_held_in(dir.path(), "a"));
        let lock = MountLock::take_in(dir.path(), "a").unwrap().unwrap();
        assert!(MountLock::is_held_in(dir.path(), "a"));
        assert!(MountLock::take_in(dir.path(), "a").unwrap().is_none());
        let other = MountLock::take_in(dir.path(), "b").unwrap().unwrap();
        drop(lock);
        assert!(!MountLock::is_held_in(dir.path(), "a"));
        assert!(MountLock::take_in(dir.path(), "a").unwrap().is_some());
        drop(other);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
    }

    #[test]
    fn the_file_of_a_dead_holder_is_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.lock"), "").unwrap();
        assert!(!MountLock::is_held_in(dir.path(), "a"));
        assert!(MountLock::take_in(dir.path(), "a").unwrap().is_some());
    }

    #[test]
    fn a_process_that_is_started_gets_no_lock_unless_it_is_meant_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.lock").display().to_string();
        // Whether a child has the file open. The shell's own descriptors are on its list, too.
        let passed = || {
            let mut child = std::process::Command::new("sh");
            child.args(["-c", "ls -l /proc/$$/fd"]);
            let said = child.stdin(std::process::Stdio::inherit()).output().unwrap();
            assert!(said.status.success());
            String::from_utf8(said.stdout).unwrap().contains(&path)
        };
        let first = MountLock::take_in(dir.path(), "a").unwrap().unwrap();
        assert!(!passed());
        assert!(MountLock::inherited_in(dir.path(), "a").is_err(), "it is not there");
        first.keep_over_exec().unwrap();
        assert!(passed());
        assert!(MountLock::inherited_in(dir.path(), "b").is_err(), "it is another's");
        // As after an exec: only the standard input still holds the first lock.
        let second = MountLock::inherited_in(dir.path(), "a").unwrap();
        assert!(!passed());
        second.keep_over_exec().unwrap();
        assert!(passed());
        second.close_on_exec().unwrap();
        assert!(!passed());
        assert!(MountLock::is_held_in(dir.path(), "a"));
    }

    #[test]
    fn a_holder_that_leaves_meanwhile_is_no_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || {
                    let mut won = 0;
                    for _ in 0..2000 {
                        let Some(lock) = MountLock::take_in(&path, "a").unwrap() else { continue };
                        // If there were two holders, one would find the other's file.
                        let mine = path.join("mine");
                        assert!(
                            OpenOptions::new().write(true).create_new(true).open(&mine).is_ok()
                        );
                        std::fs::remove_file(mine).unwrap();
                        won += 1;
                        drop(lock);
                    }
                    won
                })
            })
            .collect();
        let won: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert!(won > 0);
    }
}
