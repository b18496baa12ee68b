//! `cargo xtask test`: everything that must hold before a change goes in, in one command.
//!
//! The quick steps come first. A step that fails does not stop the later ones, except those that
//! need what it builds. The last line is `N passed, N failed`, summed over every test program, also
//! in the lab. A step that fails without a failed test counts as one failure. `, N skipped` follows
//! where a check did not run.

mod check;
mod circles;
mod fuzz;
mod head_start;
mod linkage;
mod room;
mod step;
mod suite;
mod summary;
mod tally;
mod widths;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;

use crate::artifacts::{Artifacts, BUILD_LIMIT, PROFILE};
use crate::fio_engine::FioEngineArgs;
use crate::lab::{DEFAULT_KERNEL, host};
use crate::packages;
use crate::process;
use crate::workspace::Workspace;
pub(crate) use check::CheckArgs;
use head_start::HeadStart;
use step::{Missing, Steps, Work};
use suite::{Guest, Selection, Suite};
use summary::Summary;
use tally::{Results, Tally};

/// The other kernel: the oldest that has what the initiator needs.
const OTHER_KERNEL: &str = "6.12";

/// Limit on one guest.
const GUEST_LIMIT: Duration = Duration::from_secs(25 * 60);
/// The same with `--long`: 1000 rounds of `lost_writes` take two hours under emulation.
const GUEST_LIMIT_LONG: Duration = Duration::from_secs(5 * 60 * 60);

/// Instructions that an end may spend on one request of 4 KiB, without those of the fabric and the
/// store, in the profile of the lab. The profile of releases takes a tenth fewer.
const INSTRUCTIONS_MOST: &str = "1500";

/// The code for RDMA devices is built in.
const VERBS: [&str; 2] = ["--features", "verbs"];

const LINTS: [&str; 3] = ["clippy", "--workspace", "--all-targets"];

/// How the names of tests begin that need root.
const AS_ROOT: &str = "as_root_";

/// Tests that do more in an optimised build: package, name, and what the test is then.
const MODELS: [(&str, &str, &str); 2] = [
    ("rblk-tests", "storage_model", "a million requests against the model"),
    ("rblk-tests", "simulation", "five thousand simulations"),
];

/// Test binaries that run in the guest: package, file in the workspace, name.
const SUITES: [(&str, &str, &str); 6] = [
    ("rblk-fabric", "fabric/tests/soft_tls.rs", "soft_tls"),
    ("rblk-fabric", "fabric/tests/verbs_conformance.rs", "verbs_conformance"),
    ("rblk-fabric", "fabric/tests/verbs_lifecycle.rs", "verbs_lifecycle"),
    ("rblk-tests", "tests/tests/lab/main.rs", "lab"),
    ("rblk-tests", "tests/tests/lab_storage/main.rs", "lab_storage"),
    ("rblk-tests", "tests/tests/lab_faults/main.rs", "lab_faults"),
];

/// Run every check and every test
///
/// They run on this machine, then in the lab on real verbs and ublk. A step that fails does not
/// stop the other steps, except those that need what it builds. At the end each step that failed or
/// was skipped is named; the last line is `N passed, N failed`, and `, N skipped` where checks did
/// not run.
///
/// Missing system packages are installed first (as root; Debian). With FILTERs only tests run whose
/// names contain one of them, and no other checks. The names of tests that need root begin with
/// `as_root_`.
///
/// Exit status: 0 when nothing failed, 1 when anything did.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct TestArgs {
    /// Run tests that can use it longer, or with more data (RBLK_LONG=1), and fuzz for five minutes
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
    results: Arc<Mutex<Results>>,
}

impl TestArgs {
    /// Runs the steps.
    pub(crate) fn run(&self) -> Result<i32> {
        self.run_steps(|run, steps| run.all(steps))
    }

