//! The texts that the programs can print, from their sources.

use std::fs;
use std::path::Path;

use crate::markdown::root;

/// A text with placeholders and fewer fixed characters proves nothing.
const FIXED_MIN: usize = 10;

/// String literals, each as the pieces between its placeholders.
pub(crate) struct Literals(Vec<Vec<String>>);

impl Literals {
    /// The literals of the programs.
    pub(crate) fn collect() -> Self {
        let mut literals = Vec::new();
        for directory in [
            "config",
            "fabric/src",
            "initiator/src",
            "operate/src",
            "protocol/src",
            "runtime/src",
            "cli/src",
            "target/src",
        ] {
            read(&root().join(directory), &mut literals);
        }
        assert!(literals.len() > 1000, "only {} literals were found", literals.len());
        Self(literals.iter().map(|literal| fixed(literal)).collect())
    }

    /// Whether a program can print this: a literal with its placeholders filled, or several of them
    /// with a colon between, as errors and their causes are printed.
    pub(crate) fn can_print(&self, text: &str) -> bool {
        self.0.iter().any(|fixed| fills(fixed, text))
            || text.match_indices(": ").any(|(at, _)| {
                let (before, after) = (&text[..at], &text[at + 2..]);
                self.0.iter().any(|fixed| fills(fixed, before)) && self.can_print(after)
            })
    }

    /// Whether a log line can begin with this message, followed by fields.
    pub(crate) fn can_log(&self, text: &str) -> bool {
        let ends = text.match_indices(' ').map(|(at, _)| at).chain([text.len()]);
        ends.rev().any(|end| {
            let is_field = |word: &str| word.contains('=') || word.ends_with([']', '"']);
            text[end..].split_whitespace().all(is_field)
                && self.0.iter().any(|fixed| fills(fixed, &text[..end]))
        })
    }

    /// Whether a literal contains this text.
    pub(crate) fn contain(&self, text: &str) -> bool {
        self.0.iter().flatten().any(|fixed| fixed.contains(text))
    }
}

/// Whether a text is a literal with its placeholders filled.
fn fills(fixed: &[String], text: &str) -> bool {
    let [first, middle @ .., last] = fixed else {
        return fixed.first().is_some_and(|only| only == text);
    };
    if fixed.iter().map(String::len).sum::<usize>() < FIXED_MIN {
        return false;
    }
    let Some(mut rest) = text.strip_prefix(first.as_str()) else { return false };
    for piece in middle {
        match rest.find(piece.as_str()) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last.as_str())
}

/// The pieces between the placeholders of a format string, without empty lines around it.
fn fixed(literal: &str) -> Vec<String> {
    let mut pieces = vec![String::new()];
    let mut chars = literal.trim_matches('\n').chars().peekable();
    while let Some(c) = chars.next() {
        if matches!(c, '{' | '}') && chars.next_if_eq(&c).is_none() {
            while chars.next().is_some_and(|c| c != '}') {}
            pieces.push(String::new());
        } else if let Some(piece) = pieces.last_mut() {
            piece.push(c);
        }
    }
    pieces
}

fn read(directory: &Path, literals: &mut Vec<String>) {
    for entry in fs::read_dir(directory).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            read(&path, literals);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            in_source(&fs::read_to_string(&path).expect("a source"), literals);
        }
    }
}

/// Appends the string literals of a source, except raw ones.
fn in_source(source: &str, literals: &mut Vec<String>) {
    let mut rest = source;
    while let Some(at) = rest.find(['"', '/', '\'']) {
        let tail = &rest[at..];
        rest = if tail.starts_with("//") {
            &tail[tail.find('\n').unwrap_or(tail.len())..]
        } else if tail.starts_with('"') && rest[..at].ends_with("r#") {
            tail.split_once("\"#").map_or("", |(_, after)| after)
        } else if let Some(text) = tail.strip_prefix('"') {
            let (literal, after) = quoted(text);
            literals.push(literal);
            after
        } else {
            let char_literal = ["'\"'", "'\\\"'", "'/'", "'\\''"];
            let of = char_literal.into_iter().find(|literal| tail.starts_with(literal));
            &tail[of.map_or(1, str::len)..]
        };
    }
}

/// A literal after its first quote, and the rest.
fn quoted(text: &str) -> (String, &str) {
    let mut literal = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (literal, &text[at + 1..]),
            '\\' => match chars.next() {
                Some((_, 'n')) => literal.push('\n'),
                Some((_, '\n')) => {
                    let rest = chars.as_str().trim_start();
                    let skipped = chars.as_str().len() - rest.len();
                    for _ in 0..skipped {
                        chars.next();
                    }
                }
                Some((_, escaped)) => literal.push(escaped),
                None => {}
            },
            c => literal.push(c),
        }
    }
    (literal, "")
}

#[test]
fn the_literals_of_a_source_are_found() {
    let source = r#"
        // "a remark" with a quote: "
        let c = '"';
        println!("{}: ok, {} blocks of {} bytes", a, b, c);
        #[error("`{name}` is mounted already; \
                 see {{this}}")]
        "serving by a device"
    "#;
    let mut found = Vec::new();
    in_source(source, &mut found);
    assert_eq!(found.len(), 3, "{found:?}");
    let literals = Literals(found.iter().map(|literal| fixed(literal)).collect());
    assert!(literals.can_print("vol0: ok, 4 blocks of 512 bytes"));
    assert!(!literals.can_print("vol0: okay, 4 blocks of 512 bytes"));
    assert!(literals.can_print("`v` is mounted already; see {this}"));
    assert!(literals.can_print("serving by a device: `v` is mounted already; see {this}"));
    assert!(literals.can_log("serving by a device device=\"rxe0\" transport=RoCE"));
    assert!(!literals.can_log("serving by a disk device=\"rxe0\""));
    assert!(literals.contain(" is mounted already; see"));
    assert!(!literals.contain("is mounted since"));
}
