//! [`Summary`]: the last lines of a run. An error may be long, and a step that was skipped easily
//! missed, so each is named once more; the last line has the sums.

use std::fmt::Write;
use std::time::Duration;

use super::left_out::LeftOut;
use super::step::{Ending, Step};
use super::tally::Count;

/// What there is to sum up.
#[derive(Debug)]
pub(crate) struct Summary<'a> {
    /// All steps.
    pub(crate) steps: &'a [Step],
    /// How long they took.
    pub(crate) took: Duration,
    /// What libtest counted; with failed steps that no test is to blame for.
    pub(crate) count: Count,
    /// Tests that left themselves out.
    pub(crate) left_out: &'a LeftOut,
    /// What is wrong with the run as a whole.
    pub(crate) wrong: Option<&'a str>,
}

impl Summary<'_> {
    /// Whether nothing failed.
    pub(crate) fn is_good(&self) -> bool {
        let failed = |step: &Step| matches!(step.ending, Ending::Failed(_));
        self.count.failed == 0 && self.wrong.is_none() && !self.steps.iter().any(failed)
    }

    /// The lines. The last is `N passed, N failed`, and `, N skipped` where checks did not run:
    /// steps, and tests that ran neither here nor in the lab.
    pub(crate) fn text(&self) -> String {
        let Count { passed, failed, ignored, .. } = self.count;
        // libtest calls a test passed that left itself out.
        let passed = passed.saturating_sub(self.left_out.here());
        // A run that is wrong has failed, whatever was counted.
        let failed = if self.is_good() { failed } else { failed.max(1) };
        let nowhere: Vec<&str> = self.left_out.nowhere().collect();
        let mut text = format!(
            "\n{} steps in {:.0} s; {ignored} tests are marked as ignored\n",
            self.steps.len(),
            self.took.as_secs_f64()
        );
        if self.left_out.here() > 0 {
            text += &format!(
                "tests that left themselves out on this machine, as RBLK_SKIP_... asked: {}; of them ran in the lab: {}\n",
                self.left_out.here(),
                self.left_out.here() - nowhere.len() as u64
            );
        }
        // Writing to a String cannot fail.
        for name in &nowhere {
            let _ = writeln!(text, "skipped: test {name}: it ran nowhere");
        }
        let mut skipped = nowhere.len();
        for step in self.steps {
            if let Ending::Skipped(why) = &step.ending {
                skipped += 1;
                let _ = writeln!(text, "skipped: {}: {why}", step.title());
            }
        }
        for step in self.steps {
            if let Ending::Failed(why) = &step.ending {
                let first = why.lines().next().unwrap_or_default();
                let _ = writeln!(text, "FAILED: {}: {first}", step.title());
            }
        }
        if let Some(wrong) = self.wrong {
            let _ = writeln!(text, "FAILED: {wrong}");
        }
        let skipped = if skipped == 0 { String::new() } else { format!(", {skipped} skipped") };
        let _ = writeln!(text, "{passed} passed, {failed} failed{skipped}");
        text
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::{Arc, Mutex};

    use super::super::left_out::Passed;
    use super::*;

    fn step(number: u32, name: &str, ending: Ending) -> Step {
        Step { number, name: name.to_owned(), ending }
    }

    fn summary<'a>(steps: &'a [Step], count: Count, left_out: &'a LeftOut) -> Summary<'a> {
        Summary { steps, took: Duration::from_secs(3), count, left_out, wrong: None }
    }

    #[test]
    fn each_step_that_did_not_pass_is_named() {
        let steps = [
            step(1, "lints", Ending::Passed),
            step(2, "programs", Ending::Failed("many\nlines".to_owned())),
            step(3, "tests", Ending::Skipped("because step 2 (programs) failed".to_owned())),
            step(4, "deny", Ending::Skipped("cargo-deny is not installed".to_owned())),
            step(5, "documentation", Ending::Failed("a broken link".to_owned())),
        ];
        let count = Count { passed: 7, failed: 2, ignored: 2, results: 3 };
        let left_out = LeftOut::default();
        let summary = summary(&steps, count, &left_out);
        assert!(!summary.is_good());
        assert_eq!(
            summary.text(),
            "\n5 steps in 3 s; 2 tests are marked as ignored\n\
             skipped: step 3 (tests): because step 2 (programs) failed\n\
             skipped: step 4 (deny): cargo-deny is not installed\n\
             FAILED: step 2 (programs): many\n\
             FAILED: step 5 (documentation): a broken link\n\
             7 passed, 2 failed, 2 skipped\n"
        );
    }

    #[test]
    fn a_good_run_says_nothing_of_what_did_not_happen() {
        let (steps, left_out) = ([step(1, "lints", Ending::Passed)], LeftOut::default());
        let count = Count { passed: 7, ..Count::default() };
        let mut summary = summary(&steps, count, &left_out);
        assert!(summary.is_good());
        assert!(summary.text().ends_with(" marked as ignored\n7 passed, 0 failed\n"));
        summary.wrong = Some("no test ran");
        assert!(!summary.is_good());
        assert!(summary.text().ends_with("\nFAILED: no test ran\n7 passed, 1 failed\n"));
    }

    #[test]
    fn a_skipped_check_is_no_failure() {
        let steps = [step(1, "deny", Ending::Skipped("it is not installed".to_owned()))];
        let (count, left_out) = (Count { passed: 7, ..Count::default() }, LeftOut::default());
        let summary = summary(&steps, count, &left_out);
        assert!(summary.is_good());
        assert!(summary.text().ends_with("\n7 passed, 0 failed, 1 skipped\n"));
    }

    #[test]
    fn a_test_that_left_itself_out_did_not_pass_here() {
        let output = "successes:\n\
                      ---- a stdout ----\na: skipped, as RBLK_SKIP_LAB=1 asks: no ublk\n\
                      ---- b stdout ----\nskipped, as RBLK_SKIP_ROOT=1 asks: no root\n";
        let left_out = Arc::new(Mutex::new(LeftOut::default()));
        Passed::new(Vec::new(), Arc::clone(&left_out)).write_all(output.as_bytes()).unwrap();
        let mut left_out = left_out.lock().unwrap();
        left_out.ran_in_lab("a");
        // Three here, and one of them in the lab.
        let count = Count { passed: 4, ..Count::default() };
        let steps = [step(1, "tests", Ending::Passed)];
        let text = summary(&steps, count, &left_out).text();
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                "tests that left themselves out on this machine, as RBLK_SKIP_... asked: 2; of them ran in the lab: 1",
                "skipped: test b: it ran nowhere",
                "2 passed, 0 failed, 1 skipped"
            ]
        );
    }
}
