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

/// The profile of the gate's one build: optimised a little, with every check of a debug build.
pub(crate) const CHECKED: &str = "lab";
/// The profile of programs whose costs are counted or shown.
pub(crate) const MEASURED: &str = "measured";

/// Copies of built programs in a directory of this run alone.
///
/// A guest maps the programs over 9p while it runs, so another build must not replace them.
#[derive(Debug)]
pub(crate) struct Artifacts {
    dir: TempDir,
    tests: Vec<Program>,
}

/// One executable of cargo's messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// Cargo's name of the target; several packages may have one of a name.
    pub(crate) name: String,
    /// The place where cargo put the executable.
    pub(crate) path: PathBuf,
    /// The directory of its package, where cargo runs tests.
    pub(crate) package: PathBuf,
    /// Whether it is a test program, and not a program or an example.
    is_test: bool,
    /// Whether it comes from a file of the directory `tests`.
    is_integration: bool,
}

impl Program {
    /// A name that no other test program has.
    pub(crate) fn title(&self) -> String {
        let package = self.package.file_name().unwrap_or_default().to_string_lossy();
        let unit = if self.is_integration { "" } else { " (units)" };
        format!("{package}/{}{unit}", self.name)
    }
}

impl Artifacts {
    /// Builds what `selection` (words for `cargo build`) names, with a profile.
    pub(crate) fn build(workspace: &Workspace, profile: &str, selection: &[&str]) -> Result<Self> {
        let mut command = workspace.cargo(&["build", "--profile", profile]);
        command.arg("--message-format=json-render-diagnostics").args(selection);
        let (is_built, messages) = capture(&mut command)?;
        if !is_built {
            bail!("the build failed: {}", process::words(&command));
        }
        let (tests, programs): (Vec<Program>, Vec<Program>) =
            programs(&messages)?.into_iter().partition(|program| program.is_test);
        fs::create_dir_all(&workspace.target)?;
        let dir =
            tempfile::Builder::new().prefix("xtask-").tempdir_in(&workspace.target).with_context(
                || format!("cannot make a directory in {}", workspace.target.display()),
            )?;
        let artifacts = Artifacts { dir, tests };
        for program in programs {
            artifacts.copy(&program)?;
        }
        Ok(artifacts)
    }

    /// The test programs, where cargo put them.
    pub(crate) fn tests(&self) -> &[Program] {
        &self.tests
    }

    /// Copies a test program of the directory `tests` to the other programs.
    pub(crate) fn take_test(&self, name: &str) -> Result<()> {
        let is_it = |test: &&Program| test.is_integration && test.name == name;
        let program = self.tests.iter().find(is_it);
        self.copy(program.with_context(|| format!("cargo built no test program {name}"))?)
    }

    fn copy(&self, program: &Program) -> Result<()> {
        let copy = self.dir.path().join(&program.name);
        fs::copy(&program.path, &copy).map(drop).with_context(|| {
            format!("cannot copy {} to {}", program.path.display(), copy.display())
        })
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

/// Runs cargo; gives whether it succeeded, and its messages.
pub(crate) fn capture(command: &mut Command) -> Result<(bool, String)> {
    let messages = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(messages.reopen()?)
        .spawn()
        .with_context(|| format!("cannot start {}", process::words(command)))?;
    let status =
        process::wait(&mut child, BUILD_LIMIT, true).with_context(|| process::words(command))?;
    let text = fs::read_to_string(messages.path()).context("cannot read cargo's messages")?;
    Ok((status.success(), text))
}

fn programs(messages: &str) -> Result<Vec<Program>> {
    #[derive(Deserialize)]
    struct Message {
        reason: String,
        executable: Option<PathBuf>,
        manifest_path: Option<PathBuf>,
        target: Option<Target>,
        profile: Option<Profile>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
        kind: Vec<String>,
    }
    #[derive(Deserialize)]
    struct Profile {
        test: bool,
    }
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Message =
            serde_json::from_str(line).context("cargo gave a message that is not understood")?;
        if let (Some(path), Some(target)) = (message.executable, message.target)
            && message.reason == "compiler-artifact"
        {
            let manifest = message.manifest_path.unwrap_or_default();
            programs.push(Program {
                name: target.name,
                path,
                package: manifest.parent().unwrap_or(Path::new("")).to_owned(),
                is_test: message.profile.is_some_and(|profile| profile.test),
                is_integration: target.kind.iter().any(|kind| kind == "test"),
            });
        }
    }
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executables_are_taken() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"lab","kind":["lib"]},"executable":null}
{"reason":"build-script-executed","package_id":"x"}
   Compiling rblk
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"lab","kind":["test"]},"profile":{"test":true},"executable":"/t/lab-12ab"}
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"b","kind":["bin"]},"profile":{"test":false},"executable":"/t/b"}
{"reason":"build-finished","success":true}
"#;
        let program = |name: &str, path: &str, is_test| Program {
            name: name.into(),
            path: path.into(),
            package: "/w/a".into(),
            is_test,
            is_integration: is_test,
        };
        let expected = [program("lab", "/t/lab-12ab", true), program("b", "/t/b", false)];
        assert_eq!(programs(messages).unwrap(), expected);
        assert_eq!(expected[0].title(), "a/lab");
    }
}
