//! The fuzz targets of `tests/fuzz`: with `--long`, a search for inputs that break something. The
//! replay of the corpora is a test as others are.
//!
//! The stable toolchain does it: the coverage that libFuzzer needs is a pass of LLVM, which `rustc`
//! runs on request. The build goes to a directory of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::artifacts::BUILD_LIMIT;
use crate::process;
use crate::workspace::Workspace;

/// The program that takes corpora out of their archives.
pub(super) const CORPUS: &str = "corpus";
/// The profile of the search.
const PROFILE: &str = "fuzz";
/// How long all targets together look for new inputs, for each unit of the number of `--long`.
const SEARCH: Duration = Duration::from_secs(5 * 60);
/// What an input of any target may take, after which it counts as hung.
const INPUT_SECONDS: u32 = 20;
/// What `rustc` does besides, for libFuzzer: counters of edges, the table of them, and the operands
/// of comparisons.
const COVERAGE: [&str; 5] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];
/// A target of its own: then build scripts and procedural macros are built without counters.
#[cfg(target_arch = "x86_64")]
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
#[cfg(target_arch = "aarch64")]
const TRIPLE: &str = "aarch64-unknown-linux-gnu";

/// Builds the targets and lets each look for inputs that break something, one after the other.
/// `corpus` is the program of that name, and `long` multiplies the time.
///
/// # Errors
/// The build fails, or a target found something: its input is named.
pub(super) fn search(workspace: &Workspace, corpus: &Path, long: u32) -> Result<()> {
    let build = workspace.target.join("fuzz");
    let mut command = workspace.cargo(&["build", "--profile", PROFILE, "--bins"]);
    command.args([
        "--target",
        TRIPLE,
        "-p",
        "rblk-fuzz",
        "--features",
        "libfuzzer",
        "--target-dir",
    ]);
    command.arg(&build).env("RUSTFLAGS", COVERAGE.join(" "));
    process::output(&mut command, 2 * BUILD_LIMIT)?;
    let corpora = build.join("corpus");
    let mut unpack = Command::new(corpus);
    process::output(unpack.arg("unpack").arg(&corpora), BUILD_LIMIT)?;
    let names = names(&corpora)?;
    let seconds = (long * SEARCH).as_secs() / u64::try_from(names.len().max(1))?;
    let mut found = Vec::new();
    for name in &names {
        let place = build.join("found").join(name);
        fs::create_dir_all(&place).with_context(|| place.display().to_string())?;
        let program = build.join(TRIPLE).join(PROFILE).join(name);
        println!("{name}: {seconds} s");
        let mut command = run(&program, &place, &corpora.join(name), seconds);
        // What libFuzzer says of a failure is the error's text.
        let limit = Duration::from_secs(seconds) + BUILD_LIMIT;
        if let Err(error) = process::output(&mut command, limit) {
            println!("{name}: {error:#}");
            found.push(name.as_str());
        }
    }
    if !found.is_empty() {
        bail!(
            "{} found an input that breaks something: it is in {}; mend it, and keep the input as \
             found-... in its corpus (docs/internals/testing.md)",
            found.join(", "),
            build.join("found").display()
        );
    }
    Ok(())
}

/// New inputs go to the first directory, `place`; the corpus is read only.
fn run(program: &Path, place: &Path, corpus: &Path, seconds: u64) -> Command {
    let inputs = place.join("inputs");
    let _ = fs::create_dir_all(&inputs);
    let mut command = Command::new(program);
    command.arg(inputs).arg(corpus);
    command.arg(format!("-max_total_time={seconds}"));
    command.arg(format!("-timeout={INPUT_SECONDS}"));
    command.arg(format!("-artifact_prefix={}/", place.display()));
    command.args(["-print_final_stats=1", "-rss_limit_mb=4096"]);
    command
}

/// The targets: each has a corpus.
fn names(corpora: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(corpora).with_context(|| corpora.display().to_string())?;
    let paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    let mut names: Vec<String> =
        paths.iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect();
    names.sort();
    if names.is_empty() {
        bail!("no corpus in {}", corpora.display());
    }
    Ok(names)
}
