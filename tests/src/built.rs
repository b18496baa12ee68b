//! [`program`]: the path of one of the project's programs. A program that is missing or older than
//! its sources is built first, so that a test needs no prior build and never runs old code.
//!
//! `RBLK_BIN_DIR` names a directory of programs that are used as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

/// All programs: each command starts the daemon that stands beside it.
const PROGRAMS: [&str; 4] = ["rblk-target", "rblk-targetd", "rblk-initiator", "rblk-initiatord"];

/// The crates that the programs are made of.
const CRATES: [&str; 8] =
    ["protocol", "runtime", "fabric", "config", "operate", "target", "initiator", "cli"];

/// The path of a program of the target or of the initiator.
///
/// # Panics
/// The program is not in `RBLK_BIN_DIR`, or cannot be built.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    let path = DIRECTORY.get_or_init(directory).join(name);
    assert!(path.exists(), "there is no program {}", path.display());
    path
}

fn directory() -> PathBuf {
    if let Some(named) = std::env::var_os("RBLK_BIN_DIR") {
        return named.into();
    }
    let test = std::env::current_exe().expect("the path of this test");
    // Cargo puts tests into `deps`, and programs beside that directory.
    let directory = test.ancestors().nth(2).expect("a build directory").to_owned();
    if !PROGRAMS.iter().all(|name| is_up_to_date(&directory.join(name))) {
        build(&directory);
    }
    directory
}

/// Whether a program is there and newer than all sources of the programs.
fn is_up_to_date(program: &Path) -> bool {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let Some(built) = changed(program) else { return false };
    let is_older = |source: &PathBuf| changed(source).is_some_and(|changed| changed <= built);
    let sources = CRATES.map(|name| root.join(name).join("src"));
    sources.into_iter().all(|directory| files(directory).iter().all(is_older))
}

/// When a file was last written to; none if the file is not there.
fn changed(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|file| file.modified()).ok()
}

/// All files below a directory.
fn files(directory: PathBuf) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut directories = vec![directory];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_directory { directories.push(entry.path()) } else { files.push(entry.path()) }
        }
    }
    files
}

/// Builds the programs into the directory in which cargo put this test. Cargo waits if another
/// build runs there.
fn build(directory: &Path) {
    let profile = profile(directory);
    let mut command = cargo();
    command.args(["build", "--bins"]);
    command.args([
        "-p",
        "rblk-cli",
        "-p",
        "rblk-target",
        "-p",
        "rblk-initiator",
        "--profile",
        profile,
    ]);
    command.arg("--target-dir").arg(directory.parent().expect("a target directory"));
    if cfg!(feature = "verbs") {
        command.args(["--features", "verbs"]);
    }
    let status = command.status();
    assert!(
        status.as_ref().is_ok_and(std::process::ExitStatus::success),
        "{command:?}: {status:?}; RBLK_BIN_DIR names a directory of programs that are built"
    );
}

/// `cargo xtask NAME`, for artefacts that cargo does not build: with the profile of this test, and
/// with RDMA if this test has it.
///
/// # Panics
/// The path of this test is not in a build directory of cargo.
#[must_use]
pub fn xtask(name: &str) -> Command {
    let test = std::env::current_exe().expect("the path of this test");
    let directory = test.ancestors().nth(2).expect("a build directory");
    let mut command = xtask_of_all(name);
    command.args(["--profile", profile(directory)]);
    if !cfg!(feature = "verbs") {
        command.arg("--no-verbs");
    }
    command
}

/// `cargo xtask NAME`, for tasks that do not depend on the build of this test.
#[must_use]
pub fn xtask_of_all(name: &str) -> Command {
    let mut command = cargo();
    command.args(["run", "--quiet", "--package", "xtask", "--", name]);
    command
}

/// The name of the profile that built the programs in a directory.
fn profile(directory: &Path) -> &str {
    match directory.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        Some(profile) => profile,
        None => panic!("{}: no build directory of cargo", directory.display()),
    }
}

/// Cargo, for packages that are not this test's own.
fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    // Variables that `cargo test` sets for the tests' own package must not reach this build.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_older_than_a_source_is_built_anew() {
        let directory = tempfile::tempdir().expect("a directory");
        let program = directory.path().join("program");
        assert!(!is_up_to_date(&program), "it is missing");
        let file = fs::File::create(&program).expect("a program");
        assert!(is_up_to_date(&program));
        file.set_modified(SystemTime::UNIX_EPOCH).expect("an old program");
        assert!(!is_up_to_date(&program));
    }

    #[test]
    fn every_source_is_checked() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        let files = files(root.join("target/src"));
        for name in ["target/src/lib.rs", "target/src/bin/rblk-targetd.rs"] {
            assert!(files.contains(&root.join(name)), "{name}");
        }
    }
}
