//! Child processes: each ends by itself, at its deadline, or when this process is interrupted.
//!
//! Every child has a process group of its own and a word in its environment ([`TAG`]), which its
//! own children inherit. So a child that outlives its parent can be found and ended, even if the
//! parent was killed before it wrote down the child's number. A child in an uninterruptible wait of
//! the kernel is left and named: no call here waits indefinitely.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::interrupt;

/// The variable that names the run of a process.
pub const TAG: &str = "RBLK_BENCH_CHILD";

const TICK: Duration = Duration::from_millis(5);
const GRACE: Duration = Duration::from_secs(5);
/// Lines of a failed child's output in the error.
const TAIL_LINES: usize = 15;
/// Most bytes of output that are read.
const SAID_MAX: u64 = 64 << 20;

#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Whether an interrupt of this process ends a child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OnInterrupt {
    End,
    /// The child cleans up and goes on.
    GoOn,
}

/// Runs a command to its end and gives its stdout.
pub(crate) fn output(command: &mut Command, limit: Duration) -> Result<String> {
    let finished = finish(command, limit, OnInterrupt::End)?;
    succeeded(command, finished)
}

/// As [`output`], for cleaning up: an interrupt does not stop it.
pub(crate) fn output_uninterrupted(command: &mut Command, limit: Duration) -> Result<String> {
    let finished = finish(command, limit, OnInterrupt::GoOn)?;
    succeeded(command, finished)
}

fn succeeded(command: &Command, finished: Finished) -> Result<String> {
    if finished.status.success() {
        return Ok(finished.stdout);
    }
    let said = tail(&format!("{}{}", finished.stdout, finished.stderr));
    bail!("{}: {}\n{said}", words(command), finished.status)
}

/// Runs a command to its end, also to a failure.
pub(crate) fn finish(
    command: &mut Command,
    limit: Duration,
    on_interrupt: OnInterrupt,
) -> Result<Finished> {
    // Files and not pipes: a grandchild may hold pipes open as long as it likes.
    let mut stdout = tempfile::tempfile().context("cannot make a temporary file")?;
    let mut stderr = tempfile::tempfile().context("cannot make a temporary file")?;
    let mut child = spawn(command.stdout(stdout.try_clone()?).stderr(stderr.try_clone()?))?;
    let ended = wait(&mut child, limit, on_interrupt);
    let (stdout, stderr) = (text(&mut stdout)?, text(&mut stderr)?);
    match ended {
        Ok(status) => Ok(Finished { status, stdout, stderr }),
        Err(error) => {
            let said = tail(&format!("{stdout}{stderr}"));
            Err(error.context(format!("{}\n{said}", words(command))))
        }
    }
}

pub(crate) fn spawn(command: &mut Command) -> Result<Child> {
    command.stdin(Stdio::null()).process_group(0);
    command.spawn().with_context(|| format!("cannot start {}", words(command)))
}

/// Waits for a child at most `limit`, then kills it.
pub(crate) fn wait(
    child: &mut Child,
    limit: Duration,
    on_interrupt: OnInterrupt,
) -> Result<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for a child")? {
            return Ok(status);
        }
        let interrupt = if on_interrupt == OnInterrupt::End { interrupt::check() } else { Ok(()) };
        if interrupt.is_err() || Instant::now() >= deadline {
            let gone = end(child);
            interrupt?;
            bail!(
                "still running after {:.0} s, {}",
                limit.as_secs_f64(),
                if gone { "killed" } else { "and cannot be killed: it waits in the kernel" }
            );
        }
        std::thread::sleep(TICK);
    }
}

/// Kills a child with its group. True if it is gone.
pub(crate) fn end(child: &mut Child) -> bool {
    if let Ok(pid) = i32::try_from(child.id()) {
        let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
    }
    let _ = child.kill();
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(TICK),
            _ => return true,
        }
    }
    false
}

pub(crate) fn tagged(tag: &str) -> Vec<u32> {
    let entry = [TAG.as_bytes(), b"=", tag.as_bytes()].concat();
    let Ok(dir) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = dir.flatten().filter_map(|process| process.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| *pid != std::process::id())
        .filter(|pid| {
            // Empty for a zombie.
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == entry)
        })
        .collect()
}

/// Ends all processes of a tag: by SIGTERM, and after `patience` by SIGKILL.
pub(crate) fn end_tagged(tag: &str, patience: Duration) -> Result<()> {
    let mut signal = if patience.is_zero() { Signal::SIGKILL } else { Signal::SIGTERM };
    let mut deadline = Instant::now() + if patience.is_zero() { GRACE } else { patience };
    let mut asked: Vec<u32> = Vec::new();
    loop {
        let found = tagged(tag);
        if found.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            if signal == Signal::SIGKILL {
                bail!("process {} cannot be killed: it waits in the kernel", found[0]);
            }
            (signal, deadline) = (Signal::SIGKILL, Instant::now() + GRACE);
            asked.clear();
        }
        for pid in found {
            if !asked.contains(&pid) {
                asked.push(pid);
                if let Ok(pid) = i32::try_from(pid) {
                    let _ = kill(Pid::from_raw(pid), signal);
                }
            }
        }
        std::thread::sleep(TICK);
    }
}

/// Whether a program is in the search path, or where the administrator's are.
pub(crate) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(Into::into))
        .any(|dir| dir.join(program).is_file())
}

/// Asks `look` until it has an answer; `None` after `limit`.
pub(crate) fn until<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(TICK);
    }
}

pub(crate) fn log_file(path: &Path) -> Result<(File, File)> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    Ok((file.try_clone()?, file))
}

pub(crate) fn words(command: &Command) -> String {
    let mut words = command.get_program().as_bytes().to_vec();
    for word in command.get_args() {
        words.push(b' ');
        words.extend_from_slice(word.as_bytes());
    }
    String::from_utf8_lossy(&words).into_owned()
}

pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

fn text(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(SAID_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests;
