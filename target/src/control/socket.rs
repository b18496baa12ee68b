//! The control socket: one JSON request per line, one JSON answer per line.
//!
//! Only root and the target's own user may use it. The length of a line is bounded, and so is the
//! time that a client may take for it.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rblk_config::{Auth, TargetConfig, said_once};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, mpsc, oneshot};

use super::Request;
use super::status::TargetStatus;

const LINE_MAX: u64 = 64 << 10;
const LINE_TIME: Duration = Duration::from_secs(10);

/// What a control command asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Ask {
    /// The state of everything.
    Status,
    /// Stop in good order.
    Drain,
    /// Read the hosts of the configuration again, and let in those.
    ReloadHosts,
}

/// The answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// The state.
    Status(Box<TargetStatus>),
    /// The hosts that may connect now.
    Hosts(HostsReport),
    /// It was taken.
    Done,
    /// It was not.
    Error(String),
}

/// What a reload of the hosts did.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostsReport {
    /// Names of the hosts that may connect, in the order of the configuration.
    pub hosts: Vec<String>,
    /// Whether hosts must prove their keys. If not, everybody may connect, and the hosts have no
    /// effect.
    pub required: bool,
    /// Names of the hosts whose sessions ended, one for each session.
    pub ended: Vec<String>,
}

/// Reads the configuration that the target was started with once more: files and flags.
pub(crate) struct Reread {
    read: Box<dyn Fn() -> anyhow::Result<TargetConfig> + Send + Sync>,
    /// Whether hosts must prove their keys. A reload does not change that.
    required: bool,
    /// One reload at a time, so that the hosts that were read last are used last.
    turn: Mutex<()>,
}

impl Reread {
    /// By this function, which may block, in a target that was started with this configuration.
    pub(crate) fn new(
        started: &TargetConfig,
        read: impl Fn() -> anyhow::Result<TargetConfig> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let required = started.authentication() == Auth::Required;
        Arc::new(Self { read: Box::new(read), required, turn: Mutex::new(()) })
    }
}

/// A bound socket; its file goes when it is dropped.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl ControlSocket {
    /// Binds, replacing the socket file of a dead target but never that of a living one.
    ///
    /// # Errors
    /// A living target answers there, or the directory cannot be written.
    pub(crate) async fn bind(path: &Path) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        if UnixStream::connect(path).await.is_ok() {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                "another rblk-target answers there",
            ));
        }
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Serves clients, each in a task of its own.
    pub(crate) async fn serve(self, requests: mpsc::Sender<Request>, reread: Arc<Reread>) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let (requests, reread) = (requests.clone(), Arc::clone(&reread));
                    tokio::spawn(async move {
                        // An error means that the client broke off.
                        let _ = serve_one(stream, requests, reread).await;
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

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn serve_one(
    stream: UnixStream,
    requests: mpsc::Sender<Request>,
    reread: Arc<Reread>,
) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut reader = BufReader::new(read.take(LINE_MAX));
    tokio::time::timeout(LINE_TIME, reader.read_line(&mut line)).await??;
    let response = match serde_json::from_str::<Ask>(&line) {
        Ok(Ask::Status) => {
            let (reply, answer) = oneshot::channel();
            match requests.send(Request::Status(reply)).await {
                Ok(()) => answer
                    .await
                    .map_or_else(|_| stopping(), |status| Response::Status(Box::new(status))),
                Err(_) => stopping(),
            }
        }
        Ok(Ask::Drain) => match requests.send(Request::Drain).await {
            Ok(()) => Response::Done,
            Err(_) => stopping(),
        },
        Ok(Ask::ReloadHosts) => reload_hosts(&requests, reread).await,
        Err(error) => Response::Error(format!("not a request: {error}")),
    };
    let mut text = serde_json::to_vec(&response).map_err(io::Error::other)?;
    text.push(b'\n');
    tokio::time::timeout(LINE_TIME, write.write_all(&text)).await?
}

fn stopping() -> Response {
    Response::Error("the target is stopping".into())
}

/// Replaces the whole table of hosts by that of the configuration as it is now. A configuration
/// that is refused changes nothing.
async fn reload_hosts(requests: &mpsc::Sender<Request>, reread: Arc<Reread>) -> Response {
    let _turn = reread.turn.lock().await;
    let reader = Arc::clone(&reread);
    // Files may be slow, and this thread serves everybody.
    let config = match tokio::task::spawn_blocking(move || (reader.read)()).await {
        Ok(Ok(config)) => config,
        Ok(Err(error)) => {
            return Response::Error(format!(
                "the hosts stay as they were: {}",
                said_once(error.as_ref())
            ));
        }
        Err(_) => return Response::Error("the hosts stay as they were".into()),
    };
    let hosts = config.hosts.iter().map(|host| host.name.clone()).collect();
    let required = reread.required;
    let (reply, answer) = oneshot::channel();
    if requests.send(Request::Hosts(config.hosts, reply)).await.is_err() {
        return stopping();
    }
    match answer.await {
        Ok(ended) => Response::Hosts(HostsReport { hosts, required, ended }),
        Err(_) => stopping(),
    }
}

/// Asks a running target.
///
/// # Errors
/// No target answers there, or not in time.
pub async fn ask(path: &Path, ask: Ask) -> io::Result<Response> {
    let exchange = async {
        let mut stream = UnixStream::connect(path).await?;
        let mut text = serde_json::to_vec(&ask).map_err(io::Error::other)?;
        text.push(b'\n');
        stream.write_all(&text).await?;
        let mut answer = Vec::new();
        stream.take(16 << 20).read_to_end(&mut answer).await?;
        serde_json::from_slice(&answer).map_err(io::Error::other)
    };
    tokio::time::timeout(LINE_TIME, exchange)
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the target does not answer"))?
}
