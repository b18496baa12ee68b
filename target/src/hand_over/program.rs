//! [`Successor`]: the program that takes the place of this one: asked whether it can, and become.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::unistd::execve;

use super::{CHECK_FLAG, Checked, HandOver, Inherited, Listening, VARIABLE};

/// How long a program may take to say whether it can take over.
const CHECK_TIME: Duration = Duration::from_secs(10);
/// Time between two looks at it.
const CHECK_STEP: Duration = Duration::from_millis(5);
/// Most that is read of what it says.
const SAID_MAX: u64 = 1 << 20;
/// This program, also if its file was replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";
/// The name that a daemon has in lists of processes.
const NAME: &str = "rblk-targetd";

/// Asks a program whether it can take over a target with the arguments of this one. Blocks, for 10
/// s at most.
///
/// The child is made by posix_spawn, which does not copy this process: nothing that a device uses
/// is touched.
///
/// # Errors
/// It cannot, and why.
pub fn ask_program(program: &Path) -> Result<Checked, String> {
    let shown = program.display();
    if !program.is_absolute() {
        return Err(format!("{shown}: not an absolute path"));
    }
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg(CHECK_FLAG).env_remove(VARIABLE);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("cannot run {shown}: {error}"))?;
    let silent = || format!("{shown} does not say within {CHECK_TIME:?} whether it can take over");
    let begun = Instant::now();
    // A pipe holds less than many volumes take: both are read while the child writes.
    let (said, complaint) = (text(child.stdout.take()), text(child.stderr.take()));
    let status = wait(&mut child).map_err(|error| format!("{shown}: {error}"))?;
    let status = status.ok_or_else(silent)?;
    // Whom the child left behind may hold the pipes.
    let left = || (CHECK_TIME + CHECK_STEP).saturating_sub(begun.elapsed());
    let said = said.recv_timeout(left()).map_err(|_| silent())?;
    if !status.success() {
        let complaint = complaint.recv_timeout(left()).unwrap_or_default();
        return Err(format!("{shown} cannot take over ({status}): {}", complaint.trim()));
    }
    serde_json::from_str(&said).map_err(|_| {
        format!("{shown} does not say whether it can take over: is it an rblk-targetd?")
    })
}

fn wait(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() > CHECK_TIME {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(CHECK_STEP);
    }
}

/// Reads a text to its end, in a thread of its own.
fn text(said: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, text) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(said) = said {
            let _ = said.take(SAID_MAX).read_to_end(&mut bytes);
        }
        // Nobody waits for it any more if it took too long.
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    text
}

/// A program that takes the place of this one, with what it needs. Nothing serves any more.
#[derive(Debug)]
pub struct Successor {
    program: PathBuf,
    note: HandOver,
    // They stay open.
    sockets: Vec<OwnedFd>,
}

impl Successor {
    /// This program, what it is told, and the sockets that stay open, by address.
    #[must_use]
    pub(crate) fn new(program: PathBuf, note: HandOver, sockets: Vec<(String, OwnedFd)>) -> Self {
        let listening = sockets.iter().map(|(address, socket)| Listening {
            address: address.clone(),
            descriptor: socket.as_raw_fd(),
        });
        let note = HandOver { sockets: listening.collect(), ..note };
        let sockets = sockets.into_iter().map(|(_, socket)| socket).collect();
        Self { program, note, sockets }
    }

    /// Becomes the program. Where that fails, this program begins anew, and serves as before.
    /// Returns only if that fails, too.
    #[must_use]
    pub fn take_over(mut self) -> io::Error {
        let this = match self.keep_open() {
            Ok(this) => this,
            Err(error) => return error,
        };
        self.note.back = Some(this.as_raw_fd());
        let error = become_program(&self.program, &self.note);
        let _ = fcntl(&this, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
        let failed = format!("cannot run {}: {error}", self.program.display());
        let note = HandOver { back: None, failed: Some(failed), ..self.note };
        become_program(Path::new(THIS_PROGRAM), &note)
    }

    /// From now on the sockets outlive an exec, and so does the file of this program.
    fn keep_open(&self) -> io::Result<File> {
        let this = File::open(THIS_PROGRAM)?;
        for socket in &self.sockets {
            fcntl(socket, FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        fcntl(&this, FcntlArg::F_SETFD(FdFlag::empty()))?;
        Ok(this)
    }
}

impl Inherited {
    /// Becomes the program before this one again, because this one cannot start. Returns only if
    /// that fails.
    #[must_use]
    pub fn go_back(self, why: &str) -> io::Error {
        let Some(back) = self.back() else { return io::ErrorKind::NotFound.into() };
        let _ = fcntl(back, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
        let back = back.as_raw_fd();
        let version = env!("CARGO_PKG_VERSION");
        let failed = format!("version {version} cannot start: {why}");
        let note = HandOver { back: None, failed: Some(failed), ..self.note().clone() };
        // `self` keeps the sockets open until then.
        become_program(&PathBuf::from(format!("/proc/self/fd/{back}")), &note)
    }
}

/// Replaces this program. Not through a shell, which would take a damaged program for a script.
fn become_program(program: &Path, note: &HandOver) -> io::Error {
    let word = |word: OsString| CString::new(word.into_vec());
    let arguments = std::iter::once(OsString::from(NAME)).chain(std::env::args_os().skip(1));
    let arguments: Result<Vec<CString>, _> = arguments.map(word).collect();
    let others = std::env::vars_os().filter(|(name, _)| name != VARIABLE);
    let variable = |(mut name, value): (OsString, OsString)| {
        name.push("=");
        name.push(value);
        name
    };
    let note = (OsString::from(VARIABLE), OsString::from(note.to_text()));
    let variables: Result<Vec<CString>, _> =
        others.chain([note]).map(|pair| word(variable(pair))).collect();
    let program = CString::new(program.as_os_str().as_bytes());
    let (Ok(program), Ok(arguments), Ok(variables)) = (program, arguments, variables) else {
        return io::ErrorKind::InvalidInput.into();
    };
    match execve(&program, &arguments, &variables) {
        Err(error) => error.into(),
        Ok(never) => match never {},
    }
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
