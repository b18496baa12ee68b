//! `cargo xtask test`: everything that must hold before a change goes in, in one command.
//!
//! The steps go from the quick to the slow, and the first that fails ends the run. The last line is
//! `N passed, N failed`, summed over every libtest run, in the lab too; a step that fails without a
//! test to blame counts as one failure.

mod linkage;
mod suite;
mod tally;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;

use crate::artifacts::{Artifacts, BUILD_LIMIT};
use crate::lab::{DEFAULT_KERNEL, host};
use crate::packages;
use crate::process;
use crate::workspace::Workspace;
use suite::{Guest, Selection, Suite};
use tally::{Count, Tally};

/// The other kernel: the oldest that has what the initiator needs.
const OTHER_KERNEL: &str = "6.12";

/// Limit on one guest.
const GUEST_LIMIT: Duration = Duration::from_secs(25 * 60);
/// The same with `--long`: 1000 rounds of `lost_writes` take two hours under emulation.
const GUEST_LIMIT_LONG: Duration = Duration::from_secs(5 * 60 * 60);

/// Instructions that an end may spend on one request of 4 KiB, the fabric's and the store's apart, in the profile of
/// the lab; that of releases makes a tenth fewer.
const INSTRUCTIONS_MOST: &str = "1500";

/// Tests that an optimised build makes more of: package, name, and what it is then.
const MODELS: [(&str, &str, &str); 2] = [
    ("rblk-tests", "storage_model", "a million requests against the model"),
    ("rblk-tests", "simulation", "five thousand simulations"),
];

/// Test binaries that run in the guest: package, file in the workspace, name.
const SUITES: [(&str, &str, &str); 5] = [
    ("rblk-fabric", "fabric/tests/verbs_conformance.rs", "verbs_conformance"),
    ("rblk-fabric", "fabric/tests/verbs_lifecycle.rs", "verbs_lifecycle"),
    ("rblk-tests", "tests/tests/lab/main.rs", "lab"),
    ("rblk-tests", "tests/tests/lab_storage/main.rs", "lab_storage"),
    ("rblk-tests", "tests/tests/lab_faults/main.rs", "lab_faults"),
];

/// Run every check and every test
///
/// They run on this machine, then in the lab on real verbs and ublk, up to the first step that
/// fails; its name and `N passed, N failed` are the last lines.
///
/// Missing system packages are installed first (as root; Debian). With FILTERs only tests are run
/// whose names contain one of them, and no other checks.
///
/// Exit status: 0 when everything passed, 1 when anything failed.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct TestArgs {
    /// Give tests that can run longer, or with more data, the time to (RBLK_LONG=1)
    #[arg(long)]
    long: bool,

    /// Leave out what needs a guest
    #[arg(long)]
    no_lab: bool,

    /// Run the lab's tests on this kernel alone; by default all on 7.2, and on 6.12 those whose
    /// names begin with `kernel_`
    #[arg(long, value_name = "VERSION")]
    kernel: Option<String>,

    /// Only tests whose names contain one of these
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
}

/// A run of the steps.
#[derive(Debug)]
struct Run<'a> {
    args: &'a TestArgs,
    workspace: Workspace,
    start: Instant,
    steps: u32,
    // The step that failed.
    failed: Option<String>,
    count: Arc<Mutex<Count>>,
}

impl TestArgs {
    /// Runs the steps up to the first that fails.
    pub(crate) fn run(&self) -> Result<i32> {
        let mut run = Run {
            args: self,
            workspace: Workspace::find()?,
            start: Instant::now(),
            steps: 0,
            failed: None,
            count: Arc::default(),
        };
        let result = run.all();
        let mut count = *run.count.lock().unwrap_or_else(PoisonError::into_inner);
        let result = result.and_then(|()| self.anything_ran(count));
        if let Err(error) = &result {
            // A failed test has been counted; a failed step has not.
            count.failed = count.failed.max(1);
            println!("\nFAILED: {error:#}");
        }
        print!("{}", ending(run.steps, run.start.elapsed(), run.failed.as_deref(), count));
        Ok(i32::from(result.is_err()))
    }

    /// A filter that no name contains is a mistake, not a success.
    fn anything_ran(&self, count: Count) -> Result<()> {
        if !self.filters.is_empty() && count.passed + count.failed == 0 {
            bail!("no test ran: no name contains {}", self.filters.join(" or "));
        }
        Ok(())
    }
}

/// The last lines: an error may be long, so the step is named once more after it.
fn ending(steps: u32, took: Duration, failed: Option<&str>, count: Count) -> String {
    let Count { passed, failed: failures, ignored, .. } = count;
    let seconds = took.as_secs_f64();
    let failed = failed.map(|step| format!("FAILED: {step}\n")).unwrap_or_default();
    format!(
        "\n{steps} steps in {seconds:.0} s; {ignored} tests are marked as ignored\n\
         {failed}{passed} passed, {failures} failed\n"
    )
}

