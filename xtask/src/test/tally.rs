//! [`Results`]: what libtest says of its tests, read from its output.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// The reason of a test that only other tests run, in a process of its own: the test is part of
/// those and not left out.
const OF_OTHERS: &str = "run by other tests";
/// Longest line that is read. A line that never ends must not fill the memory.
const LINE_MAX: usize = 4096;
/// Begins the line of a test that could not run where it was started, though libtest calls it
/// passed. The test's name and the reason follow.
const SKIPPED: &str = "skipped here: ";
/// How a test ends that failed.
const FAILED: &str = "FAILED";

/// The results of any number of test programs.
///
/// Tests are known by their names; names of different programs are not told apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Results {
    // What the sums call passed: the skipped tests, too.
    ended_well: u64,
    /// Tests that failed, and steps that failed without a test to blame.
    pub(crate) failed: u64,
    ignored: BTreeMap<String, String>,
    skipped: Vec<(String, String)>,
    ran: BTreeSet<String>,
    ended: BTreeMap<String, bool>,
    // Of the program that runs now. Its sums have them again.
    failed_so_far: u64,
}

impl Results {
    /// So many tests that passed and failed.
    #[cfg(test)]
    pub(crate) fn new(passed: u64, failed: u64) -> Self {
        Self { ended_well: passed, failed, ..Self::default() }
    }

    /// Tests that passed. A skipped one has not.
    pub(crate) fn passed(&self) -> u64 {
        self.ended_well.saturating_sub(u64::try_from(self.skipped.len()).unwrap_or(u64::MAX))
    }

    /// A test ran whose own line may not be readable.
    pub(crate) fn note_run(&mut self, name: &str) {
        self.ran.insert(name.to_owned());
    }

    /// Whether a program of a guest passed, once it has ended: a line of its own tells so.
    pub(crate) fn has_passed(&self, program: &str) -> Option<bool> {
        self.ended.get(program).copied()
    }

    /// Another guest begins: no program of it has ended.
    pub(crate) fn begin_guest(&mut self) {
        self.ended.clear();
        self.failed_so_far = 0;
    }

    /// The program that ran was cut off: its failures so far are counted, since no sums come.
    pub(crate) fn cut_off(&mut self) {
        self.failed += std::mem::take(&mut self.failed_so_far);
    }

    /// The tests that were ignored and ran in no other step, and those that could not run where
    /// they were started, each with its reason.
    pub(crate) fn left_out(&self) -> impl Iterator<Item = (&str, &str)> {
        self.ignored
            .iter()
            .filter(|(name, reason)| !self.ran.contains(*name) && *reason != OF_OTHERS)
            .chain(self.skipped.iter().map(|(name, reason)| (name, reason)))
            .map(|(name, reason)| (name.as_str(), reason.as_str()))
    }

    fn read(&mut self, line: &str) {
        if let Some((passed, failed)) = sums(line) {
            self.ended_well += passed;
            self.failed += failed;
            self.failed_so_far = 0;
        } else if let Some((program, passed)) = end_of_program(line) {
            self.ended.insert(program.to_owned(), passed);
        } else if let Some((name, reason)) = skipped(line) {
            self.skipped.push((name.to_owned(), reason.to_owned()));
        } else if let Some((name, outcome)) = one_test(line) {
            match outcome.strip_prefix("ignored") {
                Some(reason) => {
                    let reason = reason.trim_start_matches(", ");
                    self.ignored.insert(name.to_owned(), reason.to_owned());
                }
                None => {
                    self.failed_so_far += u64::from(outcome == FAILED);
                    self.note_run(name);
                }
            }
        } else if line.trim_end().ends_with(FAILED) {
            // The test printed lines of its own, and its end stands after the last of them.
            self.failed_so_far += 1;
        }
    }
}

/// The tests that passed and failed, of the line that ends a test program.
fn sums(line: &str) -> Option<(u64, u64)> {
    // With --nocapture, what a test printed without a line's end may stand before it.
    let at = line.find("test result: ")?;
    let (_, numbers) = line[at..].split_once(". ")?;
    let number = |name: &str| -> Option<u64> {
        let found = numbers.split(';').find_map(|part| part.trim().strip_suffix(name));
        found.and_then(|text| text.trim().parse().ok())
    };
    Some((number("passed")?, number("failed")?))
}

