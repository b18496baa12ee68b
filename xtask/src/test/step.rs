//! [`Steps`]: each step of a run, named before it begins and timed at its end. A step that fails
//! does not end the run: the steps that need its result are skipped, all others are done.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Result;

use super::spent::{Meter, Spent};
use super::tally::Results;

/// The kind of work that a step does. Work of two kinds is two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The step reads sources, or lints them.
    Check,
    /// The step compiles.
    Build,
    /// The step runs tests or programs.
    Run,
}

/// How a step ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Every check passed.
    Passed,
    /// Nothing was checked, for this reason.
    Skipped(String),
    /// A check failed: the words of the error.
    Failed(String),
}

/// A step that is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    /// Its place in the run, from 1.
    pub(crate) number: u32,
    /// The subject of the step.
    pub(crate) name: String,
    /// The kind of work.
    pub(crate) kind: Kind,
    /// Its cost.
    pub(crate) spent: Spent,
    /// How it ended.
    pub(crate) ending: Ending,
}

/// The result of a step in which nothing failed.
#[derive(Debug)]
pub(crate) enum Work<T = ()> {
    /// The work is done; later steps need this value.
    Done(T),
    /// The work cannot be done here, for this reason. That is not a failure.
    Skipped(String),
}

/// The value that a step should have given to later steps is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Missing(String);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The steps of a run so far.
#[derive(Debug)]
pub(crate) struct Steps {
    start: Instant,
    over: Vec<Step>,
    results: Arc<Mutex<Results>>,
}

impl Step {
    /// For people.
    pub(crate) fn title(&self) -> String {
        format!("step {} ({})", self.number, self.name)
    }
}

impl Steps {
    /// No steps yet. A step that fails without a failed test in `results` is counted there as one
    /// failure.
    pub(crate) fn new(results: Arc<Mutex<Results>>) -> Self {
        Self { start: Instant::now(), over: Vec::new(), results }
    }

    /// Those that are over, in order.
    pub(crate) fn over(&self) -> &[Step] {
        &self.over
    }

    /// Does a step. An error of `work` is printed and kept; what is missing then says which step it
    /// was.
    pub(crate) fn run<T>(
        &mut self,
        kind: Kind,
        name: &str,
        work: impl FnOnce() -> Result<Work<T>>,
    ) -> Result<T, Missing> {
        let number = self.next();
        let meter = Meter::start();
        println!("\n=== {number} {name} (at {:.0} s)", self.start.elapsed().as_secs_f64());
        let failures = || self.results.lock().unwrap_or_else(PoisonError::into_inner).failed;
        let before = failures();
        let result = work();
        let is_blamed = failures() > before;
        let spent = meter.spent();
        let (seconds, cpu) = (spent.wall.as_secs_f64(), spent.cpu.as_secs_f64());
        match result {
            Ok(Work::Done(value)) => {
                println!("=== {number} {name}: ok, {seconds:.1} s, CPU {cpu:.1} s");
                self.end(kind, name, spent, Ending::Passed);
                Ok(value)
            }
            Ok(Work::Skipped(why)) => {
                println!("=== {number} {name}: skipped: {why}");
                self.end(kind, name, spent, Ending::Skipped(why));
                Err(Missing(format!("because step {number} ({name}) was skipped")))
            }
            Err(error) => {
                println!(
                    "{error:#}\n=== {number} {name}: FAILED after {seconds:.1} s, CPU {cpu:.1} s"
                );
                if !is_blamed {
                    self.results.lock().unwrap_or_else(PoisonError::into_inner).failed += 1;
                }
                self.end(kind, name, spent, Ending::Failed(format!("{error:#}")));
                Err(Missing(format!("because step {number} ({name}) failed")))
            }
        }
    }

    /// Does a step that needs what another one gives.
    pub(crate) fn run_with<G, T>(
        &mut self,
        kind: Kind,
        name: &str,
        given: &Result<G, Missing>,
        work: impl FnOnce(&G) -> Result<Work<T>>,
    ) -> Result<T, Missing> {
        match given {
            Ok(given) => self.run(kind, name, || work(given)),
            Err(missing) => {
                println!("\n=== {} {name}: skipped, {missing}", self.next());
                self.end(kind, name, Spent::default(), Ending::Skipped(missing.to_string()));
                Err(missing.clone())
            }
        }
    }

    fn next(&self) -> u32 {
        u32::try_from(self.over.len() + 1).unwrap_or(u32::MAX)
    }

    fn end(&mut self, kind: Kind, name: &str, spent: Spent, ending: Ending) {
        self.over.push(Step { number: self.next(), name: name.to_owned(), kind, spent, ending });
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    fn endings(steps: &Steps) -> Vec<(u32, &str, Ending)> {
        steps.over().iter().map(|s| (s.number, s.name.as_str(), s.ending.clone())).collect()
    }

    #[test]
    fn a_failed_step_stops_only_those_that_need_it() {
        let mut steps = Steps::new(Arc::default());
        let built: Result<u8, _> = steps.run(Kind::Run, "build", || bail!("no\ncompiler"));
        let mut done = 0;
        let tested = steps.run_with(Kind::Run, "tests", &built, |_| Ok(Work::Done(())));
        let other = steps.run(Kind::Run, "formatting", || {
            done += 1;
            Ok(Work::Done(7))
        });
        let after = steps.run_with(Kind::Run, "more", &other, |seven| Ok(Work::Done(*seven + 1)));
        // What is skipped is missing in its turn, and the cause is the same.
        let last = steps.run_with(Kind::Run, "last", &tested, |()| Ok(Work::Done(())));
        assert_eq!((done, after), (1, Ok(8)));
        assert!(tested.is_err() && last.is_err());
        let skipped = Ending::Skipped("because step 1 (build) failed".to_owned());
        assert_eq!(
            endings(&steps),
            [
                (1, "build", Ending::Failed("no\ncompiler".to_owned())),
                (2, "tests", skipped.clone()),
                (3, "formatting", Ending::Passed),
                (4, "more", Ending::Passed),
                (5, "last", skipped),
            ]
        );
    }

    #[test]
    fn each_failed_step_counts_once() {
        let count: Arc<Mutex<Results>> = Arc::default();
        let mut steps = Steps::new(Arc::clone(&count));
        let tests = || -> Result<Work> {
            count.lock().unwrap().failed += 3;
            bail!("ended with status 101")
        };
        assert!(steps.run(Kind::Run, "tests", tests).is_err());
        assert_eq!(count.lock().unwrap().failed, 3, "the tests are to blame");
        assert!(steps.run(Kind::Run, "lints", || -> Result<Work> { bail!("a warning") }).is_err());
        assert_eq!(count.lock().unwrap().failed, 4);
    }

    #[test]
    fn what_cannot_be_checked_is_neither_passed_nor_failed() {
        let mut steps = Steps::new(Arc::default());
        let why = "cargo-deny is not installed".to_owned();
        let result: Result<(), _> = steps.run(Kind::Run, "deny", || Ok(Work::Skipped(why.clone())));
        assert_eq!(result.unwrap_err().to_string(), "because step 1 (deny) was skipped");
        assert_eq!(endings(&steps), [(1, "deny", Ending::Skipped(why))]);
    }
}
