//! Comments that are too wide to be read beside other code.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Columns that a line with a comment alone may have.
const COLUMNS_MAX: usize = 100;
/// Most lines that an error names.
const NAMED_MAX: usize = 20;

/// Checks the comments of every Rust file below `root`, but not what is built.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut wide = Vec::new();
    for file in rust_files(root)? {
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let name = file.strip_prefix(root).unwrap_or(&file).display().to_string();
        wide.extend(wide_lines(&text).map(|line| format!("{name}:{line}")));
    }
    if wide.is_empty() {
        return Ok(());
    }
    let named = wide.len().min(NAMED_MAX);
    bail!(
        "{} comment lines are wider than {COLUMNS_MAX} columns; wrap them:\n{}",
        wide.len(),
        wide[..named].join("\n")
    )
}

/// Numbers of the lines with a comment alone that are too wide.
fn wide_lines(text: &str) -> impl Iterator<Item = usize> {
    let is_wide =
        |line: &str| line.trim_start().starts_with("//") && line.chars().count() > COLUMNS_MAX;
    (1..).zip(text.lines()).filter(move |(_, line)| is_wide(line)).map(|(number, _)| number)
}

/// Every Rust file below a directory. Hidden directories hold what is built, and git.
pub(super) fn rust_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        let entries = fs::read_dir(&directory).with_context(|| directory.display().to_string())?;
        for entry in entries {
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            if kind.is_dir() && !is_hidden {
                directories.push(path);
            } else if kind.is_file() && path.extension().is_some_and(|e| e == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_wide_comments_are_found() {
        let at = |prefix: &str, columns: usize| format!("{prefix}{}\n", "x".repeat(columns));
        let text = [
            at("// ", 97),
            at("// ", 98),
            at("    /// ", 93),
            at("let text = ", 200),
            // Columns, not bytes.
            format!("// {}\n", "\u{fc}".repeat(97)),
            at("//! ", 97),
        ];
        assert_eq!(wide_lines(&text.concat()).collect::<Vec<_>>(), [2, 3, 6]);
    }

    #[test]
    fn what_is_built_is_not_looked_at() {
        let directory = tempfile::tempdir().unwrap();
        let wide = format!("// {}\n", "x".repeat(100));
        fs::create_dir_all(directory.path().join(".build/a")).unwrap();
        fs::write(directory.path().join(".build/a/b.rs"), &wide).unwrap();
        fs::write(directory.path().join("notes.txt"), &wide).unwrap();
        check(directory.path()).unwrap();
        fs::create_dir(directory.path().join("src")).unwrap();
        fs::write(directory.path().join("src/lib.rs"), &wide).unwrap();
        let error = check(directory.path()).unwrap_err().to_string();
        assert!(error.contains("1 comment") && error.contains("src/lib.rs:1"), "{error}");
    }
}
