//! [`Commit`]: the commit that is checked out. [`Checkout`]: a clean copy of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::remake;
use crate::process;
use crate::workspace::Workspace;

/// Limit on a command of git.
const LIMIT: Duration = Duration::from_secs(5 * 60);

/// A commit of a repository. It stays the same while a run builds it twice.
#[derive(Debug)]
pub(crate) struct Commit {
    repository: PathBuf,
    name: String,
    time: u64,
}

/// A copy of a commit, without what is not committed.
#[derive(Debug)]
pub(crate) struct Checkout {
    /// Its directory.
    pub(crate) root: PathBuf,
    /// The version of the workspace.
    pub(crate) version: String,
    /// The time of the commit, in seconds since 1970.
    pub(crate) time: u64,
}

impl Commit {
    /// The one that is checked out. Names the changes that are not committed.
    pub(crate) fn of(workspace: &Workspace) -> Result<Self> {
        let repository = workspace.root.clone();
        let name = git(&repository, &["rev-parse", "HEAD"])?.trim().to_owned();
        let time = git(&repository, &["log", "-1", "--format=%ct", &name])?.trim().parse()?;
        for line in git(&repository, &["status", "--porcelain"])?.lines() {
            eprintln!("dist: not in the packages, as it is not committed: {line}");
        }
        Ok(Self { repository, name, time })
    }
}

fn git(repository: &Path, words: &[&str]) -> Result<String> {
    process::output(Command::new("git").arg("-C").arg(repository).args(words), LIMIT)
}

impl Checkout {
    /// Copies a commit. What an earlier run built there stays.
    pub(crate) fn make(commit: &Commit, root: &Path) -> Result<Self> {
        let kept = root.with_extension("build");
        let built = root.join(".build");
        if built.exists() {
            fs::rename(&built, &kept)?;
        }
        remake(root)?;
        if kept.exists() {
            fs::rename(&kept, &built)?;
        }
        let archive = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
        let name = archive.path().to_str().context("a temporary file with a strange name")?;
        git(&commit.repository, &["archive", "--format=tar", "-o", name, &commit.name])?;
        let mut tar = Command::new("tar");
        // With the time of now, not of the commit: cargo takes a source that is older than the
        // earlier build for unchanged, and a commit may be made while its predecessor is built.
        tar.arg("--touch").arg("-xf").arg(archive.path()).arg("-C").arg(root);
        process::output(&mut tar, LIMIT)?;
        let version = version(&fs::read_to_string(root.join("Cargo.toml"))?)?;
        Ok(Self { root: root.to_owned(), version, time: commit.time })
    }

    /// The copy as a workspace, which cargo builds into `.build` of the copy.
    pub(crate) fn workspace(&self) -> Workspace {
        Workspace { root: self.root.clone(), target: self.root.join(".build") }
    }

    /// A program with the time of the commit instead of the clock, and no language.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("SOURCE_DATE_EPOCH", self.time.to_string()).env("LC_ALL", "C").env("TZ", "UTC");
        command
    }
}

/// The version of a workspace.
fn version(manifest: &str) -> Result<String> {
    let manifest: toml::Table = manifest.parse().context("Cargo.toml")?;
    let package = manifest.get("workspace").and_then(|workspace| workspace.get("package"));
    match package.and_then(|package| package.get("version")).and_then(toml::Value::as_str) {
        Some(version) => Ok(version.to_owned()),
        None => bail!("Cargo.toml has no workspace.package.version"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_workspace() {
        assert_eq!(version("[workspace.package]\nversion = \"0.3.1\"\n").unwrap(), "0.3.1");
        assert!(version("[package]\nversion = \"0.3.1\"\n").is_err());
    }
}
