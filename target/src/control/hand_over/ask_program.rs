//! [`ask_program`]: asks another program whether it can take over.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, PipeWriter, Read};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::stat::Mode;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::program::{variables, words};
use super::{CHECK_FLAG, Checked};

/// How long a program may take to answer whether it can take over.
const CHECK_TIME: Duration = Duration::from_secs(10);
/// Time between two looks at it.
const CHECK_STEP: Duration = Duration::from_millis(5);
/// Most bytes read of its answer: its configuration, with all the volumes that a target can have.
const SAID_MAX: u64 = 64 << 20;

/// Asks a program whether it can take over a target with the arguments of this one. Blocks, for 10
/// s at most.
///
/// # Errors
/// The program cannot take over, and why.
pub fn ask_program(program: &Path) -> Result<Checked, String> {
    let shown = program.display();
    if !program.is_absolute() {
        return Err(format!("{shown}: not an absolute path"));
    }
    let silent = || format!("{shown} does not say within {CHECK_TIME:?} whether it can take over");
    let begun = Instant::now();
    let cannot_run = |error: io::Error| format!("cannot run {shown}: {error}");
    let (said, its_said) = io::pipe().map_err(cannot_run)?;
    let (complaint, its_complaint) = io::pipe().map_err(cannot_run)?;
    let child = spawn(program, its_said, its_complaint).map_err(cannot_run)?;
    // A pipe holds less than many volumes take: both are read while the child writes.
    let (said, complaint) = (text(said), text(complaint));
    let ended = child.wait().map_err(|error| format!("{shown}: {error}"))?;
    let ended = ended.ok_or_else(silent)?;
    // Processes that the child left behind may hold the pipes.
    let left = || (CHECK_TIME + CHECK_STEP).saturating_sub(begun.elapsed());
    let said = said.recv_timeout(left()).map_err(|_| silent())?;
    if ended != ProcessEnd::Exit(0) {
        let complaint = complaint.recv_timeout(left()).unwrap_or_default();
        return Err(format!("{shown} cannot take over ({ended}): {}", complaint.trim()));
    }
    serde_json::from_str(&said).map_err(|_| {
        format!("{shown} does not say whether it can take over: is it an rblk-targetd?")
    })
}

/// A process that this one began. Dropping the value ends the process.
#[derive(Debug)]
struct Child {
    pid: Pid,
    has_ended: bool,
}

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ProcessEnd {
    Exit(i32),
    Signal(Signal),
}

impl fmt::Display for ProcessEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exit status: {code}"),
            Self::Signal(signal) => write!(f, "signal: {signal}"),
        }
    }
}

/// Runs the program beside this one, and closes its ends of the pipes here.
///
/// posix_spawn does not copy this process, so the memory of devices is untouched. The threads of
/// this process block signals, which a child inherits: this child begins with none blocked.
fn spawn(program: &Path, said: PipeWriter, complaint: PipeWriter) -> io::Result<Child> {
    let own = std::env::args_os().skip(1);
    let arguments = std::iter::once(program.as_os_str().to_owned())
        .chain(own)
        .chain([OsString::from(CHECK_FLAG)]);
    let mut streams = PosixSpawnFileActions::init()?;
    streams.add_open(0, "/dev/null", OFlag::O_RDONLY, Mode::empty())?;
    streams.add_dup2(said.as_raw_fd(), 1)?;
    streams.add_dup2(complaint.as_raw_fd(), 2)?;
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(
        PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF,
    )?;
    attributes.set_sigmask(&SigSet::empty())?;
    // This process ignores SIGPIPE, as every program in Rust.
    attributes.set_sigdefault(&SigSet::from(Signal::SIGPIPE))?;
    let (arguments, variables) = (words(arguments)?, variables(None)?);
    let pid = posix_spawn(program, &streams, &attributes, &arguments, &variables)?;
    Ok(Child { pid, has_ended: false })
}

impl Child {
    /// The end of the process. `None`: not in time.
    fn wait(mut self) -> io::Result<Option<ProcessEnd>> {
        let begun = Instant::now();
        loop {
            let ended = match waitpid(self.pid, Some(WaitPidFlag::WNOHANG))? {
                WaitStatus::Exited(_, code) => ProcessEnd::Exit(code),
                WaitStatus::Signaled(_, signal, _) => ProcessEnd::Signal(signal),
                _ if begun.elapsed() > CHECK_TIME => return Ok(None),
                _ => {
                    std::thread::sleep(CHECK_STEP);
                    continue;
                }
            };
            self.has_ended = true;
            return Ok(Some(ended));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The number of a process that was waited for may belong to another one by now.
        if !self.has_ended {
            let _ = kill(self.pid, Signal::SIGKILL);
            while waitpid(self.pid, None) == Err(Errno::EINTR) {}
        }
    }
}

/// Reads a text to its end, in a thread of its own.
fn text(said: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, text) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = said.take(SAID_MAX).read_to_end(&mut bytes);
        // An error means that the receiver gave up.
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_know_the_question_is_refused() {
        let refused = |program: &str| ask_program(Path::new(program)).unwrap_err();
        assert!(refused("rblk-targetd").contains("not an absolute path"));
        assert!(refused("/no/such/program").contains("cannot run /no/such/program"));
        assert!(refused("/dev/null").contains("cannot run /dev/null"));
        assert!(refused("/bin/false").contains("/bin/false cannot take over"));
        assert!(refused("/bin/true").contains("is it an rblk-targetd?"));
    }
}