    /// Runs some of the steps, and says how they ended.
    fn run_steps(&self, work: impl FnOnce(&Run<'_>, &mut Steps)) -> Result<i32> {
        let run = Run { args: self, workspace: Workspace::find()?, results: Arc::default() };
        let mut steps = Steps::new(Arc::clone(&run.results));
        work(&run, &mut steps);
        let results = run.results.lock().unwrap_or_else(PoisonError::into_inner);
        let mut summary = Summary {
            steps: steps.over(),
            took: steps.start().elapsed(),
            results: &results,
            wrong: None,
        };
        let nothing = self.nothing_ran(&results).filter(|_| summary.is_good());
        summary.wrong = nothing.as_deref();
        print!("{}", summary.text());
        Ok(i32::from(!summary.is_good()))
    }

    /// A filter that no name contains is a mistake, not a success.
    fn nothing_ran(&self, results: &Results) -> Option<String> {
        let nothing = !self.filters.is_empty() && results.passed + results.failed == 0;
        nothing.then(|| format!("no test ran: no name contains {}", self.filters.join(" or ")))
    }
}

impl Run<'_> {
    fn all(&self, steps: &mut Steps) {
        // No step needs these two: a step that misses a package or room says so.
        let _ = steps.run("system packages", || self.install());
        if self.args.filters.is_empty() {
            let target = &self.workspace.target;
            let _ = steps.run("room on the disk", || room::check(target).map(Work::Done));
            self.checks(steps);
        }
        let built = steps.run("programs and tests", || {
            self.cargo(&[&["build", "--workspace", "--all-targets"][..], &VERBS].concat())
        });
        let suites: Vec<&'static str> = SUITES
            .iter()
            .filter(|(_, file, _)| self.workspace.root.join(file).exists())
            .map(|(_, _, name)| *name)
            .collect();
        let for_lab = programs_of_lab(&suites);
        let is_lab_left_out = self.args.no_lab && !self.args.filters.is_empty();
        // The tests leave CPUs idle, because they wait for time limits.
        let ahead = (built.is_ok() && !is_lab_left_out)
            .then(|| HeadStart::begin(&self.workspace, PROFILE, &for_lab));
        let _ = steps.run_with("tests on this machine", &built, |()| self.host_tests());
        if self.args.filters.is_empty() {
            let _ = steps.run("corpora of the fuzz targets", || self.cargo(&fuzz::replay()));
            if self.args.long {
                let _ = steps.run("fuzzing", || fuzz::search(&self.workspace).map(Work::Done));
            }
        }
        if self.args.filters.iter().all(|filter| filter.contains(AS_ROOT)) {
            let _ = steps.run_with("tests as root", &built, |()| self.root_tests(&VERBS));
        }
        let left_out = "LEFT OUT, as --no-lab asks: everything that needs an RDMA device or ublk";
        if is_lab_left_out {
            println!("\n{left_out}");
            return;
        }
        let artifacts = steps.run("programs for the lab", || {
            if let Some(ahead) = ahead {
                ahead.end();
            }
            Artifacts::build(&self.workspace, &for_lab).map(Work::Done)
        });
        if self.args.filters.is_empty() {
            let _ =
                steps.run_with("linkage", &artifacts, |a| linkage::check(a.dir()).map(Work::Done));
            let _ =
                steps.run_with("instructions of a request", &artifacts, |a| self.instructions(a));
        }
        if self.args.no_lab {
            println!("\n{left_out}");
            return;
        }
        self.in_lab(steps, &artifacts, &suites);
    }

    /// The simulation with each deliberate fault, which the simulation must find.
    fn mutations(&self) -> Result<Work> {
        let words = ["-p", "rblk-tests", "--features", "mutations", "--test", "mutations"];
        let artifacts = Artifacts::build(&self.workspace, &words)?;
        let mut command = Command::new(artifacts.program("mutations"));
        self.execute(command.arg("--nocapture").current_dir(&self.workspace.root))
    }

    fn in_lab(&self, steps: &mut Steps, artifacts: &Result<Artifacts, Missing>, suites: &[&str]) {
        if self.args.filters.is_empty() {
            for (_, name, what) in MODELS {
                let _ = steps.run_with(what, artifacts, |a| self.model(a, name));
            }
            let _ = steps.run("deliberate faults", || self.mutations());
        }
        let _ = steps.run_with("fio's engine for the lab", artifacts, |a| self.fio_engine(a));
        let kernels = match &self.args.kernel {
            Some(kernel) => vec![(kernel.as_str(), false)],
            None => vec![(DEFAULT_KERNEL, false), (OTHER_KERNEL, true)],
        };
        for (kernel, every_kernel) in kernels {
            for name in suites {
                let title = format!("{name} in the lab, Linux {kernel}");
                let _ = steps.run_with(&title, artifacts, |artifacts| {
                    self.lab_tests(artifacts, name, kernel, every_kernel)
                });
            }
        }
    }

