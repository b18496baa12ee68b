//! docs/keys.md has every key with its default, docs/commands.md every flag, docs/reference.md
//! every exit code, and no document names an unknown flag.

use std::collections::BTreeSet;

use clap::{Command, CommandFactory};
use rblk_config::{Exit, HostConfig, MountConfig, Schema, TargetConfig, VolumeConfig};

use crate::markdown::{Document, code_spans};

/// Flags of other programs, and of every program, in documents.
const OF_OTHERS: [&str; 10] = [
    "--features",
    "--help",
    "--version",
    // Flags of podman.
    "--device",
    "--network",
    "--pid",
    "--pid=host",
    "--secret",
    "--tmpfs",
    "--ulimit",
];

pub(crate) fn faults(documents: &[Document]) -> Vec<String> {
    let keys = Document::read("docs/keys.md");
    let mut faults = Vec::new();
    for (heading, schema) in [
        ("## Keys of the target", TargetConfig::keys()),
        ("## Keys of a volume", VolumeConfig::keys()),
        ("## Keys of a host", HostConfig::keys()),
        ("## Keys of a mount", MountConfig::keys()),
    ] {
        let rows = keys.rows(heading);
        faults.extend(key_faults(&rows, schema).map(|why| format!("{heading}: {why}")));
    }
    let reference = Document::read("docs/reference.md");
    let codes: Vec<Vec<String>> = reference.rows("## Exit codes").into_iter().skip(1).collect();
    if codes != Exit::ALL.map(|exit| vec![exit.code().to_string(), exit.to_string()]) {
        faults.push(format!("## Exit codes: {codes:?}"));
    }
    faults.extend(flag_faults(&Document::read("docs/commands.md"), documents));
    faults
}

fn key_faults(rows: &[Vec<String>], schema: &Schema) -> impl Iterator<Item = String> + use<> {
    let said: Vec<(&str, &str)> = rows
        .iter()
        .skip(1)
        .filter_map(|row| Some((row.first()?.trim_matches('`'), row.get(1)?.trim_matches('`'))))
        .collect();
    let mut faults = Vec::new();
    for key in schema.keys() {
        let default = match schema.default_of(key) {
            _ if key.required => "required".to_owned(),
            None => "absent".to_owned(),
            Some(value) => value.as_str().map_or_else(|| value.to_string(), str::to_owned),
        };
        match said.iter().find(|(name, _)| *name == key.name) {
            None => faults.push(format!("`{}` is missing", key.name)),
            Some((name, said)) if *said != default => {
                faults.push(format!("`{name}`: default {said}, it is {default}"));
            }
            Some(_) => {}
        }
    }
    let is_known = |name: &str| schema.key(name).is_some();
    let unknown = said.iter().filter(|(name, _)| !is_known(name));
    faults.extend(unknown.map(|(name, _)| format!("there is no key `{name}`")));
    faults.into_iter()
}

fn flag_faults(commands: &Document, documents: &[Document]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut served = BTreeSet::new();
    flags(&rblk_operate::target::flags::Cli::command(), &mut served);
    flags(&rblk_operate::mount::flags::Cli::command(), &mut served);
    let described: BTreeSet<String> =
        flags_in(commands).into_iter().map(|(_, flag)| flag).collect();
    let missing = served.difference(&described);
    faults.extend(missing.map(|flag| format!("{}: {flag} is missing", commands.path)));

    let mut known = served;
    flags(&rblk_bench::args::Cli::command(), &mut known);
    for document in documents {
        for (number, flag) in flags_in(document) {
            let others = OF_OTHERS.contains(&flag.as_str());
            if !known.contains(&flag) && !others {
                faults.push(format!("{}:{number}: no program has {flag}", document.path));
            }
        }
    }
    faults
}

/// The flags in a program's help.
fn flags(command: &Command, found: &mut BTreeSet<String>) {
    for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
        let names = argument.get_long_and_visible_aliases().unwrap_or_default();
        found.extend(names.iter().map(|name| format!("--{name}")));
    }
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
    commands.for_each(|command| flags(command, found));
}

/// Flags between backticks, alone or with a value.
fn flags_in(document: &Document) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in document.prose() {
        for span in code_spans(line).into_iter().filter(|span| span.starts_with("--")) {
            let end = span.find([' ', '=']).unwrap_or(span.len());
            found.push((number, span[..end].to_owned()));
        }
    }
    found
}

#[test]
fn a_wrong_key_or_flag_is_a_fault() {
    let row = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
    let rows = [row(&["key", "default"]), row(&["`lease`", "`31s`"]), row(&["`lese`", "absent"])];
    let faults: Vec<String> = key_faults(&rows, TargetConfig::keys()).collect();
    assert!(faults.contains(&"`lease`: default 31s, it is 30s".to_owned()), "{faults:?}");
    assert!(faults.contains(&"`arena` is missing".to_owned()));
    assert!(faults.contains(&"there is no key `lese`".to_owned()));

    let text = "`--arena SIZE` and `--areena=1`".to_owned();
    let document = Document { path: "x.md".to_owned(), text };
    let faults = flag_faults(&document, std::slice::from_ref(&document));
    assert!(faults.contains(&"x.md:1: no program has --areena".to_owned()));
    assert!(faults.contains(&"x.md: --lease is missing".to_owned()));
    assert!(!faults.contains(&"x.md: --arena is missing".to_owned()));
}
