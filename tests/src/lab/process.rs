//! Processes with a deadline.

use std::ffi::OsStr;
use std::fmt;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::wait::{DEADLINE, until};

/// Time for the rest of a process's output, after its end.
const KEPT: Duration = Duration::from_secs(15);

/// A process that ended.
#[derive(Debug)]
pub struct Finished {
    words: String,
    status: ExitStatus,
    /// The process's duration.
    pub took: Duration,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Finished {
    /// Its exit code; 128 plus the signal's number if a signal ended it, as in a shell.
    #[must_use]
    pub fn code(&self) -> i32 {
        self.status.code().or(self.status.signal().map(|signal| 128 + signal)).unwrap_or(-1)
    }

    /// Its output, if its exit code is 0.
    ///
    /// # Panics
    /// The exit code is not 0.
    #[must_use]
    pub fn ok(self) -> String {
        assert_eq!(self.code(), 0, "{self}");
        self.stdout
    }

    /// Its standard error, if it ended with `code` and printed every one of `texts`.
    ///
    /// # Panics
    /// Another code, or a text is missing.
    #[must_use]
    pub fn fails_with(self, code: i32, texts: &[&str]) -> String {
        assert_eq!(self.code(), code, "{self}");
        for text in texts {
            assert!(self.stderr.contains(text), "no `{text}` in: {self}");
        }
        self.stderr
    }
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}`: {} after {:.1?}\n{}{}",
            self.words, self.status, self.took, self.stdout, self.stderr
        )
    }
}

/// A running process, with its output being kept. Drop kills it and its children.
#[derive(Debug)]
pub struct Running {
    words: String,
    child: Child,
    since: Instant,
    out: Option<JoinHandle<String>>,
    err: Option<JoinHandle<String>>,
}

/// Starts a program of the host, in a process group of its own.
///
/// # Panics
/// The program cannot be started.
#[must_use]
pub fn start<S: AsRef<OsStr>>(words: &[S]) -> Running {
    let (program, arguments) = words.split_first().expect("a program");
    let mut command = Command::new(program);
    command.args(arguments);
    Running::start(command)
}

impl Running {
    /// Starts a command, in a process group of its own.
    ///
    /// # Panics
    /// The command cannot be started.
    #[must_use]
    pub fn start(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let words = words(&command);
        let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot start `{words}`: {e}"));
        let out = child.stdout.take().map(keep);
        let err = child.stderr.take().map(keep);
        Self { words, child, since: Instant::now(), out, err }
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    ///
    /// # Panics
    /// The system cannot tell.
    #[must_use]
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_none()
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// The process runs longer than `deadline`, counted from now. Then it is killed.
    #[must_use]
    pub fn finish(mut self, deadline: Duration) -> Finished {
        let now = Instant::now();
        let (status, late) = loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                break (status, false);
            }
            if now.elapsed() > deadline {
                kill_group(self.child.id());
                break (self.child.wait().expect("wait"), true);
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let finished = Finished {
            words: self.words.clone(),
            status,
            took: self.since.elapsed(),
            stdout: text(self.out.take()),
            stderr: text(self.err.take()),
        };
        assert!(!late, "killed at its deadline of {deadline:?}: {finished}");
        finished
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            kill_group(self.child.id());
            let _ = self.child.wait();
        }
    }
}

/// Kills a process and its whole group.
pub(super) fn kill_group(pid: u32) {
    signal("KILL", &format!("-{pid}"));
}

/// Sends a signal to a process, or to a group named by `-PID`.
pub(super) fn signal(name: &str, whom: &str) {
    // Failure is no error: the process may have ended already.
    let _ = Command::new("sh")
        .args(["-c", "kill -s \"$1\" -- \"$2\"", "kill", name, whom])
        .stderr(Stdio::null())
        .status();
}

/// A stopped process. Drop continues it, if it still exists.
#[derive(Debug)]
pub struct Frozen(u32);

impl Frozen {
    /// Stops a process with SIGSTOP.
    ///
    /// # Panics
    /// The process does not stop.
    #[must_use]
    pub(super) fn process(pid: u32) -> Self {
        signal("STOP", &pid.to_string());
        let stopped = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            stat.rsplit_once(") ").filter(|(_, rest)| rest.starts_with('T')).map(|_| ())
        };
        until("the process to stop", DEADLINE, stopped);
        Self(pid)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        signal("CONT", &self.0.to_string());
    }
}

fn words(command: &Command) -> String {
    let mut words = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        words.push(' ');
        words.push_str(&argument.to_string_lossy());
    }
    words
}

fn keep(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// The output kept so far. A child that outlives its parent may hold the pipe indefinitely, so the
/// wait is limited.
fn text(keeper: Option<JoinHandle<String>>) -> String {
    let Some(keeper) = keeper else { return String::new() };
    let since = Instant::now();
    loop {
        // Checks the time first, so that complete output is taken even if this thread runs late.
        let late = since.elapsed() > KEPT;
        if keeper.is_finished() {
            return keeper.join().unwrap_or_default();
        }
        if late {
            return "(its output is held open by another process)\n".to_owned();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
