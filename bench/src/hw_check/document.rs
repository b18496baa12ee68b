//! [`Document`]: what a check found, as text for people and as JSON for programs.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use rblk_operate::doctor::{Finding, Verdict};
use serde::Serialize;

use super::args::Part;

/// Most columns of a line.
const COLUMNS: usize = 100;
/// Where what was found begins at most.
const INDENT_MAX: usize = 34;

/// What was found in one part.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Section {
    /// Which.
    pub part: Part,
    /// A line each.
    pub findings: Vec<Finding>,
    /// Numbers by name, with the unit in the name.
    pub figures: BTreeMap<String, f64>,
    /// How long it took.
    pub seconds: f64,
}

impl Section {
    /// An empty one.
    #[must_use]
    pub fn new(part: Part) -> Self {
        Self { part, findings: Vec::new(), figures: BTreeMap::new(), seconds: 0.0 }
    }
}

/// Everything that was found.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Document {
    /// Version of the form. Fields are added, never changed.
    pub schema: u32,
    /// Version of this program.
    pub version: String,
    /// The command's arguments.
    pub command: Vec<String>,
    /// The address that was asked about.
    pub address: String,
    /// The device.
    pub device: String,
    /// What carries its messages.
    pub transport: String,
    /// The kernel.
    pub kernel: String,
    /// A section for each part, in order.
    pub sections: Vec<Section>,
}

/// [`Document::schema`].
pub const SCHEMA: u32 = 1;

impl Document {
    /// How many findings have that verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        let all = self.sections.iter().flat_map(|section| &section.findings);
        all.filter(|finding| finding.verdict == verdict).count()
    }

    /// As JSON, with the counts.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let mut all = serde_json::to_value(self).unwrap_or_default();
        if let Some(map) = all.as_object_mut() {
            map.insert("failures".to_owned(), self.count(Verdict::Fail).into());
            map.insert("warnings".to_owned(), self.count(Verdict::Warn).into());
        }
        all
    }

    /// The first line.
    #[must_use]
    pub fn head(&self) -> String {
        let Self { address, device, transport, kernel, version, .. } = self;
        let device = if device.is_empty() { "no device" } else { device.as_str() };
        format!("{address}: {device} ({transport}), Linux {kernel}, rblk {version}\n")
    }

    /// The last line.
    #[must_use]
    pub fn end(&self) -> String {
        let some = |count: usize, what: &str| match count {
            1 => format!("1 {what}"),
            _ => format!("{count} {what}s"),
        };
        let (failures, warnings) = (self.count(Verdict::Fail), self.count(Verdict::Warn));
        format!("{}, {}\n", some(failures, "failure"), some(warnings, "warning"))
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{} ({:.1} s)", self.part.word(), self.seconds)?;
        let widest = self.findings.iter().map(|found| found.subject.chars().count()).max();
        let indent = (9 + widest.unwrap_or(0)).min(INDENT_MAX);
        for finding in &self.findings {
            let mut text = finding.found.clone();
            if let Some(fix) = &finding.fix {
                let _ = write!(text, ". Try: {fix}");
            }
            let word = match finding.verdict {
                Verdict::Ok => "ok",
                Verdict::Warn => "warn",
                Verdict::Fail => "FAIL",
                Verdict::Skip => "skip",
            };
            let head = format!("  {word:<4}  {}", finding.subject);
            let mut line = format!("{head:<indent$}");
            for word in text.split_whitespace() {
                if line.chars().count() + 1 + word.chars().count() > COLUMNS {
                    writeln!(f, "{}", line.trim_end())?;
                    line = " ".repeat(indent);
                }
                line.push(' ');
                line.push_str(word);
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        let mut section = Section::new(Part::Device);
        section.findings = vec![
            Finding::ok("port", "active"),
            Finding::warn("MTU", "1024 B of 4096 B".to_owned() + &" and more words".repeat(8))
                .fix("ip link set v0 mtu 4200"),
            Finding::fail("memlock", "64 KiB"),
            Finding::skip("PFC", "no ethtool"),
            Finding::ok("MR", "any size"),
        ];
        section.figures.insert("mtu_bytes".to_owned(), 1024.0);
        Document { schema: SCHEMA, sections: vec![section], ..Document::default() }
    }

    #[test]
    fn lines_are_at_most_as_long_as_a_terminal_is_wide() {
        let text = document().sections[0].to_string();
        assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
        assert!(text.contains("  ok    port     active\n"), "{text}");
        assert!(text.contains("  FAIL  memlock  64 KiB\n"), "{text}");
        let words: Vec<&str> = text.split_whitespace().collect();
        assert!(words.join(" ").contains("Try: ip link set v0 mtu 4200"), "{text}");
    }

    #[test]
    fn programs_get_counts_and_figures() {
        let json = document().to_json();
        assert_eq!(json["failures"], 1);
        assert_eq!(json["warnings"], 1);
        assert_eq!(json["sections"][0]["part"], "device");
        assert_eq!(json["sections"][0]["figures"]["mtu_bytes"], 1024.0);
        assert_eq!(json["sections"][0]["findings"][1]["fix"], "ip link set v0 mtu 4200");
        assert_eq!(document().end(), "1 failure, 1 warning\n");
    }
}
