//! [`Summary`]: the last lines of a run. An error may be long, and a step that was skipped easily
//! missed, so each is named once more; the last line has the sums.

use std::fmt::Write;

use super::spent::Spent;
use super::step::{Ending, Kind, Step};
use super::tally::Results;

/// What there is to sum up.
#[derive(Debug)]
pub(crate) struct Summary<'a> {
    /// All steps.
    pub(crate) steps: &'a [Step],
    /// The cost of the run, from its begin.
    pub(crate) spent: Spent,
    /// What libtest said; with failed steps that no test is to blame for.
    pub(crate) results: &'a Results,
    /// What is wrong with the run as a whole.
    pub(crate) wrong: Option<&'a str>,
}

impl Summary<'_> {
    /// Whether nothing failed.
    pub(crate) fn is_good(&self) -> bool {
        let failed = |step: &Step| matches!(step.ending, Ending::Failed(_));
        self.results.failed == 0 && self.wrong.is_none() && !self.steps.iter().any(failed)
    }

    /// The cost of each step, of each kind of work and of the run.
    fn costs(&self) -> String {
        let line = |spent: Spent, of: &str| {
            format!("{:7.1} {:7.1}  {of}\n", spent.wall.as_secs_f64(), spent.cpu.as_secs_f64())
        };
        let mut text = "\n wall s   CPU s  step\n".to_owned();
        for step in self.steps.iter().filter(|step| step.spent != Spent::default()) {
            text += &line(step.spent, &format!("{} {}", step.number, step.name));
        }
        for (kind, of) in
            [(Kind::Check, "checks"), (Kind::Build, "builds"), (Kind::Run, "tests and programs")]
        {
            let own = self.steps.iter().filter(|step| step.kind == kind);
            let sum = own.fold(Spent::default(), |sum, step| sum.plus(step.spent));
            text += &line(sum, &format!("all {of}"));
        }
        text + &line(self.spent, &format!("all {} steps", self.steps.len()))
    }

    /// The lines. The last is `N passed, N failed`, and `, N skipped` where checks did not run:
    /// steps, and tests that ran in no step.
    pub(crate) fn text(&self) -> String {
        let (passed, failed) = (self.results.passed(), self.results.failed);
        // A run that is wrong has failed, whatever was counted.
        let failed = if self.is_good() { failed } else { failed.max(1) };
        let mut text = self.costs();
        let mut skipped = 0;
        // Writing to a String cannot fail.
        for (name, reason) in self.results.left_out() {
            skipped += 1;
            let reason = if reason.is_empty() { "it is marked as ignored" } else { reason };
            let _ = writeln!(text, "skipped: test {name}: {reason}");
        }
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
    use std::time::Duration;

    use super::super::tally::Tally;
    use super::*;

    fn step(number: u32, name: &str, ending: Ending) -> Step {
        let spent = Spent { wall: Duration::from_secs(1), cpu: Duration::from_millis(1500) };
        let spent = if ending == Ending::Passed { spent } else { Spent::default() };
        Step { number, name: name.to_owned(), kind: Kind::Run, spent, ending }
    }

    fn summary<'a>(steps: &'a [Step], results: &'a Results) -> Summary<'a> {
        let spent = Spent { wall: Duration::from_secs(3), cpu: Duration::from_secs(5) };
        Summary { steps, spent, results, wrong: None }
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
        let results = Results::new(7, 2);
        let summary = summary(&steps, &results);
        assert!(!summary.is_good());
        assert_eq!(
            summary.text(),
            "\n wall s   CPU s  step\n    1.0     1.5  1 lints\n    0.0     0.0  all checks\n    \
             0.0     0.0  all builds\n    1.0     1.5  all tests and programs\n    3.0     5.0  all 5 \
             steps\n\
             skipped: step 3 (tests): because step 2 (programs) failed\n\
             skipped: step 4 (deny): cargo-deny is not installed\n\
             FAILED: step 2 (programs): many\n\
             FAILED: step 5 (documentation): a broken link\n\
             7 passed, 2 failed, 2 skipped\n"
        );
    }

    #[test]
    fn a_good_run_says_nothing_of_what_did_not_happen() {
        let steps = [step(1, "lints", Ending::Passed)];
        let results = Results::new(7, 0);
        let mut summary = summary(&steps, &results);
        assert!(summary.is_good());
        assert!(summary.text().ends_with(" all 1 steps\n7 passed, 0 failed\n"));
        summary.wrong = Some("no test ran");
        assert!(!summary.is_good());
        assert!(summary.text().ends_with("\nFAILED: no test ran\n7 passed, 1 failed\n"));
    }

    #[test]
    fn a_skipped_check_is_no_failure() {
        let steps = [step(1, "deny", Ending::Skipped("it is not installed".to_owned()))];
        let results = Results::new(7, 0);
        let summary = summary(&steps, &results);
        assert!(summary.is_good());
        assert!(summary.text().ends_with("\n7 passed, 0 failed, 1 skipped\n"));
    }

    #[test]
    fn a_test_that_ran_in_no_step_is_named() {
        let results = Arc::new(Mutex::new(Results::default()));
        let output = "test a ... ignored, needs the lab\ntest b ... ignored, needs root\n\
                      test result: ok. 2 passed; 0 failed; 2 ignored; 0 measured\n";
        Tally::new(Vec::new(), Arc::clone(&results)).write_all(output.as_bytes()).unwrap();
        let mut results = results.lock().unwrap();
        results.note_run("a");
        let steps = [step(1, "tests", Ending::Passed)];
        let text = summary(&steps, &results).text();
        let lines: Vec<&str> = text.lines().skip(7).collect();
        assert_eq!(lines, ["skipped: test b: needs root", "2 passed, 0 failed, 1 skipped"]);
    }
}
