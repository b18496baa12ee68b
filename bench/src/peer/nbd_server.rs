//! [`NbdServer`]: nbdkit's `memory` plugin, or qemu-nbd on a file in memory, on TCP or a Unix
//! socket.

use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use crate::child;

/// Limit on one try to connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// How long a server may take to listen; programs start slowly on a guest's shared file system.
const LIMIT: Duration = Duration::from_secs(30);
/// Clients that qemu-nbd takes at the same time: a job of fio's is one.
const CLIENTS: u32 = 64;

/// Which server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NbdProgram {
    /// nbdkit with its memory plugin.
    Nbdkit,
    /// qemu-nbd on a file, which is there already.
    QemuNbd(PathBuf),
}

/// Where it listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NbdSocket {
    /// An address.
    Tcp(SocketAddr),
    /// A path, at which nothing is yet.
    Unix(PathBuf),
}

/// A running server. Dropped, it is killed.
#[derive(Debug)]
pub struct NbdServer {
    child: Child,
    name: &'static str,
}

impl NbdProgram {
    fn name(&self) -> &'static str {
        match self {
            Self::Nbdkit => "nbdkit",
            Self::QemuNbd(_) => "qemu-nbd",
        }
    }

    fn command(&self, socket: &NbdSocket, bytes: u64) -> Command {
        let mut command = Command::new(self.name());
        match self {
            Self::Nbdkit => {
                command.args(["--foreground", "--exit-with-parent"]);
                match socket {
                    NbdSocket::Tcp(at) => {
                        command.args(["-i", &at.ip().to_string(), "-p", &at.port().to_string()])
                    }
                    NbdSocket::Unix(path) => command.arg("-U").arg(path),
                };
                command.args(["memory", &bytes.to_string()]);
            }
            Self::QemuNbd(file) => {
                command.args(["--persistent", "--format=raw"]);
                command.arg(format!("--shared={CLIENTS}"));
                match socket {
                    NbdSocket::Tcp(at) => {
                        command.args(["-b", &at.ip().to_string(), "-p", &at.port().to_string()])
                    }
                    NbdSocket::Unix(path) => command.arg("-k").arg(path),
                };
                command.arg(file);
            }
        }
        command
    }
}

impl NbdSocket {
    fn listens(&self) -> bool {
        match self {
            Self::Tcp(at) => TcpStream::connect_timeout(at, CONNECT_LIMIT).is_ok(),
            Self::Unix(path) => UnixStream::connect(path).is_ok(),
        }
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

impl NbdServer {
    /// Serves `bytes` of zeroes, and waits until it listens. The server carries `tag` as
    /// [`child::TAG`]. The thread that calls this has to live as long as nbdkit: the end of the one
    /// ends the other.
    ///
    /// # Errors
    /// It is not installed; the place is in use; it does not listen in time.
    pub fn start(program: &NbdProgram, socket: &NbdSocket, bytes: u64, tag: &str) -> Result<Self> {
        let name = program.name();
        ensure!(child::is_installed(name), "there is no {name}: install it");
        ensure!(!socket.listens(), "something listens at {socket} already");
        let mut command = program.command(socket, bytes);
        command.env(child::TAG, tag).stdout(Stdio::null()).stderr(Stdio::inherit());
        let mut server = Self { child: child::spawn(&mut command)?, name };
        let ready = child::until(LIMIT, || match server.child.try_wait() {
            Ok(None) => socket.listens().then_some(Ok(())),
            Ok(Some(status)) => Some(Err(anyhow!("{name} at {socket} ended: {status}"))),
            Err(error) => Some(Err(error.into())),
        });
        ready.with_context(|| format!("{name} does not listen at {socket} after {LIMIT:?}"))??;
        Ok(server)
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        if !child::end(&mut self.child) {
            eprintln!("rblk-bench: {}, process {}, cannot be killed", self.name, self.child.id());
        }
    }
}

/// A file of zeroes, without memory of its own yet: in memory if `dir` is on a file system in
/// memory, else in the page cache.
///
/// # Errors
/// It cannot be made.
pub fn file_of(dir: &Path, bytes: u64) -> Result<PathBuf> {
    let path = dir.join("volume");
    let made = std::fs::File::create(&path).and_then(|file| file.set_len(bytes));
    made.with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_programs_are_told_where_to_listen() {
        let tcp = NbdSocket::Tcp("127.0.0.1:10810".parse().unwrap());
        let unix = NbdSocket::Unix("/x/s".into());
        let words = |program: &NbdProgram, at| child::words(&program.command(at, 4096));
        let kit = NbdProgram::Nbdkit;
        assert!(words(&kit, &tcp).ends_with("-i 127.0.0.1 -p 10810 memory 4096"));
        assert!(words(&kit, &unix).ends_with("-U /x/s memory 4096"));
        let qemu = NbdProgram::QemuNbd("/x/f".into());
        assert!(words(&qemu, &tcp).ends_with("-b 127.0.0.1 -p 10810 /x/f"));
        assert!(words(&qemu, &unix).ends_with("-k /x/s /x/f"));
    }

    #[test]
    fn a_place_that_is_in_use_is_refused() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = NbdSocket::Tcp(listener.local_addr().unwrap());
        let refused = NbdServer::start(&NbdProgram::Nbdkit, &at, 4096, "no-such-tag").unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("listens at") || text.contains("install it"), "{text}");
    }
}
