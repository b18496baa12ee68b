//! `cargo xtask test`: everything that must hold before a change goes in, in one command.
//!
//! The quick steps come first. A step that fails does not stop the later ones, except those that
//! need what it builds. The last line is `N passed, N failed`, summed over every test program, also
//! in the lab. A step that fails without a failed test counts as one failure. `, N skipped` follows
//! where a check did not run. Before it stands a table of what each step cost.
//!
//! The workspace is compiled once, with the profile `lab`: lints, documentation, tests,
//! simulations, corpora, deliberate faults and the programs of the lab share it. Nothing is tried
//! twice.

mod beside;
mod check;
mod circles;
mod fuzz;
mod house;
mod linkage;
mod room;
mod spent;
mod step;
mod suite;
mod summary;
mod tally;
mod widths;
mod without_verbs;

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::artifacts::{Artifacts, BUILD_LIMIT, CHECKED, MEASURED, Program};
use crate::fio_engine::FioEngineArgs;
use crate::lab::{self, DEFAULT_KERNEL, host};
use crate::library::ARCHIVE;
use crate::packages;
use crate::process;
use crate::workspace::Workspace;
use beside::Runner;
pub(crate) use check::CheckArgs;
pub(crate) use house::HouseArgs;
use spent::Meter;
use step::{Kind, Missing, Steps, Work};
use suite::{Guest, Part, Selection, Suites};
use summary::Summary;
use tally::{Results, Tally};

/// The other kernel: the oldest that has what the initiator needs.
const OTHER_KERNEL: &str = "6.12";

/// Further kernels of `--long`: one of each series that Debian's backports had or have. Those that
/// the mirror does not have are named, and skipped.
const LONG_KERNELS: [&str; 7] = ["6.16", "6.17", "6.18", "6.19", "7.0", "7.1", "7.3"];

/// Kernels of `--long` whose ublk fails. After their series: a shorter version is the newest kernel
/// of the cache.
const BAD_KERNELS: [&str; 1] = ["6.18.5"];

/// Limit on one guest.
const GUEST_LIMIT: Duration = Duration::from_secs(60 * 60);
/// The same with `--long`, for each unit of its number.
const GUEST_LIMIT_LONG: Duration = Duration::from_secs(2 * 60 * 60);
/// Limit on one test program of this machine.
const PROGRAM_LIMIT: Duration = Duration::from_secs(10 * 60);
/// The same with `--long`, for each unit of its number.
const PROGRAM_LIMIT_LONG: Duration = Duration::from_secs(30 * 60);

/// Instructions that an end may spend on one request of 4 KiB, without those of the fabric and the
/// store, in the profile `measured`. The profile of releases takes a tenth fewer.
const INSTRUCTIONS_MOST: &str = "1500";

/// The code for RDMA devices is built in.
const VERBS: [&str; 2] = ["--features", "verbs"];
/// The one build: with the code for RDMA devices, and with the switches of deliberate faults, which
/// are off unless `RBLK_MUTATION` names one.
const FEATURES: [&str; 2] = ["--features", "verbs,mutations"];
/// The same with its profile.
const ALL_FEATURES: [&str; 4] = [FEATURES[0], FEATURES[1], "--profile", CHECKED];
/// What is built, linted and tested.
const EVERYTHING: [&str; 2] = ["--workspace", "--all-targets"];

/// How the names of tests begin that need root.
const AS_ROOT: &str = "as_root_";
/// How the names of tests begin that need root and minutes, and run with `--long` only.
const LONG_ONLY: &str = "long_only_";
/// How the names of tests begin that need a Ceph cluster.
const WITH_CEPH: &str = "with_ceph_";
/// How the names of tests begin that need programs of a version before, and the variable that names
/// their directory.
const WITH_PREVIOUS: [&str; 2] = ["with_previous_", "RBLK_PREVIOUS"];
/// The test program of the deliberate faults, which is a step of its own.
const FAULTS: &str = "mutations";

