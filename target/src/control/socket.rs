//! The control socket: one JSON request per line, one JSON answer per line.
//!
//! Only root and the target's own user may use it. The length of a line is bounded, and so is the
//! time that a client may take for it.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rblk_config::{ByteSize, CacheMode, Difference, VolumeConfig};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use super::Request;
use super::orders;
use super::reload::{self, Reread};
use super::status::TargetStatus;

const LINE_MAX: u64 = 64 << 10;
const LINE_TIME: Duration = Duration::from_secs(10);

/// How long a change of volumes may take: its connections end, and what is dirty is written.
pub const CHANGE_TIME: Duration = Duration::from_secs(300);
/// How long a removal waits at most until nobody has the volume open.
pub const DRAIN_TIME: Duration = Duration::from_secs(7 * 24 * 3600);

/// What a control command asks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Ask {
    /// The state of everything.
    Status,
    /// Stop in good order.
    Drain,
    /// Read the hosts of the configuration again, and let in those.
    ReloadHosts,
    /// Read the configuration again, and change what can change without a restart.
    Reload {
        /// Only say what would change.
        #[serde(default)]
        dry_run: bool,
    },
    /// The configuration that the target runs with.
    Dump,
    /// Serve another volume.
    AddVolume {
        /// The volume, as a `[[volume]]` table.
        volume: Box<VolumeConfig>,
    },
    /// Serve a volume no longer.
    RemoveVolume {
        /// Its name.
        name: String,
        /// Also if hosts have it open.
        #[serde(default)]
        force: bool,
        /// Wait until no host has it open.
        #[serde(default)]
        drain: bool,
    },
    /// Give a volume another size.
    ResizeVolume {
        /// Its name.
        name: String,
        /// The size; none: that of its file or device.
        #[serde(default)]
        size: Option<ByteSize>,
        /// It may become smaller.
        #[serde(default)]
        shrink: bool,
    },
    /// Change how a volume is served. What is absent stays.
    SetVolume {
        /// Its name.
        name: String,
        /// Refuse writes.
        #[serde(default)]
        read_only: Option<bool>,
        /// What the block cache does for it.
        #[serde(default)]
        cache: Option<CacheMode>,
        /// How far to read ahead.
        #[serde(default)]
        read_ahead: Option<ByteSize>,
    },
    /// End sessions.
    Kick {
        /// A host, a peer or the number of a session.
        session: String,
    },
}

impl Ask {
    /// How long the answer may take.
    #[must_use]
    pub fn patience(&self) -> Duration {
        match self {
            Self::Status | Self::Drain | Self::ReloadHosts | Self::Dump | Self::Kick { .. } => {
                LINE_TIME
            }
            Self::RemoveVolume { drain: true, .. } => DRAIN_TIME,
            _ => CHANGE_TIME,
        }
    }
}

/// The answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// The state.
    Status(Box<TargetStatus>),
    /// The hosts that may connect now.
    Hosts(HostsReport),
    /// A volume has changed.
    Volume(Box<VolumeReport>),
    /// The configuration was read again.
    Reload(Box<ReloadReport>),
    /// The running configuration, as TOML.
    Dump(String),
    /// These sessions were ended, by host and peer.
    Kicked(Vec<String>),
    /// It was taken.
    Done,
    /// It was not.
    Error(String),
}

/// A volume after a change.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeReport {
    /// Its name.
    pub name: String,
    /// Its configuration now; absent if it was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeConfig>,
    /// Its size in bytes; 0 if it was removed.
    pub size_bytes: u64,
}

/// What a reload did, or would do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReloadReport {
    /// Nothing was changed; this is what would be.
    pub dry_run: bool,
    /// What was different between the files and the running target.
    #[serde(flatten)]
    pub difference: Difference,
    /// Why it is refused: then nothing of it is done.
    pub refused: Vec<String>,
    /// What it meant for hosts.
    pub access: HostsReport,
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
        Ok(Ask::ReloadHosts) => reload::hosts(&requests, &reread).await,
        Ok(Ask::Reload { dry_run }) => reload::everything(&requests, &reread, dry_run)
            .await
            .map_or_else(Response::Error, |report| Response::Reload(Box::new(report))),
        Ok(Ask::RemoveVolume { name, force: false, drain: true }) => {
            let gone = reader.read_u8();
            orders::remove_when_unused(&requests, &reread, name, gone).await
        }
        Ok(order) => orders::carry_out(&requests, &reread, order).await,
        Err(error) => Response::Error(format!("not a request: {error}")),
    };
    let mut text = serde_json::to_vec(&response).map_err(io::Error::other)?;
    text.push(b'\n');
    tokio::time::timeout(LINE_TIME, write.write_all(&text)).await?
}

pub(super) fn stopping() -> Response {
    Response::Error("the target is stopping".into())
}

/// Asks a running target.
///
/// # Errors
/// No target answers there, or not in time.
pub async fn ask(path: &Path, ask: Ask) -> io::Result<Response> {
    let patience = ask.patience();
    let exchange = async {
        let mut stream = UnixStream::connect(path).await?;
        let mut text = serde_json::to_vec(&ask).map_err(io::Error::other)?;
        text.push(b'\n');
        stream.write_all(&text).await?;
        let mut answer = Vec::new();
        stream.take(16 << 20).read_to_end(&mut answer).await?;
        serde_json::from_slice(&answer).map_err(io::Error::other)
    };
    tokio::time::timeout(patience, exchange)
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the target does not answer"))?
}
