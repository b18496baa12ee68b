//! The code as users without RDMA build it: no verbs, and none of the features that only tests
//! have. The compiler looks at it, and a warning is an error.

use anyhow::{Result, bail};
use serde::Deserialize;

use crate::artifacts::capture;
use crate::workspace::Workspace;

/// Only tests/fuzz has the feature `fuzzing`.
const WORDS: [&str; 4] = ["--workspace", "--all-targets", "--exclude", "rblk-fuzz"];

/// Lets the compiler look at every crate.
///
/// # Errors
/// The compiler has a warning or an error.
pub(super) fn check(workspace: &Workspace, profile: &str) -> Result<()> {
    let mut command = workspace.cargo(&["check", "--profile", profile]);
    command.arg("--message-format=json").args(WORDS);
    let (is_good, messages) = capture(&mut command)?;
    let warnings = rendered(&messages)?;
    if is_good && warnings.is_empty() {
        return Ok(());
    }
    warnings.iter().for_each(|warning| println!("{warning}"));
    bail!("{} warnings and errors of the compiler", warnings.len())
}

/// The compiler's messages, for people.
fn rendered(messages: &str) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Line {
        message: Option<Message>,
    }
    #[derive(Deserialize)]
    struct Message {
        level: String,
        rendered: Option<String>,
    }
    let mut found = Vec::new();
    for line in messages.lines().filter(|line| line.contains(r#""reason":"compiler-message""#)) {
        let Line { message } = serde_json::from_str(line)?;
        let is_bad = |message: &Message| matches!(message.level.as_str(), "warning" | "error");
        found.extend(message.filter(is_bad).and_then(|message| message.rendered));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_taken_and_notes_are_not() {
        let messages = r#"{"reason":"compiler-artifact","target":{}}
{"reason":"compiler-message","message":{"level":"warning","rendered":"unused"}}
{"reason":"compiler-message","message":{"level":"failure-note","rendered":"more"}}
"#;
        assert_eq!(rendered(messages).unwrap(), ["unused"]);
    }
}