    fn checks(&self, steps: &mut Steps) {
        self.quick_checks(steps, &VERBS);
        let _ = steps.run("lints without verbs", || {
            self.cargo(&[&LINTS[..], &["--", "-D", "warnings"]].concat())
        });
        let _ = steps.run("documentation", || self.documentation(&VERBS));
        let _ = steps.run("dependencies (cargo deny)", || self.deny());
    }

    /// `verbs` says how the code for RDMA devices is looked at, too.
    fn quick_checks(&self, steps: &mut Steps, verbs: &[&str]) {
        let _ = steps.run("formatting", || self.cargo(&["fmt", "--all", "--check", "--", "-l"]));
        let _ =
            steps.run("widths of comments", || widths::check(&self.workspace.root).map(Work::Done));
        let _ = steps
            .run("circles of imports", || circles::check(&self.workspace.root).map(Work::Done));
        let _ = steps
            .run("lints", || self.cargo(&[&LINTS[..], verbs, &["--", "-D", "warnings"]].concat()));
        let of_fuzz = ["--manifest-path", fuzz::MANIFEST];
        let _ = steps.run("formatting and lints of the fuzz targets", || {
            self.cargo(&[&["fmt"][..], &of_fuzz, &["--check", "--", "-l"]].concat())?;
            let lints = ["clippy", "--all-targets"];
            self.cargo(&[&lints[..], &of_fuzz, &["--", "-D", "warnings"]].concat())
        });
    }

    fn documentation(&self, verbs: &[&str]) -> Result<Work> {
        let words = [&["doc", "--no-deps", "--workspace"][..], verbs].concat();
        let mut command = self.workspace.cargo(&words);
        self.execute(command.env("RUSTDOCFLAGS", "-D warnings"))
    }

    fn install(&self) -> Result<Work> {
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
        Ok(Work::Done(()))
    }

    fn host_tests(&self) -> Result<Work> {
        let words = [&["test", "--workspace", "--no-fail-fast"][..], &VERBS, &["--"]].concat();
        let mut command = self.workspace.cargo(&words);
        self.execute(command.args(&self.args.filters).envs(self.long()))
    }

    /// The tests that `cargo test` ignores as they need root.
    fn root_tests(&self, words: &[&str]) -> Result<Work> {
        if !host::is_root() {
            return Ok(Work::Skipped("this user is not root".to_owned()));
        }
        let words = [&["test", "--workspace", "--no-fail-fast"][..], words, &["--", "--ignored"]];
        let mut command = self.workspace.cargo(&words.concat());
        let filters = self.args.filters.iter().map(String::as_str);
        let mut filters: Vec<&str> = filters.filter(|filter| filter.contains(AS_ROOT)).collect();
        if filters.is_empty() {
            filters.push(AS_ROOT);
        }
        self.execute(command.args(filters))
    }

    fn model(&self, artifacts: &Artifacts, name: &str) -> Result<Work> {
        let mut command = Command::new(artifacts.program(name));
        self.execute(command.current_dir(&self.workspace.root))
    }

    /// Counts the instructions of an optimised build. They are counted and not timed, so the result
    /// is the same on every machine.
    fn instructions(&self, artifacts: &Artifacts) -> Result<Work> {
        // Without a store; at depth 32, where every turn finds work.
        for (op, volumes) in [("read", "memory,cached"), ("write", "memory")] {
            let mut command = Command::new(artifacts.program("rblk-bench"));
            command.args(["cost", "--instructions", "--ios", "2000", "--depths", "32"]);
            command.args(["--ops", op, "--volume", volumes, "--at-most", INSTRUCTIONS_MOST]);
            self.execute(command.current_dir(&self.workspace.root))?;
        }
        Ok(Work::Done(()))
    }

