//! Test binaries that run in one guest: which of their tests, on which kernel, for how long.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::tally::{Results, Tally};
use crate::lab::{End, Lab};
use crate::process;

/// Tests whose names begin so are run on every kernel, not only on the first.
const EVERY_KERNEL: &str = "kernel_";

/// Tests whose names begin so are run on kernels whose ublk fails, and nowhere else.
const BAD_KERNEL: &str = "only_bad_kernel_";

/// Tests whose names begin so take minutes, and need more packages than others. They are run where
/// they are asked for.
pub(super) const WITH_CEPH: &str = "lab_ceph_";

/// The one test for every kernel that a bad one passes: it knows the bad ones.
const KNOWS_BAD: &str = "kernel_is_in_the_table";

/// How many guests run the tests of one kernel at most, each after one that the emulator broke.
const BOOTS: u32 = 3;

/// The part of a kernel in the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All tests run on it.
    First,
    /// Those for every kernel run on it.
    Other,
    /// Its ublk fails: the tests that know so run on it.
    Bad,
}

/// Which tests of a binary are run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Selection<'a> {
    /// The part of the kernel.
    pub(crate) part: Part,
    /// Only those whose names contain one of these; all if there are none.
    pub(crate) filters: &'a [String],
    /// Those that need a Ceph cluster, too.
    pub(crate) with_ceph: bool,
}

/// Test binaries that run in one guest, one after the other, and what they need.
#[derive(Debug)]
pub(crate) struct Suites<'a> {
    /// The binaries.
    pub(crate) programs: Vec<PathBuf>,
    /// A directory for the script, which the guest sees, too.
    pub(crate) directory: &'a Path,
    /// Directories that must be seen inside.
    pub(crate) shares: Vec<PathBuf>,
    /// Variables, set besides this process's own.
    pub(crate) environment: Vec<(&'static str, OsString)>,
    /// Which tests.
    pub(crate) selection: Selection<'a>,
}

/// A kernel and its limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guest<'a> {
    /// Version prefix.
    pub(crate) kernel: &'a str,
    /// Limit on the guest's life.
    pub(crate) limit: Duration,
}

impl Selection<'_> {
    fn takes(&self, name: &str) -> bool {
        let own = name.rsplit("::").next().unwrap_or(name);
        let by_part = match self.part {
            Part::First => !own.starts_with(BAD_KERNEL),
            Part::Other => own.starts_with(EVERY_KERNEL),
            Part::Bad => own == KNOWS_BAD || own.starts_with(BAD_KERNEL),
        };
        by_part
            && (self.with_ceph || !own.starts_with(WITH_CEPH))
            && (self.filters.is_empty() || self.filters.iter().any(|f| name.contains(f.as_str())))
    }
}

impl Suites<'_> {
    /// Runs the selected tests in one guest and adds their results to `results`.
    pub(crate) fn run(&self, guest: Guest<'_>, results: &Arc<Mutex<Results>>) -> Result<()> {
        let mut suites = Vec::new();
        for program in &self.programs {
            let all = names(program)?;
            let taken: Vec<String> =
                all.iter().filter(|name| self.selection.takes(name)).cloned().collect();
            let suite = Suite { program: program.clone(), names: taken };
            println!("{}: {} of {} tests", suite.name(), suite.names.len(), all.len());
            if !suite.names.is_empty() {
                suites.push(suite);
            }
        }
        if suites.is_empty() {
            println!("no test is selected here");
            return Ok(());
        }
        results.lock().unwrap_or_else(PoisonError::into_inner).begin_guest();
        let mut ended: Vec<Suite> = Vec::new();
        for boot in 1..=BOOTS {
            let end = self.boot(&suites, guest, results)?;
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.cut_off();
            let cut_off =
                suites.iter().position(|suite| results.has_passed(&suite.name()).is_none());
            match (end, cut_off) {
                (End::Broken(fault), Some(at)) if boot < BOOTS => {
                    let rest = suites.split_off(at);
                    println!(
                        "the emulator broke Linux {}: {fault}; another guest runs {} and the rest",
                        guest.kernel,
                        rest[0].name()
                    );
                    note_runs(&suites, &mut results);
                    ended.append(&mut suites);
                    suites = rest;
                }
                (end, _) => {
                    if !matches!(end, End::Died(_) | End::Broken(_)) {
                        note_runs(&suites, &mut results);
                    }
                    let failed = ended.iter().map(Suite::name);
                    let failed = failed.filter(|name| results.has_passed(name) != Some(true));
                    return judge(guest, &end, &suites, failed.collect());
                }
            }
        }
        Ok(())
    }

    /// Runs the suites in one guest.
    fn boot(
        &self,
        suites: &[Suite],
        guest: Guest<'_>,
        results: &Arc<Mutex<Results>>,
    ) -> Result<End> {
        let script = self.directory.join(format!("suites-{}.sh", guest.kernel));
        fs::write(&script, text(suites)).with_context(|| script.display().to_string())?;
        let mut words: Vec<OsString> = vec!["env".into()];
        for (name, value) in &self.environment {
            let mut word = OsString::from(format!("{name}="));
            word.push(value);
            words.push(word);
        }
        words.extend(["sh".into(), script.into()]);
        let lab = Lab {
            kernel: guest.kernel.to_owned(),
            timeout: guest.limit,
            shares: self.shares.clone(),
            ..Lab::default()
        };
        lab.run_into(&words, Tally::new(std::io::stdout(), Arc::clone(results)))
    }
}

