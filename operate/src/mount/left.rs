//! [`Leftovers`]: the remains of dead mounts, as `rblk-initiatord` reports them to a command. Only
//! the daemon reads notes and asks the driver.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context;
use rblk_config::Exit;
use serde::{Deserialize, Serialize};

use super::mount_status::MountStatus;

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

fn answer_of<T: for<'de> Deserialize<'de>>(
    daemon: &Path,
    question: &str,
    about: &[String],
) -> anyhow::Result<T> {
    let mut command = Command::new(daemon);
    command.arg(question).arg("--").args(about).stdin(Stdio::null());
    let output = command
        .output()
        .with_context(|| format!("cannot run {}: is rblk installed whole?", daemon.display()))?;
    serde_json::from_slice(&output.stdout).with_context(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        format!("{} ended with {}: {}", daemon.display(), output.status, said.trim())
    })
}
