//! Source files and folders that the documents name, and source files that comments name.

use std::fs;
use std::path::Path;

use crate::markdown::{Document, code_spans, root};

/// Names in the documents of files and folders that the repository lacks.
pub(crate) fn faults(documents: &[Document]) -> Vec<String> {
    let tree = Tree::of_repository();
    let mut faults = Vec::new();
    let mut checked = 0;
    for document in documents {
        for (number, line) in document.prose() {
            let (files, folders) = (names(line), tree.folder_names(line));
            checked += files.len();
            for name in tree.missing(files).chain(tree.missing_folders(folders)) {
                faults.push(format!("{}:{number}: there is no {name}", document.path));
            }
        }
    }
    assert!(checked > 300, "only {checked} names of source files were found");
    faults
}

/// Names in comments of source files that the repository lacks.
pub(crate) fn comment_faults() -> Vec<String> {
    let tree = Tree::of_repository();
    let mut faults = Vec::new();
    let mut checked = 0;
    for path in &tree.files {
        let text = fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        for (at, line) in text.lines().enumerate() {
            let files = comment(line).map(names).unwrap_or_default();
            checked += files.len();
            for name in tree.missing(files) {
                faults.push(format!("{path}:{}: there is no {name}", at + 1));
            }
        }
    }
    assert!(checked > 50, "only {checked} names of source files were found");
    faults
}

/// The words of a line that is a comment alone.
fn comment(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("//")
}

/// The source files of the repository, and its folders.
struct Tree {
    files: Vec<String>,
    // Each ends with a slash.
    folders: Vec<String>,
}

impl Tree {
    fn of_repository() -> Self {
        let mut tree = Self { files: Vec::new(), folders: Vec::new() };
        tree.add(&root(), "");
        tree
    }

    fn add(&mut self, at: &Path, prefix: &str) {
        let entries = fs::read_dir(at).unwrap_or_else(|e| panic!("{}: {e}", at.display()));
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with('.') {
                continue;
            }
            let path = format!("{prefix}{name}");
            if entry.path().is_dir() {
                let folder = format!("{path}/");
                self.add(&entry.path(), &folder);
                self.folders.push(folder);
            } else if name.ends_with(".rs") {
                self.files.push(path);
            }
        }
    }

    fn missing(&self, names: Vec<String>) -> impl Iterator<Item = String> {
        names.into_iter().filter(|name| !self.files.iter().any(|file| is_named(file, name)))
    }

    fn missing_folders(&self, names: Vec<String>) -> impl Iterator<Item = String> {
        names.into_iter().filter(|name| !self.folders.iter().any(|folder| is_named(folder, name)))
    }

    /// The paths of folders that a line names: `target/src/cache/`. A path of another tree begins
    /// with a name that no folder here has. Capitals stand for any name.
    fn folder_names(&self, line: &str) -> Vec<String> {
        let spans = code_spans(line).into_iter();
        let paths = spans.filter(|span| {
            let first = span.split_inclusive('/').next().unwrap_or_default();
            span.ends_with('/')
                && first.len() < span.len()
                && !span.contains(|c: char| c == ' ' || c.is_uppercase())
                && self.folders.iter().any(|folder| is_named(folder, first))
        });
        paths.flat_map(expanded).collect()
    }
}

/// Whether this name identifies a file: its whole path, or the end of it.
fn is_named(file: &str, name: &str) -> bool {
    file.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
}

/// The source files that a line names. Braces hold several names.
fn names(line: &str) -> Vec<String> {
    let files = code_spans(line).into_iter().filter(|span| span.ends_with(".rs"));
    files.filter(|file| !file.contains([' ', '*', '<'])).flat_map(expanded).collect()
}

fn expanded(span: &str) -> Vec<String> {
    match span.split_once('{').and_then(|(head, rest)| Some((head, rest.split_once('}')?))) {
        Some((head, (list, tail))) => {
            list.split(',').map(|one| format!("{head}{one}{tail}")).collect()
        }
        None => vec![span.to_owned()],
    }
}

#[test]
fn a_file_that_is_not_there_is_a_fault() {
    assert_eq!(
        names("see `a/{b,c}.rs`, `d.rs` and `e f.rs`; `g.toml`"),
        ["a/b.rs", "a/c.rs", "d.rs"]
    );
    assert!(is_named("target/src/cache/read_job.rs", "cache/read_job.rs"));
    assert!(is_named("target/src/cache/read_job.rs", "target/src/cache/read_job.rs"));
    assert!(!is_named("target/src/cache/thread.rs", "read.rs"));
    let text = "`cache/read_job.rs` and `cache/no_such_file.rs`\n".repeat(200);
    let found = faults(&[Document { path: "docs/x.md".to_owned(), text }]);
    assert_eq!(found.len(), 200);
    assert_eq!(found[0], "docs/x.md:1: there is no cache/no_such_file.rs");
}

#[test]
fn a_folder_that_is_not_there_is_a_fault() {
    let line =
        "`target/src/{cache,poll_group}/`, `drivers/block/`, `bench/results/NAME/`, `cache/`";
    let tree = Tree::of_repository();
    let named = tree.folder_names(line);
    assert_eq!(named, ["target/src/cache/", "target/src/poll_group/"]);
    assert_eq!(tree.missing_folders(named).collect::<Vec<_>>(), ["target/src/poll_group/"]);
}

#[test]
fn a_comment_is_a_line_of_its_own() {
    assert_eq!(comment("    /// See `a.rs`."), Some("/ See `a.rs`."));
    assert_eq!(comment("let path = \"a.rs\"; // `b.rs`"), None);
}
