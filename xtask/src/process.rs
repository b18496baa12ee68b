//! Child processes with a time limit.
//!
//! A child is killed with all of its descendants at its time limit, or when the user ends this
//! program ([`watch_stdin`]). A child that cannot be killed, as it waits inside the kernel, is left
//! and named: no call here waits indefinitely.

use std::fs;
use std::io::{Read, Seek, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How often a child is looked at.
const TICK: Duration = Duration::from_millis(10);

/// How long a killed child may take to go.
const GRACE: Duration = Duration::from_secs(5);

/// How much of a failed child's words goes into the error.
const TAIL_LINES: usize = 25;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on the end of stdin means that the process that started this one is gone.
pub(crate) fn watch_stdin() {
    thread::spawn(|| {
        let mut byte = [0; 1];
        while matches!(std::io::stdin().read(&mut byte), Ok(1)) {}
        INTERRUPTED.store(true, Ordering::Relaxed);
    });
}

/// Fails once this process should end.
pub(crate) fn check_interrupt() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// Runs a command to its end and gives its stdout; anything but success is an error with its words.
pub(crate) fn output(command: &mut Command, limit: Duration) -> Result<String> {
    output_of(command, limit, true)
}

/// As [`output`], for cleaning up: an interrupt does not stop it.
pub(crate) fn output_uninterrupted(command: &mut Command, limit: Duration) -> Result<String> {
    output_of(command, limit, false)
}

fn output_of(command: &mut Command, limit: Duration, interruptible: bool) -> Result<String> {
    // Files and not pipes: what a child leaves running may hold them open as long as it likes.
    let mut stdout = tempfile::tempfile().context("cannot make a temporary file")?;
    let mut stderr = tempfile::tempfile().context("cannot make a temporary file")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .spawn()
        .with_context(|| format!("cannot start {}", words(command)))?;
    let ended = wait(&mut child, limit, interruptible);
    let read = |file: &mut fs::File| -> Result<String> {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let (out, err) = (read(&mut stdout)?, read(&mut stderr)?);
    let said = || tail(&format!("{out}{err}"));
    match ended {
        Ok(status) if status.success() => Ok(out),
        Ok(status) => bail!("{}: {status}\n{}", words(command), said()),
        Err(error) => Err(error.context(format!("{}\n{}", words(command), said()))),
    }
}

/// Runs a command with its stdout going to `sink` as it comes; gives its exit status (128 and the
/// signal's number for one that a signal ended).
pub(crate) fn stream(
    command: &mut Command,
    limit: Duration,
    mut sink: impl Write + Send + 'static,
) -> Result<i32> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", words(command)))?;
    let mut pipe = child.stdout.take().context("a child without stdout")?;
    let (done, finished) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let copied = std::io::copy(&mut pipe, &mut sink);
        let _ = done.send(copied);
    });
    let status = wait(&mut child, limit, true).with_context(|| words(command))?;
    // A daemon that the child left behind may hold the pipe; all of the child's own is through.
    if let Ok(copied) = finished.recv_timeout(GRACE) {
        copied.with_context(|| format!("cannot pass on the output of {}", words(command)))?;
    }
    Ok(exit_code(status))
}

/// Runs a command; gives its exit status, and its stdout and stderr in one text.
pub(crate) fn both(command: &mut Command, limit: Duration) -> Result<(i32, Vec<u8>)> {
    // Both share one position in the file, so that no word is written over.
    let mut said = tempfile::tempfile().context("cannot make a temporary file")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(said.try_clone()?)
        .stderr(said.try_clone()?)
        .spawn()
        .with_context(|| format!("cannot start {}", words(command)))?;
    let ended = wait(&mut child, limit, true);
    let mut bytes = Vec::new();
    said.rewind()?;
    said.read_to_end(&mut bytes)?;
    match ended {
        Ok(status) => Ok((exit_code(status), bytes)),
        Err(error) => {
            let text = tail(&String::from_utf8_lossy(&bytes));
            Err(error.context(format!("{}\n{text}", words(command))))
        }
    }
}

