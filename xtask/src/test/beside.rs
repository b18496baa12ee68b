//! Test programs of this machine, run beside each other: a program that waits for timers and leases
//! leaves its CPU to the others. The output of each is shown whole, when the program has ended.

use std::collections::VecDeque;
use std::io::Write;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::tally::{Results, Tally};
use crate::artifacts::Program;
use crate::process;

/// Test programs at a time.
const AT_A_TIME: usize = 3;
/// Programs that run alone: they take ports of a fixed number.
const ALONE: [&str; 1] = ["usual_ports"];
/// Programs that take longest, which begin first: then none of them is left at the end.
const FIRST: [&str; 4] = ["simulation", "storage_model", "runs", "storage_crash"];
/// The output of a program of which no test is selected.
const NOTHING: &[u8] = b"\nrunning 0 tests\n";
/// Programs above this time are named at the end of the step.
const LONG: Duration = Duration::from_secs(20);

/// The way in which test programs are run.
#[derive(Debug)]
pub(super) struct Runner<'a> {
    /// Words for each program.
    pub(super) words: Vec<String>,
    /// Variables, besides those of this process.
    pub(super) environment: Vec<(&'static str, String)>,
    /// Limit on one program.
    pub(super) limit: Duration,
    /// Where results are added.
    pub(super) results: &'a Arc<Mutex<Results>>,
}

/// The end of one program.
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
        let (alone, mut beside): (Vec<&Program>, Vec<&Program>) =
            programs.iter().copied().partition(is_alone);
        beside.sort_by_key(|program| !FIRST.contains(&program.name.as_str()));
        let mut ended = self.pool(beside, AT_A_TIME);
        ended.extend(self.pool(alone, 1));
        judge(ended)
    }

    /// Runs the programs one after the other.
    ///
    /// # Errors
    /// Names the programs that failed.
    pub(super) fn in_turn(&self, programs: &[&Program]) -> Result<()> {
        judge(self.pool(programs.to_vec(), 1))
    }

    fn pool(&self, programs: Vec<&Program>, at_a_time: usize) -> Vec<Ended> {
        let left = Mutex::new(VecDeque::from(programs));
        let ended = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..at_a_time {
                scope.spawn(|| {
                    // The lock is free again when a program runs.
                    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    while let Some(program) = next() {
                        let one = self.one(program);
                        ended.lock().unwrap_or_else(PoisonError::into_inner).push(one);
                    }
                });
            }
        });
        ended.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn one(&self, program: &Program) -> Ended {
        let mut command = Command::new(&program.path);
        command.args(&self.words).current_dir(&program.package);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let begun = Instant::now();
        let ran = process::both(&mut command, self.limit);
        let took = begun.elapsed();
        let (said, error) = match ran {
            Ok((0, said)) => (said, None),
            Ok((status, said)) => (said, Some(format!("status {status}"))),
            Err(error) => (Vec::new(), Some(format!("{error:#}"))),
        };
        let title = program.title();
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
}
