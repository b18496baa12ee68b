//! [`FileSystem`]: a mounted file system.

use std::path::{Path, PathBuf};

use super::process::start;
use super::wait::{DEADLINE, until};

/// A mounted file system. Dropped, it is detached.
#[derive(Debug)]
pub struct FileSystem(Option<PathBuf>);

impl FileSystem {
    /// Mounts a file system at `dir`, and makes the directory if it is missing.
    ///
    /// # Panics
    /// The mount fails.
    #[must_use]
    pub fn mount(kind: &str, device: &str, dir: &Path, options: &[&str]) -> Self {
        std::fs::create_dir_all(dir).unwrap_or_else(|e| panic!("making {}: {e}", dir.display()));
        let at = dir.display().to_string();
        let words = [&["mount", "-t", kind], options, &[device, &at]].concat();
        let _ = start(&words).finish(2 * DEADLINE).ok();
        Self(Some(dir.to_owned()))
    }

    /// Unmounts the file system.
    ///
    /// # Panics
    /// The file system is in use.
    pub fn umount(mut self) {
        if let Some(dir) = self.0.take() {
            let _ = start(&["umount", &dir.display().to_string()]).finish(2 * DEADLINE).ok();
        }
    }

    /// Unmounts it, once the kernel has closed the files of a process that ended: a worker of the
    /// kernel takes the process's io_uring down, maybe after its end.
    ///
    /// # Panics
    /// The file system stays busy, or `umount` fails.
    pub fn umount_after_process(mut self) {
        let Some(dir) = self.0.take() else { return };
        until("the kernel to close the files of an ended process", DEADLINE, || {
            let tried = start(&["umount", &dir.display().to_string()]).finish(2 * DEADLINE);
            if tried.stderr.contains("busy") {
                return None;
            }
            let _ = tried.ok();
            Some(())
        });
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        if let Some(dir) = &self.0 {
            let _ = start(&["umount", "-l", &dir.display().to_string()]).finish(DEADLINE);
        }
    }
}
