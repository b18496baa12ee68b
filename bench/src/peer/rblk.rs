//! rblk itself: a target in a process of its own, and a volume of it mounted on the same host.
//!
//! Each system has its own target, so that counters and processor time are its own. Programs are
//! those of one directory, with the defaults of a user who gives no flags, but for the number of
//! queues.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rblk_initiator::engine::QueueCounts;
use rblk_initiator::mount::socket as mount_socket;
use rblk_initiator::mount::status::MountStatus;
use rblk_target::control::socket as target_socket;
use rblk_target::control::status::TargetStatus;
use rblk_target::stats::StatsSnapshot;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::undo::{Journal, Step, Undo};
use crate::{child, interrupt};

/// How long the target may take to serve; programs start slowly on a guest's shared file system.
const SERVE_LIMIT: Duration = Duration::from_secs(30);
/// How long a mount may take.
const MOUNT_LIMIT: Duration = Duration::from_secs(60);
/// How long taking a mount away in good order may take, and then by force.
const UMOUNT_LIMIT: Duration = Duration::from_secs(10);
/// How long a daemon may take to tell of itself.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Most bytes of an answer.
const ANSWER_MAX: u64 = 4 << 20;
/// The volume's name.
const VOLUME: &str = "bench";

/// What carries the messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Carrier {
    /// An RDMA device.
    Verbs,
    /// The software provider over TCP.
    Tcp,
}

/// What a volume's bytes are in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Backing {
    /// Registered memory of the target.
    Memory,
    /// A file or block device, which is there already.
    Path(PathBuf),
}

/// A system to be set up.
#[derive(Clone, Debug)]
pub struct RblkSpec {
    /// Names it, its directory and its processes.
    pub key: String,
    /// What carries the messages.
    pub carrier: Carrier,
    /// Address of this host.
    pub address: IpAddr,
    /// Port to listen on.
    pub port: u16,
    /// What the volume is in.
    pub backing: Backing,
    /// Bytes of the volume.
    pub bytes: u64,
    /// Queues of the mount.
    pub queues: u16,
    /// Commands outstanding on each of them.
    pub depth: u16,
    /// Where the programs are.
    pub programs: PathBuf,
    /// Variables for both ends.
    pub environment: Vec<(String, String)>,
    /// More flags of `rblk-target serve`.
    pub target_flags: Vec<String>,
    /// More flags of `rblk-initiator mount`.
    pub mount_flags: Vec<String>,
}

/// A mounted volume and its target. Dropped, both are gone.
#[derive(Debug)]
pub struct Rblk {
    disk: PathBuf,
    name: String,
    socket: PathBuf,
    initiator_pid: u32,
    detail: String,
    // In the order in which they are undone.
    _mount: Undo,
    target: Server,
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
        // It is gone, and this forgets it; or it cannot be killed, which was said.
        let _ = self.child.try_wait();
    }
}

/// The counters of both ends at one moment.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Counters {
    /// The mount's, all queues together.
    pub initiator: Option<QueueCounts>,
    /// The target's, all poll groups together.
    pub target: Option<StatsSnapshot>,
}

impl Rblk {
    /// Starts a target and mounts its volume.
    ///
    /// # Errors
    /// A program is missing, or either end does not come up in time; nothing is left behind.
    pub fn start(journal: &Journal, spec: &RblkSpec) -> Result<Self> {
        let run = format!("{}-{}", std::process::id(), spec.key);
        let (dir, dir_undo) = journal.directory(&run)?;
        let socket = dir.join("target.sock");
        let url = url(spec.carrier, SocketAddr::new(spec.address, spec.port));
        let tag = format!("{run}-target");
        let undo = journal.note(Step::Processes { tag: tag.clone() })?;
        let mut command = spec.program("rblk-target")?;
        command.args(["serve", "--name", &format!("bench-{run}"), "--listen", &url]);
        command.arg("--control-socket").arg(&socket).arg("--state-dir").arg(&dir);
        match &spec.backing {
            Backing::Memory => command.arg("--memory").arg(format!("{VOLUME}={}", spec.bytes)),
            Backing::Path(path) => {
                command.arg("--file").arg(format!("{VOLUME}={}", path.display()))
            }
        };
        command.args(&spec.target_flags).env(child::TAG, &tag);
        let log = dir.join("target.log");
        let (out, err) = child::log_file(&log)?;
        let child = child::spawn(command.stdout(out).stderr(err))?;
        let mut target = Server { undo: Some(undo), child };
        target.wait_until_it_serves(&socket, &log)?;

        let name = format!("bench-{run}");
        let tag = format!("{run}-mount");
        let program = spec.programs.join("rblk-initiator");
        let step = Step::Mount { name: name.clone(), program, tag: tag.clone() };
        let mount = journal.note(step)?;
        let mut command = spec.program("rblk-initiator")?;
        command.args(["mount", &url, VOLUME, "--name", &name, "--output", "json"]);
        command.args(["--queues", &spec.queues.to_string()]);
        if !spec.mount_flags.iter().any(|flag| flag.starts_with("--queue-depth")) {
            command.args(["--queue-depth", &spec.depth.to_string()]);
        }
        command.args(&spec.mount_flags).env(child::TAG, &tag);
        let json = child::output(&mut command, MOUNT_LIMIT)
            .with_context(|| format!("the target's log ends with:\n{}", tail(&log)))?;
        let status: MountStatus =
            serde_json::from_str(&json).context("`rblk-initiator mount` gave something else")?;
        Ok(Self {
            disk: PathBuf::from(&status.device),
            name,
            socket,
            initiator_pid: status.pid,
            detail: format!(
                "{} by {}, {} queues of {} lanes, depth {}, in-capsule {}, {}",
                status.transport,
                status.rdma_device,
                status.queues,
                status.lanes,
                status.queue_depth,
                status.in_capsule_bytes,
                if status.write_with_imm { "WRITE_WITH_IMM" } else { "no WRITE_WITH_IMM" }
            ),
            _mount: mount,
            target,
            _dir: dir_undo,
        })
    }

