//! [`typed`]: what docs/install.md says, as a script, word by word.

use std::fmt::Write;

const GUIDE: &str = include_str!("../../docs/install.md");
/// The keys in the guide, in the order of the commands that show them.
const KEYS: [&str; 2] = ["TARGET_KEY", "HOST_KEY"];

/// A block of code of the guide: its language and its lines.
struct Block {
    language: &'static str,
    lines: Vec<&'static str>,
}

/// Commands and files of the first blocks of some sections, each section with the number of blocks.
///
/// A line is `step COMMAND`, `file PATH TEXT` or `line PATH TEXT`. Keys of the guide are
/// `@TARGET_KEY@` and `@HOST_KEY@`.
///
/// # Panics
/// The guide has no such section, or a block of an unknown language there.
#[must_use]
pub fn typed(sections: &[(&str, usize)]) -> String {
    let mut script = String::new();
    for (section, count) in sections {
        for block in blocks(section).iter().take(*count) {
            script += &steps(block);
        }
    }
    let shown: Vec<&str> =
        blocks("Keys")[0].lines.iter().copied().filter(|line| line.starts_with("rblk1:")).collect();
    assert_eq!(shown.len(), KEYS.len(), "the guide shows a key of each end: {shown:?}");
    for (shown, key) in shown.into_iter().zip(KEYS) {
        script = script.replace(shown, &format!("@{key}@"));
    }
    script
}

/// The blocks of a section, up to the next heading of any depth.
fn blocks(heading: &str) -> Vec<Block> {
    let is_it =
        |line: &str| line.starts_with('#') && line.trim_start_matches('#').trim() == heading;
    let mut lines = GUIDE.lines().skip_while(|line| !is_it(line));
    assert!(lines.next().is_some(), "the guide has no section {heading}");
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for line in lines {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(language), None) => open = Some(Block { language, lines: Vec::new() }),
            (None, Some(block)) => block.lines.push(line),
            (None, None) if line.starts_with('#') => break,
            (None, None) => {}
        }
    }
    blocks
}

/// The command of a line with a prompt.
fn command_of(line: &str) -> Option<&str> {
    ["store1# ", "client1# "].into_iter().find_map(|prompt| line.strip_prefix(prompt))
}

/// The commands and files of a block, as a script. Files begin with their path.
fn steps(block: &Block) -> String {
    let mut script = String::new();
    let mut command = |text: &str| writeln!(script, "step {}", shell_word(text)).expect("a string");
    match block.language {
        "sh" => block.lines.iter().for_each(|line| command(line)),
        "console" => block.lines.iter().filter_map(|line| command_of(line)).for_each(command),
        "toml" => {
            let path = block.lines[0].strip_prefix("# ").expect("a path");
            let text = block.lines.join("\n");
            writeln!(script, "file {path} {}", shell_word(&text)).expect("a string");
        }
        "text" => {
            let line = block.lines.join("\n");
            writeln!(script, "line /etc/fstab {}", shell_word(&line)).expect("a string");
        }
        other => panic!("a block of {other} in the guide"),
    }
    script
}

/// A word of the shell with these bytes.
#[must_use]
pub fn shell_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
