//! The questions to a mount at its control socket, `/run/rblk/mounts/NAME.sock`, and its answers.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::lock::MountLock;
use super::mount_status::MountStatus;
use super::run_dir::RUN_DIR;

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
    let exchange = async {
        let mut stream = UnixStream::connect(path).await?;
        let mut text = serde_json::to_vec(&ask).map_err(io::Error::other)?;
        text.push(b'\n');
        stream.write_all(&text).await?;
        let mut answer = Vec::new();
        stream.take(ANSWER_MAX).read_to_end(&mut answer).await?;
        serde_json::from_slice(&answer).map_err(io::Error::other)
    };
    tokio::time::timeout(timeout, exchange)
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "it does not answer"))?
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
