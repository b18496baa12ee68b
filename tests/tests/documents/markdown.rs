//! The part of Markdown that the project's documents use.

use std::fs;
use std::path::{Path, PathBuf};

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the repository")
}

/// One Markdown file.
pub(crate) struct Document {
    /// Its path in the repository.
    pub(crate) path: String,
    /// Its text.
    pub(crate) text: String,
}

/// A fenced block.
pub(crate) struct Block {
    /// `PATH:LINE` of its first line.
    pub(crate) place: String,
    /// The word after the fence.
    pub(crate) language: String,
    /// Its lines, without the indentation of the fence.
    pub(crate) lines: Vec<String>,
}

/// A line outside of fenced blocks, with its number.
pub(crate) type Line<'d> = (usize, &'d str);

impl Document {
    /// Reads a document.
    pub(crate) fn read(path: &str) -> Self {
        let text = fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        Self { path: path.to_owned(), text }
    }

    /// README and docs/, without docs/internals/.
    pub(crate) fn guides() -> Vec<Self> {
        let all = Self::all().into_iter();
        all.filter(|document| match document.path.strip_prefix("docs/") {
            Some(name) => !name.contains('/'),
            None => document.path == "README.md",
        })
        .collect()
    }

    /// The guides, and other documents with commands.
    pub(crate) fn with_commands() -> Vec<Self> {
        let mut documents = Self::guides();
        documents.push(Self::read("bench/README.md"));
        documents
    }

    /// Every document of the repository.
    pub(crate) fn all() -> Vec<Self> {
        let mut paths = Vec::new();
        find("", &mut paths);
        paths.sort();
        assert!(paths.len() > 5, "{paths:?}");
        paths.iter().map(|path| Self::read(path)).collect()
    }

    /// Lines in fenced blocks and outside of them.
    fn split(&self) -> (Vec<Block>, Vec<Line<'_>>) {
        let (mut blocks, mut lines) = (Vec::new(), Vec::new());
        let mut open: Option<(usize, Block)> = None;
        for (index, line) in self.text.lines().enumerate() {
            let indent = line.len() - line.trim_start().len();
            match (line.trim_start().strip_prefix("```"), &mut open) {
                (Some(language), None) => {
                    let place = format!("{}:{}", self.path, index + 2);
                    let language = language.to_owned();
                    open = Some((indent, Block { place, language, lines: Vec::new() }));
                }
                (Some(_), Some(_)) => blocks.extend(open.take().map(|(_, block)| block)),
                (None, Some((indent, block))) => {
                    block.lines.push(line.get(*indent..).unwrap_or_default().to_owned());
                }
                (None, None) => lines.push((index + 1, line)),
            }
        }
        assert!(open.is_none(), "{}: a block does not end", self.path);
        (blocks, lines)
    }

    /// Its fenced blocks in these languages.
    pub(crate) fn blocks(&self, languages: &[&str]) -> Vec<Block> {
        let mut blocks = self.split().0;
        blocks.retain(|block| languages.contains(&block.language.as_str()));
        blocks
    }

    /// The lines outside fenced blocks.
    pub(crate) fn prose(&self) -> Vec<Line<'_>> {
        self.split().1
    }

    /// The cells of the tables under a heading, without the lines of dashes.
    pub(crate) fn rows(&self, heading: &str) -> Vec<Vec<String>> {
        let prose = self.prose();
        let under = prose.iter().skip_while(|(_, line)| *line != heading).skip(1);
        let rows = under.take_while(|(_, line)| !line.starts_with('#')).map(|(_, line)| *line);
        rows.filter(|line| line.starts_with('|') && !line.starts_with("| ---")).map(cells).collect()
    }
}

/// Cells of a row of a table.
pub(crate) fn cells(line: &str) -> Vec<String> {
    let line = line.trim().trim_start_matches('|').trim_end_matches('|');
    line.split('|').map(|cell| cell.trim().to_owned()).collect()
}

/// The texts between backticks.
pub(crate) fn code_spans(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// A line without the texts between backticks.
pub(crate) fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Documents below a directory. Names of build and git directories begin with a dot.
fn find(directory: &str, paths: &mut Vec<String>) {
    for entry in fs::read_dir(root().join(directory)).expect("a directory").flatten() {
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        let path = if directory.is_empty() { name.clone() } else { format!("{directory}/{name}") };
        if name.starts_with('.') {
        } else if entry.file_type().expect("a type").is_dir() {
            find(&path, paths);
        } else if name.ends_with(".md") {
            paths.push(path);
        }
    }
}
