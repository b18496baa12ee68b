//! The control socket of a mount, `/run/rblk/mounts/NAME.sock`: one JSON request per line, one
//! answer.

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rblk_operate::mount::mount_ask::{Ask, Response, socket_path};
use rblk_operate::private_socket;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use rblk_operate::mount::lock::MountLock;

const LINE_MAX: u64 = 4096;
const LINE_TIME: Duration = Duration::from_secs(10);

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

/// Removes the socket's file of a dead mount.
pub(super) fn remove_file(name: &str) {
    let _ = std::fs::remove_file(socket_path(name));
}
