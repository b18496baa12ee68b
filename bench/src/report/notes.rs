//! [`Notes`]: what a person adds to a run.

use std::collections::BTreeMap;

/// Name of the file in a run's folder.
pub const FILE: &str = "notes.txt";

/// What a person adds to a run: one note per line. `3: words` belongs to goal 3, other lines come
/// first in the report. Words such as `profile/qd1.txt` and `raw/x.json` become links.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Notes {
    /// Notes on the whole run.
    pub general: Vec<String>,
    /// Notes on goals.
    pub goals: BTreeMap<u8, Vec<String>>,
}

impl Notes {
    /// Reads notes; no text is no notes.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut notes = Self::default();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            match line.split_once(':') {
                Some((goal, note)) if goal.parse::<u8>().is_ok() => {
                    let goal = goal.parse().unwrap_or_default();
                    notes.goals.entry(goal).or_default().push(note.trim().to_owned());
                }
                _ => notes.general.push(line.to_owned()),
            }
        }
        notes
    }

    /// Whether a word names a file of the run's folder.
    #[must_use]
    pub fn is_file(word: &str) -> bool {
        let inside = word.starts_with("raw/") || word.starts_with("profile/");
        inside && !word.contains("..") && !word.ends_with('/')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_belong_to_goals_or_to_all() {
        let notes = Notes::parse(
            "The host was quiet.\n\n 2: CPU-bound, see profile/128k.txt\nat 12:30: x\n",
        );
        assert_eq!(notes.general, ["The host was quiet.", "at 12:30: x"]);
        assert_eq!(notes.goals[&2], ["CPU-bound, see profile/128k.txt"]);
        assert!(Notes::is_file("profile/128k.txt"));
        assert!(!Notes::is_file("profile/../../etc/passwd") && !Notes::is_file("http://x"));
    }
}
