//! How many tests passed and failed, from what libtest prints.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// A sum over libtest's results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    /// Tests that passed.
    pub(crate) passed: u64,
    /// Tests that failed, and steps that failed without a test to blame.
    pub(crate) failed: u64,
    /// Tests that were ignored.
    pub(crate) ignored: u64,
    /// Lines of libtest with a result: one per test binary.
    pub(crate) results: u64,
}

impl Count {
    /// Adds another's.
    pub(crate) fn add(&mut self, other: Count) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.results += other.results;
    }

    /// The counts of one line of output; nothing if it is not a result of libtest's.
    fn of_line(line: &str) -> Option<Self> {
        // With --nocapture, what a test printed without a line's end may stand before it.
        let at = line.find("test result: ")?;
        let (_, numbers) = line[at..].split_once(". ")?;
        let number = |name: &str| {
            let found = numbers.split(';').find_map(|part| part.trim().strip_suffix(name));
            found.and_then(|text| text.trim().parse().ok())
        };
        Some(Count {
            passed: number("passed")?,
            failed: number("failed")?,
            ignored: number("ignored")?,
            results: 1,
        })
    }
}

/// Passes output on and counts what libtest says in it.
#[derive(Debug)]
pub(crate) struct Tally<W> {
    to: W,
    line: Vec<u8>,
    count: Arc<Mutex<Count>>,
}

impl<W: Write> Tally<W> {
    /// Passes on to `to` and adds to `count`.
    pub(crate) fn new(to: W, count: Arc<Mutex<Count>>) -> Self {
        Tally { to, line: Vec::new(), count }
    }

    fn end_line(&mut self) {
        if let Some(more) = Count::of_line(&String::from_utf8_lossy(&self.line)) {
            self.count.lock().unwrap_or_else(PoisonError::into_inner).add(more);
        }
        self.line.clear();
    }
}

impl<W: Write> Write for Tally<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write_all(bytes)?;
        for &byte in bytes {
            match byte {
                b'\n' => self.end_line(),
                // A line that never ends must not fill the memory.
                _ if self.line.len() < 4096 => self.line.push(byte),
                _ => {}
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str, cut: usize) -> Count {
        let count = Arc::default();
        let mut tally = Tally::new(Vec::new(), Arc::clone(&count));
        text.as_bytes().chunks(cut).for_each(|part| tally.write_all(part).unwrap());
        assert_eq!(tally.to, text.as_bytes());
        *count.lock().unwrap()
    }

    #[test]
    fn results_are_summed_however_they_are_cut() {
        let text = "\
running 3 tests
test a ... ok
test b ... ignored
test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.00s

dots...test result: FAILED. 2 passed; 5 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.20s
";
        for cut in 1..text.len() {
            assert_eq!(
                count(text, cut),
                Count { passed: 14, failed: 5, ignored: 1, results: 2 },
                "{cut}"
            );
        }
    }

    #[test]
    fn other_words_do_not_count() {
        for text in
            ["test result: ok\n", "a test result: is. none\n", "99 passed; 0 failed\n", "\n"]
        {
            assert_eq!(count(text, 7), Count::default(), "{text}");
        }
    }
}
