//! Programs that cargo built, found by its messages and copied to a place where no other build
//! replaces them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use tempfile::TempDir;

use crate::process;
use crate::workspace::Workspace;

/// How long a build may take.
pub(crate) const BUILD_LIMIT: Duration = Duration::from_secs(20 * 60);

/// The profile of what runs in the lab.
pub(crate) const PROFILE: &str = "lab";

/// Copies of built programs in a directory of this run alone.
///
/// A guest maps the programs over 9p while it runs, so another build must not replace them.
#[derive(Debug)]
pub(crate) struct Artifacts {
    dir: TempDir,
}

/// One executable of cargo's messages.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: String,
    path: PathBuf,
}

impl Artifacts {
    /// Builds what `selection` (words for `cargo build`) names.
    pub(crate) fn build(workspace: &Workspace, selection: &[&str]) -> Result<Self> {
        Self::build_with(workspace, PROFILE, selection)
    }

    /// The same with another profile.
    pub(crate) fn build_with(
        workspace: &Workspace,
        profile: &str,
        selection: &[&str],
    ) -> Result<Self> {
        let mut command = workspace.cargo(&["build", "--profile", profile]);
        command.arg("--message-format=json-render-diagnostics").args(selection);
        let messages = capture(&mut command)?;
        let programs = programs(&messages)?;
        fs::create_dir_all(&workspace.target)?;
        let dir =
            tempfile::Builder::new().prefix("xtask-").tempdir_in(&workspace.target).with_context(
                || format!("cannot make a directory in {}", workspace.target.display()),
            )?;
        for program in programs {
            let copy = dir.path().join(&program.name);
            fs::copy(&program.path, &copy).with_context(|| {
                format!("cannot copy {} to {}", program.path.display(), copy.display())
            })?;
        }
        Ok(Artifacts { dir })
    }

    /// The directory; it also has room for what a run wants to keep.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// One of the programs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Leaves the directory where it is.
    pub(crate) fn keep(self) -> PathBuf {
        self.dir.keep()
    }
}

/// Runs cargo with its diagnostics on stderr; gives its messages.
fn capture(command: &mut Command) -> Result<String> {
    let messages = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(messages.reopen()?)
        .spawn()
        .with_context(|| format!("cannot start {}", process::words(command)))?;
    let status =
        process::wait(&mut child, BUILD_LIMIT, true).with_context(|| process::words(command))?;
    if !status.success() {
        bail!("the build failed: {}", process::words(command));
    }
    fs::read_to_string(messages.path()).context("cannot read cargo's messages")
}

fn programs(messages: &str) -> Result<Vec<Program>> {
    #[derive(Deserialize)]
    struct Message {
        reason: String,
        executable: Option<PathBuf>,
        target: Option<Target>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Message =
            serde_json::from_str(line).context("cargo gave a message that is not understood")?;
        if let (Some(path), Some(target)) = (message.executable, message.target)
            && message.reason == "compiler-artifact"
        {
            programs.push(Program { name: target.name, path });
        }
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executables_are_taken() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"lib"},"executable":null}
{"reason":"build-script-executed","package_id":"x"}
   Compiling rblk
{"reason":"compiler-artifact","target":{"name":"lab"},"executable":"/t/lab-12ab"}
{"reason":"build-finished","success":true}
"#;
        let expected = Program { name: "lab".into(), path: "/t/lab-12ab".into() };
        assert_eq!(programs(messages).unwrap(), [expected]);
    }
}
