//! Source files that the documents name.

use std::path::Path;

use crate::markdown::{Document, code_spans, root};

/// File names in the documents that the repository lacks.
pub(crate) fn faults(documents: &[Document]) -> Vec<String> {
    let mut files = Vec::new();
    find(&root(), "", &mut files);
    let mut faults = Vec::new();
    let mut checked = 0;
    for document in documents {
        for (number, line) in document.prose() {
            for name in names(line) {
                checked += 1;
                if !files.iter().any(|file| is_named(file, &name)) {
                    faults.push(format!("{}:{number}: there is no {name}", document.path));
                }
            }
        }
    }
    assert!(checked > 300, "only {checked} names of source files were found");
    faults
}

/// Whether this name identifies a file: its whole path, or the end of it.
fn is_named(file: &str, name: &str) -> bool {
    file.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
}

/// The source files that a line names, with `a/{b,c}.rs` as two.
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

/// Every source file below a folder, by its path in the repository.
fn find(at: &Path, prefix: &str, files: &mut Vec<String>) {
    let entries = std::fs::read_dir(at).unwrap_or_else(|e| panic!("{}: {e}", at.display()));
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') {
            continue;
        }
        let path = format!("{prefix}{name}");
        if entry.path().is_dir() {
            find(&entry.path(), &format!("{path}/"), files);
        } else if name.ends_with(".rs") {
            files.push(path);
        }
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
