//! Words of comments that say little: "what", who-words, and pronouns at the begin of a line.

use super::Source;

const WHAT: [&str; 2] = ["what", "whatever"];
const WHO: [&str; 7] = ["who", "whom", "whose", "whoever", "nobody", "somebody", "everybody"];
const BEGINS: [&str; 3] = ["It", "They", "The same"];

/// How often the words stand in 1000 lines of comments.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rates {
    pub(super) what: usize,
    pub(super) who: usize,
    pub(super) it: usize,
}

impl Rates {
    pub(super) fn of(sources: &[Source]) -> Self {
        let (mut lines, mut what, mut who, mut it) = (0_usize, 0, 0, 0);
        for text in sources.iter().flat_map(|source| source.text.lines()).filter_map(comment) {
            lines += 1;
            what += count(text, &WHAT);
            who += count(text, &WHO);
            it += usize::from(begins(text));
        }
        let rate = |count: usize| (1000 * count + lines / 2) / lines.max(1);
        Self { what: rate(what), who: rate(who), it: rate(it) }
    }
}

/// The words of a line that is a comment alone.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start();
    text.starts_with("//").then(|| text.trim_start_matches(['/', '!', ' ']))
}

fn count(text: &str, words: &[&str]) -> usize {
    let all = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    all.filter(|word| words.iter().any(|known| word.eq_ignore_ascii_case(known))).count()
}

fn begins(text: &str) -> bool {
    let is_end = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    BEGINS.iter().any(|word| text.strip_prefix(word).is_some_and(is_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_comments_are_counted() {
        let text =
            "/// What is read, and whatever\n// The same.\nlet what = 1;\n//! who whole\n// Item\n";
        let source = Source { path: "a.rs".into(), text: text.to_owned() };
        assert_eq!(Rates::of(&[source]), Rates { what: 500, who: 250, it: 250 });
        assert_eq!(Rates::of(&[]), Rates { what: 0, who: 0, it: 0 });
    }
}
