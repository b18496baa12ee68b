//! Child processes: each ends by itself, at its deadline, or when this process is interrupted.
//!
//! Every child has a process group of its own and a word in its environment ([`TAG`]), which its
//! own children inherit. So a child that outlives its parent can be found and ended, even if the
//! parent was killed before it wrote down the child's number. A child that cannot be killed, as it
//! waits inside the kernel, is left and named: no call here waits indefinitely.

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

/// The variable whose value says whose child a process is.
pub const TAG: &str = "RBLK_BENCH_CHILD";

/// How often a child is looked at.
const TICK: Duration = Duration::from_millis(5);
/// How long a killed child may take to go.
const GRACE: Duration = Duration::from_secs(5);
/// How much of a failed child's words goes into the error.
const TAIL_LINES: usize = 15;
/// No child here says more than this; the rest is not read.
const SAID_MAX: u64 = 64 << 20;

/// A child that ended.
#[derive(Debug)]
pub struct Finished {
    /// How.
    pub status: ExitStatus,
    /// What it wrote.
    pub stdout: String,
    /// What it complained of.
    pub stderr: String,
    /// How long it ran.
    pub took: Duration,
}

/// Whether an interrupt of this process ends a child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnInterrupt {
    /// It does.
    End,
    /// It does not: the child cleans up.
    GoOn,
}

/// Runs a command to its end and gives its stdout.
///
/// # Errors
/// It does not start, does not end within `limit`, or does not end well; with its last words.
pub fn output(command: &mut Command, limit: Duration) -> Result<String> {
    let finished = finish(command, limit, OnInterrupt::End)?;
    succeeded(command, finished)
}

/// As [`output`], for cleaning up: an interrupt does not stop it.
///
/// # Errors
/// As [`output`].
pub fn output_uninterrupted(command: &mut Command, limit: Duration) -> Result<String> {
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

/// Runs a command to its end, whatever that is.
///
/// # Errors
/// It does not start, or does not end within `limit`; it is killed then, with its last words in the
/// error.
pub fn finish(
    command: &mut Command,
    limit: Duration,
    on_interrupt: OnInterrupt,
) -> Result<Finished> {
    // Files and not pipes: what a child leaves running may hold them open as long as it likes.
    let mut stdout = tempfile::tempfile().context("cannot make a temporary file")?;
    let mut stderr = tempfile::tempfile().context("cannot make a temporary file")?;
    let since = Instant::now();
    let mut child = spawn(command.stdout(stdout.try_clone()?).stderr(stderr.try_clone()?))?;
    let ended = wait(&mut child, limit, on_interrupt);
    let took = since.elapsed();
    let (stdout, stderr) = (text(&mut stdout)?, text(&mut stderr)?);
    match ended {
        Ok(status) => Ok(Finished { status, stdout, stderr, took }),
        Err(error) => {
            let said = tail(&format!("{stdout}{stderr}"));
            Err(error.context(format!("{}\n{said}", words(command))))
        }
    }
}

/// Starts a command in a process group of its own, with nothing to read.
///
/// # Errors
/// It cannot be started.
pub fn spawn(command: &mut Command) -> Result<Child> {
    command.stdin(Stdio::null()).process_group(0);
    command.spawn().with_context(|| format!("cannot start {}", words(command)))
}

/// Waits for a child at most `limit`, then kills it.
///
/// # Errors
/// It was killed, or could not be.
pub fn wait(child: &mut Child, limit: Duration, on_interrupt: OnInterrupt) -> Result<ExitStatus> {
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

/// Kills a child with its group; says whether it is gone.
pub fn end(child: &mut Child) -> bool {
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

/// Living processes with that tag.
#[must_use]
pub fn tagged(tag: &str) -> Vec<u32> {
    let entry = [TAG.as_bytes(), b"=", tag.as_bytes()].concat();
    let Ok(dir) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = dir.flatten().filter_map(|process| process.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| *pid != std::process::id())
        .filter(|pid| {
            // Empty for one that has ended and is not waited for yet.
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == entry)
        })
        .collect()
}

/// Ends all processes of a tag: asks them to, and kills those that are still there after
/// `patience`.
///
/// # Errors
/// One cannot be killed.
pub fn end_tagged(tag: &str, patience: Duration) -> Result<()> {
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
#[must_use]
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(Into::into))
        .any(|dir| dir.join(program).is_file())
}

/// Asks `look` until it has an answer; `None` after `limit`.
pub fn until<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
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

/// Opens a log for a child's output.
///
/// # Errors
/// It cannot be made.
pub fn log_file(path: &Path) -> Result<(File, File)> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    Ok((file.try_clone()?, file))
}

/// A command as it would be typed.
#[must_use]
pub fn words(command: &Command) -> String {
    let mut words = command.get_program().as_bytes().to_vec();
    for word in command.get_args() {
        words.push(b' ');
        words.extend_from_slice(word.as_bytes());
    }
    String::from_utf8_lossy(&words).into_owned()
}

/// The last lines of a text.
#[must_use]
pub fn tail(text: &str) -> String {
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
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn words_of_a_failure_are_in_the_error() {
        assert_eq!(output(&mut shell("echo well"), GRACE).unwrap(), "well\n");
        let error = output(&mut shell("echo why >&2; exit 3"), GRACE).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("why"), "{error}");
    }

    #[test]
    fn a_late_child_is_killed_with_its_own() {
        let tag = format!("test-{}-late", std::process::id());
        let mut command = shell("sleep 1000 & sleep 1000");
        let error = output(command.env(TAG, &tag), Duration::from_millis(300)).unwrap_err();
        assert!(format!("{error:#}").contains("killed"), "{error:#}");
        end_tagged(&tag, Duration::ZERO).unwrap();
        assert!(tagged(&tag).is_empty());
    }

    #[test]
    fn what_outlives_its_parent_is_found_by_its_tag() {
        let tag = format!("test-{}-tag", std::process::id());
        output(shell("sleep 1000 >/dev/null 2>&1 &").env(TAG, &tag), GRACE).unwrap();
        // It has no environment for a moment while it becomes another program.
        until(GRACE, || (tagged(&tag).len() == 1).then_some(())).expect("one process");
        end_tagged(&tag, GRACE).unwrap();
        assert!(tagged(&tag).is_empty());
    }
}
