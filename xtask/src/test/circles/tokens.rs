//! [`paths`]: the paths of modules and items that a source file names.
//!
//! This reads only what paths need: words, `::`, braces and commas. Comments, strings and code
//! under `#[cfg(test)] mod` are left out. What a macro writes is not seen.

/// A path of a file, such as `crate::a::B`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    /// Its words; the last one is `*` for all names of a module.
    pub(super) words: Vec<String>,
    /// The name that a `use` gives to it in this file; none where the path is used in place.
    pub(super) imported_as: Option<String>,
}

/// The paths of a file: those of its `use` declarations, and those in its code that begin with
/// `crate`, `super` or `self`.
pub(super) fn paths(text: &str) -> Vec<Named> {
    let tokens = without_tests(&tokens(text));
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let is_use = tokens[at] == "use";
        let start = at + usize::from(is_use);
        let is_path =
            matches!(tokens.get(start).map(String::as_str), Some("crate" | "super" | "self"))
                && tokens.get(start + 1).is_some_and(|token| token == "::");
        if is_use || is_path {
            at = tree(&tokens, start, &[], is_use, &mut found).max(at + 1);
        } else {
            at += 1;
        }
    }
    found
}

/// Reads one path from `at`, with all its branches. Returns where it ends.
fn tree(
    tokens: &[String],
    mut at: usize,
    before: &[String],
    is_use: bool,
    found: &mut Vec<Named>,
) -> usize {
    let mut words = before.to_vec();
    let mut name = None;
    while let Some(token) = tokens.get(at) {
        match token.as_str() {
            "{" if is_use => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token != "}") {
                    let next = tree(tokens, at, &words, true, found);
                    at = next.max(at + 1);
                    if tokens.get(at).is_some_and(|token| token == ",") {
                        at += 1;
                    }
                }
                return at + 1;
            }
            "as" => {
                name = tokens.get(at + 1).cloned();
                at += 2;
            }
            "::" => at += 1,
            word if is_word(word) => {
                words.push(word.to_owned());
                at += 1;
                if tokens.get(at).is_none_or(|token| token != "::" && token != "as") {
                    break;
                }
            }
            _ => break,
        }
    }
    // `use a::{self}` names `a`.
    if words.len() > 1 && words.last().is_some_and(|word| word == "self") {
        words.pop();
    }
    if words.len() > before.len().saturating_sub(1) && !words.is_empty() {
        let imported_as = is_use.then(|| name.or_else(|| words.last().cloned())).flatten();
        found.push(Named { words, imported_as });
    }
    at
}

fn is_word(token: &str) -> bool {
    token == "*" || token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Leaves out `#[cfg(test)] mod name { .. }`.
fn without_tests(tokens: &[String]) -> Vec<String> {
    const TEST: [&str; 8] = ["#", "[", "cfg", "(", "test", ")", "]", "mod"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let is_test = tokens[at..].iter().zip(TEST).filter(|(token, word)| token == word).count();
        if is_test == TEST.len() {
            at += TEST.len() + 1;
            at = if tokens.get(at).is_some_and(|token| token == "{") {
                after_block(tokens, at)
            } else {
                at + 1
            };
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

fn after_block(tokens: &[String], mut at: usize) -> usize {
    let mut depth = 0_usize;
    while let Some(token) = tokens.get(at) {
        at += 1;
        match token.as_str() {
            "{" => depth += 1,
            "}" if depth <= 1 => return at,
            "}" => depth -= 1,
            _ => {}
        }
    }
    at
}

/// Words, `::` and single characters, without comments, strings and lifetimes.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => block_comment(rest),
            '"' => string(rest),
            'r' | 'b' | 'c' if raw_string(rest).is_some() => raw_string(rest).unwrap_or(1),
            '\'' => character(rest),
            c if c.is_alphabetic() || c == '_' => {
                let len = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                let len = len.unwrap_or(rest.len());
                tokens.push(rest[..len].to_owned());
                len
            }
            c if c.is_ascii_digit() => {
                rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
            }
            ':' if rest.starts_with("::") => {
                tokens.push("::".to_owned());
                2
            }
            c if c.is_whitespace() => c.len_utf8(),
            c => {
                tokens.push(c.to_string());
                c.len_utf8()
            }
        };
        rest = &rest[len..];
    }
    tokens
}

fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

fn string(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !is_escaped => return at + 1,
            '\\' => is_escaped = !is_escaped,
            _ => is_escaped = false,
        }
    }
    text.len()
}

/// The length of `r".."`, `br#".."#` and the like.
fn raw_string(text: &str) -> Option<usize> {
    let prefix = ["r", "br", "cr"].into_iter().find(|prefix| {
        let rest = text.strip_prefix(prefix).map(|rest| rest.trim_start_matches('#'));
        rest.is_some_and(|rest| rest.starts_with('"'))
    })?;
    let hashes = text[prefix.len()..].chars().take_while(|c| *c == '#').count();
    let start = prefix.len() + hashes + 1;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(text[start..].find(&end).map_or(text.len(), |at| start + at + end.len()))
}

/// The length of a character, or of the quote of a lifetime.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((at, c))) => {
            let after = at + c.len_utf8();
            text[after..].find('\'').map_or(text.len(), |end| after + end + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        paths(text).into_iter().map(|path| path.words.join("::")).collect()
    }

    #[test]
    fn every_branch_of_a_use_is_a_path() {
        let text = "pub(crate) use crate::a::{self, B, c::{D as E, f::*}};\nuse std::io;";
        let found = ["crate::a", "crate::a::B", "crate::a::c::D", "crate::a::c::f::*", "std::io"];
        assert_eq!(words(text), found);
        let named: Vec<_> = paths(text).into_iter().filter_map(|path| path.imported_as).collect();
        assert_eq!(named, ["a", "B", "E", "*", "io"]);
    }

    #[test]
    fn paths_in_code_are_found_and_those_in_comments_are_not() {
        let text = r##"
            // crate::comment::A
            /* crate::outer /* crate::inner */ crate::outer */
            fn f<'a>(x: &'a super::x::X) -> char { crate::y::g("crate::text", r#"crate::raw"#); '"' }
            pub(super) const Z: self::z::Z = 'x';
            #[cfg(test)]
            mod tests { use super::*; fn t() { crate::only_in_tests(); } }
            use crate::after::After;
        "##;
        assert_eq!(
            words(text),
            ["super::x::X", "crate::y::g", "self::z::Z", "crate::after::After"]
        );
    }

    #[test]
    fn a_text_that_ends_early_ends_the_reading() {
        for text in
            ["use crate::{a, b", "use", "crate::", "\"open", "r#\"open", "/* open", "'", "'\\"]
        {
            let _ = paths(text);
        }
    }
}
