//! Test programs of this machine, run beside each other: a program that waits for timers and leases
//! leaves its CPU to the others. The output of each is shown whole, when the program has ended.
//!
//! Some programs hold the tests of many files, since each program costs a link. The tests of each
//! file run in a process of their own, as if the file were a program.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::suite;
use super::tally::{Results, Tally};
use crate::artifacts::Program;
use crate::process;

/// Test programs at a time.
const AT_A_TIME: usize = 3;
/// Programs that run alone: they take ports of a fixed number.
const ALONE: [&str; 1] = ["usual_ports"];
/// Programs and modules that take longest, which begin first: then none of them is left at the end.
const FIRST: [&str; 4] = ["simulation", "storage_model", "runs", "storage_crash"];
/// Programs with a module for each file of tests: each module runs in a process of its own.
const OF_MODULES: [&str; 3] = ["engines", "guests", "programs"];
/// The output of a program of which no test is selected.
const NOTHING: &[u8] = b"\nrunning 0 tests\n";
/// Programs above this time are named at the end of the step.
const LONG: Duration = Duration::from_secs(20);

/// The way in which test programs are run.
#[derive(Debug)]
pub(super) struct Runner<'a> {
    /// Words for each program, besides the names of tests.
    pub(super) words: Vec<String>,
    /// Only tests whose names contain one of these; all if there are none.
    pub(super) filters: Vec<String>,
    /// Variables, besides those of this process.
    pub(super) environment: Vec<(&'static str, String)>,
    /// Limit on one program.
    pub(super) limit: Duration,
    /// Where results are added.
    pub(super) results: &'a Arc<Mutex<Results>>,
}

/// A process: a program, and its words.
#[derive(Debug)]
struct Job<'a> {
    program: &'a Program,
    /// The name of the program or of its module.
    name: String,
    title: String,
    words: Vec<String>,
}

/// The end of one process.
#[derive(Debug)]
struct Ended {
    title: String,
    took: Duration,
    error: Option<String>,
}

impl Runner<'_> {
    /// Runs the programs, some at a time, and those of [`ALONE`] at the end.
    ///
    /// # Errors
    /// Names the programs that failed.
    pub(super) fn beside(&self, programs: &[&Program]) -> Result<()> {
        let is_alone = |program: &&Program| ALONE.contains(&program.name.as_str());
        let (alone, beside): (Vec<&Program>, Vec<&Program>) =
            programs.iter().copied().partition(is_alone);
        let mut beside = self.jobs(&beside)?;
        beside.sort_by_key(|job| !FIRST.contains(&job.name.as_str()));
        let mut ended = self.pool(beside, AT_A_TIME);
        ended.extend(self.pool(self.jobs(&alone)?, 1));
        judge(ended)
    }

    /// Runs the programs one after the other.
    ///
    /// # Errors
    /// Names the programs that failed.
    pub(super) fn in_turn(&self, programs: &[&Program]) -> Result<()> {
        judge(self.pool(self.jobs(programs)?, 1))
    }

    fn jobs<'a>(&self, programs: &[&'a Program]) -> Result<Vec<Job<'a>>> {
        let mut jobs = Vec::new();
        for &program in programs {
            if OF_MODULES.contains(&program.name.as_str()) {
                for (name, tests) in by_module(&suite::names(&program.path)?, &self.filters) {
                    let title = format!("{}::{name}", program.title());
                    let words = [&self.words[..], &["--exact".to_owned()], &tests].concat();
                    jobs.push(Job { program, name, title, words });
                }
            } else {
                let words = [&self.words[..], &self.filters].concat();
                let (name, title) = (program.name.clone(), program.title());
                jobs.push(Job { program, name, title, words });
            }
        }
        Ok(jobs)
    }

    fn pool(&self, jobs: Vec<Job<'_>>, at_a_time: usize) -> Vec<Ended> {
        let left = Mutex::new(VecDeque::from(jobs));
        let ended = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..at_a_time {
                scope.spawn(|| {
                    // The lock is free again when a program runs.
                    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    while let Some(job) = next() {
                        let one = self.one(job);
                        ended.lock().unwrap_or_else(PoisonError::into_inner).push(one);
                    }
                });
            }
        });
        ended.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn one(&self, job: Job<'_>) -> Ended {
        let Job { program, title, words, .. } = job;
        let mut command = Command::new(&program.path);
        command.args(words).current_dir(&program.package);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let begun = Instant::now();
        let ran = process::both(&mut command, self.limit);
        let took = begun.elapsed();
        let (said, error) = match ran {
            Ok((0, said)) => (said, None),
            Ok((status, said)) => (said, Some(format!("status {status}"))),
            Err(error) => (Vec::new(), Some(format!("{error:#}"))),
        };
        if error.is_none() && said.starts_with(NOTHING) {
            return Ended { title, took, error };
        }
        let end = error.as_deref().unwrap_or("ok");
        // One program's words at a time.
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "\n--- {title}: {end}, {:.1} s", took.as_secs_f64());
        let _ = Tally::new(&mut out, Arc::clone(self.results)).write_all(&said);
        let _ = out.flush();
        Ended { title, took, error }
    }
}

/// The tests of each module whose names contain one of `filters`; all if there are none.
fn by_module(names: &[String], filters: &[String]) -> BTreeMap<String, Vec<String>> {
    let mut modules = BTreeMap::<_, Vec<_>>::new();
    let is_taken = |name: &&String| {
        filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()))
    };
    for name in names.iter().filter(is_taken) {
        let module = name.split_once("::").map_or("", |(module, _)| module);
        modules.entry(module.to_owned()).or_default().push(name.clone());
    }
    modules
}

/// Names the programs that took long, and those that failed.
fn judge(mut ended: Vec<Ended>) -> Result<()> {
    ended.sort_by_key(|one| std::cmp::Reverse(one.took));
    println!();
    for one in ended.iter().filter(|one| one.took >= LONG) {
        println!("{:7.1} s  {}", one.took.as_secs_f64(), one.title);
    }
    let failed: Vec<String> = ended
        .iter()
        .filter_map(|one| Some(format!("{}: {}", one.title, one.error.as_ref()?)))
        .collect();
    if failed.is_empty() {
        return Ok(());
    }
    bail!("{} test programs failed: {}", failed.len(), failed.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(title: &str, error: Option<&str>) -> Ended {
        let error = error.map(str::to_owned);
        Ended { title: title.to_owned(), took: Duration::from_secs(1), error }
    }

    #[test]
    fn each_program_that_failed_is_named() {
        assert!(judge(vec![ended("a/one", None)]).is_ok());
        let both = vec![ended("a/one", Some("status 101")), ended("b/two", Some("killed"))];
        let error = judge(both).unwrap_err().to_string();
        assert!(error.contains("a/one: status 101") && error.contains("b/two: killed"), "{error}");
    }

    #[test]
    fn each_module_has_its_selected_tests() {
        let names = ["help::a", "http::limits::b", "http::c"].map(str::to_owned);
        let taken = |filters: &[&str]| {
            let filters: Vec<String> = filters.iter().map(|&filter| filter.to_owned()).collect();
            let modules = by_module(&names, &filters).into_iter();
            modules.map(|(module, names)| format!("{module}: {}", names.join(" "))).collect()
        };
        let all: Vec<String> = taken(&[]);
        assert_eq!(all, ["help: help::a", "http: http::limits::b http::c"]);
        let some: Vec<String> = taken(&["c", "none"]);
        assert_eq!(some, ["http: http::c"]);
    }
}
