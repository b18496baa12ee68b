//! [`Document`]: the findings of a check, as text for people and as JSON for programs.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use rblk_operate::doctor::{Finding, Verdict};
use serde::Serialize;

use super::args::Part;

const COLUMNS: usize = 100;
/// Most columns before a finding.
const INDENT_MAX: usize = 34;

#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Section {
    pub(crate) part: Part,
    pub(crate) findings: Vec<Finding>,
    /// Numbers by name, with the unit in the name.
    pub(crate) figures: BTreeMap<String, f64>,
    pub(crate) seconds: f64,
}

impl Section {
    pub(crate) fn new(part: Part) -> Self {
        Self { part, findings: Vec::new(), figures: BTreeMap::new(), seconds: 0.0 }
    }
}

#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub(crate) struct Document {
    /// Version of the form. Fields are added, never changed.
    pub(crate) schema: u32,
    pub(crate) version: String,
    pub(crate) command: Vec<String>,
    pub(crate) address: String,
    pub(crate) device: String,
    pub(crate) transport: String,
    pub(crate) kernel: String,
    /// A section for each part, in order.
    pub(crate) sections: Vec<Section>,
}

pub(crate) const SCHEMA: u32 = 1;

impl Document {
    pub(crate) fn count(&self, verdict: Verdict) -> usize {
        let all = self.sections.iter().flat_map(|section| &section.findings);
        all.filter(|finding| finding.verdict == verdict).count()
    }

    pub(crate) fn to_json(&self) -> serde_json::Value {
        let mut all = serde_json::to_value(self).unwrap_or_default();
        if let Some(map) = all.as_object_mut() {
            map.insert("failures".to_owned(), self.count(Verdict::Fail).into());
            map.insert("warnings".to_owned(), self.count(Verdict::Warn).into());
        }
        all
    }

    pub(crate) fn head(&self) -> String {
        let Self { address, device, transport, kernel, version, .. } = self;
        let device = if device.is_empty() { "no device" } else { device.as_str() };
        format!("{address}: {device} ({transport}), Linux {kernel}, rblk {version}\n")
    }

    pub(crate) fn end(&self) -> String {
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
            let head = format!("  {:<4}  {}", finding.verdict.word(), finding.subject);
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
mod tests;
