//! [`Report`]: the findings of a doctor, as lines for people and as a value for programs.
//!
//! A line has at most 100 columns. A fix stands in the line of its finding if there is room, else
//! below it. A command that is longer than a line is continued with a backslash, so it can be
//! copied as it stands.

use std::fmt;

use serde::{Deserialize, Serialize};

use rblk_config::Exit;

/// Most columns of a line.
const COLUMNS: usize = 100;
/// Columns of the longest word of a verdict, and of the gap behind a column.
const VERDICT: usize = 4;
const GAP: usize = 2;

/// How something is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Working, with something to improve.
    Warn,
    /// Not working.
    Fail,
    /// Not checked, and why.
    Skip,
}

impl Verdict {
    /// Its word in output for people.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
            Self::Skip => "skip",
        }
    }
}

/// The result of one check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Finding {
    /// How it is.
    pub verdict: Verdict,
    /// The subject of the check.
    pub subject: String,
    /// The finding in words.
    pub found: String,
    /// The command that mends it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// The host that the command is for. If absent: this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix_at: Option<String>,
}

impl Finding {
    fn new(verdict: Verdict, subject: impl Into<String>, found: impl Into<String>) -> Self {
        let (subject, found) = (subject.into(), found.into());
        Self { verdict, subject, found, fix: None, fix_at: None }
    }

    /// As it should be.
    #[must_use]
    pub fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(Verdict::Ok, subject, found)
    }

    /// Working, with something to improve.
    #[must_use]
    pub fn warn(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(Verdict::Warn, subject, found)
    }

    /// Not working.
    #[must_use]
    pub fn fail(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(Verdict::Fail, subject, found)
    }

    /// Not looked at.
    #[must_use]
    pub fn skip(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(Verdict::Skip, subject, found)
    }

    /// With the command that mends it.
    #[must_use]
    pub fn fix(self, command: impl Into<String>) -> Self {
        Self { fix: Some(command.into()), ..self }
    }

    /// With the command that mends it on another host.
    #[must_use]
    pub fn fix_at(self, host: impl Into<String>, command: impl Into<String>) -> Self {
        Self { fix_at: Some(host.into()), ..self.fix(command) }
    }

    /// The fix with its lead-in.
    fn advice(&self) -> Option<String> {
        let fix = self.fix.as_ref()?;
        Some(match &self.fix_at {
            Some(host) => format!("fix at {host}: {fix}"),
            None => format!("fix: {fix}"),
        })
    }
}

/// All findings, in the order of the checks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    findings: Vec<Finding>,
}

impl Report {
    /// Adds findings.
    pub fn add(&mut self, findings: impl IntoIterator<Item = Finding>) {
        self.findings.extend(findings);
    }

    /// All findings.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// How many findings have that verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.findings.iter().filter(|finding| finding.verdict == verdict).count()
    }

    /// The exit code of the program: [`Exit::HostLacks`] with a failure.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self.count(Verdict::Fail) {
            0 => Exit::Ok,
            _ => Exit::HostLacks,
        }
    }

    /// The column where the facts begin.
    fn indent(&self) -> usize {
        let widest = self.findings.iter().map(|f| f.subject.chars().count()).max().unwrap_or(0);
        // One long subject does not take the room of all others.
        VERDICT + GAP + widest.min(COLUMNS / 4) + GAP
    }

    /// The column where fixes begin that have room in the line of their finding.
    fn fix_column(&self, indent: usize) -> usize {
        let ends = self.findings.iter().filter_map(|finding| {
            let (found, advice) = (finding.found.chars().count(), finding.advice()?);
            let end = indent + found + GAP;
            (end + advice.chars().count() <= COLUMNS).then_some(end)
        });
        ends.max().unwrap_or(indent)
    }
}

impl Serialize for Report {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut report = serializer.serialize_struct("Report", 3)?;
        report.serialize_field("findings", &self.findings)?;
        report.serialize_field("failures", &self.count(Verdict::Fail))?;
        report.serialize_field("warnings", &self.count(Verdict::Warn))?;
        report.end()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let indent = self.indent();
        let subject_width = indent - VERDICT - 2 * GAP;
        let column = self.fix_column(indent);
        for finding in &self.findings {
            let head = format!(
                "{:<VERDICT$}  {:<subject_width$}  ",
                finding.verdict.word(),
                finding.subject
            );
            let found = wrapped(&finding.found, COLUMNS - indent, "");
            let (first, more) = found.split_first().map_or(("", &[][..]), |(a, b)| (a.as_str(), b));
            let mut line = match head.chars().count() > indent {
                // The subject is longer than its column.
                true => {
                    writeln!(f, "{}", head.trim_end())?;
                    format!("{:indent$}{first}", "")
                }
                false => format!("{head}{first}"),
            };
            let advice = finding.advice();
            let in_line = more.is_empty()
                && advice.as_ref().is_some_and(|fix| column + fix.chars().count() <= COLUMNS)
                && line.chars().count() + GAP <= column;
            if let (true, Some(fix)) = (in_line, &advice) {
                line = format!("{line:<column$}{fix}");
            }
            writeln!(f, "{}", line.trim_end())?;
            for line in more {
                writeln!(f, "{:indent$}{line}", "")?;
            }
            if let (false, Some(fix)) = (in_line, &advice) {
                for line in wrapped(fix, COLUMNS - indent, " \\") {
                    writeln!(f, "{:indent$}{line}", "")?;
                }
            }
        }
        writeln!(f, "{}", self.verdict())
    }
}