/// Test binaries that run in the guest.
const SUITES: [&str; 6] =
    ["soft_tls", "verbs_conformance", "verbs_lifecycle", "lab", "lab_storage", "lab_faults"];

/// Run every check and every test
///
/// They run on this machine, then in the lab on real verbs and ublk. A step that fails does not
/// stop the other steps, except those that need what it builds. At the end each step that failed or
/// was skipped is named; the last line is `N passed, N failed`, and `, N skipped` where checks did
/// not run.
///
/// Missing system packages are installed first (as root; Debian). With FILTERs only tests run whose
/// names contain one of them, and no other checks. The names of tests that need root begin with
/// `as_root_`; of those that need a Ceph cluster, which `--long` runs, with `with_ceph_`. With
/// `--long`, and RBLK_PREVIOUS=DIRECTORY of the programs of a version before, tests run both
/// versions against each other; their names begin with `with_previous_`.
///
/// Exit status: 0 when nothing failed, 1 when anything did.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct TestArgs {
    /// Run tests that can use it longer (RBLK_LONG=N), run all tests of the lab on 7.2 and 6.12,
    /// and those whose names begin with `kernel_` on a kernel of each series of Debian's backports,
    /// and fuzz for N times five minutes; without a number N is 1
    #[arg(
        long,
        value_name = "N",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    long: Option<u32>,

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
        let meter = Meter::start();
        let mut steps = Steps::new(Arc::clone(&run.results));
        work(&run, &mut steps);
        let results = run.results.lock().unwrap_or_else(PoisonError::into_inner);
        let mut summary =
            Summary { steps: steps.over(), spent: meter.spent(), results: &results, wrong: None };
        let nothing = self.nothing_ran(&results).filter(|_| summary.is_good());
        summary.wrong = nothing.as_deref();
        print!("{}", summary.text());
        Ok(i32::from(!summary.is_good()))
    }

    /// A filter that no name contains is a mistake, not a success.
    fn nothing_ran(&self, results: &Results) -> Option<String> {
        let nothing = !self.filters.is_empty() && results.passed() + results.failed == 0;
        nothing.then(|| format!("no test ran: no name contains {}", self.filters.join(" or ")))
    }
}

