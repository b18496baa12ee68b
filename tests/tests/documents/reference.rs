//! docs/keys.md has every key with its default, docs/commands.md every flag, docs/reference.md
//! every exit code, and no document names an unknown flag.

use std::collections::BTreeSet;

use clap::{Command, CommandFactory};
use rblk_config::{ByteSize, Exit, HostConfig, MountConfig, Schema, TargetConfig, VolumeConfig};

use crate::markdown::{Document, code_spans};

/// Flags of other programs, and of every program, in documents.
const OF_OTHERS: [&str; 3] = ["--features", "--help", "--version"];

pub(crate) fn faults(documents: &[Document]) -> Vec<String> {
    let keys = Document::read("docs/keys.md");
    let target = TargetConfig::default().dump().expect("the defaults");
    let mount = MountConfig::default().dump().expect("the defaults");
    let mut faults = Vec::new();
    for (heading, schema, dumps) in [
        ("## Keys of the target", TargetConfig::keys(), vec![target]),
        ("## Keys of a volume", VolumeConfig::keys(), volumes()),
        ("## Keys of a host", HostConfig::schema(), vec![host()]),
        ("## Keys of a mount", MountConfig::keys(), vec![mount]),
    ] {
        let rows = keys.rows(heading);
        faults.extend(key_faults(&rows, schema, &dumps).map(|why| format!("{heading}: {why}")));
    }
    let reference = Document::read("docs/reference.md");
    let codes: Vec<Vec<String>> = reference.rows("## Exit codes").into_iter().skip(1).collect();
    if codes != Exit::ALL.map(|exit| vec![exit.code().to_string(), exit.to_string()]) {
        faults.push(format!("## Exit codes: {codes:?}"));
    }
    faults.extend(flag_faults(&Document::read("docs/commands.md"), documents));
    faults
}

/// Defaults of volumes: a key that some of them lack has none.
fn volumes() -> Vec<String> {
    let of = |volume: VolumeConfig| {
        let config = TargetConfig { volumes: vec![volume], ..TargetConfig::default() };
        let dump = config.dump().expect("a volume");
        dump.split("[[volume]]").nth(1).unwrap_or_default().to_owned()
    };
    vec![of(VolumeConfig::file("v", "/v")), of(VolumeConfig::null("v", ByteSize(4096)))]
}

/// Defaults of a host.
fn host() -> String {
    let host = HostConfig::new("h", Vec::new(), Vec::new());
    let config = TargetConfig { hosts: vec![host], ..TargetConfig::default() };
    config.dump().expect("a host").split("[[host]]").nth(1).unwrap_or_default().to_owned()
}

fn key_faults(
    rows: &[Vec<String>],
    schema: &Schema,
    dumps: &[String],
) -> impl Iterator<Item = String> {
    let said: Vec<(&str, &str)> = rows
        .iter()
        .skip(1)
        .filter_map(|row| Some((row.first()?.trim_matches('`'), row.get(1)?.trim_matches('`'))))
        .collect();
    let mut faults = Vec::new();
    for key in schema.keys {
        let default = default_of(key.name, key.required, dumps);
        match said.iter().find(|(name, _)| *name == key.name) {
            None => faults.push(format!("`{}` is missing", key.name)),
            Some((name, said)) if *said != default => {
                faults.push(format!("`{name}`: default {said}, it is {default}"));
            }
            Some(_) => {}
        }
    }
    let is_known = |name: &str| schema.keys.iter().any(|key| key.name == name);
    let unknown = said.iter().filter(|(name, _)| !is_known(name));
    faults.extend(unknown.map(|(name, _)| format!("there is no key `{name}`")));
    faults.into_iter()
}

fn default_of(name: &str, required: bool, dumps: &[String]) -> String {
    if required {
        return "required".to_owned();
    }
    let value = |dump: &String| {
        let mut lines = dump.lines().filter_map(|line| line.split_once(" = "));
        lines.find(|(key, _)| *key == name).map(|(_, value)| value.trim_matches('"').to_owned())
    };
    let values: Option<Vec<String>> = dumps.iter().map(value).collect();
    values.and_then(|values| values.first().cloned()).unwrap_or_else(|| "absent".to_owned())
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
    let dump = TargetConfig::default().dump().unwrap();
    let faults: Vec<String> = key_faults(&rows, TargetConfig::keys(), &[dump]).collect();
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
