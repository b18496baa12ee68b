//! The keys by which both ends of the demo prove who they are.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process;

/// How long it may take to make a key.
const LIMIT: Duration = Duration::from_secs(30);

/// A key of the target and a key of the host that mounts. Their files go with the directory of the
/// demo.
#[derive(Debug)]
pub(crate) struct Keys {
    target: Key,
    host: Key,
}

#[derive(Debug)]
struct Key {
    file: PathBuf,
    public: String,
}

impl Key {
    /// As an administrator makes it: `PROGRAM key new`.
    fn make(program: &Path, file: PathBuf) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(["key", "new", "--file"]).arg(&file);
        let said = process::output(&mut command, LIMIT)?;
        let public = said.lines().next().unwrap_or_default().to_owned();
        let is_key = public.starts_with("rblk1:");
        let public = is_key.then_some(public).with_context(|| {
            format!("{} printed something else than a key: {said}", process::words(&command))
        })?;
        Ok(Self { file, public })
    }
}

impl Keys {
    /// Makes both with the programs of a directory.
    pub(crate) fn make(programs: &Path, work: &Path) -> Result<Self> {
        Ok(Self {
            target: Key::make(&programs.join("rblk-target"), work.join("target.key"))?,
            host: Key::make(&programs.join("rblk-initiator"), work.join("host.key"))?,
        })
    }

    /// The flags of the target: its key, and the one host that it lets in.
    pub(crate) fn of_target(&self) -> [String; 4] {
        let host = format!("demo={}", self.host.public);
        let file = self.target.file.display().to_string();
        ["--key-file".to_owned(), file, "--host".to_owned(), host]
    }

    /// The flags of a command of the initiator: its key, and the key that the target must prove.
    pub(crate) fn of_host(&self) -> [String; 4] {
        let file = self.host.file.display().to_string();
        let target = self.target.public.clone();
        ["--key-file".to_owned(), file, "--target-key".to_owned(), target]
    }
}