/// Notes the tests of programs that have ended: what a test prints without a line's end makes its
/// own line unreadable.
fn note_runs(suites: &[Suite], results: &mut Results) {
    suites.iter().flat_map(|suite| &suite.names).for_each(|name| results.note_run(name));
}

/// The result of the last guest, which ran `suites`; `failed` are those that failed in an earlier.
fn judge(guest: Guest<'_>, end: &End, suites: &[Suite], mut failed: Vec<String>) -> Result<()> {
    let kernel = guest.kernel;
    match end {
        End::Exited(0) if failed.is_empty() => Ok(()),
        End::Exited(status) => {
            failed.append(&mut failures(suites, *status));
            bail!("on Linux {kernel} failed: {} (status {status})", failed.join(", "))
        }
        End::TimedOut => bail!("not done after {} s on Linux {kernel}", guest.limit.as_secs()),
        End::Died(fault) => bail!("the guest died on Linux {kernel}: {fault}"),
        End::Broken(fault) => bail!("the emulator broke Linux {kernel}: {fault}"),
    }
}

/// A test binary and those of its tests that are run.
#[derive(Debug)]
struct Suite {
    program: PathBuf,
    names: Vec<String>,
}

impl Suite {
    fn name(&self) -> String {
        self.program.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// The script that runs the suites. Its exit status has a bit for each suite that failed, from the
/// first on.
fn text(suites: &[Suite]) -> String {
    // The guest has the address, and only this program knows the variable's other name.
    let mut text =
        "export RBLK_TEST_RDMA_ADDR=$RBLK_LAB_RDMA_ADDR\nfailed=0\nbegun=$(date +%s)\n".to_owned();
    for (at, suite) in suites.iter().enumerate() {
        let (name, names) = (suite.name(), suite.names.join(" "));
        let program = suite.program.display();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "echo '--- {name}'");
        let _ = writeln!(text, "if '{program}' {WORDS} {names}; then s=ok; else");
        let _ = writeln!(text, "s=FAILED; failed=$((failed + {})); fi", 1 << at);
        let _ = writeln!(
            text,
            "now=$(date +%s); echo \"--- {name}: $s, $((now - begun)) s\"; begun=$now"
        );
    }
    text + "exit $failed\n"
}

/// Words for each test binary.
const WORDS: &str = "--include-ignored --test-threads=1 --nocapture --exact";

/// The names of the suites that failed, of the exit status of the script.
fn failures(suites: &[Suite], status: i32) -> Vec<String> {
    let is_failed = |at: usize| status & (1 << at) != 0;
    let failed = suites.iter().enumerate().filter(|(at, _)| is_failed(*at));
    failed.map(|(_, suite)| suite.name()).collect()
}

/// The tests of a binary, which lists them without running any.
pub(super) fn names(program: &Path) -> Result<Vec<String>> {
    let mut command = Command::new(program);
    command.args(["--list", "--format", "terse"]);
    let list = process::output(&mut command, Duration::from_secs(60))
        .with_context(|| format!("cannot list the tests of {}", program.display()))?;
    Ok(parse(&list))
}

fn parse(list: &str) -> Vec<String> {
    list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_from_the_list() {
        assert_eq!(parse("a::b: test\nbench_x: benchmark\nkernel_c: test\n"), ["a::b", "kernel_c"]);
    }

    #[test]
    fn the_status_names_the_suites_that_failed() {
        let suite = |program: &str| Suite { program: program.into(), names: vec!["a::b".into()] };
        let suites = [suite("true"), suite("false"), suite("true"), suite("false")];
        // A name that is found in PATH stands for a test binary.
        let mut command = Command::new("sh");
        let output = command.arg("-c").arg(text(&suites)).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.starts_with("--- true\n--- true: ok, 0 s\n--- false\n"), "{said}");
        assert_eq!(output.status.code(), Some(0b1010));
        assert_eq!(failures(&suites, 0b1010), ["false", "false"]);
    }

    #[test]
    fn both_conditions_hold() {
        let filters = ["mount".to_owned(), "fio".to_owned()];
        let takes = |part, filters: &[String], name: &str| {
            Selection { part, filters, with_ceph: false }.takes(name)
        };
        assert!(takes(Part::First, &[], "anything") && !takes(Part::Other, &[], "anything"));
        assert!(takes(Part::Other, &[], "faults::kernel_mount"));
        assert!(takes(Part::Other, &filters, "kernel_mount"));
        assert!(takes(Part::First, &filters, "a_fio_run"));
        assert!(!takes(Part::Other, &filters, "a_fio_run"));
        assert!(!takes(Part::Other, &filters, "kernel_other"));
    }

    #[test]
    fn a_bad_kernel_runs_only_tests_that_know_it() {
        let takes = |part, name: &str| {
            let any = Selection { part, filters: &[], with_ceph: false };
            let of_ceph = format!("group::{WITH_CEPH}any");
            assert!(!any.takes(&of_ceph));
            assert_eq!(Selection { with_ceph: true, ..any }.takes(&of_ceph), part == Part::First);
            any.takes(name)
        };
        for (name, first, other, bad) in [
            ("kernels::kernel_is_in_the_table", true, true, true),
            ("kernels::only_bad_kernel_crash", false, false, true),
            ("content::kernel_fio", true, true, false),
            ("content::sizes", true, false, false),
        ] {
            let taken = [Part::First, Part::Other, Part::Bad].map(|part| takes(part, name));
            assert_eq!(taken, [first, other, bad], "{name}");
        }
    }
}
