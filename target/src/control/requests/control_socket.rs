//! The control socket: one JSON request per line, one JSON answer per line.
//!
//! Only root and the target's own user may use it. The length of a line is bounded, and so is the
//! time that a client may take for it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rblk_operate::private_socket;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use super::orders;
use super::orders::asked;
use super::reread::Reread;
use super::snapshot;
use crate::control::ToControl;
use crate::control::requests::{departure, reconfigure, trace_stream};
use rblk_operate::target::ask::{Ask, Response, VolumeReport, stopping};
use rblk_operate::target::refusal::Refusal;

const LINE_MAX: u64 = 64 << 10;
const LINE_TIME: Duration = Duration::from_secs(10);

/// A bound socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    listener: UnixListener,
    file: SocketFile,
}

/// The file of a control socket. Dropping this removes it, unless it [stays](Self::stay).
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    stays: bool,
}

impl SocketFile {
    /// Keeps the file for another program of the target.
    pub(crate) fn stay(mut self) {
        self.stays = true;
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.stays {
            let _ = std::fs::remove_file(&self.path);
        }
    }
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
        let listener = UnixListener::from_std(private_socket::bind(path)?)?;
        Ok(Self { listener, file: SocketFile { path: path.to_owned(), stays: false } })
    }

    /// Goes on with the socket of the program of the target before this one, and keeps its file
    /// until [`Self::keep`]. `None`: no command would reach it by the path.
    pub(crate) fn go_on(listener: StdUnixListener, path: &Path) -> Option<Self> {
        let is_socket =
            std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
        let is_bound = listener.local_addr().is_ok_and(|its| its.as_pathname() == Some(path));
        listener.set_nonblocking(true).ok().filter(|()| is_socket && is_bound)?;
        let listener = UnixListener::from_std(listener).ok()?;
        Some(Self { listener, file: SocketFile { path: path.to_owned(), stays: true } })
    }

    /// No other program of the target needs the socket any more: its file goes with it.
    pub(crate) fn keep(&mut self) {
        self.file.stays = false;
    }

    /// Serves clients, each in a task of its own, until control takes no more requests. Returns the
    /// socket and its file.
    pub(crate) async fn serve(
        self,
        requests: mpsc::Sender<ToControl>,
        reread: Arc<Reread>,
    ) -> (Option<OwnedFd>, SocketFile) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = requests.closed() => break,
            };
            match accepted {
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
        (self.listener.into_std().ok().map(OwnedFd::from), self.file)
    }
}

async fn serve_one(
    stream: UnixStream,
    requests: mpsc::Sender<ToControl>,
    reread: Arc<Reread>,
) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut reader = BufReader::new(read.take(LINE_MAX));
    tokio::time::timeout(LINE_TIME, reader.read_line(&mut line)).await??;
    let (response, told) = match serde_json::from_str::<Ask>(&line) {
        Ok(Ask::Trace { volume, slower_us }) => {
            let what = (volume, Duration::from_micros(slower_us));
            return trace_stream::stream(&requests, what, &mut write, reader.read_u8()).await;
        }
        // The target ends once its client has the report.
        Ok(Ask::Drain { wait: true }) => {
            match asked(&requests, |reply| ToControl::Drain(Some(reply))).await {
                Some((report, telling)) => (Response::Ended(report), Some(telling)),
                None => (stopping(), None),
            }
        }
        Ok(Ask::RemoveVolume { name, force: false, drain: true }) => {
            let gone = reader.read_u8();
            (orders::remove_when_unused(&requests, &reread, name, gone).await, None)
        }
        Ok(ask) => (answer(&requests, &reread, ask).await, None),
        Err(error) => (Response::refused(format!("not a request: {error}")), None),
    };
    let mut text = serde_json::to_vec(&response).map_err(io::Error::other)?;
    text.push(b'\n');
    let written = tokio::time::timeout(LINE_TIME, write.write_all(&text)).await;
    drop(told);
    written?
}

/// Answers what needs no more of the connection than a place for the answer.
async fn answer(requests: &mpsc::Sender<ToControl>, reread: &Arc<Reread>, ask: Ask) -> Response {
    match ask {
        Ask::Status => {
            let status = asked(requests, ToControl::Status).await;
            status.map_or_else(stopping, |status| Response::Status(Box::new(status)))
        }
        Ask::Events { after } => {
            let report = asked(requests, |reply| ToControl::Events(after, reply)).await;
            report.map_or_else(stopping, Response::Events)
        }
        Ask::Drain { .. } => match requests.send(ToControl::Drain(None)).await {
            Ok(()) => Response::Done,
            Err(_) => stopping(),
        },
        Ask::ReloadHosts => reconfigure::hosts(requests, reread).await,
        Ask::SetHost { name, limits } => reconfigure::limit_host(requests, reread, name, limits)
            .await
            .map_or_else(Response::refused, |host| Response::Host(Box::new(host))),
        Ask::Reload { dry_run } => reconfigure::everything(requests, reread, dry_run)
            .await
            .map_or_else(Response::refused, |report| Response::Reload(Box::new(report))),
        Ask::Upgrade { program, force } => {
            departure::upgrade(requests, reread, program, force).await
        }
        Ask::Dump => orders::dump(requests).await,
        Ask::Kick { session } => orders::kick(requests, session).await,
        Ask::AddVolume { volume } => changed(orders::add(requests, reread, *volume).await),
        Ask::RemoveVolume { name, force, .. } => {
            changed(orders::remove(requests, reread, name, force).await)
        }
        Ask::ResizeVolume { name, size, shrink } => {
            changed(orders::resize(requests, reread, name, size, shrink).await)
        }
        Ask::SetVolume { name, edit } => changed(orders::set(requests, reread, name, edit).await),
        Ask::SnapshotVolume { name, new_name, path } => {
            let report = snapshot::take(requests, reread, &name, new_name, path).await;
            changed(report)
        }
        Ask::MoveVolume { name } => orders::hand_over(requests, reread, name).await,
        Ask::MoveVolumeTo { name, to } => orders::move_to(requests, name, to).await,
        Ask::Trace { .. } => Response::refused("a trace is a stream"),
    }
}

/// The answer to a change of a volume.
fn changed(report: Result<VolumeReport, Refusal>) -> Response {
    report.map_or_else(Response::refused, |report| Response::Volume(Box::new(report)))
}
