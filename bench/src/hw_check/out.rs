//! [`Out`]: what a part says while it works.

use std::sync::mpsc::Sender;

use rblk_operate::doctor::Finding;

/// One word of a part.
#[derive(Debug)]
pub(super) enum Told {
    /// A finding.
    Found(Finding),
    /// A number, by name.
    Figure(String, f64),
}

/// Where a part says it. What is said stays said, also if the part never ends.
#[derive(Clone, Debug)]
pub(super) struct Out(Sender<Told>);

impl Out {
    pub(super) fn new(sender: Sender<Told>) -> Self {
        Self(sender)
    }

    /// A finding.
    pub(super) fn add(&self, finding: Finding) {
        // Nobody listens any more when the part took too long.
        let _ = self.0.send(Told::Found(finding));
    }

    /// Several.
    pub(super) fn add_all(&self, findings: impl IntoIterator<Item = Finding>) {
        findings.into_iter().for_each(|finding| self.add(finding));
    }

    /// A number.
    pub(super) fn figure(&self, name: impl Into<String>, value: f64) {
        let _ = self.0.send(Told::Figure(name.into(), value));
    }

    /// Progress, for people.
    pub(super) fn tell(&self, what: &str) {
        eprintln!("rblk-bench: {what}");
    }
}
