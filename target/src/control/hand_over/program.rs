//! [`Successor`]: the program that takes the place of this one.

use std::ffi::{CString, NulError, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::unistd::execve;
use rblk_config::HostConfig;

use super::papers::{Papers, StoreLeft};
use super::{HandOver, Inherited, Listening};
use crate::store::Backing;
use rblk_operate::target::left_open::VARIABLE;

/// This program, also if its file was replaced.
const THIS_PROGRAM: &str = "/proc/self/exe";
/// The name that a daemon has in lists of processes.
const NAME: &str = "rblk-targetd";

/// The things that a run leaves to the next program beside its sockets.
#[derive(Debug)]
pub(crate) struct Leaves {
    /// The name of the target.
    pub name: String,
    /// The configuration that it ran with, in TOML.
    pub ran: String,
    /// The configuration that the next program was judged by, in TOML; `None`: it did not report
    /// one, and reads the files.
    pub judged: Option<String>,
    /// The hosts that may connect, if that changed since.
    pub hosts: Option<Vec<HostConfig>>,
    /// The files and devices, by volume.
    pub stores: Vec<(String, Arc<Backing>)>,
    /// The records of the volumes, as texts.
    pub records: Vec<String>,
}

impl Leaves {
    /// Leaves everything open, and writes the papers.
    fn leave_open(&self) -> io::Result<OwnedFd> {
        let stores = self.stores.iter().map(|(volume, backing)| left(volume, backing));
        let papers = Papers {
            name: self.name.clone(),
            ran: self.ran.clone(),
            judged: self.judged.clone(),
            hosts: self.hosts.clone(),
            stores: stores.collect::<io::Result<_>>()?,
            records: self.records.clone(),
        };
        let papers = papers.seal()?;
        fcntl(&papers, FcntlArg::F_SETFD(FdFlag::empty()))?;
        Ok(papers)
    }
}

fn left(volume: &str, backing: &Backing) -> io::Result<StoreLeft> {
    let (inode, device) = backing.numbers()?;
    Ok(StoreLeft {
        volume: volume.to_owned(),
        path: backing.path().to_owned(),
        descriptor: backing.leave_open()?,
        inode,
        device,
        size_bytes: backing.size_bytes(),
    })
}

/// Whether this process could hand over now, as far as that depends on the system.
///
/// # Errors
/// Why it cannot.
pub(crate) fn can_hand_over() -> io::Result<()> {
    File::open(THIS_PROGRAM)?;
    Papers::default().seal().map(drop)
}

/// A program that takes the place of this one, with its inheritance. Nothing is served any more.
#[derive(Debug)]
pub struct Successor {
    program: PathBuf,
    note: HandOver,
    leaves: Leaves,
    // These stay open.
    sockets: Vec<OwnedFd>,
}

impl Successor {
    /// The program, the message and the things that are left to it, and the sockets that stay open,
    /// by address.
    #[must_use]
    pub(crate) fn new(
        program: PathBuf,
        note: HandOver,
        leaves: Leaves,
        sockets: Vec<(String, OwnedFd)>,
    ) -> Self {
        let listening = sockets.iter().map(|(address, socket)| Listening {
            address: address.clone(),
            descriptor: socket.as_raw_fd(),
        });
        let note = HandOver { sockets: listening.collect(), ..note };
        let sockets = sockets.into_iter().map(|(_, socket)| socket).collect();
        Self { program, note, leaves, sockets }
    }

    /// Becomes the program. If that fails, this program begins anew, and serves as before. Returns
    /// only if that fails, too.
    #[must_use]
    pub fn take_over(mut self) -> io::Error {
        let this = match self.keep_open() {
            Ok(this) => this,
            Err(error) => return error,
        };
        let papers = self.leaves.leave_open();
        if papers.is_err() {
            // The next program opens the paths: nothing else may hold the locks then.
            self.leaves.stores.iter().for_each(|(_, backing)| backing.keep());
        }
        self.note.papers = papers.as_ref().ok().map(AsRawFd::as_raw_fd);
        self.note.back = Some(this.as_raw_fd());
        let error = become_program(&self.program, &self.note);
        let _ = fcntl(&this, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
        let failed = format!("cannot run {}: {error}", self.program.display());
        let note = HandOver { back: None, failed: Some(failed), ..self.note };
        become_program(Path::new(THIS_PROGRAM), &note)
    }

    /// Makes the sockets and the file of this program outlive an exec.
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
        // `self` keeps the sockets, the papers and the stores open until then.
        become_program(&PathBuf::from(format!("/proc/self/fd/{back}")), &note)
    }
}

/// Replaces this program. Not through a shell, which would take a damaged program for a script.
fn become_program(program: &Path, note: &HandOver) -> io::Error {
    let arguments = std::iter::once(OsString::from(NAME)).chain(std::env::args_os().skip(1));
    let note = (OsString::from(VARIABLE), OsString::from(note.to_text()));
    let program = CString::new(program.as_os_str().as_bytes());
    let (Ok(program), Ok(arguments), Ok(variables)) =
        (program, words(arguments), variables(Some(note)))
    else {
        return io::ErrorKind::InvalidInput.into();
    };
    match execve(&program, &arguments, &variables) {
        Err(error) => error.into(),
        Ok(never) => match never {},
    }
}

/// Words in the form of the system.
pub(super) fn words(words: impl Iterator<Item = OsString>) -> Result<Vec<CString>, NulError> {
    words.map(|word| CString::new(word.into_vec())).collect()
}

/// The environment of this process, with this note in place of an earlier one.
pub(super) fn variables(note: Option<(OsString, OsString)>) -> Result<Vec<CString>, NulError> {
    let others = std::env::vars_os().filter(|(name, _)| name != VARIABLE);
    words(others.chain(note).map(|(mut name, value)| {
        name.push("=");
        name.push(value);
        name
    }))
}
