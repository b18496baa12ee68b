//! `cargo xtask check`: the quick part of `cargo xtask test`, for every few edits.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use super::left_out::Passed;
use super::step::{Steps, Work};
use super::{Run, TestArgs};
use crate::lab::host;
use crate::process;

/// Say quickly whether a change is worth a run of `cargo xtask test`
///
/// Checks the format, the widths of comments, the lints, the unit tests and the documentation, and
/// runs the tests of `protocol` under Miri where Miri is installed. It installs nothing, boots no
/// guest and needs no root: tests that need root are left out without it, and named.
///
/// Exit status: 0 when nothing failed, 1 when anything did.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct CheckArgs {}

impl CheckArgs {
    /// Runs the steps.
    pub(crate) fn run(&self) -> Result<i32> {
        let args = TestArgs { long: false, no_lab: true, kernel: None, filters: Vec::new() };
        args.run_steps(|run, steps| run.quick(steps))
    }
}

impl Run<'_> {
    fn quick(&self, steps: &mut Steps) {
        self.quick_checks(steps);
        let _ = steps.run("unit tests", || self.unit_tests());
        let _ = steps.run("documentation", || self.documentation());
        let _ = steps.run("protocol under Miri", || self.miri());
    }

    fn unit_tests(&self) -> Result<Work> {
        let words =
            ["test", "--workspace", "--lib", "--bins", "--no-fail-fast", "--", "--show-output"];
        let mut command = self.workspace.cargo(&words);
        if !host::is_root() {
            command.env("RBLK_SKIP_ROOT", "1");
        }
        self.execute_into(&mut command, Passed::new(self.tally(), Arc::clone(&self.left_out)))
    }

    fn miri(&self) -> Result<Work> {
        let mut version = self.workspace.cargo(&["miri", "--version"]);
        if process::output(&mut version, Duration::from_secs(60)).is_err() {
            let why = "Miri is not installed (rustup +nightly component add miri)";
            return Ok(Work::Skipped(why.to_owned()));
        }
        self.cargo(&["miri", "test", "-p", "rblk-protocol", "--lib"])
    }
}
