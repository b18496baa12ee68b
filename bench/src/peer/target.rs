//! [`Target`]: an `rblk-target` in a process of its own, so that its counters and its processor
//! time are its own. Dropped, it is gone.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rblk_fabric::Address;
use rblk_operate::target::status::TargetStatus;

use super::daemon::target_status;
use super::undo::{Journal, Step, Undo};
use crate::child;
use crate::keys::Keys;

/// Time until the target serves; programs start slowly on a guest's shared file system.
const SERVE_LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Carrier {
    #[default]
    Verbs,
    /// The software provider over TCP.
    Tcp,
}

#[derive(Clone, Debug)]
pub(crate) struct TargetSpec {
    /// Names the target, its directory and its processes, together with this process.
    pub(crate) key: String,
    pub(crate) carrier: Carrier,
    pub(crate) at: SocketAddr,
    pub(crate) programs: PathBuf,
    pub(crate) environment: Vec<(String, String)>,
    /// Both ends prove their keys.
    pub(crate) with_keys: bool,
    /// Tables of its configuration that no flag says, in TOML.
    pub(crate) tables: Option<String>,
    /// More words of `rblk-target serve`.
    pub(crate) flags: Vec<String>,
}

impl TargetSpec {
    pub(crate) fn run(&self) -> String {
        format!("{}-{}", std::process::id(), self.key)
    }
}

/// A program of rblk.
pub(crate) fn program(dir: &Path, name: &str) -> Result<PathBuf> {
    let path = dir.join(name);
    ensure!(
        path.is_file(),
        "{} is not there: build it, or name its directory with --programs",
        path.display()
    );
    Ok(path)
}

/// Writes tables into the configuration of a target. Returns the words that name their file, if no
/// file of that configuration does.
fn write_tables(dir: &Path, keys: Option<&Keys>, tables: &str) -> Result<Vec<String>> {
    let parent = keys.map_or(dir.to_owned(), |keys| keys.config().with_extension("d"));
    let file = parent.join("volume.toml");
    let written = std::fs::create_dir_all(&parent).and_then(|()| std::fs::write(&file, tables));
    written.with_context(|| format!("cannot write {}", file.display()))?;
    Ok(match keys {
        Some(_) => Vec::new(),
        None => vec!["--config".to_owned(), file.display().to_string()],
    })
}

#[derive(Debug)]
pub(crate) struct Target {
    socket: PathBuf,
    dir: PathBuf,
    url: String,
    keys: Option<Keys>,
    // In the order of the drop.
    server: Server,
    _dir: Undo,
}

#[derive(Debug)]
struct Server {
    undo: Option<Undo>,
    child: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.undo.take());
        // Reaps the process.
        let _ = self.child.try_wait();
    }
}

impl Target {
    pub(crate) fn start(journal: &Journal, spec: &TargetSpec) -> Result<Self> {
        let run = spec.run();
        let mut command = Command::new(program(&spec.programs, "rblk-target")?);
        command.current_dir("/").envs(spec.environment.iter().cloned());
        let (dir, dir_undo) = journal.directory(&run)?;
        let socket = dir.join("target.sock");
        let url = url(spec.carrier, spec.at);
        let tag = format!("{run}-target");
        let undo = journal.note(Step::Processes { tag: tag.clone() })?;
        command.args(["serve", "--name", &format!("bench-{run}"), "--listen", &url]);
        command.arg("--control-socket").arg(&socket).arg("--state-dir").arg(&dir);
        let keys = spec.with_keys.then(|| Keys::generate(&dir, &url)).transpose()?;
        command.args(Keys::of_target(keys.as_ref()));
        if let Some(tables) = &spec.tables {
            command.args(write_tables(&dir, keys.as_ref(), tables)?);
        }
        command.args(&spec.flags).env(child::TAG, &tag);
        let (out, err) = child::log_file(&dir.join("target.log"))?;
        let child = child::spawn(command.stdout(out).stderr(err))?;
        let server = Server { undo: Some(undo), child };
        let mut target = Self { socket, dir, url, keys, server, _dir: dir_undo };
        let ready = child::until(SERVE_LIMIT, || {
            let ended = target.server.child.try_wait().ok().flatten();
            (ended.is_some() || target.status().is_ok()).then_some(ended)
        });
        match ready {
            Some(None) => Ok(target),
            Some(Some(status)) => bail!("rblk-target ended ({status}):\n{}", target.log_tail()),
            None => {
                bail!("rblk-target does not serve after {SERVE_LIMIT:?}:\n{}", target.log_tail())
            }
        }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn address(&self) -> Result<Address> {
        Ok(self.url.parse()?)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn keys(&self) -> Option<&Keys> {
        self.keys.as_ref()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.server.child.id()
    }

    pub(crate) fn status(&self) -> Result<TargetStatus> {
        target_status(&self.socket).context("the target does not answer")
    }

    pub(crate) fn log_tail(&self) -> String {
        child::tail(&std::fs::read_to_string(self.dir.join("target.log")).unwrap_or_default())
    }
}

fn url(carrier: Carrier, at: SocketAddr) -> String {
    match carrier {
        Carrier::Verbs => format!("rdma://{at}"),
        Carrier::Tcp => format!("tcp://{at}"),
    }
}

pub(crate) fn free_port(ip: IpAddr) -> Result<u16> {
    let free = TcpListener::bind((ip, 0)).with_context(|| format!("no port at {ip}"))?;
    Ok(free.local_addr()?.port())
}

#[cfg(test)]
mod tests;
