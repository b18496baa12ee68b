//! A running `rblk-target`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::counters::TargetCounts;
use super::keys::Keys;
use crate::process;

/// How long it may take to serve, and to answer.
const LIMIT: Duration = Duration::from_secs(30);

/// How long it may take to drain and end.
const DRAIN: Duration = Duration::from_secs(60);

/// A target that serves; dropped, it is killed and the end of its log shown.
#[derive(Debug)]
pub(crate) struct Target {
    child: Child,
    program: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    ended: bool,
}

#[derive(Debug, Deserialize)]
struct Status {
    total: TargetCounts,
}

impl Target {
    /// Starts `rblk-target` of the directory `programs` and waits until it answers.
    ///
    /// `volumes` are its `--file NAME=PATH` and `--memory NAME=SIZE` words. Its socket and log are
    /// in `work`. It lets in only the host of `keys`.
    pub(crate) fn serve(
        programs: &Path,
        work: &Path,
        address: &str,
        volumes: &[String],
        keys: &Keys,
    ) -> Result<Self> {
        let program = programs.join("rblk-target");
        let socket = work.join("target.sock");
        let log = work.join("target.log");
        let file = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        // It must not outlive this process, even one that is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(&program);
        command.args(["serve", "--listen", address, "--name", "demo", "--control-socket"]);
        command.arg(&socket).arg("--state-dir").arg(work).args(volumes);
        command.arg("--auth").arg("required").args(keys.of_target());
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {}", process::words(&command)))?;
        let mut target = Target { child, program, socket, log, ended: false };
        let deadline = Instant::now() + LIMIT;
        loop {
            process::check_interrupt()?;
            if let Some(status) = target.child.try_wait()? {
                bail!("{}: {status}", process::words(&command));
            }
            match target.counts() {
                Ok(_) => return Ok(target),
                Err(error) if Instant::now() >= deadline => {
                    return Err(error.context("the target does not serve"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Its counters.
    pub(crate) fn counts(&self) -> Result<TargetCounts> {
        let mut command = Command::new(&self.program);
        command.args(["status", "--output", "json", "--control-socket"]).arg(&self.socket);
        let json = process::output(&mut command, LIMIT)?;
        let status: Status = serde_json::from_str(&json)
            .context("`rblk-target status --output json` gave something else than expected")?;
        Ok(status.total)
    }

    /// Drains it and waits for its end, which must be a good one.
    pub(crate) fn drain(mut self) -> Result<()> {
        let mut command = Command::new(&self.program);
        command.args(["drain", "--control-socket"]).arg(&self.socket);
        process::output(&mut command, LIMIT)?;
        let status = process::wait(&mut self.child, DRAIN, true).context("the drained target")?;
        if !status.success() {
            bail!("the drained target ended with {status}");
        }
        self.ended = true;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        process::end(&mut self.child);
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        eprintln!("--- the end of {}:\n{}\n---", self.log.display(), process::tail(&log));
    }
}