    fn deny(&self) -> Result<Work> {
        let mut version = self.workspace.cargo(&["deny", "--version"]);
        if process::output(&mut version, Duration::from_secs(60)).is_err() {
            let why = "cargo-deny is not installed (cargo install cargo-deny)";
            return Ok(Work::Skipped(why.to_owned()));
        }
        self.cargo(&["deny", "check"])?;
        self.cargo(&["deny", "--manifest-path", fuzz::MANIFEST, "check", "--config", "deny.toml"])
    }

    /// Beside the programs: the guest has this machine's fio.
    fn fio_engine(&self, artifacts: &Artifacts) -> Result<Work> {
        let engine = artifacts.dir().join("librblk_fio.so");
        FioEngineArgs::of_built(&self.workspace, PROFILE, engine).run()?;
        Ok(Work::Done(()))
    }

    fn lab_tests(
        &self,
        artifacts: &Artifacts,
        name: &str,
        kernel: &str,
        every_kernel: bool,
    ) -> Result<Work> {
        let mut environment: Vec<(&'static str, OsString)> =
            vec![("RBLK_BIN_DIR", artifacts.dir().into())];
        // `lab_faults` runs this one on devices of many kinds.
        environment.push(("RBLK_LAB_CONFORMANCE", artifacts.program("verbs_conformance").into()));
        environment.extend(self.long().into_iter().map(|(name, value)| (name, value.into())));
        let shares: Vec<PathBuf> = vec![self.workspace.root.clone(), artifacts.dir().to_owned()];
        let suite = Suite {
            program: artifacts.program(name),
            shares,
            environment,
            selection: Selection { every_kernel, filters: &self.args.filters },
        };
        let limit = if self.args.long { GUEST_LIMIT_LONG } else { GUEST_LIMIT };
        suite.run(Guest { kernel, limit }, &self.results)?;
        Ok(Work::Done(()))
    }

    fn long(&self) -> Option<(&'static str, &'static str)> {
        self.args.long.then_some(("RBLK_LONG", "1"))
    }

    fn cargo(&self, words: &[&str]) -> Result<Work> {
        self.execute(&mut self.workspace.cargo(words))
    }

    /// Runs a command with its output shown and its tests counted.
    fn execute(&self, command: &mut Command) -> Result<Work> {
        self.execute_into(command, self.tally())
    }

    fn tally(&self) -> Tally<std::io::Stdout> {
        Tally::new(std::io::stdout(), Arc::clone(&self.results))
    }

    fn execute_into(
        &self,
        command: &mut Command,
        sink: impl Write + Send + 'static,
    ) -> Result<Work> {
        println!("{}", process::words(command));
        let limit = if self.args.long { 4 * BUILD_LIMIT } else { BUILD_LIMIT };
        match process::stream(command, limit, sink)? {
            0 => Ok(Work::Done(())),
            status => bail!("{} ended with status {status}", process::words(command)),
        }
    }
}

/// What cargo builds for the lab: the programs, and the tests of these suites.
fn programs_of_lab(suites: &[&'static str]) -> Vec<&'static str> {
    let mut words = vec!["--bins", "-p", "rblk-target", "-p", "rblk-initiator", "-p", "rblk-bench"];
    words.extend(VERBS);
    // For fio's engine: built by itself it has other features, and so has all that it needs.
    words.extend(["--lib", "-p", "rblk-capi"]);
    for (package, name, _) in MODELS {
        words.extend(["-p", package, "--test", name]);
    }
    for (package, _, name) in SUITES.iter().filter(|(_, _, name)| suites.contains(name)) {
        words.extend(["-p", *package, "--test", *name]);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(filters: &[&str]) -> TestArgs {
        let filters = filters.iter().map(|&filter| filter.to_owned()).collect();
        TestArgs { long: false, no_lab: true, kernel: None, filters }
    }

    #[test]
    fn a_filter_that_selects_nothing_fails() {
        let none = Results::default();
        let one = Results::new(1, 0);
        assert!(args(&["drian"]).nothing_ran(&none).unwrap().contains("drian"));
        assert_eq!(args(&["drain"]).nothing_ran(&one), None);
        assert_eq!(args(&[]).nothing_ran(&none), None);
    }
}
