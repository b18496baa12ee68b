//! [`command`]: the command line of `rblk-initiator` with the names of the mounts of this host, for
//! the completions of shells.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_complete::engine::{
    ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};
use rblk_operate::mount::flags::Cli;
use rblk_operate::mount::run_dir;

use crate::program::shell_answers::{with_completer, with_names};

/// The directory of the files of mounts.
const MOUNTS_DIR: &str = "/etc/rblk/mounts.d";

/// The arguments that name a mount.
const OF_MOUNTS: [(&str, &str); 6] = [
    ("status", "name"),
    ("umount", "what"),
    ("recover", "name"),
    ("upgrade", "name"),
    ("reload", "name"),
    ("mount", "name"),
];

/// The command line of the program.
#[must_use]
pub fn command() -> Command {
    let named = |command, (word, argument)| with_names(command, &[word], argument, mounts);
    let command = OF_MOUNTS.into_iter().fold(Cli::command(), named);
    ["mount", "vhost", "doctor"].into_iter().fold(command, |command, word| {
        with_completer(command, &[word], "config", ArgValueCompleter::new(files))
    })
}

/// The names of the mounts that have a file, and of those that run. Only root sees the latter.
fn mounts() -> Vec<String> {
    let configured = configured(Path::new(MOUNTS_DIR)).into_iter();
    let stem = |path: PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
    let mut names: Vec<String> = configured.filter_map(stem).chain(run_dir::names()).collect();
    names.sort();
    names.dedup();
    names
}

/// The files of mounts.
fn configured(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| path.extension() == Some(OsStr::new("toml")));
    files.sort();
    files
}

/// The files of mounts, and any other file.
fn files(current: &OsStr) -> Vec<CompletionCandidate> {
    let begun = current.to_string_lossy();
    let mut all: Vec<PathBuf> = configured(Path::new(MOUNTS_DIR));
    all.retain(|path| path.to_string_lossy().starts_with(&*begun));
    let others = PathCompleter::file().complete(current);
    all.into_iter().map(CompletionCandidate::new).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_that_is_named_exists() {
        command().debug_assert();
    }

    #[test]
    fn only_files_of_mounts_are_mounts() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b.toml", "a.toml", "a.toml.old", "README"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let found = configured(directory.path());
        assert_eq!(found, ["a.toml", "b.toml"].map(|name| directory.path().join(name)));
        assert_eq!(configured(Path::new("/nonexistent")), Vec::<PathBuf>::new());
    }
}
