//! [`typed`], [`walk`] and [`layers`]: what docs/install.md, README.md and docs/layers.md say, as
//! scripts, word by word. [`FUNCTIONS`] are the commands of these scripts. [`first_image`] and
//! [`take_over`]: what docs/ceph.md says and shows.

use std::fmt::Write;

/// Functions of bash: the commands `step`, `file` and `line`.
pub const FUNCTIONS: &str = include_str!("typed.sh");
const GUIDE: &str = include_str!("../../docs/install.md");
const README: &str = include_str!("../../README.md");
const LAYERS: &str = include_str!("../../docs/layers.md");
const CEPH: &str = include_str!("../../docs/ceph.md");
/// The sections of docs/layers.md with commands, and their names in a script.
const RECIPES: [(&str, &str); 6] = [
    ("LUKS on the disk of a mount", "luks"),
    ("LVM on the disk of a mount", "lvm"),
    ("RAID 1 of two targets", "raid"),
    ("A local disk as cache", "cache"),
    ("dm-crypt below the target", "crypt"),
    ("VDO below the target", "vdo"),
];
/// The keys in the guide, in the order of the commands that show them.
const KEYS: [&str; 2] = ["TARGET_KEY", "HOST_KEY"];
/// The prompts of the hosts.
const HOSTS: [&str; 3] = ["store1", "store2", "client1"];

/// A block of code of a document: its language and its lines.
struct Block {
    language: &'static str,
    lines: Vec<&'static str>,
}

/// Commands and files of the first blocks of some sections of docs/install.md, each section with
/// the number of blocks.
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
        for block in blocks(GUIDE, section).iter().take(*count) {
            script += &steps(block);
        }
    }
    with_names_of_keys(script)
}

/// The commands of README.md that make a file system on a volume, from the installation on.
///
/// A line is `at HOST COMMAND`. The host is `store1` or `client1`. Keys are as in [`typed`].
///
/// # Panics
/// README.md has no such commands, or a key that the guide does not show.
#[must_use]
pub fn walk() -> String {
    let mut script = String::new();
    for block in blocks(README, "Two hosts") {
        for (host, command) in block.lines.iter().filter_map(|line| prompted(line)) {
            writeln!(script, "at {host} {}", shell_word(command)).expect("a string");
        }
    }
    let script = with_names_of_keys(script);
    assert!(script.contains("at client1 'mount "), "README.md mounts nothing:\n{script}");
    assert!(!script.contains("rblk1:"), "a key of nobody:\n{script}");
    script
}

/// The recipes of docs/layers.md, as functions of bash: `luks_1` is the first block of commands of
/// the section about LUKS.
///
/// # Panics
/// The page has another section with commands, or none for a name.
#[must_use]
pub fn layers() -> String {
    let mut script = String::new();
    let mut count = 0;
    for (section, name) in RECIPES {
        let recipe = blocks(LAYERS, section).into_iter().filter(|block| block.language == "sh");
        for (at, block) in (1..).zip(recipe) {
            count += 1;
            write!(script, "{name}_{at}() {{\n{}}}\n", steps(&block)).expect("a string");
        }
    }
    assert_eq!(count, LAYERS.matches("\n```sh\n").count(), "a section without a name");
    script
}

/// A command of a document, and what the document says that it prints.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The command, without its prompt.
    pub command: String,
    /// The lines.
    pub output: Vec<&'static str>,
}

/// The commands of docs/ceph.md that make the first volume.
#[must_use]
pub fn first_image() -> Vec<String> {
    let commands = blocks(CEPH, "The first volume").into_iter();
    let commands = commands.filter(|block| block.language == "sh").flat_map(|block| block.lines);
    let text = commands.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    text.lines().map(str::to_owned).collect()
}

/// The samples of docs/ceph.md of a take-over, in their order.
#[must_use]
pub fn take_over() -> Vec<Sample> {
    let lines = blocks(CEPH, "A take-over").into_iter().flat_map(|block| block.lines);
    let mut samples: Vec<Sample> = Vec::new();
    for line in lines {
        if let Some((_, command)) = prompted(line) {
            samples.push(Sample { command: command.to_owned(), output: Vec::new() });
        } else if let Some(sample) = samples.last_mut() {
            sample.output.push(line);
        }
    }
    samples
}

/// A script with the names of keys in the place of the keys that the guide shows.
fn with_names_of_keys(mut script: String) -> String {
    let keys = &blocks(GUIDE, "Keys")[0];
    let shown: Vec<&str> =
        keys.lines.iter().copied().filter(|line| line.starts_with("rblk1:")).collect();
    assert_eq!(shown.len(), KEYS.len(), "the guide shows a key of each end: {shown:?}");
    for (shown, key) in shown.into_iter().zip(KEYS) {
        script = script.replace(shown, &format!("@{key}@"));
    }
    script
}

/// The blocks of a section, up to the next heading of any depth.
fn blocks(document: &'static str, heading: &str) -> Vec<Block> {
    let is_it =
        |line: &str| line.starts_with('#') && line.trim_start_matches('#').trim() == heading;
    let mut lines = document.lines().skip_while(|line| !is_it(line));
    assert!(lines.next().is_some(), "there is no section {heading}");
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

/// The host and the command of a line with a prompt.
fn prompted(line: &str) -> Option<(&str, &str)> {
    let (host, command) = line.split_once("# ")?;
    HOSTS.contains(&host).then_some((host, command))
}

/// The commands and files of a block, as a script. Files begin with their path.
fn steps(block: &Block) -> String {
    let mut script = String::new();
    let mut command = |text: &str| writeln!(script, "step {}", shell_word(text)).expect("a string");
    match block.language {
        "sh" => block.lines.iter().for_each(|line| command(line)),
        "console" => {
            let prompted = block.lines.iter().filter_map(|line| prompted(line));
            prompted.for_each(|(_, text)| command(text));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The most commands from the packages to a mounted file system, at both hosts together.
    const COMMANDS_MAX: usize = 8;

    #[test]
    fn every_recipe_can_be_made_and_taken_away() {
        let script = layers();
        for (_, name) in RECIPES {
            for at in [1, 2] {
                let function = format!("{name}_{at}() {{\nstep '");
                assert!(script.contains(&function), "{name} {at} is not in:\n{script}");
            }
        }
    }

    #[test]
    fn the_first_five_minutes_are_eight_commands() {
        let script = walk();
        let commands: Vec<&str> = script.lines().collect();
        assert!(commands.len() <= COMMANDS_MAX, "{} commands:\n{script}", commands.len());
        for part in [
            "at store1 'apt install ./rblk-target_*.deb'",
            "at client1 'apt install ./rblk-initiator_*.deb'",
            "--host client1=@HOST_KEY@",
            "--target-key @TARGET_KEY@",
            "at client1 'mkfs.ext4 ",
        ] {
            assert!(script.contains(part), "{part} is not in:\n{script}");
        }
    }
}