impl Run<'_> {
    fn all(&mut self) -> Result<()> {
        self.step("system packages", |run| run.install())?;
        if self.args.filters.is_empty() {
            self.checks()?;
        }
        // With the programs, which tests of other crates start; `cargo test` alone leaves them out.
        self.step("programs and tests", |run| {
            run.cargo(&["build", "--workspace", "--all-targets"])
        })?;
        self.step("tests on this machine", |run| run.host_tests())?;
        let left_out = "LEFT OUT, as --no-lab asks: everything that needs an RDMA device or ublk";
        if self.args.no_lab && !self.args.filters.is_empty() {
            println!("\n{left_out}");
            return Ok(());
        }
        let suites: Vec<_> =
            SUITES.iter().filter(|(_, file, _)| self.workspace.root.join(file).exists()).collect();
        let mut selection =
            ["--bins", "-p", "rblk-target", "-p", "rblk-initiator", "-p", "rblk-bench"]
                .map(str::to_owned)
                .to_vec();
        for (package, name, _) in MODELS {
            selection.extend(["-p", package, "--test", name].map(str::to_owned));
        }
        for (package, _, name) in &suites {
            selection.extend(["-p", *package, "--test", *name].map(str::to_owned));
        }
        let artifacts = self.step("programs for the lab", |run| {
            let words: Vec<&str> = selection.iter().map(String::as_str).collect();
            Artifacts::build(&run.workspace, &words)
        })?;
        if self.args.filters.is_empty() {
            self.step("linkage", |_| linkage::check(artifacts.dir()))?;
            self.step("instructions of a request", |run| run.instructions(&artifacts))?;
        }
        if self.args.no_lab {
            println!("\n{left_out}");
            return Ok(());
        }
        if self.args.filters.is_empty() {
            for (_, name, what) in MODELS {
                self.step(what, |run| run.model(&artifacts, name))?;
            }
        }
        let kernels = match &self.args.kernel {
            Some(kernel) => vec![(kernel.as_str(), false)],
            None => vec![(DEFAULT_KERNEL, false), (OTHER_KERNEL, true)],
        };
        for (kernel, every_kernel) in kernels {
            for (_, _, name) in &suites {
                self.step(&format!("{name} in the lab, Linux {kernel}"), |run| {
                    run.lab_tests(&artifacts, name, kernel, every_kernel)
                })?;
            }
        }
        Ok(())
    }

    fn checks(&mut self) -> Result<()> {
        self.step("formatting", |run| run.cargo(&["fmt", "--all", "--check", "--", "-l"]))?;
        self.step("lints", |run| {
            run.cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])
        })?;
        self.step("lints without verbs", |run| {
            let packages = ["-p", "rblk-fabric", "-p", "rblk-target", "-p", "rblk-initiator"];
            let words =
                [&["clippy"][..], &packages, &["--no-default-features", "--", "-D", "warnings"]];
            run.cargo(&words.concat())
        })?;
        self.step("documentation", |run| {
            let mut command = run.workspace.cargo(&["doc", "--no-deps", "--workspace"]);
            run.execute(command.env("RUSTDOCFLAGS", "-D warnings"))
        })?;
        self.step("dependencies (cargo deny)", |run| run.deny())
    }

    fn install(&self) -> Result<()> {
        host::ensure_installed(packages::BUILD)?;
        host::ensure_installed(packages::TEST)?;
        if !self.args.no_lab {
            host::ensure_installed(host::PACKAGES)?;
        }
        for component in ["fmt", "clippy"] {
            let mut command = self.workspace.cargo(&[component, "--version"]);
            if process::output(&mut command, Duration::from_secs(60)).is_err() {
                let name = if component == "fmt" { "rustfmt" } else { component };
                println!("cargo {component} is missing: rustup component add {name}");
                let mut rustup = Command::new("rustup");
                rustup.args(["component", "add", name]).current_dir(&self.workspace.root);
                process::output(&mut rustup, BUILD_LIMIT)?;
            }
        }
        Ok(())
    }

    fn host_tests(&self) -> Result<()> {
        println!(
            "RBLK_SKIP_LAB=1 RBLK_SKIP_RDMA=1: tests that need devices skip themselves HERE{}",
            if self.args.no_lab { "" } else { ", as the lab steps run them" }
        );
        let mut command = self.workspace.cargo(&["test", "--workspace", "--no-fail-fast", "--"]);
        command.args(&self.args.filters);
        command.envs([("RBLK_SKIP_LAB", "1"), ("RBLK_SKIP_RDMA", "1")]).envs(self.long());
        self.execute(&mut command)
    }

    fn model(&self, artifacts: &Artifacts, name: &str) -> Result<()> {
        let mut command = Command::new(artifacts.program(name));
        self.execute(command.current_dir(&self.workspace.root))
    }

    /// Counted, not timed, so it is a test like any other; of an optimised build it says something.
    fn instructions(&self, artifacts: &Artifacts) -> Result<()> {
        // What needs no store; at depth 32, where no turn finds nothing.
        for (op, volumes) in [("read", "memory,cached"), ("write", "memory")] {
            let mut command = Command::new(artifacts.program("rblk-bench"));
            command.args(["cost", "--instructions", "--ios", "2000", "--depths", "32"]);
            command.args(["--ops", op, "--volume", volumes, "--at-most", INSTRUCTIONS_MOST]);
            self.execute(command.current_dir(&self.workspace.root))?;
        }
        Ok(())
    }

    fn deny(&self) -> Result<()> {
        let mut version = self.workspace.cargo(&["deny", "--version"]);
        if process::output(&mut version, Duration::from_secs(60)).is_err() {
            println!("cargo-deny is not installed: licences and advisories are NOT checked");
            return Ok(());
        }
        self.cargo(&["deny", "check"])
    }

    fn lab_tests(
        &self,
        artifacts: &Artifacts,
        name: &str,
        kernel: &str,
        every_kernel: bool,
    ) -> Result<()> {
        let mut environment: Vec<(&'static str, OsString)> =
            vec![("RBLK_BIN_DIR", artifacts.dir().into())];
        environment.extend(self.long().into_iter().map(|(name, value)| (name, value.into())));
        let shares: Vec<PathBuf> = vec![self.workspace.root.clone(), artifacts.dir().to_owned()];
        let suite = Suite {
            program: artifacts.program(name),
            shares,
            environment,
            selection: Selection { every_kernel, filters: &self.args.filters },
        };
        let limit = if self.args.long { GUEST_LIMIT_LONG } else { GUEST_LIMIT };
        suite.run(Guest { kernel, limit }, &self.count)
    }

    fn long(&self) -> Option<(&'static str, &'static str)> {
        self.args.long.then_some(("RBLK_LONG", "1"))
    }

    fn cargo(&self, words: &[&str]) -> Result<()> {
        self.execute(&mut self.workspace.cargo(words))
    }

    /// Runs a command with its output shown and its tests counted.
    fn execute(&self, command: &mut Command) -> Result<()> {
        println!("{}", process::words(command));
        let tally = Tally::new(std::io::stdout(), Arc::clone(&self.count));
        let limit = if self.args.long { 4 * BUILD_LIMIT } else { BUILD_LIMIT };
        match process::stream(command, limit, tally)? {
            0 => Ok(()),
            status => bail!("{} ended with status {status}", process::words(command)),
        }
    }

    /// Does one step, named before it begins and timed at its end.
    fn step<T>(&mut self, name: &str, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        self.steps += 1;
        let begin = Instant::now();
        println!("\n=== {} {name} (at {:.0} s)", self.steps, self.start.elapsed().as_secs_f64());
        let result = work(self);
        let seconds = begin.elapsed().as_secs_f64();
        match result {
            Ok(value) => {
                println!("=== {} {name}: ok, {seconds:.1} s", self.steps);
                Ok(value)
            }
            Err(error) => {
                println!("=== {} {name}: FAILED after {seconds:.1} s", self.steps);
                let step = format!("step {} ({name})", self.steps);
                self.failed = Some(step.clone());
                Err(error.context(step))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(filters: &[&str]) -> TestArgs {
        let filters = filters.iter().map(|&filter| filter.to_owned()).collect();
        TestArgs { long: false, no_lab: true, kernel: None, filters }
    }

    fn run(args: &TestArgs) -> Run<'_> {
        let workspace = Workspace::find().unwrap();
        let count = Arc::default();
        Run { args, workspace, start: Instant::now(), steps: 0, failed: None, count }
    }

    #[test]
    fn the_last_lines_name_the_step_that_failed() {
        let args = args(&[]);
        let mut run = run(&args);
        run.step("lints", |_| Ok(())).unwrap();
        let error = run.step("tests", |_| -> Result<()> { bail!("many\nlines\n") }).unwrap_err();
        assert!(format!("{error:#}").starts_with("step 2 (tests): many"), "{error:#}");
        let count = Count { passed: 7, failed: 1, ignored: 2, results: 3 };
        assert_eq!(
            ending(run.steps, Duration::from_secs(3), run.failed.as_deref(), count),
            "\n2 steps in 3 s; 2 tests are marked as ignored\n\
             FAILED: step 2 (tests)\n7 passed, 1 failed\n"
        );
        let count = Count { failed: 0, ..count };
        assert_eq!(
            ending(2, Duration::ZERO, None, count),
            "\n2 steps in 0 s; 2 tests are marked as ignored\n7 passed, 0 failed\n"
        );
    }

    #[test]
    fn a_filter_that_selects_nothing_fails() {
        let none = Count { results: 9, ..Count::default() };
        let one = Count { passed: 1, ..none };
        assert!(args(&["drian"]).anything_ran(none).unwrap_err().to_string().contains("drian"));
        assert!(args(&["drain"]).anything_ran(one).is_ok());
        assert!(args(&[]).anything_ran(none).is_ok());
    }
}
