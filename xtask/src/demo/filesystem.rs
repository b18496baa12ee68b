//! An ext4 file system on a block device.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process;

/// How long one command on a file system may take.
const LIMIT: Duration = Duration::from_secs(180);

/// Makes an ext4 file system.
pub(crate) fn make(device: &Path) -> Result<()> {
    process::output(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(device), LIMIT).map(drop)
}

/// Checks everything and changes nothing; a file system that is not clean is an error.
pub(crate) fn check(device: &Path) -> Result<()> {
    process::output(Command::new("fsck.ext4").args(["-f", "-n"]).arg(device), LIMIT).map(drop)
}

/// A mounted file system; dropped, it is unmounted as well as can be.
#[derive(Debug)]
pub(crate) struct Mounted {
    /// Where.
    pub(crate) dir: PathBuf,
    gone: bool,
}

impl Mounted {
    /// Mounts `device` at `dir`, which is made.
    pub(crate) fn mount(device: &Path, dir: &Path, options: &str) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let mut command = Command::new("mount");
        command.args(["-t", "ext4", "-o", options]).arg(device).arg(dir);
        process::output(&mut command, LIMIT)?;
        Ok(Mounted { dir: dir.to_owned(), gone: false })
    }

    /// Waits until all of it is on the device.
    pub(crate) fn sync(&self) -> Result<()> {
        process::output(Command::new("sync").arg("-f").arg(&self.dir), LIMIT).map(drop)
    }

    /// Unmounts it.
    pub(crate) fn umount(mut self) -> Result<()> {
        process::output(Command::new("umount").arg(&self.dir), LIMIT)?;
        self.gone = true;
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        let umount = |words: &[&str]| {
            let mut command = Command::new("umount");
            command.args(words).arg(&self.dir);
            process::output_uninterrupted(&mut command, Duration::from_secs(20))
        };
        if umount(&[]).is_err()
            && let Err(error) = umount(&["--lazy"])
        {
            eprintln!("{} may still be mounted: {error:#}", self.dir.display());
        }
    }
}
