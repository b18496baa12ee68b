//! [`Server`]: a server of NBD or iSCSI in a process of its own.
//!
//! NBD is nbdkit's `memory` plugin, or qemu-nbd on a file in memory, on TCP or a Unix socket. iSCSI
//! is `tgtd` (Debian: tgt) with one LUN on a file in memory, for `iscsi-perf` of libiscsi (Debian:
//! libiscsi-bin).

use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use crate::child;

const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// Time until a server answers; programs start slowly on a guest's shared file system.
const LIMIT: Duration = Duration::from_secs(30);
/// Clients of qemu-nbd at once: one for each job of fio.
const CLIENTS: u32 = 64;
const ISCSI_TARGET: &str = "iqn.2026-11.rblk-bench:target";
pub(crate) const ISCSI_CLIENT: &str = "iqn.2026-11.rblk-bench:client";
/// Bytes of a block of a LUN.
pub(crate) const ISCSI_BLOCK: u64 = 512;

/// The place of a server of NBD.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum NbdSocket {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A running server. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    name: &'static str,
}

impl NbdSocket {
    fn listens(&self) -> bool {
        match self {
            Self::Tcp(at) => TcpStream::connect_timeout(at, CONNECT_LIMIT).is_ok(),
            Self::Unix(path) => UnixStream::connect(path).is_ok(),
        }
    }

    /// Adds the socket to a command, by the flags of its program for a path, and for an address.
    fn add_to(&self, command: &mut Command, unix: &str, tcp: &str) {
        match self {
            Self::Tcp(at) => {
                command.args([tcp, &at.ip().to_string(), "-p", &at.port().to_string()])
            }
            Self::Unix(path) => command.arg(unix).arg(path),
        };
    }
}

impl std::fmt::Display for NbdSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(at) => write!(f, "{at}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// nbdkit with `bytes` of zeroes, or qemu-nbd on a file.
fn nbd_command(qemu: Option<&Path>, socket: &NbdSocket, bytes: u64) -> (Command, &'static str) {
    let name = if qemu.is_some() { "qemu-nbd" } else { "nbdkit" };
    let mut command = Command::new(name);
    match qemu {
        None => {
            command.args(["--foreground", "--exit-with-parent"]);
            socket.add_to(&mut command, "-U", "-i");
            command.args(["memory", &bytes.to_string()]);
        }
        Some(file) => {
            command.args(["--persistent", "--format=raw", &format!("--shared={CLIENTS}")]);
            socket.add_to(&mut command, "-k", "-b");
            command.arg(file);
        }
    }
    (command, name)
}

impl Server {
    /// Serves NBD, and waits until the server listens. nbdkit ends with the thread that calls this.
    pub(crate) fn nbd(
        qemu: Option<&Path>,
        socket: &NbdSocket,
        bytes: u64,
        tag: &str,
    ) -> Result<Self> {
        let (mut command, name) = nbd_command(qemu, socket, bytes);
        ensure!(child::is_installed(name), "there is no {name}: install it");
        ensure!(!socket.listens(), "something listens at {socket} already");
        command.env(child::TAG, tag).stdout(Stdio::null()).stderr(Stdio::inherit());
        Self::start(&mut command, name, &socket.to_string(), || socket.listens())
    }

    /// Serves a file by iSCSI. `control` is the number of the control socket, unique on the host.
    pub(crate) fn iscsi(file: &Path, at: SocketAddr, control: u16, tag: &str) -> Result<Self> {
        for name in ["tgtd", "tgtadm", "iscsi-perf"] {
            let packages = "Debian: tgt, libiscsi-bin";
            ensure!(child::is_installed(name), "there is no {name}: install it ({packages})");
        }
        let control = control.to_string();
        let admin = |words: &[&str]| {
            let mut command = Command::new("tgtadm");
            command.args(["--control-port", &control, "--lld", "iscsi"]).args(words);
            child::output(&mut command, LIMIT).map(drop)
        };
        let mut command = Command::new("tgtd");
        command.args(["--foreground", "--control-port", &control]);
        command.args(["--iscsi", &format!("portal={at}")]);
        command.env(child::TAG, tag).stdout(Stdio::null()).stderr(Stdio::null());
        let is_ready = || admin(&["--op", "show", "--mode", "sys"]).is_ok();
        let server = Self::start(&mut command, "tgtd", &at.to_string(), is_ready)?;
        let path = file.to_str().context("the name of the volume is no UTF-8")?;
        let ip = at.ip().to_string();
        let new = ["--op", "new", "--mode"];
        admin(&[&new[..], &["target", "--tid", "1", "--targetname", ISCSI_TARGET]].concat())?;
        let lun = ["logicalunit", "--tid", "1", "--lun", "1", "--backing-store", path];
        admin(&[&new[..], &lun].concat())?;
        let bind = ["--op", "bind", "--mode", "target", "--tid", "1"];
        admin(&[&bind[..], &["--initiator-address", &ip]].concat())?;
        Ok(server)
    }

    fn start(
        command: &mut Command,
        name: &'static str,
        at: &str,
        mut is_ready: impl FnMut() -> bool,
    ) -> Result<Self> {
        let mut server = Self { child: child::spawn(command)?, name };
        let ready = child::until(LIMIT, || match server.child.try_wait() {
            Ok(None) => is_ready().then_some(Ok(())),
            Ok(Some(status)) => Some(Err(anyhow!("{name} at {at} ended: {status}"))),
            Err(error) => Some(Err(error.into())),
        });
        ready.with_context(|| format!("{name} does not listen at {at} after {LIMIT:?}"))??;
        Ok(server)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !child::end(&mut self.child) {
            eprintln!("rblk-bench: {}, process {}, cannot be killed", self.name, self.child.id());
        }
    }
}

/// The name of the LUN of [`Server::iscsi`] for a client.
pub(crate) fn iscsi_url(at: SocketAddr) -> String {
    format!("iscsi://{at}/{ISCSI_TARGET}/1")
}

/// A file of zeroes without memory of its own yet.
pub(crate) fn file_of(dir: &Path, bytes: u64) -> Result<PathBuf> {
    let path = dir.join("volume");
    let made = std::fs::File::create(&path).and_then(|file| file.set_len(bytes));
    made.with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests;
