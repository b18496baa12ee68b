//! A volume as a local block device: one `rblk-initiator mount`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::counters::InitiatorCounts;
use super::keys::Keys;
use crate::process;

/// How long a command of the initiator may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Where the daemons log; the file goes with a clean umount.
const LOGS: &str = "/run/rblk/log";

/// What `rblk-initiator mount` and `list` say.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct MountStatus {
    /// Its name.
    pub(crate) name: String,
    /// The block device.
    pub(crate) device: PathBuf,
    /// The RDMA device, or `soft`.
    pub(crate) rdma_device: String,
    /// What carries the messages.
    pub(crate) transport: String,
    /// Its process.
    pub(crate) pid: u32,
    /// Its counters.
    pub(crate) total: InitiatorCounts,
}

/// A mounted volume; dropped, it is taken away by force and the end of its log shown.
#[derive(Debug)]
pub(crate) struct Volume {
    program: PathBuf,
    /// What the mount said of itself.
    pub(crate) status: MountStatus,
    gone: bool,
}

impl Volume {
    /// Mounts `volume` of the target at `address` under `name`.
    pub(crate) fn mount(
        programs: &Path,
        address: &str,
        volume: &str,
        name: &str,
        keys: &Keys,
    ) -> Result<Self> {
        let program = programs.join("rblk-initiator");
        let mut command = Command::new(&program);
        command.args(["mount", address, volume, "--name", name, "--output", "json"]);
        command.args(keys.of_host());
        let json = process::output(&mut command, LIMIT).inspect_err(|_| show_log(name))?;
        let status = serde_json::from_str(&json)
            .context("`rblk-initiator mount --output json` gave something else than expected")?;
        Ok(Volume { program, status, gone: false })
    }

    /// The block device.
    pub(crate) fn device(&self) -> &Path {
        &self.status.device
    }

    /// Its counters now.
    pub(crate) fn counts(&self) -> Result<InitiatorCounts> {
        let mut command = Command::new(&self.program);
        command.args(["list", "--output", "json"]);
        let json = process::output(&mut command, LIMIT)?;
        let mounts: Vec<MountStatus> = serde_json::from_str(&json)
            .context("`rblk-initiator list --output json` gave something else than expected")?;
        let mine = mounts.into_iter().find(|mount| mount.name == self.status.name);
        Ok(mine
            .with_context(|| format!("`rblk-initiator list` has no {}", self.status.name))?
            .total)
    }

    /// Does work that may wait for this device inside the kernel; after `limit` the device is taken
    /// away by force, so that the work fails.
    pub(crate) fn within<T>(&self, limit: Duration, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (done, finished) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let guard = scope.spawn(move || {
                let late = finished.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
                if late {
                    let _ = self.take_away();
                }
                late
            });
            let result = work();
            drop(done);
            match guard.join() {
                Ok(true) => bail!("not done after {} s", limit.as_secs()),
                _ => result,
            }
        })
    }

    /// Takes the device away; it must not be in use. Its process must end with it.
    pub(crate) fn umount(mut self) -> Result<()> {
        let mut command = Command::new(&self.program);
        command.args(["umount", &self.status.name]);
        process::output(&mut command, LIMIT)?;
        self.gone = true;
        let device = self.device();
        if device.exists() {
            bail!("{} is still there after `rblk-initiator umount`", device.display());
        }
        Ok(())
    }

    fn take_away(&self) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.args(["umount", &self.status.name, "--force"]);
        process::output_uninterrupted(&mut command, Duration::from_secs(15))
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        show_log(&self.status.name);
        if let Err(error) = self.take_away() {
            eprintln!("{} may be left behind: {error:#}", self.device().display());
        }
    }
}

fn show_log(name: &str) {
    let path = Path::new(LOGS).join(format!("{name}.log"));
    if let Ok(log) = fs::read_to_string(&path) {
        eprintln!("--- the end of {}:\n{}\n---", path.display(), process::tail(&log));
    }
}