/// The program, and whether it passed, of the line by which the script of a guest ends it:
/// `--- lab: ok, 9 s`.
fn end_of_program(line: &str) -> Option<(&str, bool)> {
    let (program, outcome) = line.trim_end().strip_prefix("--- ")?.split_once(": ")?;
    let (outcome, _) = outcome.split_once(", ")?;
    matches!(outcome, "ok" | FAILED).then_some((program, outcome == "ok"))
}

/// The name of a test that could not run here, and the reason.
fn skipped(line: &str) -> Option<(&str, &str)> {
    line.trim_end().strip_prefix(SKIPPED)?.split_once(": ")
}

/// The name of a test and how it ended, of its own line.
fn one_test(line: &str) -> Option<(&str, &str)> {
    let (name, outcome) = line.trim_end().strip_prefix("test ")?.split_once(" ... ")?;
    let is_outcome =
        matches!(outcome, "ok" | FAILED | "ignored") || outcome.starts_with("ignored, ");
    is_outcome.then_some((name, outcome))
}

/// Passes output on and reads the results in it.
#[derive(Debug)]
pub(crate) struct Tally<W> {
    to: W,
    line: Vec<u8>,
    results: Arc<Mutex<Results>>,
}

impl<W: Write> Tally<W> {
    /// Passes on to `to` and adds to `results`.
    pub(crate) fn new(to: W, results: Arc<Mutex<Results>>) -> Self {
        Tally { to, line: Vec::new(), results }
    }

    fn end_line(&mut self) {
        let line = String::from_utf8_lossy(&self.line).into_owned();
        self.results.lock().unwrap_or_else(PoisonError::into_inner).read(&line);
        self.line.clear();
    }
}

impl<W: Write> Write for Tally<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write_all(bytes)?;
        for &byte in bytes {
            match byte {
                b'\n' => self.end_line(),
                _ if self.line.len() < LINE_MAX => self.line.push(byte),
                _ => {}
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, cut: usize) -> Results {
        let results = Arc::default();
        let mut tally = Tally::new(Vec::new(), Arc::clone(&results));
        text.as_bytes().chunks(cut).for_each(|part| tally.write_all(part).unwrap());
        assert_eq!(tally.to, text.as_bytes());
        results.lock().unwrap().clone()
    }

    #[test]
    fn results_are_summed_however_they_are_cut() {
        let text = "\
running 5 tests
test a ... ok
test far::b ... ignored, needs the lab
test c ... ignored
test child ... ignored, run by other tests
test as_root_d ... ignored, needs root
test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.00s

test as_root_d ... FAILED
dots...test result: FAILED. 2 passed; 5 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.20s
";
        for cut in 1..text.len() {
            let mut results = read(text, cut);
            assert_eq!((results.passed(), results.failed), (14, 5), "{cut}");
            assert_eq!(
                results.left_out().collect::<Vec<_>>(),
                [("c", ""), ("far::b", "needs the lab")],
                "{cut}"
            );
            results.note_run("far::b");
            assert_eq!(results.left_out().count(), 1);
        }
    }

    #[test]
    fn a_test_that_could_not_run_is_not_passed() {
        let text = "\
test grow::a ... 
skipped here: grow::a: it resizes a disk in use, which came with Linux 6.16
ok
test grow::b ... ok
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out
test c ... ok
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out
";
        let results = read(text, 7);
        assert_eq!((results.passed(), results.failed), (2, 0));
        let reason = "it resizes a disk in use, which came with Linux 6.16";
        assert_eq!(results.left_out().collect::<Vec<_>>(), [("grow::a", reason)]);
    }

    #[test]
    fn a_program_that_is_cut_off_keeps_its_failures() {
        let text = "\
--- lab-1
test a ... FAILED
test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out
--- lab-1: FAILED, 9 s
--- lab-2
test b ... FAILED
test c ... words
and moreFAILED
test d ... ";
        let mut results = read(text, 5);
        assert_eq!((results.passed(), results.failed), (3, 1));
        assert_eq!((results.has_passed("lab-1"), results.has_passed("lab-2")), (Some(false), None));
        results.cut_off();
        results.cut_off();
        assert_eq!((results.passed(), results.failed), (3, 3));
        results.begin_guest();
        assert_eq!(results.has_passed("lab-1"), None, "another kernel has its own programs");
    }

    #[test]
    fn other_words_do_not_count() {
        for text in [
            "test result: ok\n",
            "a test result: is. none\n",
            "99 passed; 0 failed\n",
            "test a ... it says\n",
            "\n",
        ] {
            assert_eq!(read(text, 7), Results::default(), "{text}");
        }
    }
}
