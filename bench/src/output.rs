//! [`Output`]: the answer of a command on stdout, and the command line that a run keeps.

use std::io::Write;

use anyhow::Result;
use clap::ValueEnum;

/// Form of the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// For programs: one JSON document.
    Json,
}

/// A command line as it is kept with a run: without the directories of this machine.
pub fn to_record(mut words: impl Iterator<Item = String>) -> Vec<String> {
    let program = words.next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    let mut kept = vec![program];
    while let Some(word) = words.next() {
        match word.as_str() {
            "--out" | "--programs" => drop(words.next()),
            other if other.starts_with("--out=") || other.starts_with("--programs=") => {}
            _ => kept.push(word),
        }
    }
    kept
}

/// Prints the answer of a command. A reader that closed the pipe is no error.
pub(crate) fn say(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader closed the pipe.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
