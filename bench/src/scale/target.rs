//! [`Target`]: a target in a process of its own, to be measured from outside.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rblk_fabric::{Address, Scheme};
use rblk_target::operate::status::TargetStatus;

use crate::child;
use crate::keys::Keys;
use crate::peer::daemon::target_status;
use crate::peer::undo::{Journal, Step, Undo};

/// How long it may take to serve; programs start slowly on a guest's shared file system.
const SERVE_LIMIT: Duration = Duration::from_secs(30);
/// How long it may take to end in good order.
const END_LIMIT: Duration = Duration::from_secs(15);
/// Clock ticks of `/proc/PID/stat`, each second (USER_HZ).
const TICKS: u64 = 100;

/// A running target. Dropped, it is gone.
#[derive(Debug)]
pub(super) struct Target {
    address: Address,
    socket: PathBuf,
    // In the order in which they are undone.
    processes: Option<Undo>,
    child: Child,
    keys: Option<Keys>,
    _dir: Undo,
}

/// Where a target listens, and who may use it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Door {
    /// What carries the messages.
    pub(super) scheme: Scheme,
    /// At a free port of this address.
    pub(super) ip: IpAddr,
    /// Both ends prove their keys.
    pub(super) with_keys: bool,
}

impl Target {
    /// Starts one. `flags` are those of `rblk-target serve`; `{dir}` in them stands for a directory
    /// that goes with it, which `prepare` may fill.
    pub(super) fn start(
        journal: &Journal,
        programs: &Path,
        name: &str,
        door: Door,
        flags: &[String],
        prepare: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Self> {
        let program = programs.join("rblk-target");
        ensure!(
            program.is_file(),
            "{} is not there: build it, or name its directory with --programs",
            program.display()
        );
        let run = format!("{}-{name}", std::process::id());
        let (dir, dir_undo) = journal.directory(&run)?;
        prepare(&dir)?;
        let socket = dir.join("target.sock");
        let port = free_port(door.ip)?;
        let address = Address { scheme: door.scheme, host: door.ip.to_string(), port };
        let listen = address.to_string();
        let keys = door.with_keys.then(|| Keys::generate(&dir, &listen)).transpose()?;
        let tag = format!("{run}-target");
        let processes = journal.note(Step::Processes { tag: tag.clone() })?;
        let mut command = Command::new(program);
        command.args(["serve", "--name", &format!("bench-{run}")]);
        command.args(["--listen", &listen]).args(Keys::of_target(keys.as_ref()));
        command.arg("--control-socket").arg(&socket).arg("--state-dir").arg(&dir);
        let here = dir.display().to_string();
        command.args(flags.iter().map(|flag| flag.replace("{dir}", &here)));
        let log = dir.join("target.log");
        let (out, err) = child::log_file(&log)?;
        command.current_dir("/").env(child::TAG, &tag).stdout(out).stderr(err);
        let child = child::spawn(&mut command)?;
        let processes = Some(processes);
        let mut target = Self { address, socket, processes, child, keys, _dir: dir_undo };
        target.wait_until_it_serves(&log)?;
        Ok(target)
    }

    fn wait_until_it_serves(&mut self, log: &Path) -> Result<()> {
        let said = || child::tail(&std::fs::read_to_string(log).unwrap_or_default());
        let ready = child::until(SERVE_LIMIT, || {
            let ended = self.child.try_wait().ok().flatten();
            let serves = target_status(&self.socket).is_some();
            (serves || ended.is_some()).then_some(ended)
        });
        match ready {
            Some(None) => Ok(()),
            Some(Some(status)) => bail!("rblk-target ended ({status}):\n{}", said()),
            None => bail!("rblk-target does not serve after {SERVE_LIMIT:?}:\n{}", said()),
        }
    }

    /// Where it listens.
    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// The keys of both ends, if they prove any.
    pub(super) fn keys(&self) -> Option<&Keys> {
        self.keys.as_ref()
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it tells of itself.
    pub(super) fn status(&self) -> Result<TargetStatus> {
        target_status(&self.socket).context("the target does not answer")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Asked to; its journal's step kills it if it does not.
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let pid = nix::unistd::Pid::from_raw(pid);
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        }
        child::until(END_LIMIT, || self.child.try_wait().ok().flatten());
        drop(self.processes.take());
        let _ = self.child.try_wait();
    }
}

fn free_port(ip: IpAddr) -> Result<u16> {
    let free = TcpListener::bind(SocketAddr::new(ip, 0));
    Ok(free.with_context(|| format!("no port at {ip}"))?.local_addr()?.port())
}

/// Resident memory of a process in bytes.
pub(super) fn resident(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    resident_in(&status)
}

fn resident_in(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

/// Processor time that a process has used.
pub(super) fn processor_time(pid: u32) -> Option<Duration> {
    processor_time_in(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn processor_time_in(stat: &str) -> Option<Duration> {
    // The name may hold anything, so it is counted from its end.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut words = rest.split_whitespace().skip(11);
    let user: u64 = words.next()?.parse().ok()?;
    let system: u64 = words.next()?.parse().ok()?;
    Some(Duration::from_millis((user + system) * 1000 / TICKS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_tell_of_themselves() {
        assert_eq!(resident_in("Name:\tx\nVmRSS:\t    2048 kB\n"), Some(2 << 20));
        assert_eq!(resident_in("Name:\tx\n"), None);
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 0 0 20 0 1 0 5";
        assert_eq!(processor_time_in(stat), Some(Duration::from_secs(2)));
        assert_eq!(processor_time_in("7 (x"), None);
        assert!(resident(std::process::id()).is_some_and(|bytes| bytes > 1 << 20));
        assert!(processor_time(std::process::id()).is_some());
    }
}
