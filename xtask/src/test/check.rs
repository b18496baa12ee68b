//! `cargo xtask check`: the quick part of `cargo xtask test`, for every few edits.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use super::step::{Kind, Steps, Work};
use super::{AS_ROOT, Run, TestArgs, VERBS};
use crate::lab::host;
use crate::process;

/// A file of the package libibverbs-dev, which the code for RDMA devices needs.
const VERBS_HEADER: &str = "/usr/include/infiniband/verbs.h";

/// Limit on asking for a version.
const VERSION_LIMIT: Duration = Duration::from_secs(60);

/// The tests beside the code.
const UNITS: [&str; 2] = ["--lib", "--bins"];

/// Say quickly whether a change is worth a run of `cargo xtask test`
///
/// Checks the format, the widths of comments, circles of imports, the house rules, the lints, the
/// unit tests and the documentation, and runs the tests of `protocol` under Miri where Miri is
/// installed. The command installs nothing, boots no guest and needs no root. What cannot run here
/// is skipped and named: tests that need root, and the code for RDMA devices without libibverbs.
///
/// Exit status: 0 when nothing failed, 1 when anything did.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct CheckArgs {}

impl CheckArgs {
    /// Runs the steps.
    pub(crate) fn run(&self) -> Result<i32> {
        let args = TestArgs { long: None, no_lab: true, kernel: None, filters: Vec::new() };
        args.run_steps(|run, steps| run.quick(steps))
    }
}

impl Run<'_> {
    fn quick(&self, steps: &mut Steps) {
        let verbs =
            steps.run(Kind::Check, "libraries for RDMA", verbs).map_or(&[][..], |()| &VERBS);
        self.quick_checks(steps, verbs);
        let _ = steps.run(Kind::Run, "unit tests", || self.unit_tests(verbs));
        let _ = steps.run(Kind::Run, "unit tests as root", || self.unit_tests_as_root(verbs));
        let _ = steps.run(Kind::Check, "documentation", || self.documentation(verbs));
        let _ = steps.run(Kind::Run, "protocol under Miri", || self.miri());
    }

    fn unit_tests(&self, verbs: &[&str]) -> Result<Work> {
        self.cargo(&[&["test", "--workspace", "--no-fail-fast"][..], &UNITS, verbs].concat())
    }

    fn unit_tests_as_root(&self, verbs: &[&str]) -> Result<Work> {
        if !host::is_root() {
            return Ok(Work::Skipped("this user is not root".to_owned()));
        }
        let test = ["test", "--workspace", "--no-fail-fast"];
        self.cargo(&[&test[..], &UNITS, verbs, &["--", "--ignored", AS_ROOT]].concat())
    }

    fn miri(&self) -> Result<Work> {
        // Miri is a component of nightly toolchains; another toolchain may be the default.
        let nightly = || {
            let mut command = Command::new("rustup");
            command.args(["run", "nightly", "cargo"]).current_dir(&self.workspace.root);
            command
        };
        let has_miri = |mut command: Command| {
            process::output(command.args(["miri", "--version"]), VERSION_LIMIT).is_ok()
        };
        let mut command = if has_miri(self.workspace.cargo(&[])) {
            self.workspace.cargo(&[])
        } else if has_miri(nightly()) {
            nightly()
        } else {
            let why = "Miri is not installed (rustup +nightly component add miri)";
            return Ok(Work::Skipped(why.to_owned()));
        };
        command.args(["miri", "test", "-p", "rblk-protocol", "--lib"]);
        // Miri is a hundred times slower, and proptest reads the current directory.
        command.env("PROPTEST_CASES", "4").env("MIRIFLAGS", "-Zmiri-disable-isolation");
        self.execute(&mut command)
    }
}

/// Whether the code for RDMA devices can be built here.
fn verbs() -> Result<Work> {
    if Path::new(VERBS_HEADER).exists() {
        return Ok(Work::Done(()));
    }
    let why = format!("there is no {VERBS_HEADER}: the code for RDMA devices is not checked");
    Ok(Work::Skipped(why))
}