/// The exit code as shells say it.
pub(crate) fn exit_code(status: std::process::ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Waits for a child at most `limit`, then kills it.
pub(crate) fn wait(
    child: &mut Child,
    limit: Duration,
    interruptible: bool,
) -> Result<std::process::ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for a child")? {
            return Ok(status);
        }
        let interrupt = if interruptible { check_interrupt() } else { Ok(()) };
        if interrupt.is_err() || Instant::now() >= deadline {
            let gone = end(child);
            interrupt?;
            bail!(
                "still running after {:.0} s, {}",
                limit.as_secs_f64(),
                if gone { "killed" } else { "and cannot be killed: it waits in the kernel" }
            );
        }
        thread::sleep(TICK);
    }
}

/// Kills a child with its descendants; says whether it is gone.
pub(crate) fn end(child: &mut Child) -> bool {
    let mut pids = vec![child.id()];
    let mut next = 0;
    while let Some(&pid) = pids.get(next) {
        pids.extend(children(pid));
        next += 1;
    }
    for pid in pids {
        if let Ok(pid) = i32::try_from(pid) {
            // It may have ended since.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline {
        if !matches!(child.try_wait(), Ok(None)) {
            return true;
        }
        thread::sleep(TICK);
    }
    false
}

/// The children of a process. Not every kernel lists them, so all processes are asked.
fn children(pid: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| {
            let own: u32 = process.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(process.path().join("stat")).ok()?;
            // `PID (NAME) STATE PPID ...`, and the name can hold anything.
            let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?;
            (parent.parse() == Ok(pid)).then_some(own)
        })
        .collect()
}

/// A command as a person would type it.
pub(crate) fn words(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|word| word.to_string_lossy()));
    format!("`{}`", words.join(" "))
}

/// The last lines of a text.
pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn stdout_is_the_answer_and_a_failure_has_its_words() {
        assert_eq!(output(&mut sh("echo a; echo b >&2"), SOON).unwrap(), "a\n");
        let error = format!("{:#}", output(&mut sh("echo why >&2; exit 3"), SOON).unwrap_err());
        assert!(error.contains("why") && error.contains('3'), "{error}");
    }

    #[test]
    fn both_outputs_are_one_text_in_order() {
        let (status, said) = both(&mut sh("echo a; echo b >&2; echo c; exit 3"), SOON).unwrap();
        assert_eq!((status, said.as_slice()), (3, &b"a\nb\nc\n"[..]));
    }

    #[test]
    fn a_late_child_goes_with_its_descendants() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("sleep 600 & echo $! >{}; wait", file.display());
        // Where nothing runs for long, the child may be late before it said who its own is.
        let late = |seconds| {
            let error = output(&mut sh(&script), Duration::from_secs(seconds)).unwrap_err();
            assert!(format!("{error:#}").contains("killed"), "{error:#}");
            fs::read_to_string(&file).ok().filter(|pid| pid.ends_with('\n'))
        };
        let pid = [1, 4, 16].into_iter().find_map(late).expect("a pid");
        // It is killed, which takes a moment; this test is not its parent.
        let runs = || {
            fs::read_to_string(format!("/proc/{}/stat", pid.trim()))
                .is_ok_and(|stat| !stat.contains(") Z "))
        };
        let deadline = Instant::now() + GRACE;
        while runs() && Instant::now() < deadline {
            thread::sleep(TICK);
        }
        assert!(!runs(), "sleep still runs");
    }

    #[test]
    fn a_left_daemon_does_not_hold_the_answer_up() {
        let start = Instant::now();
        assert_eq!(output(&mut sh("echo x; sleep 30 & exit 0"), SOON).unwrap(), "x\n");
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn output_is_streamed_with_the_status() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let sink = file.reopen().unwrap();
        assert_eq!(stream(&mut sh("echo x; exit 7"), SOON, sink).unwrap(), 7);
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "x\n");
    }

    #[test]
    fn the_tail_is_short() {
        let text: String = (0..100).map(|n| format!("{n}\n")).collect();
        assert!(tail(&text).starts_with("75\n") && tail(&text).ends_with("99"));
    }
}
