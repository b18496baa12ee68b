//! Names that stand more than once: of files, which are found by name, and of types.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};

use super::Source;

/// Names that each crate or directory has.
const EVERYWHERE: [&str; 5] = ["mod.rs", "lib.rs", "main.rs", "error.rs", "build.rs"];

/// The file names of the product that stand more than once, and how often.
pub(super) fn files(sources: &[Source]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for source in sources.iter().filter(|source| source.is_product()) {
        if !EVERYWHERE.contains(&source.name()) {
            *counts.entry(source.name()).or_default() += 1;
        }
    }
    counts.retain(|_, count| *count > 1);
    counts
}

/// What differs between the list of exceptions and the tree.
pub(super) fn broken(list: &str, files: &BTreeMap<&str, usize>) -> Result<Vec<String>> {
    let known = parse(list)?;
    println!("file names that stand more than once: {} (known {})", files.len(), known.len());
    let mut broken = Vec::new();
    for (name, count) in files {
        let most = known.get(name).copied().unwrap_or(1);
        if *count > most {
            broken.push(format!("{name} stands {count} times, and at most {most} are allowed"));
        }
    }
    for (name, most) in known {
        let count = files.get(name).copied().unwrap_or(1);
        if count < most {
            broken.push(format!(
                "{name} stands {count} times and not {most}: `cargo xtask house --write` shortens \
                 the list of exceptions"
            ));
        }
    }
    Ok(broken)
}

/// The list of exceptions without those that are none any more. It never grows.
pub(super) fn shrunk(list: &str, files: &BTreeMap<&str, usize>) -> Result<String> {
    let mut text = String::new();
    for (name, most) in parse(list)? {
        if let Some(count) = files.get(name) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{} {name}", most.min(*count));
        }
    }
    Ok(text)
}

/// Lines of a count and a name.
fn parse(list: &str) -> Result<BTreeMap<&str, usize>> {
    let line = |line: &'_ str| -> Option<(usize, usize)> {
        let (count, name) = line.split_once(' ')?;
        Some((count.parse().ok()?, name.len()))
    };
    list.lines()
        .map(|text| {
            let (count, length) =
                line(text).with_context(|| format!("`{text}` is no exception"))?;
            Ok((&text[text.len() - length..], count))
        })
        .collect()
}

/// The types that are defined more than once.
pub(super) fn types<'a>(product: &[&'a Source]) -> BTreeSet<&'a str> {
    let mut places: BTreeMap<&str, BTreeSet<&Path>> = BTreeMap::new();
    for source in product {
        for name in source.text.lines().filter_map(defined) {
            places.entry(name).or_default().insert(&source.path);
        }
    }
    places.into_iter().filter(|(_, files)| files.len() > 1).map(|(name, _)| name).collect()
}

/// The type that a line defines.
fn defined(line: &str) -> Option<&str> {
    let mut rest = line.trim_start();
    if let Some(after) = rest.strip_prefix("pub") {
        rest = match after.strip_prefix('(') {
            Some(scope) => scope.split_once(')')?.1,
            None => after,
        };
        rest = rest.strip_prefix(' ')?.trim_start();
    }
    let (word, name) = rest.split_once(' ')?;
    let is_type = matches!(word, "struct" | "enum" | "trait" | "union");
    let name = name.trim_start();
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    (is_type && end > 0).then(|| &name[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.into(), text: text.to_owned() }
    }

    #[test]
    fn a_list_of_exceptions_only_shrinks() {
        let sources = [
            source("target/src/a/x.rs", ""),
            source("fabric/src/x.rs", ""),
            source("fabric/src/y.rs", ""),
            source("fabric/src/mod.rs", ""),
            source("target/src/mod.rs", ""),
        ];
        let files = files(&sources);
        assert_eq!(files.iter().collect::<Vec<_>>(), [(&"x.rs", &2)]);
        assert!(broken("2 x.rs\n", &files).unwrap().is_empty());
        assert!(broken("", &files).unwrap()[0].contains("x.rs stands 2 times"));
        assert!(broken("3 x.rs\n", &files).unwrap()[0].contains("shortens"));
        assert!(broken("2 x.rs\n2 y.rs\n", &files).unwrap()[0].starts_with("y.rs stands 1"));
        assert_eq!(shrunk("3 x.rs\n2 y.rs\n", &files).unwrap(), "2 x.rs\n");
        assert_eq!(shrunk("", &files).unwrap(), "");
        assert!(broken("x.rs\n", &files).is_err());
    }

    #[test]
    fn types_are_found_where_they_are_defined() {
        for (line, name) in [
            ("pub(crate) struct Queue<T> {", Some("Queue")),
            ("    enum Kind {", Some("Kind")),
            ("pub trait Store: Send {", Some("Store")),
            ("struct Unit;", Some("Unit")),
            ("// struct Told", None),
            ("let structure = 1;", None),
        ] {
            assert_eq!(defined(line), name, "{line}");
        }
        let sources = [source("a/b.rs", "struct A;\nstruct B;\n"), source("a/c.rs", "enum A {}\n")];
        assert_eq!(types(&sources.iter().collect::<Vec<_>>()), BTreeSet::from(["A"]));
    }
}
