//! [`Leftovers`]: the remains of dead mounts, as `rblk-initiatord` reports them to a command. Only
//! the daemon reads notes and asks the driver.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Context;
use rblk_config::Exit;
use serde::{Deserialize, Serialize};

use super::child;
use super::mount_status::MountStatus;

/// Time for an answer. The daemon may ask the driver for several devices, each with a deadline.
const WITHIN: Duration = Duration::from_secs(120);
/// Time for a daemon that has answered to end.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// The answer of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Leftovers {
    /// The leftovers of each name, in the order of the question.
    pub mounts: Vec<LeftMount>,
    /// Disks of rblk without a note. Empty if the driver does not answer.
    pub disks: Vec<LeftDisk>,
}

/// The leftovers of a name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeftMount {
    /// The name.
    pub name: String,
    /// The leftovers, or the reason why the daemon cannot look.
    pub found: Result<Remains, NotFound>,
}

/// The leftovers of one mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Remains {
    /// The word of its condition in `list`; absent if it needs no line.
    pub word: Option<String>,
    /// The content of its note, with that word as its state.
    pub note: Option<MountStatus>,
    /// The fault of an unusable note.
    pub note_fault: Option<String>,
}

/// The daemon could not look for leftovers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{error}")]
pub struct NotFound {
    /// Text for people.
    pub error: String,
    /// Exit code of a command that needs the leftovers.
    pub exit: u8,
}

impl NotFound {
    /// The exit code of a command that needs the leftovers.
    #[must_use]
    pub fn exit(&self) -> Exit {
        Exit::of_code(self.exit).unwrap_or(Exit::Failure)
    }
}

/// A disk without a note.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftDisk {
    /// The disk's path in `/dev`.
    pub device: String,
    /// A line about the disk for people.
    pub line: String,
}

/// Asks the daemon for the leftovers of names.
///
/// # Errors
/// The daemon cannot be started, or its answer is none.
pub fn look(daemon: &Path, names: &[String]) -> anyhow::Result<Leftovers> {
    answer_of(daemon, "leftovers", names)
}

/// Asks the daemon for the users of disks: a text for each used disk, in the order of the question.
///
/// # Errors
/// The daemon cannot be started, or its answer is none.
pub fn users(daemon: &Path, disks: &[String]) -> anyhow::Result<Vec<Option<String>>> {
    let users: Vec<Option<String>> = answer_of(daemon, "users", disks)?;
    anyhow::ensure!(
        users.len() == disks.len(),
        "{} answered for {} disks of {}",
        daemon.display(),
        users.len(),
        disks.len()
    );
    Ok(users)
}

/// Asks the daemon, and reads its one line. A daemon that has answered may be unable to end: the
/// kernel keeps a process while a command to the driver is under way.
fn answer_of<T: for<'de> Deserialize<'de>>(
    daemon: &Path,
    question: &str,
    about: &[String],
) -> anyhow::Result<T> {
    let mut command = Command::new(daemon);
    command.arg(question).arg("--").args(about).stdin(Stdio::null());
    let mut process =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().with_context(|| {
            format!("cannot run {}: is rblk installed whole?", daemon.display())
        })?;
    let (out, errors) = (process.stdout.take(), process.stderr.take());
    let (answer, answers) = mpsc::channel();
    std::thread::Builder::new().name("answer".to_owned()).spawn(move || {
        let mut line = String::new();
        let read = out.map_or(Ok(0), |out| BufReader::new(out).read_line(&mut line));
        // The receiver may have given up.
        let _ = answer.send(read.map(|_| line));
    })?;
    let line = answers.recv_timeout(WITHIN);
    let ended = child::ended(process, END_PATIENCE)?;
    let line =
        line.with_context(|| format!("{} does not answer within {WITHIN:?}", daemon.display()))??;
    serde_json::from_str(&line).with_context(|| {
        let mut said = String::new();
        let _ = errors.filter(|_| ended.is_some()).map(|mut text| text.read_to_string(&mut said));
        let how =
            ended.map_or_else(|| "does not end".to_owned(), |(how, _)| format!("ended with {how}"));
        format!("{} {how}: {}", daemon.display(), said.trim())
    })
}
