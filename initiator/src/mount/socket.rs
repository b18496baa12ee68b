//! The control socket of a mount, `/run/rblk/mounts/NAME.sock`: one JSON request per line, one
//! answer.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rblk_operate::private_socket;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use super::lock::MountLock;
use super::run_dir::RUN_DIR;
use crate::volume::status::MountStatus;

const LINE_MAX: u64 = 4096;
/// The longest answer: the times of every queue, in every bucket.
const ANSWER_MAX: u64 = 8 << 20;
const LINE_TIME: Duration = Duration::from_secs(10);
/// The silence of a lock's holder after which it counts as alive.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Time for one question to it.
const ANSWER_TIME: Duration = Duration::from_secs(1);
/// Interval of that wait.
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
    /// Report the state.
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
    /// The state.
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

/// A request and the channel for its reply.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The request.
    pub ask: Ask,
    /// The channel for the reply.
    pub reply: oneshot::Sender<Response>,
}

/// A bound socket. The drop removes its file.
#[derive(Debug)]
pub(crate) struct MountSocket {
    listener: UnixListener,
    path: PathBuf,
    unlinked: Cell<bool>,
}

impl MountSocket {
    /// Binds, for the holder of the name's lock: an older file belongs to a dead process.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub(crate) fn bind(lock: &MountLock) -> io::Result<Self> {
        let path = socket_path(lock.name());
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::from_std(private_socket::bind(&path)?)?;
        Ok(Self { listener, path, unlinked: Cell::new(false) })
    }

    /// Removes the socket's file, once: a later file of that name belongs to another mount.
    pub(crate) fn unlink(&self) {
        if !self.unlinked.replace(true) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Serves clients, each in a task of its own.
    pub(crate) async fn serve(&self, asked: mpsc::Sender<Asked>) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let asked = asked.clone();
                    tokio::spawn(async move {
                        // An error means that the client broke off.
                        let _ = serve_one(stream, asked).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "control socket");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl Drop for MountSocket {
    fn drop(&mut self) {
        self.unlink();
    }
}

async fn serve_one(stream: UnixStream, asked: mpsc::Sender<Asked>) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut reader = BufReader::new(read.take(LINE_MAX));
    tokio::time::timeout(LINE_TIME, reader.read_line(&mut line)).await??;
    let stopping = || Response::Error("the mount is ending".to_owned());
    let response = match serde_json::from_str::<Ask>(&line) {
        Ok(ask) => {
            let (reply, answer) = oneshot::channel();
            match asked.send(Asked { ask, reply }).await {
                Ok(()) => answer.await.unwrap_or_else(|_| stopping()),
                Err(_) => stopping(),
            }
        }
        Err(error) => Response::Error(format!("not a request: {error}")),
    };
    let mut text = serde_json::to_vec(&response).map_err(io::Error::other)?;
    text.push(b'\n');
    tokio::time::timeout(LINE_TIME, write.write_all(&text)).await?
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

/// Removes the socket's file of a dead mount.
pub(super) fn remove_file(name: &str) {
    let _ = std::fs::remove_file(socket_path(name));
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
