//! The questions to a mount at its control socket, `/run/rblk/mounts/NAME.sock`, and its answers.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::lock::MountLock;
use super::mount_status::{MountStatus, is_of_guest};
use super::run_dir::RUN_DIR;
use crate::socket::exchange::exchange;

/// The longest answer: the times of every queue, in every bucket.
const ANSWER_MAX: u64 = 8 << 20;
/// The silence of a lock's holder after which it counts as alive.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Time for one question to it.
const ANSWER_TIME: Duration = Duration::from_secs(1);
/// Step of that wait.
const LOCK_STEP: Duration = Duration::from_millis(10);

/// Path of a mount's socket.
#[must_use]
pub fn socket_path(name: &str) -> PathBuf {
    Path::new(RUN_DIR).join(format!("{name}.sock"))
}

/// A request to a mount.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Ask {
    /// Its state.
    Status,
    /// Remove the device.
    Unmount {
        /// Even when requests wait for a lost target, or the device is open: they fail.
        force: bool,
    },
    /// Hand the device over to a program, which replaces this one. Answered when the hand-over
    /// begins.
    Upgrade {
        /// The path of the program.
        program: PathBuf,
    },
    /// Read the keys of both ends again.
    Reload {
        /// The keys that the target may prove; those of the mount's file if there are none.
        target_keys: Vec<String>,
    },
}

/// The reply of a mount.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// Its state.
    Status(Box<MountStatus>),
    /// Done.
    Done,
    /// The keys were read again; describes the new ones.
    Reloaded(String),
    /// Not done: the device is in use.
    Busy(String),
    /// Not done.
    Error(String),
}

/// Asks a running mount.
///
/// # Errors
/// No process answers at the path, or not within `timeout`.
pub async fn ask(path: &Path, ask: Ask, timeout: Duration) -> io::Result<Response> {
    exchange(path, &ask, ANSWER_MAX, timeout).await
}

/// The status of the running mount of a name. `None`: its process does not answer within
/// `timeout`.
pub async fn status_of(name: &str, timeout: Duration) -> Option<MountStatus> {
    match ask(&socket_path(name), Ask::Status, timeout).await {
        Ok(Response::Status(status)) => Some(*status),
        Ok(_) | Err(_) => None,
    }
}

/// The part of a mount's state that an upgrade needs. Every version has this part: an upgrade asks
/// the process of another version.
#[derive(Clone, Debug, Deserialize)]
pub struct ServingMount {
    /// The block device; for the disk of a guest, its socket.
    pub device: String,
    /// The process.
    pub pid: u32,
    /// Version of the program.
    pub version: String,
    /// How often a process took the device over.
    #[serde(default)]
    pub recovered: u32,
    /// As [`MountStatus::state`]. Empty where the process is too old to say.
    #[serde(default)]
    pub state: String,
}

impl ServingMount {
    /// As [`MountStatus::is_of_guest`].
    #[must_use]
    pub fn is_of_guest(&self) -> bool {
        is_of_guest(&self.device)
    }
}

/// Asks a running mount of any version for its state.
///
/// # Errors
/// As [`ask`].
pub async fn ask_any_version(path: &Path, timeout: Duration) -> io::Result<Option<ServingMount>> {
    #[derive(Deserialize)]
    struct Answer {
        status: Option<ServingMount>,
    }
    let answer: Answer = exchange(path, &Ask::Status, ANSWER_MAX, timeout).await?;
    Ok(answer.status)
}

/// Takes the lock of a name. `None` if its holder answers, or neither answers nor ends for some
/// time. A killed process holds the lock until the kernel has freed its memory.
///
/// # Errors
/// As [`MountLock::take`].
pub async fn lock_unless_served(name: &str) -> io::Result<Option<MountLock>> {
    let begun = Instant::now();
    loop {
        if let Some(lock) = MountLock::take(name)? {
            return Ok(Some(lock));
        }
        let answer = ask(&socket_path(name), Ask::Status, ANSWER_TIME).await;
        if answer.is_ok() || begun.elapsed() >= SILENCE_MAX {
            return Ok(None);
        }
        tokio::time::sleep(LOCK_STEP).await;
    }
}