    /// The block device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.disk
    }

    /// What was set up, in a line.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// The process of the mount.
    #[must_use]
    pub fn initiator_pid(&self) -> u32 {
        self.initiator_pid
    }

    /// The process of the target.
    #[must_use]
    pub fn target_pid(&self) -> u32 {
        self.target.child.id()
    }

    /// The counters of both ends now; what does not answer is absent.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            initiator: mount_status(&self.name).map(|status| status.total),
            target: target_status(&self.socket).map(|status| status.total),
        }
    }
}

impl RblkSpec {
    fn program(&self, name: &str) -> Result<Command> {
        let path = self.programs.join(name);
        if !path.is_file() {
            bail!(
                "{} is not there: build it, or name its directory with --programs",
                path.display()
            );
        }
        let mut command = Command::new(path);
        command.current_dir("/").envs(self.environment.iter().cloned());
        Ok(command)
    }
}

impl Server {
    fn wait_until_it_serves(&mut self, socket: &Path, log: &Path) -> Result<()> {
        let deadline = Instant::now() + SERVE_LIMIT;
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("rblk-target ended ({status}):\n{}", tail(log));
            }
            if target_status(socket).is_some() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("rblk-target does not serve after {SERVE_LIMIT:?}:\n{}", tail(log));
            }
            interrupt::sleep(Duration::from_millis(20))?;
        }
    }
}

/// Takes a mount away: in good order, else by force, else by ending its process.
pub(super) fn unmount(program: &Path, name: &str, tag: &str) -> Result<()> {
    let is_there = || rblk_initiator::mount::run_dir::names().iter().any(|known| known == name);
    let umount = |force: bool| {
        let mut command = Command::new(program);
        command.args(["umount", name]).args(force.then_some("--force"));
        child::output_uninterrupted(&mut command, UMOUNT_LIMIT)
    };
    let mut tried = Ok(String::new());
    if is_there() {
        tried = umount(false).or_else(|_| umount(true));
    }
    // The command that makes a mount may be under way still.
    child::end_tagged(tag, Duration::ZERO)?;
    if is_there() {
        tried = umount(true);
    }
    if is_there() {
        let error = tried.err().map_or(String::new(), |error| format!(": {error:#}"));
        bail!("the mount {name} is still there{error}");
    }
    let _ = std::fs::remove_file(format!("/run/rblk/log/{name}.log"));
    Ok(())
}

/// The status of a mount; `None` if nobody answers in time.
#[must_use]
pub fn mount_status(name: &str) -> Option<MountStatus> {
    match ask(&mount_socket::socket_path(name), &mount_socket::Ask::Status).ok()? {
        mount_socket::Response::Status(status) => Some(*status),
        _ => None,
    }
}

/// The status of a target; `None` if nobody answers in time.
#[must_use]
pub fn target_status(socket: &Path) -> Option<TargetStatus> {
    match ask(socket, &target_socket::Ask::Status).ok()? {
        target_socket::Response::Status(status) => Some(*status),
        _ => None,
    }
}

/// The mount that has a device.
#[must_use]
pub fn mount_of(device: &Path) -> Option<MountStatus> {
    let mounts =
        rblk_initiator::mount::run_dir::names().into_iter().filter_map(|name| mount_status(&name));
    mounts.into_iter().find(|status| Path::new(&status.device) == device)
}

/// One request and its answer, a line of JSON each.
fn ask<A: DeserializeOwned>(socket: &Path, request: &impl Serialize) -> Result<A> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.set_write_timeout(Some(ANSWER_LIMIT))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
    Ok(serde_json::from_slice(&answer)?)
}

fn url(carrier: Carrier, at: SocketAddr) -> String {
    match carrier {
        Carrier::Verbs => format!("rdma://{at}"),
        Carrier::Tcp => format!("tcp://{at}"),
    }
}

fn tail(log: &Path) -> String {
    child::tail(&std::fs::read_to_string(log).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_urls() {
        let at = |text: &str| text.parse().unwrap();
        assert_eq!(url(Carrier::Verbs, at("10.9.0.1:7730")), "rdma://10.9.0.1:7730");
        assert_eq!(url(Carrier::Tcp, at("[::1]:7731")), "tcp://[::1]:7731");
    }

    #[test]
    fn nobody_answers_where_nobody_is() {
        let dir = tempfile::tempdir().unwrap();
        assert!(target_status(&dir.path().join("none.sock")).is_none());
        assert!(mount_status("no-such-mount").is_none());
        let name = "no-such-mount-of-this-test";
        unmount(Path::new("/bin/false"), name, "no-such-tag-of-this-test").unwrap();
    }
}
