//! rblk itself: a target in a process of its own, and a volume of it mounted on the same host.
//!
//! Each system has its own target, so that counters and processor time are its own. Programs are
//! those of one directory, with the defaults of a user who gives no flags, except the number of
//! queues.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rblk_initiator::engine::QueueCounts;
use rblk_initiator::volume::status::MountStatus;
use rblk_target::data::group_stats::StatsSnapshot;
use serde::Serialize;

use super::access::Access;
use super::daemon::{mount_status, target_status};
use super::undo::{Journal, Step, Undo};
use crate::keys::Keys;
use crate::{child, interrupt};

/// How long the target may take to serve; programs start slowly on a guest's shared file system.
const SERVE_LIMIT: Duration = Duration::from_secs(30);
/// How long a mount may take.
const MOUNT_LIMIT: Duration = Duration::from_secs(60);
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
    /// Both ends prove their keys.
    pub with_keys: bool,
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
    initiator_pid: u32,
    detail: String,
    lanes: u32,
    // In the order in which they are undone.
    _mount: Undo,
    served: Served,
}

/// A volume that a target of its own serves, and nobody uses yet. Dropped, it is gone.
#[derive(Debug)]
pub struct Served {
    socket: PathBuf,
    dir: PathBuf,
    url: String,
    keys: Option<Keys>,
    // In the order in which they are undone.
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

impl Served {
    /// Starts a target.
    ///
    /// # Errors
    /// The program is missing, or does not serve in time; nothing is left behind.
    pub fn start(journal: &Journal, spec: &RblkSpec) -> Result<Self> {
        let run = spec.run();
        let (dir, dir_undo) = journal.directory(&run)?;
        let socket = dir.join("target.sock");
        let url = url(spec.carrier, SocketAddr::new(spec.address, spec.port));
        let tag = format!("{run}-target");
        let undo = journal.note(Step::Processes { tag: tag.clone() })?;
        let mut command = spec.program("rblk-target")?;
        command.args(["serve", "--name", &format!("bench-{run}"), "--listen", &url]);
        command.arg("--control-socket").arg(&socket).arg("--state-dir").arg(&dir);
        let keys = spec.with_keys.then(|| Keys::generate(&dir, &url)).transpose()?;
        command.args(Keys::of_target(keys.as_ref()));
        match &spec.backing {
            Backing::Memory => command.arg("--memory").arg(format!("{VOLUME}={}", spec.bytes)),
            Backing::Path(path) => {
                command.arg("--file").arg(format!("{VOLUME}={}", path.display()))
            }
        };
        command.args(&spec.target_flags).env(child::TAG, &tag);
        let log = log_in(&dir);
        let (out, err) = child::log_file(&log)?;
        let child = child::spawn(command.stdout(out).stderr(err))?;
        let mut target = Server { undo: Some(undo), child };
        target.wait_until_it_serves(&socket, &log)?;
        Ok(Self { socket, dir, url, keys, target, _dir: dir_undo })
    }

    /// How fio reaches it by the engine of `library`, without a mount. `lines` are more lines of
    /// the file for the engine.
    ///
    /// # Errors
    /// The file for the engine cannot be written.
    pub fn access(&self, library: &Path, lines: &[String]) -> Result<Access> {
        let config = self.dir.join("engine.toml");
        let text = Keys::file_of_mount(self.keys.as_ref(), &self.url, VOLUME) + &lines.join("\n");
        std::fs::write(&config, text)
            .with_context(|| format!("cannot write {}", config.display()))?;
        Ok(Access::rblk(library, &self.url, VOLUME, &config))
    }

    /// The process of the target.
    #[must_use]
    pub fn target_pid(&self) -> u32 {
        self.target.child.id()
    }

    /// The counters of the target now, if it answers.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters { initiator: None, target: target_status(&self.socket).map(|status| status.total) }
    }
}

impl Rblk {
    /// Starts a target and mounts its volume.
    ///
    /// # Errors
    /// A program is missing, or either end does not come up in time; nothing is left behind.
    pub fn start(journal: &Journal, spec: &RblkSpec) -> Result<Self> {
        let served = Served::start(journal, spec)?;
        let run = spec.run();
        let name = format!("bench-{run}");
        let tag = format!("{run}-mount");
        let program = spec.programs.join("rblk-initiator");
        let step = Step::Mount { name: name.clone(), program, tag: tag.clone() };
        let mount = journal.note(step)?;
        let mut command = spec.program("rblk-initiator")?;
        command.args(["mount", &served.url, VOLUME, "--name", &name, "--output", "json"]);
        command.args(["--queues", &spec.queues.to_string()]);
        if !spec.mount_flags.iter().any(|flag| flag.starts_with("--queue-depth")) {
            command.args(["--queue-depth", &spec.depth.to_string()]);
        }
        command.args(Keys::of_mount(served.keys.as_ref(), &spec.mount_flags));
        command.args(&spec.mount_flags).env(child::TAG, &tag);
        let json = child::output(&mut command, MOUNT_LIMIT).with_context(|| {
            format!("the target's log ends with:\n{}", tail(&log_in(&served.dir)))
        })?;
        let status: MountStatus =
            serde_json::from_str(&json).context("`rblk-initiator mount` gave something else")?;
        Ok(Self {
            disk: PathBuf::from(&status.device),
            name,
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
            lanes: u32::try_from(status.lanes).unwrap_or(u32::MAX),
            _mount: mount,
            served,
        })
    }

    /// QPs of each queue.
    #[must_use]
    pub fn lanes(&self) -> u32 {
        self.lanes
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
        self.served.target_pid()
    }

    /// The counters of both ends now; what does not answer is absent.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let initiator = mount_status(&self.name).map(|status| status.total);
        Counters { initiator, ..self.served.counters() }
    }
}

impl RblkSpec {
    /// Names what is made for it, in this process.
    fn run(&self) -> String {
        format!("{}-{}", std::process::id(), self.key)
    }

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

fn url(carrier: Carrier, at: SocketAddr) -> String {
    match carrier {
        Carrier::Verbs => format!("rdma://{at}"),
        Carrier::Tcp => format!("tcp://{at}"),
    }
}

/// The log of a target with that directory.
fn log_in(dir: &Path) -> PathBuf {
    dir.join("target.log")
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
}
