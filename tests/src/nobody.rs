//! [`Nobody`]: the user `nobody`, without rights, and programs that run as this user. The user
//! cannot enter a checkout in a home directory of mode 0700. So programs are copied or linked into
//! a directory that every user may enter.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::program::{program, run};

/// The user and group `nobody`.
const ID: &str = "65534";

/// Checks that a test which needs root and `tools` can run here.
///
/// # Panics
/// This process is not root, or a tool is missing.
#[track_caller]
pub fn assert_is_root(tools: &[&str]) {
    let has = |tool: &&&str| {
        Command::new(tool).arg("--version").output().is_ok_and(|done| done.status.success())
    };
    let missing: Vec<String> = (!nix::unistd::geteuid().is_root())
        .then(|| "to be run by root".to_owned())
        .into_iter()
        .chain(tools.iter().filter(|tool| !has(tool)).map(|tool| format!("the program {tool}")))
        .collect();
    assert!(missing.is_empty(), "this test needs {}", missing.join(", and "));
}

/// A user without rights, with a directory of its own. Needs root and `setpriv`: see
/// [`assert_is_root`].
#[derive(Debug)]
pub struct Nobody {
    dir: TempDir,
}

impl Nobody {
    /// Makes the directory, in the first place where every user may enter and run programs.
    ///
    /// # Panics
    /// There is no place that every user may use.
    #[must_use]
    pub fn new() -> Self {
        // TMPDIR may be private, too.
        let places = [std::env::temp_dir(), "/tmp".into(), "/var/tmp".into(), "/dev/shm".into()];
        Self::in_first(&places)
    }

    fn in_first(places: &[PathBuf]) -> Self {
        let dir = places.iter().find_map(|place| {
            let dir = tempfile::tempdir_in(place).ok()?;
            std::fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).ok()?;
            can_execute_in(dir.path()).then_some(dir)
        });
        let dir = dir.unwrap_or_else(|| {
            panic!("the user nobody cannot run programs in any of {places:?}: make one of them mode 1777, mounted without noexec")
        });
        Self { dir }
    }

    /// The directory. Every user may read, write and run files in it.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A command of this user: one of the project's programs, run by the programs `before`.
    ///
    /// # Panics
    /// The programs are missing.
    #[must_use]
    pub fn program(&self, name: &str, before: &[&str]) -> Command {
        // A command becomes its daemon, which it looks for in its own directory.
        self.place(&program(&format!("{name}d")));
        self.command(&self.place(&program(name)), before)
    }

    /// A command of this user: any program.
    #[must_use]
    pub fn run(&self, program: &Path) -> Command {
        self.command(&self.place(program), &[])
    }

    fn command(&self, program: &Path, before: &[&str]) -> Command {
        let mut command = setpriv();
        command.args(before).arg(program).current_dir(self.dir());
        command
    }

    /// Puts a program where this user may run it.
    fn place(&self, program: &Path) -> PathBuf {
        let to = self.dir().join(program.file_name().expect("the name of a program"));
        if !to.exists() {
            put(program, &to);
        }
        to
    }
}

impl Default for Nobody {
    fn default() -> Self {
        Self::new()
    }
}

fn setpriv() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", ID, "--regid", ID, "--clear-groups"]);
    command
}

/// Links a program, or copies it to another file system. Programs of a debug build have some
/// hundred MiB.
fn put(program: &Path, to: &Path) {
    let copied = std::fs::hard_link(program, to).or_else(|_| std::fs::copy(program, to).map(drop));
    copied.unwrap_or_else(|e| panic!("{} to {}: {e}", program.display(), to.display()));
}

fn can_execute_in(dir: &Path) -> bool {
    let probe = dir.join("probe");
    let is_made = std::fs::write(&probe, "#!/bin/sh\n").is_ok()
        && std::fs::set_permissions(&probe, Permissions::from_mode(0o755)).is_ok();
    is_made && run(setpriv().arg("test").arg("-x").arg(&probe)).code == Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs root: `cargo xtask test` runs it"]
    fn as_root_a_private_place_is_passed_over() {
        assert_is_root(&["setpriv"]);
        let private = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(private.path(), Permissions::from_mode(0o700)).expect("its mode");
        let open = Nobody::new();
        let nobody = Nobody::in_first(&[private.path().to_owned(), open.dir().to_owned()]);
        assert!(nobody.dir().starts_with(open.dir()));
        let program = private.path().join("hello");
        std::fs::write(&program, "#!/bin/sh\necho hello\n").expect("a program");
        std::fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("its mode");
        assert_eq!(run(&mut nobody.run(&program)).stdout, "hello\n");
    }
}