impl Report {
    /// The last line.
    fn verdict(&self) -> String {
        let some = |count: usize, what: &str| match count {
            0 => None,
            1 => Some(format!("1 {what}")),
            _ => Some(format!("{count} {what}s")),
        };
        let failures = some(self.count(Verdict::Fail), "failure");
        let warnings = some(self.count(Verdict::Warn), "warning");
        let counts: Vec<String> = failures.into_iter().chain(warnings).collect();
        match counts.is_empty() {
            true => "no failure, no warning".to_owned(),
            false => format!("{} (exit {})", counts.join(", "), self.exit().code()),
        }
    }
}

/// The lines of a text, broken between words. All lines but the last end with `continued`. A word
/// that is wider than a line is broken.
fn wrapped(text: &str, width: usize, continued: &str) -> Vec<String> {
    let room = width.saturating_sub(continued.len()).max(1);
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        let gap = usize::from(!line.is_empty());
        if line.chars().count() + gap + word.len() > room && !line.is_empty() {
            lines.push(std::mem::take(&mut line));
        }
        while word.len() > room {
            let rest = word.split_off(room);
            lines.push(word.into_iter().collect());
            word = rest;
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.extend(word);
    }
    lines.push(line);
    let last = lines.len() - 1;
    lines[..last].iter_mut().for_each(|line| line.push_str(continued));
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn report(findings: Vec<Finding>) -> Report {
        Report { findings }
    }

    #[test]
    fn lines_are_aligned_and_fixes_have_a_column_of_their_own() {
        let report = report(vec![
            Finding::ok("kernel", "6.12.95"),
            Finding::warn("mlx5_0/1", "RoCE v2 active, MTU 1024").fix("ip link set ens1 mtu 4200"),
            Finding::fail("route", "leaves by eth0, no RDMA there")
                .fix("ip route add 192.0.2.1 dev ens1"),
            Finding::skip("connect", "needs a route"),
        ]);
        assert_eq!(
            report.to_string(),
            "\
ok    kernel    6.12.95
warn  mlx5_0/1  RoCE v2 active, MTU 1024       fix: ip link set ens1 mtu 4200
FAIL  route     leaves by eth0, no RDMA there  fix: ip route add 192.0.2.1 dev ens1
skip  connect   needs a route
1 failure, 1 warning (exit 7)
"
        );
        assert_eq!(report.exit(), Exit::HostLacks);
    }

    #[test]
    fn a_long_fix_stands_below_and_can_be_copied() {
        let key = "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe";
        let fix = format!("rblk-target host add db1 --key {key} --volume vol0:rw");
        let report =
            report(vec![Finding::fail("keys", "does not let this host in").fix_at("s1", fix)]);
        assert_eq!(
            report.to_string(),
            format!(
                "\
FAIL  keys  does not let this host in
            fix at s1: rblk-target host add db1 --key \\
            {key} --volume vol0:rw
1 failure (exit 7)
"
            )
        );
    }

    #[test]
    fn warnings_alone_are_no_failure() {
        assert_eq!(report(vec![Finding::warn("a", "b")]).exit(), Exit::Ok);
        let fine = report(vec![Finding::ok("a", "b")]);
        assert!(fine.to_string().ends_with("no failure, no warning\n"), "{fine}");
    }

    proptest! {
        #[test]
        fn no_line_is_wider_than_100_columns(
            findings in proptest::collection::vec(
                ("[a-z/0-9]{1,64}", "[a-z ]{0,300}|[a-z]{0,300}", proptest::option::of("[a-z -]{1,300}")), 0..6)
        ) {
            let findings = findings.into_iter().map(|(subject, found, fix)| {
                let finding = Finding::fail(subject, found);
                match fix { Some(fix) => finding.fix(fix), None => finding }
            });
            let report = report(findings.collect());
            for line in report.to_string().lines() {
                prop_assert!(line.chars().count() <= COLUMNS, "{line}");
            }
        }
    }
}