impl Run<'_> {
    fn all(&self, steps: &mut Steps) {
        let is_whole = self.args.filters.is_empty();
        // No step needs these two: a step that misses a package or room says so.
        let _ = steps.run(Kind::Check, "system packages", || self.install());
        if is_whole {
            let target = &self.workspace.target;
            let _ =
                steps.run(Kind::Check, "room on the disk", || room::check(target).map(Work::Done));
            self.checks(steps);
        }
        let built = steps.run(Kind::Build, "programs and tests", || self.build());
        if is_whole {
            let _ = steps.run_with(Kind::Check, "linkage", &built, |built| {
                linkage::check(built.dir()).map(Work::Done)
            });
        }
        self.on_this_machine(steps, &built);
        if self.args.no_lab {
            println!("\nLEFT OUT, as --no-lab asks: everything that needs an RDMA device or ublk");
            return;
        }
        self.in_lab(steps, &built);
    }

    /// The one build: programs, and all tests.
    fn build(&self) -> Result<Work<Artifacts>> {
        let words = [&EVERYTHING[..], &FEATURES].concat();
        let built = Artifacts::build(&self.workspace, CHECKED, &words)?;
        for suite in SUITES {
            built.take_test(suite)?;
        }
        let library = self.workspace.target.join(CHECKED).join(ARCHIVE);
        fs::copy(&library, built.program(ARCHIVE))
            .with_context(|| format!("cannot copy {}", library.display()))?;
        Ok(Work::Done(built))
    }

    /// What needs no guest.
    fn on_this_machine(&self, steps: &mut Steps, built: &Result<Artifacts, Missing>) {
        let is_whole = self.args.filters.is_empty();
        let _ = steps.run_with(Kind::Run, "tests on this machine", built, |built| {
            let is_wanted = |test: &&Program| !is_whole || test.name != FAULTS;
            let tests: Vec<&Program> = built.tests().iter().filter(is_wanted).collect();
            self.runner(built, &[], &self.args.filters).beside(&tests)?;
            Ok(Work::Done(()))
        });
        if self.args.filters.iter().all(|filter| filter.contains(AS_ROOT)) {
            let _ =
                steps.run_with(Kind::Run, "tests as root", built, |built| self.root_tests(built));
        }
        if self.wants(WITH_CEPH) {
            let _ = steps.run_with(Kind::Run, "tests with a Ceph cluster", built, |built| {
                host::ensure_installed(packages::CEPH)?;
                self.marked_tests(built, WITH_CEPH)
            });
        }
        if self.wants(WITH_PREVIOUS[0]) {
            let _ = steps.run_with(Kind::Run, "tests with a version before", built, |built| {
                self.previous_tests(built)
            });
        }
        if !is_whole {
            return;
        }
        let _ = steps.run_with(Kind::Run, "examples of the documentation", built, |_| {
            self.cargo(&[&["test", "--doc", "--workspace"][..], &ALL_FEATURES].concat())
        });
        let _ = steps.run_with(Kind::Run, "deliberate faults", built, |built| self.faults(built));
        if let Some(long) = self.args.long {
            let _ = steps.run_with(Kind::Run, "fuzzing", built, |built| {
                fuzz::search(&self.workspace, &built.program(fuzz::CORPUS), long).map(Work::Done)
            });
            let _ = steps.run_with(Kind::Run, "tests that take minutes", built, |built| {
                self.ignored_tests(built, &[LONG_ONLY.to_owned()])
            });
        }
        let counted = steps.run(Kind::Build, "programs that are counted", || {
            let words = ["-p", "rblk-bench", "--bin", "rblk-bench"];
            Artifacts::build(&self.workspace, MEASURED, &words).map(Work::Done)
        });
        let _ = steps.run_with(Kind::Run, "instructions of a request", &counted, |counted| {
            self.instructions(counted)
        });
    }

    /// The simulation with each deliberate fault, which the simulation must find.
    fn faults(&self, built: &Artifacts) -> Result<Work> {
        let test = built.tests().iter().find(|test| test.name == FAULTS);
        let test = test.context("cargo built no deliberate faults")?;
        let mut command = Command::new(&test.path);
        self.execute(command.arg("--nocapture").current_dir(&test.package))
    }

    fn in_lab(&self, steps: &mut Steps, built: &Result<Artifacts, Missing>) {
        let _ =
            steps.run_with(Kind::Build, "fio's engine for the lab", built, |a| self.fio_engine(a));
        for (kernel, part) in self.kernels() {
            let title = format!("the lab, Linux {kernel}");
            let _ = steps.run_with(Kind::Run, &title, built, |built| {
                if (LONG_KERNELS.contains(&kernel) || BAD_KERNELS.contains(&kernel))
                    && let Some(why) = lab::absence(kernel)?
                {
                    return Ok(Work::Skipped(why));
                }
                self.lab_tests(built, kernel, part)
            });
        }
    }

    /// The kernels of the lab.
    fn kernels(&self) -> Vec<(&str, Part)> {
        if let Some(kernel) = &self.args.kernel {
            let is_bad = BAD_KERNELS.contains(&kernel.as_str());
            return vec![(kernel, if is_bad { Part::Bad } else { Part::First })];
        }
        if self.args.long.is_none() {
            return vec![(DEFAULT_KERNEL, Part::First), (OTHER_KERNEL, Part::Other)];
        }
        let both = [DEFAULT_KERNEL, OTHER_KERNEL].map(|kernel| (kernel, Part::First));
        let others = LONG_KERNELS.map(|kernel| (kernel, Part::Other));
        let bad = BAD_KERNELS.map(|kernel| (kernel, Part::Bad));
        [&both[..], &others, &bad].concat()
    }

    fn checks(&self, steps: &mut Steps) {
        self.quick_checks(steps, &ALL_FEATURES);
        let _ = steps.run(Kind::Check, "code without verbs", || {
            without_verbs::check(&self.workspace, CHECKED).map(Work::Done)
        });
        let _ = steps.run(Kind::Check, "documentation", || self.documentation(&ALL_FEATURES));
        let _ = steps.run(Kind::Check, "dependencies (cargo deny)", || self.deny());
    }

    /// `features` says with which features and which profile the code is looked at.
    fn quick_checks(&self, steps: &mut Steps, features: &[&str]) {
        let root = &self.workspace.root;
        let _ = steps.run(Kind::Check, "formatting", || {
            self.cargo(&["fmt", "--all", "--check", "--", "-l"])
        });
        let _ =
            steps.run(Kind::Check, "widths of comments", || widths::check(root).map(Work::Done));
        let _ =
            steps.run(Kind::Check, "circles of imports", || circles::check(root).map(Work::Done));
        let _ =
            steps.run(Kind::Check, "house rules", || house::check(&self.workspace).map(Work::Done));
        let _ = steps.run(Kind::Check, "lints", || {
            self.cargo(
                &[&["clippy"], &EVERYTHING[..], features, &["--", "-D", "warnings"]].concat(),
            )
        });
    }

    fn documentation(&self, features: &[&str]) -> Result<Work> {
        let words = [&["doc", "--no-deps", "--workspace"][..], features].concat();
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

    /// Runs test programs with these words and filters, and with the programs of the one build.
    fn runner(&self, built: &Artifacts, words: &[&str], filters: &[String]) -> Runner<'_> {
        let mut environment = vec![("RBLK_BIN_DIR", built.dir().display().to_string())];
        environment.extend(self.long());
        let limit = self.args.long.map_or(PROGRAM_LIMIT, |long| long * PROGRAM_LIMIT_LONG);
        let words = words.iter().map(|&word| word.to_owned()).collect();
        let filters = filters.to_vec();
        Runner { words, filters, environment, limit, results: &self.results }
    }

    /// The tests that are ignored elsewhere as they need root: one program at a time, because they
    /// change what the whole machine has.
    fn root_tests(&self, built: &Artifacts) -> Result<Work> {
        self.marked_tests(built, AS_ROOT)
    }

    /// Those that need programs of a version before.
    fn previous_tests(&self, built: &Artifacts) -> Result<Work> {
        let [mark, variable] = WITH_PREVIOUS;
        if std::env::var_os(variable).is_none() {
            return Ok(Work::Skipped(format!("{variable} names no directory of programs")));
        }
        self.marked_tests(built, mark)
    }

    /// Whether tests are asked for that only `--long` runs by itself.
    fn wants(&self, mark: &str) -> bool {
        let filters = &self.args.filters;
        let is_named = filters.iter().any(|filter| filter.contains(mark));
        is_named || (filters.is_empty() && self.args.long.is_some())
    }

    /// The ignored tests that have a mark in their names, one program at a time.
    fn marked_tests(&self, built: &Artifacts, mark: &str) -> Result<Work> {
        let is_marked = |filter: &&String| filter.contains(mark);
        let mut filters: Vec<String> =
            self.args.filters.iter().filter(is_marked).cloned().collect();
        if filters.is_empty() {
            filters.push(mark.to_owned());
        }
        self.ignored_tests(built, &filters)
    }

    /// The tests that are ignored elsewhere and whose names contain one of these: one program at a
    /// time.
    fn ignored_tests(&self, built: &Artifacts, filters: &[String]) -> Result<Work> {
        if !host::is_root() {
            return Ok(Work::Skipped("this user is not root".to_owned()));
        }
        let is_taken = |name: &String| filters.iter().any(|filter| name.contains(filter.as_str()));
        let mut tests = Vec::new();
        for test in built.tests() {
            if suite::names(&test.path)?.iter().any(is_taken) {
                tests.push(test);
            }
        }
        self.runner(built, &["--ignored"], filters).in_turn(&tests)?;
        Ok(Work::Done(()))
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
        self.cargo(&["deny", "check"])
    }

    /// Beside the programs: the guest has this machine's fio.
    fn fio_engine(&self, artifacts: &Artifacts) -> Result<Work> {
        let engine = artifacts.dir().join("librblk_fio.so");
        FioEngineArgs::of_built(&self.workspace, CHECKED, engine).run()?;
        Ok(Work::Done(()))
    }

    fn lab_tests(&self, built: &Artifacts, kernel: &str, part: Part) -> Result<Work> {
        let mut environment: Vec<(&'static str, OsString)> =
            vec![("RBLK_BIN_DIR", built.dir().into())];
        // `lab_faults` runs this one on devices of many kinds.
        environment.push(("RBLK_LAB_CONFORMANCE", built.program("verbs_conformance").into()));
        // The other kernels run each test in its usual length: kernels differ in what they do, and
        // not in how often a race comes.
        let is_long = kernel == DEFAULT_KERNEL || self.args.kernel.is_some();
        let long = self.long().filter(|_| is_long);
        environment.extend(long.map(|(name, value)| (name, value.into())));
        let shares: Vec<PathBuf> = vec![self.workspace.root.clone(), built.dir().to_owned()];
        let with_ceph = is_long && self.wants(suite::WITH_CEPH);
        if with_ceph {
            host::ensure_installed(packages::CEPH)?;
        }
        let suites = Suites {
            programs: SUITES.iter().map(|name| built.program(name)).collect(),
            directory: built.dir(),
            shares,
            environment,
            selection: Selection { part, filters: &self.args.filters, with_ceph },
        };
        let limit = self.args.long.map_or(GUEST_LIMIT, |long| long * GUEST_LIMIT_LONG);
        suites.run(Guest { kernel, limit }, &self.results)?;
        Ok(Work::Done(()))
    }

    /// The variable by which tests learn that they may take longer.
    fn long(&self) -> Option<(&'static str, String)> {
        self.args.long.map(|long| ("RBLK_LONG", long.to_string()))
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
        let limit = if self.args.long.is_some() { 4 * BUILD_LIMIT } else { BUILD_LIMIT };
        match process::stream(command, limit, sink)? {
            0 => Ok(Work::Done(())),
            status => bail!("{} ended with status {status}", process::words(command)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(filters: &[&str]) -> TestArgs {
        let filters = filters.iter().map(|&filter| filter.to_owned()).collect();
        TestArgs { long: None, no_lab: true, kernel: None, filters }
    }

    #[test]
    fn a_long_run_takes_a_kernel_of_each_series() {
        let of = |long, kernel: Option<&str>| {
            let args = TestArgs { long, kernel: kernel.map(str::to_owned), ..args(&[]) };
            let workspace = Workspace::find().unwrap();
            let run = Run { args: &args, workspace, results: Arc::default() };
            let kernels = run.kernels().into_iter();
            kernels.map(|(kernel, part)| (kernel.to_owned(), part)).collect::<Vec<_>>()
        };
        let part = |kernels: &[(String, Part)], kernel: &str| {
            kernels.iter().find(|(name, _)| name == kernel).map(|(_, part)| *part)
        };
        assert_eq!(of(None, None).len(), 2);
        assert_eq!(of(None, Some("7.3")), [("7.3".to_owned(), Part::First)]);
        assert_eq!(of(None, Some("6.18.5")), [("6.18.5".to_owned(), Part::Bad)]);
        let long = of(Some(1), None);
        assert_eq!(part(&long, "6.12"), Some(Part::First));
        assert_eq!(part(&long, "7.1"), Some(Part::Other));
        assert_eq!(long.last(), Some(&("6.18.5".to_owned(), Part::Bad)));
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
