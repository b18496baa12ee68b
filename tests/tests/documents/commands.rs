//! Command lines: the programs' own parsers accept them, and make valid configurations.

use clap::Parser;
use clap::error::ErrorKind;

use crate::markdown::{Block, Document, code_spans};

/// The programs with checked command lines.
const PROGRAMS: [&str; 3] = ["rblk-target", "rblk-initiator", "rblk-bench"];

pub(crate) fn faults(documents: &[Document]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut checked = 0;
    for document in documents {
        for block in document.blocks(&["sh", "console"]) {
            for words in commands(&block) {
                checked += 1;
                faults.extend(fault(&words).map(|fault| format!("{}: {fault}", block.place)));
            }
        }
        for (number, line) in document.prose() {
            let spans = code_spans(line).into_iter().filter_map(in_prose_fault);
            faults.extend(spans.map(|fault| format!("{}:{number}: {fault}", document.path)));
        }
    }
    assert!(checked > 40, "only {checked} commands were found");
    faults
}

/// The command after the prompt, in a line of a block of the language `console`.
pub(crate) fn typed(line: &str) -> Option<&str> {
    let (prompt, command) = line.split_once(' ')?;
    let host = prompt.strip_suffix(['#', '$'])?;
    host.chars().all(char::is_alphanumeric).then_some(command.trim_start())
}

/// The commands of the programs in a block, as words.
fn commands(block: &Block) -> Vec<Vec<String>> {
    let text = block.lines.join("\n").replace("\\\n", " ");
    let lines = text.lines().filter_map(|line| match block.language.as_str() {
        "console" => typed(line),
        _ => Some(typed(line).unwrap_or(line)),
    });
    let parts = lines.flat_map(|line| line.split("&&").flat_map(|part| part.split([';', '|'])));
    parts.filter_map(of_program).collect()
}

/// The words of a command of one of the programs, without the words before its name, redirections,
/// and quotes.
fn of_program(command: &str) -> Option<Vec<String>> {
    let is_after = |word: &String| word.starts_with(['#', '>']) || word == "&";
    let words = split(command).into_iter().take_while(|word| !is_after(word));
    let is_before = |word: &String| word == "sudo" || word.contains('=');
    let words: Vec<String> = words.skip_while(is_before).collect();
    PROGRAMS.contains(&words.first()?.as_str()).then_some(words)
}

/// The words of a command as a shell splits them, without the single quotes.
fn split(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for (at, part) in command.split('\'').enumerate() {
        let is_quoted = at % 2 == 1;
        let mut pieces = part.split(|c: char| c.is_whitespace() && !is_quoted);
        let last = words.last_mut().unwrap_or_else(|| unreachable!("there is one"));
        last.push_str(pieces.next().unwrap_or_default());
        words.extend(pieces.map(str::to_owned));
    }
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn a_quoted_word_is_one() {
    assert_eq!(split("a  'b c'=d 'e' f"), ["a", "b c=d", "e", "f"]);
}

/// The error of a complete command line.
fn fault(words: &[String]) -> Option<String> {
    let said = words.join(" ");
    let result = match words[0].as_str() {
        "rblk-target" => target(words),
        "rblk-initiator" => initiator(words),
        _ => rblk_bench::args::Cli::try_parse_from(words).map(drop).map_err(|e| e.to_string()),
    };
    result.err().map(|error| format!("`{said}`: {error}"))
}

fn target(words: &[String]) -> Result<(), String> {
    use rblk_operate::target::flags::{Cli, Command};
    match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
        // The file is missing here.
        Command::Serve(args) if args.config.is_none() => {
            args.configuration(true).map(drop).map_err(|error| format!("{error:#}"))
        }
        _ => Ok(()),
    }
}

fn initiator(words: &[String]) -> Result<(), String> {
    use rblk_operate::mount::flags::{Cli, Command};
    match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
        Command::Mount(args) if args.config.is_none() => {
            args.configuration().map(drop).map_err(|error| error.to_string())
        }
        _ => Ok(()),
    }
}

/// The error of a command in the text. Words in capitals stand for values, and the rest may be left
/// out.
fn in_prose_fault(span: &str) -> Option<String> {
    let is_value = |word: &str| word.chars().all(|c| c.is_ascii_uppercase());
    let words = of_program(span).filter(|words| words.len() > 1 && !is_value(&words[1]))?;
    let error = match words[0].as_str() {
        "rblk-target" => rblk_operate::target::flags::Cli::try_parse_from(&words).err(),
        "rblk-initiator" => rblk_operate::mount::flags::Cli::try_parse_from(&words).err(),
        _ => rblk_bench::args::Cli::try_parse_from(&words).err(),
    }?;
    let is_fault = matches!(
        error.kind(),
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand | ErrorKind::ArgumentConflict
    );
    is_fault.then(|| format!("`{span}`: {error}"))
}

#[test]
fn a_wrong_command_line_is_a_fault() {
    let fault = |command: &str| of_program(command).and_then(|words| fault(&words));
    for right in [
        "sudo rblk-target serve --file vol0=/srv/vol0.img   # a remark",
        "A=b rblk-initiator mount 192.0.2.1 vol0",
        "mkfs.ext4 --whatever /dev/ublkb0",
        "rblk-target serve --file 'vol0=/srv/vol0.img' >/srv/log 2>&1 &",
    ] {
        assert_eq!(fault(right), None);
    }
    for wrong in [
        "rblk-target serve --files vol0=/srv/vol0.img",
        "rblk-target serve --file vol0",
        "rblk-target serve --memory a=1GB",
        "rblk-target statsu",
        "rblk-initiator mount 192.0.2.1",
        "rblk-initiator mount 192.0.2.1 vol0 --queues 64",
        "rblk-initiator mount 192.0.2.1 vol0 --shared --retain 64MiB",
        "rblk-bench compare --rounds 0",
    ] {
        assert!(fault(wrong).is_some(), "{wrong}");
    }
    assert!(in_prose_fault("rblk-target check --config FILE").is_none());
    assert!(in_prose_fault("rblk-initiator mount --foreground").is_none());
    assert!(in_prose_fault("rblk-initiator mount --no-such-flag").is_some());
    assert_eq!(typed("store1# rblk-target drain"), Some("rblk-target drain"));
    assert_eq!(typed("rblk-target: no target answers"), None);
}
